"""Destinations: one file each, with one class that ends in `Destination`. Listing them imports no SDK.

`Destination` below is the whole contract; `tests/test_mlflow.py` checks it against the real thing.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol

from sync.batch import Batch
from sync.errors import SetupError
from sync.state import RunState


class Destination(Protocol):
    """One run as one destination holds it.

    Every method may raise TryAgainError (call again), UnreachableError or RefusedError; `write` also RejectedRecordError.
    Every method is idempotent: killed anywhere and called again, the destination ends up the same.
    """

    label: str
    """What people call it, for messages."""
    conflicts: list[str]
    """What `open` found twice there, as sentences."""
    rows_per_request: Mapping[str, int]
    """Most rows of each table that `write` takes at once."""

    @classmethod
    def is_elsewhere(cls) -> bool:
        """Whether what is delivered leaves this machine; says True where it is not known. Asks nobody."""

    @classmethod
    def connect(cls) -> str:
        """Make sure the destination answers, within seconds; returns its address, fit to be shown."""

    def __init__(self, state: RunState) -> None: ...

    def open(self) -> str:
        """Find the run at the destination, or create it; returns the destination's own name for it."""

    def held(self) -> dict[str, dict[str, int]]:
        """The cursor as the destination keeps it: {writer: {table: seq}}."""

    def write(self, batch: Batch) -> None:
        """Deliver rows, then move the cursor to `batch.cursor`: in this order, so that it never precedes the data."""

    def pass_over(self, batch: Batch) -> None:
        """Move the cursor past rows that hold nothing to deliver, or were rejected. May be lost until `settle`."""

    def settle(self) -> list[str]:
        """Bring names, config, tags, cursor and status to what the state says; returns sentences the user should read."""

    def start_proof(self) -> None:
        """Forget what is known of the destination's contents: from here on it is asked."""

    def holds(self, batch: Batch) -> list[bool]:
        """For each row: does the destination hold it? Asked from the destination, compared by the keys it distinguishes."""

    def indistinct(self, table: str) -> int:
        """How many rows seen by `holds` are the same to the destination as an earlier one."""

    def count(self, table: str) -> int:
        """How many rows of this table the destination holds in this run, whoever wrote them."""

    def unsettled(self) -> list[str]:
        """What of the state the destination does not hold, as sentences; empty when all is well."""


def names() -> list[str]:
    """The destinations there are: the files of this folder."""
    return sorted(module.name for module in iter_modules(__path__))


def load(name: str) -> type[Destination]:
    """The class of one destination; imports its SDK."""
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in {"sync", "spool"}:
            raise
        raise SetupError(
            f"--to {name} needs the package '{error.name}', which is not installed: pip install 'spool-sync[{name}]'"
        ) from error
    found = [
        value
        for key, value in vars(module).items()
        if key.endswith("Destination") and value.__module__ == module.__name__
    ]
    destination: type[Destination] = found[0]
    return destination
