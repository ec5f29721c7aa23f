"""Whatever happens between spool-sync and an MLflow server, the store ends with exactly the recorded rows, and each exit code on
the way tells the truth: 0 only where everything is there.

Each test has a spool of its own, with a run id and a project of its own. By default the spools are small; `slow` does the
same with large ones.
"""

import itertools
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import holding
import pytest
import servers
from flaky import CUT, LOSE, PASS, REFUSE, Fate, Flaky, Plan, answer, scripted, seeded
from servers import Server
from syncing import Result, record, sync

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed: pip install 'spool-sync[mlflow]'", allow_module_level=True)

WRITER = """
import itertools, math, os, sys, time, spool
run_id, attempt, number, calls, generations, traces = sys.argv[1], *map(int, sys.argv[2:])
if number:
    run = spool.init()
else:
    run = spool.init(project=run_id, experiment="grpo", run_id=run_id, resume=attempt > 1, config={"lr": 1e-6})
clock, now = itertools.count(), time.time_ns
if number == 1:  # its clock jumps: an hour back, then a day ahead
    time.time_ns = lambda: now() + (0, -3_600_000_000_000, 86_400_000_000_000)[min(next(clock) * 3 // max(calls, 1), 2)]
for at in range(calls):
    step = max(0, at // 2 - 5) if at % 7 == 3 else at // 2  # each step twice, now and then an earlier one
    values = {f"w{number}/m{k}": at / 3 + k for k in range(9)}
    values["critic/score/mean"] = math.nan if at % 11 == 0 else number + at / 7
    run.log(values, step=step)
for at in range(generations):
    row = {"input": f"{attempt}.{number}.{at}", "output": "答 " * 9, "score": at / 3}
    run.log_generations(step=at // 8, rows=[row], split="val")
for at in range(traces):
    with run.span("rollout", type="AGENT", step=at, sample_index=at, inputs={"at": at}) as root:
        for tool in range(8):
            with run.span(f"tool{tool}", type="TOOL", inputs={"n": tool}) as span:
                span.outputs = [at, tool / 7]
        root.outputs = {"text": "x" * 100}
"""
LEAD = """
children = []
if not number:
    import subprocess
    for other in (1, 2):
        arguments = [run_id, str(attempt), str(other), *sys.argv[4:]]
        children.append(subprocess.Popen([sys.executable, "-c", os.environ["WRITER"], *arguments]))
"""
TAIL = """
for child in children:
    assert child.wait() == 0
if attempt == 1 and not number:
    run.flush()
    os.kill(os.getpid(), 9)
run.finish()
"""


@dataclass(frozen=True)
class Size:
    """Of each of six writers: three in each of two attempts."""

    calls: int
    generations: int
    traces: int
    timeout_s: float

    @property
    def metrics(self) -> int:
        return self.calls * 10 * 6


SMALL = Size(50, 7, 4, 120)
LARGE = Size(2000, 67, 50, 600)


def make_spool(folder: Path, run_id: str, size: Size) -> Path:
    """3 writers in each of 2 attempts, of which the first is killed."""
    head, loops = WRITER.split("clock, now", 1)
    program = head + LEAD + "clock, now" + loops + TAIL
    for attempt, code in ((1, -signal.SIGKILL), (2, 0)):
        arguments = [run_id, str(attempt), "0", str(size.calls), str(size.generations), str(size.traces)]
        source = f"import os, sys\nos.environ['WRITER'] = program = {program!r}\nsys.argv = ['-c', *{arguments!r}]\nexec(program)"
        record(folder, source, expect=code)
    return folder / "spool-data"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, made once: its migrations take seconds."""
    folder = tmp_path_factory.mktemp("empty")
    servers.make_database(f"sqlite:///{folder}/mlflow.db", folder)
    return folder / "mlflow.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    with servers.running(Server(folder)) as server:
        yield server


class Case:
    """A folder with a spool, and spool-sync run on it until it says that everything is there."""

    def __init__(self, folder: Path, run_id: str, size: Size) -> None:
        (folder / "home").mkdir()
        self.folder, self.run_id, self.size = folder, run_id, size
        self.spool = make_spool(folder, run_id, size)
        counts = sum(holding.recorded_metrics(self.spool).values())
        assert size.metrics * 0.99 <= counts <= size.metrics  # two writers' NaN of one step and millisecond are one row
        self.codes: list[int] = []

    def sync(self, uri: str | None, *arguments: str, spool: Path | None = None, **options: Any) -> Result:
        arguments = (str(spool or self.spool), "--json", "--rewind", "keep", *arguments)
        result = sync(self.folder, *arguments, uri=uri, timeout_s=self.size.timeout_s, **options)
        self.codes.append(result.code)
        assert "Traceback" not in result.err, result.err
        return result

    def until_done(self, uri: str | None, *arguments: str, tries: int = 12, check: bool = True) -> Result:
        """Exit 4 may come before it, nothing else; with `check`, an exit 0 is held against what is there."""
        for _ in range(tries):
            result = self.sync(uri, *arguments)
            if result.code == 0:
                assert not check or all(one["held"] for one in result.tables.values())
                return result
            assert result.code == 4, result.out + result.err
        raise AssertionError(f"not done after {tries} tries: {result.out}{result.err}")

    def is_exact(self, uri: str) -> None:
        holding.assert_exact(self.spool, holding.read(self.folder, uri, self.run_id))

    def cursors(self, folder: Path | None = None) -> list[Path]:
        return sorted((folder or self.spool / ".sync").glob("mlflow/*.json"))


@pytest.fixture
def make_case(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Size], Case]:
    return lambda size: Case(tmp_path, "".join(c if c.isalnum() else "-" for c in request.node.name)[:90], size)


sizes = pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(LARGE, id="large", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)


# --- spool-sync is killed, the server is killed


@sizes
def test_a_spool_sync_killed_at_random_times_ends_exact(make_case, server: Server, size: Size) -> None:
    case = make_case(size)
    chance = random.Random(4)
    for longest_s in (0.4, 1.0, 2.0, 3.0) if size is SMALL else (1, 5, 10, 20, 20, 40):
        case.sync(server.uri, kill_after_s=chance.uniform(longest_s / 4, longest_s))
    assert set(case.codes) <= {0, -signal.SIGKILL}
    assert -signal.SIGKILL in case.codes
    case.until_done(server.uri)
    case.is_exact(server.uri)


@sizes
def test_a_server_killed_and_restarted_in_the_middle_ends_exact(
    make_case, tmp_path: Path, empty_database: Path, size: Size
) -> None:
    case = make_case(size)
    here = tmp_path / "server"
    here.mkdir()
    shutil.copy(empty_database, here / "mlflow.db")
    writes = itertools.count()
    with servers.running(Server(here)) as server, Flaky(server.port) as proxy:
        due = threading.Event()

        def plan(method: str, _path: str) -> Fate:
            if method != "GET" and next(writes) == (8 if size is SMALL else 60):
                due.set()
            return PASS

        def restart() -> None:
            if due.wait(60):
                server.kill()
                time.sleep(1)
                server.start()

        proxy.plan = plan
        restarting = threading.Thread(target=restart)
        restarting.start()
        case.until_done(proxy.uri)
        restarting.join()
        assert due.is_set(), "the server was killed in the middle"
        case.is_exact(server.uri)
        assert case.codes[-1] == 0


# --- answers that do not come, or come wrong


FAULTS = (LOSE, CUT, REFUSE, Fate(delay_s=0.2), *(answer(status) for status in (429, 500, 502, 503)))
FAULTS += (answer(429, retry_after="1"), answer(503, retry_after="1"))


@sizes
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_answers_lost_delayed_replaced_and_cut_by_chance_end_exact(
    make_case, server: Server, size: Size, seed: int
) -> None:
    case = make_case(size)
    with Flaky(server.port, seeded(seed, 0.06, FAULTS)) as proxy:
        case.until_done(proxy.uri)
        assert {kind for kind, _ in proxy.met()} >= {"lose", "cut", "refuse", "answer"}
        proxy.plan = lambda *_: PASS
        again = case.until_done(proxy.uri, tries=1)
    assert all(one["delivered"] == 0 for one in again.tables.values())
    case.is_exact(server.uri)


def is_write(method: str, path: str) -> bool:
    return method != "GET" and not path.split("?", maxsplit=1)[0].endswith(
        ("/search", "/batchGet", "search-traces", "/query")
    )


@pytest.mark.parametrize("fate", [pytest.param(LOSE, id="lost"), pytest.param(CUT, id="cut", marks=pytest.mark.slow)])
def test_every_write_applied_whose_first_answer_is_lost_or_cut_ends_exact(
    make_case, server: Server, fate: Fate
) -> None:
    case = make_case(SMALL)
    alternating = [fate, PASS] * 8
    with Flaky(server.port, scripted(alternating, only=is_write)) as proxy:
        case.until_done(proxy.uri)
        assert sum(one.fate == fate for one in proxy.seen) == 8
    case.is_exact(server.uri)


def test_a_link_that_loses_one_answer_in_25_sees_many_tables_through(tmp_path: Path, server: Server) -> None:
    """They are one batch, and more requests than are ever answered in a row."""
    source = """
with spool.init(project="tables", experiment="e", run_id="tables") as run:
    for step in range(30): run.log_generations(step=step, rows=[{"input": str(step), "output": "x"}], split="val")
"""
    (tmp_path / "home").mkdir()
    spool = record(tmp_path, source)
    with Flaky(server.port, scripted(itertools.cycle([*[PASS] * 24, LOSE]))) as proxy:
        result = sync(tmp_path, uri=proxy.uri)
    assert result.code == 0, result.out + result.err
    holding.assert_exact(spool, holding.read(tmp_path, server.uri, "tables"))


@pytest.mark.slow
@pytest.mark.parametrize("fate", FAULTS, ids=lambda one: f"{one.kind}{one.status or ''}{one.retry_after or ''}")
def test_each_kind_of_fault_on_every_third_request_ends_exact(make_case, server: Server, fate: Fate) -> None:
    case = make_case(SMALL)
    with Flaky(server.port, scripted(itertools.cycle([PASS, PASS, fate]))) as proxy:
        case.until_done(proxy.uri)
    case.is_exact(server.uri)


# --- what the server asks for, what it refuses


@pytest.mark.parametrize("status", [pytest.param(429, marks=pytest.mark.slow), 503])
def test_where_the_server_says_how_long_to_wait_it_is_not_asked_earlier(make_case, server: Server, status: int) -> None:
    case = make_case(SMALL)
    first = scripted([answer(status, retry_after="3")], only=lambda _, path: path.endswith("/log-batch"))
    with Flaky(server.port, first) as proxy:
        case.until_done(proxy.uri, tries=1)
        [at] = [at for at, one in enumerate(proxy.seen) if one.fate.status == status]
        again_s = next(one.at_s for one in proxy.seen[at + 1 :] if one.path.endswith("/log-batch"))
        assert again_s - proxy.seen[at].at_s >= 3
    case.is_exact(server.uri)


def test_a_wait_longer_than_max_wait_is_exit_4_at_once_and_nothing_is_asked_before(make_case, server: Server) -> None:
    case = make_case(SMALL)
    with Flaky(server.port, scripted([answer(503, retry_after="3600")] * 99, only=is_write)) as proxy:
        began_s = time.monotonic()
        result = case.sync(proxy.uri, "--max-wait", "90")
        assert time.monotonic() - began_s < 90
        assert result.code == 4
        assert sum(one.fate.status == 503 for one in proxy.seen) == 1
    case.until_done(server.uri)
    case.is_exact(server.uri)


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_refusal_is_exit_4_in_the_servers_words_and_marks_nothing(
    make_case, server: Server, status: int, form: str
) -> None:
    case = make_case(Size(2, 1, 1, 120))
    code = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "ENDPOINT_NOT_FOUND"}[status]
    words = "the badge of this project has run out"
    text = words if form == "text" else json.dumps({"error_code": code, "message": words})
    plans: list[Plan] = [
        lambda *_: answer(status, text),
        lambda method, path: answer(status, text) if is_write(method, path) and "create" not in path else PASS,
        lambda _, path: answer(status, text) if "/v1/traces" in path or "/artifacts" in path else PASS,
    ]
    for number, plan in enumerate(plans):
        with Flaky(server.port, plan) as proxy:
            result = case.sync(proxy.uri)
            assert result.code == 4, (number, result.out + result.err)
            assert words in result.out + result.err, number
        for path in case.cursors():
            cursor = json.loads(path.read_bytes())
            claimed = {table for tables in cursor["delivered"].values() for table, seq in tables.items() if seq}
            assert not claimed & ({"generations", "spans", "events"} | ({"metrics"} if number < 2 else set())), number
            assert not cursor["status"]
    case.until_done(server.uri)
    case.is_exact(server.uri)


# --- cursors, copies, clocks


def database(case: Case, empty_database: Path) -> str:
    shutil.copy(empty_database, case.folder / "mlflow.db")
    return f"sqlite:///{case.folder}/mlflow.db"


@sizes
def test_a_cursor_deleted_corrupted_or_taken_from_an_older_time_ends_exact(
    make_case, empty_database: Path, size: Size
) -> None:
    case = make_case(size)
    uri = database(case, empty_database)
    killed_after = 12
    assert case.sync(uri, kill_after=killed_after).code == -signal.SIGKILL
    case.until_done(uri)
    [cursor] = case.cursors()
    whole = cursor.read_bytes()
    older = json.loads(whole)
    older["delivered"] = {
        writer: {table: seq // 2 for table, seq in tables.items()} for writer, tables in older["delivered"].items()
    }
    ahead = json.loads(whole)
    ahead["delivered"] = {writer: dict.fromkeys(tables, 10**9) for writer, tables in ahead["delivered"].items()}
    for content in (None, b"", whole[: len(whole) // 2], json.dumps(older).encode(), json.dumps(ahead).encode()):
        if content is None:
            cursor.unlink()
        else:
            cursor.write_bytes(content)
        result = case.until_done(uri, tries=1)
        assert all(one["delivered"] == 0 for one in result.tables.values())
    case.is_exact(uri)


@sizes
def test_a_cursor_that_claims_more_than_was_delivered_skips_nothing(
    make_case, empty_database: Path, size: Size
) -> None:
    case = make_case(size)
    uri = database(case, empty_database)
    case.until_done(uri)
    [cursor] = case.cursors()
    for suffix in ("mlflow.db",):
        shutil.copy(empty_database, case.folder / suffix)  # the store is put back to an earlier time, the cursor is not
    case.until_done(uri)
    assert cursor in case.cursors()
    case.is_exact(uri)


@sizes
def test_a_spool_that_is_moved_and_copies_synced_half_on_each_machine_end_exact(
    make_case, empty_database: Path, size: Size
) -> None:
    case = make_case(size)
    uri = database(case, empty_database)
    writers = sorted(path.parent.name for path in case.spool.glob("*/*/000001.jsonl"))
    assert len(writers) == 6
    halves = {"a": set(writers[:3]), "b": set(writers[3:])}
    for machine, kept in halves.items():
        ignore = shutil.ignore_patterns(".sync", *(set(writers) - kept))
        shutil.copytree(case.spool, case.folder / machine / "spool-data", ignore=ignore)
    for machine in ("a", "b", "a"):
        here = case.folder / machine
        result = case.sync(uri, "--state-dir", str(here / "state"), spool=here / "spool-data")
        assert result.code in {0, 3}, result.out + result.err  # 3: it says what the copy lacks
    case.spool = Path(shutil.move(case.spool, case.folder / "moved to another place"))
    case.until_done(uri)
    for machine in halves:
        case.sync(uri, "--state-dir", str(case.folder / machine / "state"), spool=case.folder / machine / "spool-data")
    case.is_exact(uri)


@sizes
def test_a_whole_copy_half_synced_on_one_machine_goes_on_on_the_other(
    make_case, empty_database: Path, size: Size
) -> None:
    case = make_case(size)
    uri = database(case, empty_database)
    for machine in ("a", "b"):
        shutil.copytree(case.spool, case.folder / machine / "spool-data")
    for machine, killed_after in (("a", 9), ("b", 14), ("a", 11)):
        here = case.folder / machine
        result = case.sync(uri, "--state-dir", str(here / "state"), spool=here / "spool-data", kill_after=killed_after)
        assert result.code == -signal.SIGKILL
    for machine in ("b", "a"):
        here = case.folder / machine
        assert case.sync(uri, "--state-dir", str(here / "state"), spool=here / "spool-data").code == 0
    case.is_exact(uri)


@sizes
def test_a_clock_that_jumps_between_syncs_changes_nothing(make_case, empty_database: Path, size: Size) -> None:
    case = make_case(size)
    uri = database(case, empty_database)
    for clock_s in (-3 * 86_400, 400 * 86_400, -7200):
        assert case.sync(uri, kill_after=9, clock_s=clock_s).code == -signal.SIGKILL
    assert case.sync(uri, clock_s=-86_400).code == 0
    assert case.sync(uri, clock_s=86_400).code == 0
    case.is_exact(uri)
