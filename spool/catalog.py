"""Which runs a spool has and which of them a name means, from run.json and the files' ends. Imports no pyarrow."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from spool import format, layout
from spool.errors import NotASpoolError, UnknownRunError
from spool.journal import Damage
from spool.status import RunStatus, run_status


class RunFolder:
    """One run as run.json tells it. `info` is empty where that is damaged, which `info_damage` then says."""

    def __init__(self, path: Path) -> None:
        """Raises NewerFormatError when a later release wrote it."""
        self.path = path
        self.id = path.name
        self.info: dict[str, Any] = {}
        self.info_damage: list[Damage] = []
        try:
            self.info = layout.run_info(path)
        except NotASpoolError as error:
            self._doubt_info(str(error).split(": ", 1)[1])
        if self.info.get("run", self.id) != self.id and self.id in self._runs_in_headers():
            self._doubt_info(f"it is of run {self.info['run']}")
        self.project: str = self.info.get("project", "unknown")
        self.experiment: str = self.info.get("experiment", "unknown")
        self.created_ns: int = self.info.get("created_ns", 0)

    def _doubt_info(self, reason: str) -> None:
        path = self.path / format.RUN_FILE
        self.info = {}
        self.info_damage.append(Damage(str(path), 0, path.stat().st_size, reason))

    def _runs_in_headers(self) -> set[str]:
        """Not the folder's name in any of them: the folder was renamed, and run.json is right."""
        return {layout.header(writer).get("run", "") for writer in layout.writers(self.path)}

    def attempts(self) -> list[layout.Attempt]:
        """Oldest first."""
        return layout.attempts(self.path)

    def status(self) -> RunStatus:
        return run_status(self.path)


class _Named(Protocol):
    id: str
    project: str
    experiment: str


RunT = TypeVar("RunT", bound=_Named)


def select(root: Path, runs: Iterable[RunT], name: str) -> list[RunT]:
    """The runs that a name means: a run id, a prefix of one, a glob, or `project/experiment` (globs too).

    Raises UnknownRunError when there is none.
    """
    named = [run for run in runs if is_meant(run, name)]
    found = [run for run in named if run.id == name] or named
    if not found:
        raise UnknownRunError(f"{root}: no run {name!r}; `spool ls {root}` lists them")
    return found


def is_meant(run: _Named, name: str) -> bool:
    return run.id.startswith(name) or any(fnmatchcase(one, name) for one in (run.id, f"{run.project}/{run.experiment}"))


def open_runs(root: Path, names: tuple[str, ...] = ()) -> list[RunFolder]:
    """The runs that the names mean, oldest first; all without names. Raises NotASpoolError when there is no run at all."""
    layout.check_spool(root)
    runs = [RunFolder(path) for path in layout.runs(root)]
    if not names:
        return runs
    found = {run.id for name in names for run in select(root, runs, name)}
    return [run for run in runs if run.id in found]
