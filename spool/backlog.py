"""Records that the disk would not take, kept in memory within bounds and written when it does. Pure."""

from collections import Counter, deque
from typing import NamedTuple

MAX_BYTES = 32 << 20
RECORD_BYTES = 200
"""What Python takes for one record beside its body: the tuple, its numbers, the bytes object, the place in the queue."""
ORDER = ("events", "metrics", "generations", "spans")
"""What is written first when there is room again, and dropped last when there is none."""


class Kept(NamedTuple):
    ts: int
    step: int | None
    ordinal: int | None
    body: bytes


class Backlog:
    """One queue for each table, in order. When they exceed the bound, the oldest spans go first and events last."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        """Records dropped, by table, since this was last cleared."""
        self.size_bytes = 0
        self._max_bytes = MAX_BYTES
        self._queues: dict[str, deque[Kept]] = {table: deque() for table in ORDER}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def holds(self, table: str) -> bool:
        """Whether earlier records of the table wait: a later one then waits too, so that their order stays."""
        return bool(self._queues[table])

    def add(self, table: str, record: Kept) -> None:
        """Keep a record, and drop others for it where they are too many together."""
        size = RECORD_BYTES + len(record.body)
        if size > self._max_bytes // 2:  # it alone would drive out everything
            self.lost[table] += 1
            return
        self._queues[table].append(record)
        self.size_bytes += size
        while self.size_bytes > self._max_bytes:
            lowest = next(one for one in reversed(ORDER) if self._queues[one])
            self.remove_first(lowest)
            self.lost[lowest] += 1

    def first(self, table: str) -> Kept:
        return self._queues[table][0]

    def remove_first(self, table: str) -> None:
        record = self._queues[table].popleft()
        self.size_bytes -= RECORD_BYTES + len(record.body)

    def drop_all(self) -> None:
        for table, queue in self._queues.items():
            self.lost[table] += len(queue)
            queue.clear()
        self.size_bytes = 0

    def measure(self) -> None:
        """Count anew what is held: a signal handler that raised may have left a change half made."""
        self.size_bytes = sum(RECORD_BYTES + len(one.body) for queue in self._queues.values() for one in queue)
