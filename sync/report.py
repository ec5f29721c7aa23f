"""What a sync did, as a table for people and as JSON. The counts are rows: metric values, generations, spans, events."""

from dataclasses import asdict, dataclass, field
from typing import Any

TABLES = ("metrics", "generations", "events", "spans")
DELIVERED, WRONG_USE, INCOMPLETE, UNREACHED = 0, 1, 3, 4


@dataclass
class TableReport:
    recorded: int = 0
    already_there: int = 0
    rejected: int = 0
    missing: int = 0
    """Not held by the destination when it was asked, and not rejected either."""
    lost: int = 0
    """Not held although the destination's own cursor says so; sent again, and counted as delivered if that helped."""
    withheld: int = 0
    """Not sent by the user's choice: rewound steps, traces outside the sample."""
    waiting: int = 0
    """Spans that have not ended, of writers that may still live."""
    indistinct: int = 0
    """Rows that are the same to the destination as an earlier one."""
    held: int = 0
    """The destination's own count, whoever wrote the rows."""

    @property
    def delivered(self) -> int:
        return self.recorded - self.already_there - self.rejected - self.missing - self.waiting - self.withheld

    @property
    def extra(self) -> int:
        """What the destination holds beyond what went out; what is withheld now may have gone out earlier."""
        gone = self.recorded - self.withheld - self.indistinct - self.missing - self.rejected - self.waiting
        return max(0, self.held - gone - self.withheld)


@dataclass
class RunReport:
    run_id: str
    destination: str
    identity: str = ""
    status: str = ""
    tables: dict[str, TableReport] = field(default_factory=lambda: {table: TableReport() for table in TABLES})
    positions: dict[str, int] = field(default_factory=dict)
    """writer -> last seq that was recorded when the sync began."""
    rejections: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    """What the destination holds twice, made by syncs that could not see each other."""
    differences: list[str] = field(default_factory=list)
    """What a comparison that changes nothing has found to differ."""
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    """Why the run is not delivered and proven; empty when it is."""
    withheld: str = ""
    """Why the run was not even offered."""

    @property
    def exit_code(self) -> int:
        if self.problem:
            return UNREACHED
        if self.withheld:
            return WRONG_USE
        return INCOMPLETE if self.rejections or self.damage or self.conflicts or self.differences else DELIVERED

    def compare(self, unsettled: list[str]) -> None:
        """Put into words what differs, once everything has been asked for."""
        for name, table in self.tables.items():
            if table.missing:
                self.differences.append(f"{table.missing} of {table.recorded} {name} are not there")
            if table.extra:
                self.differences.append(f"{table.extra} {name} are there that the spool does not hold")
        self.differences += [f"{one} is not there" for one in unsettled]

    def as_json(self) -> dict[str, Any]:
        tables = {name: asdict(table) | {"delivered": table.delivered} for name, table in self.tables.items()}
        return asdict(self) | {"tables": tables, "exit_code": self.exit_code}

    def plan_lines(self) -> list[str]:
        """What would go out, as a table."""
        lines = [f"run {self.run_id} -> {self.destination} {self.status}"]
        if self.withheld:
            return [*lines, f"  {self.withheld}"]
        lines.append(f"  {'table':<12}{'recorded':>10}{'withheld':>10}{'to be there':>13}")
        for name, table in self.tables.items():
            counts = (table.recorded, table.withheld, table.recorded - table.withheld - table.waiting)
            lines.append("  {:<12}{:>10}{:>10}{:>13}".format(name, *counts))
        return lines + [f"  damaged: {damage}" for damage in self.damage]

    def lines(self) -> list[str]:
        """The table, and under it one sentence for everything that is not plainly delivered."""
        label = self.destination
        lines = [f"run {self.run_id} -> {label} run {self.identity or '(none)'} {self.status}"]
        if self.identity and (not self.problem or any(table.recorded for table in self.tables.values())):
            lines.append(
                f"  {'table':<12}{'recorded':>10}{'already there':>15}{'delivered':>11}{'rejected':>10}{label + ' holds':>14}"
            )
            for name, table in self.tables.items():
                counts = (table.recorded, table.already_there, table.delivered, table.rejected, table.held)
                lines.append("  {:<12}{:>10}{:>15}{:>11}{:>10}{:>14}".format(name, *counts))
        for name, table in self.tables.items():
            if table.withheld:
                lines.append(f"  {table.withheld} of {table.recorded} {name} are withheld, as chosen")
            if table.waiting:
                lines.append(f"  {table.waiting} {name} have not ended yet; they follow with a later sync")
            if table.lost:
                lines.append(f"  {table.lost} {name} delivered earlier were missing in {label}, and were sent again")
            if table.indistinct:
                lines.append(
                    f"  {table.indistinct} of {table.recorded} {name} repeat an earlier one (same key, millisecond, step and "
                    f"value), which {label} keeps once"
                )
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  conflict: {conflict}" for conflict in self.conflicts]
        lines += [f"  differs: {difference}" for difference in self.differences]
        lines += [f"  damaged: {damage}" for damage in self.damage]
        lines += [f"  rejected: {rejection}" for rejection in self.rejections[:20]]
        if len(self.rejections) > 20:
            lines.append(f"  … and {len(self.rejections) - 20} more rejected; --json lists them all")
        if self.problem or self.withheld:
            lines.append(f"  not delivered: {self.problem or self.withheld}")
        return lines
