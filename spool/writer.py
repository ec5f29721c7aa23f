"""The writer: one process of one attempt, the only writer of its folder.

`append` is the hot path: seq, checksum and one write(2) under a lock. Everything slow (fdatasync, a new journal, sealing,
a disk that does not take everything, the `alive` record of a silent writer) happens in one background thread.

Invariants, beside those of the journal (`spool.live`) and of what waits for the disk (`spool.deferred`):
- a call from inside a call (a `__del__` run by the garbage collector, a signal handler) is queued, never waits;
- a failing disk never raises into training, and never makes it wait.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spool import format, seal
from spool.backlog import Kept
from spool.deferred import Deferred
from spool.live import LiveJournal
from spool.process import warn
from spool.room import Limits, Room

SEAL_BYTES = 16 << 20
SEAL_AFTER_S = 600
SEAL_AFTER_MIN_BYTES = 1 << 20
ALIVE_AFTER_S = 60
SYNC_EACH_S = 1.0

DURABILITIES = ("interval", "record", "os")
"""Against power loss: background fdatasync each second, before each return, or never. A kill loses nothing in any of them."""


_FINISHED = "the run is finished"


class Writer:
    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        durability: str = "interval",
        limits: Limits | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """Create the writer's folder and first journal. Durable when this returns; raises OSError when it cannot be.

        `header` holds run, attempt, lead and what the attempt continues; the writer adds the rest. `keeps`: whether a
        record that cannot be written now is kept in memory; otherwise the caller is told, and it is lost at once.
        """
        self.folder = folder
        self.id = folder.name
        self._durability = durability
        self._lock = threading.RLock()
        self._busy = False
        self._queue: deque[tuple[int, int | None, list[bytes]]] = deque()
        self._last_words: tuple[int, list[bytes]] | None = None
        self._live = LiveJournal(folder, header, syncs_records=durability == "record")
        self._room = Room(folder, limits or Limits())
        self._room.measure(time.monotonic(), 0)
        self._sealer = seal.Sealer()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._deferred = Deferred(self._live, self._room, self._sealer, self._wake, keeps_records=keeps)
        self._last_write_s = time.monotonic()
        self._ticked_seq = 0
        self._thread = threading.Thread(target=self._tend, name="spool-writer", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The live journal."""
        return self._live.path

    @property
    def seq(self) -> int:
        """Of the last record written."""
        return self._live.seq

    @property
    def lost(self) -> int:
        """Records that are in no journal and will not be, of all tables."""
        return self._deferred.lost

    @property
    def is_ended(self) -> bool:
        """Whether the last record has been written, or given up: nothing follows it."""
        return self._live.is_ended

    # --- a call, and calls from inside it

    def append(self, ts: int, step: int | None, bodies: list[bytes]) -> OSError | None:
        """Write the records of one call, in order, one write(2) each. In the kernel when this returns.

        Does not raise for a failing disk: the records are kept in memory for later, or counted as lost, and the last
        error is returned.
        """
        error = None
        try:
            with self._lock:
                if self._busy:  # this thread is inside this method already: the outer call writes it
                    self._queue.append((ts, step, bodies))
                    return None
                self._busy = True
                try:
                    error = self._write(ts, step, bodies)
                finally:
                    self._busy = False
                    if self._queue:
                        self._drain()
        finally:
            if self._last_words is not None:
                self._close_if_told()
        return error

    def _close_if_told(self) -> None:
        """Do what a finish from inside a call has left, outside the lock: it waits for the background thread."""
        if self._last_words is not None:
            self.close(*self._last_words)

    def _drain(self) -> None:
        """Do what calls from inside a call have left, in their order."""
        while self._queue and not self._busy:
            self._busy = True  # from here on calls from inside are queued, and nobody else takes from the queue
            try:
                if self._queue:  # a signal handler may have come in between, and done it all
                    self._write_first(*self._queue[0])
            finally:
                self._busy = False

    def _write_first(self, ts: int, step: int | None, bodies: list[bytes]) -> None:
        done = self._live.seq + self._deferred.aside
        try:
            if bodies:
                self._write(ts, step, bodies)
                bodies.clear()
        finally:  # a signal handler may raise here too: what is not written stays queued
            del bodies[: self._live.seq + self._deferred.aside - done]
            if not bodies:
                self._queue.popleft()

    def _write(self, ts: int, step: int | None, bodies: list[bytes]) -> OSError | None:
        live, deferred = self._live, self._deferred
        failure = None
        ordinal = None
        if step is None and format.table_of_body(bodies[0]) in ("metrics", "generations"):
            ordinal = live.ordinal = live.ordinal + 1
        try:
            for body in bodies:
                before = live.seq
                error = deferred.hindrance(body) if deferred.is_hindered else None
                if error is None:
                    error = live.write(ts, step, ordinal, body)
                    if error is None:
                        continue
                    deferred.heed_journal()
                failure = error
                if live.seq == before:  # otherwise it stands in the journal all the same
                    deferred.set_aside(Kept(ts, step, ordinal, body), error)
        except BaseException:  # a signal handler raised, perhaps where a record could not be taken back
            deferred.heed_journal()
            raise
        if live.size >= SEAL_BYTES:
            self._wake.set()
        return failure

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """The lock, with calls from inside queued as in `append`; False where this very thread is inside a call already."""
        with self._lock:
            was_busy, self._busy = self._busy, True
            try:
                yield not was_busy
            finally:
                self._busy = was_busy
                self._drain()

    # --- what the background thread does

    def _tend(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(SYNC_EACH_S)
            self._wake.clear()
            if not self._stop.is_set():
                self._tick()
            self._close_if_told()

    def _tick(self) -> None:
        now = time.monotonic()
        live, deferred = self._live, self._deferred
        deferred.measure(now)
        if live.seq != self._ticked_seq:
            self._ticked_seq, self._last_write_s = live.seq, now
        elif now - self._last_write_s >= ALIVE_AFTER_S:
            self._last_write_s = now
            with self._held() as is_ours:
                if is_ours:
                    deferred.say_alive()
        if deferred.is_hindered:
            deferred.recover(now, self._held, self._stop)
        if self._stop.is_set():
            return
        if not deferred.is_hindered:
            self._room.take_back()
        if not live.unwritable:
            if self._durability != "interval" or deferred.sync():
                deferred.end_back_off(now)
            else:
                deferred.recover(now, self._held, self._stop)
        age_s = now - live.opened_s
        is_due = live.size >= SEAL_BYTES or (age_s >= SEAL_AFTER_S and live.size >= SEAL_AFTER_MIN_BYTES)
        if is_due and not live.unwritable and not deferred.full:
            self._rotate()
        self._sealer.tend(now)

    def _rotate(self) -> None:
        self._deferred.begin_next(self._held)

    # --- for the run

    def sync(self) -> None:
        """All records so far survive a power cut when this returns. Raises OSError when the disk says otherwise."""
        try:
            with self._held():  # the background thread must not exchange the journal meanwhile
                first = self._live.first_unsynced
                try:
                    self._live.sync_all()
                except OSError as error:
                    self._deferred.suspect(first, f"fdatasync: {error}")
                    raise
                waiting = len(self._deferred.backlog)
                if waiting:
                    raise OSError(f"{waiting} records are in memory only, the disk does not take them")
        finally:
            self._close_if_told()

    def take_losses(self, other: "Writer") -> None:
        """Record what another writer of this process could not: a forked child's, before it had a journal."""
        with other._lock:
            lost, reason = other._deferred.hand_over_losses()
        if lost:
            with self._held():
                self._deferred.take_losses(lost, reason)

    def head(self) -> dict[str, Any]:
        """How far this writer has got, for the roster."""
        return {"seq": self._live.seq, "journal": self._live.number, "length": self._live.size}

    def close(self, ts: int = 0, last: list[bytes] | None = None) -> OSError | None:
        """Write the last record, sync, close and seal what is left, waiting for the sealing child. Idempotent.

        Nothing follows the last record: another thread's call comes before it or is refused. Returns the error that kept
        it from being written.
        """
        with self._lock:
            if self._busy:  # a signal handler that finishes the run in the middle of a write: the write goes first
                self._last_words = (ts, last or [])
                return None
            self._last_words = None
        self._stop.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._live.is_ended:
                return None
            self._drain()
            self._busy = True  # nothing of this thread comes in between either
            try:
                unwritten = self._deferred.say_last(ts, last or [], self._held)
            finally:
                self._deferred.refuse(_FINISHED)
                self._busy = False
                self._drain()
        if unwritten is not None:
            warn(f"{self.path}: the end could not be recorded ({unwritten}); the run will read as one that was killed")
        try:
            self._live.close(syncs=self._durability != "os")
        except OSError as error:
            warn(f"{self.path}: the last records may not survive a power cut ({error})")
        self._sealer.add(self.path)
        self._sealer.finish()
        return unwritten

    def abandon(self) -> None:
        """In a forked child: drop lock, descriptor and buffers. The parent's writer is untouched."""
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._busy, self._last_words = False, None
        self._queue.clear()
        self._sealer = seal.Sealer()
        self._deferred.abandon(self._sealer, self._wake)
        self._live.abandon()
        self._deferred.refuse(_FINISHED)

    def refuse(self, reason: str) -> None:
        """Count every later record as lost."""
        self._deferred.refuse(reason)
