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
    return status_of(layout.glance(run))


def status_of(writers: list[layout.Glance]) -> RunStatus:
    attempts = layout.order_attempts([writer.header for writer in writers])
    latest = [writer for writer in writers if attempts and _attempt(writer) == attempts[-1].id]
    for _, header, last in latest:
        if header.get("lead") and last.end is not None and "ts" in last.end:
            return RunStatus(last.end["status"], last.end["ts"])
    alive = [is_alive(header, last) for _, header, last in latest if last.end is None or "ts" not in last.end]
    if True in alive:
        return RunStatus("running")
    if alive and None not in alive:
        return RunStatus("failed", max(writer.last.ts for writer in latest), proven_death=True)
    return RunStatus("unknown")


def why_not_over(writers: list[layout.Glance]) -> str | None:
    """Why records may still come; None once the lead has finished or all are provably dead, and nobody is seen writing."""
    status = status_of(writers)
    for path, header, last in writers:
        if last.end is None or "ts" not in last.end:
            alive = is_alive(header, last)
            if alive:
                return f"{path.name} is still writing (process {header['pid']} on this machine)"
            if alive is None and (status.proven_death or status.state == "unknown"):
                return f"no finish record, and the death of {path.name} cannot be proven from this machine"
    return None if status.end_ns is not None else "no finish record, and no writer that could be proven dead"


def _attempt(writer: layout.Glance) -> object:
    return writer.header.get("attempt", {}).get("id")


def is_alive(header: dict[str, object], last: layout.Last) -> bool | None:
    """Whether a writer's process is alive: True or False where that is proven, here or when it was sealed, None elsewhere."""
    if last.end is not None and last.end["status"] == "died":
        return False
    return liveness.is_alive(header)
