"""Metrics as a tracker tells them apart: which name each key has there, and which points a name holds. Pure but for pyarrow."""

import math
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import pyarrow as pa

from sync import name
from sync.batch import columns, shown_step

MAX_DOUBLE = 1.7976931348623157e308


class Point(NamedTuple):
    """One metric as it is sent: the tracker's primary key within the run."""

    name: str
    timestamp_ms: int
    step: int
    value: float


_pack = struct.Struct("<qqd").pack


def packed(points: Iterable[Point]) -> list[bytes]:
    """Each small, and equal where the tracker cannot tell two points of a name apart: -0.0 is 0.0, NaN is itself."""
    return [_pack(time_ms, step, value + 0.0 if value == value else math.nan) for _, time_ms, step, value in points]  # noqa: PLR0124


def points(rows: pa.Table, name_of: Callable[[str], str]) -> list[Point]:
    """Metrics that have a value, as points under the names they have there."""
    keys, times_ns, steps, ordinals, values = columns(rows, "key", "ts", "step", "ordinal", "value")
    names = {key: name_of(key) for key in set(keys)}
    return [
        Point(names[key], time_ns // 1_000_000, shown_step(step, ordinal), clamped(value))
        for key, time_ns, step, ordinal, value in zip(keys, times_ns, steps, ordinals, values, strict=True)
    ]


def clamped(value: float) -> float:
    """Infinity as databases that have none keep it: the largest double."""
    return max(-MAX_DOUBLE, min(MAX_DOUBLE, value)) if math.isinf(value) else value


class Names:
    """key -> name, no two keys alike. Who came first at the destination has the plain name; `owners` remembers who that is."""

    def __init__(self, taken: Iterable[str], claims: dict[str, str]) -> None:
        """`taken` are the names in use there, `claims` says whose they are where that is another key than the name."""
        self.owners = {one: one for one in taken} | claims

    def of(self, key: str) -> str:
        mapped = name.tracker_key(key)
        return mapped if self.owners.get(mapped, owner(key)) == owner(key) else name.suffixed(mapped, key)

    def claim(self, keys: Iterable[str]) -> dict[str, str]:
        """Take the names of these keys; returns name -> owner of those whose owner the name itself does not tell."""
        claims = {}
        for key in dict.fromkeys(keys):
            mapped = self.of(key)
            self.owners[mapped] = owner(key)
            if mapped != key:
                claims[mapped] = owner(key)
        return claims

    def suffixed(self) -> dict[str, str]:
        """name -> key of those that could not have their plain name."""
        return {mapped: key for mapped, key in self.owners.items() if mapped != name.tracker_key(key)}


def owner(key: str) -> str:
    """A key as a claim tells it."""
    return key if len(key) <= 1000 else f"{key[:900]}… {name.short_hash(key)}"


class Series(Protocol):
    """A way for the points of a run to get to a tracker and back."""

    rows: int
    """Most points that `log` takes at once."""

    def log(self, run_id: str, points: list[Point], tags: dict[str, str]) -> None:
        """Write points, then tags. Idempotent; durable when this returns."""

    def history(self, run_id: str, name: str) -> Iterable[Point]:
        """All points of a name, in no order."""


class Histories:
    """The points that a destination holds, asked for name by name, and which of them we have looked for."""

    def __init__(self, names: Iterable[str], fetch: Callable[[str], Iterable[Point]]) -> None:
        self._names, self._fetch = set(names), fetch
        self._points: dict[str, set[bytes]] = {}
        self._seen: dict[str, set[bytes]] = {}
        self.indistinct = 0

    def ask(self, names: Iterable[str]) -> None:
        for one in names:
            if one not in self._points:
                self._points[one] = set(packed(self._fetch(one))) if one in self._names else set()
                self._seen[one] = set()

    def hold(self, points: list[Point]) -> list[bool]:
        """Which of the points are there. Where a history cannot be had, none of them counts as looked for."""
        self.ask({point.name for point in points})
        found = []
        for point, one in zip(points, packed(points), strict=True):
            is_there = one in self._points[point.name]
            if is_there:
                seen = self._seen[point.name]
                self.indistinct += one in seen
                seen.add(one)
            found.append(is_there)
        return found

    def count(self) -> int:
        self.ask(self._names)
        return sum(len(self._points[one]) for one in self._names)
