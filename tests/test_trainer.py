"""The trainer: its mathematics by hand, its loop for real, its learning, its kills.

The processes here are `python -m trainer` as a user starts it; what it recorded is read back through `spool.open`.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import spool

torch = pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("omegaconf")

from hypothesis import given  # noqa: E402 - what the trainer needs may be absent, and then nothing below is imported
from hypothesis import strategies as st  # noqa: E402

from trainer import algo, config, tokenizer  # noqa: E402
from trainer.agent_loop import STOP_TOKENS, Prompt, ToolAgent, Trajectory, no_span  # noqa: E402
from trainer.checkpoint import CheckpointError, Checkpoints  # noqa: E402
from trainer.data import DataError, load_data, load_problems  # noqa: E402
from trainer.decoder import BatchDecoder  # noqa: E402
from trainer.loop import fit, generation_row, with_mask  # noqa: E402
from trainer.model import TinyGPT  # noqa: E402
from trainer.rollout import sampled_groups  # noqa: E402
from trainer.tasks import Problem, chained_problems, demonstration, reward  # noqa: E402
from trainer.tools import Calculator, ToolError, evaluate  # noqa: E402
from trainer.workers import split_groups  # noqa: E402

GSM8K = Path(__file__).parent / "data" / "gsm8k" / "test-20.jsonl"
LOCAL = "actor_rollout_ref.rollout.agent.num_workers=0"
SMALL = ["trainer.warmup_steps=5", "data.train_batch_size=4", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4"]


# --- tokenizer


@given(st.text(alphabet=[chr(code) for code in range(32, 127)] + ["\n"]))
def test_text_of_known_characters_survives_the_tokenizer(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_every_text_can_be_encoded_and_keeps_its_length(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert all(0 <= token < tokenizer.VOCABULARY_SIZE for token in tokens)


def test_an_unknown_character_is_decoded_as_the_replacement_character() -> None:
    assert tokenizer.decode(tokenizer.encode("3 €")) == "3 \N{REPLACEMENT CHARACTER}"


# --- tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-7-3", "-10"),
        ("7--3", "10"),
        ("1/4", "0.25"),
        ("9/3", "3"),
    ],
)
def test_the_calculator_knows_precedence_signs_and_fractions(expression: str, value: str) -> None:
    assert Calculator(0.0, random.Random(0))(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1+", "(1", "1)", "a", "2**3", "__import__('os')", "1 2", "1" * 65, "9" * 64 + "x"]
)
def test_what_is_not_arithmetic_is_a_syntax_error(expression: str) -> None:
    with pytest.raises(ToolError, match="syntax"):
        evaluate(expression)


def test_division_by_zero_is_an_error_of_the_tool() -> None:
    with pytest.raises(ToolError, match="division by zero"):
        evaluate("1/(2-2)")


def test_the_failure_rate_is_the_share_of_calls_that_fail() -> None:
    def fails(calculator: Calculator) -> bool:
        try:
            calculator("1+1")
        except ToolError as error:
            return str(error) == "busy"
        return False

    calculator = Calculator(0.25, random.Random(0))
    assert 200 < sum(fails(calculator) for _ in range(1000)) < 300


# --- tasks and data


def test_training_and_validation_and_warm_up_have_no_problem_in_common() -> None:
    problems = load_data([], [], 200, 100, 16, seed=3)
    prompts = [one.prompt for one in [*problems.train, *problems.validation, *islice(problems.more, 500)]]
    assert len(prompts) == len(set(prompts)) == 800


def test_the_answer_of_a_built_in_problem_is_the_value_of_its_prompt() -> None:
    for problem in islice(chained_problems(random.Random(5)), 200):
        assert str(evaluate(problem.prompt.removesuffix("=?"))) == problem.answer


@pytest.mark.parametrize(
    ("text", "score", "accuracy"),
    [
        ("<<1+2=3>>#3", 1.0, 1.0),
        ("#4", 0.1, 0.0),
        ("3", 0.0, 0.0),
        ("#3x", 0.0, 0.0),
        ("#### 1,003", 0.1, 0.0),
        ("#3.0", 1.0, 1.0),
    ],
)
def test_the_reward_is_for_the_final_answer(text: str, score: float, accuracy: float) -> None:
    result = reward(text, "3")
    assert (result.score, result.accuracy) == (score, accuracy)


def test_demonstrations_are_sloppy_enough_to_leave_something_to_learn() -> None:
    rng = random.Random(0)
    scores = []
    for problem in islice(chained_problems(random.Random(0)), 2000):
        text = "".join(part for part, _ in demonstration(problem, rng))
        scores.append(reward(text, problem.answer).accuracy)
    assert 0.15 < sum(scores) / len(scores) < 0.3


def test_gsm8k_rows_are_read_with_the_number_behind_the_hashes() -> None:
    problems = load_problems(str(GSM8K))
    assert len(problems) == 20
    assert problems[0].prompt.startswith("Janet\N{RIGHT SINGLE QUOTATION MARK}s ducks lay 16 eggs per day.")
    assert [problem.answer for problem in problems[:3]] == ["18", "3", "70000"]


def test_parquet_and_jsonl_give_the_same_problems(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "test-20.parquet")
    assert load_problems(str(tmp_path / "test-20.parquet")) == load_problems(str(GSM8K))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.jsonl", '{"question": "x"}', "row 1 has no text"),
        ("a.jsonl", "", "holds no problems"),
        ("a.parquet", "x", "not a Parquet file"),
    ],
)
def test_a_file_that_holds_no_problems_is_refused_by_name(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}: .*{message}"):
        load_problems(str(tmp_path / name))


# --- algo, against numbers computed by hand


def test_group_advantages_are_relative_to_the_group() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    std = math.sqrt(4 * 0.25 / 3)
    expected = [[0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], [0.0, 0.0, 0.0, 0.0]]
    assert torch.allclose(algo.group_advantages(scores, divide_by_std=True), torch.tensor(expected), atol=1e-5)
    assert algo.group_advantages(scores, divide_by_std=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_compares_with_the_others_of_the_group() -> None:
    advantages = algo.leave_one_out_advantages(torch.tensor([[3.0, 0.0, 0.0]]))
    assert torch.allclose(advantages, torch.tensor([[3.0, -1.5, -1.5]]))


def test_the_policy_loss_clips_what_goes_too_far_in_the_rewarded_direction() -> None:
    ratios = torch.tensor([[1.5, 0.5, 1.5, 1.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    result = algo.clipped_policy_loss(ratios.log(), torch.zeros(1, 4), advantages, mask, 0.2, 0.3)
    assert result.loss.item() == pytest.approx((-1.3 - 0.5 + 1.5) / 3)
    assert result.clipped_fraction.item() == pytest.approx(1 / 3)
    assert result.kl.item() == pytest.approx(-(math.log(1.5) + math.log(0.5) + math.log(1.5)) / 3)


def test_both_kl_estimates_are_right_for_a_known_ratio() -> None:
    log_probs, reference = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    assert algo.kl_penalty(log_probs, reference, "kl").item() == pytest.approx(math.log(2))
    assert algo.kl_penalty(log_probs, reference, "low_var_kl").item() == pytest.approx(0.5 + math.log(2) - 1)


def test_log_probs_and_entropy_of_a_known_distribution() -> None:
    logits = torch.tensor([[[math.log(3.0), 0.0]]])  # probabilities 3/4 and 1/4
    log_probs, entropy = algo.log_probs_and_entropy(logits, torch.tensor([[1]]))
    assert log_probs.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


# --- model, decoder, agent loop


@pytest.fixture
def model() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(tokenizer.VOCABULARY_SIZE, layers=2, heads=2, width=16).eval()


def rolled_out(
    model: TinyGPT, prompts: list[str], length: int, failure_rate: float = 0.0, turns: int = 9
) -> list[Trajectory]:
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    decoder = BatchDecoder(model, tokens, STOP_TOKENS, length, 1.0, torch.Generator().manual_seed(0))
    runs = []
    for row, prompt in enumerate(prompts):
        calculator = Calculator(failure_rate, random.Random(row))
        agent = ToolAgent(decoder, row, calculator, turns, no_span, trace_text=True)
        runs.append(agent.run(Prompt(Problem(prompt, "3", "test"), row, 0), tokens[row]))
    return asyncio.run(decoder.run(runs))


def test_decoding_with_cache_and_padding_gives_the_logits_of_training(model: TinyGPT) -> None:
    short, long = tokenizer.encode("12"), tokenizer.encode("(1+2)*3=")
    padded = [tokenizer.PAD] * (len(long) - len(short)) + short
    visible = torch.tensor([[token != tokenizer.PAD for token in padded], [True] * len(long)])
    cache = model.new_cache(visible, capacity=len(long) + 1)
    model(torch.tensor([padded, long]), cache)
    cache.keep(torch.tensor([0]))
    cached = model(torch.tensor([[7]]), cache)[0, -1]
    assert torch.allclose(cached, model(torch.tensor([[*short, 7]]))[0, -1], atol=1e-5)


def test_the_rest_of_the_batch_does_not_change_greedy_decoding(model: TinyGPT) -> None:
    async def decoded(prompts: list[str]) -> list[int]:
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        decoder = BatchDecoder(model, tokens, STOP_TOKENS, 20, 0.0, torch.Generator())

        async def one(row: int) -> list[int]:
            return (await decoder.generate(row, tokenizer.encode("ab"))).sampled

        return (await decoder.run([one(row) for row in range(len(prompts))]))[0]

    assert asyncio.run(decoded(["1+1"])) == asyncio.run(decoded(["1+1", "(11+22)*33=?", "7", "12345"]))


def test_tokens_of_the_tool_have_mask_0_and_those_of_the_policy_mask_1(model: TinyGPT) -> None:
    """An untrained policy writes anything; its stop token `=` makes it a call wherever `<<` stands before it."""
    with torch.no_grad():
        for character in "<=1":  # likely enough that calls happen
            model.embedding.weight[tokenizer.encode(character)[0]] *= 3
    trajectories = rolled_out(model, ["(1+2)*3=?"] * 200, length=60, failure_rate=0.5)
    called = [one for one in trajectories if one.tool_calls]
    assert called, "no trajectory made a call: the test shows nothing"
    for one in trajectories:
        assert len(one.response_mask) == len(one.response_tokens) <= 60
        forced = tokenizer.decode([t for t, m in zip(one.response_tokens, one.response_mask, strict=True) if m == 0])
        answers = forced.split(">>")
        assert len(answers) - 1 in (one.tool_calls, one.tool_calls - 1)  # the last answer may not have fitted
        assert forced.count("error: ") >= one.tool_errors - 1
        assert with_mask(one) == (one.prompt_tokens + one.response_tokens, [0] * 9 + one.response_mask)
        assert one.turns <= 2 * 9


def test_a_trajectory_ends_at_the_turn_limit(model: TinyGPT) -> None:
    trajectories = rolled_out(model, ["1+1=?"] * 100, length=60, turns=1)
    assert all(one.turns <= 2 for one in trajectories)
    assert all(len(one.response_tokens) == 60 or one.response_tokens[-1] in STOP_TOKENS for one in trajectories)


def test_traced_groups_are_the_same_in_every_attempt() -> None:
    chosen = sampled_groups([3, 3, 4, 5, 5], "1/7/False", 2)
    assert chosen == sampled_groups([5, 4, 3], "1/7/False", 2)
    assert len(chosen) == 2
    assert len({frozenset(sampled_groups(range(50), f"1/{step}/False", 2)) for step in range(20)}) > 10


def test_workers_get_whole_groups() -> None:
    problem = Problem("1+1=?", "2", "test")
    prompts = [Prompt(problem, index, rollout) for index in (7, 8, 9) for rollout in range(4)]
    shares = split_groups(prompts, 2)
    assert [prompt for share in shares for prompt in share] == prompts
    assert [{prompt.sample_index for prompt in share} for share in shares] == [{7, 8}, {9}]
    assert split_groups(prompts[:4], 3) == [prompts[:4], [], []]


def test_the_recorded_prompt_is_the_original_text() -> None:
    problem = Problem("3 € und 4 ½", "3", "gsm8k")
    row = generation_row(Trajectory(Prompt(problem, 4, 1), tokenizer.encode(problem.prompt), text="#3", score=1.0))
    assert (row["input"], row["output"], row["label"], row["score"]) == ("3 € und 4 ½", "#3", "3", 1.0)


# --- config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_epoch=2", "did you mean 'trainer.total_epochs'"),
        ("optim.lr=1e-3", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
        ("algorithm.batch_size=2", "the key is data.train_batch_size"),
        ("training.batch_size=2", "the key is data.train_batch_size"),
        ("training.epochs=3", "the key is trainer.total_epochs"),
        ("algorithm.lambda_=0.9", "the key is algorithm.lam"),
        ("algorithm.name=grpo", "the key is algorithm.adv_estimator"),
        ("trainer.log_frequency=10", "leave the key out"),
        ("swanlab_config.save_code=true", "spool-sync"),
        ("trainer.logger=wandb", "record with spool and replay afterwards with `spool-sync`"),
        ("nonsense.of.a.key=1", "python -m trainer --help"),
        ("trainer=3", "is a section"),
        ("trainer.total_epochs=many", "trainer.total_epochs must be an integer, not 'many'"),
        ("trainer.total_epochs=1.5", "must be an integer, not 1.5"),
        ("trainer.val_before_train=1", "must be true or false"),
        ("data.train_batch_size=0", "must be at least 1"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "must be at least 0"),
        ("data.seed=null", "not null"),
        ("data.train_files=[a", "written as in YAML"),
        ("trainer.total_epochs", "write key=value"),
        ("actor_rollout_ref.model.num_attention_heads=3", "even multiple"),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_sentence(override: str, message: str) -> None:
    with pytest.raises(config.ConfigError, match=message.replace("(", r"\(")) as caught:
        config.load(None, [override])
    assert "\n" not in str(caught.value)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("trainer:\n  total_epochs: 3\n  logger: console\nactor_rollout_ref.actor.optim.lr: 1e-3\n")
    loaded = config.load(str(file), ["trainer.total_epochs=4", "data.train_files=a.parquet"])
    assert loaded.trainer.total_epochs == 4
    assert loaded.trainer.logger == ["console"]
    assert loaded.actor_rollout_ref.actor.optim.lr == 1e-3
    assert loaded.data.train_files == ["a.parquet"]
    assert loaded.data.seed == config.Config().data.seed


def trainer_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def run_trainer(folder: Path, *arguments: str, before: list[str] | None = None) -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    command = [*(before or []), *trainer_command(*arguments)]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)


def environment(folder: Path) -> dict[str, str]:
    root = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": str(root), "TRAINER_LEDGER": str(folder / "ledger")}


def only_run(folder: Path) -> Any:
    (run,) = spool.open(folder / "spool-data").runs()
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm.lambda_=0.9"], "algorithm.lam"),
        (["--config", "missing.yaml"], "missing.yaml: no such file"),
        (["--verbose"], "unknown option"),
        (["data.train_files=missing.parquet", LOCAL], "missing.parquet: no such file"),
        (["trainer.default_local_dir=/proc/nowhere", LOCAL], "/proc/nowhere: cannot hold checkpoints"),
    ],
)
def test_a_user_error_is_one_sentence_exit_1_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run_trainer(tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "spool-data").exists()


def test_a_spool_folder_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "spool-data").write_text("a file")
    done = run_trainer(tmp_path, LOCAL)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "spool-data" in done.stderr


def test_help_lists_every_key_with_its_default(tmp_path: Path) -> None:
    done = run_trainer(tmp_path, "--help")
    assert done.returncode == 0
    for name in list(config.keys()):
        assert f"  {name}=" in done.stdout


# --- checkpoints


def test_a_checkpoint_that_was_not_finished_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(5, {"value": 5})
    (tmp_path / ".global_step_10.partial").mkdir()
    (tmp_path / ".global_step_10.partial" / "state.pt").write_bytes(b"half of it")
    assert checkpoints.latest_step() == 5
    checkpoints.save(10, {"value": 10})
    assert (checkpoints.latest_step(), checkpoints.load(10)) == (10, {"value": 10})
    assert checkpoints.load(5) == {"value": 5}


def test_killed_before_the_pointer_moved_the_older_checkpoint_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(5, {"value": 5})
    checkpoints.save(10, {"value": 10})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert checkpoints.latest_step() == 5
    checkpoints.save(10, {"value": 11})
    assert checkpoints.load(10) == {"value": 11}


def test_deleted_checkpoints_mean_a_start_from_step_0(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(5, {"value": 5})
    shutil.rmtree(tmp_path / "global_step_5")
    assert checkpoints.latest_step() is None


def test_a_damaged_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(5, {"value": 5})
    (tmp_path / "global_step_5" / "state.pt").write_bytes(b"PK damaged")
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        checkpoints.load(5)


def test_starting_anew_forgets_run_and_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(5, {"value": 5})
    checkpoints.begin_run("20261201T000000Z-grpo-abc123")
    checkpoints.forget()
    assert (checkpoints.latest_step(), checkpoints.run_id()) == (None, None)


# --- whole runs


def ledger_entries(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in (folder / "ledger").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def missing_from_spool(folder: Path) -> list[Any]:
    """Return what the ledger lists and the spool does not hold."""
    run = only_run(folder)
    metrics = {
        (row["key"], row["step"], math.inf if row["value"] is None or math.isnan(row["value"]) else row["value"])
        for row in run.metrics().to_pylist()
    }
    spans = {row["span_id"] for row in run.spans().to_pylist() if row["end"] is not None}
    generations = {(row["step"], row["index"], row["input"], row["output"]) for row in run.generations().to_pylist()}
    missing: list[Any] = []
    for entry in ledger_entries(folder):
        if entry["kind"] == "metrics":
            for key, text in entry["values"].items():
                value = float.fromhex(text) if isinstance(text, str) else float(text)
                fact = (key, entry["step"], math.inf if math.isnan(value) else value)
                missing += [] if fact in metrics else [fact]
        elif entry["kind"] == "span":
            missing += [] if entry["span_id"] in spans else [entry]
        else:
            fact = (entry["step"], entry["index"], entry["input"], entry["output"])
            missing += [] if fact in generations else [fact]
    return missing


def metric_steps(run: Any, key: str) -> list[int]:
    return sorted(row["step"] for row in run.metrics().to_pylist() if row["key"] == key)


def session_members(session: int) -> list[int]:
    """Return the processes of a session: of a trainer started in its own, all of Ray's daemons and actors too."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def killed_after(folder: Path, line: str, *arguments: str) -> None:
    """Start the trainer and SIGKILL it when it has printed a line that begins with `line`."""
    folder.mkdir(exist_ok=True)
    trainer = subprocess.Popen(
        trainer_command(*arguments),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    assert any(printed.startswith(line) for printed in trainer.stdout), f"the trainer ended before {line!r}"
    for pid in session_members(trainer.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    trainer.stdout.close()


def test_a_killed_run_resumes_as_the_next_attempt_and_ends_with_the_weights_it_would_have_had(tmp_path: Path) -> None:
    arguments = [*SMALL, LOCAL, "trainer.total_training_steps=7", "trainer.save_freq=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_trainer(whole, *arguments).returncode == 0
    killed_after(killed, "step 5: score", *arguments)
    assert missing_from_spool(killed) == []
    done = run_trainer(killed, *arguments)
    assert (done.returncode, "resumed from step 3" in done.stdout) == (0, True)
    run = only_run(killed)
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
    assert run.status().state == "finished"
    assert missing_from_spool(killed) == []
    assert set(metric_steps(run, "critic/score/mean")) == set(range(1, 8))
    states = [
        torch.load(folder / "checkpoints/chained_arithmetic/grpo/global_step_7/state.pt") for folder in (whole, killed)
    ]
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name]), name


def test_killed_before_the_first_checkpoint_the_same_run_starts_again_from_step_0(tmp_path: Path) -> None:
    arguments = [*SMALL, LOCAL, "trainer.total_training_steps=1"]
    killed_after(tmp_path, "warm-up:", *arguments, "trainer.warmup_steps=100000")
    assert not list((tmp_path / "checkpoints").rglob("state.pt"))
    assert run_trainer(tmp_path, *arguments).returncode == 0
    run = only_run(tmp_path)
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
    assert metric_steps(run, "critic/score/mean") == [1]
    done = run_trainer(tmp_path, *arguments)
    assert (done.returncode, "already at step 1" in done.stdout) == (0, True)
    assert len(only_run(tmp_path).attempts()) == 2


def test_word_problems_pass_as_validation_and_are_recorded_as_they_are(tmp_path: Path) -> None:
    done = run_trainer(
        tmp_path,
        *SMALL,
        LOCAL,
        "trainer.total_training_steps=1",
        f"data.val_files={GSM8K}",
        "trainer.log_val_generations=20",
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    rows = [row for row in run.generations().to_pylist() if row["step"] == 0]
    originals = [json.loads(line)["question"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert [row["input"] for row in rows] == originals[:8]
    assert metric_steps(run, "val-core/test-20/acc/mean@1") == [0, 1]


def test_ray_actors_write_their_own_traces_into_the_run_without_a_network(
    tmp_path: Path, without_network: list[str]
) -> None:
    before = [*without_network, "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$0" "$@"'] if without_network else []
    done = run_trainer(tmp_path, *SMALL, "trainer.total_training_steps=2", "trainer.warmup_steps=50", before=before)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert [writer.is_lead for writer in run.writers()] == [True, False, False]
    assert run.status().state == "finished"
    assert missing_from_spool(tmp_path) == []
    spans = run.spans().to_pylist()
    roots = {row["span_id"]: row for row in spans if row["name"] == "agent_loop"}
    assert {row["writer_id"] for row in spans} == {writer.id for writer in run.writers() if not writer.is_lead}
    assert {row["parent_id"] for row in spans if row["name"] == "ToolAgentLoop.generate"} == set(roots)
    for row in roots.values():
        assert row["sample_index"] is not None
        assert (row["step"], row["validate"]) in {(0, True), (1, False), (2, False), (2, True)}
    groups: dict[tuple[int, int], set[int]] = {}
    for row in roots.values():
        if not row["validate"]:
            groups.setdefault((row["step"], row["sample_index"]), set()).add(row["rollout_n"])
    assert list(groups.values()) == [{0, 1, 2, 3}] * 4  # 2 steps, 2 workers, one whole group each


@pytest.mark.slow
def test_a_run_killed_with_all_its_actors_loses_nothing_and_resumes(tmp_path: Path) -> None:
    arguments = [
        *SMALL,
        "trainer.total_training_steps=20",
        "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=2",
    ]
    killed_after(tmp_path, "step 12: score", *arguments)
    assert missing_from_spool(tmp_path) == []
    done = run_trainer(tmp_path, *arguments)
    assert (done.returncode, "resumed from step 10" in done.stdout) == (0, True), done.stderr
    run = only_run(tmp_path)
    assert [(writer.attempt.split("-")[0], writer.is_lead) for writer in run.writers()] == [
        ("1", True),
        ("1", False),
        ("1", False),
        ("2", True),
        ("2", False),
        ("2", False),
    ]
    assert missing_from_spool(tmp_path) == []
    assert set(metric_steps(run, "critic/score/mean")) == set(range(1, 21))
    assert run.status().state == "finished"


# --- learning


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A whole training with the default configuration, but in this process."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


def train(folder: Path, *overrides: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOOL_DIR", str(folder / "spool-data"))
        patch.chdir(folder)
        fit(config.load(None, [LOCAL, "data.val_max_samples=128", *overrides]))


def validation_accuracy(folder: Path) -> dict[int, float]:
    rows = only_run(folder).metrics().to_pylist()
    return {row["step"]: row["value"] for row in rows if row["key"] == "val-core/chained_arithmetic/acc/mean@1"}


def test_validation_accuracy_rises_from_below_035_to_above_08(trained: Path) -> None:
    accuracy = validation_accuracy(trained)
    assert accuracy[0] < 0.35
    assert accuracy[max(accuracy)] > 0.8


def test_without_advantages_nothing_is_learned(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same warmed-up policy, through the same steps, with the one thing missing that GRPO learns from."""
    folder = tmp_path / "checkpoints/chained_arithmetic/grpo"
    shutil.copytree(trained / "checkpoints/chained_arithmetic/grpo/global_step_0", folder / "global_step_0")
    (folder / "latest_checkpointed_iteration.txt").write_text("0")
    monkeypatch.setattr(algo, "group_advantages", lambda scores, *_: torch.zeros_like(scores))
    train(tmp_path)
    assert max(validation_accuracy(tmp_path).values()) < 0.4
