"""The bulk path beside MLflow's own: the same batches through both leave the same tables, by the same rules, in SQLite and PostgreSQL."""

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import syncing
from servers import running_postgres
from syncing import query, record, sync

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed: pip install 'spool-sync[mlflow]'", allow_module_level=True)

import sqlalchemy as sa
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.store.tracking.sqlalchemy_workspace_store import WorkspaceAwareSqlAlchemyStore
from mlflow.utils.workspace_context import WorkspaceContext

from sync import bulk
from sync.destinations import mlflow as destination
from sync.errors import RefusedError, RejectedRecordError, TryAgainError
from sync.series import Point, clamped

TABLES = {
    "metrics": "key, value, timestamp, step, is_nan",
    "latest_metrics": "key, value, timestamp, step, is_nan",
    "tags": "key, value",
    "params": "key, value",
}
EDGES = [math.nan, 0.0, -0.0, 5e-324, -5e-324, math.inf, -math.inf, 1.0, 0.1 + 0.2, 1.7976931348623157e308]


@pytest.fixture(scope="module")
def sqlite_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('bulk')}/mlflow.db"


@pytest.fixture(scope="module")
def postgresql_uri() -> Iterator[str]:
    with running_postgres() as postgres:
        yield postgres.new_database("bulk")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlAlchemyStore]:
    made = SqlAlchemyStore(request.getfixturevalue(f"{request.param}_uri"), str(tmp_path_factory.mktemp("artifacts")))
    yield made
    made.engine.dispose()


@pytest.fixture
def new_run(store: SqlAlchemyStore) -> Callable[[], str]:
    return lambda: str(store.create_run("0", "user", 0, [], "same").info.run_id)


def held(store: SqlAlchemyStore, run_id: str) -> dict[str, list[str]]:
    """Every column of every row of the run, apart from the run's own id, bit by bit."""
    with store.engine.connect() as connection:
        return {
            name: sorted(
                repr(tuple(row))
                for row in connection.execute(
                    sa.text(f"select {columns} from {name} where run_uuid = :id"), {"id": run_id}
                )
            )
            for name, columns in TABLES.items()
        }


def points(metrics: list[Metric]) -> list[Point]:
    return [Point(one.key, one.timestamp, one.step, clamped(one.value)) for one in metrics]


def texts(tags: list[RunTag]) -> dict[str, str]:
    return {tag.key: tag.value for tag in tags}


def refusal(call: Callable[[], None], run_id: str) -> tuple[str, str]:
    """What MLflow says, and what the sync makes of it."""
    with pytest.raises(MlflowException) as caught:
        call()
    text = caught.value.message.replace(run_id, "RUN")
    return caught.value.error_code, f"{type(destination._meaning(caught.value, 'uri')).__name__}: {text}"


# --- the same tables


@pytest.mark.parametrize("seed", range(6))
def test_both_paths_leave_the_same_rows_whatever_collides(
    store: SqlAlchemyStore, new_run: Callable[[], str], seed: int
) -> None:
    rng = random.Random(seed)
    ours, theirs, writer = new_run(), new_run(), bulk.of(store)
    for number in range(8):
        metrics = [
            Metric(f"k/{rng.randrange(6)}", rng.choice(EDGES), rng.randrange(2), rng.choice([-1, 0, 1, 2**53 + 1]))
            for _ in range(rng.randrange(1, 40))
        ]
        tags = [RunTag("spool.cursor.w", str(number)), RunTag(f"t{number % 3}", "答 '\"\\ é")]
        writer.log(ours, points(metrics), texts(tags))
        store.log_batch(theirs, metrics, [], tags)
        assert held(store, ours) == held(store, theirs)


@pytest.mark.parametrize("values", [(math.nan, 0.0), (0.0, math.nan), (-1.0, math.nan, -0.0)])
def test_of_equally_recent_metrics_the_first_stays_the_latest(
    store: SqlAlchemyStore, new_run: Callable[[], str], values: tuple[float, ...]
) -> None:
    ours, theirs = new_run(), new_run()
    metrics = [Metric("a", value, 1, 1) for value in values]
    bulk.of(store).log(ours, points(metrics), {})
    store.log_batch(theirs, metrics, [], [])
    assert held(store, ours) == held(store, theirs)


def test_a_large_batch_with_many_keys_and_its_repetition(store: SqlAlchemyStore, new_run: Callable[[], str]) -> None:
    ours, theirs, writer = new_run(), new_run(), bulk.of(store)
    metrics = [Metric(f"层/{at % 700}", at / 3, 10**12 + at, 2**63 - 1 - at) for at in range(2000)]
    for _ in range(2):
        writer.log(ours, points(metrics), {})
    for at in range(0, len(metrics), 1000):
        store.log_batch(theirs, metrics[at : at + 1000], [], [])
    assert held(store, ours) == held(store, theirs)
    assert len(held(store, ours)["metrics"]) == 2000


def test_a_history_is_what_mlflow_gives(store: SqlAlchemyStore, new_run: Callable[[], str]) -> None:
    run_id, writer = new_run(), bulk.of(store)
    metrics = [Metric("a", value, at, -at) for at, value in enumerate(EDGES)]
    writer.log(run_id, points([*metrics, Metric("b", 1.0, 0, 0)]), {})
    given = sorted(repr((one.timestamp, one.step, one.value)) for one in store.get_metric_history(run_id, "a"))
    assert sorted(repr((p.timestamp_ms, p.step, p.value)) for p in writer.history(run_id, "a")) == given
    assert len(given) == len(EDGES)


# --- the same refusals


@pytest.mark.parametrize(
    ("metric", "meaning"),
    [
        (Metric("a" * 251, 1.0, 0, 0), RejectedRecordError),
        (Metric("a@b", 1.0, 0, 0), RejectedRecordError),
        (Metric("a/../b", 1.0, 0, 0), RejectedRecordError),
        (Metric("", 1.0, 0, 0), RejectedRecordError),
        (Metric("a", 1.0, -1, 0), RejectedRecordError),
        (Metric("good", 1.0, -1, 0), RejectedRecordError),
        (
            Metric("a", 1.0, 0, 2**63),
            None,
        ),  # RejectedRecordError in PostgreSQL; SQLite's driver makes an internal error of it
    ],
)
def test_a_row_that_mlflow_rejects_is_rejected_and_takes_its_batch_along(
    store: SqlAlchemyStore, new_run: Callable[[], str], metric: Metric, meaning: type[Exception] | None
) -> None:
    run_id, writer = new_run(), bulk.of(store)
    before = held(store, run_id)
    batch, tags = [Metric("good", 1.0, 0, 0), metric], [RunTag("spool.cursor.w", "1")]
    code, ours = refusal(lambda: writer.log(run_id, points(batch), texts(tags)), run_id)
    assert held(store, run_id) == before
    theirs_code, theirs = refusal(lambda: store.log_batch(run_id, batch, [], tags), run_id)
    assert (code, ours.split(":")[0]) == (theirs_code, theirs.split(":")[0])
    if meaning is not None:
        assert ours == theirs
        assert ours.startswith(meaning.__name__)


def test_a_deleted_and_an_unknown_run_are_refused_in_the_same_words(
    store: SqlAlchemyStore, new_run: Callable[[], str]
) -> None:
    deleted, writer = new_run(), bulk.of(store)
    before = held(store, deleted)
    store.delete_run(deleted)
    for run_id in (deleted, "0" * 32, "not an id!"):
        batch = [Metric("a", 1.0, 0, 0)]
        ours = refusal(lambda run_id=run_id, batch=batch: writer.log(run_id, points(batch), {}), run_id)
        assert ours == refusal(lambda run_id=run_id, batch=batch: store.log_batch(run_id, batch, [], []), run_id)
        if run_id != "not an id!":
            assert ours[1].startswith(RefusedError.__name__)
    assert held(store, deleted) == before


def test_a_run_of_another_workspace_is_not_found(
    store: SqlAlchemyStore, new_run: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    run_id = new_run()
    with WorkspaceContext("default"):
        aware = WorkspaceAwareSqlAlchemyStore(store.db_uri, store.artifact_root_uri)
        writer = bulk.of(aware)
        writer.log(run_id, points([Metric("a", 1.0, 0, 0)]), {})
        assert [point.value for point in writer.history(run_id, "a")] == [1.0]
    with WorkspaceContext("another"):
        ours = refusal(lambda: writer.log(run_id, points([Metric("a", 2.0, 0, 0)]), {}), run_id)
        assert ours == refusal(lambda: aware.log_batch(run_id, [Metric("a", 2.0, 0, 0)], [], []), run_id)
        with pytest.raises(MlflowException):
            list(writer.history(run_id, "a"))


def test_a_database_that_does_not_answer_is_asked_again(store: SqlAlchemyStore, new_run: Callable[[], str]) -> None:
    run_id, writer = new_run(), bulk.of(store)
    batch = [Metric("a", 1.0, 0, 0)]

    def interrupted(*_: Any) -> None:
        raise sa.exc.OperationalError("insert", {}, RuntimeError("database is locked"))

    sa.event.listen(store.engine, "before_cursor_execute", interrupted)
    try:
        ours = refusal(lambda: writer.log(run_id, points(batch), {}), run_id)
    finally:
        sa.event.remove(store.engine, "before_cursor_execute", interrupted)
    assert ours[1].startswith(TryAgainError.__name__)
    writer.log(run_id, points(batch), {})


# --- where it is taken


def test_it_is_taken_only_where_the_schema_is_known(sqlite_uri: str, tmp_path: Path) -> None:
    shutil.copy(_made(sqlite_uri, tmp_path), tmp_path / "mlflow.db")
    store = SqlAlchemyStore(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path))
    assert bulk.of(store) is not None
    for statement in (
        "update alembic_version set version_num = 'f00000000001'",
        "insert into alembic_version values ('dc11669786a5')",
        "delete from alembic_version",
    ):
        with store.engine.begin() as connection:
            connection.execute(sa.text(statement))
        assert bulk.of(store) is None
    store.engine.dispose()
    assert bulk.of(object()) is None


def _made(uri: str, folder: Path) -> Path:
    """The database file of an address, with MLflow's tables in it."""
    store = SqlAlchemyStore(uri, str(folder))
    store.engine.dispose()
    return Path(uri.removeprefix("sqlite:///"))


# --- whole syncs

EDGY = """
run = spool.init(project="p", experiment="e", run_id="r", config={"lr": 1e-3, "layers": [1, 2]})
import time
for at in range(400):
    run.log({"loss": at / 3, "tiny": 5e-324 * at, "zero": -0.0, f"key/{at}": at, "text": "x"}, step=at if at < 300 else 300 - at)
now, time.time_ns = time.time_ns, lambda: 1_800_000_000_000_000_000
for value in (math.nan, 0.0, -0.0, math.inf, -math.inf, 2.5, 2.5, 5e-324, math.nan):
    run.log({"same": value}, step=7)
for at in range(600):
    run.log({"again": at % 2, "same": at % 5}, step=7)
run.log({"same": math.nan, "last": math.nan}, step=9)
run.log({"same": 0.0, "last": 0.0}, step=9)
time.time_ns = now
run.tag(stage="rl")
run.finish()
"""


@pytest.fixture(scope="module")
def edgy_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("edgy"), EDGY)


@pytest.fixture
def folder(tmp_path: Path, sqlite_uri: str, edgy_spool: Path) -> Path:
    shutil.copy(_made(sqlite_uri, tmp_path), tmp_path / "empty.db")
    with sa.create_engine(f"sqlite:///{tmp_path}/empty.db").begin() as connection:
        for table in (*TABLES, "runs"):
            connection.execute(sa.text(f"delete from {table}"))
    shutil.copy(tmp_path / "empty.db", tmp_path / "mlflow.db")
    shutil.copytree(edgy_spool, tmp_path / "spool-data")
    (tmp_path / "home").mkdir()
    return tmp_path


def watch(seen: Path, revisions: set[str]) -> None:
    """Make small transactions, and note in `seen` which way each batch of metrics takes."""
    bulk.ROWS, bulk.REVISIONS = 500, revisions

    def noted(owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def wrapper(self: Any, run_id: str, metrics: list[Any], *rest: Any) -> Any:
            if metrics:
                with seen.open("a") as file:
                    file.write(f"{method}\n")
            return call(self, run_id, metrics, *rest)

        setattr(owner, method, wrapper)

    noted(bulk.Bulk, "log")
    noted(SqlAlchemyStore, "log_batch")


def stored(database: Path) -> dict[str, list[str]]:
    return {
        name: sorted(map(repr, query(database, f"select {columns} from {name}"))) for name, columns in TABLES.items()
    }


def test_a_sync_by_either_path_leaves_the_same_database(folder: Path) -> None:
    tables = {}
    for way, revisions in (("log", bulk.REVISIONS), ("log_batch", {"unknown"})):
        shutil.copy(folder / "empty.db", folder / "mlflow.db")
        shutil.rmtree(folder / "spool-data" / ".sync", ignore_errors=True)
        result = sync(folder, "--json", prepare=partial(watch, folder / way, revisions))
        assert result.code == 0, result.out + result.err
        assert set((folder / way).read_text().split()) == {way}
        assert result.tables["metrics"]["missing"] == 0
        tables[way] = stored(folder / "mlflow.db")
    assert tables["log"] == tables["log_batch"]
    assert len(tables["log"]["metrics"]) > 1600
    assert next(row for row in tables["log"]["latest_metrics"] if "'last'" in row).endswith("9, 1)")


def die(transaction: int) -> None:
    """SIGKILL in that transaction, after its metrics are written and before its cursor is."""
    bulk.ROWS = 500
    left, write = [transaction], bulk._WRITES["sqlite"]

    def deadly(session: Any, table: sa.Table, *rest: Any) -> None:
        left[0] -= table.name == "tags"
        if left[0] == 0:
            session.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(session, table, *rest)

    bulk._WRITES["sqlite"] = deadly


@pytest.mark.parametrize("transaction", [1, 3])
def test_data_and_cursor_are_committed_together(folder: Path, transaction: int) -> None:
    result = sync(folder, prepare=partial(die, transaction))
    assert result.code == -signal.SIGKILL
    cursors = query(folder / "mlflow.db", "select value from tags where key like 'spool.cursor.%'")
    reached = json.loads(cursors[0][0])["metrics"] if cursors else 0
    behind = [one for one in syncing.records(folder / "spool-data") if "metrics" in one and one["seq"] <= reached]
    assert len(behind) == 100 * (transaction - 1)  # five rows each, of which one is a text
    assert query(folder / "mlflow.db", "select count(*) from metrics") == [(4 * len(behind),)]
    assert sync(folder).code == 0
    syncing.assert_equal(folder / "spool-data", folder / "mlflow.db", folder / "mlruns")
