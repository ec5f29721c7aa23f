"""Taking back what went to the wrong place: shown first, deleted at the destination, with a receipt. The spool stays as it is."""

import getpass
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spool import acceptance, files, format
from spool import cursor as cursors
from spool.reader import RunReader
from sync import state as states
from sync.delivery import Delivery
from sync.engine import Replay
from sync.errors import RefusedError
from sync.live import Terms

FOLDER = "receipts"


@dataclass(frozen=True)
class Receipt:
    """What was deleted, where, when, by whom."""

    run_id: str
    destination: str
    identity: str
    held: dict[str, int]
    sentences: list[str]
    at_ns: int
    by: str
    host: str

    def as_json(self) -> dict[str, Any]:
        return {"kind": "retract", **asdict(self)}


@dataclass(frozen=True)
class Found:
    """One run as the destination holds it now; `held` are rows of each table."""

    run_id: str
    delivery: Delivery
    folder: Path
    held: dict[str, int]

    def lines(self) -> list[str]:
        label = self.delivery.destination.label
        counts = ", ".join(f"{count} {table}" for table, count in self.held.items())
        return [f"{label} run {self.delivery.identity} holds {counts} of run {self.run_id}"]

    def delete(self) -> Receipt:
        """Delete it there, write the receipt, set the cursor aside: what is gone is not delivered any more."""
        delivery = self.delivery
        with delivery.claimed():
            sentences = delivery.patience.call(delivery.destination.retract)
            receipt = Receipt(
                self.run_id,
                delivery.destination.label,
                delivery.identity,
                self.held,
                sentences,
                time.time_ns(),
                getpass.getuser(),
                socket.gethostname(),
            )
            path = self.folder / FOLDER / f"{receipt.at_ns}-retract-{self.run_id}.json"
            files.make_folder(path.parent)
            files.publish_file(path, format.dump_json(receipt.as_json()))
            cursors.discard(delivery.cursor)
        return receipt


def find(run: RunReader, terms: Terms) -> Found:
    """The run at the destination. Raises RefusedError when it is not there."""
    known = states.read(run)
    delivery = terms.deliver(known)
    replay = Replay(run, known, delivery, terms.choice, acceptance.load(terms.folder, run.path))
    replay.verify()
    if not delivery.identity:
        raise RefusedError(f"{delivery.destination.label} holds no run {run.id}; nothing is deleted")
    held = {name: table.held for name, table in replay.report.tables.items()}
    return Found(run.id, delivery, terms.folder, held)
