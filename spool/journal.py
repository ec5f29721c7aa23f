"""The journal: create one, and find every intact record in one, whatever happened to the rest.

`scan` never raises for damage. A torn tail (an incomplete last line) is not damage: the writer was killed in the middle
of a write, or is still writing. Everything else that does not prove itself is reported with its place, and reading goes
on at the next newline.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spool import files, format

_BLOCK_SIZE_BYTES = 1 << 20
_TAIL_SIZE_BYTES = 1 << 14
_MISMATCH = "checksum mismatch"


@dataclass(frozen=True)
class Damage:
    """A range of recorded data that does not prove itself. `first_seq`/`last_seq` are null where nobody can know.

    `fetch` names what is absent, relative to the spool, where the bytes that are here are all good: an incomplete copy,
    which is whole again once that is fetched from where it came from. Null: what is here is not what was written.
    """

    path: str
    offset: int
    length: int
    reason: str
    first_seq: int | None = None
    last_seq: int | None = None
    fetch: str | None = None

    def __str__(self) -> str:
        if self.fetch is not None:
            return f"incomplete copy: fetch {self.fetch}: {self.reason} ({self._seqs()})"
        return f"{self.path}: {self.reason} at byte {self.offset}, {self.length} bytes ({self._seqs()})"

    def _seqs(self) -> str:
        if self.first_seq is None:
            return "no record is known to be missing"
        if self.first_seq == self.last_seq:
            return f"seq {self.first_seq}"
        return f"seq {self.first_seq} to {'unknown' if self.last_seq is None else self.last_seq}"


def create(folder: Path, number: int, header: dict[str, Any]) -> tuple[int, int]:
    """Create journal `number` with its header line; returns (descriptor, size in bytes).

    The name is durable when this returns; header and records are from the next `files.sync_data` on.
    """
    descriptor = files.create_append(folder / format.journal_name(number))
    line = format.header_line(header)
    if files.write(descriptor, line) != len(line):
        files.close(descriptor)
        raise OSError(f"{folder / format.journal_name(number)}: short write of the journal's header; is the disk full?")
    return descriptor, len(line)


@dataclass
class Scan:
    """Where the intact records of a journal are, in seq order, each once."""

    path: Path
    header: dict[str, Any] | None = None
    seqs: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    damage: list[Damage] = field(default_factory=list)
    valid_length: int = 0
    """Bytes up to and including the last complete line."""
    size: int = 0
    sha256: str = ""
    """Of the first `valid_length` bytes."""

    @property
    def is_torn(self) -> bool:
        """Whether bytes follow the last complete line."""
        return self.size > self.valid_length

    @property
    def last_seq(self) -> int:
        return self.seqs[-1] if self.seqs else (self.header or {}).get("first_seq", 1) - 1

    def last_record(self) -> dict[str, Any] | None:
        return next(self.records(self.last_seq - 1), None)

    def records(self, after_seq: int = 0) -> Iterator[dict[str, Any]]:
        """The records with seq > after_seq, decoded, in seq order."""
        with self.path.open("rb") as file:
            for seq, offset, length in zip(self.seqs, self.offsets, self.lengths, strict=True):
                if seq > after_seq:
                    file.seek(offset)
                    yield format.decode(file.read(length))


def last_line(path: Path) -> bytes | None:
    """The last intact line of a journal, header or record, without its newline: reads from the end, as little as it can.

    For looking on (lists, rosters); what counts as read is only what `scan` finds.
    """
    window = _TAIL_SIZE_BYTES
    with path.open("rb") as file:
        size = file.seek(0, 2)
        while True:
            start = max(0, size - window)
            file.seek(start)
            first, *lines = file.read(size - start).split(b"\n")
            if start == 0:
                lines.insert(0, first)
            for line in reversed(lines):
                for _, piece in reversed(format.split_at_lost_newline(line)):
                    if format.is_intact(piece):
                        return piece
                if format.is_intact(line[:-1]):  # only its newline is damaged
                    return line[:-1]
            if start == 0:
                return None
            window *= 16


def scan(path: Path, start: int = 0) -> Scan:
    """Check every line from byte `start` (a line's beginning) on. Reads at the speed of the checksum, memory stays flat."""
    result = Scan(path)
    digest = hashlib.sha256()
    bad: list[tuple[int, int, str]] = []
    for offset, line in _lines(path, start, result):
        digest.update(line)
        result.valid_length = offset + len(line)
        _take(result, bad, offset, line[:-1])
        if not line.endswith(b"\n"):
            bad.append((offset + len(line) - 1, 1, "damaged newline"))
    result.valid_length = max(result.valid_length, start)
    result.sha256 = digest.hexdigest()
    _order(result, bad)
    _name_gaps(result, bad, started=start > 0)
    return result


def _lines(path: Path, start: int, result: Scan) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of every complete line.

    The last one is complete too when only its newline is damaged: a writer leaves a record without its newline when it is
    killed, but never with another byte in its place.
    """
    with path.open("rb") as file:
        file.seek(start)
        offset, pieces = start, []
        while block := file.read(_BLOCK_SIZE_BYTES):
            lines = block.split(b"\n")
            for line in lines[:-1]:
                pieces.append(line)
                whole = b"".join(pieces) + b"\n"
                pieces = []
                yield offset, whole
                offset += len(whole)
            pieces.append(lines[-1])
    tail = b"".join(pieces)
    result.size = offset + len(tail)
    *complete, (start, last) = format.split_at_lost_newline(tail)
    if format.is_intact(last[:-1]):
        yield offset, tail
    elif any(format.is_intact(piece) for _, piece in complete):
        yield offset, tail[:start]


def _take(result: Scan, bad: list[tuple[int, int, str]], offset: int, line: bytes) -> None:
    """File one complete line under records, header or damage."""
    if format.is_intact(line):
        _file_intact(result, bad, offset, line)
        return
    pieces = format.split_at_lost_newline(line)
    if not any(format.is_intact(piece) for _, piece in pieces):
        bad.append((offset, len(line) + 1, _MISMATCH))
        return
    for inner, piece in pieces:
        if format.is_intact(piece):
            _file_intact(result, bad, offset + inner, piece)
        else:
            bad.append((offset + inner, len(piece), _MISMATCH))
        if offset + inner > offset:
            bad.append((offset + inner - 1, 1, "damaged newline"))


def _file_intact(result: Scan, bad: list[tuple[int, int, str]], offset: int, line: bytes) -> None:
    seq = format.seq_of_line(line)
    if seq is not None:
        result.seqs.append(seq)
        result.offsets.append(offset)
        result.lengths.append(len(line))
        return
    if result.header is None:
        result.header = format.decode(line)
        format.check_format(result.header.get("format"), str(result.path))
    if offset > 0:
        bad.append((offset, len(line) + 1, "a header that is not the first line"))


def _order(result: Scan, bad: list[tuple[int, int, str]]) -> None:
    """Put swapped lines in order and keep a repeated line once; both are damage, since a writer makes neither."""
    seqs = result.seqs
    if all(map(int.__lt__, seqs, seqs[1:])):
        return
    highest = 0
    for seq, offset, length in zip(seqs, result.offsets, result.lengths, strict=True):
        if seq <= highest:
            bad.append((offset, length + 1, f"record {seq} out of order or repeated"))
        highest = max(highest, seq)
    first: dict[int, tuple[int, int]] = {}
    for seq, offset, length in zip(seqs, result.offsets, result.lengths, strict=True):
        first.setdefault(seq, (offset, length))
    result.seqs = array("q", sorted(first))
    result.offsets = array("q", (first[seq][0] for seq in result.seqs))
    result.lengths = array("q", (first[seq][1] for seq in result.seqs))


class _Gap(NamedTuple):
    """Missing seqs, and the bytes between the intact records around them; `last` is None after the last record."""

    start: int
    end: int
    first: int
    last: int | None


def _gaps(result: Scan, started: bool) -> list[_Gap]:
    if result.header is not None:
        expected = int(result.header["first_seq"])
    elif not started and int(result.path.stem) == 1:
        expected = 1
    elif result.seqs:
        expected = result.seqs[0]
    else:
        return []
    gaps, end = [], 0
    for seq, offset, length in zip(result.seqs, result.offsets, result.lengths, strict=True):
        if seq > expected:
            gaps.append(_Gap(end, offset, expected, seq - 1))
        expected, end = seq + 1, offset + length
    return [*gaps, _Gap(end, result.size, expected, None)]


def _name_gaps(result: Scan, bad: list[tuple[int, int, str]], started: bool) -> None:
    """Turn bad ranges and missing seqs into Damage: a gap belongs to the first bad line between its neighbours.

    What a bad line after the last intact record held, only the next journal tells.
    """
    if result.header is None and not started and result.valid_length and all(offset > 0 for offset, _, _ in bad):
        bad.append((0, 0, "no header line"))
    gaps = _gaps(result, started)
    for offset, length, reason in sorted(bad):
        found = None
        if reason == _MISMATCH and (
            started or result.header is not None or offset > 0
        ):  # a bad first line is the header
            found = next((gap for gap in gaps if gap.start <= offset < gap.end), None)
        first, last = None, None
        if found is not None:
            gaps.remove(found)
            first, last = found.first, found.last
        result.damage.append(Damage(str(result.path), offset, length, reason, first, last))
    for gap in gaps:
        if gap.last is not None:
            result.damage.append(Damage(str(result.path), gap.end, 0, "records missing", gap.first, gap.last))
