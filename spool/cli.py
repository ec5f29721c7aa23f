"""`spool`: look at what was recorded, verify it, seal what a killed process left. Reading commands write nothing."""

import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spool import __version__, acceptance, catalog, format, layout, seal, status, upkeep
from spool.catalog import RunFolder
from spool.errors import SealError, SpoolError
from spool.journal import Damage
from spool.option import json_option, run_option, spool_argument, state_dir_option
from spool.record import Notes, jsonable
from spool.terminal import moment, printable, wait_for_reader

if TYPE_CHECKING:  # they import pyarrow, which takes longer than listing a thousand runs
    from spool.reader import RunReader, WriterReader
    from spool.tail import Entry

_POLL_S = 0.5


class _Command(click.Group):
    """Says what the user did wrong, or what the disk refused, in one sentence, exit 1, no traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except SpoolError as error:
            raise click.ClickException(printable(str(error))) from error
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            context.exit(0)
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            raise click.ClickException(printable(f"{where}{error.strerror or error}")) from error


@click.group(cls=_Command)
@click.version_option(__version__, prog_name="spool")
def main() -> None:
    """Look at a spool: what was recorded, and whether it is intact.

    SPOOL is a folder of runs: SPOOL_DIR, or ./spool-data, when it is not given.
    """


def _chosen(spool: Path, names: tuple[str, ...]) -> "list[RunReader]":
    from spool.reader import RunReader

    return [RunReader(run.path) for run in catalog.open_runs(spool, names)]


@main.command()
@spool_argument
@run_option
@json_option
def ls(spool: Path, names: tuple[str, ...], as_json: bool) -> None:
    """List runs: id, project/experiment, begin, attempts, writers, status."""
    rows = [_summary(run) for run in catalog.open_runs(spool, names)]
    if as_json:
        click.echo(format.dump_json(rows).decode(), nl=False)
        return
    for row in rows:
        begin = moment(row["created_ns"])
        counts = f"{row['attempts']} attempts, {row['writers']} writers, {row['records']} records"
        click.echo(printable(f"{row['run']}  {row['project']}/{row['experiment']}  {begin}  {counts}  {row['status']}"))


def _summary(run: RunFolder) -> dict[str, Any]:
    writers = layout.glance(run.path)
    return {
        "run": run.id,
        "project": run.project,
        "experiment": run.experiment,
        "created_ns": run.created_ns,
        "attempts": len(layout.order_attempts([writer.header for writer in writers])),
        "writers": len(writers),
        "records": sum(writer.last.seq for writer in writers),
        "status": status.status_of(writers).state,
    }


@main.command()
@spool_argument
@run_option
@click.option("--accept", is_flag=True, help="Acknowledge the damage found: later checks and spool-sync go on over it.")
@state_dir_option
@json_option
def verify(spool: Path, names: tuple[str, ...], accept: bool, state_dir: Path | None, as_json: bool) -> None:
    """Check every byte: checksums, sequence, hashes, and that no journal, segment or writer is absent.

    Works on a read-only copy, on any machine. Exit 3 when anything is damaged or absent. What is absent from an incomplete
    copy is named, to be fetched from where it came from. Damage that has been accepted is listed, and does not count; nor do
    records that a full disk did not take: their number was recorded, and is printed.
    """
    results = []
    for run in _chosen(spool, names):
        writers = run.writers()
        damage = run.damage(writers)
        accepted = acceptance.load(state_dir or spool / format.STATE_FOLDER, run.path)
        if accept:
            accepted.add(damage)
        new = [one for one in damage if one not in accepted]
        records = sum(writer.last_seq for writer in writers)
        losses = run.losses(writers)
        results.append(
            {
                "run": run.id,
                "writers": len(writers),
                "records": records,
                "damage": [_plain(one) for one in new],
                "accepted": [_plain(one) for one in damage if one in accepted],
                "losses": [asdict(one) for one in losses],
            }
        )
        if not as_json:
            click.echo(
                f"{printable(run.id)}: {len(writers)} writers, {records} records, {_verdict(new, len(damage) - len(new))}"
            )
            for one in damage:
                click.echo(f"  {'' if one in new else 'accepted: '}{printable(str(one))}")
            for loss in losses:
                click.echo(f"  recorded: {printable(str(loss))}")
    if as_json:
        click.echo(format.dump_json(results).decode(), nl=False)
    sys.exit(3 if any(one["damage"] for one in results) else 0)


def _plain(damage: Damage) -> dict[str, Any]:
    return {"message": str(damage), **asdict(damage)}


def _verdict(damage: list[Damage], accepted: int) -> str:
    absent = sum(one.fetch is not None for one in damage)
    counts = {"damaged": len(damage) - absent, "absent": absent, "accepted": accepted}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "intact"


@main.command(name="seal")
@spool_argument
@run_option
def seal_command(spool: Path, names: tuple[str, ...]) -> None:
    """Seal journals into Parquet for writers that have finished or are provably dead.

    A proven death is recorded in the segment, so do this before copying the spool: the copy then knows that the run is over.
    Journals sealed at least ten minutes ago are removed, where their segment holds all of them, by length and hash. Proof of death needs this machine and this boot: a silent writer may only be stopped. Others are left alone.
    """
    sealed = removed = failed = 0
    for run in _chosen(spool, names):
        for writer in run.writers():
            why = _open_reason(writer)
            if why:
                click.echo(f"{writer.path}: left alone, {why}", err=True)
                continue
            for source in layout.sources(writer.path):
                if source.journal is None:
                    continue
                try:
                    if source.segment is None:
                        seal.seal(source.journal, writer_died=not writer.finished)
                        sealed += 1
                    elif time.time() - source.segment.stat().st_mtime >= seal.KEEP_SEALED_S:
                        removed += seal.remove_sealed(source.journal)
                except (OSError, SealError) as error:
                    failed += 1
                    click.echo(str(error), err=True)
    click.echo(
        f"sealed {sealed} journals"
        + (f", removed {removed} that were sealed before" if removed else "")
        + (f", {failed} could not be sealed" if failed else "")
    )
    sys.exit(1 if failed else 0)


def _open_reason(writer: "WriterReader") -> str | None:
    """Why a writer's journals must not be sealed by another process; None when they may."""
    if writer.finished:
        return None
    alive = writer.is_alive()
    if alive is None:
        return "no finish record, and its death cannot be proven from this machine"
    return "its process is running" if alive else None


@main.command()
@spool_argument
@click.option(
    "--run", "name", required=True, metavar="RUN", help="The run: id, unique prefix, glob or project/experiment."
)
@json_option
def show(spool: Path, name: str, as_json: bool) -> None:
    """Show one run: where it came from, its attempts, and the last value of each metric."""
    from spool.reader import Spool

    run = Spool(spool).run(name)
    last: dict[str, Any] = {}
    for row in run.metrics().select(["key", "step", "value", "exact", "kind"]).to_pylist():
        last[row["key"]] = {"step": row["step"], "value": row["exact"] if row["exact"] is not None else row["value"]}
    attempts = [
        {"attempt": one.id, "continues": one.continues, "resumed_from_step": one.resumed_from_step}
        for one in run.attempts()
    ]
    losses = run.losses()
    found = {
        **_summary(run),
        "path": str(run.path),
        "attempt_list": attempts,
        "losses": [asdict(one) for one in losses],
        "metrics": dict(sorted(last.items())),
    }
    if as_json:
        click.echo(format.dump_json(jsonable(found, Notes())).decode(), nl=False)  # NaN is a word, not null
        return
    for key in ("run", "path", "project", "experiment", "status", "attempts", "writers", "records"):
        click.echo(printable(f"{key:<12}{found[key]}"))
    for one in attempts:
        continued = f" continues {one['continues']}" if one["continues"] else ""
        continued += f" from step {one['resumed_from_step']}" if one["resumed_from_step"] is not None else ""
        click.echo(printable(f"{'attempt':<12}{one['attempt']}{continued}"))
    for loss in losses:
        click.echo(printable(f"{'loss':<12}{loss}"))
    for key, value in found["metrics"].items():
        step = "no step" if value["step"] is None else f"step {value['step']}"
        click.echo(printable(f"{key:<40} {step}: {value['value']}"))


@main.command()
@spool_argument
@run_option
@click.option("-f", "--follow", is_flag=True, help="Go on with new records, writers and runs, until interrupted.")
@click.option("-n", "count", type=click.IntRange(min=0), default=10, show_default=True, help="How many records.")
@click.option("--table", "tables", multiple=True, type=click.Choice(list(format.TABLES)), help="Only these tables.")
@click.option("--json", "as_json", is_flag=True, help="Print each record as its journal holds it, one JSON a line.")
def tail(spool: Path, names: tuple[str, ...], follow: bool, count: int, tables: tuple[str, ...], as_json: bool) -> None:
    """Print the last records of the newest run, or of the runs named, in the order of their time.

    With -f runs that begin later are followed too, where they are newer, or where --run means them. Damage is said once on
    stderr; without -f the exit code is then 3.
    """
    from spool.tail import Tail, json_line, line

    watched = Tail(spool, names, tables)
    stop = _stop_signal() if follow else []
    entries: Iterable[Entry] = watched.last(count, is_final=not follow)
    is_damaged = False
    while True:
        for entry in entries:
            click.echo(json_line(entry) if as_json else line(entry, with_run=watched.has_several_runs))
        for damage in watched.new_damage():
            is_damaged = True
            click.echo(f"spool: {printable(str(damage))}", err=True)
        if not follow or stop:
            break
        sys.stdout.flush()
        if not wait_for_reader(_POLL_S):
            break
        entries = watched.new()
    sys.exit(3 if is_damaged and not follow else 0)


def _stop_signal() -> list[int]:
    """Filled by the first SIGINT or SIGTERM; a second one acts as usual."""
    seen: list[int] = []

    def stop(number: int, _: object) -> None:
        seen.append(number)
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)
    return seen


main.add_command(upkeep.compact)
main.add_command(upkeep.gc)


if __name__ == "__main__":
    main()
