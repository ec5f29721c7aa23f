"""Following a writer that may be writing: its records as they come, each once, in the order of seq, from its files alone.

What was read is not read again: a look costs one listing of the writer's folder and the bytes that are new. Polling, since
network file systems send no events. Journals may rotate, be sealed and be removed meanwhile: what a journal that is gone
held is read from its segment.

An incomplete last line is waited for. So is a line that does not prove itself where nothing proves that it was all visible
(the journal is the writer's last): on a network file system zeros may stand where another look finds the record. The second
look at the same bytes counts as damage.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spool import format, layout
from spool import journal as journals
from spool.journal import Damage

_BLOCK_SIZE_BYTES = 1 << 20
_WINDOW_SIZE_BYTES = 1 << 14


class _Line(NamedTuple):
    offset: int
    content: bytes
    """Without its newline."""
    has_newline: bool
    """False where another byte stands in its place."""

    @property
    def end(self) -> int:
        return self.offset + len(self.content) + 1


class Follower:
    """One writer's records with seq > `seq`. `read` again and again; imports pyarrow only where a journal is gone."""

    def __init__(self, writer: Path, after_seq: int = 0) -> None:
        self.path = writer
        self.seq = after_seq
        """Of the last record that was handed out, or passed over as damaged."""
        self.is_finished = False
        """Whether the writer's finish record was read: nothing follows it."""
        self.damage: list[Damage] = []
        """What was found so far, in the order in which it was found."""
        self._after_seq = after_seq
        self._number = 0
        self._offset = 0
        self._suspect: _Line | None = None
        self._is_read = False
        """Whether nothing of the current journal or segment is left to be read."""
        self._bad: list[Damage] = []
        """Bad lines after the last intact one: how many records they held, only what follows tells."""

    def read(self, *, is_final: bool = False) -> Iterator[dict[str, Any]]:
        """The new records, decoded, without their checksum; nothing where there is nothing new. To be read to its end.

        `is_final`: nobody will look again, so what does not prove itself now is damage.
        """
        while not self.is_finished:
            try:
                sources = layout.sources(self.path)
            except FileNotFoundError:  # moved away or removed as a whole
                break
            source, following = self._find(sources)
            if source is None:
                break
            is_closed = following is not None and _is_begun(following)
            try:
                yield from self._read_source(source, is_closed=is_closed, is_final=is_final)
            except FileNotFoundError:  # sealed and removed since we looked
                continue
            if following is None or not is_closed or self.is_finished:
                break
            self._enter(following)
        if is_final:
            self._report_bad(None)

    def _find(self, sources: list[layout.Source]) -> tuple[layout.Source | None, layout.Source | None]:
        """The source to read, and the one that follows it."""
        if not self._number and sources:
            begun = (one for one in reversed(sources) if _first_seq(one, self.seq + 2) <= self.seq + 1)
            self._enter(next(begun, sources[0]))
        source = next((one for one in sources if one.number == self._number), None)
        following = next((one for one in sources if one.number > self._number), None)
        if source is None and following is not None:  # what ours held is missing: the seq of the next one tells
            self._enter(following)
            return self._find(sources)
        return source, following

    def _enter(self, source: layout.Source) -> None:
        self._number, self._offset, self._suspect, self._is_read = source.number, 0, None, False
        is_ours = layout.source_header(source).get("writer") == self.path.name
        if is_ours and source.journal is not None and self.seq == self._after_seq > 0:
            self._offset = _offset_before(source.journal, self.seq)

    def _read_source(self, source: layout.Source, *, is_closed: bool, is_final: bool) -> Iterator[dict[str, Any]]:
        if self._is_read:
            return
        if source.journal is None:
            yield from self._read_segment(source)
            self._is_read = True
            return
        for line in self._lines(source.journal, is_closed=is_closed or is_final):
            if not self._proves_itself(line) and not is_closed and not is_final and line != self._suspect:
                self._suspect = line
                return
            if not self._proves_itself(line) and source.segment is not None and (yield from self._read_segment(source)):
                return  # sealed before it was damaged, or with what is missing recorded
            self._offset = line.end
            yield from self._take(source.journal, line)
            if self._is_read:
                return

    def _lines(self, journal: Path, *, is_closed: bool) -> Iterator[_Line]:
        """The complete lines from where we are; of a closed journal also the last one when only its newline is damaged."""
        with journal.open("rb") as file:
            offset = file.seek(self._offset)
            pieces: list[bytes] = []
            while block := file.read(_BLOCK_SIZE_BYTES):
                first, *others = block.split(b"\n")
                pieces.append(first)
                for other in others:
                    line = _Line(offset, b"".join(pieces), has_newline=True)
                    offset, pieces = line.end, [other]
                    yield line
        tail = b"".join(pieces)
        complete = journals._complete_length(tail) if is_closed else 0
        if complete:
            yield _Line(offset, tail[: complete - 1], has_newline=False)

    @staticmethod
    def _proves_itself(line: _Line) -> bool:
        return line.has_newline and format.is_intact(line.content)

    def _take(self, journal: Path, line: _Line) -> Iterator[dict[str, Any]]:
        """The record of a line, none of a header, or what a damaged line still holds."""
        if self._proves_itself(line):
            yield from self._take_intact(journal, line.offset, line.content)
            return
        done = 0
        for inner, content in format.salvage(line.content):
            self._take_gap(journal, line.offset, done, inner)
            yield from self._take_intact(journal, line.offset + inner, content)
            done = inner + len(content)
        self._take_gap(journal, line.offset, done, len(line.content) + (done == 0 or not line.has_newline))

    def _take_gap(self, journal: Path, offset: int, start: int, end: int) -> None:
        """What lies between two intact records of a damaged line: their newline, or records that are no more."""
        if start and end == start + 1:
            self.damage.append(Damage(str(journal), offset + start, 1, "damaged newline"))
        elif end > start:
            self._bad.append(Damage(str(journal), offset + start, end - start, "checksum mismatch"))

    def _take_intact(self, journal: Path, offset: int, content: bytes) -> Iterator[dict[str, Any]]:
        record = format.decode(content)
        seq = record.get("seq")
        if seq is None:
            self._take_header(journal, offset, record)
            return
        self._pass(journal, offset, seq - 1)
        if seq <= self.seq:
            if seq > self._after_seq:
                reason = f"record {seq} out of order or repeated"
                self.damage.append(Damage(str(journal), offset, len(content) + 1, reason))
            return
        self.seq = seq
        self.is_finished = record.get("event") == "finish"
        record.pop("crc", None)
        yield record

    def _take_header(self, journal: Path, offset: int, header: dict[str, Any]) -> None:
        if not format.is_header(header):
            self._bad.append(Damage(str(journal), offset, 0, "no line of a journal"))
            return
        format.check_format(header.get("format"), str(journal))
        if header["writer"] != self.path.name:
            self._is_read = True
            reason = f"it belongs to run {header['run']}, writer {header['writer']}"
            self.damage.append(Damage(str(journal), 0, 0, reason))
        elif offset:
            self.damage.append(Damage(str(journal), offset, 0, "a header that is not the first line"))
        else:
            self._pass(journal, 0, header["first_seq"] - 1)

    def _pass(self, path: Path, offset: int, last_seq: int) -> None:
        """Go on behind `last_seq`: what of it has not been seen is missing."""
        if last_seq > self.seq:
            if not self._bad:
                self._bad.append(Damage(str(path), offset, 0, "records missing"))
            self._report_bad(last_seq)
            self.seq = last_seq
        else:
            self._report_bad(self.seq)

    def _report_bad(self, last_seq: int | None) -> None:
        """`last_seq`: up to which nothing came in place of the bad lines; None where it is not known."""
        for at, one in enumerate(self._bad):
            known = at == 0 and last_seq != self.seq
            self.damage.append(replace(one, first_seq=self.seq + 1, last_seq=last_seq) if known else one)
        self._bad = []

    def _read_segment(self, source: layout.Source) -> Generator[dict[str, Any], None, bool]:
        """What the segment holds behind `seq`; false where it cannot be read."""
        from spool.row import records
        from spool.segment import Segment

        assert source.segment is not None  # noqa: S101 - a source without a journal has one
        try:
            segment = Segment(source.segment)
        except (OSError, ValueError) as error:
            if not source.segment.is_dir():
                raise FileNotFoundError(str(source.segment)) from error
            reason = f"manifest unreadable ({error})"
            self._bad.append(Damage(str(source.segment / format.MANIFEST_FILE), 0, 0, reason))
            return False
        if segment.manifest["writer"] != self.path.name:
            reason = f"it belongs to run {segment.manifest['run']}, writer {segment.manifest['writer']}"
            self.damage.append(Damage(str(source.segment), 0, 0, reason))
            return False
        if segment.last_seq > self.seq:
            self._pass(source.segment, 0, segment.first_seq - 1)
            self.damage += segment.recorded_damage + segment.damage()
            for record in records(segment, self.seq):
                self.seq = record["seq"]
                self.is_finished = record.get("event") == "finish"
                yield record
            self.seq = max(self.seq, segment.last_seq)
        self._offset = segment.journal_length
        return True


def _is_begun(source: layout.Source) -> bool:
    """Whether the writer has gone over to it: its header is written after the last record of the journal before it."""
    if source.segment is not None or source.journal is None:
        return True
    with source.journal.open("rb") as file:
        return file.readline().endswith(b"\n")


def _first_seq(source: layout.Source, unknown: int) -> int:
    return int(layout.source_header(source).get("first_seq", unknown))


def _offset_before(journal: Path, seq: int) -> int:
    """Where a line begins that is not behind record `seq` + 1: looked for from the end, reading as little as it can."""
    window = _WINDOW_SIZE_BYTES
    with journal.open("rb") as file:
        size = file.seek(0, 2)
        while window < size:
            offset = file.seek(size - window)
            first, *lines = file.read(window).split(b"\n")
            offset += len(first) + 1
            for line in lines[:-1]:
                found = format.seq_of_line(line) if format.is_intact(line) else None
                if found is not None:
                    if found <= seq + 1:
                        return offset
                    break
                offset += len(line) + 1
            window *= 16
    return 0
