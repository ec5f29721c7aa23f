"""The journal that a writer is writing: one record, its undoing when that fails, and the next journal.

It says by return value and exception what the disk did; what follows from that for a run is for others to decide.

Invariants:
- a seq is given at the write and committed only after a full write: what failed leaves no gap;
- nobody appends after a torn tail: a failed write is truncated away, or a new journal is begun.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spool import files, format, journal, liveness

MAX_RECORD_BYTES = 1 << 30
"""Parquet and Arrow hold less than 2 GiB in one value, and Linux writes less in one call."""

Held = Callable[[], AbstractContextManager[bool]]
"""The writer's lock, with calls from inside queued; whether the thread that takes it was inside no call before."""


class Suspect(NamedTuple):
    """Records that a power cut may take, though they were to be safe by now: first and last seq."""

    first: int
    last: int
    reason: str


class LiveJournal:
    """The caller holds the writer's lock, but for `sync` and `begin_next`, which only the background thread or the end calls."""

    def __init__(self, folder: Path, header: dict[str, Any], *, syncs_records: bool) -> None:
        """Create the writer's folder and first journal, or nothing of it: then OSError. Durable when this returns.

        `syncs_records`: fdatasync before each `write` returns.
        """
        self._folder = folder
        self._header = {**header, "writer": folder.name, **liveness.identity()}
        self._syncs_records = syncs_records
        self.seq = 0
        self.ordinal = 0
        self.unwritable = ""
        """Why nothing may be appended to this journal any more."""
        self.is_ended = False
        """Whether no other journal may follow either."""
        self.number = 1
        self._synced_seq, self._earlier_bytes = -1, 0
        self._outgoing: int | None = None  # the journal before this one, until it is synced: a flush is of both
        # Never its parent: a run that `spool gc` has just removed must not come back without its run.json.
        files.make_one_folder(folder)
        files.sync_folder(folder.parent)
        try:
            self._descriptor, self.size = journal.create(folder, 1, self._next_header(1, None))
            try:
                self.sync()
            except OSError:
                files.close(self._descriptor)
                raise
        except OSError:
            with suppress(OSError):
                files.remove(folder)
            raise
        self.opened_s = time.monotonic()

    @property
    def path(self) -> Path:
        return self._folder / format.journal_name(self.number)

    @property
    def written_bytes(self) -> int:
        """In all journals so far."""
        return self._earlier_bytes + self.size

    @property
    def first_unsynced(self) -> int:
        return self._synced_seq + 1

    # --- one record

    def write(self, ts: int, step: int | None, ordinal: int | None, body: bytes) -> OSError | None:
        """One record, with the next seq; on an error it is taken back, or keeps its seq where that failed too."""
        if self.unwritable:
            return OSError(self.unwritable)
        seq, size = self.seq + 1, self.size
        line = format.record_line(seq, ts, step, ordinal, body)
        if len(line) > MAX_RECORD_BYTES:
            return OSError(f"a record of {len(line):,} bytes; at most {MAX_RECORD_BYTES:,} fit into one")
        try:
            try:
                written = files.write(self._descriptor, line)
                if written != len(line):
                    _write_rest(self._descriptor, line[written:])
                if self._syncs_records:
                    self._sync_record()
                self.seq, self.size = seq, size + len(line)
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
            self.give_up(f"fdatasync: {error}")
            raise

    def _settle(self, seq: int, size: int, line: bytes) -> None:
        """Commit the record if all of it is in the file, take it back otherwise: a seq is never used twice."""
        if os.fstat(self._descriptor).st_size == size + len(line):
            self.seq, self.size = seq, size + len(line)
        else:
            self.seq, self.size = seq - 1, size
            self._take_back(seq, size, line)

    def _take_back(self, seq: int, size: int, line: bytes) -> None:
        """Remove a record that could not be written; one that stands there whole all the same keeps its seq, for readers find it."""
        try:
            files.truncate(self._descriptor, size)
        except OSError as error:
            self.give_up(f"a part of a record stands at the end and cannot be removed ({error})")
            with suppress(OSError):
                if os.fstat(self._descriptor).st_size == size + len(line):
                    self.seq, self.size = seq, size + len(line)

    def give_up(self, reason: str) -> None:
        """Nothing may follow in this journal; `begin_next` begins another."""
        self.unwritable = reason

    # --- power loss

    def sync(self) -> None:
        """Sync what was written into this journal. After an OSError it must be given up.

        After a failed fsync the kernel marks the lost pages clean: a second fsync on the same file would say "fine".
        """
        seq = self.seq
        if seq != self._synced_seq:
            files.sync_data(self._descriptor)
            self._synced_seq = seq

    def sync_all(self) -> None:
        """As `sync`, of all records so far, in the journal before this one too. Nothing where the end has synced them."""
        if self.is_ended:  # the descriptor may be another file's by now
            return
        if self._outgoing is not None:
            files.sync_data(self._outgoing)
        files.sync_data(self._descriptor)
        self._synced_seq = self.seq

    # --- the next journal

    def begin_next(self, held: Held) -> tuple[Path, Suspect | None] | None:
        """Begin the next journal, and sync and close this one. The lock is held for the last few kilobytes only.

        Returns the path of the full one, and what of it may be lost where a sync failed; None where the run is finished
        meanwhile. Raises OSError where no other can be begun: then this one goes on.
        """
        old_path, old = self.path, self._descriptor
        new_path = self._folder / format.journal_name(self.number + 1)
        try:
            new = files.create_append(new_path)
            try:
                is_begun = self._switch(new, held)
            except OSError:
                _discard(new, new_path)
                raise
        except OSError:
            # Also where it was created and its folder could not be synced, now or the last time.
            with suppress(OSError):
                files.remove(new_path)
            raise
        if not is_begun:
            _discard(new, new_path)
            return None
        suspect = None
        try:
            files.sync_data(old)
            with held():  # a flush may be at it
                self._outgoing = None
            files.sync_data(new)
        except OSError as error:
            suspect = Suspect(1, self.seq, f"{old_path.name}: fdatasync: {error}")
        with held():
            self._outgoing = None
        with suppress(OSError):  # its bytes are synced, or counted as suspect
            files.close(old)
        return old_path, suspect

    def _switch(self, new: int, held: Held) -> bool:
        """Write the header of the next journal and go on there; False when the run is finished meanwhile."""
        digest = hashlib.sha256()
        hashed = _hash_on(self._descriptor, digest, 0, self.size)
        with held():  # a `__del__` that logs in here must not add to what is hashed
            if self.is_ended:
                return False
            _hash_on(self._descriptor, digest, hashed, self.size)
            previous = {"length": self.size, "sha256": digest.hexdigest()}
            header = format.header_line(self._next_header(self.number + 1, previous))
            written = files.write(new, header)
            if written != len(header):
                _write_rest(new, header[written:])
            self._header.pop("continues", None)  # said once, in the attempt's first journal
            self.number += 1
            self._earlier_bytes += self.size
            self._outgoing = self._descriptor
            self._descriptor, self.size, self.unwritable = new, len(header), ""
            self.opened_s = time.monotonic()
        return True

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

    # --- the end

    def end(self, reason: str) -> None:
        """Nothing may follow, here or in another journal."""
        self.is_ended = True
        self.unwritable = reason

    def close(self, *, syncs: bool) -> None:
        """Close the last journal; it is closed too where this raises OSError."""
        try:
            if syncs:
                files.sync_data(self._descriptor)
        finally:
            files.close(self._descriptor)

    def abandon(self) -> None:
        """In a forked child: let go of the descriptor."""
        if not self.is_ended:  # otherwise the number may be another file's by now
            self.is_ended = True
            with suppress(OSError):  # the file is the parent's, and so is what goes wrong with it
                files.close(self._descriptor)


def _write_rest(descriptor: int, rest: bytes) -> None:
    """After a short write: the next one goes on, or says why it was short (ENOSPC, EDQUOT, EFBIG)."""
    while rest:
        written = files.write(descriptor, rest)
        if written == 0:
            raise OSError(errno.ENOSPC, "nothing written; is the disk full?")
        rest = rest[written:]


def _discard(descriptor: int, path: Path) -> None:
    with suppress(OSError):
        files.close(descriptor)
    with suppress(OSError):
        files.remove(path)


def _hash_on(descriptor: int, digest: "hashlib._Hash", start: int, end: int) -> int:
    """Hash bytes [start, end) of a file; returns end."""
    while start < end:
        block = os.pread(descriptor, min(1 << 20, end - start), start)
        if not block:
            break
        digest.update(block)
        start += len(block)
    return end
