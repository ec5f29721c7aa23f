"""The run as a user's process sees it: `init` and what can be logged.

A call becomes records in the caller's thread and is in the kernel when it returns. Nothing here raises for data.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from spool import files, format, histogram, layout, process
from spool.errors import WriteError
from spool.process import warn
from spool.record import Notes, Redact, ask, clean_text, generation_body, jsonable, keep, shown, step_number
from spool.redact import Patterns
from spool.room import Limits
from spool.span import Span
from spool.writer import Writer

STATUSES = ("finished", "failed", "preempted", "killed")
_STEPS = range(-(2**63), 2**63)
_MAX_HASHED_BYTES = 1 << 30
_REJOIN_EACH_S = 10.0
_OF_SPAN = ("trace_id", "span_id", "parent_id", "start", "end")
"""Made by us, and never masked: a pattern that hits an id would tear the tree apart."""


class Run:
    """One writer's hold on a run. Threads share it; a forked child becomes a writer of its own at its first record.

    Attributes: `id`, `path` (the run's folder), `project`, `experiment`, `attempt`, `is_lead`.
    """

    def __init__(
        self,
        path: Path,
        info: dict[str, Any],
        attempt: dict[str, Any],
        *,
        is_lead: bool,
        continues: dict[str, Any] | None,
        durability: str,
        redact: Redact | None,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> None:
        """Create this process's writer in the run. Durable when this returns; raises OSError when it cannot be."""
        self.id = path.name
        self.path = path
        self.project: str = info["project"]
        self.experiment: str = info["experiment"]
        self.attempt: str = attempt["id"]
        self.is_lead = is_lead
        self._attempt = attempt
        self._durability = durability
        self._limits = limits
        self._redact = redact or keep
        self._strict = strict
        self._status: str | None = None
        self._said: set[str] = set()
        self._untaken: dict[str, int] = {}
        self._bad_steps = 0
        self._masked = 0
        self._writer: Writer | None = self._open_writer(continues)
        self._forked = self._writer
        self._rejoining = threading.RLock()
        self._rejoin_after_s = 0.0
        process.opened(self)

    def _open_writer(self, continues: dict[str, Any] | None = None) -> Writer:
        header: dict[str, Any] = {"run": self.id, "attempt": self._attempt, "lead": self.is_lead}
        if continues:
            header["continues"] = continues
        return Writer(self.path / _writer_id(), header, self._durability, self._limits, keeps=not self._strict)

    # --- what can be logged

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        """Record metrics. In the kernel when this returns: a kill loses nothing; for a power cut see `durability`.

        Values: Python, numpy and torch scalars, Decimal, bool, text; nested dicts are joined with "/"; anything else is
        kept as its repr, said once and counted. A step that is no integer is kept as null and counted.
        """
        ts = time.time_ns()
        writer = self._writer or self._rejoin()
        body = format.fast_metrics(data)
        if type(step) is not int or step not in _STEPS:
            step = self._step(step)
        error = writer.append(ts, step, [body] if body is not None else self._careful_metrics(data))
        if error is not None and self._strict:
            raise WriteError(f"{writer.path}: could not write ({error})") from error

    def _careful_metrics(self, data: Any) -> list[bytes]:
        notes = Notes()
        bodies = format.metric_bodies(data, notes, self._redact)
        self._say(notes)
        return bodies

    def log_generations(self, step: int | None = None, rows: Iterable[Any] = (), split: str = "train") -> None:
        """Record generations, one record a row: input, output, label, score; every other key goes into `extra`."""
        ts = time.time_ns()
        bodies = []
        for position, row in enumerate(rows):
            notes = Notes()
            body = generation_body(row, position, split, notes, self._redact)
            bodies.append(format.generation_body(body, notes.replaced))
            self._say(notes)
        if bodies:
            self._append(ts, step, bodies)

    def span(
        self,
        name: str,
        type: str = "CHAIN",
        step: int | None = None,
        *,
        sample_index: int | None = None,
        rollout_n: int | None = None,
        validate: bool | None = None,
        inputs: object = None,
        attributes: dict[str, Any] | None = None,
        parent: Span | None = None,
    ) -> Span:
        """An operation of an agent, to use with `with`; nested spans inherit step, sample_index, rollout_n and validate."""
        indices = {"sample_index": sample_index, "rollout_n": rollout_n, "validate": validate}
        given = {key: value for key, value in indices.items() if value is not None}
        return Span(self._record_span, name, type, step, parent, inputs, attributes, given)

    def _record_span(self, span: Span, body: dict[str, Any]) -> None:
        ts = time.time_ns()
        notes = Notes()
        plain = {key: value if key in _OF_SPAN else jsonable(value, notes, self._redact) for key, value in body.items()}
        for key in ("name", "type", "status", "message"):
            if key in plain and not isinstance(plain[key], str):
                plain[key] = str(plain[key])
        for key in ("sample_index", "rollout_n"):
            if key in plain:
                plain[key] = step_number(body[key])[0]
        if "validate" in plain:
            plain["validate"] = bool(plain["validate"])
        self._say(notes)
        self._append(ts, span.step, [format.span_body(plain, notes.replaced)])

    def log_histogram(self, name: str, values: object, step: int | None = None) -> None:
        """Record the distribution of an array or tensor in 64 bins, with count, sum, min, max and non-finite count."""
        summary, known = ask(lambda: histogram.summarize(values))
        if not known:
            self._warn_once(f"histogram {shown(name)}: not an array of numbers; kept as text")
            summary = {"text": shown(values)}
        self._event("histogram", {"name": name, **summary}, step)

    def tag(self, /, **tags: object) -> None:
        """Label the run; a later value replaces an earlier one."""
        self._event("tag", tags)

    def save(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Copy a file, or every file below a folder, into the run. Durable when this returns; equal contents are kept once.

        The spool itself is left out where it lies below the folder.
        """
        try:
            source = Path(path)
            is_folder = source.is_dir()
            below = (
                one for one in source.rglob("*") if one.is_file() and self.path.parent not in one.absolute().parents
            )
            found = sorted(below) if is_folder else [source]
        except (OSError, ValueError, TypeError) as error:  # no path at all, or none that this system takes
            self._refuse(f"{shown(path)}: not saved ({error})", error)
            return
        given = None if name is None else str(name)
        for file in found:
            try:
                sha256, size = files.publish_content(file, self.path / format.FILES_FOLDER)
            except (OSError, ValueError) as error:
                self._refuse(f"{clean_text(str(file), Notes())}: not saved ({error})", error)
                continue
            below_name = str(Path(given or source.name) / file.relative_to(source)) if is_folder else given or file.name
            self._event("file", {"name": below_name, "size": size}, exact={"sha256": sha256})

    def log_input(self, path: str | os.PathLike[str], role: str = "data") -> None:
        """Record which data or model was used: path, size, rows (Parquet, JSONL), sha256 (up to 1 GiB). Nothing is copied."""
        body: dict[str, Any] = {"path": path, "role": role}
        try:
            source = Path(path)
            body["path"] = str(source.absolute())
            inside = [one for one in source.rglob("*") if one.is_file()] if source.is_dir() else [source]
            body["size"] = sum(one.stat().st_size for one in inside)
            body["files"] = len(inside)
            if not source.is_dir() and body["size"] <= _MAX_HASHED_BYTES:
                body["sha256"] = files.sha256_file(source)
                body["rows"] = _count_rows(source)
        except (OSError, ValueError, TypeError) as error:
            self._refuse(f"{shown(path)}: cannot describe this input ({error})", error)
            body["error"] = str(error)
        self._event("input", body, exact={"sha256": body["sha256"]} if "sha256" in body else None)

    def flush(self) -> None:
        """Everything logged so far survives a power cut when this returns; call it before saving a checkpoint.

        A kill needs no flush. Where the disk fails it warns, or raises WriteError with strict=True.
        """
        writer = self._writer
        if writer is None or self._status is not None:
            return
        try:
            writer.sync()
        except OSError as error:
            self._refuse(f"{writer.path}: not synced ({error})", error)

    def finish(self, status: str = "finished") -> None:
        """Record the end, seal what is left, and print the counts and the command that replays the run. Idempotent.

        `status`: finished, failed, preempted or killed. Only the lead writer's finish ends the run; any other process's
        ends its own part. Records after it are refused with a warning.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: one of {', '.join(STATUSES)}")
        writer = self._writer
        if self._status is not None or writer is None:
            return
        self._status = status
        body: dict[str, Any] = {"status": status, "lead": self.is_lead, "counts": self._counts()}
        try:
            if self.is_lead:
                body["roster"] = self._roster(writer)
            error = writer.close(time.time_ns(), [format.event_body("finish", jsonable(body, Notes()))])
        except (
            BaseException
        ):  # Ctrl-C: where the end is not recorded yet, a later finish, or the exit of the script, does it
            if not writer.is_ended:
                self._status = None
            raise
        process.closed(self)
        if self.is_lead:
            lost = f", {writer.lost} lost to a full or failing disk" if writer.lost else ""
            warn(f"{status}, {writer.seq} records by this process in {self.path}{lost}")
            warn(f"to replay: spool-sync {self.path.parent} --to mlflow --run {self.id}")
        if error is not None and self._strict:
            raise WriteError(f"{writer.path}: could not write the finish record ({error})") from error

    def _counts(self) -> dict[str, Any]:
        self._masked = self._redact.masked if isinstance(self._redact, Patterns) else 0
        counts = {"untaken": self._untaken, "bad_steps": self._bad_steps, "masked": self._masked}
        return {key: value for key, value in counts.items() if value}

    def _roster(self, own: Writer) -> dict[str, Any]:
        """Every writer of the run and how far it had got: what a reader of a copy needs to know that it has all."""
        roster: dict[str, Any] = {}
        with suppress(OSError):  # the folder is gone, or the disk: the finish is tried all the same
            for path in layout.writers(self.path):
                roster[path.name] = {"seq": layout.last(path).seq}
        return {**roster, own.id: own.head()}

    # --- how

    def _event(
        self, kind: str, body: dict[str, Any], step: int | None = None, exact: dict[str, Any] | None = None
    ) -> None:
        """Record an event; what is `exact` (our own ids and hashes) is never masked."""
        ts = time.time_ns()
        notes = Notes()
        plain = {**jsonable(body, notes, self._redact), **(exact or {})}
        self._say(notes)
        self._append(ts, step, [format.event_body(kind, plain, notes.replaced)])

    def _append(self, ts: int, step: object, bodies: list[bytes]) -> None:
        writer = self._writer or self._rejoin()
        error = writer.append(ts, self._step(step), bodies)
        if error is not None and self._strict:
            raise WriteError(f"{writer.path}: could not write ({error})") from error

    def _rejoin(self) -> Writer:
        """The first record of a forked child: it becomes a new writer of the same attempt, and cannot finish the run.

        Where the disk does not let it, its records are counted, and it tries again at times.
        """
        with self._rejoining:
            now_s = time.monotonic()
            if self._writer is None and now_s >= self._rejoin_after_s:
                self._rejoin_after_s = now_s + _REJOIN_EACH_S  # first: a `__del__` may log while the journal is begun
                try:
                    self._writer = self._open_writer()
                except OSError as error:
                    self._forked.refuse(f"this forked process cannot begin a journal of its own: {error}")
                else:
                    self._writer.take_losses(self._forked)
            return self._writer or self._forked

    def _step(self, step: object) -> int | None:
        number, taken = step_number(step)
        if not taken:
            self._bad_steps += 1
            self._warn_once(f"step {shown(step)} is no 64-bit integer: the record is kept without a step")
        return number

    def _say(self, notes: Notes) -> None:
        for name in notes.untaken:
            self._untaken[name] = self._untaken.get(name, 0) + 1
            self._warn_once(f"a value of type {name} is kept as its repr")
        if notes.replaced:
            self._warn_once("a text held lone surrogates, which UTF-8 cannot: stored as U+FFFD")

    def _refuse(self, message: str, error: Exception) -> None:
        if self._strict:
            raise WriteError(message) from error
        warn(message)

    def _warn_once(self, message: str) -> None:
        if message not in self._said and len(self._said) < 100:
            self._said.add(message)
            warn(message)

    def after_fork(self) -> None:
        """In the child of a fork: let go of the parent's writer."""
        self.is_lead = False
        if self._writer is not None:
            self._writer.abandon()
            self._forked, self._writer = self._writer, None
            self._rejoining, self._rejoin_after_s = threading.RLock(), 0.0

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.finish("finished" if ended_well else "failed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a run belongs to its process; call spool.init() in the other one, which joins the same run")

    def __repr__(self) -> str:
        return f"<spool run {self.id} in {self.path.parent}>"


def _count_rows(path: Path) -> int | None:
    if path.suffix == ".parquet":
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        with suppress(ArrowInvalid), ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    return None


def _writer_id() -> str:
    """`<host>-<pid>-<8 hex>`: readable, and random enough for one host name in two containers."""
    import socket

    host = "".join(one if one.isascii() and one.isalnum() else "-" for one in socket.gethostname())[:40]
    return f"{host.strip('-') or 'host'}-{os.getpid()}-{os.urandom(4).hex()}"
