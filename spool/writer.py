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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spool import files, format, journal, liveness, seal
from spool.backlog import ORDER, RECORD_BYTES, Backlog, Kept
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
_CHUNK_BYTES = 1 << 16
"""Written from memory under one hold of the lock: a call of `log()` waits for no more."""
_WORTH_A_JOURNAL_BYTES = 1 << 16
"""A journal that took as much and then failed, as where files must not grow (EFBIG), is followed by the next at once."""

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
        files.make_one_folder(
            folder
        )  # never its parent: a run that `spool gc` has just removed must not come back without its run.json
        files.sync_folder(folder.parent)
        self._number = 1
        self._begin()
        self._opened_s = time.monotonic()
        self._room = Room(folder, limits or Limits())
        self._room.measure(time.monotonic(), 0)
        self._is_hindered = bool(self._room.refused)
        self._last_write_s = time.monotonic()
        self._ticked_seq = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tend, name="spool-writer", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """The first journal, or nothing of it."""
        self._synced_seq, self._earlier_bytes = -1, 0
        self._outgoing: int | None = None  # the journal before this one, until it is synced: a flush is of both
        try:
            self._descriptor, self._size = journal.create(self.folder, 1, self._next_header(1, None))
            try:
                self._sync()
            except OSError:
                files.close(self._descriptor)
                raise
        except OSError:
            with suppress(OSError):
                files.remove(self.folder)
            raise

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
        self._reported = 0
        """Records lost, of all tables, that the journal tells of."""
        self._suspects: deque[dict[str, Any]] = deque()
        """Ranges that a failed fdatasync may have lost, not recorded yet."""
        self._loss_reason = ""
        self._losing_since_ns = 0
        self._is_loss_open = False
        """Whether the journal's last word on losses is that there may be more."""
        self._reported_s = float("-inf")
        self._warned_s = float("-inf")
        self._has_warned = False
        self._retry_after_s, self._retry_delay_s = 0.0, 1.0

    @property
    def path(self) -> Path:
        """The live journal."""
        return self.folder / format.journal_name(self._number)

    @property
    def lost(self) -> int:
        """Records that are in no journal and will not be, of all tables."""
        return self._reported + self._backlog.lost.total()

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
            before = self.seq
            error = self._hindrance(body) if self._is_hindered else None
            if error is None:
                error = self._write_record(ts, step, ordinal, body)
                if error is None:
                    continue
            failure = error
            if self.seq == before:  # otherwise it stands in the journal all the same
                self._set_aside(Kept(ts, step, ordinal, body), error)
        if self._size >= SEAL_BYTES:
            self._wake.set()
        return failure

    def _write_record(self, ts: int, step: int | None, ordinal: int | None, body: bytes) -> OSError | None:
        """One record, with the next seq; on an error it is taken back, or keeps its seq where that failed too."""
        seq, size = self.seq + 1, self._size
        line = format.record_line(seq, ts, step, ordinal, body)
        if len(line) > MAX_RECORD_BYTES:
            return OSError(f"a record of {len(line):,} bytes; at most {MAX_RECORD_BYTES:,} fit into one")
        try:
            try:
                written = files.write(self._descriptor, line)
                if written != len(line):
                    _write_rest(self._descriptor, line[written:])
                if self._durability == "record":
                    self._sync_record()
                self.seq, self._size = seq, size + len(line)
            except OSError as error:
                self._take_back(seq, size, line)
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
            self._take_back(seq, size, line)

    def _take_back(self, seq: int, size: int, line: bytes) -> None:
        """Remove a record that could not be written; one that stands there whole all the same keeps its seq, for readers find it."""
        try:
            files.truncate(self._descriptor, size)
        except OSError as error:
            self._give_up(f"a part of a record stands at the end and cannot be removed ({error})")
            with suppress(OSError):
                if os.fstat(self._descriptor).st_size == size + len(line):
                    self.seq, self._size = seq, size + len(line)

    def _give_up(self, reason: str) -> None:
        """Nothing may follow in this journal: the background thread begins another."""
        self._unwritable = reason
        self._is_hindered = True
        self._wake.set()

    # --- a disk that does not take everything

    def _hindrance(self, body: bytes) -> OSError | None:
        """Why a record must not be written now."""
        if self._unwritable or self._full:
            return OSError(self._unwritable or self._full)
        table = format.table_of_body(body)
        if table in self._room.refused:
            return OSError(self._room.reason)
        return OSError("earlier ones still wait") if self._backlog.holds(table) else None

    def _set_aside(self, record: Kept, error: OSError) -> None:
        """Keep a record that could not be written, within bounds, and count what is lost for it."""
        self._aside += 1
        self._is_hindered = True
        self._losing_since_ns = self._losing_since_ns or record.ts
        table = format.table_of_body(record.body)
        try:
            if not self._is_closed:
                self._note(error)
            if self._keeps and not self._is_closed:
                self._backlog.add(table, record)
            else:
                self._backlog.lost[table] += 1
        except BaseException:  # a signal handler raised
            self._backlog.measure()
            raise
        self._warn_at_times(error)

    def _note(self, error: OSError) -> None:
        """From now on records wait for the background thread, which tries each second; where none is kept, each call tries."""
        if error.errno is None:  # our own reason, noted before
            self._loss_reason = self._loss_reason or str(error)
            return
        self._loss_reason = str(error)
        if error.errno in FULL:
            self._full = str(error) if self._keeps else ""
        elif not self._unwritable:  # another journal may do, as where files must not grow (EFBIG)
            self._give_up(str(error))

    def _warn_at_times(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned_s < WARN_EACH_S:
            return
        self._warned_s, self._has_warned = now, True
        waiting = f"{len(self._backlog)} records wait in memory, " if self._backlog else ""
        warn(f"{self.path}: could not write ({error}); {waiting}{self.lost} lost; training goes on")

    def _recover(self, now_s: float) -> None:
        """In the background: begin another journal where this one is given up, write what waits, record what is lost."""
        if self._unwritable and now_s >= self._retry_after_s:
            took_much = self._size >= _WORTH_A_JOURNAL_BYTES
            self._rotate()
            if self._unwritable or not took_much:
                self._back_off(now_s)
        if self._unwritable:
            return
        self._full = ""
        self._write_backlog()
        with self._held() as is_ours:
            if is_ours:
                self._say_suspects()
                self._report_losses(now_s, is_open=bool(self._backlog))
                self._end_hindrance()
        if not self._is_hindered and self._has_warned:
            self._has_warned = False
            warn(f"{self.path}: the disk takes records again; {self.lost} were lost")

    def _back_off(self, now_s: float) -> None:
        """Begin no other journal for a while: each try reads this one, and a dying disk would be strewn with new ones."""
        self._retry_after_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(RETRY_AT_MOST_EACH_S, 2 * self._retry_delay_s)

    def _end_hindrance(self) -> None:
        """Only where nothing is left to be written, reported, or refused."""
        is_clear = not (self._unwritable or self._full or self._room.refused or self._backlog or self._suspects)
        if is_clear and not (self._is_loss_open or any(self._backlog.lost.values())):
            self._is_hindered = False
            self._loss_reason, self._losing_since_ns = "", 0

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """The lock, with calls from inside queued as in `append`; False where this very thread is inside a call already."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False
                self._drain()

    def _write_backlog(self) -> None:
        """Write what waits and is not refused, in short holds of the lock, and leave it to others a part of the time."""
        while not self._stop.is_set():
            began_s = time.monotonic()
            with self._held() as is_ours:
                if not is_ours or not self._write_chunk():
                    return
            time.sleep((time.monotonic() - began_s) / 4)

    def _write_chunk(self) -> bool:
        """Write some of what waits, the tables that matter most first; whether there is more that the disk may take."""
        room = _CHUNK_BYTES
        for table in ORDER:
            while self._backlog.holds(table) and table not in self._room.refused:
                if room <= 0:
                    return True
                record, seq = self._backlog.first(table), self.seq
                try:
                    error = self._write_record(*record)
                finally:  # whatever interrupts: a record that is in the journal must not be written again
                    if self.seq > seq:
                        self._backlog.remove_first(table)
                if error is not None:
                    self._note(error)
                    return False
                room -= RECORD_BYTES + len(record.body)
        return False

    def _say_suspects(self) -> None:
        while self._suspects and self._write_own("loss", self._suspects[0]) is None:
            self._suspects.popleft()

    def _report_losses(self, now_s: float, *, is_open: bool) -> None:
        """Record how many records are lost, none perhaps. `open`: others wait in memory, and a kill would leave no count.

        A report is whole or nothing; until it is written, the counts stay here.
        """
        lost = {table: count for table, count in self._backlog.lost.items() if count}
        is_due = now_s - self._reported_s >= WARN_EACH_S
        if not (is_open != self._is_loss_open or (lost and (is_due or not is_open))):
            return
        body = {"records": lost, "reason": self._loss_reason, "since_ns": self._losing_since_ns}
        body |= {"open": True} if is_open else {}
        error = self._write_own("loss", body)
        if error is not None and error.errno in FULL:
            self._room.lend()
            error = self._write_own("loss", body)
        if error is None:
            self._is_loss_open, self._reported_s = is_open, now_s
            self._reported += sum(lost.values())
            self._backlog.lost.clear()

    def _write_own(self, kind: str, body: dict[str, Any]) -> OSError | None:
        """Write an event past everything that waits; the error where it is not in the journal."""
        return self._write_past(time.time_ns(), format.event_body(kind, body))

    def _write_past(self, ts: int, body: bytes) -> OSError | None:
        if self._unwritable:
            return OSError(self._unwritable)
        before = self.seq
        error = self._write_record(ts, None, None, body)
        return error if self.seq == before else None

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
        self._room.measure(
            now, self._earlier_bytes + self._size
        )  # may hang where a network disk does: without the lock
        if self._room.refused:
            self._is_hindered = True
        if self.seq != self._ticked_seq:
            self._ticked_seq, self._last_write_s = self.seq, now
        elif now - self._last_write_s >= ALIVE_AFTER_S:
            self._last_write_s = now
            with self._held() as is_ours:
                if is_ours:
                    self._write_own("alive", {})
        if self._is_hindered:
            self._recover(now)
        if self._stop.is_set():
            return
        if not self._is_hindered:
            self._room.take_back()
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
            self._suspect(first, f"fdatasync: {error}")
            self._recover(now_s)
        else:
            if now_s >= self._retry_after_s:
                self._retry_delay_s = 1.0

    def _suspect(self, first: int, reason: str) -> None:
        """Records that a power cut may take, though they were to be safe by now: said in the next journal."""
        self._suspects.append({"suspect": [first, self.seq], "reason": reason})
        self._give_up(reason)

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
        try:
            new = files.create_append(new_path)
            try:
                is_begun = self._switch(new)
            except OSError:
                self._discard(new, new_path)
                raise
        except OSError as error:
            with suppress(
                OSError
            ):  # also where it was created and its folder could not be synced, now or the last time
                files.remove(new_path)
            self._warn_at_times(error)
            return
        if not is_begun:
            self._discard(new, new_path)
            return
        try:
            files.sync_data(old)
            with self._lock:  # a flush may be at it
                self._outgoing = None
            files.sync_data(new)
        except OSError as error:
            self._suspects.append({"suspect": [1, self.seq], "reason": f"{old_path.name}: fdatasync: {error}"})
            self._is_hindered = True
        with self._lock:
            self._outgoing = None
        with suppress(OSError):  # its bytes are synced, or counted as suspect
            files.close(old)
        self._sealer.add(old_path)

    def _discard(self, descriptor: int, path: Path) -> None:
        with suppress(OSError):
            files.close(descriptor)
        with suppress(OSError):
            files.remove(path)

    def _switch(self, new: int) -> bool:
        """Write the header of the next journal and go on there; False when the run is finished meanwhile."""
        digest = hashlib.sha256()
        hashed = _hash_on(self._descriptor, digest, 0, self._size)
        with self._lock:
            if self._is_closed:
                return False
            was_busy, self._busy = self._busy, True  # a `__del__` that logs in here must not add to what is hashed
            try:
                _hash_on(self._descriptor, digest, hashed, self._size)
                previous = {"length": self._size, "sha256": digest.hexdigest()}
                header = format.header_line(self._next_header(self._number + 1, previous))
                written = files.write(new, header)
                if written != len(header):
                    _write_rest(new, header[written:])
                self._header.pop("continues", None)  # said once, in the attempt's first journal
                self._number += 1
                self._earlier_bytes += self._size
                self._outgoing = self._descriptor
                self._descriptor, self._size, self._unwritable = new, len(header), ""
                self._opened_s = time.monotonic()
            finally:
                self._busy = was_busy
                self._drain()
        return True

    # --- for the run

    def sync(self) -> None:
        """All records so far survive a power cut when this returns. Raises OSError when the disk says otherwise."""
        try:
            with self._held():  # the background thread must not exchange the journal meanwhile
                first = self._synced_seq + 1
                try:
                    if self._outgoing is not None:
                        files.sync_data(self._outgoing)
                    files.sync_data(self._descriptor)
                except OSError as error:
                    self._suspect(first, f"fdatasync: {error}")
                    raise
                self._synced_seq = self.seq
                if self._backlog:
                    raise OSError(f"{len(self._backlog)} records are in memory only, the disk does not take them")
        finally:
            self._close_if_told()

    def take_losses(self, other: "Writer") -> None:
        """Record what another writer of this process could not: a forked child's, before it had a journal."""
        with other._lock:
            lost, reason = other._backlog.lost.copy(), other._unwritable
            other._backlog.lost.clear()
        if lost:
            with self._held():
                self._backlog.lost.update(lost)
                self._loss_reason, self._is_hindered = reason, True

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
            self._busy = True  # nothing of this thread comes in between either
            try:
                unwritten = self._say_last(ts, last or [])
            finally:
                self._is_closed = self._is_hindered = True
                self._unwritable = _FINISHED
                self._busy = False
                self._drain()
        if unwritten is not None:
            warn(f"{self.path}: the end could not be recorded ({unwritten}); the run will read as one that was killed")
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
        """Write what waits, record what is lost, and the last record, which the ballast leaves room for.

        A finish says that all before it is there or counted: where the loss cannot be recorded, there is none.
        """
        self._room.measure(time.monotonic(), self._earlier_bytes + self._size)
        tries = 2  # another journal may do where one fails, and where files must not grow, many take it all
        while tries:
            before = self._earlier_bytes + self._size
            if self._unwritable:
                self._rotate()
            while not self._unwritable and self._write_chunk():
                pass
            if not self._unwritable:
                break
            took_much = self._earlier_bytes + self._size - before >= _WORTH_A_JOURNAL_BYTES
            tries = 2 if took_much else tries - 1
        self._room.release()
        self._backlog.drop_all()
        error = self._say_end(ts, last)
        if error is not None:
            self._give_up(str(error))
            self._rotate()
            error = self._say_end(ts, last)
        return error

    def _say_end(self, ts: int, last: list[bytes]) -> OSError | None:
        self._say_suspects()
        self._report_losses(time.monotonic(), is_open=False)
        if self._suspects or self._is_loss_open or any(self._backlog.lost.values()):
            return OSError(self._unwritable or self._full or self._loss_reason)
        for body in last:
            error = self._write_past(ts, body)
            if error is not None:
                return error
        return None

    def abandon(self) -> None:
        """In a forked child: drop lock, descriptor and buffers. The parent's writer is untouched."""
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._busy, self._last_words = False, None
        self._queue.clear()
        self._init_hindrances()
        self._room.abandon()
        self._sealer = seal.Sealer()
        if not self._is_closed:  # otherwise the number may be another file's by now
            self._is_closed = True
            with suppress(OSError):  # the file is the parent's, and so is what goes wrong with it
                files.close(self._descriptor)
        self._is_hindered = True
        self._unwritable = _FINISHED

    def refuse(self, reason: str) -> None:
        """Count every later record as lost."""
        self._unwritable = reason
        self._is_closed = self._is_hindered = True


def _write_rest(descriptor: int, rest: bytes) -> None:
    """After a short write: the next one goes on, or says why it was short (ENOSPC, EDQUOT, EFBIG)."""
    while rest:
        written = files.write(descriptor, rest)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing written; is the disk full?")
        rest = rest[written:]


def _hash_on(descriptor: int, digest: "hashlib._Hash", start: int, end: int) -> int:
    """Hash bytes [start, end) of a file; returns end."""
    while start < end:
        block = os.pread(descriptor, min(1 << 20, end - start), start)
        if not block:
            break
        digest.update(block)
        start += len(block)
    return end
