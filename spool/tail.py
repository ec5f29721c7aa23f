"""`spool tail`: the last records of some runs, then new ones as they come, of all writers, later writers and later runs."""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spool import catalog, format, layout
from spool.catalog import RunFolder
from spool.follow import Follower
from spool.journal import Damage
from spool.terminal import moment, printable, shortened

_TABLE_OF = {"metrics": "metrics", "generation": "generations", "span": "spans", "event": "events"}
_KEYS_SHOWN, _VALUE_LENGTH, _LINE_LENGTH = 8, 60, 200
_LOOK_BACK_FACTOR = 16


class Entry(NamedTuple):
    run: str
    writer: str
    record: dict[str, Any]

    @property
    def table(self) -> str:
        return next((table for key, table in _TABLE_OF.items() if key in self.record), "")


class Tail:
    """What `names` mean now and later; without names the newest run, and runs that begin after it."""

    def __init__(self, root: Path, names: tuple[str, ...] = (), tables: Collection[str] = ()) -> None:
        self._root, self._names, self._tables = root, names, tables
        runs = catalog.open_runs(root, names)
        self._newest_ns = max(run.created_ns for run in runs)
        self._runs = runs if names else [max(runs, key=lambda run: (run.created_ns, run.id))]
        self._seen = {path.name for path in layout.runs(root)}
        self._followers: dict[Path, Follower] = {}
        self._told: Counter[Path] = Counter()

    @property
    def has_several_runs(self) -> bool:
        return len(self._runs) > 1

    def last(self, count: int, *, is_final: bool = False) -> list[Entry]:
        """The newest `count` records, in the order of their time; of one writer always in its own order."""
        ends = {writer.path: writer.last.seq for run in self._runs for writer in layout.glance(run.path)}
        back = count
        while True:
            self._followers = {path: Follower(path, max(0, seq - back)) for path, seq in ends.items()}
            found = deque(self._read(is_final=is_final), maxlen=count)
            if len(found) >= count or back >= max(ends.values(), default=0):
                return list(found)
            back *= _LOOK_BACK_FACTOR

    def new(self) -> Iterator[Entry]:
        """What has been recorded since the last look; to be read to its end."""
        for path in layout.runs(self._root):
            if path.name not in self._seen:
                self._seen.add(path.name)
                self._add_if_meant(RunFolder(path))
        for run in self._runs:
            try:
                writers = layout.writers(run.path)
            except FileNotFoundError:  # moved away or removed
                continue
            for writer in writers:
                self._followers.setdefault(writer, Follower(writer))
        yield from self._read(is_final=False)

    def _add_if_meant(self, run: RunFolder) -> None:
        is_newer = not self._names and run.created_ns >= self._newest_ns
        if is_newer or any(catalog.is_meant(run, name) for name in self._names):
            self._runs.append(run)

    def _read(self, *, is_final: bool) -> Iterator[Entry]:
        streams = [self._entries(follower, is_final=is_final) for follower in self._followers.values()]
        yield from heapq.merge(*streams, key=lambda entry: int(entry.record["ts"]))

    def _entries(self, follower: Follower, *, is_final: bool) -> Iterator[Entry]:
        for record in follower.read(is_final=is_final):
            entry = Entry(follower.path.parent.name, follower.path.name, record)
            if not self._tables or entry.table in self._tables:
                yield entry

    def new_damage(self) -> list[Damage]:
        """What was found since this was last asked."""
        new = []
        for path, follower in self._followers.items():
            new += follower.damage[self._told[path] :]
            self._told[path] = len(follower.damage)
        return new


def json_line(entry: Entry) -> str:
    """The record as its journal holds it, with run and writer, in one line."""
    return format.json_text({"run": entry.run, "writer": entry.writer, **entry.record})


def line(entry: Entry, *, with_run: bool) -> str:
    """One line for people; nothing in it acts on a terminal."""
    record = entry.record
    step = "no step" if record.get("step") is None else f"step {record['step']}"
    run = f"{entry.run}  " if with_run else ""
    text = f"{moment(record['ts'], 'milliseconds')}  {run}{entry.writer}  {step}  {_what(record)}"
    return printable(shortened(text, _LINE_LENGTH + len(run)))


def _what(record: dict[str, Any]) -> str:
    if "metrics" in record:
        values = record["metrics"] | record.get("decimals", {}) | record.get("texts", {})
        shown = [f"{_short(key)}={_short(value)}" for key, value in list(values.items())[:_KEYS_SHOWN]]
        return " ".join(shown + [f"(+{len(values) - _KEYS_SHOWN} more)"] * (len(values) > _KEYS_SHOWN))
    if "generation" in record:
        row = record["generation"]
        score = f" score={row['score']}" if "score" in row else ""
        texts = f"{_short(row.get('input'))} -> {_short(row.get('output'))}"
        return f"generation {_short(row['split'])}[{row['index']}]{score} {texts}"
    if "span" in record:
        span = record["span"]
        took = f" {(span['end'] - span['start']) / 1e6:.1f} ms" if span.get("end") is not None else ""
        return f"span {_short(span['name'])} {_short(span['type'])} {_short(span['status'])}{took}"
    return f"{_short(record.get('event', 'record'))} {format.json_text(record.get('body', {}))}"


def _short(value: object) -> str:
    return shortened(value if isinstance(value, str) else format.json_text(value), _VALUE_LENGTH)
