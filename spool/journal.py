"""The journal: create one, and find every intact record in one, whatever happened to the rest.

`scan` never raises for damage. A torn tail (an incomplete last line) is not damage: the writer was killed in the middle
of a write, or is still writing. Everything else that does not prove itself is reported with its place, and reading goes
on at the next newline.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
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
    try:
        files.write_all(descriptor, line)
    except OSError:
        with suppress(OSError):
            files.close(descriptor)
        raise
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

    def records(self, after_seq: int = 0, marks: tuple[bytes, ...] = (b"",)) -> Iterator[dict[str, Any]]:
        """The records with seq > after_seq, decoded, in seq order; only those whose line holds one of the marks."""
        with self.path.open("rb") as file:
            for seq, offset, length in zip(self.seqs, self.offsets, self.lengths, strict=True):
                if seq > after_seq:
                    file.seek(offset)
                    line = file.read(length)
                    if any(map(line.__contains__, marks)):
                        yield format.decode(line)


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
            content = file.read(size - start)
            lines = content[: _complete_length(content)].split(b"\n")
            for line in reversed(lines if start == 0 else lines[1:]):
                intact = [(0, line)] if format.is_intact(line) else format.salvage(line)
                if intact:
                    return intact[-1][1]
            if start == 0:
                return None
            window *= 16


def scan(path: Path, start: int = 0) -> Scan:
    """Check every line from byte `start` (a line's beginning) on. Reads at the speed of the checksum, memory stays flat."""
    result = Scan(path)
    digest = hashlib.sha256()
    bad: list[tuple[int, int, str]] = []
    for offset, content in _complete_lines(path, start, result):
        digest.update(content)
        result.valid_length = offset + len(content)
        for line in content[:-1].split(b"\n"):
            seq = format.seq_of_line(line)
            if seq is not None and format.is_intact(line):
                result.seqs.append(seq)
                result.offsets.append(offset)
                result.lengths.append(len(line))
            else:
                _take(result, bad, offset, line)
            offset += len(line) + 1
        if not content.endswith(b"\n"):
            bad.append((offset - 1, 1, "damaged newline"))
    result.valid_length = max(result.valid_length, start)
    result.sha256 = digest.hexdigest()
    _order(result, bad)
    _name_gaps(result, bad, started=start > 0)
    return result


def _complete_lines(path: Path, start: int, result: Scan) -> Iterator[tuple[int, bytes]]:
    """(offset, complete lines) all through the file; in the very last one only the newline may be damaged."""
    with path.open("rb") as file:
        offset = file.seek(start)
        pieces: list[bytes] = []
        while block := file.read(_BLOCK_SIZE_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                content = b"".join([*pieces, block[:end]])
                yield offset, content
                offset, pieces = offset + len(content), []
            pieces.append(block[end:])
    tail = b"".join(pieces)
    result.size = offset + len(tail)
    complete = _complete_length(tail)
    if complete:
        yield offset, tail[:complete]


def _complete_length(content: bytes) -> int:
    """Bytes up to the end of the last complete line.

    A line is complete too when only its newline is damaged: a writer that is killed leaves a record without its newline, or
    a power cut leaves zeros, but never another byte in its place.
    """
    start = content.rfind(b"\n") + 1
    intact = format.leading(content[start:])
    if intact and not content[start + _end(intact[-1]) :].strip(b"\0"):
        intact.pop()
    return start + _end(intact[-1]) + 1 if intact else start


def _end(piece: tuple[int, bytes]) -> int:
    return piece[0] + len(piece[1])


def _take(result: Scan, bad: list[tuple[int, int, str]], offset: int, line: bytes) -> None:
    """File a line that is no plain record under header or damage, and what intact records a damaged one holds."""
    if format.is_intact(line):
        _file_intact(result, bad, offset, line)
        return
    done = 0
    for inner, record in format.salvage(line):
        _file_gap(bad, offset, done, inner)
        _file_intact(result, bad, offset + inner, record)
        done = inner + len(record)
    _file_gap(bad, offset, done, len(line) + (done < len(line)))


def _file_gap(bad: list[tuple[int, int, str]], offset: int, start: int, end: int) -> None:
    """What lies between two intact records of a damaged line: their newline, or records that are no more."""
    if end > start:
        is_newline = start > 0 and end == start + 1
        bad.append((offset + start, end - start, "damaged newline" if is_newline else _MISMATCH))


def _file_intact(result: Scan, bad: list[tuple[int, int, str]], offset: int, line: bytes) -> None:
    seq = format.seq_of_line(line)
    if seq is not None:
        result.seqs.append(seq)
        result.offsets.append(offset)
        result.lengths.append(len(line))
        return
    header = format.decode(line)
    if not format.is_header(header):
        bad.append((offset, len(line) + 1, "no line of a journal"))
        return
    if result.header is None:
        result.header = header
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
