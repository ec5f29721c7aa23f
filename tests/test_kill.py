"""SIGKILL: what `log()` returned for is read back, exactly, and at most one more record for each thread.

The child says through a pipe, one byte each, which calls have returned; this process counts, kills, and compares.
"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import spool

CHILD = """
import os, sys, threading, spool
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
def work(name):
    at = 0
    while True:
        run.log({name: at / 3, "n": at}, step=at)
        os.write(pipe, name.encode())
        at += 1
pipe = int(sys.argv[2])
threads = [threading.Thread(target=work, args=(name,)) for name in sys.argv[3]]
[thread.start() for thread in threads]
"""


def kill_after(count: int, folder: Path, threads: str) -> bytes:
    """Start the child, kill it after `count` bytes, and return all it has written: one byte for each returned call."""
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(writing), threads], pass_fds=[writing], stderr=subprocess.DEVNULL
    )
    os.close(writing)
    returned = b""
    while len(returned) < count:
        returned += os.read(reading, count - len(returned))
    child.kill()
    child.wait()
    while more := os.read(reading, 1 << 16):
        returned += more
    os.close(reading)
    return returned


@pytest.mark.parametrize("threads", ["a", "abcd"])
@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_killed_process_loses_nothing_that_log_returned_for(tmp_path, count, threads):
    returned = kill_after(count, tmp_path / "s", threads)
    assert len(returned) >= count
    run = spool.open(tmp_path / "s").run("r")
    found = run.metrics().to_pylist()
    for name in threads:
        mine = [row for row in found if row["key"] == name]
        at_least = returned.count(name.encode())
        assert at_least <= len(mine) <= at_least + 1
        assert [(row["step"], row["value"]) for row in mine] == [(at, at / 3) for at in range(len(mine))]
    assert run.damage() == []
    assert run.status().state == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("count", range(1, 400, 2))
def test_a_process_killed_after_any_number_of_calls_loses_nothing(tmp_path, count):
    returned = kill_after(count, tmp_path / "s", "ab")
    found = spool.open(tmp_path / "s").run("r").metrics().to_pylist()
    assert all(sum(row["key"] == name for row in found) >= returned.count(name.encode()) for name in "ab")


@pytest.fixture(scope="module")
def ray_session(tmp_path_factory):
    """One Ray for all counts, on two CPUs; the run is begun first, so that its workers inherit where it is."""
    import ray

    folder = tmp_path_factory.mktemp("ray") / "s"
    names = ("SPOOL_DIR", "SPOOL_RUN_ID", "SPOOL_ATTEMPT", "RAY_USAGE_STATS_ENABLED")
    before = {name: os.environ.get(name) for name in names}
    run = spool.init(project="p", dir=folder, run_id="r", role="lead")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
        log_to_driver=False,
        configure_logging=False,
    )
    yield ray, run
    ray.shutdown()
    run.finish()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_killed_ray_actor_loses_nothing_that_log_returned_for(ray_session, tmp_path, count):
    ray, lead = ray_session

    def work(fifo: str) -> None:
        run = spool.init()
        assert not run.is_lead
        pipe = os.open(fifo, os.O_WRONLY)
        os.write(pipe, b"%20d" % os.getpid())
        at = 0
        while True:
            run.log({"actor": at / 7, "nan": math.nan}, step=at)
            os.write(pipe, b".")
            at += 1

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    class Actor:
        def work(self, fifo: str) -> None:
            work(fifo)

    actor = ray.remote(num_cpus=1, max_restarts=0)(Actor).remote()
    task = actor.work.remote(str(fifo))
    with fifo.open("rb", buffering=0) as reading:
        pid = int(read_exactly(reading, 20))
        returned = len(read_exactly(reading, count))
        os.kill(pid, signal.SIGKILL)
        while more := reading.read(1 << 16):
            returned += len(more)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(task)
    run = spool.open(lead.path.parent).run("r")
    (writer,) = [one for one in run.writers() if f"-{pid}-" in one.id]
    found = [row for batch in writer.batches("metrics") for row in batch.to_pylist() if row["key"] == "actor"]
    assert returned <= len(found) <= returned + 1
    assert [(row["step"], row["value"]) for row in found] == [(at, at / 7) for at in range(len(found))]
    assert (writer.is_lead, writer.attempt, writer.damage()) == (False, lead.attempt, [])
    assert run.status().state == "running"


def read_exactly(reading, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += reading.read(count - len(found))
    return found
