"""`spool-sync --follow`: what is logged appears at the destination while it runs, whatever comes and goes meanwhile."""

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import syncing
from syncing import ROOT, query, record

import spool

pytest.importorskip("mlflow")
WAIT_S = 60


@contextmanager
def following(folder: Path, *arguments: str, uri: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """`spool-sync --follow` as a process; its stderr is in `folder/err`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPOOL_", "MLFLOW_"))}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
    environment |= {"MLFLOW_TRACKING_URI": uri} if uri else {}
    command = [sys.executable, "-m", "sync", "spool-data", "--to", "mlflow", "--follow", *arguments]
    with (folder / "err").open("w") as err, (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(condition: Callable[[], bool], folder: Path) -> None:
    """Wait for it; fail with what the sync has said."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, (folder / "err").read_text()
        time.sleep(0.1)


def metric_count(folder: Path) -> int:
    try:
        return int(query(folder / "mlflow.db", "select count(*) from metrics")[0][0])
    except sqlite3.OperationalError:  # the database is being made
        return 0


def statuses(folder: Path) -> list[str]:
    return [status for (status,) in query(folder / "mlflow.db", "select status from runs order by start_time")]


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(WAIT_S)


def test_a_live_run_appears_as_it_is_logged_and_is_closed_as_it_ends(tmp_path: Path) -> None:
    with spool.init(project="p", experiment="live", dir=tmp_path / "spool-data") as run:
        run.log({"loss": 1.0}, step=1)
        with following(tmp_path) as process:
            until(lambda: metric_count(tmp_path) == 1, tmp_path)
            run.log({"loss": 0.5, "acc": 0.1}, step=2)
            with run.span("tool", type="TOOL", step=2) as span:
                span.outputs = 42
            run.tag(stage="late")
            until(lambda: metric_count(tmp_path) == 3, tmp_path)
            until(lambda: len(query(tmp_path / "mlflow.db", "select 1 from spans")) == 1, tmp_path)
            until(lambda: bool(query(tmp_path / "mlflow.db", "select 1 from tags where key = 'stage'")), tmp_path)
            assert statuses(tmp_path) == ["RUNNING"]
            run.finish()
            until(lambda: statuses(tmp_path) == ["FINISHED"], tmp_path)
            assert end(process) == 0
    syncing.assert_equal(tmp_path / "spool-data", tmp_path / "mlflow.db", tmp_path / "mlruns")


def test_later_runs_writers_and_attempts_are_taken_up(tmp_path: Path) -> None:
    root = record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
    with following(tmp_path) as process:
        until(lambda: metric_count(tmp_path) == 1, tmp_path)
        record(tmp_path, "run = spool.init(project='p', experiment='two'); run.log({'b': 1}, step=1); run.finish()")
        until(lambda: metric_count(tmp_path) == 2, tmp_path)
        until(lambda: statuses(tmp_path) == ["FINISHED", "FINISHED"], tmp_path)
        [first, _] = sorted(path.name for path in root.glob("2*"))
        again = f"run = spool.init(run_id='{first}', resume=True); run.log({{'a': 2}}, step=2)"
        record(tmp_path, f"{again}; run.finish(status='failed')")
        until(lambda: metric_count(tmp_path) == 3, tmp_path)
        until(lambda: statuses(tmp_path) == ["FAILED", "FINISHED"], tmp_path)
        assert end(process, signal.SIGINT) == 0
    assert syncing.stored_metrics(tmp_path / "mlflow.db") == syncing.logged_metrics(root)


def test_a_killed_trainer_is_closed_as_failed(tmp_path: Path) -> None:
    with following_later(tmp_path):
        record(
            tmp_path,
            "run = spool.init(project='p', experiment='k'); run.log({'a': 1}, step=1); os.kill(os.getpid(), 9)",
            expect=-signal.SIGKILL,
        )
        until(lambda: metric_count(tmp_path) == 1 and statuses(tmp_path) == ["FAILED"], tmp_path)


@contextmanager
def following_later(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """With a spool that has a run already."""
    record(folder, "spool.init(project='p', experiment='zero').finish()")
    with following(folder, "--run", "p/k") as process:
        yield process


def test_a_killed_follower_is_followed_by_another_without_loss_or_doubling(tmp_path: Path) -> None:
    with spool.init(project="p", experiment="live", dir=tmp_path / "spool-data") as run:
        for step in range(1, 4):
            with following(tmp_path) as process:
                for part in range(50):
                    run.log({"loss": step + part / 100, f"key/{part}": part}, step=step)
                until(lambda already=step * 100 - 100: metric_count(tmp_path) > already, tmp_path)
                process.kill()
                process.wait()
        with following(tmp_path) as process:
            until(lambda: "following" in (tmp_path / "err").read_text(), tmp_path)
            until(lambda: metric_count(tmp_path) == 300, tmp_path)
            assert end(process) == 0
    syncing.assert_equal(tmp_path / "spool-data", tmp_path / "mlflow.db", tmp_path / "mlruns")


def test_health_and_json_lines_say_how_it_goes(tmp_path: Path) -> None:
    record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
    with following(tmp_path, "--health", "health.json", "--log-json", "--json") as process:
        until(lambda: metric_count(tmp_path) == 1 and statuses(tmp_path) == ["FINISHED"], tmp_path)
        until(lambda: "already there" in (tmp_path / "err").read_text(), tmp_path)
        assert end(process) == 0
    health = json.loads((tmp_path / "health.json").read_text())
    assert (health["over"], health["live"], health["failing"], health["problems"]) == (1, 0, 0, {})
    lines = [json.loads(line) for line in (tmp_path / "err").read_text().splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    [report] = [line["report"] for line in lines if "report" in line]
    assert report["tables"]["metrics"]["delivered"] == 1
    assert json.loads((tmp_path / "out").read_text())["exit_code"] == 0


def test_a_server_that_is_not_there_is_waited_for_and_the_follower_can_be_ended(tmp_path: Path) -> None:
    record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
    with following(tmp_path, "--max-wait", "1", uri="http://127.0.0.1:9") as process:
        until(lambda: "waiting for it" in (tmp_path / "err").read_text(), tmp_path)
        assert end(process) == 4


def documented(pattern: str) -> str:
    """A line of docs/destinations.md."""
    found = re.search(pattern, (ROOT / "docs" / "destinations.md").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_documented_service_delivers_and_ends_in_order(tmp_path: Path) -> None:
    record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
    words = shlex.split(documented(r"^ExecStart=(.*)"))
    assert words[:2] == ["/opt/spool/bin/spool-sync", "/data/spool"]
    arguments = [
        word.replace("/run/", f"{tmp_path}/") for word in words[2:] if word not in {"--to", "mlflow", "--follow"}
    ]
    with following(tmp_path, *arguments) as process:
        until(lambda: metric_count(tmp_path) == 1 and statuses(tmp_path) == ["FINISHED"], tmp_path)
        assert end(process, getattr(signal, documented(r"^KillSignal=(.*)"))) == 0
    assert json.loads((tmp_path / "spool-sync.json").read_text())["over"] == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_documented_unit(tmp_path: Path) -> None:
    unit = documented(r"(\[Unit\]\n(?:.*\n)*?WantedBy=.*\n)").replace("/opt/spool/bin/spool-sync", "/bin/true")
    (tmp_path / "spool-sync.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "spool-sync.service")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_documented_cron_line_says_nothing_where_all_is_well(tmp_path: Path) -> None:
    root = record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
    command = documented(r"^\*/10 \* \* \* \* (.*)").replace(
        "https://mlflow.example", f"sqlite:///{tmp_path}/mlflow.db"
    )
    command = command.replace("/opt/spool/bin/spool-sync", f"{sys.executable} -m sync").replace(
        "/data/spool", str(root)
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # cron gives its lines to a shell
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert metric_count(tmp_path) == 1


def test_a_spool_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    with following(tmp_path) as process:
        until(lambda: "following" in (tmp_path / "err").read_text(), tmp_path)
        record(tmp_path, "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1); run.finish()")
        until(lambda: metric_count(tmp_path) == 1 and statuses(tmp_path) == ["FINISHED"], tmp_path)
        assert end(process) == 0


def test_a_writer_whose_header_is_damaged_does_not_hold_up_the_run(tmp_path: Path) -> None:
    """It is left to the replay of the whole run, at its end."""
    root = record(
        tmp_path,
        "run = spool.init(project='p', experiment='one'); run.log({'a': 1}, step=1)\nos.kill(os.getpid(), 9)",
        expect=-signal.SIGKILL,
    )
    [run_path] = root.glob("2*")
    [first] = run_path.glob("*/000001.jsonl")
    with spool.init(dir=root, run_id=run_path.name, resume=True) as run:
        first.write_bytes(first.read_bytes().replace(b'{"format', b'{"fXrmat', 1))
        with following(tmp_path) as process:
            run.log({"b": 1}, step=2)
            until(lambda: metric_count(tmp_path) == 1, tmp_path)
            run.finish()
            until(lambda: metric_count(tmp_path) == 2 and statuses(tmp_path) == ["FINISHED"], tmp_path)
            assert end(process) == 3
