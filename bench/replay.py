"""What a replay into MLflow costs, beside MlflowClient.log_batch with batches of 1000, which proves nothing and keeps no cursor.

    python bench/replay.py [--metrics N] [--direct-metrics N] [--traces N] [--rounds N]

Both sides take the same metrics, 50 keys a step, from the same spool, into the same place: an `mlflow server` with one worker and
SQLite on this machine, and a SQLite file without a server. They alternate, each time into a new run, in a process of its own;
neither's imports and connecting are in the times, and MlflowClient has its Metric objects made beforehand. "write" is from the
first record sent to the last, "whole" everything from finding the run to the proof that all of it is held. Traces have 9 spans
and about 31 kB. The last columns are processor time for each metric or trace, of the process and of the server with all its
children, which other work on the machine disturbs less than seconds, and how busy both were together, in percent of one core.

What bounds each: over HTTP the server, which spends about 0.12 ms of processor time on a metric in MLflow's ORM whoever sends it,
and the proof adds about half of that, one request for the history of each key; the client needs 0.06 ms. For traces the server
again, 11 to 12 ms for each, and 5 to 6 ms here, one after the other. Without a server, MlflowClient's own ORM (0.095 ms); ours is
SQLite with its three indexes (0.006 ms) and Python that makes rows of Arrow and packs points (0.019 ms).
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from measure import KEYS, median, parser, require, table, workplace

import spool

ROOT = Path(__file__).resolve().parent.parent
SPANS = 9
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}

OURS = """
import json, resource, sys, time
from sync import cli, engine
from sync.destinations import mlflow
spent = {"write": 0.0, "whole": 0.0}
def timed(method, name):
    call = getattr(engine.Replay, method)
    def wrapper(*arguments):
        begin = time.perf_counter()
        call(*arguments)
        spent[name] += time.perf_counter() - begin
    setattr(engine.Replay, method, wrapper)
timed("_send", "write")
timed("deliver", "whole")
before = time.process_time()
try:
    cli.main([sys.argv[1], "--to", "mlflow", "--project", sys.argv[2], "--state-dir", sys.argv[3]])
except SystemExit as end:
    print(json.dumps({**spent, "cpu": time.process_time() - before, "code": end.code}))
"""
THEIRS = """
import json, sys, time
import spool
from mlflow import MlflowClient
from mlflow.entities import Metric
[run] = spool.open(sys.argv[1]).runs()
metrics = [
    Metric(row["key"], row["value"], int(row["ts"].timestamp() * 1000), row["step"])
    for writer in run.writers() for rows in writer.batches("metrics") for row in rows.to_pylist()
]
client = MlflowClient()
run_id = client.create_run(client.create_experiment(sys.argv[2])).info.run_id
begin, before = time.perf_counter(), time.process_time()
for at in range(0, len(metrics), 1000):
    client.log_batch(run_id, metrics[at : at + 1000])
seconds = time.perf_counter() - begin
print(json.dumps({"write": seconds, "whole": seconds, "cpu": time.process_time() - before, "code": 0}))
"""


class Outcome(NamedTuple):
    write_s: float
    whole_s: float
    cpu_s: float
    server_cpu_s: float


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--metrics", type=int, default=50_000)
    arguments.add_argument("--direct-metrics", type=int, default=100_000)
    arguments.add_argument("--traces", type=int, default=600)
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        print(f"medians of {chosen.rounds} alternating rounds\n")
        head = ["", "write /s", "whole /s", "x MlflowClient, write", "whole", "CPU µs each", "of the server", "busy %"]
        rows = [*over_http(folder, chosen.metrics, chosen.traces, chosen.rounds)]
        rows += direct(folder, chosen.direct_metrics, chosen.rounds)
        table(head, rows)


def over_http(folder: Path, metrics: int, traces: int, rounds: int) -> list[list[str]]:
    theirs, ours, traced = [], [], []
    with server(folder / "server") as (uri, pid, database):
        run(THEIRS, record_metrics(folder / "first", 1000), "first", uri, pid)  # a server's first requests take seconds
        for number in range(rounds):
            recorded = record_metrics(folder / f"metrics-{number}", metrics)
            theirs.append(run(THEIRS, recorded, f"theirs-{number}", uri, pid))
            ours.append(run(OURS, recorded, f"ours-{number}", uri, pid))
            traced.append(run(OURS, record_traces(folder / f"traces-{number}", traces), f"traces-{number}", uri, pid))
        require(count(database, "metrics") == 1000 + 2 * rounds * metrics, "the server does not hold all metrics")
        require(count(database, "spans") == rounds * traces * SPANS, "the server does not hold all spans")
    return [
        row("MlflowClient, HTTP: metrics", metrics, theirs, theirs),
        row("spool-sync, HTTP: metrics", metrics, ours, theirs),
        row(f"spool-sync, HTTP: traces of {SPANS} spans", traces, traced, None),
    ]


def direct(folder: Path, metrics: int, rounds: int) -> list[list[str]]:
    uri = f"sqlite:///{folder}/direct.db"
    theirs, ours = [], []
    for number in range(rounds):
        recorded = record_metrics(folder / f"direct-{number}", metrics)
        theirs.append(run(THEIRS, recorded, f"theirs-{number}", uri, None))
        ours.append(run(OURS, recorded, f"ours-{number}", uri, None))
    require(count(folder / "direct.db", "metrics") == 2 * rounds * metrics, "the database does not hold all metrics")
    return [
        row("MlflowClient, sqlite:///: metrics", metrics, theirs, theirs),
        row("spool-sync, sqlite:///: metrics", metrics, ours, theirs),
    ]


def row(name: str, things: int, found: list[Outcome], beside: list[Outcome] | None) -> list[str]:
    write_s, whole_s = (median(one[at] for one in found) for at in (0, 1))
    ratios = ["", ""]
    if beside is not None:
        ratios = [f"{median(one.write_s for one in beside) / seconds:.2f}" for seconds in (write_s, whole_s)]
    cpu_us = [f"{1e6 * median(one[at] for one in found) / things:,.0f}" for at in (2, 3)]
    busy = median((one.cpu_s + one.server_cpu_s) / one.whole_s for one in found)
    return [name, f"{things / write_s:,.0f}", f"{things / whole_s:,.0f}", *ratios, *cpu_us, f"{100 * busy:.0f}"]


def record_metrics(folder: Path, count: int) -> Path:
    run = spool.init(project="bench", experiment="replay", dir=folder)
    for step in range(count // len(KEYS)):
        run.log({key: step + place / 7 for place, key in enumerate(KEYS)}, step=step)
    run.finish()
    return folder


def record_traces(folder: Path, count: int) -> Path:
    """As of an agent with four turns: one root, and in each turn a model's answer and a tool's."""
    run = spool.init(project="bench", experiment="replay", dir=folder)
    for sample in range(count):
        with run.span("agent_loop", type="AGENT", step=sample // 64, sample_index=sample):
            for turn in range((SPANS - 1) // 2):
                text = " ".join(f"{sample * turn + word:07d}" for word in range(440))
                with run.span("generate", type="CHAT_MODEL", inputs={"prompt": text[:1600]}) as answer:
                    answer.outputs = text
                with run.span("search", type="TOOL", inputs={"query": text[:200]}) as tool:
                    tool.outputs = text[:2100]
    run.finish()
    return folder


def run(program: str, recorded: Path, project: str, uri: str, server_pid: int | None) -> Outcome:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPOOL_", "MLFLOW_"))}
    environment |= QUIET | {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": str(ROOT), "HOME": str(recorded)}
    states = recorded.parent / f"state-{recorded.name}-{project}"
    command = [sys.executable, "-c", program, str(recorded), project, str(states)]
    before = cpu_s(server_pid)
    done = subprocess.run(command, cwd=recorded.parent, env=environment, capture_output=True, text=True, check=False)
    require(done.returncode == 0, done.stderr)
    spent = json.loads(done.stdout.splitlines()[-1])
    require(spent["code"] == 0, done.stdout + done.stderr)
    return Outcome(spent["write"], spent["whole"], spent["cpu"], cpu_s(server_pid) - before)


def cpu_s(pid: int | None) -> float:
    """Of all processes of a session."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat") if pid is not None else ():
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == pid:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def count(database: Path, name: str) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute(f"select count(*) from {name}").fetchone()[0])  # noqa: S608 - our own names


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """(address, pid, database) of an `mlflow server` that is up; it is stopped by its pid, with the workers of its session."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | QUIET | {"HOME": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 120
        while not is_up(port):
            running = process.poll() is None and time.monotonic() < until
            require(running, f"the server does not come up:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process.pid, folder / "mlflow.db"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


if __name__ == "__main__":
    main()
