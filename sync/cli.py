"""`spool-sync`: the command line of the read side. Parses, chooses runs, prints; the work is done by the engine.

The table goes to stdout, everything else to stderr. Exit codes: 0 all delivered and proven, 1 wrong use or broken set-up,
2 usage, 3 delivered but records were rejected or the spool is damaged, 4 not reached or refused: run it again.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import click
import orjson

import spool
from spool.errors import SpoolError
from spool.format import STATE_FOLDER
from spool.reader import RunReader
from sync import destinations, state
from sync.engine import Replay, patiently
from sync.errors import SetupError, UnreachableError
from sync.progress import Progress
from sync.report import UNREACHED, WRONG_USE, RunReport

_KEPT = "it was recorded with may_leave=False, and this destination is not on this machine"
_CONNECT_DELAYS_S, _CONNECT_PATIENCE_S = (0.5, 1), 4


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("spool_path", metavar="[SPOOL]", required=False, type=click.Path(path_type=Path))
@click.option("--to", "name", required=True, type=click.Choice(destinations.names()), help="Where to deliver.")
@click.option(
    "--run", "selectors", multiple=True, metavar="RUN", help="A run id, a unique prefix, a glob, or project/experiment."
)
@click.option("--all", "wants_all", is_flag=True, help="All runs of the spool; so it is too when no --run is given.")
@click.option("--project", help="Name at the destination instead of the recorded project.")
@click.option("--experiment", help="Name at the destination instead of the recorded experiment.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder for cursors, if not SPOOL/.sync.")
@click.version_option(spool.__version__, prog_name="spool-sync")
@click.option("--json", "wants_json", is_flag=True, help="Print the table as JSON.")
def main(
    spool_path: Path | None,
    name: str,
    selectors: tuple[str, ...],
    wants_all: bool,
    project: str | None,
    experiment: str | None,
    state_dir: Path | None,
    wants_json: bool,
) -> None:
    """Deliver the runs of SPOOL (default: SPOOL_DIR, or ./spool-data), each record once, and prove it.

    Run it again at any time, also after a kill: what is already there is not sent twice, what is missing is sent.
    """
    if wants_all and selectors:
        raise click.UsageError("--all and --run exclude each other")
    path = spool_path or Path(os.environ.get("SPOOL_DIR") or "spool-data")
    reports: list[RunReport] = []
    try:
        runs = _choose(path, selectors)
        destination = destinations.load(name)
        kept = [run for run in runs if destination.is_elsewhere() and run.info.get("may_leave") is False]
        reports += [RunReport(run.id, destination.label, withheld=_KEPT) for run in kept]
        chosen = [run for run in runs if run not in kept]
        address = patiently(destination.connect, _CONNECT_DELAYS_S, _CONNECT_PATIENCE_S) if chosen else ""
        click.echo(f"{len(chosen)} run(s) of {path} to {destination.label} {address}", err=True)
        for run in chosen:
            known = state.read(run, project, experiment)
            replay = Replay(run, known, destination(known), state_dir or path / STATE_FOLDER)
            reports.append(replay.report)
            with Progress(run.id, replay.total) as progress:
                replay.deliver(progress.advance)
    except (SpoolError, SetupError) as error:
        _fail(str(error), WRONG_USE)
    except UnreachableError as error:
        if not any(report.problem for report in reports):
            _fail(str(error), UNREACHED)
        click.echo(f"spool-sync: {error}", err=True)
    except OSError as error:
        _fail(f"{error.filename or path}: {error.strerror or error}", WRONG_USE)
    exit_code = max(report.exit_code for report in reports)
    if wants_json:
        result = {"to": address, "runs": [report.as_json() for report in reports], "exit_code": exit_code}
        click.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo("\n".join(line for report in reports for line in report.lines()))
    sys.exit(exit_code)


def _choose(path: Path, selectors: tuple[str, ...]) -> list[RunReader]:
    """The runs named, or all; a name that means several is an error unless it is a glob."""
    reader = spool.open(path)
    if not selectors:
        return reader.runs()
    found = [reader.select(name) if set(name) & set("*?[") else [reader.run(name)] for name in selectors]
    return list({run.id: run for runs in found for run in runs}.values())


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"spool-sync: {message}", err=True)
    sys.exit(exit_code)
