"""The same small spool into MLflow in every form in which it is set up, compared value by value through MLflow's own client."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import holding
import pytest
import servers
import syncing
from flaky import Flaky
from servers import ADMIN, PASSWORD, Postgres, Server
from syncing import Result, record, sync

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed: pip install 'spool-sync[mlflow]'", allow_module_level=True)

SMALL = """
run = spool.init(project="math", experiment="grpo", run_id="small", config={"trainer": {"steps": 3}, "lr": 1e-3})
for at, step in enumerate((0, 1, 2, 1)):
    run.log({"critic/score/mean": at / 3, "tiny": 5e-324 * at, "actor/kl": 0.1 + at, "损失": math.nan}, step=step)
run.log({"reward/max": math.inf, "count": 7, "is_good": True, "below": -1e300, "note": "a text"}, step=2)
for step, split in ((1, "val"), (2, "val"), (2, "train")):
    rows = [{"input": f"{i}+1", "output": "答 \\u00e9 ' % \\\\", "score": i / 2, "label": "2"} for i in range(3)]
    run.log_generations(step=step, rows=rows, split=split)
for sample in range(3):
    with run.span("rollout", type="AGENT", step=5, sample_index=sample, inputs={"q": "6*7"}) as root:
        with run.span("calculator", type="TOOL", inputs={"expr": "6*7"}) as tool:
            tool.outputs = 42
        root.outputs = {"answer": [42, 1.5, None, True, "é"]}
run.log_histogram("grad/layer0", [0.1, 0.2, 0.2], step=1)
run.finish()
"""
PARAMS = {"trainer/steps": "3", "lr": "0.001"}
NO_PROXY = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
)


@pytest.fixture(scope="session")
def small_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, made once: its migrations take seconds."""
    folder = tmp_path_factory.mktemp("empty")
    servers.make_database(f"sqlite:///{folder}/mlflow.db", folder)
    return folder / "mlflow.db"


@pytest.fixture
def folder(tmp_path: Path, small_spool: Path) -> Path:
    (tmp_path / "home").mkdir()
    shutil.copytree(small_spool, tmp_path / "spool-data")
    return tmp_path


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with servers.running_postgres() as postgres:
        uri = postgres.new_database("empty")
        servers.make_database(uri, postgres.folder)
        yield postgres


def server_folder(folder: Path, empty_database: Path | None) -> Path:
    here = folder / "server"
    here.mkdir()
    if empty_database is not None:
        shutil.copy(empty_database, here / "mlflow.db")
    return here


def delivered_exactly(folder: Path, uri: str, **environment: str | None) -> None:
    """Twice, of which the second adds nothing; then everything is compared."""
    settings = NO_PROXY | environment
    for _ in range(2):
        result = sync(folder, "--json", uri=uri, environment=settings)
        assert result.code == 0, result.out + result.err
    assert all(one["already_there"] == one["recorded"] for one in result.tables.values())
    held = holding.read(folder, uri, "small", **settings)
    holding.assert_exact(folder / "spool-data", held)
    assert held["params"] == PARAMS


def refused(result: Result, words: str, folder: Path) -> None:
    """Exit 4 with the server's words, and nothing that says anything was delivered."""
    assert result.code == 4, result.out + result.err
    assert words in result.out + result.err
    assert "Traceback" not in result.err
    for path in (folder / "spool-data").glob(".sync/mlflow/*.json"):
        cursor = json.loads(path.read_bytes())
        assert not any(seq for tables in cursor["delivered"].values() for seq in tables.values())
        assert not cursor["status"]


# --- databases


def test_a_server_with_postgresql(folder: Path, postgres: Postgres) -> None:
    server = Server(server_folder(folder, None), backend=postgres.new_database("served", "empty"))
    with servers.running(server):
        delivered_exactly(folder, server.uri)


def test_postgresql_without_a_server(folder: Path, postgres: Postgres) -> None:
    delivered_exactly(folder, postgres.new_database("direct", "empty"))


def test_an_empty_postgresql_gets_its_tables(folder: Path, postgres: Postgres) -> None:
    delivered_exactly(folder, postgres.new_database("bare"))


def test_four_syncs_at_once_make_a_missing_sqlite_file_and_all_end_well(tmp_path: Path) -> None:
    runs = [f"run-{number}" for number in range(4)]
    spool = record(
        tmp_path,
        f"""
for number, name in enumerate({runs!r}):
    with spool.init(project="p", experiment=name, run_id=name) as run:
        for step in range(20): run.log({{"loss": step / 3 + number}}, step=step)
        run.log_generations(step=1, rows=[{{"input": name, "output": "x"}}], split="val")
        with run.span("tool", type="TOOL", step=1): pass
""",
    )
    environment = servers.clean_environment(tmp_path) | {"PYTHONPATH": str(syncing.ROOT)}
    command = [sys.executable, "-m", "sync", str(spool), "--to", "mlflow"]
    syncs = [
        subprocess.Popen(
            [*command, "--run", name, "--state-dir", str(tmp_path / f"state-{name}")],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for name in runs
    ]
    said = [one.communicate(timeout=240)[1].decode() for one in syncs]
    assert [one.returncode for one in syncs] == [0, 0, 0, 0], said
    assert not list(tmp_path.glob(".mlflow.db*")), "what was made aside is gone"
    database = tmp_path / "mlflow.db"
    assert syncing.stored_metrics(database) == holding.recorded_metrics(spool)
    assert syncing.stored_spans(database) == syncing.logged_spans(spool)
    assert syncing.stored_generations(tmp_path / "mlruns") == syncing.logged_generations(spool)
    names = syncing.query(database, "select name, status from runs order by name")
    assert names == [(name, "FINISHED") for name in runs]
    assert syncing.query(database, "select count(*) from experiments") == [(2,)]


# --- servers


def test_a_server_below_a_static_prefix(folder: Path, empty_database: Path) -> None:
    with servers.running(Server(server_folder(folder, empty_database), prefix="/mlflow")) as server:
        assert server.uri.endswith("/mlflow")
        delivered_exactly(folder, server.uri)


@pytest.mark.skipif(find_spec("flask_wtf") is None, reason="mlflow[auth] is not installed: pip install 'Flask-WTF<2'")
def test_basic_auth_by_environment_or_stored_login_and_a_wrong_password_marks_nothing(
    folder: Path, empty_database: Path
) -> None:
    here = server_folder(folder, empty_database)
    (here / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{here}/auth.db\nadmin_username = {ADMIN}\n"
        f"admin_password = {PASSWORD}\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 300\n"  # without it, each request costs the server 0.1 s of hashing
    )
    environment = {"MLFLOW_AUTH_CONFIG_PATH": str(here / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the tests"}
    with servers.running(Server(here, "--app-name", "basic-auth", environment=environment)) as server:
        login = {"MLFLOW_TRACKING_USERNAME": ADMIN, "MLFLOW_TRACKING_PASSWORD": "wrong"}
        for settings in ({}, login):
            result = sync(folder, uri=server.uri, environment=NO_PROXY | settings)
            refused(result, "You are not authenticated", folder)
            assert "wrong" not in result.out + result.err
        delivered_exactly(folder, server.uri, **login | {"MLFLOW_TRACKING_PASSWORD": PASSWORD})
        stored = folder / "home" / ".mlflow" / "credentials"
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(f"[mlflow]\nmlflow_tracking_username = {ADMIN}\nmlflow_tracking_password = {PASSWORD}\n")
        delivered_exactly(folder, server.uri)


def test_tls_with_a_private_authority_directly_and_through_https_proxy(folder: Path, empty_database: Path) -> None:
    here = server_folder(folder, empty_database)
    certificate = servers.make_certificate(here, "tracker.example")
    with servers.running(Server(here, "--allowed-hosts", "*", certificate=certificate)) as server:
        result = sync(folder, uri=server.uri, environment=NO_PROXY)
        refused(result, "certificate verify failed", folder)
        delivered_exactly(folder, server.uri, MLFLOW_TRACKING_SERVER_CERT_PATH=str(certificate.authority))
        uri = "https://tracker.example:8443"
        with Flaky(hosts={"tracker.example": server.port}) as proxy:
            delivered_exactly(folder, uri, HTTPS_PROXY=proxy.uri, REQUESTS_CA_BUNDLE=str(certificate.authority))
            assert {(one.method, one.path) for one in proxy.seen} == {("CONNECT", "tracker.example:8443")}


def test_http_proxy_is_used_and_sees_every_request(folder: Path, empty_database: Path) -> None:
    with (
        servers.running(Server(server_folder(folder, empty_database))) as server,
        Flaky(hosts={"tracker.example": server.port}) as proxy,
    ):
        delivered_exactly(folder, "http://tracker.example", HTTP_PROXY=proxy.uri, http_proxy=proxy.uri)
        paths = {one.path.split("?")[0].removeprefix("http://tracker.example") for one in proxy.seen}
        assert {"/health", "/v1/traces", "/api/2.0/mlflow/runs/log-batch"} <= paths
        assert all(one.path.startswith("http://tracker.example/") for one in proxy.seen)
