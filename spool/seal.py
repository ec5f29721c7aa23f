"""Sealing: journal → segment, and the removal of a journal that its segment has made redundant.

A trainer seals in a child process that is exec'd, never forked, at nice 10: a thread in the trainer raises the p99 of
`log()` from 30 µs to 1–2 ms, a fork of a 6 GB process holds it for 140 ms, and the child does neither (measured,
`docs/decisions/0001-journal-and-parquet.md`). pyarrow is imported here and in the readers, never by logging.
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from spool import files, format, layout
from spool.errors import SealError
from spool.journal import scan
from spool.process import warn
from spool.room import BALLAST_FILE

NICE = 10
KEEP_SEALED_S = 600
"""A sealed journal stays at least this long: copies under way and readers need time to move on."""

_CHILD = "import sys; sys.path[:] = sys.argv[1].split(chr(0x1F)); from spool.seal import main; main()"


def seal(journal: Path, *, writer_died: bool = False) -> None:
    """Seal one journal that nobody writes any more. Durable when this returns; the journal stays.

    `writer_died` records a proven death, so that a copy on another machine still knows, and frees the dead writer's ballast.

    Idempotent: a segment that is there already is left alone. Raises SealError when the journal's header cannot be read
    and no other journal or segment of the writer tells whose it is.
    """
    from spool import segment, table

    if writer_died:
        with suppress(FileNotFoundError):
            files.remove(journal.parent / BALLAST_FILE)
    target = journal.parent / format.segment_name(int(journal.stem))
    if target.is_dir():
        files.sync_folder(target.parent)  # who published it may have been killed before its name was durable
        return
    files.remove_unfinished(target)
    scanned = scan(journal)
    header = scanned.header or layout.header(journal.parent)
    if not header:
        raise SealError(
            f"{journal}: the header is damaged and no other file of this writer has one; it stays a journal"
        )
    identity = table.Identity(journal.parent.parent.name, journal.parent.name, header["attempt"]["id"])
    try:
        segment.write(scanned, identity, writer_died=writer_died)
    except FileExistsError:  # another process sealed it between our look and our rename
        files.sync_folder(target.parent)


def remove_sealed(journal: Path) -> bool:
    """Remove a journal whose segment holds all of it; False where it does not or anything is damaged: then it stays for ever."""
    from spool import segment

    folder = journal.parent / format.segment_name(int(journal.stem))
    if not journal.is_file() or not (folder / format.MANIFEST_FILE).is_file():
        return False
    try:
        found = segment.Segment(folder)
    except ValueError:
        return False
    if journal.stat().st_size != found.journal_length or found.recorded_damage or found.damage():
        return False
    if files.sha256_file(journal) != found.manifest["journal"]["sha256"]:
        return False
    files.sync_folder(journal.parent)  # the segment's name is durable before the journal goes, whoever published it
    files.remove(journal)
    return True


def start(journal: Path, redundant: Iterable[Path] = (), nice: int = NICE) -> "subprocess.Popen[bytes]":
    """Seal `journal`, then remove the redundant ones, in a child process.

    Exit code 0 means that the segment is durable; otherwise the child has said on stderr why not, and nothing is lost.
    """
    if not sys.executable:
        raise SealError(f"{journal}: no Python interpreter to seal with; run `spool seal` later")
    # -I: neither the user's cwd nor PYTHONPATH may shadow a module; the child gets exactly our own sys.path instead.
    path = "\x1f".join(os.path.abspath(entry) for entry in sys.path)
    arguments = [sys.executable, "-I", "-c", _CHILD, path, str(nice), str(journal), *map(str, redundant)]
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


class Sealer:
    """The sealing of one writer's journals, beside training: one child at a time.

    Each child seals one journal, then removes those that have been redundant for long enough.
    """

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._sealed: deque[tuple[Path, float]] = deque()
        self._child: subprocess.Popen[bytes] | None = None

    def add(self, journal: Path) -> None:
        """A journal that its writer has closed."""
        self._waiting.append(journal)

    def tend(self, now_s: float) -> None:
        """Look after the child, and start the next; called about once a second, with the monotonic clock. Never waits."""
        if self._child is not None and self._child.poll() is not None:
            self._collect(now_s)
        if self._child is None and self._waiting:
            self._start(now_s, NICE)

    def finish(self) -> None:
        """Seal all that is left, at full speed, and wait for it."""
        while self._waiting:
            if self._child is None:
                self._start(time.monotonic(), nice=0)
            if self._child is not None:
                self._child.wait()
                self._collect(time.monotonic())

    def _start(self, now_s: float, nice: int) -> None:
        redundant = []
        while self._sealed and now_s - self._sealed[0][1] >= KEEP_SEALED_S:
            redundant.append(self._sealed.popleft()[0])
        try:
            self._child = start(self._waiting[0], redundant, nice)
        except (OSError, SealError) as error:
            warn(f"{self._waiting.popleft()}: not sealed ({error}); it stays a journal, `spool seal` does it later")

    def _collect(self, now_s: float) -> None:
        journal = self._waiting.popleft()
        if self._child is not None and self._child.returncode == 0:
            self._sealed.append((journal, now_s))
        self._child = None


def main() -> None:
    """The child: `python -c … SYS_PATH NICE JOURNAL [REDUNDANT_JOURNAL …]`."""
    os.nice(int(sys.argv[2]))
    if int(version("pyarrow").split(".")[0]) >= 18:  # needs no numpy, but imports it where it is: 0.1 s of 0.5 s
        sys.modules["numpy"] = None  # type: ignore[assignment]
    journal, *redundant = map(Path, sys.argv[3:])
    try:
        seal(journal)
        for path in redundant:
            remove_sealed(path)
    except (OSError, SealError) as error:
        stays = (
            "the journal stays, nothing is lost"
            if journal.exists()
            else "and the journal is gone: somebody has removed it"
        )
        sys.exit(f"spool: could not seal {journal}: {error}; {stays}")
