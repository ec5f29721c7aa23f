"""Records that the disk does not take now: they wait in memory and are written later, or are counted, said, recorded as lost.

Invariants:
- a failing disk never raises into training, and never makes it wait: what cannot be written is kept in memory within
  bounds and tried again in the background; what no memory is left for is counted, said, and recorded as lost;
- a later record of a table never overtakes one that waits.
"""

import threading
import time
from collections import Counter

from spool import format
from spool.backlog import ORDER, RECORD_BYTES, Backlog, Kept
from spool.ledger import WARN_EACH_S, Ledger
from spool.live import Held, LiveJournal, Suspect
from spool.process import warn
from spool.room import FULL, Room
from spool.seal import Sealer

RETRY_AT_MOST_EACH_S = 60.0
_CHUNK_BYTES = 1 << 16
"""Written from memory under one hold of the lock: a call of `log()` waits for no more."""
_WORTH_A_JOURNAL_BYTES = 1 << 16
"""A journal that took as much and then failed, as where files must not grow (EFBIG), is followed by the next at once."""


class Deferred:
    """The caller holds the writer's lock, but for what the background thread calls: `measure`, `sync`, `recover`, `begin_next`."""

    def __init__(
        self, live: LiveJournal, room: Room, sealer: Sealer, wake: threading.Event, *, keeps_records: bool
    ) -> None:
        """`wake` is set where the background thread has to act before its next turn."""
        self._live, self._room, self._sealer, self._wake = live, room, sealer, wake
        self._keeps_records = keeps_records
        self._begin()
        self.is_hindered = bool(room.refused)

    def _begin(self) -> None:
        self.is_hindered = False
        """Whether anything keeps records from being written: the one thing that the hot path looks at."""
        self.full = ""
        """Why nothing is tried before the background thread has."""
        self.backlog = Backlog()
        self._ledger = Ledger(self._live, self._room, self.backlog.lost)
        self.aside = 0
        """Records kept or lost in place of being written, for counting what a call has done."""
        self._warned_s = float("-inf")
        self._has_warned = False
        self._retry_after_s, self._retry_delay_s = 0.0, 1.0

    @property
    def lost(self) -> int:
        """Records that are in no journal and will not be, of all tables."""
        return self._ledger.lost

    # --- in a call of `append`

    def hindrance(self, body: bytes) -> OSError | None:
        """Why a record must not be written now."""
        if self._live.unwritable or self.full:
            return OSError(self._live.unwritable or self.full)
        table = format.table_of_body(body)
        if table in self._room.refused:
            return OSError(self._room.reason)
        return OSError("earlier ones still wait") if self.backlog.holds(table) else None

    def set_aside(self, record: Kept, error: OSError) -> None:
        """Keep a record that could not be written, within bounds, and count what is lost for it."""
        self.aside += 1
        self.is_hindered = True
        self._ledger.since_ns = self._ledger.since_ns or record.ts
        table = format.table_of_body(record.body)
        try:
            if not self._live.is_ended:
                self._note(error)
            if self._keeps_records and not self._live.is_ended:
                self.backlog.add(table, record)
            else:
                self.backlog.lost[table] += 1
        except BaseException:  # a signal handler raised
            self.backlog.measure()
            raise
        self._warn_at_times(error)

    def heed_journal(self) -> None:
        """After a write that failed: where nothing may follow in this journal, the background thread begins another."""
        if self._live.unwritable:
            self.is_hindered = True
            self._wake.set()

    def _give_up(self, reason: str) -> None:
        self._live.give_up(reason)
        self.heed_journal()

    def _note(self, error: OSError) -> None:
        """From now on records wait for the background thread, which tries each second; where none is kept, each call tries."""
        if error.errno is None:  # our own reason, noted before
            self._ledger.reason = self._ledger.reason or str(error)
            return
        self._ledger.reason = str(error)
        if error.errno in FULL:
            self.full = str(error) if self._keeps_records else ""
        elif not self._live.unwritable:  # another journal may do, as where files must not grow (EFBIG)
            self._give_up(str(error))

    def _warn_at_times(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned_s < WARN_EACH_S:
            return
        self._warned_s, self._has_warned = now, True
        waiting = f"{len(self.backlog)} records wait in memory, " if self.backlog else ""
        warn(f"{self._live.path}: could not write ({error}); {waiting}{self.lost} lost; training goes on")

    # --- in the background

    def measure(self, now_s: float) -> None:
        """Look at the disk. May hang where a network disk does: without the lock."""
        self._room.measure(now_s, self._live.written_bytes)
        if self._room.refused or self._live.unwritable:
            self.is_hindered = True

    def say_alive(self) -> None:
        """Past all that waits, which a full disk may still have room for."""
        if not self._live.unwritable:
            self._ledger.write_own("alive", {})
            self.heed_journal()

    def sync(self) -> bool:
        """Sync what was written; False where the kernel says that it failed: then a new journal must be begun."""
        first = self._live.first_unsynced
        try:
            self._live.sync()
        except OSError as error:
            self.suspect(first, f"fdatasync: {error}")
            return False
        return True

    def suspect(self, first: int, reason: str) -> None:
        """Records that a power cut may take, though they were to be safe by now: said in the next journal."""
        self._ledger.suspects.append(Suspect(first, self._live.seq, reason))
        self._give_up(reason)

    def recover(self, now_s: float, held: Held, stop: threading.Event) -> None:
        """Begin another journal where this one is given up, write what waits, record what is lost."""
        live = self._live
        if live.unwritable and now_s >= self._retry_after_s:
            took_much = live.size >= _WORTH_A_JOURNAL_BYTES
            self.begin_next(held)
            if live.unwritable or not took_much:
                self._back_off(now_s)
        if live.unwritable:
            return
        self.full = ""
        self._write_backlog(held, stop)
        with held() as is_ours:
            if is_ours:
                self._ledger.say_suspects()
                self._ledger.report(now_s, is_open=bool(self.backlog))
                self.heed_journal()
                self._end_hindrance()
        if not self.is_hindered and self._has_warned:
            self._has_warned = False
            warn(f"{live.path}: the disk takes records again; {self.lost} were lost")

    def _back_off(self, now_s: float) -> None:
        """Begin no other journal for a while: each try reads this one, and a dying disk would be strewn with new ones."""
        self._retry_after_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(RETRY_AT_MOST_EACH_S, 2 * self._retry_delay_s)

    def end_back_off(self, now_s: float) -> None:
        """A journal that was still good when another might have been begun: the next failure is a new one."""
        if now_s >= self._retry_after_s:
            self._retry_delay_s = 1.0

    def _end_hindrance(self) -> None:
        """Only where nothing is left to be written, reported, or refused."""
        is_clear = not (self._live.unwritable or self.full or self._room.refused or self.backlog)
        if is_clear and self._ledger.is_settled:
            self.is_hindered = False
            self._ledger.reason, self._ledger.since_ns = "", 0

    def begin_next(self, held: Held) -> None:
        """Begin the next journal and hand the full one to the sealer."""
        try:
            begun = self._live.begin_next(held)
        except OSError as error:
            self._warn_at_times(error)
            return
        if begun is None:
            return
        full_path, suspect = begun
        if suspect is not None:
            self._ledger.suspects.append(suspect)
            self.is_hindered = True
        self._sealer.add(full_path)

    def _write_backlog(self, held: Held, stop: threading.Event) -> None:
        """Write what waits and is not refused, in short holds of the lock, and leave it to others a part of the time."""
        while not stop.is_set():
            began_s = time.monotonic()
            with held() as is_ours:
                if not is_ours or not self._write_chunk():
                    return
            time.sleep((time.monotonic() - began_s) / 4)

    def _write_chunk(self) -> bool:
        """Write some of what waits, the tables that matter most first; whether there is more that the disk may take."""
        room = _CHUNK_BYTES
        for table in ORDER:
            while self.backlog.holds(table) and table not in self._room.refused:
                if room <= 0:
                    return True
                record, seq = self.backlog.first(table), self._live.seq
                try:
                    error = self._live.write(*record)
                finally:  # whatever interrupts: a record that is in the journal must not be written again
                    if self._live.seq > seq:
                        self.backlog.remove_first(table)
                if error is not None:
                    self.heed_journal()
                    self._note(error)
                    return False
                room -= RECORD_BYTES + len(record.body)
        return False

    # --- losses of a forked child, before it had a journal

    def hand_over_losses(self) -> tuple[Counter[str], str]:
        """Lost records by table, and why; they are another's to record from now on."""
        lost, reason = self.backlog.lost.copy(), self._live.unwritable
        self.backlog.lost.clear()
        return lost, reason

    def take_losses(self, lost: Counter[str], reason: str) -> None:
        self.backlog.lost.update(lost)
        self._ledger.reason, self.is_hindered = reason, True

    # --- the end

    def say_last(self, ts: int, last: list[bytes], held: Held) -> OSError | None:
        """Write what waits, record what is lost, and the last record, which the ballast leaves room for.

        A finish says that all before it is there or counted: where the loss cannot be recorded, there is none.
        """
        live = self._live
        self.measure(time.monotonic())
        tries = 2  # another journal may do where one fails, and where files must not grow, many take it all
        while tries:
            before = live.written_bytes
            if live.unwritable:
                self.begin_next(held)
            while not live.unwritable and self._write_chunk():
                pass
            if not live.unwritable:
                break
            took_much = live.written_bytes - before >= _WORTH_A_JOURNAL_BYTES
            tries = 2 if took_much else tries - 1
        self._room.release()
        self.backlog.drop_all()
        error = self._say_end(ts, last)
        if error is not None:
            self._give_up(str(error))
            self.begin_next(held)
            error = self._say_end(ts, last)
        return error

    def _say_end(self, ts: int, last: list[bytes]) -> OSError | None:
        self._ledger.say_suspects()
        self._ledger.report(time.monotonic(), is_open=False)
        if not self._ledger.is_settled:
            return OSError(self._live.unwritable or self.full or self._ledger.reason)
        for body in last:
            error = self._ledger.write_past(ts, body)
            if error is not None:
                return error
        return None

    def refuse(self, reason: str) -> None:
        """Count every later record as lost."""
        self._live.end(reason)
        self.is_hindered = True

    def abandon(self, sealer: Sealer, wake: threading.Event) -> None:
        """In a forked child: what waits is the parent's to write."""
        self._sealer, self._wake = sealer, wake
        self._begin()
        self._room.abandon()
