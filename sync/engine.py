"""The replay of one run into one destination: reader -> batch -> write -> proof -> cursor. Writes nothing into the run.

Delivery is at least once; that each record ends up there once is the destination's idempotence. What counts as delivered is
what the destination holds when asked afterwards: all records recorded before the sync began are looked for, and what is
missing is sent again, so that a lost or forged cursor, on either side, does no harm.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from spool import acceptance, claim
from spool import cursor as cursors
from spool.reader import RunReader, WriterReader
from sync.batch import Batch, place
from sync.destinations import Destination
from sync.errors import RefusedError, RejectedRecordError, TryAgainError, UnreachableError
from sync.report import TABLES, RunReport
from sync.span import OpenSpans
from sync.state import RunState

T = TypeVar("T")
_DELAYS_S = (0.5, 1, 2, 4)
_PATIENCE_S = 30


def patiently(call: Callable[[], T], delays_s: tuple[float, ...] = _DELAYS_S, patience_s: float = _PATIENCE_S) -> T:
    """Make a call until it is answered; UnreachableError when it stays unanswered. No further try after `patience_s`."""
    began = time.monotonic()
    for delay_s in (*delays_s, None):
        try:
            return call()
        except TryAgainError as error:
            if delay_s is None or time.monotonic() - began > patience_s:
                raise UnreachableError(
                    f"{error}; nothing is lost: see that it runs, its address and its disk, and run spool-sync again"
                ) from error
            time.sleep(delay_s)
    raise AssertionError("the last try returns or raises")


class Replay:
    """One run on its way; `total` is how much of it there is, in seqs of all writers and tables."""

    def __init__(self, run: RunReader, state: RunState, destination: Destination, folder: Path) -> None:
        self._run, self._state, self._destination, self._folder = run, state, destination, folder
        self._writers = run.writers()
        self._attempt = next((attempt.id for attempt in reversed(run.attempts())), None)
        self._upto = {writer.id: writer.last_seq for writer in self._writers}
        """What is recorded later is left to a later sync; otherwise a busy run would never end."""
        self._accepted = acceptance.load(folder, run.path)
        self._complete = {writer.id: writer.complete_seq(self._accepted) for writer in self._writers}
        """A cursor stops before what is absent from an incomplete copy, and what follows is sent without moving it."""
        state.positions = self._upto
        self.total = len(TABLES) * sum(self._upto.values())
        self._held: dict[str, dict[str, int]] = {}
        self.report = RunReport(run.id, destination.label, status=state.status)
        self._has_resent = False

    def deliver(self, progress: Callable[[int], None]) -> None:
        """Deliver what is new, prove all of it, and say so in `report`; `progress(n)` is called as n more are behind us.

        A refusal of this run is said in the report. UnreachableError means that other runs will fare no better.
        """
        self._progress = progress
        try:
            with self._claimed():
                self._deliver()
        except UnreachableError as error:
            self.report.problem = str(error)
            if not isinstance(error, RefusedError):
                raise

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Keep out a second sync of this run that shares the state folder."""
        label = self._destination.label
        self._claim = None
        with suppress(OSError):  # read-only media, a full disk: two syncs at once are then only told by the destination
            held = claim.take(self._folder / label.lower() / f"{self._run.id}.claim")
            if isinstance(held, str):
                raise RefusedError(f"{held} is delivering this run to {label}; run spool-sync again when it has ended")
            self._claim = held
        try:
            yield
        finally:
            if self._claim is not None:
                self._claim.release()

    def _touch_claim(self) -> None:
        if self._claim is not None:
            self._claim.touch()

    def _deliver(self) -> None:
        report, destination = self.report, self._destination
        report.damage = [str(one) for one in self._run.damage(self._writers) if one not in self._accepted]
        report.identity = patiently(destination.open)
        report.conflicts = destination.conflicts
        self._held = destination.held()
        self._cursor = cursors.load(self._folder, destination.label.lower(), report.identity, self._run.id)
        if self._cursor.moved_aside:
            report.notes.append(
                f"unreadable cursor moved to {self._cursor.moved_aside}; {destination.label} was asked instead"
            )
        for writer in self._writers:
            for table in TABLES:
                self._send(writer, table)
        self._prove(is_final=False)
        if self._has_resent:
            self._prove(is_final=True)
        try:
            report.notes += patiently(destination.settle)
            missing = patiently(destination.unsettled)
        except RejectedRecordError as error:
            report.rejections.append(f"config, tags or status: {error}")
            missing = []
        if self._state.status == "unknown":
            report.notes.append(
                f"no finish record, and nothing here proves that its processes have ended: {destination.label} keeps the status "
                "it has; if the run is over, `spool seal` on the machine that trained records that, then copy the spool again"
            )
        self._conclude(missing)
        if not report.problem:
            self._cursor.delivered = {
                writer.id: {table: self._reached(writer, table) for table in TABLES} for writer in self._writers
            }
        self._cursor.status = "" if report.problem else self._state.status
        self._cursor.waiting = report.tables["spans"].waiting
        try:
            self._cursor.save()
        except OSError as error:  # read-only media: the destination knows as well how far it has got
            report.notes.append(
                f"the cursor could not be saved ({error}); --state-dir names a folder that can be written"
            )

    def _send(self, writer: WriterReader, table: str) -> None:
        behind = min(self._held.get(writer.id, {}).get(table, 0), self._upto[writer.id])
        self._progress(behind)
        for batch in self._batches(writer, table, behind):
            for part in batch.split(self._destination.rows_per_request[table]):
                self._offer(part)
                if part.cursor is not None and part.cursor > behind:
                    self._progress(part.cursor - behind)
                    behind = part.cursor
        self._progress(max(0, self._upto[writer.id] - behind))
        self._destination.pass_over(Batch(table, writer.id, pa.table({}), self._reached(writer, table)))

    def _reached(self, writer: WriterReader, table: str) -> int:
        """Where the cursor stands once everything here is delivered."""
        held = min(self._held.get(writer.id, {}).get(table, 0), self._upto[writer.id])
        return max(held, self._complete[writer.id])

    def _batches(self, writer: WriterReader, table: str, after_seq: int) -> Iterator[Batch]:
        upto, complete = self._upto[writer.id], self._complete[writer.id]
        for rows in writer.batches(table, after_seq=after_seq):
            for first, last, moves in ((0, complete, True), (complete, upto, False)):
                part = (
                    rows
                    if first < rows["seq"][0].as_py() and rows["seq"][-1].as_py() <= last
                    else _between(rows, first, last)
                )
                if part.num_rows:
                    yield Batch(table, writer.id, part, part["seq"][-1].as_py() if moves else None)

    def _offer(self, batch: Batch) -> None:
        """Write a batch; where it is rejected, halve it down to the row that is to blame and set that aside."""
        self._touch_claim()
        try:
            patiently(partial(self._destination.write, batch))
        except RejectedRecordError as error:
            if batch.rows.num_rows > 1:
                for half in batch.halves():
                    self._offer(half)
                return
            [row] = batch.dicts()
            rejected = self._cursor.rejected.setdefault(batch.writer_id, {}).setdefault(batch.table, {})
            rejected[place(batch.table, row)] = str(error)
            self._destination.pass_over(batch)

    # --- the proof

    def _prove(self, *, is_final: bool) -> None:
        """Ask for every record. The first time, what is missing is sent again; the second time it counts as missing."""
        patiently(self._destination.start_proof)
        for counts in self.report.tables.values():
            counts.recorded = counts.missing = counts.rejected = counts.waiting = 0
        for writer in self._writers:
            last_ns, spans = 0, OpenSpans()
            for table in TABLES:  # spans come last: where they were left open, the writer's last sign of life ends them
                for batch in self._batches(writer, table, 0):
                    last_ns = max(last_ns, pc.max(pc.cast(batch.rows["ts"], pa.int64())).as_py())
                    rows = spans.take(batch.rows) if table == "spans" else batch.rows
                    self._check(Batch(table, writer.id, rows, batch.cursor), is_final=is_final)
            if self._is_closed(writer):
                self._check(Batch("spans", writer.id, spans.closed(last_ns), None), is_final=is_final)
            else:
                self.report.tables["spans"].waiting += len(spans)
                self.report.tables["spans"].recorded += len(spans)
        for table, counts in self.report.tables.items():
            counts.held = patiently(partial(self._destination.count, table))
            counts.indistinct = self._destination.indistinct(table)

    def _is_closed(self, writer: WriterReader) -> bool:
        """Whether spans this writer has left open stay open for ever."""
        return (
            self._state.status not in {"running", "unknown"}
            or writer.finished
            or writer.attempt != self._attempt
            or writer.is_alive() is False
        )

    def _check(self, batch: Batch, *, is_final: bool) -> None:
        counts = self.report.tables[batch.table]
        start = self._held.get(batch.writer_id, {}).get(batch.table, 0)
        for part in batch.split(self._destination.rows_per_request[batch.table]):
            self._touch_claim()
            held = patiently(partial(self._destination.holds, part))
            counts.recorded += len(held)
            is_claimed = [seq <= start for seq in part.rows["seq"].to_pylist()]
            if not is_final:
                counts.already_there += sum(map(bool.__and__, held, is_claimed))
            if all(held):
                continue
            rejected = self._cursor.rejected.setdefault(batch.writer_id, {}).setdefault(batch.table, {})
            places = [place(batch.table, row) for row in part.dicts()]
            missing = [not there and at not in rejected for there, at in zip(held, places, strict=True)]
            if any(missing) and not is_final:
                self._has_resent = True
                self._offer(part.only(missing))
                if batch.cursor is not None:  # a span that we close ourselves was never claimed to be there
                    counts.lost += sum(map(bool.__and__, missing, is_claimed))
            counts.missing += sum(missing) if is_final else 0
            counts.rejected += sum(not there and at in rejected for there, at in zip(held, places, strict=True))

    def _conclude(self, unsettled: list[str]) -> None:
        report, label = self.report, self._destination.label
        for writer, tables in self._cursor.rejected.items():
            for table, places in tables.items():
                report.rejections += [f"{writer} {table} {at}: {reason}" for at, reason in places.items()]
        if report.rejections:
            report.notes.append(f"what was rejected is not offered again, until you remove {self._cursor.path}")
        absent = [
            f"{table.missing} of {table.recorded} {name}" for name, table in report.tables.items() if table.missing
        ]
        if absent or unsettled:
            report.problem = (
                f"{label} was asked and does not hold {', '.join(absent + unsettled[:5])}, although it took them; "
                "run spool-sync again, and look at the server's log if this stays"
            )


def _between(rows: pa.Table, after: int, last: int) -> pa.Table:
    return rows.filter(pc.and_(pc.greater(rows["seq"], after), pc.less_equal(rows["seq"], last)))
