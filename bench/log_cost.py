"""What `log()` costs the training thread, beside a bare write(2) of the same bytes, in one run.

    python bench/log_cost.py [--calls N] [--folder DIR]

Each call is timed by itself; a bare `os.write` and a `log()` alternate, so both see the same caches, disk and
neighbours. Times in microseconds; "x" is the ratio of medians. The tight loop has no pause; the 1 kHz loop sleeps
between calls, which cools the caches of both. "sealing" rows log while a full 16 MiB journal is being sealed; the loop's
own journal never is. Then the parts of a call, each by itself in a loop with hot caches.
"""

import os
import sys
import threading
import time
import timeit
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import orjson
from measure import FLOATS, full_journal, parser, percentile, require, unseal, workplace

import spool
import spool.writer
from spool import format, seal


def alternate(
    bare: Callable[[], object], log: Callable[[int], object], calls: int, pause_s: float = 0.0
) -> tuple[list[int], list[int]]:
    bare_ns, log_ns = [], []
    clock = time.perf_counter_ns
    for step in range(calls):
        if pause_s:
            time.sleep(pause_s)
        first = clock()
        bare()
        second = clock()
        if pause_s:
            time.sleep(pause_s)
        third = clock()
        log(step)
        fourth = clock()
        bare_ns.append(second - first)
        log_ns.append(fourth - third)
    return bare_ns, log_ns


def show(name: str, bare_ns: list[int], log_ns: list[int]) -> None:
    bare, bare_p99 = (percentile(bare_ns, share) / 1000 for share in (0.5, 0.99))
    log, log_p99 = (percentile(log_ns, share) / 1000 for share in (0.5, 0.99))
    print(
        f"| {name:<34} | {bare:6.1f} | {bare_p99:6.1f} | {log:6.1f} | {log_p99:6.1f} | {log / bare:4.1f} |", flush=True
    )


def values() -> list[tuple[str, dict[str, Any]]]:
    kinds: list[tuple[str, dict[str, Any]]] = [("float", FLOATS)]
    try:
        import numpy as np
    except ImportError:
        return kinds
    kinds.append(("np.float64", {key: np.float64(value) for key, value in FLOATS.items()}))
    kinds.append(("np.float32", {key: np.float32(value) for key, value in FLOATS.items()}))
    try:
        import torch
    except ImportError:
        return kinds
    kinds.append(("torch scalars", {key: torch.tensor(value) for key, value in FLOATS.items()}))
    return kinds


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=20_000)
    arguments.add_argument("--journal-bytes", type=int, default=spool.writer.SEAL_BYTES)
    chosen = arguments.parse_args()
    spool.writer.SEAL_BYTES = 1 << 40
    with workplace(chosen.folder) as folder:
        measure(folder, chosen.calls, chosen.journal_bytes)
        measure_parts(folder, chosen.calls)


def measure(folder: Path, calls: int, journal_bytes: int) -> None:
    run = spool.init(project="bench", experiment="log_cost", dir=folder / "spool")
    line = format.record_line(1_000, time.time_ns(), 1_000, None, format.fast_metrics(FLOATS) or b"")
    descriptor = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    print(f"50 metrics a call, {len(line)} bytes; {calls} calls a row; Python {sys.version.split()[0]}; times in µs\n")
    print(f"| {'':<34} | bare   | p99    | log()  | p99    |  x   |")
    print(f"|{'-' * 36}|-------:|-------:|-------:|-------:|-----:|")

    def bare() -> None:
        os.write(descriptor, line)

    alternate(bare, lambda step: run.log(FLOATS, step=step), calls // 10)  # warm up
    for name, data in values():
        show(f"tight, {name}", *alternate(bare, lambda step, data=data: run.log(data, step=step), calls))
    full, _ = full_journal(folder / "other", journal_bytes)
    bare_ns, log_ns, seals = [], [], 0
    while len(log_ns) < calls:
        child = seal.start(full)
        while child.poll() is None:
            more_bare, more_log = alternate(bare, lambda step: run.log(FLOATS, step=step), 100)
            bare_ns += more_bare
            log_ns += more_log
        require(child.returncode == 0, "the sealing child failed")
        seals += 1
        unseal(full)
    show(f"tight, float, sealing ({seals} seals)", bare_ns, log_ns)
    show("1 kHz, float", *alternate(bare, lambda step: run.log(FLOATS, step=step), min(calls, 4000), pause_s=0.001))
    run.finish()


def measure_parts(folder: Path, calls: int) -> None:
    body = format.fast_metrics(FLOATS) or b""
    descriptor = os.open(folder / "parts", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    line = format.record_line(1_000, time.time_ns(), 1_000, None, body)
    lock = threading.RLock()
    found: dict[str, Callable[[], object]] = {
        "encode the map (orjson)": lambda: orjson.dumps(FLOATS),
        "types and finiteness": lambda: (
            list(map(type, FLOATS.values())).count(float) and isfinite(sum(FLOATS.values()))
        ),
        "test and encode (fast_metrics)": lambda: format.fast_metrics(FLOATS),
        "line and checksum (record_line)": lambda: format.record_line(1, 2, 3, None, body),
        "an RLock": lambda: lock.acquire() and lock.release(),
        "a bare write": lambda: os.write(descriptor, line),
    }
    print("\n| part of a call, hot caches, less an empty call | µs |\n|---|---:|")
    empty = best(lambda: None, calls)
    for name, part in found.items():
        print(f"| {name} | {best(part, calls) - empty:.2f} |", flush=True)


def best(part: Callable[[], object], calls: int) -> float:
    """Microseconds a call, of the best of seven rounds."""
    return min(timeit.repeat(part, number=calls // 4, repeat=7)) / (calls // 4) * 1e6


if __name__ == "__main__":
    main()
