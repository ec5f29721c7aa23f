"""Cursors: how far one destination has got with one run. Files under `<spool>/.sync/`, or `--state-dir`.

A cursor is a cache: the destination is the authority on what it holds. So a file that cannot be read is moved aside and an
empty cursor takes its place, and deleting the folder doubles nothing. What only this file knows is which records a
destination has rejected; without it they are offered once more.

    <folder>/<destination>/<identity>.json
    {"format": 1, "destination": …, "identity": …, "run_id": …,
     "delivered": {writer: {table: seq}}, "rejected": {writer: {table: {place: reason}}}}

`identity` is the destination's own name for its run: a run deleted and made anew there has another identity, and so a fresh
cursor.
"""

import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from spool import files, format

FORMAT = 1
_SAFE = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass
class Cursor:
    path: Path
    destination: str
    identity: str
    run_id: str
    delivered: dict[str, dict[str, int]] = field(default_factory=dict)
    rejected: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    moved_aside: Path | None = None
    """Where the unreadable file went that this cursor replaces."""

    def save(self) -> None:
        """Durable when this returns; a reader sees the old cursor or the new one."""
        files.make_folder(self.path.parent)
        names = ("destination", "identity", "run_id", "delivered", "rejected")
        body = {"format": FORMAT, **{name: getattr(self, name) for name in names}}
        files.replace_file(self.path, format.dump_json(body))


def load(folder: Path, destination: str, identity: str, run_id: str) -> Cursor:
    """The cursor of a destination's run; an empty one when there is none, or none that can be read."""
    safe = identity if _SAFE.fullmatch(identity) else sha256(identity.encode()).hexdigest()
    path = folder / destination / f"{safe}.json"
    cursor = Cursor(path, destination, identity, run_id)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return cursor
    try:
        body = format.load_json(content)
        format.check_format(body["format"], str(path))
        if (body["identity"], body["run_id"]) != (identity, run_id):
            raise ValueError("the cursor of another run")
        cursor.delivered = {
            writer: {table: int(seq) for table, seq in tables.items()} for writer, tables in body["delivered"].items()
        }
        cursor.rejected = {
            writer: {
                table: {place: str(reason) for place, reason in places.items()} for table, places in tables.items()
            }
            for writer, tables in body["rejected"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        cursor = Cursor(path, destination, identity, run_id, moved_aside=_move_aside(path))
    return cursor


def _move_aside(path: Path) -> Path:
    number = 1
    while True:
        aside = path.with_suffix(f".unreadable-{number}")
        try:
            files.rename_new(path, aside)
        except FileExistsError:
            number += 1
            continue
        files.sync_folder(path.parent)
        return aside
