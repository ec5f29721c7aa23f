"""MLflow 3: a tracking server over HTTP, or a database through MLflow's own store. With `sync.bulk`, the only importer of `mlflow`.

What is idempotent there, and therefore all that is used: a run found by its tag `spool.run_id`; metrics, whose primary key is
(key, time in ms, step, value); params and tags; files under names that depend on their rows alone; spans under their own ids.
The cursor is a tag per writer, `spool.cursor.<writer>`, set in the request that holds the data or after it.
"""

import gzip
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urlsplit

# Read by MLflow while it is imported: no telemetry, no bars, and no retries of its own (245 s a call where nothing listens).
os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}
os.environ |= {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "MLFLOW_CONFIGURE_LOGGING": "false"}
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")

import mlflow
import pyarrow as pa
import pyarrow.compute as pc
import requests
import urllib3
from mlflow.entities import Param, Run, RunStatus, RunTag, Span, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.db import utils as database
from mlflow.tracking._tracking_service.utils import _get_store
from mlflow.utils import request_utils
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from sync import bulk, document, fresh, name, otlp
from sync.batch import Batch, dicts
from sync.destinations import Destination, Proof
from sync.errors import RefusedError, RejectedRecordError, SetupError, SyncError, TryAgainError
from sync.rest import Rest
from sync.series import Histories, Names, Point, Series, points
from sync.shelf import Shelf, holds_content
from sync.state import RunState

logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # its errors reach us as exceptions; it also prints tracebacks
logging.getLogger("alembic").setLevel(logging.CRITICAL)
database.MAX_RETRY_COUNT = 4  # 1 s of back-off where a database does not answer, not 100 s


class _Retry(urllib3.Retry):
    """MLflow raises where a server answers "later", and drops the answer: of Retry-After, this keeps how long that is."""

    def increment(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().increment(*arguments, **options)
        except urllib3.exceptions.MaxRetryError as error:
            response = options.get("response")
            with suppress(urllib3.exceptions.InvalidHeader):
                error.after_s = None if response is None else self.get_retry_after(response)  # type: ignore[attr-defined]
            raise


request_utils.Retry = _Retry  # type: ignore[attr-defined]  # no setting reaches it

_PER_REQUEST = 100
_KEY, _CURSOR, _FILE = "spool.key.", "spool.cursor.", "spool.file."
_STATUS = {
    "running": "RUNNING",
    "unknown": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "killed": "KILLED",
}


class MlflowDestination(Destination):
    label = "MLflow"
    rewind = "drop"
    rows_per_request = MappingProxyType({"metrics": 999, "generations": 1000, "spans": 500, "events": 2000})

    @classmethod
    def is_elsewhere(cls, place: str | None) -> bool:
        parts = _parts(place or mlflow.get_tracking_uri())
        return parts.scheme.split("+")[0] != "sqlite" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}

    @classmethod
    def parallel(cls, place: str | None) -> int:
        is_file = _parts(place or mlflow.get_tracking_uri()).scheme.split("+")[0] == "sqlite"
        return 1 if is_file else 4  # one writer at a time has the file

    @classmethod
    def connect(cls, place: str | None) -> str:
        if place:
            mlflow.set_tracking_uri(place)  # artifacts of a server are found by it
        uri = mlflow.get_tracking_uri()
        parts = _parts(uri)
        shown = uri.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc else uri
        scheme = parts.scheme.split("+")[0]
        if scheme not in {"http", "https", "sqlite", "postgresql", "mysql", "mssql"}:
            raise SetupError(
                f"MLFLOW_TRACKING_URI is {shown}: MLflow keeps traces in a server or a database only; "
                "set it to http://…, sqlite:///mlflow.db or another database"
            )
        if scheme == "sqlite" and (parts.path in {"", "/"} or ":memory:" in uri):
            raise SetupError(f"MLFLOW_TRACKING_URI is {shown}: a database in memory, gone when this ends; name a file")
        try:
            with _answers(shown):
                if scheme.startswith("http"):
                    http_request(get_default_host_creds(uri), "/health", "GET", timeout=5)
                if scheme == "sqlite":
                    _make_database(uri)
                _get_store()
        except ModuleNotFoundError as error:
            raise SetupError(f"{shown} needs the package '{error.name}', which is not installed") from error
        return shown

    def __init__(self, state: RunState, place: str | None) -> None:
        self._state = state
        self._uri = mlflow.get_tracking_uri()
        self._store = _get_store()
        with _answers(self._uri):
            self._series = self._way()
        self.rows_per_request = MappingProxyType({**self.rows_per_request, "metrics": self._series.rows})

    def _way(self) -> "Series":
        """How metrics get there and back."""
        if self._uri.startswith("http"):
            return Rest(self._uri)
        return bulk.of(self._store) or bulk.Ordinary(self._store)

    # --- the run

    def find(self) -> str | None:
        with _answers(self._uri):
            experiment = self._store.get_experiment_by_name(self._state.project)
            run = self._find(experiment and experiment.experiment_id)
        if run is None or run.info.lifecycle_stage != "active":
            return None
        self._enter(run)
        return self._run_id

    def open(self) -> str:
        with _answers(self._uri):
            experiment = self._store.get_experiment_by_name(self._state.project)
            if experiment is not None and experiment.lifecycle_stage != "active":
                raise RefusedError(
                    f"experiment '{self._state.project}' is deleted in MLflow; restore it there "
                    f"(mlflow experiments restore --experiment-id {experiment.experiment_id}) or give another --project"
                )
            here = experiment and experiment.experiment_id
            run = self._find(here)
            if run is None:
                here, created = self._create(here)
                run = self._find(here)  # not what `create` answered: another sync may have made one at the same moment
                if run is not None and run.info.run_id != created:
                    self._store.delete_run(created)
            if run is None:
                raise TryAgainError(f"{self._uri}: the run just created is not listed yet")
            if self._state.is_renamed and run.info.experiment_id != here:
                raise RefusedError(
                    f"run {self._state.run_id} is in MLflow already (run {run.info.run_id} of experiment {run.info.experiment_id}), "
                    "and a trace belongs to one experiment there; sync it without --project, or into another MLflow"
                )
            if run.info.lifecycle_stage != "active":
                raise RefusedError(
                    f"run {self._state.run_id} was deleted in MLflow and is not brought back; restore it there "
                    f"(mlflow runs restore --run-id {run.info.run_id}), or give --again to replay it into a new run"
                )
        self._enter(run)
        return self._run_id

    def _enter(self, run: Run) -> None:
        self._run_id, self._experiment_id = str(run.info.run_id), str(run.info.experiment_id)
        self._shelf = Shelf(get_artifact_repository(run.info.artifact_uri))
        self._tags = dict(run.data.tags)
        claims = {key[len(_KEY) :]: text for key, text in self._tags.items() if key.startswith(_KEY)}
        self._names = Names(run.data.metrics, claims)
        self._cursor = self.held()
        self._is_behind = False

    def _find(self, here: str | None) -> Run | None:
        """The run by its tag: an active one before a deleted one, in experiment `here` before elsewhere, the oldest first;
        no deleted one where it is to be replayed again.
        """
        experiments, page = [here] if here else [], None
        while page is None or page.token:
            page = self._store.search_experiments(ViewType.ALL, max_results=1000, page_token=page and page.token)
            experiments += [experiment.experiment_id for experiment in page]
        wanted = f"tags.`spool.run_id` = '{self._state.run_id}'"
        view = ViewType.ACTIVE_ONLY if self._state.is_again else ViewType.ALL
        runs = self._store.search_runs(experiments, wanted, view, max_results=100) if experiments else []
        infos = [run.info for run in runs]
        twins = sorted(one.run_id for one in infos if one.lifecycle_stage == "active")
        self.conflicts = (
            [f"MLflow runs {', '.join(twins)} are all this run; delete all but one"] if len(twins) > 1 else []
        )
        order = [
            (one.lifecycle_stage != "active", one.experiment_id != here, one.start_time, one.run_id) for one in infos
        ]
        return runs[order.index(min(order))] if runs else None

    def _create(self, experiment_id: str | None) -> tuple[str, str]:
        """(experiment, run) as created."""
        state = self._state
        if experiment_id is None:
            try:
                experiment_id = self._store.create_experiment(state.project)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another sync made it since we asked
                    raise
                experiment_id = self._store.get_experiment_by_name(state.project).experiment_id
        user, start_ms = state.user or "unknown", state.created_ns // 1_000_000
        tags = [RunTag("spool.run_id", state.run_id), RunTag("mlflow.user", user)]
        created = self._store.create_run(experiment_id, user, start_ms, tags, state.experiment)
        return str(experiment_id), str(created.info.run_id)

    def held(self) -> dict[str, dict[str, int]]:
        cursor = {}
        for key, text in self._tags.items():
            if key.startswith(_CURSOR):
                try:
                    cursor[key[len(_CURSOR) :]] = {str(table): int(seq) for table, seq in json.loads(text).items()}
                except (ValueError, AttributeError, TypeError):
                    continue  # edited by hand: the writer is replayed from the start, which doubles nothing
        return cursor

    # --- records

    def write(self, batch: Batch) -> None:
        points: list[Point] = []
        with _answers(self._uri):
            if batch.table == "spans":
                rows = batch.dicts()
                self._write_spans([row for row in rows if row["end"] is not None], is_again=batch.cursor is None)
            if batch.table == "events":
                self._write_files([json.loads(row["body"]) for row in batch.dicts() if row["kind"] == "file"])
            self._shelf.add(batch.table, document.documented(batch.table, batch.rows))
            if batch.table == "metrics":
                points = self._claimed(batch.rows.filter(batch.rows["value"].is_valid()))
            self.pass_over(batch)
            tags = {} if batch.cursor is None else dict([self._cursor_tag(batch.writer_id)])
            if points or tags:
                self._series.log(self._run_id, points, tags)

    def pass_over(self, batch: Batch) -> None:
        if batch.cursor is not None:
            seqs = self._cursor.setdefault(batch.writer_id, {})
            seqs[batch.table] = max(batch.cursor, seqs.get(batch.table, 0))

    def _cursor_tag(self, writer_id: str) -> tuple[str, str]:
        return f"{_CURSOR}{writer_id}", json.dumps(self._cursor[writer_id], sort_keys=True)

    def _claimed(self, rows: pa.Table) -> list[Point]:
        """These metrics as they are sent, once the names they have here are theirs for good."""
        claims = self._names.claim(rows["key"].unique().to_pylist())
        marks = {f"{_KEY}{mapped}": key for mapped, key in claims.items()}
        points = self.points(rows)
        for at in pc.indices_nonzero(pc.is_inf(rows["value"])).to_pylist():
            point, value = points[at], rows["value"][at].as_py()
            marks[f"spool.inf.{point.name}"] = f"{value} at step {point.step}, stored here as {point.value}"
        self._set_tags(marks)
        return points

    def points(self, rows: pa.Table) -> list[Point]:
        """Metrics that have a value, as they are held here."""
        return points(rows, self._names.of)

    def _set_tags(self, wanted: dict[str, str]) -> None:
        changed = [(key, text) for key, text in wanted.items() if self._tags.get(key) != text]
        for at in range(0, len(changed), _PER_REQUEST):
            part = changed[at : at + _PER_REQUEST]
            self._store.log_batch(self._run_id, [], [], [RunTag(key, text) for key, text in part])
            self._tags |= dict(part)

    def _write_files(self, bodies: list[dict[str, Any]]) -> None:
        for body in bodies:
            source = self._state.files / body["sha256"]
            if not source.is_file():
                raise RejectedRecordError(f"the file saved as '{body['name']}' is missing in the spool: {source}")
            if not holds_content(source, body["sha256"]):
                raise RejectedRecordError(f"{source}: not the content that was saved as '{body['name']}'")
            path = self._file_path(body)
            self._set_tags({f"{_FILE}{path.removeprefix('files/')}": body["sha256"]})
            self._shelf.put(path, source)

    def _file_path(self, body: dict[str, Any]) -> str:
        """Where a saved file goes; another content under the same name gets a name of its own."""
        path = PurePosixPath(name.tracker_key(body["name"]))
        mark = f"_{body['sha256'][:8]}"
        claimed = {PurePosixPath(key[len(_FILE) :]) for key in self._tags if key.startswith(_FILE)}
        if above := [parent for parent in path.parents if parent in claimed]:  # a file there cannot be a folder as well
            path = PurePosixPath(f"{above[0]}{mark}") / path.relative_to(above[0])
        elif any(path in other.parents for other in claimed) or self._is_other(path, body["sha256"]):
            path = path.with_name(f"{path.stem}{mark}{path.suffix}")
        return f"files/{path}"

    def _is_other(self, path: PurePosixPath, sha256: str) -> bool:
        return self._tags.get(f"{_FILE}{path}", sha256) != sha256

    def _write_spans(self, rows: list[dict[str, Any]], *, is_again: bool) -> None:
        if not rows:
            return
        spans = [otlp.span(row, self._trace_tags(row)) for row in rows]
        if self._uri.startswith("http"):
            request = ExportTraceServiceRequest()
            request.resource_spans.add().scope_spans.add().spans.extend(spans)
            self._post(gzip.compress(request.SerializeToString(), 1))
        else:
            self._store.log_spans(self._experiment_id, [Span.from_otel_proto(span) for span in spans])
        traces = {row["trace_id"]: row for row in rows}
        ids = [f"tr-{trace_id}" for trace_id in traces]
        for at in range(0, len(ids), _PER_REQUEST):
            self._store.link_traces_to_run(ids[at : at + _PER_REQUEST], self._run_id)
        if is_again:  # MLflow takes a trace's tags from its root span; where none is recorded, they are set one by one
            for trace_id in traces.keys() - {row["trace_id"] for row in rows if row["parent_id"] is None}:
                for key, text in self._trace_tags(traces[trace_id]).items():
                    self._store.set_trace_tag(f"tr-{trace_id}", key, text)

    def _trace_tags(self, row: dict[str, Any]) -> dict[str, str]:
        """verl's tags of a trace, as texts, and whose it is."""
        tags = {key: str(row[key]) for key in ("step", "sample_index", "rollout_n", "validate") if row[key] is not None}
        return tags | {"experiment_name": self._state.experiment, "spool.run_id": self._state.run_id}

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        headers["X-MLflow-Experiment-Id"] = self._experiment_id
        response = http_request(
            get_default_host_creds(self._uri), "/v1/traces", "POST", data=body, extra_headers=headers
        )
        if response.status_code != 200:
            kind = RejectedRecordError if response.status_code in {400, 413, 422} else RefusedError
            raise kind(f"MLflow answers {response.status_code} to traces: {response.text[:300]}")

    # --- the run as a whole

    def settle(self) -> list[str]:
        state = self._state
        with _answers(self._uri):
            run = self._store.get_run(self._run_id)
            self._tags = dict(run.data.tags)
            params = [Param(key, text) for key, text in self._params().items() if key not in run.data.params]
            for at in range(0, len(params), _PER_REQUEST):
                self._store.log_batch(self._run_id, [], params[at : at + _PER_REQUEST], [])
            config = json.dumps(state.config, indent=2, ensure_ascii=False).encode()
            if state.config and self._shelf.size("config.json") != len(config):
                self._shelf.put("config.json", config)
            self._is_behind = any(
                seq > state.positions.get(writer, 0) for writer, seqs in self.held().items() for seq in seqs.values()
            )
            self._set_tags(self._wanted_tags())
            if not self._has_status(run):
                wanted = RunStatus.from_string(_STATUS[state.status])
                self._store.update_run_info(self._run_id, wanted, _milliseconds(state.end_ns), None)
        notes = [
            f"'{key}' is called '{mapped}' in MLflow, where '{name.tracker_key(key)}' is another metric"
            for mapped, key in self._names.suffixed().items()
        ]
        if self._is_behind:
            notes.append(
                "MLflow has been given more of this run than this copy of the spool holds: its status and tags stay"
            )
        changed = [key for key, text in self._params().items() if run.data.params.get(key, text) != text]
        if changed:
            notes.append(
                f"params {', '.join(changed[:5])} have changed: MLflow keeps the first value, config.json the last"
            )
        return notes

    def unsettled(self) -> list[str]:
        with _answers(self._uri):
            run = self._store.get_run(self._run_id)
            missing = [f"tag {key}" for key, text in self._wanted_tags().items() if run.data.tags.get(key) != text]
        missing += [f"param {key}" for key in self._params() if key not in run.data.params]
        if not self._has_status(run):
            missing.append(f"status {self._state.status} (it says {run.info.status})")
        return missing

    def _has_status(self, run: Run) -> bool:
        if self._is_behind:
            return True
        if self._state.status == "unknown" and run.data.tags.get("spool.attempts") == str(self._state.attempts):
            return True  # whoever synced this attempt before may have known more
        end_ms = _milliseconds(self._state.end_ns)
        return run.info.status == _STATUS[self._state.status] and (end_ms is None or run.info.end_time == end_ms)

    def _params(self) -> dict[str, str]:
        flat = dict(name.flatten(self._state.config))
        return {mapped: _text(flat[key], 6000) for key, mapped in name.distinct(flat).items()}

    def _wanted_tags(self) -> dict[str, str]:
        state = self._state
        ours = {"spool.run_id": state.run_id, "spool.host": state.host, "spool.attempts": str(state.attempts)}
        ours |= {
            "mlflow.user": state.user,
            "mlflow.source.name": state.command,
            "mlflow.source.git.commit": state.commit,
        }
        reserved = ("spool.", "mlflow.")
        theirs = {f"user.{key}" if key.startswith(reserved) else key: text for key, text in state.tags.items()}
        tags = {mapped: theirs[key] for key, mapped in name.distinct(theirs).items()}
        tags |= {key: text for key, text in ours.items() if text is not None}
        if self._is_behind:  # what an older copy knows must not replace what a later one has said
            tags = {key: text for key, text in tags.items() if key not in self._tags}
        tags |= dict(map(self._cursor_tag, self._cursor))
        if tables := self._tables():
            tags["mlflow.loggedArtifacts"] = tables
        return {key: _text(text, 8000) for key, text in tags.items()}

    def _tables(self) -> str:
        """The latest generation tables, for MLflow's table view: it reads this tag, which holds 8000 characters."""
        paths = [path for split in self._shelf.listing("generations") for path in self._shelf.listing(split)]
        latest = sorted(paths, key=lambda path: PurePosixPath(path).name)[-50:]
        while latest and len(text := json.dumps([{"path": path, "type": "table"} for path in latest])) > 7900:
            latest = latest[1:]
        return text if latest else ""

    # --- the proof

    def proof(self) -> "MlflowProof":
        self._shelf.forget()
        with _answers(self._uri):
            return MlflowProof(self)

    def retract(self) -> list[str]:
        with _answers(self._uri):
            ids = [info.trace_id for info in self._traces()]
            for at in range(0, len(ids), _PER_REQUEST):
                self._store.delete_traces(self._experiment_id, trace_ids=ids[at : at + _PER_REQUEST])
            self._store.delete_run(self._run_id)
        return [
            f"MLflow run {self._run_id} of experiment {self._experiment_id} is deleted, and {len(ids)} traces",
            f"mlflow runs restore --run-id {self._run_id} brings the run back, mlflow gc removes it and its files for good",
        ]

    def _traces(self) -> Iterator[Any]:
        """What MLflow says of every trace of the run, without spans."""
        page: str | None = ""
        while page is not None:
            infos, page = self._trace_page(page or None)
            yield from infos

    def _trace_page(self, page: str | None) -> tuple[list[Any], str | None]:
        """(some traces, the page after them or None)."""
        infos, after = self._store.search_traces(
            locations=[self._experiment_id],
            filter_string=f"attributes.run_id = '{self._run_id}'",
            max_results=_PER_REQUEST,
            page_token=page,
        )
        return list(infos), after or None


class MlflowProof(Proof):
    def __init__(self, destination: MlflowDestination) -> None:
        self._of = destination
        self._histories = Histories(destination._store.get_run(destination._run_id).data.metrics, self._history)
        self._texts_held = 0
        self._spans: set[tuple[str, str, int | None]] = set()
        self._tagged: set[str] = set()
        self._page: str | None = ""
        """Of the traces that are still to be listed; None when all are."""
        self._listed: list[str] = []
        """Traces whose spans are still to be fetched."""

    def _ask_traces(self) -> None:
        """Fetch all spans of the run, once; called again after a failure, it goes on where it was."""
        while self._page is not None:
            infos, page = self._of._trace_page(self._page or None)
            self._tagged.update(info.trace_id for info in infos if "experiment_name" in info.tags)
            self._listed += [info.trace_id for info in infos]
            self._page = page
        while self._listed:
            for trace in self._of._store.batch_get_traces(self._listed[:20]):
                self._spans.update((trace.info.trace_id, one.span_id, one.end_time_ns) for one in trace.data.spans)
            del self._listed[:20]

    def _history(self, mapped: str) -> Iterable[Point]:
        return self._of._series.history(self._of._run_id, mapped)

    def holds(self, batch: Batch) -> list[bool]:
        with _answers(self._of._uri):
            self._of._shelf.ask(batch.table, document.documented(batch.table, batch.rows))
            if batch.table == "metrics":
                return self._hold_metrics(batch.rows)
            if batch.table == "spans":
                self._ask_traces()
            check = {"spans": self._holds_span, "events": self._holds_event, "generations": self._holds_row}
            return list(map(check[batch.table], batch.dicts()))

    def _holds_row(self, row: dict[str, Any]) -> bool:
        return self._of._shelf.holds("generations", row)

    def _hold_metrics(self, rows: pa.Table) -> list[bool]:
        """A number must be in its series; what a double cannot say, in its document."""
        in_series = iter(self._histories.hold(self._of.points(rows.filter(rows["value"].is_valid()))))
        found = [next(in_series) if has_value else True for has_value in rows["value"].is_valid().to_pylist()]
        for at in pc.indices_nonzero(document.are_documented("metrics", rows)).to_pylist():
            [row] = dicts(rows.slice(at, 1))
            is_there = self._of._shelf.holds("metrics", row)
            found[at] = found[at] and is_there
            self._texts_held += is_there and row["value"] is None
        return found

    def _holds_span(self, row: dict[str, Any]) -> bool:
        trace = f"tr-{row['trace_id']}"
        is_tagged = trace in self._tagged or self._of._state.status in {"running", "unknown"}
        return is_tagged and (trace, row["span_id"], row["end"]) in self._spans

    def _holds_event(self, row: dict[str, Any]) -> bool:
        if not self._of._shelf.holds("events", row):
            return False
        body = json.loads(row["body"]) if row["kind"] == "file" else None
        return body is None or self._of._shelf.size(self._of._file_path(body)) == body["size"]

    def indistinct(self, table: str) -> int:
        return self._histories.indistinct if table == "metrics" else 0

    def count(self, table: str) -> int:
        with _answers(self._of._uri):
            if table == "spans":
                self._ask_traces()
                return len(self._spans)
            return self._texts_held + self._histories.count() if table == "metrics" else self._of._shelf.count(table)


def _make_database(uri: str) -> None:
    """Make a missing SQLite file with MLflow's tables in one step: MLflow's migrations, run by two at once, leave it broken."""
    url = make_url(uri)
    if not url.database or url.database.startswith("file:"):
        return
    path = Path(url.database).absolute()

    def fill(aside: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # as MLflow does
        store = _get_store(store_uri=url.set(database=str(aside)).render_as_string(hide_password=False))
        store.engine.dispose()

    fresh.make(path, fill)


def _parts(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise SetupError(f"MLFLOW_TRACKING_URI is {uri!r}: {error}") from error


def _text(text: str, limit: int) -> str:
    """Params and tags are cut by MLflow at these lengths, and PostgreSQL takes no NUL."""
    return text.replace("\0", "�")[:limit]


def _milliseconds(time_ns: int | None) -> int | None:
    return None if time_ns is None else time_ns // 1_000_000


@contextmanager
def _answers(uri: str) -> Iterator[None]:
    """What MLflow and the libraries under it raise, said by what the caller must do."""
    try:
        yield
    except MlflowException as error:
        raise _meaning(error, uri) from error
    except requests.HTTPError as error:
        status = error.response.status_code if error.response is not None else 500
        kind: type[SyncError] = RejectedRecordError if status in {400, 413, 422} else RefusedError
        raise kind(f"MLflow answers {status} to a file: {str(error)[:300]}") from error
    except (requests.RequestException, SQLAlchemyError, OSError) as error:
        raise _later(error, uri) from error


def _meaning(error: MlflowException, uri: str) -> SyncError:
    status, text = error.get_http_status_code(), str(error).split("\n", maxsplit=1)[0][:500]
    if "mlflow db upgrade" in str(error):
        return SetupError(f"{uri} was made by another MLflow release: {text}")
    if "must be in the 'active' state" in text or status in {401, 403, 404, 501}:
        return RefusedError(f"{uri} refuses: {text}")
    if status == 400:
        return RejectedRecordError(text)
    return _later(error, uri)


def _later(error: BaseException, uri: str) -> TryAgainError:
    """The innermost reason, in one line, "[Errno 111] Connection refused", and how long the server asks us to wait."""
    after_s: float | None = getattr(error, "after_s", None)
    while inner := error.__cause__ or error.__context__:
        error = inner
        after_s = getattr(error, "after_s", after_s)
    text = str(error).split("\n", maxsplit=1)[0][:300]
    return TryAgainError(f"{uri}: {text}", after_s)
