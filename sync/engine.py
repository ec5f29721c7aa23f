"""The replay of one run into one destination: reader -> choice -> batch -> write -> proof -> cursor. Writes nothing into the run.

What counts as delivered is what the destination holds when asked afterwards: all records recorded before the sync began are
looked for, and what is missing is sent again, so that a lost or forged cursor, on either side, does no harm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from spool.acceptance import Accepted
from spool.reader import RunReader, WriterReader
from sync.batch import Batch, place
from sync.delivery import Delivery
from sync.destinations import Proof
from sync.errors import RefusedError, RejectedRecordError, StoppedError, UnreachableError
from sync.outgoing import Choice, Outgoing, surviving
from sync.report import TABLES, RunReport
from sync.span import OpenSpans
from sync.state import RunState


class Replay:
    """One run on its way."""

    def __init__(self, run: RunReader, state: RunState, delivery: Delivery, choice: Choice, accepted: Accepted) -> None:
        """`accepted`: damage that a person has acknowledged."""
        self._run, self._state, self._delivery = run, state, delivery
        self._destination = delivery.destination
        self._writers = run.writers()
        attempts = run.attempts()
        self._attempt = attempts[-1].id if attempts else None
        self._outgoing = Outgoing(choice, run.id, surviving(attempts, first_steps(self._writers)))
        self._accepted = accepted
        self._upto = {writer.id: writer.last_seq for writer in self._writers}
        """What is recorded later is left to a later sync; otherwise a busy run would never end."""
        self._complete = {writer.id: writer.complete_seq(self._accepted) for writer in self._writers}
        """A cursor stops before what is absent from an incomplete copy, and what follows is sent without moving it."""
        state.positions = self._upto
        self.report = RunReport(run.id, self._destination.label, status=state.status)
        self.report.positions = self._upto
        self._has_resent = False

    def deliver(self, progress: Callable[[str, int], None]) -> None:
        """Deliver what is new, prove all of it, and say so in `report`; `progress(table, n)` is called as n more are behind us.

        A refusal of this run is said in the report. UnreachableError means that other runs may fare no better.
        """
        with self._told(), self._delivery.claimed():
            self._deliver(progress)

    def verify(self) -> None:
        """Ask the destination for everything, change nothing there, and say in `report` what differs."""
        with self._told():
            self._damage()
            if not self._delivery.find():
                self.report.problem = f"{self._destination.label} holds no such run; run spool-sync to deliver it"
                return
            self.report.identity = self._delivery.identity
            self._prove(is_final=True)
            self.report.conflicts = self._destination.conflicts
            self.report.rejections = self._delivery.rejections()
            self.report.compare(self._delivery.patience.call(self._destination.unsettled))

    def plan(self) -> None:
        """Count what would go out, and what would not; asks nobody."""
        self._damage()
        for writer in self._writers:
            spans = OpenSpans()
            for table in TABLES:
                for batch in self._batches(writer, table, 0):
                    rows = spans.take(batch.rows) if table == "spans" else batch.rows
                    self.report.tables[table].recorded += rows.num_rows
            self.report.tables["spans"].recorded += len(spans)
            self.report.tables["spans"].waiting += 0 if self._is_closed(writer) else len(spans)
        for counts in self.report.tables.values():
            counts.recorded += counts.withheld

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in the report why the run was not delivered; what may concern other runs too goes on."""
        try:
            yield
        except (UnreachableError, StoppedError) as error:
            self.report.problem = str(error)
            if not isinstance(error, RefusedError):
                raise

    def _damage(self) -> None:
        self.report.damage = [str(one) for one in self._run.damage(self._writers) if one not in self._accepted]

    def _deliver(self, progress: Callable[[str, int], None]) -> None:
        report, delivery, destination = self.report, self._delivery, self._destination
        self._damage()
        report.notes += delivery.open()
        report.identity, report.conflicts = delivery.identity, destination.conflicts
        for writer in self._writers:
            for table in TABLES:
                self._send(writer, table, partial(progress, table))
        self._prove(is_final=False)
        if self._has_resent:
            self._prove(is_final=True)
        try:
            report.notes += delivery.patience.call(destination.settle)
            missing = delivery.patience.call(destination.unsettled)
        except RejectedRecordError as error:
            report.rejections.append(f"config, tags or status: {error}")
            missing = []
        if self._state.status == "unknown":
            report.notes.append(
                f"no finish record, and nothing here proves that its processes have ended: {destination.label} keeps the status "
                "it has; if the run is over, `spool seal` on the machine that trained records that, then copy the spool again"
            )
        self._conclude(missing)
        self._save_cursor()

    def _save_cursor(self) -> None:
        report, cursor = self.report, self._delivery.cursor
        if not report.problem:
            cursor.delivered = {
                writer.id: {table: self._reached(writer, table) for table in TABLES} for writer in self._writers
            }
        cursor.status = "" if report.problem else self._state.status
        cursor.waiting = report.tables["spans"].waiting
        try:
            cursor.save()
        except OSError as error:  # read-only media: the destination knows as well how far it has got
            report.notes.append(
                f"the cursor could not be saved ({error}); --state-dir names a folder that can be written"
            )

    def _send(self, writer: WriterReader, table: str, progress: Callable[[int], None]) -> None:
        behind = min(self._held(writer, table), self._upto[writer.id])
        progress(behind)
        for batch in self._batches(writer, table, behind):
            for part in batch.split(self._destination.rows_per_request[table]):
                if self._delivery.patience.is_over:
                    raise StoppedError("asked to end; the rest follows with the next sync")
                self._delivery.offer(part)
                if part.cursor is not None and part.cursor > behind:
                    progress(part.cursor - behind)
                    behind = part.cursor
        progress(max(0, self._upto[writer.id] - behind))
        self._destination.pass_over(Batch(table, writer.id, pa.table({}), self._reached(writer, table)))

    def _held(self, writer: WriterReader, table: str) -> int:
        return self._delivery.held.get(writer.id, {}).get(table, 0)

    def _reached(self, writer: WriterReader, table: str) -> int:
        """Where the cursor stands once everything here is delivered."""
        return max(min(self._held(writer, table), self._upto[writer.id]), self._complete[writer.id])

    def _batches(self, writer: WriterReader, table: str, after_seq: int) -> Iterator[Batch]:
        """What goes out, in seq order; counts what does not."""
        upto, complete = self._upto[writer.id], self._complete[writer.id]
        for rows in writer.batches(table, after_seq=after_seq):
            for first, last, moves in ((0, complete, True), (complete, upto, False)):
                part = (
                    rows
                    if first < rows["seq"][0].as_py() and rows["seq"][-1].as_py() <= last
                    else _between(rows, first, last)
                )
                if not part.num_rows:
                    continue
                cursor = part["seq"][-1].as_py() if moves else None
                chosen = self._outgoing.of(table, part)
                self.report.tables[table].withheld += _ended(table, part) - _ended(table, chosen)
                if chosen.num_rows:
                    yield Batch(table, writer.id, chosen, cursor)

    # --- the proof

    def _prove(self, *, is_final: bool) -> None:
        """Ask for every record. The first time, what is missing is sent again; the second time it counts as missing."""
        proof = self._delivery.patience.call(self._destination.proof)
        for counts in self.report.tables.values():
            counts.recorded = counts.missing = counts.rejected = counts.waiting = counts.withheld = 0
        for writer in self._writers:
            last_ns, spans = 0, OpenSpans()
            for table in TABLES:  # spans come last: where they were left open, the writer's last sign of life ends them
                for batch in self._batches(writer, table, 0):
                    last_ns = max(last_ns, pc.max(pc.cast(batch.rows["ts"], pa.int64())).as_py())
                    rows = spans.take(batch.rows) if table == "spans" else batch.rows
                    self._check(proof, Batch(table, writer.id, rows, batch.cursor), is_final=is_final)
            if self._is_closed(writer):
                self._check(proof, Batch("spans", writer.id, spans.closed(last_ns), None), is_final=is_final)
            else:
                self.report.tables["spans"].waiting += len(spans)
                self.report.tables["spans"].recorded += len(spans)
        for table, counts in self.report.tables.items():
            counts.held = self._delivery.patience.call(partial(proof.count, table))
            counts.indistinct = proof.indistinct(table)
            counts.recorded += counts.withheld

    def _is_closed(self, writer: WriterReader) -> bool:
        """Whether spans this writer has left open stay open for ever."""
        return (
            self._state.status not in {"running", "unknown"}
            or writer.finished
            or writer.attempt != self._attempt
            or writer.is_alive() is False
        )

    def _check(self, proof: Proof, batch: Batch, *, is_final: bool) -> None:
        counts = self.report.tables[batch.table]
        start = self._delivery.held.get(batch.writer_id, {}).get(batch.table, 0)
        for part in batch.split(self._destination.rows_per_request[batch.table]):
            self._delivery.touch()
            held = self._delivery.patience.call(partial(proof.holds, part))
            counts.recorded += len(held)
            is_claimed = [seq <= start for seq in part.rows["seq"].to_pylist()]
            if not is_final or not self._has_resent:
                counts.already_there += sum(map(bool.__and__, held, is_claimed))
            if all(held):
                continue
            rejected = self._delivery.rejected(batch)
            places = [place(batch.table, row) for row in part.dicts()]
            missing = [not there and at not in rejected for there, at in zip(held, places, strict=True)]
            if any(missing) and not is_final:
                self._has_resent = True
                self._delivery.offer(part.only(missing))
                if batch.cursor is not None:  # a span that we close ourselves was never claimed to be there
                    counts.lost += sum(map(bool.__and__, missing, is_claimed))
            counts.missing += sum(missing) if is_final else 0
            counts.rejected += sum(not there and at in rejected for there, at in zip(held, places, strict=True))

    def _conclude(self, unsettled: list[str]) -> None:
        report, label = self.report, self._destination.label
        report.rejections += self._delivery.rejections()
        if report.rejections:
            report.notes.append(
                f"what was rejected is not offered again, until you remove {self._delivery.cursor.path}"
            )
        absent = [
            f"{table.missing} of {table.recorded} {name}" for name, table in report.tables.items() if table.missing
        ]
        if absent or unsettled:
            report.problem = (
                f"{label} was asked and does not hold {', '.join(absent + unsettled[:5])}, although it took them; "
                "run spool-sync again, and look at the server's log if this stays"
            )


def first_steps(writers: list[WriterReader]) -> dict[str, int]:
    """attempt -> the first step that its lead writer has logged, where it has one."""
    found: dict[str, int] = {}
    for writer in writers:
        if writer.is_lead and writer.header.get("continues"):
            for rows in writer.batches("metrics"):
                steps = rows["step"].drop_null()
                if len(steps):
                    found[writer.attempt] = steps[0].as_py()
                    break
    return found


def _ended(table: str, rows: pa.Table) -> int:
    """Rows as they are counted: a span once, with its end."""
    return int(rows.num_rows) - (rows["end"].null_count if table == "spans" else 0)


def _between(rows: pa.Table, after: int, last: int) -> pa.Table:
    return rows.filter(pc.and_(pc.greater(rows["seq"], after), pc.less_equal(rows["seq"], last)))
