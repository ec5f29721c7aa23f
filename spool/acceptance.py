"""Damage that a person has acknowledged with `spool verify --accept`: it no longer fails a verify or holds up a cursor.

    <folder>/accepted/<run_id>.json      below `<spool>/.sync`, or `--state-dir`
    {"format": 1, "run_id": …, "accepted": [{"damage": …, "by": …, "at_ns": …}, …]}

What is accepted is this damage, as it is described: more of it, or other bytes, is new damage. Nothing in the run changes.
"""

import getpass
import time
from collections.abc import Iterable
from pathlib import Path

from spool import files, format
from spool.journal import Damage

FORMAT = 1


class Accepted:
    """What has been accepted in one run; `damage in accepted` asks."""

    def __init__(self, path: Path, root: Path, entries: list[dict[str, object]]) -> None:
        self._path, self._root, self._entries = path, root, entries

    def __contains__(self, damage: object) -> bool:
        return isinstance(damage, Damage) and any(one["damage"] == self._text(damage) for one in self._entries)

    def _text(self, damage: Damage) -> str:
        """The same in every copy of the spool, wherever it lies."""
        return str(damage).replace(f"{self._root}/", "")

    def add(self, damage: Iterable[Damage]) -> None:
        """Durable when this returns. Raises OSError where the folder cannot be written."""
        new = [{"damage": self._text(one), "by": _user(), "at_ns": time.time_ns()} for one in damage if one not in self]
        if new:
            self._entries += new
            files.make_folder(self._path.parent)
            body = {"format": FORMAT, "run_id": self._path.stem, "accepted": self._entries}
            files.replace_file(self._path, format.dump_json(body))


def load(folder: Path, run: Path) -> Accepted:
    """A file that cannot be read accepts nothing."""
    path = folder / "accepted" / f"{run.name}.json"
    try:
        body = format.load_json(path.read_bytes())
        entries = [dict(one) for one in body["accepted"] if isinstance(one["damage"], str)]
    except (OSError, ValueError, KeyError, TypeError):
        entries = []
    return Accepted(path, run.parent, entries)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in containers
        return "unknown"
