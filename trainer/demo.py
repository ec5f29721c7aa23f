"""The main job, end to end: `python -m trainer.demo` (what `make demo` runs).

Train offline, SIGKILL the trainer and every process it started, resume from the checkpoint, seal, verify, replay into
MLflow, and compare what MLflow's database holds with the trainer's own list of what it logged (`trainer.ledger`). The
comparison shares no code with spool, sync or MLflow: it reads JSON lines and a SQLite file.

A process can die between a call's return and the line in its list, so of each killed process the destination may hold the
one call more that the list misses; it may never hold less, and of a process that ended by itself never anything else.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlparse

import spool

KILL_AFTER_STEP = 12
KILL_DEADLINE_S = 120
CURVE_WIDTH = 50
CURVE_LINES = 15


def main() -> None:
    folder = Path("demo").absolute()
    began_s = time.monotonic()
    _clear(folder)
    killed = _train_and_kill(folder)
    _headline("Resume from the checkpoint: the same run, its next attempt")
    _stream(_start(folder), stop_at=None)
    _headline("Seal what the killed processes left, and check every byte")
    _run(folder, "spool", "seal", "spool-data")
    _run(folder, "spool", "verify", "spool-data")
    _headline("Replay into MLflow (mlflow.db)")
    # All of it, rewound steps too: the comparison below asks for every recorded value.
    _run(folder, "spool-sync", "spool-data", "--to", "mlflow", "--rewind", "keep")
    _headline("Compare MLflow's database with the trainer's own list, value by value")
    differences = compare(folder, killed)
    _headline("What was learned")
    _show_curves(folder)
    print(f"\nEverything is in {folder} ({time.monotonic() - began_s:.0f} s). To look at it:")
    binaries = Path(sys.executable).parent
    print(f"  cd {folder} && {binaries / 'mlflow'} ui --backend-store-uri sqlite:///mlflow.db")
    print(f"  {binaries / 'spool'} ls {folder / 'spool-data'}")
    print(f"  {binaries / 'duckdb'} -c", f"\"from '{folder}/**/metrics.parquet' select key, count(*) group by key\"")
    if differences:
        sys.exit(f"demo: {differences} differences, see above")


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    folder.mkdir(exist_ok=True)
    for name in ("spool-data", "ledger", "checkpoints", "mlruns", "mlartifacts"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (*folder.glob("mlflow.db*"), *folder.glob("*.log")):
        path.unlink()


# --- train, kill, resume


def _start(folder: Path) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPOOL_")}
    environment |= {"SPOOL_DIR": str(folder / "spool-data"), "TRAINER_LEDGER": str(folder / "ledger")}
    arguments = [
        sys.executable,
        "-u",
        "-m",
        "trainer",
        "trainer.project_name=demo",
        "trainer.experiment_name=calculator-grpo",
    ]
    arguments += [f"trainer.default_local_dir={folder / 'checkpoints'}"]
    arguments += ["actor_rollout_ref.actor.optim.lr=1e-4", "trainer.test_freq=2"]  # slow enough for a curve to be seen
    arguments += sys.argv[1:]
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _train_and_kill(folder: Path) -> set[int]:
    """Returns the pids that were killed."""
    _headline(f"Train offline, and SIGKILL every process of it after step {KILL_AFTER_STEP}")
    trainer = _start(folder)
    _stream(trainer, stop_at=KILL_AFTER_STEP)
    pids = _tree(trainer.pid)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    trainer.wait()
    _wait_until_gone(pids)
    print(f"\nkilled {len(pids)} processes with SIGKILL: the trainer, Ray's daemons, the rollout actors")
    return pids


def _stream(trainer: "subprocess.Popen[str]", stop_at: int | None) -> None:
    """Show the trainer's lines until it ends, or until the line of step `stop_at`."""
    assert trainer.stdout is not None
    for line in trainer.stdout:
        print(f"  {line}", end="", flush=True)
        if stop_at is not None and line.startswith(f"step {stop_at}: score"):
            return
    if trainer.wait() != 0:
        _fail(f"the trainer ended with exit code {trainer.returncode}, see above")
    if stop_at is not None:
        _fail(f"the trainer ended before step {stop_at}")


def _tree(root: int) -> set[int]:
    """A process and everything it started, by /proc: Ray starts sessions of its own, so neither group nor session is enough."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):  # it ended while we looked
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ends = {root}, [root]
    while open_ends:
        for child in children.get(open_ends.pop(), []):
            found.add(child)
            open_ends.append(child)
    return found


def _wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + KILL_DEADLINE_S
    while any(_is_running(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            _fail("killed processes are still there")
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _run(folder: Path, command: str, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPOOL_", "MLFLOW_"))}
    print(f"  $ {command} {' '.join(arguments)}", flush=True)
    done = subprocess.run(
        [str(Path(sys.executable).parent / command), *arguments], cwd=folder, env=environment, check=False
    )
    if done.returncode != 0:
        _fail(f"{command} ended with exit code {done.returncode}")


# --- compare


def compare(folder: Path, killed: set[int]) -> int:
    """Print, per table, how many facts the trainer listed and MLflow holds; returns the number of differences."""
    database = sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)
    runs = database.execute("select run_uuid, status, artifact_uri from runs").fetchall()
    if len(runs) != 1:
        print(f"  MLflow holds {len(runs)} runs, 1 was expected")
        return 1
    run_uuid, status, artifact_uri = runs[0]
    listed, pids = _read_ledger(folder / "ledger")
    held = {
        "metrics": _held_metrics(database, run_uuid),
        "generations": _held_generations(_local_path(artifact_uri, folder)),
        "spans": _held_spans(database),
    }
    print(f"  run {run_uuid}: {status}, {len(pids)} processes logged, {len(killed & pids)} of them were killed\n")
    print(f"  {'':<12} {'listed':>8} {'MLflow':>8} {'equal':>8} {'missing':>8} {'extra':>8}")
    differences = 0 if status == "FINISHED" else 1
    for table, facts in held.items():
        missing, extra = listed[table] - facts, facts - listed[table]
        unlisted = _is_unlisted(table, extra, listed[table], killed & pids)
        differences += missing.total() + (extra.total() if not unlisted else 0)
        equal = (listed[table] & facts).total()
        note = "  (returned to a process that was killed before it could list them)" if unlisted and extra else ""
        print(
            f"  {table:<12} {listed[table].total():>8} {facts.total():>8} {equal:>8} {missing.total():>8} {extra.total():>8}{note}"
        )
        for what, counter in (("missing", missing), ("extra", Counter() if unlisted else extra)):
            for fact in list(counter)[:5]:
                print(f"    {what}: {fact}")
    return differences


def _is_unlisted(table: str, extra: "Counter[Any]", listed: "Counter[Any]", killed: set[int]) -> bool:
    """Whether a surplus can be what killed processes had recorded but not yet listed: one call each, and nothing twice."""
    if table == "spans":  # open when their process was killed: replayed as errors, never listed as ended
        return bool(killed) and not any(listed[fact] for fact in extra) and extra.total() == len(extra)
    calls: dict[Any, bool] = {}  # (step, …) of a call -> whether any of its facts is new
    for fact in extra:
        call = fact[1] if table == "metrics" else fact[:2]
        calls[call] = calls.get(call, False) or not listed[fact]
    return len(calls) <= len(killed) and all(calls.values())


def _read_ledger(folder: Path) -> tuple[dict[str, "Counter[Any]"], set[int]]:
    """What all processes listed, per table, and the pids that listed anything. A line cut by the kill is no line."""
    listed: dict[str, Counter[Any]] = {"metrics": Counter(), "generations": Counter(), "spans": Counter()}
    pids: set[int] = set()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            entry = json.loads(line)
            pids.add(int(path.stem))
            if entry["kind"] == "metrics":
                for key, value in entry["values"].items():
                    number = float.fromhex(value) if isinstance(value, str) else float(value)
                    listed["metrics"][_comparable(key, entry["step"], number)] += 1
            elif entry["kind"] == "generation":
                listed["generations"][_generation(entry)] += 1
            else:
                listed["spans"][entry["span_id"]] += 1
    return listed, pids


def _comparable(key: str, step: int, value: float) -> tuple[str, int, str]:
    """A metric as the two sides can be compared: the value in hex, because NaN is not equal to itself."""
    return key.replace("@", "_at_"), step, value.hex()  # MLflow refuses "@"; verl replaces it in the same way


def _generation(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["split"], row["step"], row["index"], row["input"], row["output"], float(row["score"]).hex()


def _held_metrics(database: sqlite3.Connection, run_uuid: str) -> "Counter[Any]":
    rows = database.execute("select key, step, value, is_nan from metrics where run_uuid = ?", (run_uuid,))
    return Counter(_comparable(key, step, float("nan") if is_nan else value) for key, step, value, is_nan in rows)


def _held_generations(artifacts: Path) -> "Counter[Any]":
    held: Counter[Any] = Counter()
    for path in sorted((artifacts / "generations").rglob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        held.update(_generation(dict(zip(table["columns"], row, strict=True))) for row in table["data"])
    return held


def _held_spans(database: sqlite3.Connection) -> "Counter[Any]":
    return Counter(span_id.removeprefix("0x") for (span_id,) in database.execute("select span_id from spans"))


def _local_path(artifact_uri: str, folder: Path) -> Path:
    path = Path(unquote(urlparse(artifact_uri).path) if artifact_uri.startswith("file:") else artifact_uri)
    return path if path.is_absolute() else folder / path


# --- show


def _show_curves(folder: Path) -> None:
    """Score in training and accuracy in validation over steps, from the spool; of a step taken twice, the later attempt."""
    metrics = spool.open(folder / "spool-data").runs()[0].metrics()
    rows = list(zip(*(metrics[name].to_pylist() for name in ("key", "step", "value")), strict=True))
    scores = {step: value for key, step, value in rows if key == "critic/score/mean"}
    accuracies = {step: value for key, step, value in rows if key.startswith("val-core/") and "/acc/" in key}
    print(f"  {'step':>4}  {'score':>5}  in training")
    for step, score in sorted(scores.items())[:: max(1, len(scores) // CURVE_LINES)]:
        print(f"  {step:>4}  {score:5.2f}  {'█' * round(score * CURVE_WIDTH)}")
    print(f"\n  {'step':>4}  {'acc':>5}  on validation problems, greedy")
    for step, accuracy in sorted(accuracies.items()):
        print(f"  {step:>4}  {accuracy:5.2f}  {'█' * round(accuracy * CURVE_WIDTH)}")


def _headline(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def _fail(message: str) -> NoReturn:
    sys.exit(f"demo: {message}")


if __name__ == "__main__":
    main()
