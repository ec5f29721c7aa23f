"""What a writer has lost, and what of it its journal tells: it writes the `loss` events that `spool.loss` reads.

Also the one other event that a writer writes of its own accord, past all that waits: `alive`.
"""

import time
from collections import Counter, deque
from typing import Any

from spool import format
from spool.live import LiveJournal, Suspect
from spool.room import FULL, Room

WARN_EACH_S = 60
"""Losses that go on are reported, on stderr and in the journal, no more often."""


class Ledger:
    """The caller holds the writer's lock, and looks afterwards whether the journal was given up."""

    def __init__(self, live: LiveJournal, room: Room, lost: Counter[str]) -> None:
        """`lost` are the counts by table that no journal tells of yet, added to by others; a report clears them."""
        self._live, self._room, self._lost = live, room, lost
        self._reported = 0
        """Records lost, of all tables, that the journal tells of."""
        self.suspects: deque[Suspect] = deque()
        """Ranges that a failed fdatasync may have lost, not recorded yet."""
        self.reason = ""
        self.since_ns = 0
        self._is_open = False
        """Whether the journal's last word on losses is that there may be more."""
        self._reported_s = float("-inf")

    @property
    def lost(self) -> int:
        """Records that are in no journal and will not be, of all tables."""
        return self._reported + self._lost.total()

    @property
    def is_settled(self) -> bool:
        """Whether the journal tells all there is to tell."""
        return not (self.suspects or self._is_open or any(self._lost.values()))

    def say_suspects(self) -> None:
        while self.suspects:
            first, last, reason = self.suspects[0]
            if self.write_own("loss", {"suspect": [first, last], "reason": reason}) is not None:
                return
            self.suspects.popleft()

    def report(self, now_s: float, *, is_open: bool) -> None:
        """Record how many records are lost, none perhaps. `open`: others wait in memory, and a kill would leave no count.

        A report is whole or nothing; until it is written, the counts stay here.
        """
        lost = {table: count for table, count in self._lost.items() if count}
        is_due = now_s - self._reported_s >= WARN_EACH_S
        if not (is_open != self._is_open or (lost and (is_due or not is_open))):
            return
        body = {"records": lost, "reason": self.reason, "since_ns": self.since_ns}
        body |= {"open": True} if is_open else {}
        error = self.write_own("loss", body)
        if error is not None and error.errno in FULL:
            self._room.lend()
            error = self.write_own("loss", body)
        if error is None:
            self._is_open, self._reported_s = is_open, now_s
            self._reported += sum(lost.values())
            self._lost.clear()

    def write_own(self, kind: str, body: dict[str, Any]) -> OSError | None:
        """Write an event past everything that waits; the error where it is not in the journal."""
        return self.write_past(time.time_ns(), format.event_body(kind, body))

    def write_past(self, ts: int, body: bytes) -> OSError | None:
        before = self._live.seq
        error = self._live.write(ts, None, None, body)
        return error if self._live.seq == before else None
