"""Many writers of one run: processes, forks, threads, tasks, attempts, stopped and dead ones, containers, wrong clocks.

Whatever they do: each is a writer of its own, its seq has no gap, nothing is damaged, nothing is lost, the living are
never sealed by another.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from journals import begin, journal_path, whole_rows

import spool
from spool import format, liveness
from spool.reader import RunReader, WriterReader

DEADLINE_S = 120


def start(script: str, *arguments: object, prefix: tuple[str, ...] = (), **env: str) -> "subprocess.Popen[str]":
    """A Python child that is told to go on by a line on its stdin, and says on stdout how far it is."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
    )


def hear(child: "subprocess.Popen[str]", expected: str) -> str:
    line = child.stdout.readline()
    assert line.startswith(expected), f"{line!r}; exit {child.poll()}"
    return line.removeprefix(expected).strip()


def tell(child: "subprocess.Popen[str]", line: str = "go") -> None:
    child.stdin.write(line + "\n")
    child.stdin.flush()


@contextmanager
def children(*made: "subprocess.Popen[str]"):
    """Ended, whatever the test does."""
    try:
        yield made
    finally:
        for child in made:
            child.kill()
            child.communicate()


def finish(*made: "subprocess.Popen[str]") -> None:
    for child in made:
        child.communicate(timeout=DEADLINE_S)
        assert child.returncode == 0


def read(path: Path, name: str = "r") -> RunReader:
    return spool.open(path).run(name)


def check_complete(run: RunReader, writers: int) -> dict[str, list[tuple[int, str]]]:
    """Every writer is whole: seq 1, 2, 3, … without a gap, nothing damaged. Returns all rows by writer."""
    assert run.damage() == []
    found = {
        writer: sorted(row for rows in tables.values() for row in rows) for writer, tables in whole_rows(run).items()
    }
    assert len(found) == writers
    for writer in run.writers():
        assert sorted({seq for seq, _ in found[writer.id]}) == list(range(1, writer.last_seq + 1))
        assert {row.count(f"'{writer.id}'") for _, row in found[writer.id]} == {1}
    return found


def values(run: RunReader) -> dict[str, dict[str, list[float]]]:
    """By key and writer, in order."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.metrics().select(["writer_id", "key", "value"]).to_pylist():
        found[row["key"]][row["writer_id"]].append(row["value"])
    return found


def spool_seal(path: Path, *prefix: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*prefix, sys.executable, "-m", "spool.cli", "seal", str(path)], capture_output=True, text=True, check=False
    )


# --- processes


JOINS = """
import os, sys, spool
run = spool.init(dir=sys.argv[1], run_id="r", role="worker")
print("ready", flush=True)
sys.stdin.readline()
for at in range(100):
    run.log({"a": at / 3, "who": int(sys.argv[2])}, step=at)
os._exit(0)
"""


def test_64_processes_log_into_one_run(tmp_path):
    lead = spool.init(project="p", dir=tmp_path, run_id="r", role="lead")
    with ExitStack() as stack:
        made = []
        for first in range(0, 64, 8):
            batch = [start(JOINS, tmp_path, number) for number in range(first, first + 8)]
            stack.enter_context(children(*batch))
            for child in batch:
                hear(child, "ready")
            made += batch
        for child in made:
            tell(child)
        finish(*made)
    lead.finish()
    run = read(tmp_path)
    check_complete(run, writers=65)
    assert list(values(run)["a"].values()) == [[at / 3 for at in range(100)]] * 64
    assert Counter(tuple(set(who)) for who in values(run)["who"].values()) == {(float(at),): 1 for at in range(64)}
    assert run.status().state == "finished"
    assert {writer.attempt for writer in run.writers()} == {lead.attempt}


BEGINS = """
import os, sys, spool
print("ready", flush=True)
sys.stdin.readline()
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
run.log({"a": 1.0}, step=1)
print("lead" if run.is_lead else "worker", run.attempt, flush=True)
os._exit(0)
"""


def test_of_processes_that_begin_one_run_at_the_same_time_one_mints_it_and_the_others_join(tmp_path):
    with children(*(start(BEGINS, tmp_path) for _ in range(8))) as made:
        for child in made:
            hear(child, "ready")
        for child in made:
            tell(child)
        said = [child.communicate(timeout=DEADLINE_S)[0].split() for child in made]
    assert Counter(role for role, _ in said) == {"lead": 1, "worker": 7}
    run = read(tmp_path)
    assert {attempt for _, attempt in said} == {run.attempts()[0].id}
    assert len(run.attempts()) == 1
    check_complete(run, writers=8)
    assert list(values(run)["a"].values()) == [[1.0]] * 8


RESUMES = """
import os, sys, spool
print("ready", flush=True)
sys.stdin.readline()
run = spool.init(dir=sys.argv[1], run_id="r", resume=True)
assert run.is_lead
print("attempt", run.attempt, flush=True)
sys.stdin.readline()
for at in range(50):
    run.log({"a": float(at)}, step=at)
    run.log_generations(step=at, rows=[{"input": run.attempt, "output": str(at)}])
os._exit(0)
"""


def test_two_attempts_at_the_same_time_are_kept_apart_and_both_are_whole(tmp_path):
    first = spool.init(project="p", dir=tmp_path, run_id="r", role="lead")
    first.log({"a": -1.0}, step=0)
    with children(*(start(RESUMES, tmp_path) for _ in range(2))) as made:
        for child in made:
            hear(child, "ready")
        for child in made:
            tell(child)
        attempts = [hear(child, "attempt") for child in made]
        for child in made:
            tell(child)
        finish(*made)
    first.log({"a": -2.0}, step=1)
    run = read(tmp_path)
    check_complete(run, writers=3)
    assert len(set(attempts)) == 2
    assert {one.id for one in run.attempts()} == {first.attempt, *attempts}
    assert min(one.number for one in run.attempts()) == 1
    for row in run.generations().to_pylist():
        assert row["input"] == row["attempt"]
    assert sorted(values(run)["a"].values()) == [[-1.0, -2.0], *[[float(at) for at in range(50)]] * 2]
    assert run.status().state != "finished"


# --- forks, threads, tasks


FORKS = """
import os, signal, sys, threading, time, spool
signal.alarm(120)
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
go_on = threading.Event()
counts = {}
def work(name):
    at = 0
    while not go_on.is_set():
        for at in range(at, at + 20):
            run.log({name: float(at), "text": "x" * (at % 3000)}, step=at)
        at += 1
        time.sleep(0.001)
    counts[name] = at
threads = [threading.Thread(target=work, args=(name,)) for name in ("t0", "t1", "t2")]
[thread.start() for thread in threads]
EXEC = '''
import os, sys, spool
run = spool.init(dir=sys.argv[1], run_id="r", role="worker")
[run.log({"child": float(at)}, step=at) for at in range(5)]
os._exit(0)
'''
pids = []
for number in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        if number % 10 == 9:
            os.execv(sys.executable, [sys.executable, "-c", EXEC, sys.argv[1]])
        for at in range(5):
            run.log({"child": float(at)}, step=at)
        if number % 3 == 0:
            grandchild = os.fork()
            for at in range(5, 10):
                run.log({"grandchild" if grandchild == 0 else "child": float(at)}, step=at)
            if grandchild:
                os.waitpid(grandchild, 0)
        if number % 5 == 0:
            run.finish()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
go_on.set()
[thread.join() for thread in threads]
print("counts", counts["t0"], counts["t1"], counts["t2"], flush=True)
os._exit(0)
"""


def check_forks(path: Path, forks: int) -> None:
    with children(start(FORKS, path, forks)) as (parent,):
        counts = [int(one) for one in hear(parent, "counts").split()]
        finish(parent)
    run = read(path)
    grandchildren = sum(number % 3 == 0 and number % 10 != 9 for number in range(forks))
    check_complete(run, writers=1 + forks + grandchildren)
    (lead,) = [writer for writer in run.writers() if writer.is_lead]
    found = values(run)
    for name, count in zip(("t0", "t1", "t2"), counts, strict=True):
        assert found[name] == {lead.id: [float(at) for at in range(count)]}
    assert Counter(map(tuple, found["grandchild"].values())) == {(5.0, 6.0, 7.0, 8.0, 9.0): grandchildren}
    five, ten = (tuple(map(float, range(size))) for size in (5, 10))
    assert Counter(map(tuple, found["child"].values())) == {five: forks - grandchildren, ten: grandchildren}
    assert run.status().state != "finished", "a forked child cannot finish the run"


def test_children_forked_in_the_middle_of_other_threads_calls_are_writers_of_their_own(tmp_path):
    check_forks(tmp_path, 10)


@pytest.mark.slow
def test_many_children_forked_in_the_middle_of_other_threads_calls_are_writers_of_their_own(tmp_path):
    check_forks(tmp_path, 100)


def test_threads_and_asyncio_tasks_share_one_writer_without_a_gap(tmp_path):
    run = begin(tmp_path, durability="os")

    async def task(number: int) -> None:
        for at in range(40):
            run.log({f"task{number}": float(at)}, step=at)
            async with run.span(f"task{number}", step=at) as span:
                await asyncio.sleep(0)
                span.outputs = at

    async def tasks(first: int) -> None:
        await asyncio.gather(*(task(number) for number in range(first, first + 8)))

    def loop(first: int) -> None:
        asyncio.run(tasks(first))

    def plain(number: int) -> None:
        for at in range(200):
            run.log({f"thread{number}": float(at)}, step=at)

    threads = [threading.Thread(target=loop, args=(first,)) for first in (0, 8)]
    threads += [threading.Thread(target=plain, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = read(run.path.parent, run.id)
    ((writer, records),) = check_complete(whole, writers=1).items()
    found = values(whole)
    for at in range(16):
        assert found[f"task{at}"] == {writer: [float(step) for step in range(40)]}
    for at in range(6):
        assert found[f"thread{at}"] == {writer: [float(step) for step in range(200)]}
    spans = whole.spans().to_pylist()
    assert Counter((span["name"], span["status"]) for span in spans) == {(f"task{at}", "OK"): 40 for at in range(16)}
    assert max(seq for seq, _ in records) == 1 + 16 * 40 * 3 + 6 * 200


# --- stopped, dead, reused


WRITES = """
import os, sys, spool
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
at = 0
print("pid", os.getpid(), flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        run.log({"a": float(at)}, step=at)
        at += 1
    print("logged", at, flush=True)
os._exit(0)
"""


def test_a_stopped_writer_is_not_sealed_and_goes_on_as_if_nothing_had_been(tmp_path):
    with children(start(WRITES, tmp_path)) as (writer,):
        hear(writer, "pid")
        tell(writer, "10")
        hear(writer, "logged 10")
        for count in (20, 30):
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            done = spool_seal(tmp_path)
            assert (done.returncode, done.stdout) == (0, "sealed 0 journals\n")
            assert "left alone, its process is running" in done.stderr
            writer.send_signal(signal.SIGCONT)
            tell(writer, "10")
            hear(writer, f"logged {count}")
        finish(writer)
    assert list(tmp_path.glob("r/*/000001")) == []
    check_complete(read(tmp_path), writers=1)
    assert list(values(read(tmp_path))["a"].values()) == [[float(at) for at in range(30)]]
    assert spool_seal(tmp_path).stdout == "sealed 1 journals\n"
    check_complete(read(tmp_path), writers=1)


def rewrite_header(journal: Path, **changes: object) -> None:
    first, rest = journal.read_bytes().split(b"\n", 1)
    header = {**format.decode(first), **changes}
    header.pop("crc")
    journal.write_bytes(format.header_line(header) + rest)


def test_a_pid_that_now_belongs_to_another_process_proves_nothing_alive(tmp_path):
    with children(start(WRITES, tmp_path)) as (writer,):
        hear(writer, "pid")
        tell(writer, "3")
        hear(writer, "logged 3")
        finish(writer)
    (journal,) = tmp_path.glob("r/*/000001.jsonl")
    started = WriterReader(journal.parent).header["process_started"]
    rewrite_header(journal, pid=os.getpid(), process_started=liveness._started(os.getpid()))
    assert read(tmp_path).status().state == "running"
    assert spool_seal(tmp_path).stdout == "sealed 0 journals\n"
    rewrite_header(journal, pid=os.getpid(), process_started=started)
    assert read(tmp_path).status().state == "failed"
    assert spool_seal(tmp_path).stdout == "sealed 1 journals\n"
    check_complete(read(tmp_path), writers=1)


CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")

REUSES = """
import os, pathlib, subprocess, sys, time
path, script = sys.argv[1:]
writer = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert writer.stdout.readline() == f"pid {writer.pid}\\n"
writer.stdin.write("7\\n"); writer.stdin.flush()
assert writer.stdout.readline() == "logged 7\\n"
def seal():
    return subprocess.run([sys.executable, "-m", "spool.cli", "seal", path], capture_output=True, text=True)
alive = seal()
started = pathlib.Path(f"/proc/{writer.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
writer.kill(); writer.wait()
ticks = os.sysconf("SC_CLK_TCK")
while int(time.clock_gettime(time.CLOCK_BOOTTIME) * ticks) <= int(started): time.sleep(0.001)
pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(writer.pid - 1))
other = subprocess.Popen(["sleep", "600"])
assert other.pid == writer.pid, (other.pid, writer.pid)
reused = seal()
assert other.poll() is None
print("alive", alive.stdout.strip())
print("reused", reused.stdout.strip())
other.kill()
"""


@pytest.fixture(scope="module")
def container() -> tuple[str, ...]:
    """Words before a command that give it a pid namespace and a host name of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    for prefix in (CONTAINER, (CONTAINER[0], "--user", "--map-root-user", *CONTAINER[1:])):
        done = subprocess.run([*prefix, "hostname", "trainer"], capture_output=True, check=False)
        if done.returncode == 0:
            return prefix
    pytest.skip("the kernel lets this user make no pid namespace")


def test_a_pid_that_the_kernel_has_given_again_is_a_proven_death(container, tmp_path):
    may_choose = subprocess.run(
        [*container, "sh", "-c", "echo 300 > /proc/sys/kernel/ns_last_pid"], capture_output=True, check=False
    )
    if may_choose.returncode:
        pytest.skip("the kernel lets this user choose no pid")
    with children(start(REUSES, tmp_path, WRITES, prefix=container)) as (inside,):
        assert hear(inside, "alive") == "sealed 0 journals"
        assert hear(inside, "reused") == "sealed 1 journals"
        finish(inside)
    run = read(tmp_path)
    check_complete(run, writers=1)
    assert list(values(run)["a"].values()) == [[float(at) for at in range(7)]]
    assert (run.status().state, run.status().proven_death) == ("failed", True)


IN_CONTAINER = """
import os, socket, subprocess, sys
subprocess.run(["hostname", "trainer"], check=True)
import spool
run = spool.init(project="p", dir=sys.argv[1], run_id="r", role=sys.argv[2])
print("writer", socket.gethostname(), os.getpid(), flush=True)
for line in sys.stdin:
    if line == "seal\\n":
        done = subprocess.run([sys.executable, "-m", "spool.cli", "seal", sys.argv[1]], capture_output=True, text=True)
        print("sealed", done.stdout.strip(), "|", done.stderr.count("cannot be proven"), done.stderr.count("is running"), flush=True)
    else:
        run.log({"a": float(line)}, step=1)
        print("logged", flush=True)
os._exit(0)
"""


def test_equal_pids_and_host_names_in_two_containers_are_two_writers_and_neither_seals_the_other(container, tmp_path):
    one = start(IN_CONTAINER, tmp_path, "lead", prefix=container)
    with children(one):
        who = hear(one, "writer")
        two = start(IN_CONTAINER, tmp_path, "worker", prefix=container)
        with children(two):
            assert hear(two, "writer") == who
            for child, value in ((one, "1"), (two, "2"), (one, "3")):
                tell(child, value)
                hear(child, "logged")
            for child in (one, two):
                tell(child, "seal")
                assert hear(child, "sealed") == "sealed 0 journals | 1 1"
            assert "sealed 0 journals" in spool_seal(tmp_path).stdout
            run = read(tmp_path)
            assert run.status().state == "unknown"
            finish(one)
            tell(two, "seal")
            assert hear(two, "sealed") == "sealed 0 journals | 1 1", (
                "death in the other container is not proven in this one"
            )
            finish(two)
    run = read(tmp_path)
    check_complete(run, writers=2)
    assert sorted(values(run)["a"].values()) == [[1.0, 3.0], [2.0]]
    ids = [writer.id for writer in run.writers()]
    host, pid = who.split()
    assert all(one.startswith(f"{host}-{pid}-") for one in ids)
    assert len(set(ids)) == 2
    assert {writer.header["pid"] for writer in run.writers()} == {int(pid)}
    assert len({writer.header["pid_namespace"] for writer in run.writers()}) == 2


# --- clocks


CLOCK = """
import json, os, sys, threading, time
moments = iter(json.loads(sys.argv[2]))
lock = threading.Lock()
def from_list(main=threading.main_thread()):
    global last
    if threading.current_thread() is main:
        last = next(moments, last)
    return last
last = 0
import spool
from spool import writer
time.time_ns = from_list
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
print("began", flush=True)
with run.span("over", step=0) as span:
    for at in range(int(sys.argv[3])):
        run.log({"a": float(at)}, step=at)
        if at % 4 == 3:
            run._writer._rotate()
print("written", json.dumps(last), flush=True)
run.finish()
os._exit(0)
"""

HOUR_NS = 3600 * 10**9
SUMMER_ENDS_NS = 1_792_890_000 * 10**9
"""2026-10-25 01:00 UTC: local clocks in Berlin go from 3:00 back to 2:00."""


@pytest.mark.parametrize(
    ("zone", "jump_ns"),
    [("UTC", -HOUR_NS), ("Europe/Berlin", 0), ("Europe/Berlin", -HOUR_NS), ("America/St_Johns", HOUR_NS)],
    ids=["an hour back", "summer time ends", "an hour back as summer time ends", "an hour ahead"],
)
def test_a_clock_that_jumps_changes_no_order_and_loses_nothing(tmp_path, zone, jump_ns):
    step_ns = 60 * 10**9
    before = [SUMMER_ENDS_NS - step_ns * at for at in range(30, 0, -1)]
    after = [SUMMER_ENDS_NS + jump_ns + step_ns * at for at in range(30)]
    moments = str(before + after)
    with children(start(CLOCK, tmp_path, moments, 24, TZ=zone)) as (child,):
        hear(child, "began")
        hear(child, "written")
        finish(child)
    run = read(tmp_path)
    check_complete(run, writers=1)
    found = run.metrics().select(["seq", "ts", "step", "value"])
    assert found["value"].to_pylist() == [float(at) for at in range(24)]
    seqs = found["seq"].to_pylist()
    assert seqs == sorted(seqs)
    ts = found["ts"].cast("int64").to_pylist()
    assert set(ts) <= {*before, *after}
    assert (ts != sorted(ts)) == (jump_ns < 0), "as the clock said it, right or wrong"
    assert run.status().state == "finished"
    assert list(tmp_path.glob("r/*/000002/metrics.parquet")) != []
    assert subprocess.run([sys.executable, "-m", "spool.cli", "verify", str(tmp_path)], check=False).returncode == 0


def test_a_wall_clock_set_back_never_removes_a_sealed_journal_early(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0}, step=1)
    journal = journal_path(run)
    run.finish()
    segment = journal.parent / "000001"
    ahead = time.time() + 3600
    os.utime(segment, (ahead, ahead))
    assert spool_seal(tmp_path / "spool").stdout == "sealed 0 journals\n"
    assert journal.is_file()
    check_complete(read(tmp_path / "spool", run.id), writers=1)
