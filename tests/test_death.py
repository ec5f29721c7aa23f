"""Process death: what a call returned for is read back once, equal to the last bit, whenever and wherever SIGKILL comes.

The child (mortal.py) tells by one byte which calls have returned; this process counts, kills, and compares.
"""

import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

import mortal
import pyarrow as pa
import pytest
from journals import own_writer, whole_rows, without_thread
from mortal import Row, Stream, bits

import spool
from spool import environment, format, layout, process, seal
from spool.errors import NotASpoolError
from spool.reader import RunReader, WriterReader
from spool.run import Run
from spool.writer import Writer

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


# --- every kind of record, at any moment and at every change of the disk


def rows_of(run: RunReader) -> dict[str, list[Row]]:
    """By stream, in the order of writing: what `Stream.rows` says of each call."""
    found: dict[str, list[Row]] = {}
    for writer in run.writers():
        numbered = [one for table in ("metrics", "generations", "spans") for one in _rows_of(writer, table)]
        for _, name, row in sorted(numbered, key=lambda one: one[0]):
            found.setdefault(name, []).append(row)
    return found


def _rows_of(writer: WriterReader, table: str) -> list[tuple[int, str, Row]]:
    rows = [row for batch in writer.batches(table) for row in _plain(batch).to_pylist()]
    if table == "metrics":
        shown = [(row["step"], row["key"], bits(row["value"]), row["exact"], row["kind"]) for row in rows]
        return [(row["seq"], row["key"].split("/")[0], one) for row, one in zip(rows, shown, strict=True)]
    if table == "generations":
        names = ("step", "index", "input", "output", "label", "score", "extra")
        plain = [{**row, "score": bits(row["score"])} for row in rows]
        return [(row["seq"], row["split"], tuple(row[name] for name in names)) for row in plain]
    documents = ("inputs", "outputs", "attributes")
    plain = [
        {**row, **{name: row[name] and format.load_json(row[name].encode()) for name in documents}} for row in rows
    ]
    return [(row["seq"], row["name"], tuple(row[name] for name in ("step", "status", *documents))) for row in plain]


def _plain(batch: pa.Table) -> pa.Table:
    return batch.drop_columns([field.name for field in batch.schema if pa.types.is_timestamp(field.type)])


def check(
    folder: Path, returned: "Counter[str]", in_flight: Container[str] = (), *, is_alone: bool = True
) -> RunReader | None:
    """Compare the run with the calls that have returned, by stream; of those `in_flight` one more call may be there.

    "!" stands for a returned init, "S" for a save, "F" for a finish. `is_alone`: these are all streams of the run.
    """
    try:
        run = spool.open(folder).run("r")
    except NotASpoolError:
        assert not returned
        return None
    assert run.damage() == []
    for writer in run.writers():
        batches = [batch for table in format.TABLES for batch in writer.batches(table)]
        seqs = sorted({seq for batch in batches for seq in batch["seq"].to_pylist()})
        assert seqs == list(range(1, writer.last_seq + 1))
    found = rows_of(run)
    for name in {*returned, *(found if is_alone else ())} - set("!SF"):
        assert name in returned or name in in_flight
        calls = returned[name]
        expected = [row for at in range(calls) for row in Stream(name).rows(at)]
        possible = Stream(name).rows(calls) if name in in_flight else []
        rows = found.get(name, [])
        assert rows[: len(expected)] == expected
        assert rows[len(expected) :] == possible[: len(rows) - len(expected)]
    assert len(run.writers()) >= returned["!"]
    saved = [name for writer in run.writers() for name, _ in writer.saved_files()]
    assert returned["S"] <= len(saved) <= returned["S"] + 1
    assert all(name == "config.yaml" for name in saved)
    assert all(path.read_bytes() == mortal.SAVED for path in (run.path / "files").glob("[!.]*"))
    if returned["F"]:
        assert run.status().state == "finished"
    elif returned["!"]:
        assert run.status().state in ("failed", "finished")
    return run


def go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any death the run is resumed, and what is left is sealed: the rows stay, and none but the new ones is added."""
    monkeypatch.setattr(environment, "describe", dict)  # it asks git, each time
    before = whole_rows(spool.open(folder).run("r")) if (folder / "r" / format.RUN_FILE).is_file() else {}
    left = [journal for writer in before for journal in sorted((folder / "r" / writer).glob("*.jsonl"))]
    run = without_thread(spool.init(project="p", dir=folder, run_id="r", resume=True))
    run.log({"after": 0.1})
    for journal in left:
        if layout.header(journal.parent):  # otherwise killed before its first line: nobody knows whose it was
            seal.seal(journal, writer_died=True)
        seal.remove_sealed(journal)
    found = spool.open(folder).run("r")
    after = whole_rows(found)
    assert ["'after', 0.1" in row for _, row in after.pop(own_writer(run).id)["metrics"]] == [True]
    assert after == before
    assert found.damage() == []
    assert not [path for path in folder.rglob(".0*") if path.is_dir()], "what a killed seal has left stays"
    process.closed(run)
    own_run_writer(run).abandon()


def own_run_writer(run: Run) -> Writer:
    assert run._writer is not None
    return run._writer


def program(*arguments: object, told: int, **settings: Any) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(filter(None, [str(Path(mortal.__file__).parent), *sys.path]))
    return subprocess.Popen(
        [sys.executable, mortal.__file__, *map(str, arguments)],
        pass_fds=[told] if told >= 0 else [],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        start_new_session=True,
        **settings,
    )


def kill_at_random(chance: random.Random, folder: Path, prefix: str, threads: str) -> bytes:
    """Kill a trainer, or it and its sealing child, after some calls or some time; returns one byte for each returned call.

    No process of it is left when this returns.
    """
    reading, writing = os.pipe()
    child = program("trainer", folder, writing, prefix, threads, told=writing)
    os.close(writing)
    calls = int(10 ** chance.uniform(0, 3)) if chance.random() < 0.7 else sys.maxsize
    deadline_s = time.monotonic() + (60 if calls < sys.maxsize else chance.uniform(0, 0.5))
    returned = b""
    while len(returned) < calls and select.select([reading], [], [], max(0, deadline_s - time.monotonic()))[0]:
        returned += os.read(reading, min(calls - len(returned), 1 << 10))
    assert len(returned) == calls or calls == sys.maxsize
    if chance.random() < 0.5:
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()
    while more := os.read(reading, 1 << 16):
        returned += more
    os.close(reading)
    if returned:
        check(folder, count_calls(returned, prefix), {prefix + name for name in threads}, is_alone=False)
    assert child.stderr is not None
    with child.stderr:
        said = child.stderr.read()  # to its end: the sealing child that lives on holds it too
    assert b"Traceback" not in said, said.decode()
    return returned


def count_calls(returned: bytes, prefix: str = "") -> "Counter[str]":
    return Counter(letter if letter in "!SF" else prefix + letter for letter in returned.decode())


def kill_often(folder: Path, kills: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, killed and resumed again and again."""
    chance = random.Random(seed)
    returned: Counter[str] = Counter()
    names: set[str] = set()
    for attempt in range(kills):
        prefix, threads = f"{attempt}-", "abc"[: chance.randint(1, 3)]
        names |= {prefix + name for name in threads}
        returned += count_calls(kill_at_random(chance, folder, prefix, threads), prefix)
        check(folder, returned, names)
    go_on(folder, monkeypatch)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_moments_loses_nothing_and_goes_on(tmp_path, monkeypatch, seed):
    kill_often(tmp_path / "s", 5, seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_run_killed_a_thousand_times_loses_nothing_and_goes_on(tmp_path, monkeypatch, seed):
    kill_often(tmp_path / "s", 10, seed, monkeypatch)


def die_at_each_step(root: Path, workload: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = program("steps", workload, root, how, told=-1)
    assert child.stderr is not None
    with child.stderr:
        said = child.stderr.read().decode()
    assert child.wait() == 0, said
    told = sorted(root.glob("*.told"))
    assert len(told) > 5
    for file in told:
        folder = file.with_suffix("")
        in_flight = {"begins": "a", "rotates": "abc", "resumes": "a", "saves": "a", "finishes": "a"}.get(workload, "")
        check(folder, count_calls(file.read_bytes()), set(in_flight))
        go_on(folder, monkeypatch)


@pytest.mark.parametrize("workload", mortal.WORKLOADS)
def test_death_at_any_change_of_the_disk_loses_nothing(tmp_path, monkeypatch, workload):
    die_at_each_step(tmp_path, workload, "once", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("workload", mortal.WORKLOADS)
def test_death_before_and_after_every_change_of_the_disk_loses_nothing(tmp_path, monkeypatch, workload):
    die_at_each_step(tmp_path, workload, "twice", monkeypatch)


def seal_with_dying_children(folder: Path, first: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    child = program("sealers", folder, writing, first, each, told=writing)
    os.close(writing)
    returned = b""
    while more := os.read(reading, 1 << 16):
        returned += more
    os.close(reading)
    assert child.stderr is not None
    with child.stderr:
        said = child.stderr.read().decode()
    assert child.wait() == 0, said
    run = check(folder, count_calls(returned))
    assert run is not None
    (writer,) = run.writers()
    sources = layout.sources(writer.path)
    assert len(sources) == 7
    assert any(source.segment is None for source in sources), "every child has lived"
    go_on(folder, monkeypatch)


def test_a_trainer_lives_on_while_its_sealing_children_die(tmp_path, monkeypatch):
    seal_with_dying_children(tmp_path / "s", 0, 5, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 70, 7))
def test_a_trainer_lives_on_at_whatever_step_its_sealing_children_die(tmp_path, monkeypatch, first):
    seal_with_dying_children(tmp_path / "s", first, 1, monkeypatch)


# --- Ray


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
