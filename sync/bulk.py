"""Metrics past MLflow's ORM, which makes 4,000 to 6,000 rows a second: sets of rows into MLflow's own tables, by its own engine.

What is left behind is what `log_batch` leaves: the same rows in `metrics`, `latest_metrics` and `tags`, the same refusals. Only
where the schema is one that this was written for; elsewhere `of` is None and the ordinary path is taken. Beside the destination
the only importer of `mlflow`.
"""

import json
import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from mlflow.entities import Metric, RunTag
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlTag
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.validation import _validate_batch_log_data, _validate_run_id
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from sync.series import Point

REVISIONS = {"dc11669786a5"}
"""Of MLflow 3.17, as `alembic_version` tells them; in a later one these three tables may mean something else."""
ROWS = 10_000
"""A transaction: with 1,000, half of the time goes into commits."""

_METRICS, _LATEST, _TAGS = (model.__table__ for model in (SqlMetric, SqlLatestMetric, SqlTag))
_METRIC = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
_TAG = ("key", "value", "run_uuid")
_RECENCY = ("step", "timestamp", "value")
_recency = itemgetter(*map(_METRIC.index, _RECENCY))

Row = tuple[Any, ...]
Write = Callable[[Session, sa.Table, tuple[str, ...], list[Row], tuple[str, ...]], None]


def of(store: Any) -> "Bulk | None":
    """The bulk path into this store; None where it is no database, or not one whose dialect and schema are known here."""
    if not isinstance(store, SqlAlchemyStore) or store.engine.dialect.name not in _WRITES:
        return None
    with store.ManagedSessionMaker() as session:
        revisions = set(session.execute(sa.text("SELECT version_num FROM alembic_version")).scalars())
    return Bulk(store) if len(revisions) == 1 and revisions <= REVISIONS else None


class Bulk:
    """One store. What goes wrong is raised as MlflowException, as the store itself raises it."""

    def __init__(self, store: SqlAlchemyStore) -> None:
        self.rows = ROWS
        self._store = store
        self._write = _WRITES[store.engine.dialect.name]

    def log(self, run_id: str, points: list[Point], tags: dict[str, str]) -> None:
        """Write all of it in one transaction, or nothing. Idempotent. Committed when this returns.

        A run that is not there or not active, and a row that MLflow does not take, are refused as `log_batch` refuses them.
        """
        _validate_run_id(run_id)
        kinds = {
            (point.name, point.timestamp_ms < 0): point for point in points
        }  # all that MLflow would refuse one for
        metrics = [Metric(one.name, one.value, one.timestamp_ms, one.step) for one in kinds.values()]
        _, _, given = _validate_batch_log_data(metrics, [], [RunTag(key, text) for key, text in tags.items()])
        rows = [_row(run_id, point) for point in points]
        with self._store.ManagedSessionMaker(read_only=False) as session:
            self._store._check_run_is_active(self._store._get_run(session, run_id))  # noqa: SLF001 - whose it is, and its stage
            self._write(session, _METRICS, _METRIC, rows, ())
            self._write(session, _LATEST, _METRIC, _latest(rows), (*_RECENCY, "is_nan"))
            self._write(session, _TAGS, _TAG, [(tag.key, tag.value, run_id) for tag in given], ("value",))

    def history(self, run_id: str, name: str) -> Iterator[Point]:
        """What `get_metric_history` gives, in no order, and without an object of MLflow's for each point."""
        columns = _METRICS.c
        wanted = sa.select(columns.timestamp, columns.step, columns.value, columns.is_nan)
        wanted = wanted.where(columns.run_uuid == run_id, columns.key == name).execution_options(yield_per=ROWS)
        with self._store.ManagedSessionMaker() as session:
            self._store._validate_run_accessible(session, run_id)  # noqa: SLF001 - whose it is
            for time_ms, step, value, is_nan in session.execute(wanted):
                yield Point(name, time_ms, step, math.nan if is_nan else value)


class Ordinary:
    """A store whose tables are not known here, by its own methods; raises as it does."""

    rows = 999

    def __init__(self, store: AbstractStore) -> None:
        self._store = store

    def log(self, run_id: str, points: list[Point], tags: dict[str, str]) -> None:
        metrics = [Metric(one.name, one.value, one.timestamp_ms, one.step) for one in points]
        self._store.log_batch(run_id, metrics, [], [RunTag(key, text) for key, text in tags.items()])

    def history(self, run_id: str, name: str) -> Iterator[Point]:
        page = None
        while page is None or page.token:
            page = self._store.get_metric_history(run_id, name, max_results=10_000, page_token=page and page.token)
            yield from (Point(name, metric.timestamp, metric.step, metric.value) for metric in page)


def _row(run_id: str, point: Point) -> Row:
    """A metric as MLflow stores it: NaN is a 0 with a mark, and no zero keeps its sign."""
    name, time_ms, step, value = point
    is_nan = value != value  # noqa: PLR0124
    return name, 0.0 if is_nan else value + 0.0, time_ms, step, is_nan, run_id


def _latest(rows: list[Row]) -> list[Row]:
    """The most recent row of each key, in the order of the keys, in which MLflow locks them too.

    MLflow's rule: the greatest (step, timestamp, value), where NaN counts as the 0 as which it is stored; of equals, the first.
    """
    found: dict[str, Row] = {}
    for row in rows:
        known = found.get(row[0])
        if known is None or _recency(row) > _recency(known):
            found[row[0]] = row
    return [found[key] for key in sorted(found)]


def _conflict(statement: Any, table: sa.Table, replaced: tuple[str, ...]) -> Any:
    """What becomes of a row that is there already: it stays, or these columns are replaced, of a metric by a later one only."""
    if not replaced:
        return statement.on_conflict_do_nothing()
    new = statement.excluded
    is_later = None
    if table is _LATEST:
        is_later = sa.tuple_(*(new[column] for column in _RECENCY)) > sa.tuple_(
            *(table.c[column] for column in _RECENCY)
        )
    return statement.on_conflict_do_update(
        index_elements=table.primary_key.columns, set_={column: new[column] for column in replaced}, where=is_later
    )


def _write_sqlite(
    session: Session, table: sa.Table, names: tuple[str, ...], rows: list[Row], replaced: tuple[str, ...]
) -> None:
    """Straight to the driver: SQLAlchemy's own way to it takes as long as SQLite does."""
    if not rows:
        return
    statement = _conflict(sqlite.insert(table), table, replaced)
    compiled = statement.compile(dialect=session.get_bind().dialect, column_keys=list(names))
    order = [names.index(name) for name in compiled.positiontup]
    if order != list(range(len(names))):
        rows = [tuple(row[at] for at in order) for row in rows]
    session.connection().exec_driver_sql(str(compiled), rows)


def _write_postgresql(
    session: Session, table: sa.Table, names: tuple[str, ...], rows: list[Row], replaced: tuple[str, ...]
) -> None:
    """All rows as one JSON text, which any driver carries; COPY by psycopg2 is a seventh faster, 64,000 rows a second beside 55,000."""
    if not rows:
        return
    columns = ", ".join(f"{name} {table.c[name].type.compile(session.get_bind().dialect)}" for name in names)
    source = sa.text(f"SELECT {', '.join(names)} FROM json_to_recordset(CAST(:rows AS JSON)) AS given({columns})")  # noqa: S608 - no data
    given = source.bindparams(rows=json.dumps([dict(zip(names, row, strict=True)) for row in rows])).columns(
        *(table.c[name] for name in names)
    )
    session.execute(_conflict(postgresql.insert(table).from_select(names, given), table, replaced))


_WRITES: dict[str, Write] = {"sqlite": _write_sqlite, "postgresql": _write_postgresql}
