"""p99 of `log()` with 50 metrics while a full journal is being sealed, beside the same loop at the same time without.

    python bench/log_while_sealing.py [--rounds N]

Three loops: tight; 1 kHz; 8 threads at 100 calls a second each. Windows alternate: one as long as a seal takes while a
16 MiB journal is sealed by the child at nice 10, one of the same length without. "call" is the time inside `log()`;
"on time" runs from the scheduled moment to the end of the call, so it holds what the wake-up waits too. The loop's own
journal is never sealed here, so that a window without sealing is one.
"""

import threading
import time
from collections.abc import Callable

from measure import FLOATS, full_journal, median, parser, percentile, require, table, unseal, workplace

import spool
import spool.writer
from spool import seal
from spool.run import Run

THREADS, THREAD_HZ = 8, 100
Times = list[tuple[int, int]]
"""(in the call, from the scheduled moment to its end), ns."""


def tight(run: Run, stop: threading.Event, found: Times) -> None:
    clock, step = time.perf_counter_ns, 0
    while not stop.is_set():
        begin = clock()
        run.log(FLOATS, step=step)
        took = clock() - begin
        found.append((took, took))
        step += 1


def paced(run: Run, stop: threading.Event, found: Times, hz: int = 1000) -> None:
    clock, step = time.perf_counter_ns, 0
    due = clock()
    while not stop.is_set():
        due = max(due + 10**9 // hz, clock() - 10**8)  # a stall counts once, for 0.1 s at most
        time.sleep(max(0, due - clock()) / 1e9)
        begin = clock()
        run.log(FLOATS, step=step)
        end = clock()
        found.append((end - begin, end - due))
        step += 1


def threads(run: Run, stop: threading.Event, found: Times) -> None:
    parts: list[Times] = [[] for _ in range(THREADS)]
    workers = [threading.Thread(target=paced, args=(run, stop, part, THREAD_HZ)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for part in parts:
        found += part


LOOPS: dict[str, Callable[[Run, threading.Event, Times], None]] = {
    "tight": tight,
    "1 kHz": paced,
    f"{THREADS} threads at {THREAD_HZ}/s each": threads,
}


def window(loop: Callable[[Run, threading.Event, Times], None], run: Run, wait: Callable[[], object]) -> Times:
    """The loop's times until `wait`, in a thread of its own, has returned."""
    stop, found = threading.Event(), Times()

    def watch() -> None:
        wait()
        stop.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    loop(run, stop, found)
    watcher.join()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--journal-bytes", type=int, default=spool.writer.SEAL_BYTES)
    chosen = arguments.parse_args()
    spool.writer.SEAL_BYTES = 1 << 40
    with workplace(chosen.folder) as folder:
        full, _ = full_journal(folder / "other", chosen.journal_bytes)
        run = spool.init(project="bench", experiment="sealing", dir=folder / "spool")
        rows = []
        for name, loop in LOOPS.items():
            without, sealing = [], []
            for _ in range(chosen.rounds):
                begin = time.perf_counter()
                child = seal.start(full)
                sealing.append(window(loop, run, child.wait))
                took_s = time.perf_counter() - begin
                require(child.returncode == 0, "the sealing child failed")
                unseal(full)
                without.append(window(loop, run, lambda took_s=took_s: time.sleep(took_s)))
            rows += list(summary(name, without, sealing))
        print(f"{chosen.rounds} seals a loop; median of the windows' percentiles, µs\n")
        table(["loop", "median", "p99", "median, sealing", "p99, sealing", "p99 x"], rows)
        run.finish()


def summary(name: str, without: list[Times], sealing: list[Times]) -> list[list[str]]:
    rows = []
    for place, what in enumerate(("call", "on time")):
        if name == "tight" and place:
            continue

        def at(windows: list[Times], share: float, place: int = place) -> float:
            return median(percentile((one[place] for one in times), share) / 1000 for times in windows if times)

        p99, p99_sealing = at(without, 0.99), at(sealing, 0.99)
        rows.append([
            f"{name}, {what}", f"{at(without, 0.5):.1f}", f"{p99:.0f}", f"{at(sealing, 0.5):.1f}",
            f"{p99_sealing:.0f}", f"{p99_sealing / p99:.2f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
