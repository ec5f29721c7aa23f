"""What a GRPO run of verl logs, as pseudo-random data of the same keys, types and sizes: metrics, generations, traces.

The numbers that decide how well it compresses: about 110 metrics a step, of which two fifths are new doubles every step, a
fifth are ints, and the rest repeat or never change. `single=True` rounds what verl reads from float32 tensors (losses, scores, lengths) to
float32, as `.item()` does; without it every measured value is a full double, the harder case.
"""

import math
import random
import struct
from collections.abc import Iterator
from typing import Any

WORDS = [
    "let",
    "us",
    "compute",
    "the",
    "total",
    "price",
    "so",
    "we",
    "first",
    "add",
    "seven",
    "and",
    "twelve",
    "then",
    "subtract",
    "what",
    "was",
    "already",
    "paid",
]
ROLLOUTS = 4
"""Of one prompt."""

CONSTANTS = {
    "actor/kl_coef": 0.001, "actor/lr": 1e-6, "actor/pg_clipfrac_lower": 0.0,
    "actor/perf/max_memory_allocated_gb": 61.2, "actor/perf/max_memory_reserved_gb": 70.9,
    "response/aborted_ratio": 0.0, "prompt_length/clip_ratio": 0.0,
    "rollout_corr/training_ppl": 1.6, "rollout_corr/rollout_ppl": 1.61, "rollout_corr/chi2_token": 0.012,
    "rollout_corr/chi2_seq": 0.6, "rollout_corr/log_ppl_diff": 0.003, "training/rollout_probs_diff_valid": 1.0,
    "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0,
}  # fmt: skip
CONSTANT_INTS = {
    f"training/off_policy/{name}/{what}": int(name == "trajectory_spans")
    for name in ("trajectory_spans", "trajectory_staleness", "trajectory_staleness_worst")
    for what in ("mean", "max", "min")
}
TENSORS = {  # name: (mean, spread)
    "actor/pg_loss": (0, 0.02), "actor/pg_clipfrac": (0.002, 0.001), "actor/ppo_kl": (0, 2e-4), "actor/entropy": (0.4, 0.02),
    "actor/kl_loss": (0.002, 1e-4), "actor/grad_norm": (0.25, 0.05), "critic/score/mean": (0.5, 0.03),
    "critic/advantages/mean": (0, 0.01), "critic/advantages/max": (2.5, 0.05),
    "critic/advantages/min": (-2.5, 0.05), "training/rollout_probs_diff_max": (0.4, 0.1),
    "training/rollout_probs_diff_mean": (0.004, 5e-4), "training/rollout_probs_diff_std": (0.011, 1e-3),
    "training/rollout_actor_probs_pearson_corr": (0.9993, 1e-4), "rollout_corr/kl": (4e-4, 1e-4),
    "rollout_corr/k3_kl": (5e-4, 1e-4),
}  # fmt: skip
TIMES = {
    "gen": 60, "reward": 0.4, "old_log_prob": 9.5, "ref": 9.1, "adv": 0.06, "update_actor": 38, "update_weights": 3.2,
}  # fmt: skip


def metrics(rng: random.Random, step: int, *, single: bool = False) -> dict[str, float | int]:
    """One step's metrics; each fifth step carries those of validation too, and one in a hundred has no finite score."""

    def tensor(value: float) -> float:
        return struct.unpack("f", struct.pack("f", value))[0] if single else value

    found: dict[str, float | int] = {"training/global_step": step, "training/epoch": step // 58}
    found |= CONSTANTS | CONSTANT_INTS
    found |= {name: tensor(rng.gauss(mean, spread)) for name, (mean, spread) in TENSORS.items()}
    found["critic/rewards/mean"] = found["critic/score/mean"]  # GRPO without a KL term in the reward
    found |= {f"critic/returns/{what}": found[f"critic/advantages/{what}"] for what in ("mean", "max", "min")}
    length = 900 * (1 + 0.6 * (1 - math.exp(-step / 120))) + rng.gauss(0, 20)
    for prefix in ("response_length", "response_length_non_aborted"):
        shape = {"mean": length, "max": min(8192.0, length * 1.8), "min": max(1.0, length * 0.2), "clip_ratio": 0.01}
        found |= {f"{prefix}/{what}": tensor(value) for what, value in shape.items()}
    found |= {
        "prompt_length/mean": tensor(180 + rng.gauss(0, 3)),
        "prompt_length/max": 280.0,
        "prompt_length/min": 80.0,
    }
    turns = 4 + rng.random()
    for prefix in ("num_turns", "training/num_turns"):
        found |= {f"{prefix}/min": 2, f"{prefix}/max": math.ceil(turns + 2), f"{prefix}/mean": turns}
    tokens = int(1024 * (180 + length))
    shares = sorted(int(rng.gauss(tokens / 8, tokens / 400)) for _ in range(8))
    even = sum(shares) // 8
    found |= {
        "global_seqlen/min": shares[0], "global_seqlen/max": shares[-1],
        "global_seqlen/minmax_diff": shares[-1] - shares[0], "global_seqlen/mean": sum(shares) / 8,
        "global_seqlen/balanced_min": even, "global_seqlen/balanced_max": even + 1,
    }  # fmt: skip
    times = {name: mean * (1 + rng.gauss(0, 0.03)) for name, mean in TIMES.items()}
    times["step"] = sum(times.values()) + 1.5
    found |= {f"timing_s/{name}": value for name, value in times.items()}
    for name, mean in {"generate_sequences": 36.0, "tool_calls": 1.8, "compute_score": 0.02}.items():
        value = mean * (1 + rng.gauss(0, 0.1))
        found |= {
            f"timing_s/agent_loop/{name}/{what}": value * by for what, by in (("min", 0.1), ("max", 1.6), ("mean", 0.7))
        }
    slowest = {"generate_sequences": 57.0, "tool_calls": 4.1, "prompt_length": 211, "response_length": 8192}
    found |= {f"timing_s/agent_loop/slowest/{name}": value for name, value in slowest.items()}
    found |= {f"timing_s/agent_loop/num_preempted/{what}": 0.0 for what in ("min", "max", "mean")}
    found |= {
        f"timing_per_token_ms/{name}": times[name] * 1000 / tokens for name in ("gen", "ref", "adv", "update_actor")
    }
    found |= {"perf/mfu/actor": 0.31 + rng.gauss(0, 0.01), "perf/mfu/actor_infer": 0.42 + rng.gauss(0, 0.01)}
    found |= {"perf/total_num_tokens": tokens, "perf/time_per_step": times["step"]}
    found |= {"perf/throughput": tokens / times["step"] / 8, "perf/cpu_memory_used_gb": 121 + rng.gauss(0, 1)}
    if step % 5 == 0:
        found |= validation(rng, step) | {"timing_s/testing": 24 + rng.gauss(0, 1)}
    if rng.random() < 0.01:  # a batch whose samples were all aborted
        found |= {name: math.nan for name in found if name.startswith(("critic/score", "critic/rewards"))}
    return found


def validation(rng: random.Random, step: int) -> dict[str, float | int]:
    reached = 0.3 + 0.5 * (1 - math.exp(-step / 120)) + rng.gauss(0, 0.01)
    found: dict[str, float | int] = {}
    for variable in ("reward", "acc"):
        place = f"{'val-core' if variable == 'acc' else 'val-aux'}/openai/gsm8k/{variable}"
        found |= {f"{place}/mean@4": reached, f"{place}/std@4": 0.2}
        for samples in (2, 4):
            for how, by in (("best", 0.08), ("worst", -0.08), ("maj", 0.03)):
                found |= {f"{place}/{how}@{samples}/mean": reached + by * samples, f"{place}/{how}@{samples}/std": 0.1}
    return found


def generations(rng: random.Random, rows: int = 10) -> list[dict[str, Any]]:
    return [
        {"input": text(rng, 120), "output": text(rng, rng.randint(80, 1500)), "score": float(rng.random() < 0.6)}
        for _ in range(rows)
    ]


def text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, tokens * 3 // 4)))


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(151_000) for _ in range(count)]


class Call:
    """One span of a trajectory, as a rollout makes it: what went in and came out, and the calls inside it."""

    def __init__(self, name: str, kind: str, inputs: Any, outputs: Any, calls: "list[Call] | None" = None) -> None:
        self.name, self.kind, self.inputs, self.outputs, self.calls = name, kind, inputs, outputs, calls or []


def trajectory(rng: random.Random) -> Call:
    """An agent's turns: each sends the whole context, gets tokens, log-probabilities and text, and may call a tool."""
    prompt = token_ids(rng, rng.randint(80, 260))
    context, mask, calls = list(prompt), [], []
    for turn in range(turns := rng.choice((1, 2, 2, 3, 4, 6))):
        reply = token_ids(rng, rng.randint(60, 500))
        sent = {"prompt_ids": list(context), "sampling_params": {"temperature": 1.0, "top_p": 1.0, "logprobs": True}}
        got = {"token_ids": reply, "log_probs": [-rng.random() for _ in reply], "stop_reason": "completed"}
        got |= {"prompt_text": text(rng, len(context)), "response_text": text(rng, len(reply))}
        calls.append(Call("LLMServerClient.generate", "LLM", sent, got))
        context += reply
        mask += [1] * len(reply)
        if turn < turns - 1:
            calls.append(Call("CalculatorTool.execute", "TOOL", {"expr": "7+12"}, [{"text": "19"}, 0.0, {"ok": True}]))
            seen = token_ids(rng, rng.randint(10, 120))
            context += seen
            mask += [0] * len(seen)
    answer = {
        "prompt_ids": prompt,
        "response_ids": context[len(prompt) :],
        "response_mask": mask,
        "num_turns": 2 * turns,
    }
    answer |= {"response_logprobs": [-rng.random() for _ in mask], "response_text": text(rng, len(mask))}
    asked = {"raw_prompt": [{"role": "user", "content": text(rng, len(prompt))}], "data_source": "openai/gsm8k"}
    return Call("agent_loop", "AGENT", {}, None, [Call("ToolAgentLoop.run", "CHAIN", asked, answer, calls)])


def all_calls(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.calls:
        yield from all_calls(inner)
