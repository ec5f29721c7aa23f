"""A claim: one sync at a time for a run and a destination, among those that share a state folder.

No file locks, since network file systems do not keep them: a file that appears once, names its holder, and is touched while
the holder works. A holder that is provably dead, or that nobody can judge and that has not touched it for STALE_AFTER_S, has
lost it. Syncs that do not share a folder are not held apart by this; the destination tells them.
"""

import glob
import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from spool import files, format, liveness

TOUCH_EACH_S = 10.0
STALE_AFTER_S = 120.0


def file_name(run_id: str, place: str | None = None) -> str:
    """Of the claim of a run; `place`: which of several of one kind, where the user has named it."""
    return f"{run_id}.{sha256(place.encode()).hexdigest()[:8]}.claim" if place else f"{run_id}.claim"


def patterns(run_id: str) -> list[str]:
    """Globs for all claims of a run, whatever the place."""
    escaped = glob.escape(run_id)
    return [f"{escaped}.claim", f"{escaped}.{'[0-9a-f]' * 8}.claim"]


class Claim:
    """Taken by `take`; call `touch` often and `release` at the end. A kill leaves the file, which the next one takes over."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content
        self._touched_s = time.monotonic()

    def touch(self) -> None:
        now = time.monotonic()
        if now - self._touched_s >= TOUCH_EACH_S:
            self._touched_s = now
            with suppress(FileNotFoundError):  # a user has cleared the folder: what is held apart is only less
                os.utime(self._path)

    def release(self) -> None:
        """Let the next one in; a claim that another has taken over by now stays theirs."""
        with suppress(FileNotFoundError):
            if self._path.read_bytes() == self._content:
                files.remove(self._path)


def take(path: Path) -> Claim | str:
    """The claim, or who holds it. Raises OSError where the folder cannot be written."""
    files.make_folder(path.parent)
    content = format.dump_json({**liveness.identity(), "token": os.urandom(8).hex()})
    while True:
        try:
            files.publish_file(path, content)
        except FileExistsError:
            found = holder(path)
            if found is not None:
                return found
            _discard(path)
            continue
        return Claim(path, content)


def holder(path: Path) -> str | None:
    """Who holds it, as a phrase; None where the holder is dead, silent for too long, or the file cannot be read."""
    try:
        identity = format.load_json(path.read_bytes())
        silent_s = time.time() - path.stat().st_mtime
        alive = liveness.is_alive(identity)
        if alive is False or (alive is None and silent_s > STALE_AFTER_S):
            return None
        return f"process {identity['pid']} on {identity['host']}"
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _discard(path: Path) -> None:
    """Remove a lost claim; where another process did so and took it meanwhile, theirs must stay, so it is moved first."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        files.rename_new(path, aside)
    except FileNotFoundError:
        return
    if holder(aside) is None:
        files.remove(aside)
    else:
        files.rename_new(aside, path)
