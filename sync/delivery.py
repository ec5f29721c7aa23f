"""One run at one destination: who may deliver there, how far it has got, and what was set aside.

Delivery is at least once; that each record ends up there once is the destination's idempotence. Both ways of replay, the whole
run at once (`engine`) and records as they come (`live`), write through this.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

from spool import claim
from spool import cursor as cursors
from spool.cursor import Cursor
from sync.batch import Batch, place
from sync.destinations import Destination
from sync.errors import RefusedError, RejectedRecordError
from sync.patience import Patience


class Delivery:
    """Made for a run, used by one thread. `open` before anything is offered; all of it under `claimed`."""

    def __init__(
        self, run_id: str, destination: Destination, place: str | None, folder: Path, patience: Patience
    ) -> None:
        """`folder` keeps claims and cursors; `place` as the user wrote it."""
        self._claim_name = claim.file_name(run_id, place)
        self.run_id, self.destination, self.patience = run_id, destination, patience
        self._folder = folder / destination.label.lower()
        self._root = folder
        self._claim: claim.Claim | None = None
        self.identity = ""
        self.held: dict[str, dict[str, int]] = {}
        """The destination's own cursor when it was opened: {writer: {table: seq}}."""
        self.cursor: Cursor

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep out a second sync of this run that shares the folder. Raises RefusedError that names who holds it."""
        label = self.destination.label
        with suppress(OSError):  # read-only media, a full disk: two syncs at once are then only told by the destination
            held = claim.take(self._folder / self._claim_name)
            if isinstance(held, str):
                raise RefusedError(f"{held} is delivering this run to {label}; run spool-sync again when it has ended")
            self._claim = held
        try:
            yield
        finally:
            if self._claim is not None:
                self._claim.release()
                self._claim = None

    def touch(self) -> None:
        """Show that we are at it; often."""
        if self._claim is not None:
            self._claim.touch()

    def open(self) -> list[str]:
        """Find the run there, or create it; returns what the user should know."""
        self.identity = self.patience.call(self.destination.open)
        self.held = deepcopy(self.destination.held())
        return self.load_cursor()

    def find(self) -> bool:
        """Find the run there and change nothing; whether there is one."""
        self.identity = self.patience.call(self.destination.find) or ""
        self.held = deepcopy(self.destination.held()) if self.identity else {}
        self.load_cursor()
        return bool(self.identity)

    def load_cursor(self) -> list[str]:
        label = self.destination.label
        self.cursor = cursors.load(self._root, label.lower(), self.identity, self.run_id)
        if self.cursor.moved_aside:
            return [f"unreadable cursor moved to {self.cursor.moved_aside}; {label} was asked instead"]
        return []

    def save(self) -> None:
        """Keep how far we have got, not yet proven, for who looks from here; the destination knows it as well."""
        self.cursor.delivered, self.cursor.status = self.destination.held(), ""
        with suppress(OSError):
            self.cursor.save()

    def offer(self, batch: Batch) -> None:
        """Write a batch; where it is rejected, halve it down to the row that is to blame and set that aside."""
        self.touch()
        try:
            self.patience.call(partial(self.destination.write, batch))
        except RejectedRecordError as error:
            if batch.rows.num_rows > 1:
                for half in batch.halves():
                    self.offer(half)
                return
            [row] = batch.dicts()
            self.rejected(batch)[place(batch.table, row)] = str(error)
            self.destination.pass_over(batch)

    def rejected(self, batch: Batch) -> dict[str, str]:
        """place -> reason of what was set aside of the batch's writer and table."""
        return self.cursor.rejected.setdefault(batch.writer_id, {}).setdefault(batch.table, {})

    def rejections(self) -> list[str]:
        return [
            f"{writer} {table} {at}: {reason}"
            for writer, tables in self.cursor.rejected.items()
            for table, places in tables.items()
            for at, reason in places.items()
        ]
