"""The writer: one process of one attempt, the only writer of its folder.

`append` is the hot path: seq, checksum and one write(2) under a lock. Everything slow (fdatasync, a new journal, sealing,
the `alive` record of a silent writer) happens in one background thread.

Invariants:
- a seq is given at the write and committed only after a full write: what failed leaves no gap;
- nobody appends after a torn tail: a failed write is truncated away, or a new journal is begun;
- a call from inside a call (a `__del__` run by the garbage collector, a signal handler) is queued, never waits;
- a failing disk never raises into training; the caller gets the error back and may.
"""

import hashlib
import os
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from spool import files, format, journal, liveness, seal
from spool.process import warn

SEAL_BYTES = 16 << 20
SEAL_AFTER_S = 600
SEAL_AFTER_MIN_BYTES = 1 << 20
ALIVE_AFTER_S = 60
SYNC_EACH_S = 1.0
WARN_EACH_S = 60

DURABILITIES = ("interval", "record", "os")
"""Against power loss: background fdatasync each second, before each return, or never. A kill loses nothing in any of them."""


_FINISHED = "the run is finished"


class Writer:
    def __init__(self, folder: Path, header: dict[str, Any], durability: str = "interval") -> None:
        """Create the writer's folder and first journal. Durable when this returns; raises OSError when it cannot be.

        `header` holds run, attempt, lead and what the attempt continues; the writer adds the rest.
        """
        self.folder = folder
        self.id = folder.name
        self.seq = 0
        self.ordinal = 0
        self.counts: Counter[str] = Counter()
        self._header = {**header, "writer": self.id, **liveness.identity()}
        self._durability = durability
        self._lock = threading.RLock()
        self._busy = False
        self._queue: deque[tuple[int, int | None, list[bytes]]] = deque()
        self._last_words: tuple[int, list[bytes]] | None = None
        self._lost: Counter[str] = Counter()
        self._loss_reason = ""
        self._warned_s = float("-inf")
        self._unwritable = ""
        self._sealer = seal.Sealer()
        files.make_folder(folder)
        self._number = 1
        self._descriptor, self._size = journal.create(folder, 1, self._next_header(1, None))
        self._opened_s = time.monotonic()
        self._synced_seq = -1
        self._sync()
        self._last_write_s = time.monotonic()
        self._ticked_seq = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tend, name="spool-writer", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The live journal."""
        return self.folder / format.journal_name(self._number)

    def append(self, ts: int, step: int | None, bodies: list[bytes]) -> OSError | None:
        """Write the records of one call, in order, one write(2) each. In the kernel when this returns.

        Does not raise for a failing disk: the records are counted as lost, and the last error is returned.
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
            seq, self._busy = self.seq, True
            try:
                self._write(ts, step, bodies)
                bodies.clear()
            finally:  # a signal handler may raise here too: what is not written stays queued
                self._busy = False
                del bodies[: self.seq - seq]
                if not bodies:
                    self._queue.popleft()

    def _write(self, ts: int, step: int | None, bodies: list[bytes]) -> OSError | None:
        failure = None
        ordinal = None
        if step is None and format.table_of_body(bodies[0]) in ("metrics", "generations"):
            ordinal = self.ordinal = self.ordinal + 1
        for body in bodies:
            seq, size = self.seq + 1, self._size
            line = format.record_line(seq, ts, step, ordinal, body)
            if self._unwritable:
                failure = OSError(self._unwritable)
                self._lose(body, failure)
                continue
            try:
                if files.write(self._descriptor, line) != len(line):
                    raise OSError("short write; is the disk full?")
                if self._durability == "record":
                    self._sync_record()
                self.seq, self._size = seq, size + len(line)
            except OSError as error:
                failure = error
                if not self._is_kept(seq, size, line):
                    self._lose(body, error)
            except BaseException:  # a signal handler raised (Ctrl-C) between the write and its commit
                self._settle(seq, size, line)
                raise
        if self._size >= SEAL_BYTES:
            self._wake.set()
        return failure

    def _sync_record(self) -> None:
        try:
            files.sync_data(self._descriptor)
        except OSError as error:  # the kernel has marked the pages clean: only a new journal can be believed again
            self._unwritable = f"fdatasync: {error}"
            self._wake.set()
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
            self._unwritable = f"a part of a record stands at the end and cannot be removed ({error})"
            self._wake.set()  # only a new journal may follow it

    def _lose(self, body: bytes, error: OSError) -> None:
        """Count a record that could not be written."""
        self._lost[format.table_of_body(body)] += 1
        self._loss_reason = str(error)
        lost = ", ".join(f"{count} of {name}" for name, count in sorted(self._lost.items()))
        self._warn_at_times(f"{self.path}: could not write ({error}); records lost so far: {lost}; training goes on")

    def _warn_at_times(self, message: str) -> None:
        now = time.monotonic()
        if now - self._warned_s >= WARN_EACH_S:
            self._warned_s = now
            warn(message)

    # --- what the background thread does

    def _tend(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(SYNC_EACH_S)
            self._wake.clear()
            if not self._stop.is_set():
                self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if self.seq != self._ticked_seq:
            self._ticked_seq, self._last_write_s = self.seq, now
        elif now - self._last_write_s >= ALIVE_AFTER_S:
            self._last_write_s = now
            self.event("alive", {})
        self._report_losses()
        if self._stop.is_set():
            return
        age_s = now - self._opened_s
        is_due = self._size >= SEAL_BYTES or (age_s >= SEAL_AFTER_S and self._size >= SEAL_AFTER_MIN_BYTES)
        if is_due or self._unwritable or not self._sync_reports():
            self._rotate()
        self._sealer.tend(now)

    def _sync_reports(self) -> bool:
        """Sync what was written; False when the kernel says that it failed, so that a new journal is begun.

        After a failed fsync the kernel marks the lost pages clean: a second fsync on the same file would say "fine".
        """
        first = self._synced_seq + 1
        try:
            if self._durability == "interval":
                self._sync()
        except OSError as error:
            self.event("loss", {"suspect": [first, self.seq], "reason": f"fdatasync: {error}"})
            return False
        return True

    def _sync(self) -> None:
        seq = self.seq
        if seq != self._synced_seq:
            files.sync_data(self._descriptor)
            self._synced_seq = seq

    def _report_losses(self) -> None:
        if not self._lost or self._unwritable:
            return
        with self._lock:
            lost, self._lost = self._lost, Counter()
            seq = self.seq
            self.event("loss", {"records": dict(lost), "reason": self._loss_reason})
            if self.seq == seq:  # still no room: the counts stay, without the loss record's own
                lost.update(self._lost - Counter({"events": 1}))
                self._lost = lost
            else:
                self.counts.update({"lost": sum(lost.values())})

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
                with suppress(OSError):
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
            if self._stop.is_set():
                return False
            self._busy = True  # a `__del__` that logs between hash and switch must not add to what is hashed
            try:
                _hash_on(self._descriptor, digest, hashed, self._size)
                previous = {"length": self._size, "sha256": digest.hexdigest()}
                header = format.header_line(self._next_header(self._number + 1, previous))
                if files.write(new, header) != len(header):
                    raise OSError("short write; is the disk full?")
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

    def head(self) -> dict[str, Any]:
        """How far this writer has got, for the roster."""
        return {"seq": self.seq, "journal": self._number, "length": self._size}

    def close(self, ts: int = 0, last: list[bytes] | None = None) -> OSError | None:
        """Write the last record, sync, close and seal what is left, waiting for the sealing child. Idempotent.

        Nothing follows the last record: another thread's call comes before it or is refused. Returns the error that kept
        it from being written.
        """
        unwritten = None
        with self._lock:
            if self._busy:  # a signal handler that finishes the run in the middle of a write: the write goes first
                self._last_words = (ts, last or [])
                return None
            if self._unwritable == _FINISHED:
                return None
            self._last_words = None
            self._drain()
            self._report_losses()
            if last:
                unwritten = self.append(ts, None, last)
            self._unwritable = _FINISHED
            self._stop.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
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

    def abandon(self) -> None:
        """In a forked child: drop lock, descriptor and buffers. The parent's writer is untouched."""
        self._lock = threading.RLock()
        self._queue.clear()
        self._sealer = seal.Sealer()
        if self._unwritable != _FINISHED:  # otherwise the number may be another file's by now
            self._unwritable = _FINISHED
            files.close(self._descriptor)

    def refuse(self, reason: str) -> None:
        """Count every later record as lost."""
        self._unwritable = reason


def _hash_on(descriptor: int, digest: "hashlib._Hash", start: int, end: int) -> int:
    """Hash bytes [start, end) of a file; returns end."""
    while start < end:
        block = os.pread(descriptor, min(1 << 20, end - start), start)
        if not block:
            break
        digest.update(block)
        start += len(block)
    return end
