"""`spool-sync`: the command line of the read side. Parses, chooses runs, prints; the work is done elsewhere.

The table goes to stdout, everything else to stderr. Exit codes: 0 all delivered and proven, 1 wrong use or broken set-up,
2 usage, 3 delivered but records were rejected, the spool is damaged or something differs, 4 not reached or refused: run it again.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import click
import orjson

import spool
from spool import catalog, files, format, layout
from spool.catalog import RunFolder
from spool.errors import SpoolError
from spool.format import STATE_FOLDER
from spool.reader import RunReader
from sync import deliver, destinations, retract, several, standing
from sync.destinations import Destination
from sync.engine import Replay
from sync.errors import SetupError, StoppedError, SyncError, TryAgainError, UnreachableError
from sync.follow import Follow
from sync.live import Terms
from sync.outgoing import Choice
from sync.patience import MAX_WAIT_S, Patience
from sync.progress import Progress
from sync.report import DELIVERED, UNREACHED, WRONG_USE, RunReport
from sync.voice import Voice

_KEPT = "it was recorded with may_leave=False, and this destination is not on this machine"
_CONNECT_WAIT_S = 4.0
_HEALTH_EACH_S = 10.0
_HELP = {"help_option_names": ["-h", "--help"]}


class _Front(click.Command):
    """Delivers; `status` and `retract`, as the first word, are commands of their own."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        command = COMMANDS.get(words[0]) if words else None
        if command is not None:
            return command.main(words[1:], *others, **options | {"prog_name": f"spool-sync {words[0]}"})
        return super().main(words, *others, **options)


_spool = click.argument("spool_path", metavar="[SPOOL]", required=False, type=click.Path(path_type=Path))
_state_dir = click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Folder for cursors, if not SPOOL/.sync."
)
_json = click.option("--json", "wants_json", is_flag=True, help="Print the result as JSON.")


@click.command(
    cls=_Front,
    context_settings=_HELP,
    epilog="`spool-sync status` says how far everything is, `spool-sync retract` takes a run back; both have --help.",
)
@_spool
@click.option(
    "--to",
    "targets",
    multiple=True,
    required=True,
    metavar="NAME[=PLACE]",
    help=f"Where to deliver: {', '.join(destinations.names())}. PLACE: an address or a folder, in place of the "
    "destination's own setting. Several: at once, in a process each.",
)
@click.option(
    "--run", "selectors", multiple=True, metavar="RUN", help="A run id, a unique prefix, a glob, or project/experiment."
)
@click.option("--all", "wants_all", is_flag=True, help="All runs of the spool; so it is too when no --run is given.")
@click.option("--project", help="Name at the destination instead of the recorded project.")
@click.option("--experiment", help="Name at the destination instead of the recorded experiment.")
@click.option("--follow", is_flag=True, help="Go on with what is recorded from now on, until SIGINT or SIGTERM.")
@click.option("--plan", "wants_plan", is_flag=True, help="Count what would be sent; ask nobody, send nothing.")
@click.option("--verify", "wants_verify", is_flag=True, help="Compare with what the destination holds; change nothing.")
@click.option("--again", is_flag=True, help="Into a new run where the one there was deleted.")
@click.option(
    "--rewind",
    type=click.Choice(["keep", "drop"]),
    help="Steps that were trained again after a checkpoint: send all, or those that survive. The destination has a default.",
)
@click.option(
    "--trace-sample",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the traces to send; all rollouts of a prompt or none, the same ones each time.",
)
@click.option("--trace-max-chars", type=click.IntRange(1), help="Cut texts of traces here, and say so in them.")
@click.option(
    "--max-wait",
    "max_wait_s",
    type=click.FloatRange(0),
    default=MAX_WAIT_S,
    show_default=True,
    help="Seconds to wait for an answer, all tries together.",
)
@click.option("--jobs", type=click.IntRange(1), help="Runs at once; by default what the destination gains from.")
@click.option("--quiet", "is_quiet", is_flag=True, help="Print nothing where all is well.")
@click.option("--log-json", is_flag=True, help="What is said on stderr as JSON, one object a line.")
@click.option("--health", type=click.Path(path_type=Path), help="With --follow: a file to write each ten seconds.")
@_state_dir
@click.version_option(spool.__version__, prog_name="spool-sync")
@_json
def main(
    spool_path: Path | None,
    targets: tuple[str, ...],
    selectors: tuple[str, ...],
    wants_all: bool,
    project: str | None,
    experiment: str | None,
    follow: bool,
    wants_plan: bool,
    wants_verify: bool,
    again: bool,
    rewind: str | None,
    trace_sample: float,
    trace_max_chars: int | None,
    max_wait_s: float,
    jobs: int | None,
    is_quiet: bool,
    log_json: bool,
    health: Path | None,
    state_dir: Path | None,
    wants_json: bool,
) -> None:
    """Deliver the runs of SPOOL (default: SPOOL_DIR, or ./spool-data), each record once, and prove it.

    Run it again at any time, also after a kill: what is already there is not sent twice, what is missing is sent.
    """
    if wants_all and selectors:
        raise click.UsageError("--all and --run exclude each other")
    if follow + wants_plan + wants_verify > 1:
        raise click.UsageError("--follow, --plan and --verify exclude each other")
    if health is not None and not follow:
        raise click.UsageError("--health needs --follow")
    if len(targets) > 1:
        _deliver_to_several(targets, wants_json)
    voice, stop = Voice(is_json=log_json, is_quiet=is_quiet), Event()
    _end_on_signals(stop)
    root = _root(spool_path)
    name, _, place = targets[0].partition("=")
    try:
        destination = _destination(name)
        choice = Choice(rewind or destination.rewind, trace_sample, trace_max_chars)
        folder = state_dir or root / STATE_FOLDER
        terms = Terms(
            destination, place or None, folder, choice, Patience(max_wait_s, stop), project, experiment, again
        )
        if follow:
            _follow(root, selectors, terms, voice, stop, jobs, health, wants_json)
        runs = _choose(root, selectors)
        act = Replay.plan if wants_plan else Replay.verify if wants_verify else None
        reports, address = _deliver(root, runs, terms, voice, jobs, act)
    except (SpoolError, SetupError) as error:
        _fail(str(error), WRONG_USE)
    except OSError as error:
        _fail(f"{error.filename or root}: {error.strerror or error}", WRONG_USE)
    if wants_plan:
        for report in reports:
            report.withheld = report.withheld and f"would not be sent: {report.withheld}"
    _print(reports, address, wants_json, is_plan=wants_plan, is_quiet=is_quiet)


def _destination(name: str) -> type[Destination]:
    if name not in destinations.names():
        raise click.BadParameter(
            f"no destination {name!r}; there are {', '.join(destinations.names())}", param_hint="--to"
        )
    return destinations.load(name)


def _deliver(
    root: Path,
    runs: list[RunReader],
    terms: Terms,
    voice: Voice,
    jobs: int | None,
    act: Callable[[Replay], None] | None,
) -> tuple[list[RunReport], str]:
    """Reports in the order of the runs, and the destination's address. `act` is what is done instead of delivering."""
    destination = terms.destination
    is_elsewhere = destination.is_elsewhere(terms.place)
    kept = {
        run.id: RunReport(run.id, destination.label, withheld=_KEPT) for run in runs if is_elsewhere and _stays(run)
    }
    chosen = [run for run in runs if run.id not in kept]
    is_asking = act is not Replay.plan
    address = ""
    if chosen and is_asking:
        try:
            address = Patience(min(_CONNECT_WAIT_S, terms.patience.max_wait_s)).call(
                partial(destination.connect, terms.place)
            )
        except UnreachableError as error:
            for run in chosen:
                _keep(terms.folder, RunReport(run.id, destination.label, problem=str(error)))
            _fail(str(error), UNREACHED)
    elif chosen:
        destination.is_elsewhere(terms.place)
    voice.say(
        f"{len(chosen)} run(s) of {root} to {destination.label} {address}".rstrip(),
        destination=destination.label,
        runs=len(chosen),
    )
    total = sum(len(format.TABLES) * sum(one.last.seq for one in layout.glance(run.path)) for run in chosen)
    with Progress(total if act is None else 0, is_quiet=voice.is_quiet) as progress:

        def default(replay: Replay) -> None:
            replay.deliver(partial(progress.advance, replay.report.run_id))

        found = deliver.each(
            chosen,
            terms,
            jobs or destination.parallel(terms.place),
            act or default,
            partial(_is_there, destination, terms.place),
            (lambda report: _keep(terms.folder, report)) if act is None else lambda _: None,
        )
    delivered = {report.run_id: report for report in found}
    for report in found:
        if report.problem:
            voice.say(f"spool-sync: {report.run_id}: {report.problem}", is_wrong=True, run=report.run_id)
    return [kept.get(run.id) or delivered[run.id] for run in runs], address


def _is_there(destination: type[Destination], place: str | None) -> bool:
    """Whether the destination still answers, asked once."""
    try:
        destination.connect(place)
    except (TryAgainError, UnreachableError, SetupError):
        return False
    return True


def _follow(
    root: Path,
    selectors: tuple[str, ...],
    terms: Terms,
    voice: Voice,
    stop: Event,
    jobs: int | None,
    health: Path | None,
    wants_json: bool,
) -> NoReturn:
    destination = terms.destination
    is_elsewhere = destination.is_elsewhere(terms.place)

    def is_meant(path: Path) -> bool:
        run = RunFolder(path)
        if selectors and not any(catalog.is_meant(run, name) for name in selectors):
            return False
        if is_elsewhere and _stays(run):
            voice.say(f"{run.id}: not delivered, {_KEPT}", is_wrong=True, run=run.id)
            return False
        return True

    def tell(run_id: str, report: RunReport | None, text: str) -> None:
        if report is not None:
            _keep(terms.folder, report)
        elif text and text != "goes on":
            _keep(terms.folder, RunReport(run_id, destination.label, problem=text))
        if report is not None and not text:
            voice.say(
                "\n".join(report.lines()), is_wrong=report.exit_code != DELIVERED, run=run_id, report=report.as_json()
            )
        else:
            voice.say(f"{run_id}: {text}", is_wrong=bool(text) and text != "goes on", run=run_id)

    def is_connected() -> bool:
        try:
            address = terms.patience.call(partial(destination.connect, terms.place))
        except UnreachableError as error:
            voice.say(f"spool-sync: {error}; waiting for it", is_wrong=True)
            return False
        voice.say(f"following {root} to {destination.label} {address}", destination=destination.label)
        return True

    following = Follow(root, terms, is_meant, tell, jobs or destination.parallel(terms.place), stop)
    written_s = -_HEALTH_EACH_S

    def write_health() -> None:
        nonlocal written_s
        if health is not None and time.monotonic() - written_s >= _HEALTH_EACH_S:
            written_s = time.monotonic()
            body = {"at_ns": time.time_ns(), "pid": os.getpid(), **following.standing(), "problems": following.problems}
            with suppress(OSError):  # a full disk must not end the sync
                files.replace_file(health, format.dump_json(body))

    was_connected = False
    with suppress(StoppedError):
        while not stop.is_set() and not (was_connected := is_connected()):
            stop.wait(_CONNECT_WAIT_S)
        if was_connected:
            following.run(write_health)
    written_s = -_HEALTH_EACH_S
    write_health()
    reports = following.reports
    codes = [report.exit_code for report in reports] + [UNREACHED] * (bool(following.problems) or not was_connected)
    if wants_json:
        result = {"runs": [report.as_json() for report in reports], "problems": following.problems}
        click.echo(orjson.dumps(result | {"exit_code": max(codes, default=0)}, option=orjson.OPT_INDENT_2).decode())
    sys.exit(max(codes, default=DELIVERED))


def _deliver_to_several(targets: tuple[str, ...], wants_json: bool) -> NoReturn:
    words, arguments = list(sys.argv[1:]), []
    while words:
        word = words.pop(0)
        if word == "--to":
            words.pop(0)
        elif not word.startswith("--to="):
            arguments.append(word)
    outcomes = several.run(list(targets), arguments)
    if wants_json:
        click.echo(orjson.dumps(several.merged(outcomes), option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo("".join(text for _, _, text in outcomes), nl=False)
    sys.exit(several.worst([code for _, code, _ in outcomes]))


@click.command(context_settings=_HELP)
@_spool
@click.option("--run", "selectors", multiple=True, metavar="RUN", help="As in spool-sync.")
@_state_dir
@_json
def status(spool_path: Path | None, selectors: tuple[str, ...], state_dir: Path | None, wants_json: bool) -> None:
    """Say how each run stands with each destination: recorded, there, withheld, rejected, behind, the last error.

    Asks nobody: from the files of this machine alone. `spool-sync --verify` asks the destination.
    """
    root = _root(spool_path)
    try:
        runs = catalog.open_runs(root, selectors)
    except SpoolError as error:
        _fail(str(error), WRONG_USE)
    found = {run.id: standing.load(state_dir or root / STATE_FOLDER, run.path) for run in runs}
    if wants_json:
        rows = {"runs": [{"run_id": name, "destinations": [one.as_json() for one in of]} for name, of in found.items()]}
        click.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    for name, of in found.items():
        lines = [one.line(time.time_ns()) for one in of] or [f"{name}: no sync from here yet"]
        click.echo("\n".join(lines))


@click.command("retract", context_settings=_HELP)
@_spool
@click.option("--to", "target", required=True, metavar="NAME[=PLACE]", help="The destination that holds it.")
@click.option("--run", "name", required=True, metavar="RUN", help="One run, as in spool-sync.")
@click.option("--move-to", metavar="PROJECT", help="Then deliver it anew, into this project.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_state_dir
@_json
def retract_command(
    spool_path: Path | None,
    target: str,
    name: str,
    move_to: str | None,
    yes: bool,
    state_dir: Path | None,
    wants_json: bool,
) -> None:
    """Delete at the destination what went to the wrong place, or move it; the spool stays as it is.

    Shows what is there and asks. A receipt of what was deleted is kept in SPOOL/.sync/receipts.
    """
    root = _root(spool_path)
    destination_name, _, place = target.partition("=")
    try:
        destination = _destination(destination_name)
        folder = state_dir or root / STATE_FOLDER
        terms = Terms(destination, place or None, folder, Choice(destination.rewind), Patience())
        run = spool.open(root).run(name)
        terms.patience.call(partial(destination.connect, terms.place))
        found = retract.find(run, terms)
        click.echo("\n".join(found.lines()), err=True)
        if not yes:
            click.confirm("Delete all of this there?", abort=True, err=True)
        receipt = found.delete()
        click.echo("\n".join(receipt.sentences), err=True)
        if move_to is not None:
            moved = Terms(
                destination, place or None, folder, terms.choice, terms.patience, move_to, None, is_again=True
            )
            reports, address = _deliver(root, [run], moved, Voice(), None, None)
            _print(reports, address, wants_json)
    except (SpoolError, SetupError) as error:
        _fail(str(error), WRONG_USE)
    except SyncError as error:
        _fail(str(error), UNREACHED)
    except OSError as error:
        _fail(f"{error.filename or root}: {error.strerror or error}", WRONG_USE)
    if wants_json:
        click.echo(orjson.dumps(receipt.as_json(), option=orjson.OPT_INDENT_2).decode())


COMMANDS: dict[str, click.Command] = {"status": status, "retract": retract_command}


def _root(spool_path: Path | None) -> Path:
    return spool_path or Path(os.environ.get("SPOOL_DIR") or "spool-data")


def _stays(run: RunFolder) -> bool:
    return run.info.get("may_leave") is False


def _choose(path: Path, selectors: tuple[str, ...]) -> list[RunReader]:
    """The runs named, or all; a name that means several is an error unless it is a glob."""
    reader = spool.open(path)
    if not selectors:
        return reader.runs()
    found = [reader.select(name) if set(name) & set("*?[") else [reader.run(name)] for name in selectors]
    return list({run.id: run for runs in found for run in runs}.values())


def _keep(folder: Path, report: RunReport) -> None:
    with suppress(OSError):  # read-only media: `status` then knows less
        standing.save(folder, report)


def _end_on_signals(stop: Event) -> None:
    """The first SIGINT or SIGTERM ends us in order, a second one at once."""

    def ask(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)


def _print(
    reports: list[RunReport], address: str, wants_json: bool, *, is_plan: bool = False, is_quiet: bool = False
) -> NoReturn:
    exit_code = max(report.exit_code for report in reports)
    if wants_json:
        result = {"to": address, "runs": [report.as_json() for report in reports], "exit_code": exit_code}
        click.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    elif not is_quiet or exit_code != DELIVERED:
        click.echo(
            "\n".join(line for report in reports for line in (report.plan_lines() if is_plan else report.lines()))
        )
    sys.exit(exit_code)


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"spool-sync: {message}", err=True)
    sys.exit(exit_code)
