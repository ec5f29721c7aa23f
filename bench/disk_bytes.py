"""Bytes on disk: a metric in Parquet, and a whole run of verl beside what wandb and MLflow write for the same data.

    python bench/disk_bytes.py [--steps N] [--peers] [--python .venv-bench/bin/python]

The random row is the worst case: doubles without structure. The verl rows are bench/verl.py's steps. A peer gets the same
steps in a process of its own (the rows above are the spool's), finishes its run, and all its files are counted. MLflow
gets them in batches of 1,000 metrics, since one call a step would take ten times as long; the rows in its database are
the same.
"""

import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import verl
from measure import KEYS, parser, require, size_bytes, table, workplace
from peer_cost import QUIET, ROOT

import spool
from spool.reader import RunReader


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--random-records", type=int, default=10_000)
    arguments.add_argument("--peers", nargs="*", default=[], choices=list(PEERS))
    arguments.add_argument("--python", type=Path, default=ROOT / ".venv-bench" / "bin" / "python")
    arguments.add_argument("--log", choices=list(PEERS), help="log with one peer into the current folder (for itself)")
    chosen = arguments.parse_args()
    if chosen.log:
        PEERS[chosen.log](chosen.steps)
        return
    with workplace(chosen.folder) as folder:
        rng = random.Random(0)
        noise = [{key: rng.gauss(0, 1) for key in KEYS} for _ in range(chosen.random_records)]
        runs = {
            "random doubles, 50 a record": record(folder / "random", noise),
            "verl, full doubles": record(folder / "verl", steps(chosen.steps)),
            "verl, float32 where verl has it": record(folder / "single", steps(chosen.steps, single=True)),
        }
        table(
            ["data", "metrics", "Parquet, bytes a metric", "journal, bytes a metric", "journals and segments MB"],
            [figures(name, run) for name, run in runs.items()],
        )
        ours = runs["verl, full doubles"]
        rows = [["spool, segments", f"{size_bytes(ours.path, '*.parquet') / 1e6:.1f}"]]
        rows.append(["spool, segments and journals", f"{size_bytes(ours.path) / 1e6:.1f}"])
        sizes = {name: peer(chosen.python, name, folder / name, chosen.steps) for name in chosen.peers}
        rows += [[NAMES[name], f"{size / 1e6:.1f}"] for name, size in sizes.items()]
        print(f"the same {chosen.steps:,} steps, {ours.metrics().num_rows:,} metrics\n")
        table(["files of", "MB"], rows)


def steps(count: int, *, single: bool = False) -> list[dict[str, float | int]]:
    rng = random.Random(0)
    return [verl.metrics(rng, step, single=single) for step in range(1, count + 1)]


def record(folder: Path, data: list[dict[str, Any]]) -> RunReader:
    """Log a call a step at full speed; with pauses, so that it is sealed in journals of the usual size."""
    run = spool.init(project="bench", experiment="disk", dir=folder)
    for step, metrics in enumerate(data, 1):
        run.log(metrics, step=step)
        if step % 1000 == 0:
            time.sleep(0.1)
    run.finish()
    [found] = spool.open(folder).runs()
    logged = sum(map(len, data))
    require(found.metrics().num_rows == logged, f"{found.metrics().num_rows} metrics read back, {logged} logged")
    return found


def figures(name: str, run: RunReader) -> list[str]:
    metrics = run.metrics().num_rows
    parquet, journals = size_bytes(run.path, "metrics.parquet"), size_bytes(run.path, "*.jsonl")
    return [
        name, f"{metrics:,}", f"{parquet / metrics:.2f}", f"{journals / metrics:.1f}", f"{size_bytes(run.path) / 1e6:.1f}",
    ]  # fmt: skip


def peer(python: Path, name: str, folder: Path, count: int) -> int:
    home = folder / "home"
    home.mkdir(parents=True)
    (folder / "data").mkdir()
    environment = {key: os.environ[key] for key in ("PATH", "LANG", "PYTHONPATH") if key in os.environ}
    environment |= QUIET | {"HOME": str(home)}
    command = [str(python), str(Path(__file__).resolve()), "--log", name, "--steps", str(count)]
    done = subprocess.run(command, cwd=folder / "data", env=environment, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{name}: {done.stderr[-2000:]}")
    return size_bytes(folder / "data")


def log_wandb(count: int) -> None:
    import wandb

    run = wandb.init(project="bench", mode="offline", settings=wandb.Settings(console="off", x_disable_stats=True))
    for step, metrics in enumerate(steps(count), 1):
        run.log(metrics, step=step)
    run.finish()
    wandb.teardown()


def log_mlflow(count: int) -> None:
    import mlflow
    from mlflow.entities import Metric

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("bench")
    client, run = mlflow.MlflowClient(), mlflow.start_run()
    now = int(time.time() * 1000)
    waiting: list[Metric] = []
    for step, metrics in enumerate(steps(count), 1):
        waiting += [Metric(key.replace("@", "_at_"), float(value), now + step, step) for key, value in metrics.items()]
        while len(waiting) >= 1000:
            client.log_batch(run.info.run_id, metrics=waiting[:1000])
            waiting = waiting[1000:]
    if waiting:
        client.log_batch(run.info.run_id, metrics=waiting)
    mlflow.end_run()


PEERS = {"wandb": log_wandb, "mlflow": log_mlflow}
NAMES = {"wandb": "wandb offline", "mlflow": "MLflow sqlite"}

if __name__ == "__main__":
    main()
