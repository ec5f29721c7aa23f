"""Replay into real MLflow: a SQLite database through MLflow's store, and a real `mlflow server` over HTTP."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import syncing
from syncing import ROOT, Result, query, record, stored_metrics, sync

from spool import claim, format

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed: pip install 'spool-sync[mlflow]'", allow_module_level=True)

SMALL = """
run = spool.init(project="math", experiment="grpo", config={"trainer": {"steps": 3, "logger": ["console", "spool"]}, "lr": 1e-3})
for at, step in enumerate((0, 1, 2, 1)):
    run.log({"critic/score/mean": at / 3, "tiny": 5e-324 * at, "actor/kl": 0.1 + at}, step=step)
run.log({"actor/loss": math.nan, "reward/max": math.inf, "count": 7, "is_good": True}, step=2)
run.log({"epoch": 1.5})
for step, split in ((1, "val"), (2, "val"), (2, "train")):
    rows = [{"input": f"{i}+1", "output": "答 \\u00e9", "score": i / 2, "label": "2", "source": "gsm8k"} for i in range(3)]
    run.log_generations(step=step, rows=rows, split=split)
for sample in range(3):
    with run.span("rollout", type="AGENT", step=5, sample_index=sample, rollout_n=0, validate=True, inputs={"q": "6*7"}) as root:
        with run.span("calculator", type="TOOL", inputs={"expr": "6*7"}) as tool:
            tool.outputs = 42
        root.outputs = {"answer": [42, 1.5, None, True, 2**70]}
run.log_histogram("grad/layer0", [0.1, 0.2, 0.2], step=1)
run.tag(stage="rl")
"""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, made once: its migrations take seconds."""
    folder = tmp_path_factory.mktemp("empty")
    statement = f"from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as S; S('sqlite:///{folder}/mlflow.db', './mlruns')"
    environment = {**os.environ, "HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run([sys.executable, "-c", statement], cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "mlflow.db"


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path) -> Path:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    (tmp_path / "home").mkdir()
    return tmp_path


@pytest.fixture(scope="session")
def small_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("small"), SMALL + "run.finish()")


def copy(spool: Path, folder: Path) -> Path:
    return Path(shutil.copytree(spool, folder / "spool-data"))


def delivered(result: Result) -> None:
    assert result.code == 0, result.out + result.err


class Server:
    """A real `mlflow server` on a free port of this machine, with its own database and artifacts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        command += [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination",
            str(self.folder / "artifacts"),
        ]
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
        }
        with (self.folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                assert time.monotonic() < until, "the server does not come up"
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    server = Server(folder)
    server.start()
    yield server
    server.stop()


# --- what arrives


def test_everything_recorded_is_in_mlflow_value_by_value_and_the_table_says_so(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    result = sync(folder, "--json")
    delivered(result)
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")
    counts = {name: (table["recorded"], table["delivered"], table["held"]) for name, table in result.tables.items()}
    assert counts == {"metrics": (17, 17, 17), "generations": (9, 9, 9), "events": (4, 4, 4), "spans": (6, 6, 6)}
    [(name, experiment, status, start, end)] = query(
        folder / "mlflow.db",
        "select r.name, e.name, r.status, r.start_time, r.end_time from runs r join experiments e using (experiment_id)",
    )
    records = syncing.records(spool)
    created_ns = json.loads(next(spool.glob("*/run.json")).read_text())["created_ns"]
    finish = next(one for one in records if one.get("event") == "finish")
    assert (name, experiment, status) == ("grpo", "math", "FINISHED")
    assert (start, end) == (created_ns // 1_000_000, finish["ts"] // 1_000_000)
    assert dict(query(folder / "mlflow.db", "select key, value from params")) == {
        "trainer/steps": "3",
        "trainer/logger/list_len": "2",
        "trainer/logger/0": "console",
        "trainer/logger/1": "spool",
        "lr": "0.001",
    }
    tags = dict(query(folder / "mlflow.db", "select key, value from tags"))
    assert tags["stage"] == "rl"
    assert tags["spool.inf.reward/max"].startswith("inf at step")
    tables = [one["path"] for one in json.loads(tags["mlflow.loggedArtifacts"])]
    assert tables == [
        "generations/val/step_000001.json",
        "generations/train/step_000002.json",
        "generations/val/step_000002.json",
    ]


def test_a_second_sync_adds_nothing_with_or_without_its_cursor_file(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder))
    again = sync(folder, "--json")
    delivered(again)
    assert all(table["already_there"] == table["recorded"] for table in again.tables.values())
    shutil.rmtree(spool / ".sync")
    delivered(sync(folder))
    [cursor] = spool.glob(".sync/mlflow/*.json")
    cursor.write_bytes(b"{")
    broken = sync(folder)
    delivered(broken)
    assert "unreadable cursor" in broken.out
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


def test_over_http_the_same_arrives_and_traces_are_found_by_their_tags_on_both(
    folder: Path, small_spool: Path, server: Server
) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder, uri=server.uri))
    delivered(sync(folder, uri=server.uri))
    syncing.assert_equal(spool, server.folder / "mlflow.db", server.folder / "artifacts")
    delivered(sync(folder))
    columns = "key, value, timestamp, step, is_nan"
    assert query(folder / "mlflow.db", f"select {columns} from metrics order by 1, 3, 4, 2") == query(
        server.folder / "mlflow.db", f"select {columns} from metrics order by 1, 3, 4, 2"
    )
    content = "select content from spans order by span_id"
    assert query(folder / "mlflow.db", content) == query(server.folder / "mlflow.db", content)
    program = """
import json, sys, mlflow
for uri in sys.argv[1:]:
    mlflow.set_tracking_uri(uri)
    [experiment] = [one.experiment_id for one in mlflow.search_experiments(filter_string="name = 'math'")]
    traces = mlflow.search_traces(locations=[experiment], filter_string="tags.step = '5'", return_type="list")
    [run] = mlflow.search_runs([experiment], output_format="list")
    of_run = mlflow.search_traces(locations=[experiment], run_id=run.info.run_id, return_type="list")
    roots = [next(span for span in trace.data.spans if span.parent_id is None) for trace in traces]
    tags = [[trace.info.tags[key] for key in ("sample_index", "rollout_n", "validate", "experiment_name")] for trace in traces]
    print(json.dumps([len(of_run), sorted(tags), [[one.span_type, one.inputs, one.outputs] for one in roots]]))
"""
    environment = {**os.environ, "HOME": str(folder / "home"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", program, server.uri, f"sqlite:///{folder}/mlflow.db"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == answers[1]
    assert answers[0] == [
        3,
        [[str(i), "0", "True", "grpo"] for i in range(3)],
        [["AGENT", {"q": "6*7"}, {"answer": [42, 1.5, None, True, str(2**70)]}]] * 3,
    ]


def test_texts_and_exact_numbers_are_kept_beside_the_metrics(folder: Path) -> None:
    source = """
from decimal import Decimal
with spool.init(project="p", experiment="e") as run:
    run.log({"note": "started", "big": 2**60 + 1, "price": Decimal("0.1"), "nothing": None, "low": -math.inf}, step=3)
"""
    record(folder, source)
    result = sync(folder, "--json")
    delivered(result)
    assert result.tables["metrics"] | {"held": 5, "recorded": 5} == result.tables["metrics"]
    [path] = folder.glob("mlruns/*/*/artifacts/spool/metrics/*/*.json")
    document = json.loads(path.read_text())
    rows = {row[0]: row[1:5] for row in document["data"]}
    assert rows == {
        "note": [3, "started", None, "text"],
        "big": [3, str(2**60 + 1), float(2**60), "int"],
        "price": [3, "0.1", 0.1, "decimal"],
        "nothing": [3, None, None, "null"],
        "low": [3, None, "-Infinity", "float"],
    }
    assert {key for key, *_ in stored_metrics(folder / "mlflow.db")} == {"big", "price", "low"}


def test_keys_that_collide_in_mlflow_are_kept_apart_and_reported_whoever_is_synced_first(folder: Path) -> None:
    source = """
with spool.init(project="p", experiment="e") as run:
    run.log({"acc/mean@4": 0.25, "acc/mean_at_4": 0.5, "a//b": 1.0, "a/b": 2.0, "x" * 300: 3.0, "损失": 4.0}, step=1)
"""
    spool = record(folder, source)
    result = sync(folder)
    delivered(result)
    values = {key: value for key, value, _, _ in stored_metrics(folder / "mlflow.db")}
    assert values["acc/mean_at_4"] == 0.25
    assert values["a/b"] == 1.0
    assert values["损失"] == 4.0
    assert sorted(values.values()) == [0.25, 0.5, 1.0, 2.0, 3.0, 4.0]
    assert "'acc/mean_at_4' is called 'acc/mean_at_4_" in result.out
    shutil.rmtree(spool / ".sync")
    delivered(sync(folder))
    assert {key: value for key, value, _, _ in stored_metrics(folder / "mlflow.db")} == values


def test_rows_mlflow_cannot_tell_apart_are_counted(folder: Path) -> None:
    source = """
import time
time.time_ns = lambda: 1_700_000_000_000_000_000
with spool.init(project="p", experiment="e") as run:
    for value in (1.0, 1.0, 2.0, math.nan, math.nan, -0.0, 0.0):
        run.log({"loss": value}, step=1)
"""
    record(folder, source)
    result = sync(folder, "--json")
    delivered(result)
    assert (result.tables["metrics"]["indistinct"], result.tables["metrics"]["held"]) == (3, 4)
    assert "3 of 7 metrics repeat an earlier one" in sync(folder).out


def test_long_params_are_cut_and_kept_whole_as_config_json(folder: Path) -> None:
    record(
        folder, "spool.init(project='p', experiment='e', config={'prompt': 'x' * 7000, 'a@b': {'c': None}}).finish()"
    )
    delivered(sync(folder))
    delivered(sync(folder))
    params = dict(query(folder / "mlflow.db", "select key, value from params"))
    assert params == {"prompt": "x" * 6000, "a_at_b/c": "None"}
    [config] = folder.glob("mlruns/*/*/artifacts/config.json")
    assert json.loads(config.read_text()) == {"prompt": "x" * 7000, "a@b": {"c": None}}


def test_saved_files_arrive_and_two_contents_of_one_name_both_do(folder: Path) -> None:
    source = """
from pathlib import Path
with spool.init(project="p", experiment="e") as run:
    for text in ("first", "second"):
        Path("config.yaml").write_text(text)
        run.save("config.yaml")
"""
    record(folder, source)
    delivered(sync(folder))
    delivered(sync(folder))
    files = sorted(path.read_text() for path in folder.glob("mlruns/*/*/artifacts/files/*"))
    assert files == ["first", "second"]


def test_writers_of_one_run_synced_half_here_and_half_there_end_in_one_whole(folder: Path) -> None:
    source = (
        """
import subprocess, sys
run = spool.init(project="p", experiment="e")
run.log({"loss": 1.0}, step=1)
run.log_generations(step=1, rows=[{"input": "lead", "output": "x"}], split="val")
child = """
        + repr("""
import spool
run = spool.init()
run.log({"loss": 2.0, "acc@1": 1.0}, step=1)
run.log_generations(step=1, rows=[{"input": "worker", "output": "y"}], split="val")
with run.span("tool", type="TOOL", step=1): pass
run.finish()
""")
        + """
subprocess.run([sys.executable, "-c", child], check=True)
run.finish()
"""
    )
    spool = record(folder, source)
    [run] = [path.parent for path in spool.glob("*/run.json")]
    lead, worker = sorted(
        (path for path in run.iterdir() if path.is_dir()),
        key=lambda path: '"lead":true' not in next(path.glob("*.jsonl")).read_text(),
    )
    for machine, left_out in (("a", worker), ("b", lead), ("c", None)):
        part = folder / machine
        part.mkdir()
        ignore = shutil.ignore_patterns(left_out.name, ".sync") if left_out else shutil.ignore_patterns(".sync")
        shutil.copytree(spool, part / "spool-data", ignore=ignore)
        result = sync(folder, str(part / "spool-data"))
        assert result.code in ({0, 3} if left_out else {0}), result.out + result.err
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns", names={"acc@1": "acc_at_1"})


def test_mlflow_reads_the_generation_tables_as_its_own(folder: Path, small_spool: Path) -> None:
    copy(small_spool, folder)
    delivered(sync(folder))
    program = "import mlflow; print(len(mlflow.load_table('generations/val/step_000001.json')), mlflow.search_experiments()[0].name)"
    program = f"import mlflow; mlflow.set_experiment('math'); {program}"
    environment = {**os.environ, "HOME": str(folder / "home"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "math"]


# --- runs that go on, end, and are killed


def test_a_run_still_being_written_stays_open_and_a_step_synced_in_two_halves_ends_whole(folder: Path) -> None:
    first = """
run = spool.init(project="p", experiment="e", run_id="live")
run.log_generations(step=1, rows=[{"input": "a", "output": "b"}], split="val")
ended = run.span("ended", step=1).start(); ended.end()
run.span("open", step=1).start()
import subprocess, sys
spool_sync = "import sys; sys.path.insert(0, sys.argv[1]); import syncing, pathlib; r = syncing.sync(pathlib.Path('.'), '--json'); print(r.out)"
done = subprocess.run([sys.executable, "-c", spool_sync, sys.argv[1]], capture_output=True, text=True)
print(done.stdout, done.stderr)
"""
    helper = (
        first
        + "\nrun.log_generations(step=1, rows=[{'input': 'c', 'output': 'd'}], split='val'); os.kill(os.getpid(), 9)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    environment |= {"SPOOL_DIR": str(folder / "spool-data"), "PYTHONPATH": str(syncing.ROOT)}
    program = f"import math, os, sys, spool\n{helper}"
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False)
    while_live = json.loads((folder / "out").read_text())["runs"][0]
    assert while_live["status"] == "running"
    assert (
        while_live["tables"]["spans"] | {"recorded": 2, "delivered": 1, "waiting": 1} == while_live["tables"]["spans"]
    )
    delivered(sync(folder))
    assert [row[3] for row in syncing.stored_generations(folder / "mlruns")] == ["a", "c"]
    assert query(folder / "mlflow.db", "select status from runs") == [("FAILED",)]
    [(status, content)] = query(folder / "mlflow.db", "select status, content from spans where name = 'open'")
    assert status == "ERROR"
    assert json.loads(content)["status"]["message"] == "the process ended before the span did"
    assert json.loads(content)["attributes"]["spool.open"] == "true"
    record(folder, "spool.init(project='p', run_id='live', resume=True, config={'lr': 2}).finish()")
    delivered(sync(folder))
    assert query(folder / "mlflow.db", "select status from runs") == [("FINISHED",)]
    assert ("spool.attempts", "2") in query(folder / "mlflow.db", "select key, value from tags")


def test_a_machine_that_cannot_know_leaves_the_status_that_another_has_proven(folder: Path) -> None:
    spool = record(folder, "spool.init(project='p', run_id='r').log({'a': 1.0}); os._exit(1)", expect=1)
    delivered(sync(folder))
    assert query(folder / "mlflow.db", "select status from runs") == [("FAILED",)]
    [journal] = spool.glob("*/*/000001.jsonl")
    header, rest = journal.read_bytes().split(b"\n", 1)
    elsewhere = re.sub(rb'"boot":"[^"]*"', b'"boot":"of another machine"', header)[: -format.CRC_LENGTH]
    journal.write_bytes(b'%b,"crc":"%08x"}\n%b' % (elsewhere, format.crc32c(elsewhere), rest))
    result = sync(folder)
    delivered(result)
    assert "spool seal" in result.out
    assert query(folder / "mlflow.db", "select status from runs") == [("FAILED",)]


def test_a_finish_closes_the_run_with_its_status(folder: Path) -> None:
    record(
        folder,
        "for one in ('finished', 'failed', 'preempted', 'killed'): spool.init(project='p', experiment=one).finish(one)",
    )
    delivered(sync(folder))
    assert dict(query(folder / "mlflow.db", "select name, status from runs")) == {
        "finished": "FINISHED",
        "failed": "FAILED",
        "preempted": "KILLED",
        "killed": "KILLED",
    }


def _kill_and_repeat(folder: Path, small_spool: Path, after: int) -> bool:
    """One kill, then two whole syncs; False when there were fewer writes than that."""
    spool = copy(small_spool, folder)
    killed = sync(folder, kill_after=after)
    if killed.code != -signal.SIGKILL:
        delivered(killed)
        return False
    for _ in range(2):
        result = sync(folder, "--json")
        delivered(result)
        assert not any(table["lost"] for table in result.tables.values()), "the cursor came before the data"
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")
    return True


@pytest.mark.parametrize("after", [2, 4, 11])
def test_a_kill_after_any_remote_write_loses_nothing_and_doubles_nothing(
    folder: Path, small_spool: Path, after: int
) -> None:
    assert _kill_and_repeat(folder, small_spool, after)


@pytest.mark.slow
def test_a_kill_after_each_remote_write_in_turn_loses_nothing_and_doubles_nothing(
    tmp_path: Path, empty_database: Path, small_spool: Path
) -> None:
    after = 1
    while True:
        folder = tmp_path / str(after)
        (folder / "home").mkdir(parents=True)
        shutil.copy(empty_database, folder / "mlflow.db")
        if not _kill_and_repeat(folder, small_spool, after):
            break
        after += 1
    assert after > 15


@pytest.mark.slow
def test_over_http_too_a_kill_after_each_remote_write_loses_nothing(
    tmp_path: Path, empty_database: Path, small_spool: Path
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    server = Server(tmp_path)
    server.start()
    try:
        spool = copy(small_spool, tmp_path)
        killed = [sync(tmp_path, uri=server.uri, kill_after=after).code for after in (1, 1, 1, 2, 1, 1, 2, 3, 1, 1, 2)]
        assert killed.count(-signal.SIGKILL) >= 8
        delivered(sync(tmp_path, uri=server.uri))
        delivered(sync(tmp_path, uri=server.uri))
    finally:
        server.stop()
    syncing.assert_equal(spool, tmp_path / "mlflow.db", tmp_path / "artifacts")


def test_a_run_without_any_record_is_delivered_as_a_run(folder: Path) -> None:
    spool = record(folder, "spool.init(project='p', experiment='e').finish()")
    for path in spool.glob("*/*/"):
        shutil.rmtree(path)
    delivered(sync(folder))
    assert query(folder / "mlflow.db", "select name, status from runs") == [("e", "RUNNING")]


# --- a damaged spool, a spool that cannot be written


def test_of_a_damaged_spool_everything_undamaged_is_delivered_and_the_place_is_told(folder: Path) -> None:
    source = "run = spool.init(project='p', experiment='e')\nfor at in range(9): run.log({'loss': at + 0.5}, step=at)\nos.kill(os.getpid(), 9)"
    spool = record(folder, source, expect=-signal.SIGKILL)
    [journal] = spool.glob("*/*/*.jsonl")
    content = journal.read_bytes()
    at = content.index(b'"loss":4.5')
    journal.write_bytes(content.replace(b'"loss":4.5', b'"loss":4.6') + b'{"seq":11,"ts":17')
    result = sync(folder, "--json")
    assert result.code == 3
    [damage] = json.loads(result.out)["runs"][0]["damage"]
    start = content.rindex(b"\n", 0, at) + 1
    assert str(journal) in damage or journal.name in damage
    assert str(start) in damage
    assert sorted(value for _, value, *_ in stored_metrics(folder / "mlflow.db")) == [
        0.5,
        1.5,
        2.5,
        3.5,
        5.5,
        6.5,
        7.5,
        8.5,
    ]


THREE_JOURNALS = """
run = spool.init(project='p', experiment='e', durability='os')
for at in range(9):
    run.log({'loss': at + 0.5}, step=at)
    if at in (2, 5): run._writer._rotate()
os.kill(os.getpid(), 9)"""


def test_of_an_incomplete_copy_the_rest_is_delivered_and_what_is_fetched_later_too(folder: Path) -> None:
    spool = record(folder, THREE_JOURNALS, expect=-signal.SIGKILL)
    [middle] = spool.glob("*/*/000002.jsonl")
    middle.rename(folder / "left behind")
    result = sync(folder, "--json")
    [run] = json.loads(result.out)["runs"]
    assert result.code == 3
    assert [line.split(" (")[0] for line in run["damage"]] == [
        f"incomplete copy: fetch {middle.relative_to(spool).with_suffix('')}: a journal or its segment"
    ]
    there = [0.5, 1.5, 2.5, 6.5, 7.5, 8.5]
    assert sorted(value for _, value, *_ in stored_metrics(folder / "mlflow.db")) == there
    assert sync(folder).code == 3
    assert sorted(value for _, value, *_ in stored_metrics(folder / "mlflow.db")) == there
    (folder / "left behind").rename(middle)
    delivered(sync(folder))
    assert sorted(value for _, value, *_ in stored_metrics(folder / "mlflow.db")) == [at + 0.5 for at in range(9)]


def test_damage_that_was_accepted_does_not_hold_up_a_sync(folder: Path) -> None:
    spool = record(folder, THREE_JOURNALS, expect=-signal.SIGKILL)
    [middle] = spool.glob("*/*/000002.jsonl")
    middle.unlink()
    assert sync(folder).code == 3
    accepting = subprocess.run(
        [sys.executable, "-m", "spool.cli", "verify", str(spool), "--accept"], cwd=syncing.ROOT, check=False
    )
    assert accepting.returncode == 0
    delivered(sync(folder))
    [cursor] = [json.loads(path.read_bytes()) for path in spool.glob(".sync/mlflow/*.json")]
    [reached] = cursor["delivered"].values()
    assert reached["metrics"] == 10


def test_where_the_cursor_cannot_be_kept_all_is_delivered_all_the_same(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    (spool / ".sync").write_text("a file where the folder should be")
    result = sync(folder)
    delivered(result)
    assert "--state-dir" in result.out
    delivered(sync(folder, "--state-dir", str(folder / "state")))
    assert list((folder / "state").glob("mlflow/*.json"))
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


# --- what MLflow refuses or has lost


def test_a_rejected_value_is_set_aside_with_its_place_and_the_rest_arrives(folder: Path) -> None:
    source = """
import time
run = spool.init(project="p", experiment="e")
for step in range(20):
    run.log({"good": step, "also": step}, step=step)
now, time.time_ns = time.time_ns, lambda: -5_000_000
run.log({"before 1970": 1.0}, step=20)
time.time_ns = now
run.log({"good": 21}, step=21)
run.finish()
"""
    record(folder, source)
    result = sync(folder, "--json")
    assert result.code == 3, result.out + result.err
    assert (
        result.tables["metrics"] | {"recorded": 42, "delivered": 41, "rejected": 1, "held": 41}
        == result.tables["metrics"]
    )
    [rejection] = json.loads(result.out)["runs"][0]["rejections"]
    assert "22/before 1970" in rejection
    assert "timestamp" in rejection.lower()
    again = sync(folder)
    assert again.code == 3
    assert "22/before 1970" in again.out


def test_what_mlflow_has_lost_is_found_missing_and_sent_again(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder))
    connection = sqlite3.connect(folder / "mlflow.db")
    with connection:
        connection.execute("delete from metrics where step = 2")
        connection.execute("delete from spans where name = 'calculator'")
        connection.execute("delete from entity_associations")
    connection.close()
    [table] = folder.glob("mlruns/*/*/artifacts/generations/val/step_000001.json")
    table.write_text(table.read_text()[:50])
    result = sync(folder, "--json")
    delivered(result)
    assert (result.tables["metrics"]["delivered"], result.tables["metrics"]["lost"]) == (7, 7)
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


def test_a_deleted_run_is_not_revived_and_the_message_says_how(folder: Path, small_spool: Path) -> None:
    copy(small_spool, folder)
    delivered(sync(folder))
    connection = sqlite3.connect(folder / "mlflow.db")
    with connection:
        connection.execute("update runs set lifecycle_stage = 'deleted'")
    connection.close()
    result = sync(folder)
    assert result.code == 4
    assert "mlflow runs restore --run-id" in result.out
    assert query(folder / "mlflow.db", "select count(*) from runs") == [(1,)]


def test_again_replays_a_deleted_run_into_a_new_one(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder))
    connection = sqlite3.connect(folder / "mlflow.db")
    with connection:
        connection.execute("update runs set lifecycle_stage = 'deleted'")
    connection.close()
    result = sync(folder, "--again", "--json")
    delivered(result)
    assert result.tables["metrics"]["already_there"] == 0
    delivered(sync(folder, "--again"))
    stages = query(folder / "mlflow.db", "select lifecycle_stage, count(*) from runs group by 1 order by 1")
    assert stages == [("active", 1), ("deleted", 1)]
    new = "run_uuid in (select run_uuid from runs where lifecycle_stage = 'active')"
    rows = query(folder / "mlflow.db", f"select key, value, timestamp, step, is_nan from metrics where {new}")
    found = Counter((key, "NaN" if is_nan else value, ms, step) for key, value, ms, step, is_nan in rows)
    assert found == Counter(set(syncing.logged_metrics(spool)))


def test_verify_finds_what_is_missing_and_what_is_more_and_changes_nothing(folder: Path, small_spool: Path) -> None:
    copy(small_spool, folder)
    assert sync(folder, "--verify").code == 4
    assert query(folder / "mlflow.db", "select count(*) from runs") == [(0,)]
    delivered(sync(folder))
    delivered(sync(folder, "--verify"))
    connection = sqlite3.connect(folder / "mlflow.db")
    with connection:
        connection.execute("delete from metrics where step = 2")
        connection.execute("insert into metrics select 'loss', 77, 1, run_uuid, 1, 0 from runs")
        connection.execute("delete from tags where key = 'spool.host'")
    connection.close()
    before = (folder / "mlflow.db").read_bytes()
    result = sync(folder, "--verify")
    assert result.code == 3
    assert "differs: 7 of" in result.out
    assert "differs: tag spool.host is not there" in result.out
    assert (folder / "mlflow.db").read_bytes() == before


def test_retract_deletes_run_and_traces_and_moves_them_where_asked(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder))
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [
        sys.executable,
        "-m",
        "sync",
        "retract",
        "--to",
        "mlflow",
        "--run",
        "math/*",
        "--yes",
        "--move-to",
        "right",
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = query(
        folder / "mlflow.db",
        "select e.name, r.lifecycle_stage from runs r join experiments e on e.experiment_id = r.experiment_id order by 1",
    )
    assert names == [("math", "deleted"), ("right", "active")]
    assert syncing.stored_spans(folder / "mlflow.db") == syncing.logged_spans(spool)
    assert syncing.linked_traces(folder / "mlflow.db").total() >= 1
    assert query(
        folder / "mlflow.db", "select distinct e.name from trace_info t join experiments e using (experiment_id)"
    ) == [("right",)]


def test_a_resumed_run_shows_no_zigzag_in_mlflow_unless_asked_for(folder: Path) -> None:
    record(
        folder,
        "run = spool.init(project='p', experiment='e')\n"
        "for step in range(1, 11): run.log({'loss': step}, step=step)\n"
        "run.finish(status='failed')\n"
        "again = spool.init(run_id=run.id, resume=True)\n"
        "for step in range(7, 13): again.log({'loss': step * 10}, step=step)\n"
        "again.finish()",
    )
    delivered(sync(folder))
    rows = query(folder / "mlflow.db", "select step, value from metrics order by step")
    assert rows == [(step, float(step) if step < 7 else step * 10.0) for step in range(1, 13)]
    delivered(sync(folder, "--rewind", "keep"))
    assert query(folder / "mlflow.db", "select count(*) from metrics") == [(16,)]


def test_a_run_moved_or_renamed_in_mlflow_is_found_again(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    delivered(sync(folder))
    connection = sqlite3.connect(folder / "mlflow.db")
    with connection:
        connection.execute("update experiments set name = 'renamed' where name = 'math'")
        connection.execute("update runs set name = 'mine'")
    connection.close()
    delivered(sync(folder))
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


def test_a_server_that_is_down_is_named_within_seconds_and_the_next_sync_delivers(
    folder: Path, small_spool: Path, unused_uri: Callable[[], str]
) -> None:
    spool = copy(small_spool, folder)
    before = {path: path.stat().st_mtime_ns for path in spool.rglob("*")}
    uri = unused_uri()
    began = time.monotonic()
    result = sync(folder, uri=uri)
    assert time.monotonic() - began < 15
    assert result.code == 4
    assert uri in result.err
    assert "run spool-sync again" in result.err
    assert "Traceback" not in result.err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    delivered(sync(folder))
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


def test_a_server_that_accepts_and_never_answers_is_given_up_within_seconds(folder: Path, small_spool: Path) -> None:
    copy(small_spool, folder)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        result = sync(folder, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 15
    assert result.code == 4
    assert "timed out" in result.err


@pytest.fixture
def unused_uri() -> Callable[[], str]:
    def find() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"http://127.0.0.1:{probe.getsockname()[1]}"

    return find


def test_a_run_that_may_not_leave_stays_unless_mlflow_is_on_this_machine(folder: Path) -> None:
    record(folder, "spool.init(project='p', experiment='e', may_leave=False).finish()")
    for uri in ("http://tracker.example:5000", "postgresql://db.example/mlflow"):
        result = sync(folder, uri=uri)
        assert result.code == 1, result.out + result.err
        assert "may_leave=False" in result.out
    delivered(sync(folder))


def test_a_file_store_is_refused_in_one_sentence(folder: Path, small_spool: Path) -> None:
    copy(small_spool, folder)
    result = sync(folder, uri=str(folder / "mlruns"))
    assert result.code == 1
    assert "sqlite:///" in result.err


def test_the_whole_sync_works_where_there_is_no_network(
    folder: Path, small_spool: Path, without_network: list[str]
) -> None:
    if not without_network:
        pytest.skip("this kernel allows no network namespace")
    copy(small_spool, folder)
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": str(syncing.ROOT)}
    command = [*without_network, sys.executable, "-m", "sync", "--to", "mlflow"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MLflow holds" in done.stdout


# --- two syncs, older copies, other places


def test_a_second_sync_of_a_run_says_who_holds_it_and_leaves(folder: Path) -> None:
    spool = record(folder, "spool.init(project='p', run_id='r').finish()")
    held = claim.take(spool / ".sync" / "mlflow" / "r.claim")
    result = sync(folder)
    assert result.code == 4
    assert f"process {os.getpid()} on " in result.out
    held.release()
    delivered(sync(folder))
    assert not list(spool.glob(".sync/mlflow/*.claim"))


def test_the_claim_of_a_killed_sync_is_taken_over(folder: Path, small_spool: Path) -> None:
    spool = copy(small_spool, folder)
    assert sync(folder, kill_after=3).code == -signal.SIGKILL
    assert list(spool.glob(".sync/mlflow/*.claim"))
    delivered(sync(folder))


def test_syncs_at_once_make_one_run(folder: Path, small_spool: Path) -> None:
    first = record(folder, "spool.init(project='p', experiment='makes the database').finish()")
    delivered(sync(folder))
    shutil.rmtree(first)
    with sqlite3.connect(folder / "mlflow.db") as database:
        for table in ("tags", "params", "runs"):
            database.execute(f"delete from {table}")
    spool = copy(small_spool, folder)
    command = [sys.executable, "-m", "sync", str(spool), "--to", "mlflow"]
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": str(syncing.ROOT)}
    both = [subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert min(one.wait(120) for one in both) == 0
    delivered(sync(folder))
    syncing.assert_equal(spool, folder / "mlflow.db", folder / "mlruns")


def test_two_mlflow_runs_of_one_run_are_reported(folder: Path) -> None:
    record(folder, "spool.init(project='p', run_id='r').finish()")
    delivered(sync(folder))
    columns = [row[1] for row in query(folder / "mlflow.db", "pragma table_info(runs)")]
    others = ", ".join(column for column in columns if column != "run_uuid")
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute(f"insert into runs (run_uuid, {others}) select 'ffff', {others} from runs")
        database.execute("insert into tags (key, value, run_uuid) values ('spool.run_id', 'r', 'ffff')")
    result = sync(folder)
    assert result.code == 3
    assert "are all this run" in result.out


def test_an_older_copy_does_not_take_back_what_a_later_one_has_said(folder: Path) -> None:
    spool = record(folder, "spool.init(project='p', run_id='r').log({'a': 1.0}); os._exit(1)", expect=1)
    shutil.copytree(spool, folder / "older")
    record(folder, "run = spool.init(project='p', run_id='r', resume=True); run.log({'a': 2.0}); run.finish()")
    delivered(sync(folder))
    before = query(folder / "mlflow.db", "select status, end_time from runs")
    shutil.move(spool, folder / "newer")
    shutil.move(folder / "older", spool)
    result = sync(folder)
    delivered(result)
    assert "more of this run than this copy" in result.out
    assert query(folder / "mlflow.db", "select status, end_time from runs") == before
    assert ("spool.attempts", "2") in query(folder / "mlflow.db", "select key, value from tags")


def test_a_run_is_not_delivered_to_a_second_experiment(folder: Path) -> None:
    record(folder, "spool.init(project='p', run_id='r').finish()")
    delivered(sync(folder, "--project", "first"))
    delivered(sync(folder, "--project", "first"))
    result = sync(folder, "--project", "second")
    assert result.code == 4
    assert "is in MLflow already" in result.out
    assert len(query(folder / "mlflow.db", "select * from runs")) == 1


def test_a_file_saved_where_a_folder_is_gets_a_name_of_its_own(folder: Path) -> None:
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").write_text("b")
    record(
        folder,
        """
with spool.init(project="p", experiment="e") as run:
    run.save("a.txt", "ckpt"); run.save("b.txt", "ckpt/config.json"); run.save("b.txt", "out/x"); run.save("a.txt", "out")
    run.log({"a": 1.0})
""",
    )
    delivered(sync(folder))
    delivered(sync(folder))
    stored = sorted(
        str(path).split("/files/")[1]
        for path in (folder / "mlruns").rglob("*")
        if path.is_file() and "/files/" in str(path)
    )
    assert len(stored) == 4
    assert {"ckpt", "out/x"} <= set(stored)


def test_an_altered_saved_file_is_rejected_and_not_sent(folder: Path) -> None:
    (folder / "a.txt").write_text("secret plan")
    spool = record(folder, "run = spool.init(project='p', experiment='e'); run.save('a.txt'); run.finish()")
    [saved] = spool.glob("*/files/*")
    saved.write_text("something else")
    result = sync(folder)
    assert result.code == 3
    assert "not the content that was saved" in result.out
    assert not list((folder / "mlruns").rglob("a.txt"))


@pytest.mark.parametrize("uri", ["sqlite:///", "sqlite://", "sqlite:///:memory:", "http://[::1"])
def test_an_address_that_keeps_nothing_is_refused_in_one_sentence(folder: Path, uri: str) -> None:
    record(folder, "spool.init(project='p', experiment='e').finish()")
    result = sync(folder, uri=uri)
    assert result.code == 1
    assert "MLFLOW_TRACKING_URI is" in result.err
    assert "Traceback" not in result.err
