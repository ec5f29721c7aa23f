"""Records a second from many processes on one run, and whether every one of them is there afterwards.

    python bench/many_processes.py [--processes N] [--records N] [--rounds N]

Each process is a writer of its own of the same run and logs small records (two metrics) in a tight loop; all begin at the
same moment. The rate is all records over the time from the first begin to the last end, without init and finish. Then the
run is read back: each writer must have logged each step once, with its values.
"""

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pyarrow.compute as pc
from measure import median, parser, require, table, workplace

import spool


def write(
    folder: Path,
    run_id: str,
    number: int,
    records: int,
    barrier: Barrier,
    spans: "multiprocessing.Queue[tuple[float, float, float]]",
) -> None:
    run = spool.init(project="bench", dir=folder, run_id=run_id, role="worker")
    barrier.wait()
    begin, cpu = time.monotonic(), time.process_time()
    for step in range(records):
        run.log({"a": float(step), "b": number + 0.5}, step=step)
    spans.put((begin, time.monotonic(), time.process_time() - cpu))
    run.finish()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--processes", type=int, default=8)
    arguments.add_argument("--records", type=int, default=100_000, help="a process")
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        rounds = [
            measure(folder / f"spool-{number}", chosen.processes, chosen.records) for number in range(chosen.rounds)
        ]
    rates, by_cpu = zip(*rounds, strict=True)
    total = chosen.processes * chosen.records
    table(
        ["processes", "records", "records/s, median", "best round", "a CPU second", "lost"],
        [[chosen.processes, f"{total:,}", f"{median(rates):,.0f}", f"{max(rates):,.0f}", f"{median(by_cpu):,.0f}", 0]],
    )


def measure(folder: Path, processes: int, records: int) -> tuple[float, float]:
    """(records a second, records a second of processor time)."""
    context = multiprocessing.get_context("spawn")
    run = spool.init(project="bench", experiment="processes", dir=folder)
    barrier, spans = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=write, args=(folder, run.id, number, records, barrier, spans))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    times = [spans.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
        require(worker.exitcode == 0, "a process failed")
    run.finish()
    check(folder, processes, records)
    begins, ends, cpu_s = zip(*times, strict=True)
    return processes * records / (max(ends) - min(begins)), processes * records / sum(cpu_s)


def check(folder: Path, processes: int, records: int) -> None:
    """Every record of every writer is there, once, in its order, with its value."""
    [run] = spool.open(folder).runs()
    require(run.damage() == [], f"damage: {run.damage()}")
    own = [writer for writer in run.writers() if any(map(len, writer.batches("metrics")))]
    require(len(own) == processes, f"{len(own)} writers with metrics, of {processes}")
    for writer in own:
        keys = {"a": [], "b": []}
        for batch in writer.batches("metrics"):
            for key, found in keys.items():
                found.append(batch.filter(pc.equal(batch["key"].cast("string"), key)))
        steps = [step for batch in keys["a"] for step in batch["step"].to_pylist()]
        values = [value for batch in keys["a"] for value in batch["value"].to_pylist()]
        constants = {value for batch in keys["b"] for value in batch["value"].to_pylist()}
        require(steps == list(range(records)) == list(map(int, values)), f"{writer.path}: not what was logged")
        require(len(constants) == 1, f"{writer.path}: values of two writers")


if __name__ == "__main__":
    main()
