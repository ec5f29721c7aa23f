"""How each run stands with each destination, from this machine's files alone: what the last sync of it reported, and what has been
recorded since.

    <folder>/<destination>/<run_id>.last     below `<spool>/.sync`, or `--state-dir`
    {"format": 1, "at_ns": …, "report": {…}}     the report as `--json` prints it

The file is for people: no sync goes by it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool import files, format, layout
from spool.status import status_of
from sync.report import TABLES, RunReport

FORMAT = 1
_SUFFIX = ".last"


@dataclass(frozen=True)
class Standing:
    run_id: str
    status: str
    destination: str
    at_ns: int
    report: dict[str, Any]
    behind: int
    """Records (seqs, of all writers) that have been written since the last sync began, or that it did not bring there."""

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "status": self.status,
            "destination": self.destination,
            "synced_ns": self.at_ns,
            "behind": self.behind,
            "tables": self.report["tables"],
            "rejections": self.report["rejections"],
            "last_error": self.report["problem"] or self.report["withheld"],
        }

    def line(self, now_ns: int) -> str:
        counts = {
            name: sum(table[name] for table in self.report["tables"].values()) for name in ("recorded", "withheld")
        }
        there = sum(table["already_there"] + table["delivered"] for table in self.report["tables"].values())
        parts = [f"{there} of {counts['recorded']} rows there"]
        parts += [f"{counts['withheld']} withheld"] if counts["withheld"] else []
        parts += [f"{len(self.report['rejections'])} rejected"] if self.report["rejections"] else []
        parts += [f"{self.behind} records behind"] if self.behind else []
        error = self.report["problem"] or self.report["withheld"]
        parts += [f"last error: {error}"] if error else []
        age_s = max(0, now_ns - self.at_ns) // 10**9
        return f"{self.run_id} {self.status} -> {self.destination}, {age_s} s ago: {', '.join(parts)}"


def save(folder: Path, report: RunReport) -> None:
    """Keep the outcome of a sync; of one that failed its error, beside what an earlier one had found to be there.

    Raises OSError where the folder cannot be written.
    """
    path = folder / report.destination.lower() / f"{report.run_id}{_SUFFIX}"
    files.make_folder(path.parent)
    body = report.as_json()
    earlier = _read(path) if report.problem or report.withheld else None
    if earlier is not None:
        body |= {"tables": earlier[1]["tables"], "positions": earlier[1]["positions"]}
    files.replace_file(path, format.dump_json({"format": FORMAT, "at_ns": time.time_ns(), "report": body}))


def _read(path: Path) -> tuple[int, dict[str, Any]] | None:
    """(ns, report); None where it was cut or edited: the next sync writes it anew."""
    try:
        body = format.load_json(path.read_bytes())
        report = dict(body["report"])
        if not {"problem", "withheld", "destination", "rejections", "positions"} <= report.keys():
            return None
        for table in TABLES:
            if not {"recorded", "already_there", "delivered", "withheld"} <= report["tables"][table].keys():
                return None
        return int(body["at_ns"]), report
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(folder: Path, run: Path) -> list[Standing]:
    """Of one run, for every destination it has been offered to."""
    glances = layout.glance(run)
    found = []
    for path in sorted(folder.glob(f"*/{run.name}{_SUFFIX}")):
        last = _read(path)
        if last is not None:
            at_ns, report = last
            behind = sum(max(0, one.last.seq - int(report["positions"].get(one.path.name, 0))) for one in glances)
            found.append(Standing(run.name, status_of(glances).state, report["destination"], at_ns, report, behind))
    return found
