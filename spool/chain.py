"""What a run's files say of each other: which seq, journal, writer must follow or be there, and what of it is not.

A part is a segment, or a journal (what of it is not sealed). What is absent while everything here is good is an incomplete
copy, and can be fetched; what is here and is not what was written is corruption.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spool import format, layout
from spool.journal import Damage, Scan
from spool.segment import Segment

Part = Segment | Scan


def header_of(part: Part) -> dict[str, Any]:
    return (part.manifest.get("header") if isinstance(part, Segment) else part.header) or {}


def first_number(part: Part) -> int:
    return part.first_number if isinstance(part, Segment) else int(part.path.stem)


def last_number(part: Part) -> int:
    return part.last_number if isinstance(part, Segment) else int(part.path.stem)


def path_of(part: Part) -> Path:
    return part.folder if isinstance(part, Segment) else part.path


def place(path: Path, levels: int) -> str:
    """A path relative to the spool, which is `levels` above it: what a user copies."""
    return "/".join(path.parts[-levels:])


def foreign(part: Part, run_id: str, writer_id: str) -> Damage | None:
    """The damage when a file says that it is of another run, writer or number; none of its records is read."""
    if isinstance(part, Segment):
        path, names, number, named = part.manifest_path, part.manifest, part.first_number, int(part.folder.name)
    elif part.header is not None:
        path, names, number, named = part.path, part.header, int(part.header["journal"]), int(part.path.stem)
    else:
        return None
    if (names["run"], names["writer"], number) == (run_id, writer_id, named):
        return None
    reason = f"it is number {number} of run {names['run']}, writer {names['writer']}"
    return Damage(str(path), 0, path.stat().st_size, reason)


def check(folder: Path, sources: list[layout.Source], parts: list[Part]) -> list[Damage]:
    """Every seq must follow the one before it across a writer's files, and only the last journal may have a torn tail."""
    damage: list[Damage] = []
    expected, before = 1, None
    last_source = sources[-1].number if sources else 0
    for at, part in enumerate(parts):
        following = parts[at + 1 :]
        first, last = _seqs(part, expected)
        found = part.recorded_damage if isinstance(part, Segment) else part.damage
        if isinstance(part, Scan) and part.is_torn and first_number(part) != last_source:
            damage += _torn_before_another(part, following, max(expected, last + 1))
        if first > expected and not any(one.first_seq == expected and one.last_seq == first - 1 for one in damage):
            damage.append(_absence(folder, sources, before, part, expected, first - 1))
        start, expected = expected, max(expected, last + 1)
        if first <= start:  # otherwise what is missing is reported
            damage += _broken_link(before, part)
        if isinstance(part, Scan) and part.header is None and not part.seqs:  # nobody knows what the bad bytes held
            found = [replace(one, first_seq=start) if one.first_seq is None else one for one in found]
        damage += [_resolve(one, following) for one in found]
        before = part
    damage += _unread_at_the_end(sources, parts, expected)
    return damage


def _unread_at_the_end(sources: list[layout.Source], parts: list[Part], expected: int) -> list[Damage]:
    """Sources that cannot be read, with nothing after them that tells how many records they held."""
    telling = [last_number(part) for part in _telling(parts)]
    read = {number for part in parts for number in range(first_number(part), last_number(part) + 1)}
    unread = [one for one in sources if one.number > max(telling, default=0) and one.number not in read]
    return [_unread(unread[0], expected, None)] if unread else []


def _unread(source: layout.Source, first: int, last: int | None) -> Damage:
    """What a source that is here holds, and cannot be read."""
    path = source.segment or source.journal
    fetch = None
    if source.segment is not None and source.journal is None and not (source.segment / format.MANIFEST_FILE).exists():
        fetch = place(source.segment, 3)
    return Damage(str(path), 0, 0, "nothing in it can be read", first, last, fetch)


def _seqs(part: Part, expected: int) -> tuple[int, int]:
    if isinstance(part, Segment):
        return part.first_seq, part.last_seq
    is_later = expected > 1 or first_number(part) > 1  # what the first journal lacks, its scan reports
    first = header_of(part).get("first_seq", part.seqs[0] if part.seqs and is_later else expected)
    return first, part.last_seq if part.seqs or part.header else expected - 1


def _torn_before_another(part: Scan, following: list[Part], lost: int) -> list[Damage]:
    length = _length_in_next(following[0]) if following else None
    if length is not None and (length == part.valid_length or part.size < length):
        return []  # the writer itself left this tail behind, and says so in the next journal; or the rest is absent
    reason = "incomplete last line of a journal that was followed by another"
    first = None if _telling(following) else lost
    return [Damage(str(part.path), part.valid_length, part.size - part.valid_length, reason, first)]


def _telling(parts: list[Part]) -> list[Part]:
    """Those that say which seqs they hold; a journal whose header is not there and that has no record does not."""
    return [part for part in parts if isinstance(part, Segment) or part.header or part.seqs]


def _absence(
    folder: Path, sources: list[layout.Source], before: Part | None, part: Part, first: int, last: int
) -> Damage:
    """Why the records `first` to `last`, between two parts, are not here."""
    here = {source.number: source for source in sources}
    numbers = range(last_number(before) + 1 if before is not None else 1, first_number(part))
    absent = [number for number in numbers if number not in here]
    if absent:
        begin, end = format.segment_name(absent[0]), format.segment_name(absent[-1])
        names = begin if begin == end else f"{{{begin}..{end}}}"  # as a shell expands it
        return Damage(str(folder / begin), 0, 0, "a journal or its segment", first, last, place(folder / names, 3))
    if numbers:
        return _unread(here[numbers[0]], first, last)
    length = _length_in_next(part)
    if isinstance(before, Scan) and not before.damage and (length is None or before.size < length):
        reason = f"it goes on after byte {before.valid_length}"
        return Damage(str(before.path), before.valid_length, 0, reason, first, last, place(before.path, 3))
    return Damage(str(path_of(part)), 0, 0, "records missing before this", first, last)


def _length_in_next(part: Part) -> int | None:
    """Length of the journal before, as the header of the next one tells."""
    previous = header_of(part).get("previous") or {}
    return previous.get("length")


def _broken_link(before: Part | None, part: Part) -> list[Damage]:
    """Whether the journal before `part` is the one that its header names by length and sha256."""
    link = header_of(part).get("previous")
    if link is None or before is None or last_number(before) != first_number(part) - 1:
        return []  # what is missing is reported as missing
    if isinstance(before, Segment):
        found = before.manifest["journal"]
        is_known = bool(before.recorded_damage)
    else:
        found = {"length": before.valid_length, "sha256": before.sha256}
        is_known = bool(before.damage) or before.header is None  # no header: only a journal's end
    if is_known or found == link:
        return []
    reason = f"not the journal that {format.journal_name(first_number(part))} follows: its sha256 is another"
    return [Damage(str(path_of(before)), 0, found["length"], reason)]


def _resolve(damage: Damage, following: list[Part]) -> Damage:
    """What a damaged last line held, only the first seq of the next journal tells."""
    if damage.first_seq is None or damage.last_seq is not None:
        return damage
    for one in following:
        if header_of(one):
            last = int(header_of(one)["first_seq"]) - 1
            known = (damage.first_seq, last) if last >= damage.first_seq else (None, None)
            return replace(damage, first_seq=known[0], last_seq=known[1])
    return damage


def missing_of_writers(run: Path, found: dict[str, int], expected: Iterator[tuple[str, str, int]]) -> list[Damage]:
    """Writers that are absent or end too early, by (who says so, writer, last seq) from finish records and later attempts."""
    wanted: dict[str, tuple[int, str]] = {}
    for source, writer, seq in expected:
        if seq > wanted.get(writer, (0, ""))[0]:
            wanted[writer] = seq, source
    return [
        Damage(
            str(run / writer),
            0,
            0,
            f"{source} counts records to {seq}",
            found.get(writer, 0) + 1,
            seq,
            place(run / writer, 2),
        )
        for writer, (seq, source) in sorted(wanted.items())
        if found.get(writer, 0) < seq
    ]
