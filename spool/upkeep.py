"""`spool compact` and `spool gc`: what makes a spool smaller. They choose, ask and print; `compact` and `removal` do it."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spool import catalog, format, layout, removal, status
from spool.errors import CompactError, RemoveError
from spool.option import json_option, run_option, spool_argument, state_dir_option
from spool.removal import Conditions, Verdict
from spool.terminal import printable, size

if TYPE_CHECKING:  # it imports pyarrow
    from spool.compact import Compacted


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=total, label=printable(label), file=sys.stderr) as bar:
        yield bar.update


@click.command()
@click.argument("spool", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@run_option
@click.option("--over-only", is_flag=True, help="Leave out runs that are not over, in place of refusing.")
@json_option
def compact(spool: Path, target: Path, names: tuple[str, ...], over_only: bool, as_json: bool) -> None:
    """Write runs anew into the new spool folder TARGET, with few large segments in place of many.

    Only runs that are over: their lead has finished, or all their writers are provably dead. Where one is not, nothing is
    written and the exit code is 1. Rows and seqs stay what they are; all is read back and compared before a run appears in
    TARGET. A writer with damage is copied as it is. SPOOL is only read. After a kill, run it again: what is in TARGET is
    compared, the rest is written. Cursors are not copied; they stay valid: use --state-dir SPOOL/.sync, or copy that folder.
    """
    from spool import compact as compacting

    runs = catalog.open_runs(spool, names)
    compacting.check_target(spool, target, runs)
    reasons = {run.id: status.why_not_over(layout.glance(run.path)) for run in runs}
    still_open = {run: why for run, why in reasons.items() if why}
    for run_id, why in still_open.items():
        click.echo(printable(f"{run_id}: left out, {why}"), err=True)
    if still_open and not over_only:
        raise CompactError(
            f"{spool}: {len(still_open)} of {len(runs)} runs are not over, so nothing is written; --over-only leaves them out"
        )
    done = []
    for run in runs:
        if run.id not in still_open:
            with _progress(run.id, layout.size_bytes(run.path)) as advance:
                done.append(compacting.compact(run, target, advance))
            if not as_json:
                click.echo(printable(_compacted_line(done[-1])))
    if as_json:
        result = {"runs": [asdict(one) for one in done], "left_out": still_open}
        click.echo(format.dump_json(result).decode(), nl=False)
        return
    before, after = sum(one.size_before_bytes for one in done), sum(one.size_after_bytes for one in done)
    click.echo(printable(f"{len(done)} runs in {target}: {size(before)} before, {size(after)} after"))


def _compacted_line(done: "Compacted") -> str:
    notes = ", there already and equal" if done.was_there else ""
    notes += "".join(f", writer {writer} is copied as it is" for writer in done.copied_writers)
    return f"{done.run}: {size(done.size_before_bytes)} before, {size(done.size_after_bytes)} after{notes}"


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _age_s(_: click.Context, __: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no age; write 30d, 12h, 45m or 90s")
    return float(match[1]) * _UNITS_S[match[2]]


def _destination_names(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.lower() for name in value))
    for name in names:
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise click.BadParameter(f"{name!r} is no destination; name one as `spool-sync --to` does")
    return names


@click.command()
@spool_argument
@run_option
@click.option(
    "--delivered-to",
    "destinations",
    multiple=True,
    required=True,
    metavar="DEST",
    callback=_destination_names,
    help="Only runs that spool-sync has proven to be in DEST; in all of them, where several are named.",
)
@click.option(
    "--older-than",
    "age_s",
    default="0s",
    metavar="AGE",
    callback=_age_s,
    help="Only runs that ended that long ago: 30d, 12h.",
)
@state_dir_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would go, what stays and why.")
@json_option
def gc(
    spool: Path,
    names: tuple[str, ...],
    destinations: tuple[str, ...],
    age_s: float,
    state_dir: Path | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove runs that are over and that every destination named is proven to hold; asks before it does.

    What a destination holds is taken from the cursors of spool-sync. A run stays when a process may still write into it,
    when anything of it is damaged or absent and not accepted, when a destination has rejected records of it or has not been
    told how it ended, and while spool-sync delivers it. It is renamed to .trash-… before it is deleted, and put back if
    something was written into it at that moment; what a killed gc has left the next one removes. Cursors are kept.
    Exit 1 when something could not be removed, or nobody could be asked.
    """
    finished, failures = _finish_leftovers(spool, dry_run=dry_run) if spool.is_dir() else ([], 0)
    if finished and not names and not layout.runs(spool):
        verdicts = []
    else:
        ended_before_ns = time.time_ns() - int(age_s * 1e9)
        conditions = Conditions(destinations, state_dir or spool / format.STATE_FOLDER, ended_before_ns)
        verdicts = [removal.judge(run, conditions) for run in catalog.open_runs(spool, names)]
    going = [one for one in verdicts if not one.why]
    for one in verdicts:
        click.echo(printable(_verdict_line(one)), err=as_json)
    removed: set[str] = set()
    if going and not dry_run:
        _ask(going, yes=yes)
        for one in going:
            try:
                removal.remove(one, conditions)
                removed.add(one.run.id)
            except (RemoveError, OSError) as error:
                failures += 1
                click.echo(printable(str(error)), err=True)
    if as_json:
        rows = [_row(one) | {"removed": one.run.id in removed} for one in verdicts]
        click.echo(format.dump_json({"leftovers": finished, "runs": rows}).decode(), nl=False)
    else:
        freed = size(sum(one.size_bytes for one in going if one.run.id in removed or dry_run))
        count = len(going) if dry_run else len(removed)
        click.echo(f"{'would remove' if dry_run else 'removed'} {count} runs, {freed}; {len(verdicts) - count} stay")
    sys.exit(1 if failures else 0)


def _finish_leftovers(spool: Path, *, dry_run: bool) -> tuple[list[str], int]:
    """Remove what a killed gc has left; returns the names of those, and how many could not be removed."""
    finished, failures = [], 0
    for trash in removal.leftovers(spool):
        try:
            if not dry_run:
                removal.finish(trash)
            finished.append(trash.name)
            what = "would be removed" if dry_run else "removed"
            click.echo(printable(f"{trash}: {what}, left by a gc that was interrupted"), err=True)
        except (RemoveError, OSError) as error:
            failures += 1
            click.echo(printable(str(error)), err=True)
    return finished, failures


def _ask(going: list[Verdict], *, yes: bool) -> None:
    """Raises RemoveError, or click.Abort, unless the user agrees."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise RemoveError("nothing is removed, since there is no terminal to ask on; --yes removes without asking")
    total = size(sum(one.size_bytes for one in going))
    click.confirm(f"Remove {len(going)} runs, {total}, for good?", abort=True, err=True)


def _verdict_line(one: Verdict) -> str:
    if one.why:
        return f"stays  {one.run.id}  {size(one.size_bytes)}  {one.why}"
    held = "; ".join(f"{name}: {', '.join(identities)}" for name, identities in one.delivered_to.items())
    return f"goes   {one.run.id}  {size(one.size_bytes)}  {held}"


def _row(one: Verdict) -> dict[str, Any]:
    return {"run": one.run.id, "size_bytes": one.size_bytes, "delivered_to": one.delivered_to, "why": one.why or None}
