"""The replay of a run that is being written: records go out as they come, the whole is proven when the run is over.

A session opens the run at the destination and follows each writer from where the destination says it is. Whatever fails ends
the session, and the next one asks the destination again: there is no state here that could be wrong. Once the run is over
the ordinary replay (`engine`) asks for every record, sends what is missing and closes the run.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from spool import acceptance, layout, table
from spool.follow import Follower
from spool.reader import RunReader
from spool.status import why_not_over
from sync import state as states
from sync.batch import Batch
from sync.delivery import Delivery
from sync.destinations import Destination
from sync.engine import Replay, first_steps
from sync.outgoing import Choice, Outgoing, surviving
from sync.patience import Patience
from sync.report import TABLES, RunReport
from sync.state import RunState

_SETTLE_EACH_S, _SAVE_EACH_S, _ASK_WHETHER_OVER_EACH_S = 5.0, 10.0, 1.0


@dataclass(frozen=True)
class Terms:
    """What is the same for all runs of a sync: the destination, where cursors are, names given by the user, the choice."""

    destination: type[Destination]
    place: str | None
    folder: Path
    choice: Choice
    patience: Patience
    project: str | None = None
    experiment: str | None = None
    is_again: bool = False

    def replay(self, run: RunReader) -> Replay:
        known = states.read(run, self.project, self.experiment, is_again=self.is_again)
        accepted = acceptance.load(self.folder, run.path)
        return Replay(run, known, self.deliver(known), self.choice, accepted)

    def deliver(self, known: RunState) -> Delivery:
        return Delivery(known.run_id, self.destination(known, self.place), self.place, self.folder, self.patience)


@dataclass
class _Session:
    """A run opened at the destination, under its claim."""

    delivery: Delivery
    state: RunState
    outgoing: Outgoing
    attempts: set[str]
    followers: dict[Path, Follower] = field(default_factory=dict)
    identities: dict[Path, table.Identity] = field(default_factory=dict)
    is_unsettled: bool = True
    settled_at_s: float = -_SETTLE_EACH_S
    saved_at_s: float = 0.0


class LiveRun:
    """One run. `look` again and again, by one thread at a time; `close` at the end."""

    def __init__(self, path: Path, terms: Terms) -> None:
        self.path, self._terms = path, terms
        self._session: _Session | None = None
        self._claims = ExitStack()
        self._asked_at_s = -_ASK_WHETHER_OVER_EACH_S
        self.rows = 0
        """Delivered since this was made, sent again included."""
        self.newest_ns = 0
        """Time of the newest record delivered."""

    def look(self) -> tuple[int, RunReport | None]:
        """Deliver what is new; returns rows delivered, and the report once the run is over and all of it was asked for.

        After any error the next look begins a new session. Raises what Destination raises, OSError, SpoolError.
        """
        try:
            return self._look()
        except BaseException:
            self._drop()
            raise

    def _look(self) -> tuple[int, RunReport | None]:
        if self._session is None and self._is_over():
            return 0, self._finish()
        session = self._session or self._begin()
        self._session = session
        session.delivery.touch()
        delivered = self._follow(session)
        self.rows += delivered
        if self._session is None:  # a new attempt: the next look begins anew
            return delivered, None
        self._settle(session)
        if not delivered and self._is_over():
            return 0, self._finish()
        return delivered, None

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now - self._asked_at_s < _ASK_WHETHER_OVER_EACH_S:
            return False
        self._asked_at_s = now
        return why_not_over(layout.glance(self.path)) is None

    def _finish(self) -> RunReport:
        self._drop()
        replay = self._terms.replay(RunReader(self.path))
        replay.deliver(lambda *_: None)
        return replay.report

    def _begin(self) -> _Session:
        run = RunReader(self.path)
        known = states.read(run, self._terms.project, self._terms.experiment, is_again=self._terms.is_again)
        writers, attempts = run.writers(), run.attempts()
        known.positions = {writer.id: writer.last_seq for writer in writers}
        delivery = self._terms.deliver(known)
        self._claims.enter_context(delivery.claimed())
        delivery.open()
        outgoing = Outgoing(self._terms.choice, run.id, surviving(attempts, first_steps(writers)))
        return _Session(delivery, known, outgoing, {one.id for one in attempts})

    def _follow(self, session: _Session) -> int:
        rows = 0
        for path in layout.writers(self.path):
            if path not in session.followers:
                attempt = layout.header(path).get("attempt", {}).get("id")
                if (
                    attempt is None
                ):  # it has just begun; where its header is damaged, the replay of the whole run reads it
                    continue
                if attempt not in session.attempts:  # a new attempt: config, status and rewound steps are others now
                    self._drop()
                    return rows
                held = session.delivery.held.get(path.name, {})
                session.followers[path] = Follower(path, min(held.get(name, 0) for name in TABLES))
                session.identities[path] = table.Identity(self.path.name, path.name, attempt)
            rows += self._follow_writer(session, session.followers[path], session.identities[path])
        return rows

    def _follow_writer(self, session: _Session, follower: Follower, identity: table.Identity) -> int:
        delivery, rows, before = session.delivery, 0, follower.seq
        held = delivery.held.get(identity.writer_id, {})
        for name, piece in table.batches(follower.read(), identity, TABLES):
            found = pa.Table.from_batches([piece])
            if held.get(name, 0) > before:  # one table may be ahead of another
                found = found.filter(pc.greater(found["seq"], held[name]))
            chosen = session.outgoing.of(name, found)
            if name == "events":
                self._take_events(session, found)
            if chosen.num_rows:
                # Behind damage nothing moves the cursor: the replay of the whole run decides what is missing for good.
                cursor = None if follower.damage else found["seq"][-1].as_py()
                batch = Batch(name, identity.writer_id, chosen, cursor)
                for part in batch.split(delivery.destination.rows_per_request[name]):
                    delivery.offer(part)
                rows += chosen.num_rows
                self.newest_ns = max(self.newest_ns, pc.max(pc.cast(chosen["ts"], pa.int64())).as_py())
        if follower.seq > before and not follower.damage:
            for name in TABLES:
                delivery.destination.pass_over(Batch(name, identity.writer_id, pa.table({}), follower.seq))
            session.state.positions[identity.writer_id] = follower.seq
            session.is_unsettled = True
        return rows

    def _take_events(self, session: _Session, events: pa.Table) -> None:
        for kind, body in zip(events["kind"].to_pylist(), events["body"].to_pylist(), strict=True):
            if kind in states.KINDS:
                session.state.take(kind, orjson.loads(body))

    def _settle(self, session: _Session) -> None:
        now = time.monotonic()
        if session.is_unsettled and now - session.settled_at_s >= _SETTLE_EACH_S:
            session.delivery.patience.call(session.delivery.destination.settle)
            session.is_unsettled, session.settled_at_s = False, time.monotonic()
        if now - session.saved_at_s >= _SAVE_EACH_S:
            session.saved_at_s = now
            session.delivery.save()

    def close(self) -> None:
        """Leave the destination as far as we have got. Raises what `look` raises."""
        try:
            if self._session is not None:
                self._session.settled_at_s = -_SETTLE_EACH_S
                self._settle(self._session)
                self._session.delivery.save()
        finally:
            self._drop()

    def _drop(self) -> None:
        self._session = None
        self._claims.close()
