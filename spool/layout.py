"""Where things are: runs, writers, journals and segments of a spool, found by name. Reads no Parquet, writes nothing.

A folder is a run when it has a run.json, and a writer when it holds a journal or a segment. Dot names are unfinished
work of a process that may be alive or dead; nobody reads them.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool import format
from spool.errors import NotASpoolError
from spool.journal import scan


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
    return sorted(path.parent for path in root.glob(f"[!.]*/{format.RUN_FILE}"))


def run_info(run: Path) -> dict[str, Any]:
    """What run.json says. Raises NotASpoolError when it is damaged, NewerFormatError for a later format."""
    path = run / format.RUN_FILE
    try:
        info: dict[str, Any] = dict(format.load_json(path.read_bytes()))
        names = ("format", "project", "experiment", "created_ns", "attempt")
        missing = [name for name in names if name not in info]
    except (ValueError, TypeError) as error:
        raise NotASpoolError(
            f"{path}: not what `init` writes ({error}); the run's records can still be read"
        ) from error
    format.check_format(
        info.get("format", format.FORMAT), str(path)
    )  # first: a later format may miss what this one has
    if missing:
        raise NotASpoolError(f"{path}: {', '.join(missing)} missing; the run's records can still be read")
    return info


def manifest(segment: Path) -> dict[str, Any]:
    """Raises OSError or ValueError when there is none or it is damaged, NewerFormatError for a later format."""
    found = format.load_checked_json((segment / format.MANIFEST_FILE).read_bytes())
    format.check_format(found.get("format"), str(segment / format.MANIFEST_FILE))
    return found


def writers(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("[!.]*") if path.is_dir() and path.name != "files" and sources(path))


def sources(writer: Path) -> list[Source]:
    """Journals and segments of a writer in the order they were written."""
    journals = {int(match[1]): path for path, match in _matching(writer, format.JOURNAL_NAME) if path.is_file()}
    segments = {int(path.name): path for path, _ in _matching(writer, format.SEGMENT_NAME) if path.is_dir()}
    return [Source(at, journals.get(at), segments.get(at)) for at in sorted({*journals, *segments})]


def _matching(folder: Path, pattern: Any) -> Iterator[tuple[Path, Any]]:
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match:
            yield path, match


def header(writer: Path) -> dict[str, Any]:
    """The writer's first readable header; empty when none is left."""
    for source in sources(writer):
        found = _header(source)
        if found:
            return found
    return {}


def _header(source: Source) -> dict[str, Any]:
    if source.journal is not None:
        with suppress(FileNotFoundError), source.journal.open("rb") as file:  # sealed and removed since we looked
            line = file.readline().removesuffix(b"\n")
            if format.is_intact(line) and format.seq_of_line(line) is None:
                return format.decode(line)
    if source.segment is not None:
        with suppress(OSError, ValueError):
            return manifest(source.segment).get("header") or {}
    return {}


def last_seq(writer: Path) -> int:
    """Seq of the last intact record of a writer, 0 when it has none."""
    for source in reversed(sources(writer)):
        if source.journal is not None:
            with suppress(FileNotFoundError):  # sealed and removed since we looked
                found = scan(source.journal)
                if found.seqs or found.header is not None:
                    return found.last_seq
        if source.segment is not None:
            with suppress(OSError, ValueError):
                return int(manifest(source.segment)["last_seq"])
    return 0


def end(writer: Path) -> dict[str, Any] | None:
    """How a writer ended: `status` of its finish record (with `ts`) or "died", proven when it was sealed; None: not known."""
    for source in reversed(sources(writer)):
        if source.segment is not None:
            with suppress(OSError, ValueError):
                found = manifest(source.segment)
                if source.journal is None or source.journal.stat().st_size <= found["journal"]["length"]:
                    return found.get("end")
        if source.journal is not None:
            with suppress(FileNotFoundError):  # sealed and removed since we looked
                return scan(source.journal).end()
    return None


def attempts(run: Path) -> list[Attempt]:
    """The run's attempts, oldest first: what a header says of the attempt it belongs to, from the lead writer where there is one."""
    found: dict[str, Attempt] = {}
    headers = [header(writer) for writer in writers(run)]
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
