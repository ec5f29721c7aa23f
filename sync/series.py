"""Metrics as a tracker tells them apart: which name each key has there, and which points a name holds. Pure."""

import math
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sync import name

MAX_DOUBLE = 1.7976931348623157e308


class Point(NamedTuple):
    """One metric as it is sent: the tracker's primary key within the run."""

    name: str
    timestamp_ms: int
    step: int
    value: float

    def packed(self) -> bytes:
        """Small, and equal where the tracker cannot tell two points of a name apart: -0.0 is 0.0, NaN is itself."""
        return struct.pack(
            "<qqd", self.timestamp_ms, self.step, math.nan if math.isnan(self.value) else self.value + 0.0
        )


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


class Histories:
    """The points that a destination holds, asked for name by name, and which of them we have looked for."""

    def __init__(self, names: Iterable[str], fetch: Callable[[str], Iterable[Point]]) -> None:
        self._names, self._fetch = set(names), fetch
        self._points: dict[str, set[bytes]] = {}
        self._seen: dict[str, set[bytes]] = {}
        self.indistinct = 0

    def ask(self, names: Iterable[str]) -> None:
        """Fetch these histories, so that `holds` need not, and either counts a whole batch or none of it."""
        for one in names:
            if one not in self._points:
                self._points[one] = {point.packed() for point in self._fetch(one)} if one in self._names else set()

    def holds(self, point: Point) -> bool:
        packed = point.packed()
        if packed not in self._points[point.name]:
            return False
        seen = self._seen.setdefault(point.name, set())
        self.indistinct += packed in seen
        seen.add(packed)
        return True

    def count(self) -> int:
        self.ask(self._names)
        return sum(len(self._points[one]) for one in self._names)
