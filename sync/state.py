"""What a run is as a whole, beside its records: names, config, tags, status. Folded from the spool anew at each sync, so it
does not depend on where an earlier sync stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from spool.reader import RunReader

KINDS = ["tag", "config", "attempt"]
"""Events that change what a run is as a whole."""


@dataclass
class RunState:
    """One run for a destination: everything it may know of the run but its records."""

    run_id: str
    project: str
    experiment: str
    created_ns: int
    files: Path
    """Folder of saved files, each under its sha256."""
    is_renamed: bool
    """The project was given on the command line: the user asks for that place, not for where the run may be already."""
    is_again: bool
    """A run that was deleted at the destination is passed over: the user asks for a new one."""
    config: dict[str, Any]
    tags: dict[str, str]
    host: str | None
    user: str | None
    command: str | None
    commit: str | None
    attempts: int
    positions: dict[str, int]
    """writer -> last seq that this sync delivers, set when it begins"""
    status: str
    """running, finished, failed, preempted, killed; unknown: no finish, and nobody can prove from here that it is over"""
    end_ns: int | None

    def take(self, kind: str, body: dict[str, Any]) -> None:
        """The next event of one of KINDS, in the order (attempt, writer, seq): the last one wins."""
        if kind == "tag":
            self.tags |= _texts(body)
        else:
            self.config |= body if kind == "config" else body.get("config") or {}


def read(
    run: RunReader, project: str | None = None, experiment: str | None = None, *, is_again: bool = False
) -> RunState:
    """The state of a run; the names given take the place of the recorded ones."""
    info, status = run.info, run.status()
    state = RunState(
        run_id=run.id,
        project=project or run.project,
        experiment=experiment or run.experiment,
        created_ns=run.created_ns,
        files=run.path / "files",
        is_renamed=project is not None,
        is_again=is_again,
        config=dict(info.get("config") or {}),
        tags={},
        host=info.get("host"),
        user=info.get("user"),
        command=Path(info["argv"][0]).name if info.get("argv") else None,
        commit=(info.get("git") or {}).get("commit"),
        attempts=len(run.attempts()),
        positions={},
        status=status.state,
        end_ns=status.end_ns,
    )
    for writer in run.writers():
        for events in writer.batches("events"):
            chosen = pc.is_in(pc.cast(events["kind"], pa.string()), value_set=pa.array(KINDS))
            for row in events.filter(chosen).select(["kind", "body"]).to_pylist():
                state.take(row["kind"], orjson.loads(row["body"]))
    return state


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Tag values as texts: a text is itself, anything else its JSON."""
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in values.items()}
