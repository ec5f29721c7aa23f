"""The demo's comparison must be able to fail; the demo itself runs behind `slow`."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.demo import compare

KILLED, SURVIVOR = 101, 102


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A ledger of two processes and an MLflow database that holds exactly what they listed."""
    (tmp_path / "ledger").mkdir()
    row = {"step": 1, "split": "val", "index": 0, "input": "6*7=", "output": "42", "score": 1.0}
    listed = {
        KILLED: [
            {"kind": "metrics", "step": 1, "values": {"val/mean@1": (0.5).hex(), "n": 3}},
            {"kind": "generation", **row},
        ],
        SURVIVOR: [
            {"kind": "metrics", "step": 2, "values": {"loss": float("nan").hex()}},
            {"kind": "span", "span_id": "ab"},
        ],
    }
    for pid, entries in listed.items():
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (tmp_path / "ledger" / f"{pid}.jsonl").write_text(lines + '{"cut by the kill', encoding="utf-8")
    artifacts = tmp_path / "mlruns" / "generations"
    artifacts.mkdir(parents=True)
    table = {"columns": list(row), "data": [list(row.values())]}
    (artifacts / "val_1.json").write_text(json.dumps(table), encoding="utf-8")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("create table runs (run_uuid, status, artifact_uri)")
        database.execute("create table metrics (run_uuid, key, step, value, is_nan)")
        database.execute("create table spans (span_id)")
        database.execute("insert into runs values ('r', 'FINISHED', ?)", (str(tmp_path / "mlruns"),))
        metrics = [("r", "val/mean_at_1", 1, 0.5, False), ("r", "n", 1, 3.0, False), ("r", "loss", 2, 0.0, True)]
        database.executemany("insert into metrics values (?, ?, ?, ?, ?)", metrics)
        database.execute("insert into spans values ('ab')")
    return tmp_path


def change(demo: Path, statement: str) -> int:
    with sqlite3.connect(demo / "mlflow.db") as database:
        database.execute(statement)
    return compare(demo, {KILLED})


def test_equal_on_both_sides_is_no_difference(demo: Path) -> None:
    assert compare(demo, {KILLED}) == 0


@pytest.mark.parametrize(
    "statement",
    [
        "delete from metrics where key = 'n'",
        "update metrics set value = 0.5000000000000001 where key = 'val/mean_at_1'",
        "update metrics set is_nan = false where key = 'loss'",
        "insert into metrics select * from metrics",
        "insert into metrics select * from metrics where step = 1",
        "insert into spans select * from spans",
        "delete from spans",
        "update runs set status = 'RUNNING'",
        "insert into runs values ('second', 'FINISHED', '')",
    ],
)
def test_what_is_missing_altered_or_doubled_is_a_difference(demo: Path, statement: str) -> None:
    assert change(demo, statement) > 0


def test_a_lost_generation_is_a_difference(demo: Path) -> None:
    (demo / "mlruns" / "generations" / "val_1.json").write_text('{"columns": [], "data": []}', encoding="utf-8")
    assert compare(demo, {KILLED}) == 1


def test_the_one_call_a_killed_process_could_not_list_any_more_is_none(demo: Path) -> None:
    assert change(demo, "insert into metrics values ('r', 'x', 3, 1.0, false), ('r', 'y', 3, 1.0, false)") == 0


def test_a_surplus_without_a_kill_is_a_difference(demo: Path) -> None:
    with sqlite3.connect(demo / "mlflow.db") as database:
        database.execute("insert into metrics values ('r', 'x', 3, 1.0, false)")
    assert compare(demo, set()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_ends_with_equal_counts_and_can_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "trainer.demo"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "0 of them were killed" not in done.stdout
