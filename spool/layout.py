"""Where things are: runs, writers, journals and segments of a spool, found by name. Reads no Parquet, writes nothing.

A folder is a run when it has a run.json, and a writer when it holds a journal or a segment. Dot names are unfinished
work of a process that may be alive or dead; nobody reads them.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spool import format
from spool.errors import NotASpoolError
from spool.journal import last_line


@dataclass(frozen=True)
class Source:
    """One number in a writer's folder: a journal, the segment it was sealed into, or for some time both."""

    number: int
    journal: Path | None
    segment: Path | None


@dataclass(frozen=True)
class Attempt:
    """One start of the training program: `number` counts them, `id` is unique even when two start at once."""

    id: str
    number: int
    continues: str | None = None
    resumed_from_step: int | None = None
    created_ns: int = 0


def check_spool(root: Path) -> None:
    """Refuse what is no spool, in one sentence."""
    if not root.exists():
        raise NotASpoolError(f"{root}: no such folder; name a spool, or set SPOOL_DIR")
    if not root.is_dir():
        raise NotASpoolError(f"{root}: a file, not a spool folder")
    if (root / format.RUN_FILE).is_file():
        raise NotASpoolError(f"{root}: this is one run; its spool is {root.parent}")
    if not runs(root):
        raise NotASpoolError(f"{root}: not a spool, no folder in it has a {format.RUN_FILE}")


def runs(root: Path) -> list[Path]:
    """Run folders, by id and so by time of creation."""
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    return [root / name for name in names if (root / name / format.RUN_FILE).is_file()]


def run_info(run: Path) -> dict[str, Any]:
    """What run.json says. Raises NotASpoolError when it is damaged, NewerFormatError for a later format."""
    path = run / format.RUN_FILE
    content = path.read_bytes()
    try:
        info = format.load_checked_json(content)
        names = ("format", "run", "project", "experiment", "created_ns", "attempt")
        missing = [name for name in names if name not in info]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
    except (ValueError, TypeError) as error:
        format.check_newer(content, str(path))  # a later format may lack what this one has
        raise NotASpoolError(
            f"{path}: not what `init` writes ({error}); the run's records can still be read"
        ) from error
    format.check_format(info["format"], str(path))
    return info


def manifest(segment: Path) -> dict[str, Any]:
    """Raises OSError or ValueError when there is none or it is damaged, NewerFormatError for a later format."""
    found = format.load_checked_json((segment / format.MANIFEST_FILE).read_bytes())
    format.check_format(found.get("format"), str(segment / format.MANIFEST_FILE))
    if not found.keys() >= format.MANIFEST_KEYS:
        raise ValueError("not the manifest of a segment")
    return found


def writers(run: Path) -> list[Path]:
    return [writer for writer, found in _folders(run) if found]


def _folders(run: Path) -> list[tuple[Path, list[Source]]]:
    """What may be a writer's folder, by name, and what is in it."""
    names = sorted(entry.name for entry in os.scandir(run) if not entry.name.startswith(".") and entry.is_dir())
    return [(run / name, sources(run / name)) for name in names if name != format.FILES_FOLDER]


def size_bytes(folder: Path) -> int:
    """Of the files in a folder and below, without unfinished ones; a symbolic link counts for itself."""
    found = 0
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found += 0 if entry.name.startswith(".") else size_bytes(folder / entry.name)
        elif not entry.name.startswith("."):
            found += entry.stat(follow_symlinks=False).st_size
    return found


def fingerprint(folder: Path) -> str:
    """Changes with whatever is added to a folder, removed or written below it; 16 hex digits. Follows no symbolic link."""
    digest = hashlib.sha256()
    for name, found in sorted(_states(folder, "")):
        state = f"{name}\0{found.st_mode}\0{found.st_size}\0{found.st_mtime_ns}\0"
        digest.update(state.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _states(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Of everything below that holds bytes; a folder counts by what is in it, since its own time changes with a rename."""
    for entry in os.scandir(folder):
        name = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _states(folder / entry.name, f"{name}/")
        else:
            yield name, entry.stat(follow_symlinks=False)


def links(folder: Path) -> list[Path]:
    """Symbolic links in a folder and below: nothing of ours makes one, and what they lead to is not the spool's."""
    return [folder / name for name, found in _states(folder, "") if stat.S_ISLNK(found.st_mode)]


def sources(writer: Path) -> list[Source]:
    """The journals and segments of a writer in the order they were written."""
    journals, segments = {}, {}
    for entry in os.scandir(writer):
        if (match := format.JOURNAL_NAME.fullmatch(entry.name)) and entry.is_file():
            journals[int(match[1])] = writer / entry.name
        elif format.SEGMENT_NAME.fullmatch(entry.name) and entry.is_dir():
            segments[int(entry.name)] = writer / entry.name
    return [Source(at, journals.get(at), segments.get(at)) for at in sorted({*journals, *segments})]


def header(writer: Path) -> dict[str, Any]:
    """The writer's first readable header; empty when none is left."""
    return _first_header(sources(writer))


def _first_header(found: list[Source]) -> dict[str, Any]:
    """A file of another writer, put in the place of one of this, tells nothing."""
    for source in found:
        header, path = source_header(source), source.segment or source.journal
        if path is not None and header.get("writer") == path.parent.name:
            return header
    return {}


def source_header(source: Source) -> dict[str, Any]:
    """The header of one journal, or of the one that a segment was; empty when it cannot be read."""
    if source.journal is not None:
        with suppress(FileNotFoundError), source.journal.open("rb") as file:  # sealed and removed since we looked
            line = file.readline().removesuffix(b"\n")
            if format.is_intact(line) and format.seq_of_line(line) is None:
                found = format.decode(line)
                return found if format.is_header(found) else {}
    if source.segment is not None:
        with suppress(OSError, ValueError):
            found = manifest(source.segment)["header"] or {}
            return found if format.is_header(found) else {}
    return {}


class Last(NamedTuple):
    """How far a writer has got: seq and ns of its last intact record (0 and its beginning when it has none), and how it ended."""

    seq: int
    ts: int
    end: dict[str, Any] | None
    """`status` and `ts` of its finish record; {"status": "died"} where its death was proven when it was sealed; None: not known."""


def last(writer: Path) -> Last:
    """From the newest file that tells; a journal is read from its end only. Cheap: for lists and rosters."""
    return _last(sources(writer))


def _last(sources: list[Source]) -> Last:
    for source in reversed(sources):
        found = None
        if source.segment is not None:
            with suppress(OSError, ValueError):
                found = manifest(source.segment)
        if source.journal is not None:
            with suppress(FileNotFoundError):  # sealed and removed since we looked
                if found is None or source.journal.stat().st_size > found["journal"]["length"]:
                    line = last_line(source.journal)
                    if line is not None:
                        return _last_of_line(line)
        if found is not None:
            return Last(
                found["last_seq"], found["last_ts"] or (found["header"] or {}).get("created_ns", 0), found["end"]
            )
    return Last(0, 0, None)


def _last_of_line(line: bytes) -> Last:
    record = format.decode(line)
    if "seq" in record:
        return Last(record["seq"], record["ts"], format.end_of(record))
    return Last(record["first_seq"] - 1, record["created_ns"], None)


class Glance(NamedTuple):
    """A writer from the ends of its files, for lists of thousands: where, as whom, how far."""

    path: Path
    header: dict[str, Any]
    last: Last


def glance(run: Path) -> list[Glance]:
    """Every writer of a run, by name; each folder is listed once."""
    return [Glance(writer, _first_header(found), _last(found)) for writer, found in _folders(run) if found]


def attempts(run: Path) -> list[Attempt]:
    return order_attempts([_first_header(found) for _, found in _folders(run)])


def order_attempts(headers: list[dict[str, Any]]) -> list[Attempt]:
    """A run's attempts, oldest first: what a header says of the attempt it belongs to, from the lead writer where there is one."""
    found: dict[str, Attempt] = {}
    for one in sorted((one for one in headers if one), key=lambda one: (not one.get("lead"), one.get("created_ns", 0))):
        attempt = one["attempt"]
        continues = one.get("continues") or {}
        found.setdefault(
            attempt["id"],
            Attempt(
                attempt["id"],
                attempt["number"],
                continues.get("attempt"),
                attempt.get("resumed_from_step"),
                one.get("created_ns", 0),
            ),
        )
    return sorted(found.values(), key=lambda one: (one.number, one.created_ns, one.id))
