"""Cursors: how far one destination has got with one run. Files under `<spool>/.sync/`, or `--state-dir`.

A cursor is a cache: the destination is the authority on what it holds. So a file that cannot be read is moved aside and an
empty cursor takes its place, and deleting the folder doubles nothing. What only this file knows is which records a
destination has rejected; without it they are offered once more.

    <folder>/<destination>/<identity>.json
    {"format": 1, "destination": …, "identity": …, "run_id": …,
     "delivered": {writer: {table: seq}}, "rejected": {writer: {table: {place: reason}}},
     "status": …, "waiting": …}

`status` is how the run stood in the last sync that proved everything to be there, empty where a later one found that it is not;
`waiting` counts spans that had not ended then, and are not there yet. `spool gc` goes by both.

`identity` is the destination's own name for its run: a run deleted and made anew there has another identity, and so a fresh
cursor.
"""

import re
from contextlib import suppress
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
    status: str = ""
    waiting: int = 0
    moved_aside: Path | None = None
    """Where the unreadable file went that this cursor replaces."""

    def save(self) -> None:
        """Durable when this returns; a reader sees the old cursor or the new one."""
        files.make_folder(self.path.parent)
        names = ("destination", "identity", "run_id", "delivered", "rejected", "status", "waiting")
        body = {"format": FORMAT, **{name: getattr(self, name) for name in names}}
        files.replace_file(self.path, format.dump_json(body))


def load(folder: Path, destination: str, identity: str, run_id: str) -> Cursor:
    """The cursor of a destination's run; an empty one when there is none, or none that can be read."""
    safe = identity if _SAFE.fullmatch(identity) else sha256(identity.encode()).hexdigest()
    path = folder / destination / f"{safe}.json"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Cursor(path, destination, identity, run_id)
    try:
        found = _parse(path, content)
        if (found.identity, found.run_id) != (identity, run_id):
            raise ValueError("the cursor of another run")
    except (ValueError, KeyError, TypeError, AttributeError):
        found = Cursor(path, destination, identity, run_id, moved_aside=_move_aside(path))
    return found


def of_run(folder: Path, destination: str, run_id: str) -> list[Cursor]:
    """Every cursor of a run at one destination, of each identity that it has had there. Changes nothing."""
    return by_run(folder, destination).get(run_id, [])


def by_run(folder: Path, destination: str) -> dict[str, list[Cursor]]:
    """run id -> its cursors at one destination, as `of_run` gives them; reads each file once."""
    found: dict[str, list[Cursor]] = {}
    for path in sorted((folder / destination).glob("*.json")):
        try:
            one = _parse(path, path.read_bytes())
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
            continue  # says nothing of any run; the next sync moves it aside
        found.setdefault(one.run_id, []).append(one)
    return found


def discard(cursor: Cursor) -> None:
    """Forget it: the run it tells of is not at the destination any more."""
    with suppress(FileNotFoundError):
        files.remove(cursor.path)


def _parse(path: Path, content: bytes) -> Cursor:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no cursor."""
    body = format.load_json(content)
    format.check_format(body["format"], str(path))
    return Cursor(
        path,
        str(body["destination"]),
        str(body["identity"]),
        str(body["run_id"]),
        {writer: {table: int(seq) for table, seq in tables.items()} for writer, tables in body["delivered"].items()},
        {
            writer: {
                table: {place: str(reason) for place, reason in places.items()} for table, places in tables.items()
            }
            for writer, tables in body["rejected"].items()
        },
        str(body.get("status", "")),
        int(body.get("waiting", 0)),
    )


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
