"""JSON lines in a folder: what would be sent, to be read, or carried elsewhere. Needs no package; the shortest whole destination.

    <place>/<run_id>/run.json                     names, config, tags, status, and the cursor
    <place>/<run_id>/<writer_id>/<table>.jsonl    one row a line, in the order of seq; spans once, when they have ended

A file is right up to the length that the cursor tells, which is written after the rows are durable; what lies behind was on its
way when something was killed, and is cut off and written again. The proof compares every line with the row it must be; from
the first that differs the file is written anew.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from spool import files
from sync.batch import Batch, columns
from sync.destinations import Destination, Proof
from sync.errors import SetupError, TryAgainError
from sync.report import TABLES
from sync.state import RunState

_ORIGIN = ("run_id", "writer_id")  # the path says these
_WORDS = {"nan": b'"NaN"', "inf": b'"Infinity"', "-inf": b'"-Infinity"'}
_DOCUMENTS = ("body", "extra", "inputs", "outputs", "attributes")


class JsonlDestination(Destination):
    label = "jsonl"
    rewind = "keep"
    rows_per_request = MappingProxyType(dict.fromkeys(TABLES, 10_000))

    @classmethod
    def is_elsewhere(cls, place: str | None) -> bool:
        return False

    @classmethod
    def connect(cls, place: str | None) -> str:
        folder = _folder(place)
        try:
            files.make_folder(folder)
        except OSError as error:
            raise SetupError(f"--to jsonl={folder}: {error.strerror}; name a folder that can be written") from error
        return str(folder.absolute())

    @classmethod
    def parallel(cls, place: str | None) -> int:
        return 2

    def __init__(self, state: RunState, place: str | None) -> None:
        self._state = state
        self._path = _folder(place) / state.run_id
        self.conflicts: list[str] = []
        self._known: dict[str, Any] = {}

    # --- the run

    def find(self) -> str | None:
        try:
            known = orjson.loads((self._path / "run.json").read_bytes())
            self._seqs = {writer: dict(seqs) for writer, seqs in known["cursor"].items()}
            self._sizes = {writer: dict(sizes) for writer, sizes in known["bytes"].items()}
            identity = str(known["id"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError, AttributeError):  # edited, or cut: all is written anew
            return None
        self._known = known
        return identity

    def open(self) -> str:
        identity = self.find()
        if identity is None:
            self._seqs, self._sizes, identity = {}, {}, os.urandom(8).hex()
        self._known = {"id": identity}
        for writer in {*self._seqs, *self._sizes}:
            for table in TABLES:
                self._cut(writer, table)
        return identity

    def _cut(self, writer: str, table: str) -> None:
        """Cut off what lies behind the cursor; a file that is shorter than it says is begun anew."""
        path, size = self._file(writer, table), self._sizes.get(writer, {}).get(table, 0)
        actual = path.stat().st_size if path.is_file() else 0
        if actual < size:
            size = self._sizes[writer][table] = 0
            self._seqs.get(writer, {}).pop(table, None)
        if actual > size:
            with path.open("r+b") as file:
                file.truncate(size)

    def held(self) -> dict[str, dict[str, int]]:
        return self._seqs

    def _file(self, writer: str, table: str) -> Path:
        return self._path / writer / f"{table}.jsonl"

    # --- records

    def write(self, batch: Batch) -> None:
        lines = b"".join(_lines(batch))
        with _said():
            if lines:
                path = self._file(batch.writer_id, batch.table)
                files.make_folder(path.parent)
                self._append(path, batch, lines)
            if batch.cursor is not None:
                self.pass_over(batch)
                self._save()

    def _append(self, path: Path, batch: Batch, lines: bytes) -> None:
        """Behind what is there and right: after a try that failed half way, or a proof that found a line wrong, that is less."""
        sizes = self._sizes.setdefault(batch.writer_id, {})
        start = sizes.get(batch.table, 0)
        with path.open("r+b" if path.exists() else "x+b") as file:
            file.seek(start)
            file.truncate()
            file.write(lines)
            file.flush()
            os.fdatasync(file.fileno())
        sizes[batch.table] = start + len(lines)

    def pass_over(self, batch: Batch) -> None:
        if batch.cursor is not None:
            seqs = self._seqs.setdefault(batch.writer_id, {})
            seqs[batch.table] = max(batch.cursor, seqs.get(batch.table, 0))

    def _save(self) -> None:
        files.make_folder(self._path)
        body = {**self._known, "cursor": self._seqs, "bytes": self._sizes}
        files.replace_file(self._path / "run.json", orjson.dumps(body, option=orjson.OPT_INDENT_2))

    # --- the run as a whole

    def settle(self) -> list[str]:
        self._known |= self._wanted()
        with _said():
            self._save()
        return []

    def unsettled(self) -> list[str]:
        try:
            known = orjson.loads((self._path / "run.json").read_bytes())
        except (OSError, ValueError):
            return ["run.json"]
        return [key for key, value in orjson.loads(orjson.dumps(self._wanted())).items() if known.get(key) != value]

    def _wanted(self) -> dict[str, Any]:
        state = self._state
        return {
            "run_id": state.run_id,
            "project": state.project,
            "experiment": state.experiment,
            "created_ns": state.created_ns,
            "status": state.status,
            "end_ns": state.end_ns,
            "attempts": state.attempts,
            "tags": state.tags,
            "config": state.config,
            "host": state.host,
            "user": state.user,
            "command": state.command,
            "commit": state.commit,
        }

    def proof(self) -> "JsonlProof":
        return JsonlProof(self)

    def retract(self) -> list[str]:
        with _said():
            shutil.rmtree(self._path)
        return [f"{self._path} is deleted"]


class JsonlProof(Proof):
    """Reads each file beside the rows it must hold, once, so that memory stays flat."""

    def __init__(self, destination: JsonlDestination) -> None:
        self._of = destination
        self._files: dict[tuple[str, str], tuple[BinaryIO, list[int]]] = {}
        self._wrong: set[tuple[str, str]] = set()
        self._counts = dict.fromkeys(TABLES, 0)

    def holds(self, batch: Batch) -> list[bool]:
        at = (batch.writer_id, batch.table)
        lines = _lines(batch)
        if at in self._wrong:
            return [False] * len(lines)
        file, place = self._open(at)
        wanted = b"".join(lines)
        found = file.read(len(wanted)) if file is not None else b""
        good = len(lines) if found == wanted else _common(lines, found)
        place[0] += sum(map(len, lines[:good]))
        self._counts[batch.table] += good
        if good < len(lines):
            self._give_up(at, place[0])
        return [True] * good + [False] * (len(lines) - good)

    def _open(self, at: tuple[str, str]) -> tuple[BinaryIO | None, list[int]]:
        if at not in self._files:
            path = self._of._file(*at)
            if not path.is_file():
                return None, [0]
            self._files[at] = (path.open("rb"), [0])
        return self._files[at]

    def _give_up(self, at: tuple[str, str], good_bytes: int) -> None:
        """From here on the file is written anew."""
        self._wrong.add(at)
        writer, table = at
        self._of._sizes.setdefault(writer, {})[table] = good_bytes

    def indistinct(self, table: str) -> int:
        return 0

    def count(self, table: str) -> int:
        return self._counts[table] + sum(self._left(at) for at in list(self._files) if at[1] == table)

    def _left(self, at: tuple[str, str]) -> int:
        """Lines that no row was compared with."""
        file, place = self._files.pop(at)
        with file:
            file.seek(place[0])
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _folder(place: str | None) -> Path:
    return Path(place or "spool-jsonl")


def _common(lines: list[bytes], found: bytes) -> int:
    """How many of the lines are there before the first that differs."""
    start = 0
    for number, line in enumerate(lines):
        if found[start : start + len(line)] != line:
            return number
        start += len(line)
    return len(lines)


def _lines(batch: Batch) -> list[bytes]:
    rows = batch.rows
    if batch.table == "spans" and rows.num_rows:
        rows = rows.filter(rows["end"].is_valid())
    if not rows.num_rows:
        return []
    names = [name for name in rows.column_names if name not in _ORIGIN]
    line = b"{" + b",".join(orjson.dumps(name) + b":%b" for name in names) + b"}\n"
    pieces = [_pieces(name, rows[name], values) for name, values in zip(names, columns(rows, *names), strict=True)]
    return [line % values for values in zip(*pieces, strict=True)]


def _pieces(name: str, column: pa.ChunkedArray, values: list[Any]) -> list[bytes]:
    """Each value as JSON. Numbers all at once and each repeated text once: a row at a time takes five times as long."""
    if name in _DOCUMENTS:
        return [b"null" if value is None else value.encode() for value in values]
    if pa.types.is_string(column.type):
        return [orjson.dumps(value) for value in values]
    if pa.types.is_dictionary(column.type):
        texts = {value: orjson.dumps(value) for value in set(values)}
        return [texts[value] for value in values]
    pieces = orjson.dumps(values)[1:-1].split(b",")
    if pa.types.is_floating(column.type):
        for at in pc.indices_nonzero(pc.invert(pc.is_finite(column))).to_pylist():
            pieces[at] = _WORDS[str(values[at])]
    return pieces


@contextmanager
def _said() -> Iterator[None]:
    """A disk that fails may come back."""
    try:
        yield
    except OSError as error:
        raise TryAgainError(f"{error.filename or 'jsonl'}: {error.strerror or error}") from error
