"""What was logged, by table, against what is read back and what is said to be lost: the sum is exact, and in order."""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from spool import seal
from spool.reader import RunReader, Spool
from spool.run import Run

TABLES = ("metrics", "generations", "spans")


class Tally:
    """Logs one record of each kind at each step, the step counting up; `pad` is the length of their texts."""

    def __init__(self, run: Run, pad: int = 200) -> None:
        self.run = run
        self.pad = pad
        self.steps = 0

    def log(self, times: int) -> None:
        for _ in range(times):
            text = os.urandom(self.pad // 2).hex()
            self.run.log({"a": self.steps / 3, "text": text}, step=self.steps)
            self.run.log_generations(step=self.steps, rows=[{"input": text, "output": "42"}])
            self.run.span("tool", step=self.steps, inputs=text).start()
            self.steps += 1

    def check(self, *, losses: bool | None = None) -> Counter[str]:
        """Returns what was lost, by table; `losses` says whether there must be some."""
        return check(Spool(self.run.path.parent).run(self.run.id), dict.fromkeys(TABLES, self.steps), losses=losses)


def check(run: RunReader, logged: dict[str, int], *, losses: bool | None = None) -> Counter[str]:
    found = {table: steps(run, table) for table in TABLES}
    for table, by_writer in found.items():
        for writer, mine in by_writer.items():
            assert mine == sorted(set(mine)), f"{table} of {writer}: twice, or out of order"
    lost: Counter[str] = sum((Counter(one.records) for one in run.losses()), Counter())
    assert {table: sum(map(len, found[table].values())) + lost[table] for table in TABLES} == logged
    assert run.damage() == []
    if losses is not None:
        assert bool(lost) == losses
    return lost


def steps(run: RunReader, table: str) -> dict[str, list[int]]:
    """The steps of a table's records in order of seq, by writer."""
    found: dict[str, list[int]] = {}
    for writer in run.writers():
        rows = [row for batch in writer.batches(table) for row in batch.select(["seq", "step"]).to_pylist()]
        found[writer.id] = list({row["seq"]: row["step"] for row in rows}.values())
    return found


def until(is_so: Callable[[], object], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def seal_all(run: Path) -> None:
    for journal in sorted(run.glob("*/*.jsonl")):
        seal.seal(journal)


def fill(folder: Path) -> Path:
    """A file that takes all that is left of a disk."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def mounted(folder: Path, *arguments: str) -> str:
    """Mount onto a new folder; why not, where that is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "not allowed"
