"""Destinations: one file each, with one class that ends in `Destination`. Listing them imports no SDK.

`Destination` below is the whole contract; `tests/test_mlflow.py` checks it against the real thing.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Protocol

from sync.batch import Batch
from sync.errors import SetupError
from sync.state import RunState

GROUP = "spool_sync.destinations"
"""The entry-point group of destinations that other packages bring: name = "package.module:ClassName"."""


class Proof(Protocol):
    """What one destination holds of one run, asked for from when this was made; its methods raise as Destination's do."""

    def holds(self, batch: Batch) -> list[bool]:
        """For each row: does the destination hold it? Asked from the destination, compared by the keys it distinguishes."""

    def indistinct(self, table: str) -> int:
        """How many rows seen by `holds` are the same to the destination as an earlier one."""

    def count(self, table: str) -> int:
        """How many rows of this table the destination holds in this run, whoever wrote them."""


class Destination(Protocol):
    """One run as one destination holds it. Used by one thread at a time; several runs by several threads.

    Every method may raise TryAgainError (call again), UnreachableError or RefusedError; `write` also RejectedRecordError.
    Every method is idempotent: killed anywhere and called again, the destination ends up the same.
    """

    label: str
    """What people call it, for messages."""
    rewind: str
    """Whether steps that were trained again after a checkpoint are sent by default: keep or drop."""
    conflicts: list[str]
    """What `open` or `find` found twice there, as sentences."""
    rows_per_request: Mapping[str, int]
    """Most rows of each table that `write` takes at once."""

    @classmethod
    def is_elsewhere(cls, place: str | None) -> bool:
        """Whether what is delivered leaves this machine; says True where it is not known. Asks nobody.

        `place` is what the user wrote behind `--to NAME=`; None: where the destination's own settings say.
        """

    @classmethod
    def connect(cls, place: str | None) -> str:
        """Make sure the destination answers, within seconds; returns its address, fit to be shown. Called before any run."""

    @classmethod
    def parallel(cls, place: str | None) -> int:
        """How many runs it gains from being given at once."""

    def __init__(self, state: RunState, place: str | None) -> None: ...

    def find(self) -> str | None:
        """The destination's own name for the run; None where it has no such run. Changes nothing there."""

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

    def proof(self) -> Proof:
        """What it holds, from here on asked again."""

    def unsettled(self) -> list[str]:
        """What of the state the destination does not hold, as sentences; empty when all is well."""

    def retract(self) -> list[str]:
        """After `find`: delete the run and all that belongs to it there; returns what was deleted, as sentences."""


def names() -> list[str]:
    """The destinations there are: the files of this folder, and what installed packages add by an entry point."""
    ours = [module.name for module in iter_modules(__path__)]
    return sorted({*ours, *(point.name for point in entry_points(group=GROUP))})


def load(name: str) -> type[Destination]:
    """The class of one destination; imports its SDK. Ours come first: no package can take the place of one."""
    found: type[Destination]
    try:
        if name in {module.name for module in iter_modules(__path__)}:
            module = import_module(f"{__name__}.{name}")
            [found] = [
                value
                for key, value in vars(module).items()
                if key.endswith("Destination") and value.__module__ == module.__name__
            ]
        else:
            [point] = [one for one in entry_points(group=GROUP) if one.name == name][:1]
            found = point.load()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in {"sync", "spool"}:
            raise
        raise SetupError(
            f"--to {name} needs the package '{error.name}', which is not installed: pip install 'spool-sync[{name}]'"
        ) from error
    return found
