"""A small language for spools on disk: write, read, cut, flip, replace, reopen, and compare with what was logged."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import spool
from spool import format, layout, seal, start
from spool.journal import Damage, Scan, scan
from spool.reader import RunReader, WriterReader
from spool.record import keep
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
    return without_thread(begin(folder, **settings))


def without_thread(run: Run) -> Run:
    writer = run._writer
    assert writer is not None
    writer._stop.set()
    writer._wake.set()
    writer._thread.join()
    writer._stop.clear()
    return run


def begin_small(root: Path, run_id: str, *, is_lead: bool = True) -> Run:
    """A writer of a run that says nothing of this machine, so that every byte of it can be tried; without its thread."""
    path = root / run_id
    if not path.is_dir():
        start._mint(root, run_id, "tests", "small", {"lr": 1.0}, True, keep, {})
    info = layout.run_info(path)
    settings: dict[str, Any] = {"continues": None, "durability": "os", "redact": None, "strict": False}
    return without_thread(Run(path, info, dict(info["attempt"]), is_lead=is_lead, **settings))


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


Row = tuple[int, str]
"""seq, and the whole row as text: equal to the last bit, NaN too."""


@dataclass
class Logged:
    """A run on disk, intact, and the rows that were logged into it: what every reading after damage is compared with."""

    path: Path
    rows: dict[str, dict[str, list[Row]]]
    """By writer and table, in order."""
    contents: dict[str, bytes]
    """By name relative to the run's folder."""

    def changed(self, changes: dict[str, bytes | None]) -> "Changed":
        """Some files with other bytes, or removed; as logged again afterwards."""
        return Changed(self, changes)

    def names(self, suffix: str) -> list[str]:
        return sorted(name for name in self.contents if name.endswith(suffix))

    def below(self, folder: str) -> dict[str, bytes]:
        """The files of a folder, by their names in it."""
        return {
            name.removeprefix(f"{folder}/"): content
            for name, content in self.contents.items()
            if name.startswith(f"{folder}/")
        }

    def seqs(self, writer: str, table: str | None = None) -> set[int]:
        return {seq for name, rows in self.rows[writer].items() if table in (None, name) for seq, _ in rows}


class Changed:
    def __init__(self, logged: Logged, changes: dict[str, bytes | None]) -> None:
        self._logged, self._changes = logged, changes

    def __enter__(self) -> None:
        for name, content in self._changes.items():
            _put(self._logged.path / name, content)

    def __exit__(self, *_: object) -> None:
        for name in self._changes:
            _put(self._logged.path / name, self._logged.contents.get(name))


def _put(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return
    path.unlink(missing_ok=True)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def whole_rows(run: RunReader) -> dict[str, dict[str, list[Row]]]:
    """What readers hand out of a run, by writer and table, every row with all its columns."""
    return {writer.id: {name: list(_rows_of(writer, name)) for name in format.TABLES} for writer in run.writers()}


def _rows_of(writer: WriterReader, table: str) -> Iterator[Row]:
    for batch in writer.batches(table):
        columns = [
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns
        ]
        cells = zip(*(column.to_pylist() for column in columns), strict=True)
        at = batch.schema.get_field_index("seq")
        yield from ((row[at], repr(row)) for row in cells)


def logged(run: RunReader) -> Logged:
    files = [path for path in run.path.rglob("*") if path.is_file()]
    contents = {str(path.relative_to(run.path)): path.read_bytes() for path in files}
    return Logged(run.path, whole_rows(run), contents)


def fill_journals(run: Run, *, journals: int = 3, calls: int = 4, label: str = "") -> None:
    """Log every kind of record into several journals; the last is left open."""
    writer = run._writer
    assert writer is not None
    for number in range(journals):
        if number:
            writer._rotate()
        for at in range(calls):
            step = number * calls + at
            if at % 4 == 0:
                run.log({"loss": step + 0.5, "nan": float("nan"), "note": f"{label}é"}, step=step)
            elif at % 4 == 1:
                run.log_generations(step=step, rows=[{"input": f"{label}{step}", "output": "42", "score": 1.0}])
            elif at % 4 == 2:
                run.tag(stage=f"{label}{step}")
            else:
                run.span("tool", step=step, inputs={"a": [step, label]}).start()


def seal_small(writer: Path, number: int, *, keep_journal: bool = False) -> None:
    journal = writer / format.journal_name(number)
    seal.seal(journal)
    if not keep_journal:
        assert seal.remove_sealed(journal)


def writer_folder(run: Run) -> Path:
    assert run._writer is not None
    return run._writer.folder


def covered(damage: Iterable[Damage], writer: Path) -> "list[range]":
    """The seqs of a writer that were reported; without an end where the last one is unknown."""
    return [
        range(one.first_seq, (one.last_seq or 1 << 40) + 1)
        for one in damage
        if one.first_seq is not None and one.path.startswith(str(writer))
    ]
