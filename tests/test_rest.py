"""Metrics over REST beside MLflow's own client: the same points there and back, the same refusals."""

import math
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from servers import Server, running

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed: pip install 'spool-sync[mlflow]'", allow_module_level=True)

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.rest_store import RestStore
from mlflow.utils.credentials import get_default_host_creds

from sync.rest import Rest
from sync.series import Point

EDGES = [math.nan, 0.0, -0.0, 5e-324, -5e-324, 1.0, 0.1 + 0.2, 1.7976931348623157e308, -1.7976931348623157e308, 1e16]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(tmp_path_factory.mktemp("rest"))) as started:
        yield started


@pytest.fixture
def store(server: Server) -> RestStore:
    return RestStore(lambda: get_default_host_creds(server.uri))


@pytest.fixture
def new_run(store: RestStore) -> Callable[[], str]:
    return lambda: str(store.create_run("0", "user", 0, [], "same").info.run_id)


def held(store: RestStore, run_id: str, names: set[str]) -> list[str]:
    """As MLflow's own client reads it."""
    points = [one for name in names for one in store.get_metric_history(run_id, name)]
    tags = {key: text for key, text in store.get_run(run_id).data.tags.items() if not key.startswith("mlflow.")}
    return [*sorted(repr((one.key, one.value, one.timestamp, one.step)) for one in points), repr(tags)]


def test_the_server_is_left_as_by_mlflows_own_client(
    server: Server, store: RestStore, new_run: Callable[[], str]
) -> None:
    rng, ours, theirs, rest = random.Random(0), new_run(), new_run(), Rest(server.uri)
    points = [
        Point(
            rng.choice(["loss", "val/acc_at_1", "层 a.b"]),
            rng.randrange(2**42),
            rng.choice([0, -1, 2**62 + 1, at]),
            value,
        )
        for at, value in enumerate(EDGES * 20)
    ]
    tags = {"spool.cursor.w": '{"metrics": 1}', "t": "答 '\"\\ é\n"}
    rest.log(ours, points, tags)
    store.log_batch(
        theirs,
        [Metric(one.name, one.value, one.timestamp_ms, one.step) for one in points],
        [],
        [RunTag(key, text) for key, text in tags.items()],
    )
    names = {point.name for point in points}
    assert held(store, ours, names) == held(store, theirs, names)
    assert len(held(store, ours, names)) > len(points) * 0.9


def test_a_history_of_several_pages_is_what_mlflows_own_client_reads(
    server: Server, store: RestStore, new_run: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.rest._PAGE", 7)
    run_id, rest = new_run(), Rest(server.uri)
    rest.log(run_id, [Point("a", at, -at, value) for at, value in enumerate(EDGES * 2)], {})
    read = [repr((one.timestamp_ms, one.step, one.value)) for one in rest.history(run_id, "a")]
    assert sorted(read) == sorted(
        repr((one.timestamp, one.step, one.value)) for one in store.get_metric_history(run_id, "a")
    )
    assert len(read) == 2 * len(EDGES)
    assert list(rest.history(run_id, "never logged")) == []


@pytest.mark.parametrize("point", [Point("a" * 251, 1, 0, 1.0), Point("a@b", 1, 0, 1.0), Point("a", -1, 0, 1.0)])
def test_a_refusal_is_raised_as_mlflows_own_client_raises_it(
    server: Server, store: RestStore, new_run: Callable[[], str], point: Point
) -> None:
    for run_id in (new_run(), "0" * 32):
        with pytest.raises(MlflowException) as ours:
            Rest(server.uri).log(run_id, [point], {})
        with pytest.raises(MlflowException) as theirs:
            store.log_batch(run_id, [Metric(point.name, point.value, point.timestamp_ms, point.step)], [], [])
        assert (str(ours.value), ours.value.error_code) == (str(theirs.value), theirs.value.error_code)
