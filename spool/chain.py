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
    """The damage when a file says that it belongs to another run or writer; none of its records is read."""
    names = part.manifest if isinstance(part, Segment) else part.header
    if names is None or (names["run"], names["writer"]) == (run_id, writer_id):
        return None
    return Damage(str(path_of(part)), 0, 0, f"it belongs to run {names['run']}, writer {names['writer']}")


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
            damage += _torn_before_another(part, following)
        if first > expected and not any(one.first_seq == expected and one.last_seq == first - 1 for one in damage):
            damage.append(_absence(folder, sources, before, part, expected, first - 1))
        start, expected = expected, max(expected, last + 1)
        if first <= start:  # otherwise what is missing is reported
            damage += _broken_link(before, part)
        damage += [_resolve(one, following) for one in found]
        before = part
    if last_source > (last_number(parts[-1]) if parts else 0):
        newest = sources[-1]
        reason = "the last journal or segment cannot be read"
        damage.append(Damage(str(newest.segment or newest.journal), 0, 0, reason, expected, None))
    return damage


def _seqs(part: Part, expected: int) -> tuple[int, int]:
    if isinstance(part, Segment):
        return part.first_seq, part.last_seq
    is_later = expected > 1 or first_number(part) > 1  # what the first journal lacks, its scan reports
    first = header_of(part).get("first_seq", part.seqs[0] if part.seqs and is_later else expected)
    return first, part.last_seq if part.seqs or part.header else expected - 1


def _torn_before_another(part: Scan, following: list[Part]) -> list[Damage]:
    if following and (header_of(following[0]).get("previous") or {}).get("length") == part.valid_length:
        return []  # the writer itself left this tail behind, and says so in the next journal
    reason = "incomplete last line of a journal that was followed by another"
    return [Damage(str(part.path), part.valid_length, part.size - part.valid_length, reason)]


def _absence(
    folder: Path, sources: list[layout.Source], before: Part | None, part: Part, first: int, last: int
) -> Damage:
    """Why the records `first` to `last`, between two parts, are not here."""
    here = {source.number: source for source in sources}
    numbers = range(last_number(before) + 1 if before is not None else 1, first_number(part))
    absent = [number for number in numbers if number not in here]
    if absent:
        names = [format.segment_name(number) for number in dict.fromkeys((absent[0], absent[-1]))]
        fetch = place(folder / " to ".join(names), 3)
        return Damage(str(folder / names[0]), 0, 0, "a journal or its segment", first, last, fetch)
    if numbers:
        unread = here[numbers[0]]
        return Damage(str(unread.segment or unread.journal), 0, 0, "cannot be read", first, last)
    if isinstance(before, Scan) and not before.damage and not before.is_torn:
        reason = f"it goes on after byte {before.valid_length}"
        return Damage(str(before.path), before.valid_length, 0, reason, first, last, place(before.path, 3))
    return Damage(str(path_of(part)), 0, 0, "records missing before this", first, last)


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
