"""How soon a record is at MLflow after `log()` has returned, and what a follower costs where nothing happens.

    python bench/tail_latency.py [--records N] [--pause-s SECONDS] [--runs N] [--idle-s SECONDS]

A trainer logs one record after another while `spool-sync --follow` runs into an SQLite store; the store is asked each 10 ms
for what it holds. Then a follower of finished runs, all of them delivered, is left alone: its processor time by the time that
passed is its idle cost.
"""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import FLOATS, median, parser, percentile, require, table, workplace

import spool

ROOT = Path(__file__).parent.parent


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--records", type=int, default=200)
    arguments.add_argument("--pause-s", type=float, default=0.37, help="between two records; no multiple of what polls")
    arguments.add_argument("--runs", type=int, default=1000)
    arguments.add_argument("--idle-s", type=float, default=30)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        latencies = follow_a_trainer(folder / "live", chosen.records, chosen.pause_s)
        idle = leave_alone(folder / "idle", chosen.runs, chosen.idle_s)
    table(
        ["log() to visible in MLflow (sqlite)", "s"],
        [
            [f"median of {chosen.records}", f"{median(latencies):.2f}"],
            ["p99", f"{percentile(latencies, 0.99):.2f}"],
            ["largest", f"{max(latencies):.2f}"],
        ],
    )
    table(["follower, nothing to do", "% of a core"], [[f"{chosen.runs:,} finished runs", f"{100 * idle:.2f}"]])


@contextmanager
def follower(folder: Path, destination: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sync", "spool-data", "--to", destination, "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def follow_a_trainer(folder: Path, records: int, pause_s: float) -> list[float]:
    folder.mkdir()
    with spool.init(project="bench", experiment="tail", dir=folder / "spool-data") as run:
        run.log({"loss": 0.0}, step=0)
        with follower(folder, "mlflow"):
            wait_for(folder, 0)
            latencies = []
            for step in range(1, records + 1):
                run.log({"loss": float(step)}, step=step)
                returned_s = time.perf_counter()
                wait_for(folder, step)
                latencies.append(time.perf_counter() - returned_s)
                time.sleep(max(0.0, pause_s - latencies[-1]))
    return latencies


def wait_for(folder: Path, step: int) -> None:
    end_s = time.monotonic() + 60
    while newest_step(folder / "mlflow.db") < step:
        require(time.monotonic() < end_s, f"step {step} does not arrive: {(folder / 'said').read_text()}")
        time.sleep(0.01)


def newest_step(database: Path) -> int:
    if not database.exists():
        return -1
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=20)
    try:
        [(step,)] = connection.execute("select max(step) from metrics").fetchall()
    except sqlite3.OperationalError:  # it is being made
        return -1
    finally:
        connection.close()
    return -1 if step is None else int(step)


def leave_alone(folder: Path, runs: int, idle_s: float) -> float:
    folder.mkdir()
    run = spool.init(project="bench", experiment="idle", dir=folder / "spool-data")
    for step in range(10):
        run.log(FLOATS, step=step)
    run.finish()
    for number in range(1, runs):
        shutil.copytree(run.path, run.path.with_name(f"{run.id[:-6]}{number:06x}"))
    with follower(folder, "jsonl=out") as process:
        end_s = time.monotonic() + 600
        while len(list((folder / "spool-data" / ".sync" / "jsonl").glob("*.last"))) < runs:
            require(time.monotonic() < end_s, f"the runs do not arrive: {(folder / 'said').read_text()[-500:]}")
            time.sleep(0.5)
        time.sleep(2)
        before, began_s = processor_s(process.pid), time.monotonic()
        time.sleep(idle_s)
        return (processor_s(process.pid) - before) / (time.monotonic() - began_s)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
