"""The writer: one process of one attempt, the only writer of its folder.

`append` is the hot path: seq, checksum and one write(2) under a lock. Everything slow (fdatasync, a new journal, sealing,
a disk that does not take everything, the `alive` record of a silent writer) happens in one background thread.

Invariants:
- a seq is given at the write and committed only after a full write: what failed leaves no gap;
- nobody appends after a torn tail: a failed write is truncated away, or a new journal is begun;
- a call from inside a call (a `__del__` run by the garbage collector, a signal handler) is queued, never waits;
- a failing disk never raises into training, and never makes it wait: what cannot be written is kept in memory within
  bounds and tried again in the background; what no memory is left for is counted, said, and recorded as lost.
"""

import errno
import hashlib
import os
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from spool import files, format, journal, liveness, seal
from spool.backlog import ORDER, Backlog, Kept
from spool.process import warn
from spool.room import FULL, Limits, Room

SEAL_BYTES = 16 << 20
SEAL_AFTER_S = 600
SEAL_AFTER_MIN_BYTES = 1 << 20
ALIVE_AFTER_S = 60
SYNC_EACH_S = 1.0
WARN_EACH_S = 60
RETRY_AT_MOST_EACH_S = 60.0
MAX_RECORD_BYTES = 1 << 30
"""Parquet and Arrow hold less than 2 GiB in one value, and Linux writes less in one call."""
_BACKLOG_CHUNK_BYTES = 1 << 18
"""Written from memory under one hold of the lock: a call of `log()` waits for no more."""

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
        self.seq = 0
        self.ordinal = 0
        self.counts: Counter[str] = Counter()
        self._header = {**header, "writer": self.id, **liveness.identity()}
        self._durability = durability
        self._keeps = keeps
        self._lock = threading.RLock()
        self._busy = False
        self._queue: deque[tuple[int, int | None, list[bytes]]] = deque()
        self._last_words: tuple[int, list[bytes]] | None = None
        self._sealer = seal.Sealer()
        self._is_closed = False
        self._init_hindrances()
        files.make_folder(folder)
        self._number = 1
        self._descriptor, self._size = journal.create(folder, 1, self._next_header(1, None))
        self._opened_s = time.monotonic()
        self._synced_seq = -1
        self._sync()
        self._room = Room(folder, limits or Limits())
        self._room.measure(time.monotonic())
        self._last_write_s = time.monotonic()
        self._ticked_seq = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tend, name="spool-writer", daemon=True)
        self._thread.start()

    def _init_hindrances(self) -> None:
        self._is_hindered = False
        """Whether anything keeps records from being written: the one thing that the hot path looks at."""
        self._unwritable = ""
        """Why nothing may be appended to this journal any more."""
        self._full = ""
        """Why nothing is tried before the background thread has."""
        self._backlog = Backlog()
        self._aside = 0
        """Records kept or lost in place of being written, for counting what a call has done."""
        self._stands = False
        """Whether the record that failed last is in the journal all the same, and cannot be removed."""
        self._lost: Counter[str] = Counter()
        self._loss_reason = ""
        self._losing_since_ns = 0
        self._is_loss_announced = False
        self._reported_s = float("-inf")
        self._warned_s = float("-inf")
        self._retry_after_s, self._retry_delay_s = 0.0, 1.0

    @property
    def path(self) -> Path:
        """The live journal."""
        return self.folder / format.journal_name(self._number)

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
            if self._last_words is not None:  # outside the lock: it waits for the background thread
                self.close(*self._last_words)
        return error

    def _drain(self) -> None:
        """Do what calls from inside a call have left, in their order."""
        while self._queue and not self._busy:
            ts, step, bodies = self._queue[0]
            done, self._busy = self.seq + self._aside, True
            try:
                self._write(ts, step, bodies)
                bodies.clear()
            finally:  # a signal handler may raise here too: what is not written stays queued
                self._busy = False
                del bodies[: self.seq + self._aside - done]
                if not bodies:
                    self._queue.popleft()

    def _write(self, ts: int, step: int | None, bodies: list[bytes]) -> OSError | None:
        failure = None
        ordinal = None
        if step is None and format.table_of_body(bodies[0]) in ("metrics", "generations"):
            ordinal = self.ordinal = self.ordinal + 1
        for body in bodies:
            error = self._hindrance(body) if self._is_hindered else None
            if error is None:
                error = self._write_record(ts, step, ordinal, body)
                if error is None:
                    continue
            failure = error
            if not self._stands:
                self._set_aside(Kept(ts, step, ordinal, body), error)
        if self._size >= SEAL_BYTES:
            self._wake.set()
        return failure

    def _write_record(self, ts: int, step: int | None, ordinal: int | None, body: bytes) -> OSError | None:
        """One record, with the next seq; on an error it is taken back, or `_stands` where that failed too."""
        seq, size = self.seq + 1, self._size
        line = format.record_line(seq, ts, step, ordinal, body)
        if len(line) > MAX_RECORD_BYTES:
            return OSError(f"a record of {len(line):,} bytes; at most {MAX_RECORD_BYTES:,} fit into one")
        try:
            if files.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "short write; is the disk full?")
            if self._durability == "record":
                self._sync_record()
            self.seq, self._size = seq, size + len(line)
        except OSError as error:
            self._stands = self._is_kept(seq, size, line)
            return error
        except BaseException:  # a signal handler raised (Ctrl-C) between the write and its commit
            self._settle(seq, size, line)
            raise
        return None

    def _sync_record(self) -> None:
        try:
            files.sync_data(self._descriptor)
        except OSError as error:  # the kernel has marked the pages clean: only a new journal can be believed again
            self._give_up(f"fdatasync: {error}")
            raise

    def _settle(self, seq: int, size: int, line: bytes) -> None:
        """Commit the record if all of it is in the file, take it back otherwise: a seq is never used twice."""
        if os.fstat(self._descriptor).st_size == size + len(line):
            self.seq, self._size = seq, size + len(line)
        else:
            self.seq, self._size = seq - 1, size
            self._take_back()

    def _is_kept(self, seq: int, size: int, line: bytes) -> bool:
        """Take back a record that could not be written; True when all of it stands there and cannot be removed.

        Readers will find such a record, so it keeps its seq.
        """
        self._take_back()
        with suppress(OSError):
            if os.fstat(self._descriptor).st_size == size + len(line):
                self.seq, self._size = seq, size + len(line)
                return True
        return False

    def _take_back(self) -> None:
        try:
            files.truncate(self._descriptor, self._size)
        except OSError as error:
            self._give_up(f"a part of a record stands at the end and cannot be removed ({error})")

    def _give_up(self, reason: str) -> None:
        """Nothing may follow in this journal: the background thread begins another."""
        self._unwritable = reason
        self._is_hindered = True
        self._wake.set()

    # --- a disk that does not take everything

    def _hindrance(self, body: bytes) -> OSError | None:
        """Why a record must not be written now."""
        self._stands = False
        table = format.table_of_body(body)
        if self._unwritable or self._full:
            return OSError(self._unwritable or self._full)
        if table in self._room.refused:
            return OSError(self._room.reason)
        return OSError("earlier ones still wait") if self._backlog.holds(table) else None

    def _set_aside(self, record: Kept, error: OSError) -> None:
        """Keep a record that could not be written, within bounds, and count what is lost for it."""
        self._aside += 1
        self._is_hindered = True
        self._losing_since_ns = self._losing_since_ns or record.ts
        table = format.table_of_body(record.body)
        if self._is_closed or not self._keeps:
            self._lose([table], error)
        else:
            self._lose(self._backlog.add(table, record), error)
        if self._keeps and not self._is_closed:
            self._note(error)
        waiting = f"{len(self._backlog)} records wait in memory" if self._backlog else ""
        lost = ", ".join(f"{count} of {name}" for name, count in sorted(self._lost.items()))
        so_far = "; ".join(filter(None, [waiting, lost and f"records lost so far: {lost}"]))
        self._warn_at_times(f"{self.path}: could not write ({error}); {so_far}; training goes on")

    def _note(self, error: OSError) -> None:
        """From now on records wait for the background thread, which tries each second."""
        if error.errno in FULL:
            self._full = str(error)
        elif (
            error.errno is not None and not self._unwritable
        ):  # another journal may do, as where files must not grow (EFBIG)
            self._give_up(str(error))

    def _lose(self, tables: list[str], error: OSError) -> None:
        if tables:
            self._lost.update(tables)
            self._loss_reason = str(error)

    def _warn_at_times(self, message: str) -> None:
        now = time.monotonic()
        if now - self._warned_s >= WARN_EACH_S:
            self._warned_s = now
            warn(message)

    def _recover(self, now_s: float) -> None:
        """In the background: begin another journal where this one is given up, write what waits, record what is lost."""
        if self._unwritable:
            if now_s >= self._retry_after_s:
                self._rotate()
            if self._unwritable:
                self._back_off(now_s)
                return
        self._full = ""
        took_all = self._write_backlog(self._room.refused)
        if not took_all and not self._is_loss_announced:
            self._announce_loss()
        is_over = took_all and not self._room.refused
        if is_over or now_s - self._reported_s >= WARN_EACH_S:
            self._report_losses()
        if is_over:
            self._end_hindrance()

    def _back_off(self, now_s: float) -> None:
        """Begin no other journal for a while: each try reads this one, and a dying disk would be strewn with new ones."""
        if now_s >= self._retry_after_s:
            self._retry_after_s = now_s + self._retry_delay_s
            self._retry_delay_s = min(RETRY_AT_MOST_EACH_S, 2 * self._retry_delay_s)

    def _end_hindrance(self) -> None:
        with self._lock:
            if self._backlog or self._full or self._unwritable or self._lost:
                return  # a call has failed again meanwhile
            self._is_hindered = False
            self._losing_since_ns = 0
        self._room.take_back()

    def _write_backlog(self, refused: frozenset[str] = frozenset()) -> bool:
        """Write what waits, the tables that matter most first; False once the disk refuses. In short holds of the lock."""
        for table in ORDER:
            while table not in refused and self._backlog.holds(table):
                with self._lock:
                    if self._busy:
                        return False
                    self._busy = True
                    try:
                        error = self._write_chunk(table)
                    finally:
                        self._busy = False
                        self._drain()
                if error is not None:
                    self._note(error)
                    return False
        return True

    def _write_chunk(self, table: str) -> OSError | None:
        written = 0
        while written < _BACKLOG_CHUNK_BYTES and self._backlog.holds(table):
            record, seq = self._backlog.first(table), self.seq
            try:
                error = self._write_record(*record)
            finally:  # whatever interrupts: a record that is in the journal must not be written again
                if self.seq > seq:
                    self._backlog.drop_first(table)
            if error is not None:
                return error
            written += len(record.body)
        return None

    def _announce_loss(self) -> None:
        """Say in the journal that records may be missing from here on: a kill would leave no count. The ballast makes room."""
        self._room.lend()
        body = {"open": True, "reason": self._full or self._unwritable, "since_ns": self._losing_since_ns}
        with self._lock:
            if not self._busy:
                self._is_loss_announced = self._write_own("loss", body)

    def _report_losses(self) -> None:
        """Record how many records are lost, none perhaps, and forget them once that is written."""
        with self._lock:
            if not (self._lost or self._is_loss_announced) or self._busy:
                return
            body = {"records": dict(self._lost), "reason": self._loss_reason, "since_ns": self._losing_since_ns}
            if self._write_own("loss", body):
                self._reported_s = time.monotonic()
                self.counts.update({"lost": self._lost.total()})
                self._lost.clear()
                self._is_loss_announced = False

    def _write_own(self, kind: str, body: dict[str, Any]) -> bool:
        """Write an event past everything that waits; whether it stands in the journal. With the lock held."""
        return self._write_past(time.time_ns(), format.event_body(kind, body)) is None

    def _write_past(self, ts: int, body: bytes) -> OSError | None:
        if self._unwritable:
            return OSError(self._unwritable)
        self._busy = True
        try:
            error = self._write_record(ts, None, None, body)
        finally:
            self._busy = False
        return error if error is not None and not self._stands else None

    # --- what the background thread does

    def _tend(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(SYNC_EACH_S)
            self._wake.clear()
            if not self._stop.is_set():
                self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self._room.measure(now)
        if self._room.refused:
            self._is_hindered = True
        if self.seq != self._ticked_seq:
            self._ticked_seq, self._last_write_s = self.seq, now
        elif now - self._last_write_s >= ALIVE_AFTER_S and not self._is_hindered:
            self._last_write_s = now
            self.event("alive", {})
        if self._is_hindered:
            self._recover(now)
        if self._stop.is_set():
            return
        if not self._unwritable:
            self._sync_or_give_up(now)
        age_s = now - self._opened_s
        is_due = self._size >= SEAL_BYTES or (age_s >= SEAL_AFTER_S and self._size >= SEAL_AFTER_MIN_BYTES)
        if is_due and not self._unwritable and not self._full:
            self._rotate()
        self._sealer.tend(now)

    def _sync_or_give_up(self, now_s: float) -> None:
        """Sync what was written; where the kernel says that it failed, a new journal is begun.

        After a failed fsync the kernel marks the lost pages clean: a second fsync on the same file would say "fine".
        """
        first = self._synced_seq + 1
        try:
            if self._durability == "interval":
                self._sync()
        except OSError as error:
            self._give_up(f"fdatasync: {error}")
            self.event("loss", {"suspect": [first, self.seq], "reason": f"fdatasync: {error}"})
            self._recover(now_s)
            self._back_off(now_s)
        else:
            if now_s >= self._retry_after_s:
                self._retry_delay_s = 1.0

    def _sync(self) -> None:
        seq = self.seq
        if seq != self._synced_seq:
            files.sync_data(self._descriptor)
            self._synced_seq = seq

    def _next_header(self, number: int, previous: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "run": self._header["run"],
            **self._header,
            "journal": number,
            "first_seq": self.seq + 1,
            "first_ordinal": self.ordinal + 1,
            "previous": previous,
            "created_ns": time.time_ns(),
        }

    def _rotate(self) -> None:
        """Begin the next journal and hand the full one to the sealer. The lock is held for the last few kilobytes only."""
        old_path, old = self.path, self._descriptor
        new_path = self.folder / format.journal_name(self._number + 1)
        new = None
        try:
            new = files.create_append(new_path)
            if not self._switch(new):
                files.close(new)
                files.remove(new_path)
                return
        except OSError as error:
            if new is not None:
                files.close(new)
            with suppress(OSError):  # also where it was created and its folder could not be synced
                files.remove(new_path)
            self._warn_at_times(f"{self.folder}: cannot begin {new_path.name} ({error}); {old_path.name} goes on")
            return
        try:
            files.sync_data(old)
            files.sync_data(new)
        except OSError as error:
            self.event("loss", {"suspect": [1, self.seq], "reason": f"{old_path.name}: fdatasync: {error}"})
        with suppress(OSError):  # its bytes are synced, or counted as suspect
            files.close(old)
        self._sealer.add(old_path)

    def _switch(self, new: int) -> bool:
        """Write the header of the next journal and go on there; False when the run is finished meanwhile."""
        digest = hashlib.sha256()
        hashed = _hash_on(self._descriptor, digest, 0, self._size)
        with self._lock:
            if self._is_closed:
                return False
            self._busy = True  # a `__del__` that logs between hash and switch must not add to what is hashed
            try:
                _hash_on(self._descriptor, digest, hashed, self._size)
                previous = {"length": self._size, "sha256": digest.hexdigest()}
                header = format.header_line(self._next_header(self._number + 1, previous))
                if files.write(new, header) != len(header):
                    raise OSError(errno.ENOSPC, "short write; is the disk full?")
                self._header.pop("continues", None)  # said once, in the attempt's first journal
                self._number += 1
                self._descriptor, self._size, self._unwritable = new, len(header), ""
                self._opened_s = time.monotonic()
            finally:
                self._busy = False
                self._drain()
        if self._last_words is not None:
            self.close(*self._last_words)
        return True

    # --- records of the writer's own

    def event(self, kind: str, body: dict[str, Any]) -> None:
        self.append(time.time_ns(), None, [format.event_body(kind, body)])

    def sync(self) -> None:
        """All records so far survive a power cut when this returns. Raises OSError when the disk says otherwise."""
        with self._lock:  # the background thread must not exchange the journal meanwhile
            files.sync_data(self._descriptor)
            if self._backlog:
                raise OSError(f"{len(self._backlog)} records are in memory only, the disk does not take them")

    def head(self) -> dict[str, Any]:
        """How far this writer has got, for the roster."""
        return {"seq": self.seq, "journal": self._number, "length": self._size}

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
            if self._is_closed:
                return None
            self._drain()
            if self._unwritable:
                self._rotate()
            unwritten = self._say_last(ts, last or [])
            self._is_closed = self._is_hindered = True
            self._unwritable = _FINISHED
        try:
            try:
                if self._durability != "os":
                    files.sync_data(self._descriptor)
            finally:
                files.close(self._descriptor)
        except OSError as error:
            warn(f"{self.path}: the last records may not survive a power cut ({error})")
        self._sealer.add(self.path)
        self._sealer.finish()
        return unwritten

    def _say_last(self, ts: int, last: list[bytes]) -> OSError | None:
        """Write what waits, record what is lost, and the last record, which the ballast leaves room for."""
        if not self._unwritable:
            self._write_backlog()
        self._room.release()
        self._lose(self._backlog.clear(), OSError(self._full or self._unwritable or self._room.reason))
        self._report_losses()
        for body in last:
            error = self._write_past(ts, body)
            if error is not None:
                self._lose([format.table_of_body(body)], error)
                return error
        return None

    def abandon(self) -> None:
        """In a forked child: drop lock, descriptor and buffers. The parent's writer is untouched."""
        self._lock = threading.RLock()
        self._queue.clear()
        self._backlog = Backlog()
        self._room.abandon()
        self._sealer = seal.Sealer()
        if not self._is_closed:  # otherwise the number may be another file's by now
            self._is_closed = self._is_hindered = True
            self._unwritable = _FINISHED
            files.close(self._descriptor)

    def refuse(self, reason: str) -> None:
        """Count every later record as lost."""
        self._unwritable = reason
        self._is_closed = self._is_hindered = True


def _hash_on(descriptor: int, digest: "hashlib._Hash", start: int, end: int) -> int:
    """Hash bytes [start, end) of a file; returns end."""
    while start < end:
        block = os.pread(descriptor, min(1 << 20, end - start), start)
        if not block:
            break
        digest.update(block)
        start += len(block)
    return end
