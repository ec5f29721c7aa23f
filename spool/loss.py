"""What a writer says of records that its disk did not take: the `loss` events of its journal, an episode each. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any


@dataclass
class Loss:
    """`records` by table are in no journal. `is_open`: more may be, for the writer has not said that it was over.

    `suspect`: first and last seq of records that are here, but may be gone after a power cut, for a sync had failed.
    """

    writer: str
    reason: str
    since_ns: int
    records: dict[str, int] = field(default_factory=dict)
    is_open: bool = False
    suspect: tuple[int, int] | None = None

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
        if self.suspect:
            return f"{self.writer}: seq {self.suspect[0]} to {self.suspect[1]} may not survive a power cut, {since} ({self.reason})"
        counts = ", ".join(f"{count} of {table}" for table, count in sorted(self.records.items()))
        more = "; more may be, its process has not recorded the end of it" if self.is_open else ""
        return f"{self.writer}: lost {counts or 'nothing that is known'}{more}, since {since} ({self.reason})"


def episodes(writer: str, events: Iterable[tuple[int, dict[str, Any]]]) -> list[Loss]:
    """From a writer's `loss` events (ns, body) in order; an episode that lost nothing in the end is none."""
    found: list[Loss] = []
    current: Loss | None = None
    for ts, body in events:
        reason = str(body.get("reason", ""))
        if "suspect" in body:
            first, last = body["suspect"]
            found.append(Loss(writer, reason, ts, suspect=(int(first), int(last))))
            continue
        if current is None:
            current = Loss(writer, reason, int(body.get("since_ns") or ts))
            found.append(current)
        current.records = dict(Counter(current.records) + Counter(body.get("records", {})))
        current.reason = reason or current.reason
        current.is_open = bool(body.get("open"))
        if not current.is_open:
            current = None
    return [one for one in found if one.records or one.is_open or one.suspect]
