"""Where a run stands, from its files' ends only: cheap enough for a list of thousands. Imports no pyarrow."""

from dataclasses import dataclass
from pathlib import Path

from spool import layout, liveness


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands.

    `state`: finished, failed, preempted or killed once the lead writer's finish in the latest attempt, or the death of
    all its writers (then `proven_death`), says so; otherwise running (a writer is provably alive) or unknown.
    """

    state: str
    end_ns: int | None = None
    proven_death: bool = False


def run_status(run: Path) -> RunStatus:
    attempts = layout.attempts(run)
    headers = {writer: layout.header(writer) for writer in layout.writers(run)}
    latest = [
        (header, layout.last(writer))
        for writer, header in headers.items()
        if attempts and header.get("attempt", {}).get("id") == attempts[-1].id
    ]
    for header, last in latest:
        if header.get("lead") and last.end is not None and "ts" in last.end:
            return RunStatus(last.end["status"], last.end["ts"])
    alive = [is_alive(header, last) for header, last in latest if last.end is None or "ts" not in last.end]
    if True in alive:
        return RunStatus("running")
    if alive and None not in alive:
        return RunStatus("failed", max(last.ts for _, last in latest), proven_death=True)
    return RunStatus("unknown")


def is_alive(header: dict[str, object], last: layout.Last) -> bool | None:
    """Whether a writer's process is alive: True or False where that is proven, here or when it was sealed, None elsewhere."""
    if last.end is not None and last.end["status"] == "died":
        return False
    return liveness.is_alive(header)
