"""`spool.init`: which run, which attempt, and as whom. Everything from arguments and environment is decided here, once."""

import os
import re
import sys
import time
import unicodedata
from hashlib import sha256
from pathlib import Path
from typing import Any

from spool import environment, files, format, layout
from spool.errors import FinishedRunError, NotASpoolError, SpoolError, UnknownRunError
from spool.process import export, inherited, warn
from spool.record import Notes, Redact, clean_text, jsonable, keep
from spool.redact import capture, mask_tree
from spool.room import Limits, parse_size
from spool.run import Run
from spool.writer import DURABILITIES

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")
_MAX_SLUG = 40


def init(
    project: str | None = None,
    experiment: str | None = None,
    config: Any = None,
    *,
    dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    resume: bool | str = False,
    role: str | None = None,
    durability: str | None = None,
    redact: Any = None,
    resumed_from_step: int | None = None,
    may_leave: bool = True,
    strict: bool = False,
) -> Run:
    """Begin a run, continue one, or join one. Run and writer are durable when this returns.

    A process that finds SPOOL_RUN_ID joins that run as another writer, unless it names another project or run id; `init`
    sets the variable for the children of the process that begins the run. `resume=True` (with `run_id=` or SPOOL_RUN_ID)
    continues an existing run as its next attempt, and begins it where there is none; `resume="must"` insists. Of several
    ranks (RANK in the environment) that ask to resume, rank 0 begins the attempt and the others join.

    Args:
        dir: the spool; by default SPOOL_DIR, or ./spool-data.
        config: the resolved configuration, any tree; secrets are masked before they reach the disk.
        role: "lead" begins an attempt, "worker" joins one; by default decided as above.
        durability: against power loss: "interval" (fdatasync each second), "record" (before each return), "os" (never).
        redact: a function from text to text, or regular expressions; by default SPOOL_REDACT, one a line.
        resumed_from_step: the checkpoint's step that this attempt starts from.
        may_leave: False marks the run as one that no replay may send off this machine.
        strict: raise WriteError when a record cannot be written, in place of a warning and a count.

    Raises:
        NotASpoolError: the folder cannot be made or written.
        UnknownRunError: `resume="must"` and there is no such run; a malformed run id.
        FinishedRunError: the run id given is of a run that has ended, and `resume` is not.
        NewerFormatError: the run was begun by a later release.
    """
    durability = durability or os.environ.get("SPOOL_DURABILITY") or "interval"
    if durability not in DURABILITIES:
        raise SpoolError(f"durability {durability!r}: one of {', '.join(DURABILITIES)}")
    if role not in (None, "lead", "worker"):
        raise SpoolError(f"role {role!r}: lead or worker")
    try:
        mask = capture(redact)
        limits = Limits(_size("SPOOL_MAX_BYTES"), _size("SPOOL_RESERVE_BYTES"))
    except ValueError as error:
        raise SpoolError(str(error)) from error
    root = Path(dir or os.environ.get("SPOOL_DIR") or "spool-data").absolute()
    project = project or os.environ.get("SPOOL_PROJECT")
    experiment = experiment or os.environ.get("SPOOL_EXPERIMENT")
    wanted = _wanted_run(root, run_id, project)

    def enter() -> Run:
        return _enter(
            root,
            wanted,
            project,
            experiment,
            config,
            resume,
            role,
            durability,
            mask,
            resumed_from_step,
            may_leave,
            limits,
            strict,
        )

    try:
        try:
            return enter()
        except FileNotFoundError:
            if wanted is None or (root / wanted).is_dir():
                raise
            return enter()  # `spool gc` removed the run between our look and our folder: what there is now decides
    except OSError as error:
        raise NotASpoolError(
            f"{error.filename or root}: cannot write the spool here ({error.strerror or error}); choose another folder with dir= or SPOOL_DIR"
        ) from error


def _size(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _wanted_run(root: Path, run_id: str | None, project: str | None) -> str | None:
    """The id asked for: by argument, or by an environment that does not speak of another project; None to begin a new run."""
    if run_id is not None:
        if not _RUN_ID.fullmatch(run_id):
            raise UnknownRunError(f"run id {run_id!r}: use letters, digits, '.', '_' and '-', at most 200")
        return run_id
    found = inherited("SPOOL_RUN_ID")
    if found is None or not _RUN_ID.fullmatch(found):
        return None
    if project is not None and (root / found / format.RUN_FILE).is_file():
        other = layout.run_info(root / found)["project"] != project
        return None if other else found
    return found


def _enter(
    root: Path,
    wanted: str | None,
    project: str | None,
    experiment: str | None,
    config: Any,
    resume: bool | str,
    role: str | None,
    durability: str,
    mask: Redact | None,
    resumed_from_step: int | None,
    may_leave: bool,
    limits: Limits,
    strict: bool,
) -> Run:
    plain_config = mask_tree(jsonable(config, Notes(), mask or keep)) if config is not None else {}
    begun, origin = None, None
    if wanted is None or not (root / wanted / format.RUN_FILE).is_file():
        if resume == "must":
            raise UnknownRunError(
                f"{root}: no run {wanted or 'named'} to resume; name one with run_id=, or use resume=True"
            )
        origin = environment.describe()
        begun = _mint(
            root, wanted, project or "default", experiment or _script(), plain_config, may_leave, mask or keep, origin
        )
    path = begun or root / str(wanted)
    info = layout.run_info(path)
    continues = None
    if begun is not None:
        attempt, is_lead = dict(info["attempt"]), role != "worker"
    elif role == "lead" or (resume and resume != "never" and role is None and _is_first_rank()):
        attempt, continues = _next_attempt(path)
        is_lead = True
    else:
        if role is None and inherited("SPOOL_ATTEMPT") is None:
            _check_open(path)
        attempt, is_lead = _running_attempt(path, info), False
        if wanted != inherited("SPOOL_RUN_ID"):
            warn(f"joining run {wanted} in {path} as another writer of attempt {attempt['id']}")
    if is_lead and resumed_from_step is not None:
        attempt["resumed_from_step"] = resumed_from_step
    run = Run(
        path,
        info,
        attempt,
        is_lead=is_lead,
        continues=continues,
        durability=durability,
        redact=mask,
        limits=limits,
        strict=strict,
    )
    if is_lead:
        ours = {"attempt": run.attempt, "continues": continues, "resumed_from_step": resumed_from_step}
        run._event("attempt", {"config": plain_config, **(origin or environment.describe())}, exact=ours)
        export(run)
        warn(f"run {run.id} in {path}")
    return run


def _mint(
    root: Path,
    wanted: str | None,
    project: str,
    experiment: str,
    config: Any,
    may_leave: bool,
    mask: Redact,
    origin: Any,
) -> Path | None:
    """Publish run.json, once and only once; None when another process was first: then this one joins."""
    path = root / (wanted or _new_run_id(experiment))
    files.make_folder(path)
    info = {
        "format": format.FORMAT,
        "run": path.name,
        "project": clean_text(project, Notes()),
        "experiment": clean_text(experiment, Notes()),
        "created_ns": time.time_ns(),
        "attempt": {"id": _attempt_id(1), "number": 1},
        "may_leave": may_leave,
        "config": config,
        **jsonable(origin, Notes(), mask),
    }
    try:
        files.publish_file(path / format.RUN_FILE, format.checked_json(info))
    except FileExistsError:
        return None
    return path


def _next_attempt(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attempt after the latest, and what it continues: every writer's position as found now."""
    latest = layout.attempts(path)
    number = latest[-1].number + 1 if latest else 2
    positions = {writer.name: layout.last(writer).seq for writer in layout.writers(path)}
    continues = {"attempt": latest[-1].id if latest else None, "positions": positions}
    return {"id": _attempt_id(number), "number": number}, continues


def _running_attempt(path: Path, info: dict[str, Any]) -> dict[str, Any]:
    """The attempt to join: the one the parent process named, or the latest on disk."""
    named = inherited("SPOOL_ATTEMPT")
    if named and inherited("SPOOL_RUN_ID") == path.name and re.fullmatch(r"\d+-[0-9a-f]{6}", named):
        return {"id": named, "number": int(named.split("-")[0])}
    latest = layout.attempts(path)
    return {"id": latest[-1].id, "number": latest[-1].number} if latest else dict(info["attempt"])


def _is_first_rank() -> bool:
    """Of the processes of one launch (torchrun, srun) all ask to resume, and one begins the attempt."""
    return os.environ.get("RANK", "0") == "0"


def _check_open(path: Path) -> None:
    """Refuse to write into a run that has ended by its own word: the same id given again is no sign that this is meant."""
    latest = layout.attempts(path)[-1:]
    for writer in layout.writers(path):
        header, end = layout.header(writer), layout.last(writer).end
        if header.get("lead") and [header["attempt"]["id"]] == [one.id for one in latest] and end and "ts" in end:
            raise FinishedRunError(
                f"{path}: this run is {end['status']}; resume=True continues it as its next attempt, "
                "another run_id (or no SPOOL_RUN_ID) begins a new run"
            )


def _attempt_id(number: int) -> str:
    return f"{number}-{os.urandom(3).hex()}"


def _new_run_id(experiment: str) -> str:
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{moment}-{slug(experiment)}-{os.urandom(3).hex()}"


def slug(name: str) -> str:
    """ASCII for a folder name, at most 40 characters; with a hash where anything was lost, so that names stay distinct."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", ascii_name).strip("-.") or "run"
    if plain == name and len(plain) <= _MAX_SLUG:
        return plain
    return f"{plain[: _MAX_SLUG - 7].rstrip('-.')}-{sha256(name.encode(errors='replace')).hexdigest()[:6]}"


def _script() -> str:
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return name if name not in ("", "-c", "__main__") else "run"
