"""What a disk that takes nothing costs a training loop: healthy, full, and broken, interleaved in one run.

    python bench/full_disk.py [--rounds N] [--folder DIR]

A step is some milliseconds of arithmetic, then 50 metrics, 4 generations and 20 spans. "none" logs nothing. "healthy" is a
disk with room, "full" a small tmpfs that another has filled (Linux, root; otherwise ENOSPC from the fault seam), "EIO" a
disk that fails each write. The full and the broken disk are so from the first measured step to the last, so memory fills
up to its bound, and then each record drives out another. Rounds of ten steps take turns, so all see the same neighbours.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import FLOATS, median, parser, percentile, require, table, workplace

import spool
from spool import files
from spool.run import Run

STEPS_A_ROUND = 10
TEXT = "the quick brown fox jumps over the lazy dog " * 20


def work() -> float:
    """Arithmetic that holds the interpreter, as a trainer's own Python does: nothing hides a lock that is held too long."""
    total = 0.0
    for at in range(1, 45_000):
        total += 1.0 / at
    return total


def record(run: Run, step: int) -> None:
    run.log(FLOATS, step=step)
    run.log_generations(step=step, rows=[{"input": TEXT, "output": TEXT, "score": 1.0}] * 4)
    for _ in range(20):
        with run.span("tool", type="TOOL", step=step, inputs={"text": TEXT[:200]}) as span:
            span.outputs = 42


@contextmanager
def full(folder: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A disk, and how to fill it."""
    disk = folder / "full"
    disk.mkdir()
    is_mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8M", "none", str(disk)], capture_output=True, check=False
        ).returncode
        == 0
    )
    if not is_mounted:
        print("no tmpfs can be mounted here: ENOSPC comes from the fault seam\n")

    def fill() -> None:
        if not is_mounted:
            fail_writes(disk, errno.ENOSPC)
            return
        with (disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    try:
        yield disk, fill
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fail_writes(folder: Path, code: int) -> None:
    """From now on each write into a file below `folder` fails; what others pay for it is one look into a set."""
    write, open_new = files.write, files.open_new
    failing = {int(path.name) for path in Path("/proc/self/fd").iterdir() if is_below(path, folder)}

    def fail(descriptor: int, content: bytes) -> int:
        if descriptor in failing:
            raise OSError(code, os.strerror(code))
        return write(descriptor, content)

    def open_failing(path: Path) -> int:
        descriptor = open_new(path)
        if folder in path.parents:
            failing.add(descriptor)
        return descriptor

    files.write, files.open_new = fail, open_failing


def is_below(link: Path, folder: Path) -> bool:
    try:
        return folder in link.readlink().parents
    except FileNotFoundError:  # the descriptor of the listing itself
        return False


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=200)
    chosen = arguments.parse_args()
    os.environ["SPOOL_RESERVE_BYTES"] = "0"
    with workplace(chosen.folder) as folder, full(folder) as (disk, fill):
        measure(folder, disk, fill, chosen.rounds)


def waiting(run: Run) -> tuple[int, int]:
    """Records in memory, records lost."""
    writer = run._writer  # noqa: SLF001 - no interface of ours tells it
    return (len(writer._deferred.backlog), writer.lost) if writer else (0, 0)  # noqa: SLF001 - as above


def measure(folder: Path, disk: Path, fill: Callable[[], object], rounds: int) -> None:
    where = {"healthy": folder / "healthy", "full": disk / "spool", "EIO": folder / "broken"}
    runs = {name: spool.init(project="bench", experiment=name, run_id=name, dir=path) for name, path in where.items()}
    real_write = files.write
    times: dict[str, list[float]] = {name: [] for name in ("none", *runs)}
    times_of_logging: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        if turn == 1:  # the first round only warms up
            fill()
            fail_writes(where["EIO"], errno.EIO)
            times = {name: [] for name in times}
            times_of_logging = {name: [] for name in runs}
        order = list(times)
        for name in order[turn % 4 :] + order[: turn % 4]:
            for at in range(STEPS_A_ROUND):
                began = time.perf_counter()
                work()
                worked = time.perf_counter()
                if name in runs:
                    record(runs[name], turn * STEPS_A_ROUND + at)
                    times_of_logging[name].append(time.perf_counter() - worked)
                times[name].append(time.perf_counter() - began)
    held = {name: waiting(run) for name, run in runs.items()}
    files.write = real_write
    print(
        f"{rounds} rounds of {STEPS_A_ROUND} steps; a step logs 50 metrics, 4 generations, 20 spans (45 records); ms\n"
    )
    healthy = median(times["healthy"])
    table(
        ["disk", "step", "p99", "x healthy", "logging", "p99", "waiting at the end", "lost"],
        (
            [
                name,
                f"{median(found) * 1e3:.2f}",
                f"{percentile(found, 0.99) * 1e3:.2f}",
                f"{median(found) / healthy:.3f}",
                *(
                    [
                        f"{median(times_of_logging[name]) * 1e3:.2f}",
                        f"{percentile(times_of_logging[name], 0.99) * 1e3:.2f}",
                        *held[name],
                    ]
                    if name in runs
                    else ["", "", "", ""]
                ),
            ]
            for name, found in times.items()
        ),
    )
    for name in ("full", "EIO"):
        require(held[name][0] > 0, f"{name}: the disk took everything, so nothing was measured")
    sys.stdout.flush()
    for run in runs.values():
        run.finish()


if __name__ == "__main__":
    main()
