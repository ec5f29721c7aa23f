"""A small language for journals on disk: write, read, cut, flip, reopen. Used by the suites of the write side."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spool
from spool import format
from spool.journal import Scan, scan
from spool.reader import RunReader, WriterReader
from spool.run import Run


@dataclass
class JournalFile:
    """One journal and what was logged into it."""

    path: Path
    content: bytes

    @property
    def lines(self) -> list[bytes]:
        """With their newlines; the first is the header."""
        return self.content.splitlines(keepends=True)

    def starts(self) -> list[int]:
        """Byte at which each line begins."""
        return [sum(map(len, self.lines[:at])) for at in range(len(self.lines))]

    def write(self, content: bytes) -> Scan:
        self.path.write_bytes(content)
        return scan(self.path)

    def cut(self, length: int) -> Scan:
        return self.write(self.content[:length])

    def flip(self, at: int, bits: int = 1) -> Scan:
        return self.write(self.content[:at] + bytes([self.content[at] ^ bits]) + self.content[at + 1 :])

    def fill(self, start: int, end: int, byte: bytes = b"\0") -> Scan:
        return self.write(self.content[:start] + byte * (end - start) + self.content[end:])

    def arrange(self, *order: int) -> Scan:
        """The lines in another order, some left out or repeated."""
        return self.write(b"".join(self.lines[at] for at in order))

    def reopen(self) -> WriterReader:
        return WriterReader(self.path.parent)


def begin(folder: Path, **settings: Any) -> Run:
    return spool.init(project="tests", experiment="journals", dir=folder / "spool", **settings)


def begin_without_thread(folder: Path, **settings: Any) -> Run:
    """Its background thread has ended: the test calls `_tick` and `_rotate` in its place, when it wants to."""
    run = begin(folder, **settings)
    writer = run._writer
    assert writer is not None
    writer._stop.set()
    writer._wake.set()
    writer._thread.join()
    writer._stop.clear()
    return run


def reader(run: Run) -> RunReader:
    return spool.open(run.path.parent).run(run.id)


def own_writer(run: Run) -> WriterReader:
    assert run._writer is not None
    return WriterReader(run._writer.folder)


def journal_path(run: Run) -> Path:
    assert run._writer is not None
    return run._writer.path


def records(path: Path) -> list[dict[str, Any]]:
    """Every intact record of a journal, as written."""
    return list(scan(path).records())


def last_line(run: Run) -> dict[str, Any]:
    return format.decode(journal_path(run).read_bytes().splitlines()[-1])


def rows(run: Run, table: str = "metrics") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = getattr(reader(run), table)().to_pylist()
    return found


def copy_of(run: Run, folder: Path) -> RunReader:
    """The run as another machine gets it; the original may still be written."""
    shutil.copytree(run.path, folder / "copy" / run.id)
    return spool.open(folder / "copy").run(run.id)


@contextmanager
def small_journal(folder: Path, calls: int = 5) -> Iterator[JournalFile]:
    """A journal of one `attempt` event (seq 1) and `calls` metric records, by a writer that has gone."""
    run = begin(folder, durability="os")
    for step in range(calls):
        run.log({"a": step + 0.5, "text": f"line {step}"}, step=step)
    path = journal_path(run)
    header, _, *lines = path.read_bytes().splitlines(keepends=True)
    attempt = format.record_line(
        1, 1, None, None, format.event_body("attempt", {})
    )  # shorter than the packages of this machine
    content = b"".join([header, attempt, *lines])
    run.finish()
    shutil.rmtree(path.parent / "000001", ignore_errors=True)
    path.write_bytes(content)
    yield JournalFile(path, content)
