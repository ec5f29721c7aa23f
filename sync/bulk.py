"""Metrics past MLflow's ORM, which makes 4,000 to 6,000 rows a second: sets of rows into MLflow's own tables, by its own engine.

What is left behind is what `log_batch` leaves: the same rows in `metrics`, `latest_metrics` and `tags`, the same refusals. Only
where the schema is one that this was written for; elsewhere `of` is None and the ordinary path is taken. Beside the destination
the only importer of `mlflow`.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from mlflow.entities import Metric, RunTag
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
_RECENCY = ("step", "timestamp", "value")
_recency = itemgetter(*_RECENCY)

Write = Callable[[Session, sa.Table, list[dict[str, Any]], tuple[str, ...]], None]


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
        self._store = store
        self._write = _WRITES[store.engine.dialect.name]

    def log(self, run_id: str, metrics: list[Metric], tags: list[RunTag]) -> None:
        """Write all of it in one transaction, or nothing. Idempotent. Committed when this returns.

        A run that is not there or not active, and a row that MLflow does not take, are refused as `log_batch` refuses them.
        """
        _validate_run_id(run_id)
        _, _, tags = _validate_batch_log_data(list({_kind(one): one for one in metrics}.values()), [], tags)
        rows = [self._row(run_id, metric) for metric in metrics]
        with self._store.ManagedSessionMaker(read_only=False) as session:
            self._store._check_run_is_active(self._store._get_run(session, run_id))  # noqa: SLF001 - whose it is, and its stage
            self._write(session, _METRICS, rows, ())
            self._write(session, _LATEST, _latest(rows), (*_RECENCY, "is_nan"))
            values = {tag.key: tag.value for tag in tags}
            self._write(
                session,
                _TAGS,
                [{"key": key, "value": text, "run_uuid": run_id} for key, text in values.items()],
                ("value",),
            )

    def _row(self, run_id: str, metric: Metric) -> dict[str, Any]:
        is_nan, value = self._store.sanitize_metric_value(metric.value)
        return {
            "key": metric.key,
            "value": value + 0.0,  # through MLflow no database keeps the sign of a zero
            "timestamp": metric.timestamp,
            "step": metric.step,
            "is_nan": is_nan,
            "run_uuid": run_id,
        }

    def history(self, run_id: str, name: str) -> Iterator[Point]:
        """What `get_metric_history` gives, in no order, and without an object of MLflow's for each point."""
        columns = _METRICS.c
        wanted = sa.select(columns.timestamp, columns.step, columns.value, columns.is_nan)
        wanted = wanted.where(columns.run_uuid == run_id, columns.key == name).execution_options(yield_per=ROWS)
        with self._store.ManagedSessionMaker() as session:
            self._store._validate_run_accessible(session, run_id)  # noqa: SLF001 - whose it is
            for timestamp_ms, step, value, is_nan in session.execute(wanted):
                yield Point(name, timestamp_ms, step, math.nan if is_nan else value)


def _kind(metric: Metric) -> tuple[Any, ...]:
    """All that MLflow's validation looks at: what it says of one metric holds for each of the same kind."""
    value, time_ms, step = metric.value, metric.timestamp, metric.step
    return metric.key, type(value), type(time_ms), type(step), time_ms < 0


def _latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The most recent row of each key, in the order of the keys, in which MLflow locks them too.

    MLflow's rule: the greatest (step, timestamp, value), where NaN counts as the 0 as which it is stored; of equals, the first.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = found.get(row["key"])
        if known is None or _recency(row) > _recency(known):
            found[row["key"]] = row
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


def _write_sqlite(session: Session, table: sa.Table, rows: list[dict[str, Any]], replaced: tuple[str, ...]) -> None:
    """Rows as tuples, straight to the driver: SQLAlchemy's own way to it takes as long as SQLite does."""
    if not rows:
        return
    statement = _conflict(sqlite.insert(table), table, replaced)
    compiled = statement.compile(dialect=session.get_bind().dialect, column_keys=list(rows[0]))
    order = itemgetter(*compiled.positiontup)
    session.connection().exec_driver_sql(str(compiled), list(map(order, rows)))


def _write_postgresql(session: Session, table: sa.Table, rows: list[dict[str, Any]], replaced: tuple[str, ...]) -> None:
    """All rows as one JSON text, which any driver carries; COPY by psycopg2 is a seventh faster, 64,000 rows a second beside 55,000."""
    if not rows:
        return
    names = list(rows[0])
    columns = ", ".join(f"{name} {table.c[name].type.compile(session.get_bind().dialect)}" for name in names)
    source = sa.text(f"SELECT {', '.join(names)} FROM json_to_recordset(CAST(:rows AS JSON)) AS given({columns})")  # noqa: S608 - no data
    given = source.bindparams(rows=json.dumps(rows)).columns(*(table.c[name] for name in names))
    session.execute(_conflict(postgresql.insert(table).from_select(names, given), table, replaced))


_WRITES: dict[str, Write] = {"sqlite": _write_sqlite, "postgresql": _write_postgresql}
