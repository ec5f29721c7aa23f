"""The jsonl destination, and through it, without a server, what the command line does for every destination."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from syncing import ROOT, record

import spool

SCRIPT = """
with spool.init(project='p', experiment='e', config={'lr': 0.1}) as run:
    for step in range(1, 21):
        run.log({'loss': 1 / step, 'nan': math.nan, 'text': 'x', 'big': 2**70}, step=step)
    run.log_generations(step=1, rows=[{'input': 'q', 'output': 'a', 'score': 1.0, 'n': [1]}])
    for group in range(20):
        for rollout in range(2):
            with run.span('agent', type='AGENT', step=1, sample_index=group, rollout_n=rollout) as span:
                span.outputs = {'text': 'y' * 50}
    run.span('left open', type='TOOL').__enter__()
"""


def sync(folder: Path, *arguments: str, expect: int = 0) -> str:
    """`spool-sync` in `folder`; what it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    done = subprocess.run(
        [sys.executable, "-m", "sync", *arguments],
        cwd=folder,
        env=environment | {"HOME": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def lines(folder: Path, table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.rglob(f"{table}.jsonl")) for line in path.open()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jsonl")}


def held(text: str) -> dict[str, dict[str, int]]:
    [run] = json.loads(text)["runs"]
    return dict(run["tables"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, SCRIPT)
    return folder / "spool-data"


@pytest.fixture
def folder(tmp_path: Path, recorded: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "spool-data")
    return tmp_path


def test_every_row_is_a_line_with_its_exact_value(folder: Path) -> None:
    tables = held(sync(folder, "--to", "jsonl=out", "--json"))
    [run] = spool.open(folder / "spool-data").runs()
    metrics = lines(folder, "metrics")
    assert [(row["seq"], row["step"], row["key"], row["kind"]) for row in metrics] == [
        (row["seq"], row["step"], row["key"], row["kind"]) for row in run.metrics().to_pylist()
    ]
    assert [row["value"] for row in metrics[:4]] == [1.0, "NaN", float(2**70), None]
    assert [row["exact"] for row in metrics[:4]] == [None, None, str(2**70), "x"]
    [generation] = lines(folder, "generations")
    assert (generation["output"], generation["score"], generation["extra"]) == ("a", 1.0, {"n": [1]})
    spans = lines(folder, "spans")
    assert len(spans) == 41
    assert spans[0]["outputs"] == {"text": "y" * 50}
    assert spans[-1]["attributes"] == {"spool.open": True}
    assert {name: table["held"] for name, table in tables.items()} == {
        "metrics": 80,
        "generations": 1,
        "events": 2,
        "spans": 41,
    }
    [state] = [json.loads(path.read_bytes()) for path in folder.glob("out/*/run.json")]
    assert (state["project"], state["config"], state["status"]) == ("p", {"lr": 0.1}, "finished")


def test_a_second_sync_changes_no_byte_of_the_rows(folder: Path) -> None:
    sync(folder, "--to", "jsonl=out")
    before = contents(folder / "out")
    tables = held(sync(folder, "--to", "jsonl=out", "--json"))
    assert contents(folder / "out") == before
    assert tables["metrics"]["already_there"] == 80


@pytest.mark.parametrize(
    "harm", ["cut", "line removed", "bit", "state removed", "state garbage", "more", "file removed"]
)
def test_what_was_harmed_is_found_by_verify_and_written_anew_by_a_sync(folder: Path, harm: str) -> None:
    sync(folder, "--to", "jsonl=out")
    before = contents(folder / "out")
    [path] = folder.glob("out/*/*/metrics.jsonl")
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[:-30])
    elif harm == "line removed":
        path.write_bytes(b"\n".join(content.split(b"\n")[1:]))
    elif harm == "bit":
        path.write_bytes(content.replace(b'"step":7', b'"step":8', 1))
    elif harm == "more":
        path.write_bytes(content + content.splitlines(keepends=True)[-1])
    elif harm == "file removed":
        path.unlink()
    elif harm == "state removed":
        (path.parent.parent / "run.json").unlink()
    else:
        (path.parent.parent / "run.json").write_text("{")
    if not harm.startswith("state"):
        assert "differs" in sync(folder, "--to", "jsonl=out", "--verify", expect=3)
    sync(folder, "--to", "jsonl=out")
    assert contents(folder / "out") == before
    sync(folder, "--to", "jsonl=out", "--verify")


def test_a_sync_killed_anywhere_is_completed_by_the_next(folder: Path) -> None:
    sync(folder, "--to", "jsonl=whole")
    whole = contents(folder / "whole")
    program = (
        "import os, sys; from spool import files; from sync.cli import main\n"
        "left, old = [int(sys.argv.pop(1))], files.replace_file\n"
        "def replace(*args):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    old(*args)\n"
        "files.replace_file = replace\n"
        "main()"
    )
    codes = []
    for count in range(1, 9):
        shutil.rmtree(folder / "out", ignore_errors=True)
        shutil.rmtree(folder / "spool-data" / ".sync", ignore_errors=True)
        command = [sys.executable, "-c", program, str(count), "--to", "jsonl=out"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPOOL_DIR": str(folder / "spool-data")}
        codes.append(subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode)
        sync(folder, "--to", "jsonl=out")
        assert contents(folder / "out") == whole
    assert codes.count(-signal.SIGKILL) >= 5


# --- plan, verify, status, retract, several


def test_a_plan_counts_what_would_go_out_and_sends_nothing(folder: Path) -> None:
    text = sync(folder, "--to", "jsonl=out", "--plan", "--trace-sample", "0.5", "--json")
    tables = held(text)
    assert not (folder / "out").exists()
    assert not (folder / "spool-data" / ".sync").exists()
    assert tables["metrics"]["recorded"] == 80
    assert 0 < tables["spans"]["withheld"] < 41
    tables_sent = held(sync(folder, "--to", "jsonl=out", "--trace-sample", "0.5", "--json"))
    assert tables_sent["spans"]["held"] == tables["spans"]["recorded"] - tables["spans"]["withheld"]


def test_verify_of_a_run_that_is_not_there_says_so(folder: Path) -> None:
    assert "holds no such run" in sync(folder, "--to", "jsonl=out", "--verify", expect=4)


def test_a_sample_of_traces_keeps_whole_groups_and_is_the_same_each_time(folder: Path) -> None:
    sync(folder, "--to", "jsonl=one", "--trace-sample", "0.3")
    sync(folder, "--to", "jsonl=two", "--trace-sample", "0.3")
    first = [(row["sample_index"], row["rollout_n"]) for row in lines(folder / "one", "spans") if row["step"]]
    assert first == [(row["sample_index"], row["rollout_n"]) for row in lines(folder / "two", "spans") if row["step"]]
    groups = {group for group, _ in first}
    assert sorted(first) == sorted((group, rollout) for group in groups for rollout in range(2))
    assert 1 <= len(groups) <= 14


def test_long_texts_of_traces_are_cut_and_say_so(folder: Path) -> None:
    sync(folder, "--to", "jsonl=out", "--trace-max-chars", "10")
    assert lines(folder / "out", "spans")[0]["outputs"] == {"text": f"{'y' * 10}… [cut by spool-sync: 50 characters]"}


def test_rewound_steps_are_dropped_or_kept_as_chosen(tmp_path: Path) -> None:
    root = record(
        tmp_path,
        "run = spool.init(project='p', experiment='e')\n"
        "for step in range(1, 11): run.log({'loss': step}, step=step)\n"
        "run.finish(status='failed')\n"
        "again = spool.init(run_id=run.id, resume=True, resumed_from_step=6)\n"
        "for step in range(7, 13): again.log({'loss': step * 10}, step=step)\n"
        "again.finish()",
    )
    sync(tmp_path, "--to", "jsonl=keep")
    text = sync(tmp_path, "--to", "jsonl=drop", "--rewind", "drop", "--json")
    assert [row["step"] for row in lines(tmp_path / "keep", "metrics")].count(8) == 2
    assert sorted((row["step"], row["value"]) for row in lines(tmp_path / "drop", "metrics")) == [
        *((step, float(step)) for step in range(1, 7)),
        *((step, step * 10.0) for step in range(7, 13)),
    ]
    assert held(text)["metrics"]["withheld"] == 4
    assert len(spool.open(root).runs()[0].metrics()) == 16


def test_status_tells_what_is_there_what_came_since_and_the_last_error(folder: Path) -> None:
    assert "no sync from here yet" in sync(folder, "status")
    sync(folder, "--to", "jsonl=out")
    [run] = json.loads(sync(folder, "status", "--json"))["runs"]
    [one] = run["destinations"]
    assert (one["destination"], one["behind"], one["last_error"]) == ("jsonl", 0, "")
    with spool.init(dir=folder / "spool-data", run_id=run["run_id"], resume=True) as again:
        again.log({"more": 1}, step=30)
    assert "records behind" in sync(folder, "status")
    (folder / "file").write_text("")
    sync(folder, "--to", "jsonl=file/out", expect=1)
    sync(folder, "--to", "jsonl=out")
    assert "behind" not in sync(folder, "status")


def test_retract_deletes_there_leaves_a_receipt_and_a_later_sync_delivers_anew(folder: Path) -> None:
    sync(folder, "--to", "jsonl=out")
    sync(folder, "retract", "--to", "jsonl=out", "--run", "p/e", expect=1)  # nobody said yes
    assert list((folder / "out").iterdir())
    sync(folder, "retract", "--to", "jsonl=out", "--run", "p/e", "--yes")
    assert not list((folder / "out").iterdir())
    [receipt] = [json.loads(path.read_bytes()) for path in folder.glob("spool-data/.sync/receipts/*.json")]
    assert (receipt["destination"], receipt["held"]["metrics"], receipt["held"]["spans"]) == ("jsonl", 80, 41)
    assert not list(folder.glob("spool-data/.sync/jsonl/*.json"))
    sync(folder, "retract", "--to", "jsonl=out", "--run", "p/e", "--yes", expect=4)
    assert held(sync(folder, "--to", "jsonl=out", "--json"))["metrics"]["delivered"] == 80


def test_several_destinations_at_once_each_get_all_and_the_worst_code_counts(folder: Path) -> None:
    outcome = json.loads(sync(folder, "--to", "jsonl=one", "--to=jsonl=two", "--json"))
    assert [one["exit_code"] for one in outcome["destinations"]] == [0, 0]
    assert contents(folder / "one") == contents(folder / "two") != {}
    (folder / "file").write_text("")
    outcome = json.loads(sync(folder, "--to", "jsonl=three", "--to", "jsonl=file/no", "--json", expect=1))
    assert [one["exit_code"] for one in outcome["destinations"]] == [0, 1]
    assert contents(folder / "three") == contents(folder / "one")


def test_runs_are_delivered_several_at_a_time(folder: Path) -> None:
    for name in "abcdef":
        record(folder, f"run = spool.init(project='p', experiment='{name}'); run.log({{'x': 1}}, step=1); run.finish()")
    result = json.loads(sync(folder, "--to", "jsonl=out", "--jobs", "3", "--json"))
    assert len(result["runs"]) == 7
    assert [run["run_id"] for run in result["runs"]] == [run.id for run in spool.open(folder / "spool-data").runs()]
    assert all(run["tables"]["metrics"]["held"] for run in result["runs"])


# --- a destination of somebody else


OUTSIDE = """
from sync.destinations.jsonl import JsonlDestination

class TeamDestination(JsonlDestination):
    label = "Team"
"""


def test_a_destination_from_another_package_is_found_by_its_entry_point(folder: Path) -> None:
    package = folder / "site"
    (package / "team-1.0.dist-info").mkdir(parents=True)
    (package / "team_destination.py").write_text(OUTSIDE)
    (package / "team-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: team\nVersion: 1.0\n")
    entry = "[spool_sync.destinations]\nteam = team_destination:TeamDestination\n"
    (package / "team-1.0.dist-info" / "entry_points.txt").write_text(entry)
    done = subprocess.run(
        [sys.executable, "-m", "sync", "--to", "team=out", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{package}", "SPOOL_DIR": "spool-data"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["runs"][0]["destination"] == "Team"
    assert len(lines(folder / "out", "metrics")) == 80
    assert math.isclose(lines(folder / "out", "metrics")[0]["value"], 1.0)


# --- memory


@pytest.mark.parametrize(
    "metrics", [500_000, pytest.param(50_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_memory_is_flat_however_long_the_run(tmp_path: Path, metrics: int) -> None:
    """At most 300 MB, of which Python with pyarrow takes 100."""
    record(
        tmp_path,
        "run = spool.init(project='p', experiment='e', durability='os')\n"
        "values = {f'key/{place}': place / 7 for place in range(50)}\n"
        f"for step in range({metrics // 50}): run.log(values, step=step)\n"
        "run.finish()",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPOOL_DIR": "spool-data"}
    program = (  # the peak of a child counts what it was forked from, so it is measured within
        "import atexit, pathlib, re, sys; from sync.cli import main\n"
        "atexit.register(lambda: print(re.search('VmHWM:.*', pathlib.Path('/proc/self/status').read_text())[0], file=sys.stderr))\n"
        "main()"
    )
    command = [sys.executable, "-c", program, "--to", "jsonl=out", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert held(done.stdout)["metrics"]["held"] == metrics
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None
    assert int(peak[1]) <= 300 * 1024
