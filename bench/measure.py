"""What every bench here needs: the machine in one line, percentiles, Markdown tables, a full journal to work on."""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spool import files, format, journal
from spool.writer import SEAL_BYTES

KEYS = [f"actor/metric_{place:02d}" for place in range(50)]
FLOATS = {key: 0.123456789 * place + 1 / 3 for place, key in enumerate(KEYS)}


def parser(description: str | None) -> argparse.ArgumentParser:
    """With what every bench takes; each adds its own sizes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    return made


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """A temporary folder, and the machine on stdout."""
    print(f"\n{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="spool-bench-", dir=folder) as path:
        yield Path(path)


def machine() -> str:
    words = [
        time.strftime("%Y-%m-%d"),
        _cpu(),
        f"{os.cpu_count()} cores",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.1f}",
    ]
    return ", ".join(words)


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(": ")[1] if names else platform.processor()


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values: Iterable[float]) -> float:
    return percentile(values, 0.5)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, the first column to the left; rows appear as they are measured."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" + "---:|" * (len(head) - 1), flush=True)
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(flush=True)


def full_journal(folder: Path, size_bytes: int = SEAL_BYTES) -> tuple[Path, int]:
    """A journal of 50 metrics a record, as full as the writer makes one; and how many metrics it holds."""
    writer = folder / "run" / "writer"
    files.make_folder(writer)
    header = {
        "run": "run",
        "writer": "writer",
        "attempt": {"id": "1-000000", "number": 1},
        "journal": 1,
        "first_seq": 1,
    }
    descriptor, size = journal.create(writer, 1, header)
    seq = 0
    while size < size_bytes:
        seq += 1
        data = {key: value + seq * 1e-7 for key, value in FLOATS.items()}
        line = format.record_line(seq, time.time_ns(), seq, None, format.fast_metrics(data) or b"")
        size += files.write(descriptor, line)
    files.close(descriptor)
    return writer / format.journal_name(1), seq * len(FLOATS)


def unseal(path: Path) -> None:
    files.remove(path.parent / format.segment_name(int(path.stem)))


def size_bytes(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def require(holds: bool, reason: str) -> None:
    """A figure of a run that lost or broke something is no figure."""
    if not holds:
        sys.exit(reason)
