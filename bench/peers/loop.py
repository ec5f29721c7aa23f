"""One tracker, one process: log in a loop until killed, or read back what a killed one has left.

    python loop.py log TRACKER TIMES_FILE CALLS PAUSE_S      (in an empty folder, with a HOME of its own)
    python loop.py read TRACKER

`log` writes the ns of each call into TIMES_FILE, a mapped file: int64 number of calls that returned, then one int64 a
call. The parent watches the number and kills; the file survives it. `read` prints how many whole calls of 50 metrics are
there, by the tracker's own reader.
"""

import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

METRICS = 50
Log = Callable[[dict[str, float], int], object]


def main() -> None:
    mode, tracker = sys.argv[1:3]
    if mode == "read":
        steps = Counter(step for step, count in READ[tracker]() for _ in range(count))
        print(sum(count >= METRICS for count in steps.values()))
        return
    times, calls, pause_s = Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    log = BEGIN[tracker]()
    with times.open("r+b") as file:
        slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        clock = time.perf_counter_ns
        for step in range(1, calls + 1):
            data = {f"actor/metric_{place:02d}": step + place / 7 for place in range(METRICS)}
            begin = clock()
            log(data, step)
            slots[step] = clock() - begin
            slots[0] = step
            if pause_s:
                time.sleep(pause_s)
    time.sleep(600)  # to be killed


def begin_spool() -> Log:
    import spool

    run = spool.init(project="bench", experiment="peers", dir="spool")
    return lambda data, step: run.log(data, step=step)


def read_spool() -> Iterable[tuple[int, int]]:
    import spool

    metrics = spool.open("spool").runs()[0].metrics()
    return ((step, 1) for step in metrics["step"].to_pylist())


def begin_wandb() -> Log:
    import wandb

    settings = wandb.Settings(console="off", x_disable_stats=True, quiet=True, silent=True)
    run = wandb.init(project="bench", mode="offline", settings=settings)
    return lambda data, step: run.log(data, step=step)


def read_wandb() -> Iterable[tuple[int, int]]:
    """wandb 0.31 has no Python reader of its own file: its record framing here, its protobuf from its package."""
    import json
    import struct

    from wandb.proto.wandb_internal_pb2 import Record

    [path] = Path("wandb").glob("offline-run-*/*.wandb")
    content, at, pieces = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0 or at + 7 + length > len(content):
            return
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, pieces = Record.FromString(pieces), b""
            if record.WhichOneof("record_type") == "history":
                values = {(one.nested_key or [one.key])[0]: one.value_json for one in record.history.item}
                yield json.loads(values["_step"]), sum(key.startswith("actor/") for key in values)


def begin_swanlab() -> Log:
    import swanlab

    swanlab.init(project="bench", mode="offline", log_dir="swanlog")
    return lambda data, step: swanlab.log(data, step=step)


def read_swanlab() -> Iterable[tuple[int, int]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [path] = Path("swanlog").glob("run-*/run-*.swanlab")
    if path.stat().st_size == 0:
        return
    reader = DataStoreReader()
    reader.open(str(path))
    for content in reader:
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "scalar" and record.scalar.key.startswith("actor/"):
            yield record.scalar.step, 1
    reader.close()


def begin_mlflow(*, synchronous: bool = True) -> Log:
    import mlflow

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("bench")
    mlflow.start_run()
    return lambda data, step: mlflow.log_metrics(data, step=step, synchronous=synchronous)


def begin_mlflow_async() -> Log:
    return begin_mlflow(synchronous=False)


def read_mlflow() -> Iterable[tuple[int, int]]:
    import mlflow

    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    experiment = client.get_experiment_by_name("bench")
    if experiment is None:
        return
    [run] = client.search_runs([experiment.experiment_id])
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            yield metric.step, 1


def begin_trackio() -> Log:
    import trackio

    trackio.init(project="bench", name="peers", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return lambda data, step: trackio.log(data, step=step)


def read_trackio() -> Iterable[tuple[int, int]]:
    from trackio.sqlite_storage import SQLiteStorage

    for row in SQLiteStorage.get_logs("bench", "peers"):
        yield row["step"], sum(key.startswith("actor/") for key in row)


def begin_tensorboard() -> Log:
    """An event a metric, which is what torch's SummaryWriter.add_scalar hands to this writer."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter("events")

    def log(data: dict[str, float], step: int) -> None:
        for key, value in data.items():
            summary = Summary(value=[Summary.Value(tag=key, simple_value=value)])
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return log


def read_tensorboard() -> Iterable[tuple[int, int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("events", size_guidance={"scalars": 0})
    events.Reload()
    for key in events.Tags()["scalars"]:
        for scalar in events.Scalars(key):
            yield scalar.step, 1


BEGIN: dict[str, Callable[[], Log]] = {
    "spool": begin_spool,
    "wandb": begin_wandb,
    "swanlab": begin_swanlab,
    "mlflow": begin_mlflow,
    "mlflow_async": begin_mlflow_async,
    "trackio": begin_trackio,
    "tensorboard": begin_tensorboard,
}
READ: dict[str, Callable[[], Iterable[tuple[int, int]]]] = {
    "spool": read_spool,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
    "mlflow": read_mlflow,
    "mlflow_async": read_mlflow,
    "trackio": read_trackio,
    "tensorboard": read_tensorboard,
}

if __name__ == "__main__":
    main()
