"""The writer under threads, signals, forks and failing disks: no seq twice, none missing, nothing raised into training."""

import errno
import gc
import hashlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from itertools import pairwise

import pytest
from journals import begin, begin_without_thread, journal_path, own_writer, reader, records, rows

import spool
from spool import files, format
from spool.journal import scan
from spool.reader import WriterReader
from spool.writer import Writer

HEADER = {"run": "r", "attempt": {"id": "1-000000", "number": 1}, "lead": True}


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "run").mkdir()
    made = Writer(tmp_path / "run" / "writer", HEADER, "os")
    yield made
    made.close()


def seqs(writer: Writer) -> list[int]:
    found = scan(writer.path)
    assert found.damage == []
    assert not found.is_torn
    return list(found.seqs)


def metric(value: float) -> list[bytes]:
    return [b'"metrics":{"a":%r}' % value if isinstance(value, bytes) else format.fast_metrics({"a": value}) or b""]


def test_threads_share_a_run_without_a_gap(tmp_path):
    run = begin(tmp_path)

    def work(number: int) -> None:
        for at in range(500):
            run.log({f"thread{number}": float(at)}, step=at)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = own_writer(run)
    assert found.last_seq == 4001
    assert found.damage() == []
    for number in range(8):
        mine = [row["value"] for row in rows(run) if row["key"] == f"thread{number}"]
        assert mine == [float(at) for at in range(500)]


class LogsWhenItDies:
    """Part of a reference cycle, so that the garbage collector runs `__del__` wherever it starts."""

    def __init__(self, run: spool.Run, calls: int = 1) -> None:
        self.run, self.calls, self.me = run, calls, self

    def __del__(self) -> None:
        for _ in range(self.calls):
            self.run.log({"dying": 1.0})


def test_a_call_from_inside_a_call_through_the_garbage_collector_is_kept(tmp_path, monkeypatch):
    run = begin(tmp_path)
    real = os.write

    def write(descriptor: int, line: bytes) -> int:
        written = real(descriptor, line)
        gc.collect(0)  # as any allocation in here may
        return written

    monkeypatch.setattr(files, "write", write)
    for _ in range(20):
        LogsWhenItDies(run)
        run.log({"living": 1.0})
    monkeypatch.undo()
    assert Counter(row["key"] for row in rows(run)) == {"living": 20, "dying": 20}
    assert own_writer(run).damage() == []


def test_thousands_of_calls_from_inside_one_call_are_kept(tmp_path, monkeypatch):
    run = begin(tmp_path)
    real = os.write

    def write(descriptor: int, line: bytes) -> int:
        monkeypatch.setattr(files, "write", real)
        LogsWhenItDies(run, calls=5000)
        gc.collect(0)
        return real(descriptor, line)

    monkeypatch.setattr(files, "write", write)
    run.log({"living": 1.0})
    assert Counter(row["key"] for row in rows(run)) == {"living": 1, "dying": 5000}
    assert own_writer(run).damage() == []


def test_a_call_from_a_destructor_during_rotation_stays_in_the_chain(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="os")
    run.log({"living": 1.0})
    real = format.header_line

    def header_line(header: dict) -> bytes:
        LogsWhenItDies(run)
        gc.collect(0)
        return real(header)

    monkeypatch.setattr(format, "header_line", header_line)
    run._writer._rotate()
    monkeypatch.undo()
    folder = run._writer.folder
    first, second = scan(folder / "000001.jsonl"), scan(folder / "000002.jsonl")
    assert second.header["previous"] == {"length": first.size, "sha256": first.sha256}
    assert second.header["first_seq"] == first.last_seq + 1 == second.seqs[0]
    assert WriterReader(folder).damage() == []


def test_a_call_from_a_signal_handler_inside_a_call_is_kept(tmp_path, monkeypatch):
    run = begin(tmp_path)
    real = os.write

    def write(descriptor: int, line: bytes) -> int:
        monkeypatch.setattr(files, "write", real)
        written = real(descriptor, line[:10])
        signal.raise_signal(signal.SIGUSR1)
        return written + real(descriptor, line[10:])

    old = signal.signal(signal.SIGUSR1, lambda *_: run.log({"handler": 1.0}))
    monkeypatch.setattr(files, "write", write)
    try:
        run.log({"a": 1.0})
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert Counter(row["key"] for row in rows(run)) == {"a": 1, "handler": 1}
    assert own_writer(run).damage() == []


def test_a_finish_from_a_signal_handler_inside_a_call_comes_after_it(tmp_path, monkeypatch):
    run = begin(tmp_path)
    folder = run._writer.folder
    real = os.write

    def write(descriptor: int, line: bytes) -> int:
        monkeypatch.setattr(files, "write", real)
        signal.raise_signal(signal.SIGUSR1)
        return real(descriptor, line)

    def handler(*_: object) -> None:
        run.finish("preempted")
        raise SystemExit(3)

    old = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(files, "write", write)
    try:
        with pytest.raises(SystemExit):
            run.log({"a": 1.0})
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert reader(run).status().state == "preempted"
    assert WriterReader(folder).damage() == []


def test_ctrl_c_in_log_never_yields_a_seq_twice_or_none(tmp_path):
    run = begin(tmp_path, durability="os")
    returned = interrupted = 0

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for at in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, (1 + at % 40) * 1e-6)
                run.log({"a": float(at), "b": None}, step=at)
                run.log({"c": 1.0})
                signal.setitimer(signal.ITIMER_REAL, 0)
                returned += 1
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    found = scan(journal_path(run))
    assert found.damage == []
    assert list(found.seqs) == list(range(1, len(found.seqs) + 1))
    assert run._writer.seq == found.seqs[-1]
    assert interrupted > 100
    ordinals = [row["ordinal"] for row in rows(run) if row["key"] == "c"]
    assert len(set(ordinals)) == len(ordinals) >= returned


@pytest.mark.parametrize("when", ["before the write", "half", "after the write"])
def test_ctrl_c_around_a_write_commits_it_whole_or_takes_it_back(tmp_path, monkeypatch, when):
    run = begin(tmp_path, durability="os")
    run.log({"a": 1.0})
    real = os.write

    def write(descriptor: int, line: bytes) -> int:
        if when != "before the write":
            real(descriptor, line[: len(line) // 2] if when == "half" else line)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write", write)
    with pytest.raises(KeyboardInterrupt):
        run.log({"a": 2.0})
    monkeypatch.undo()
    run.log({"a": 3.0})
    assert [row["value"] for row in rows(run)] == ([1.0, 2.0, 3.0] if when == "after the write" else [1.0, 3.0])
    assert own_writer(run).damage() == []


def test_a_forked_child_is_another_writer_and_cannot_finish_the_run(tmp_path):
    run = begin(tmp_path)
    run.log({"parent": 1.0})
    pid = os.fork()
    if pid == 0:
        run.log({"child": 1.0})
        run.finish()
        os._exit(0)
    os.waitpid(pid, 0)
    run.log({"parent": 2.0})
    found = reader(run)
    assert found.status().state == "running"
    lead, child = found.writers()
    assert (lead.is_lead, child.is_lead, child.finished) == (True, False, True)
    assert f"-{pid}-" in child.id
    assert Counter((row["writer_id"], row["key"]) for row in rows(run)) == {
        (lead.id, "parent"): 2,
        (child.id, "child"): 1,
    }
    assert found.damage() == []
    run.finish()
    assert reader(run).status().state == "finished"


def test_a_fork_after_the_finish_closes_no_other_file_and_begins_no_writer(tmp_path, capfd):
    run = begin(tmp_path)
    old = run._writer._live._descriptor
    run.finish()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
    if other != old:
        os.dup2(other, old)
    pid = os.fork()
    if pid == 0:
        run.log({"late": 1.0})
        os.write(old, b"still open")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(old)
    assert (tmp_path / "other").read_bytes() == b"still open"
    assert len(reader(run).writers()) == 1
    assert "Exception" not in capfd.readouterr().err


def test_a_forked_child_that_cannot_begin_a_journal_goes_on_training(tmp_path, capfd):
    run = begin(tmp_path)

    def no_room(_path: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pid = os.fork()
    if pid == 0:
        files.make_one_folder = no_room
        run.log({"a": 1.0})
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert "No space left" in capfd.readouterr().err


class FullDisk:
    """A disk with room for some more bytes, in place of `files.write`; `short` writes what fits, as a file system may."""

    def __init__(self, room: int, short: bool) -> None:
        self.room, self.short = room, short

    def __call__(self, descriptor: int, line: bytes) -> int:
        if len(line) <= self.room:
            self.room -= len(line)
            return os.write(descriptor, line)
        if self.short and self.room:
            written, self.room = os.write(descriptor, line[: self.room]), 0
            return written
        raise OSError(errno.ENOSPC, "No space left on device")


def losses(run: spool.Run) -> list[dict]:
    """The counts of the loss events."""
    bodies = [format.load_json(row["body"].encode()) for row in rows(run, "events") if row["kind"] == "loss"]
    return [body["records"] for body in bodies if "records" in body]


@pytest.mark.parametrize("short", [True, False])
def test_what_a_full_disk_does_not_take_waits_in_memory_and_is_written_in_order_later(
    tmp_path, monkeypatch, capfd, short
):
    run = begin_without_thread(tmp_path)
    run.log({"a": 0.0})
    size = journal_path(run).stat().st_size
    monkeypatch.setattr(files, "write", FullDisk(500, short))
    for step in range(50):
        run.log({"a": float(step)}, step=step)
    with run.span("lost"):
        pass
    fitted = len(rows(run)) - 1
    assert 0 < fitted < 20
    assert journal_path(run).stat().st_size <= size + 500
    assert own_writer(run).damage() == []
    monkeypatch.undo()
    run.log({"a": 50.0}, step=50)
    run._writer._tick()
    run.log({"a": 51.0}, step=51)
    assert [row["value"] for row in rows(run)] == [0.0, *map(float, range(52))]
    assert [row["name"] for row in rows(run, "spans")] == ["lost"]
    assert [row for row in rows(run, "events") if row["kind"] == "loss"] == []
    assert own_writer(run).damage() == []
    assert capfd.readouterr().err.count("could not write") == 1


def test_losses_up_to_the_end_are_counted_before_the_finish_which_stays_the_last_record(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 1000)
    run = begin(tmp_path)
    monkeypatch.setattr(files, "write", FullDisk(0, short=False))
    run.log({"a": 1.0, "long": "x" * 1000})
    run.log({"a": 2.0})
    monkeypatch.undo()
    run.finish()
    assert [row["value"] for row in rows(run)] == [2.0]
    assert [row["kind"] for row in rows(run, "events")][-2:] == ["loss", "finish"]
    assert losses(run) == [{"metrics": 1}]
    assert reader(run).status().state == "finished"


def test_strict_raises_when_a_record_cannot_be_written(tmp_path, monkeypatch):
    run = begin(tmp_path, strict=True)
    monkeypatch.setattr(files, "write", FullDisk(0, short=False))
    with pytest.raises(spool.WriteError, match=r"could not write \(\[Errno 28\] No space left"):
        run.log({"a": 1.0})
    with pytest.raises(spool.WriteError):
        run.tag(a=1)
    monkeypatch.undo()
    run.log({"a": 2.0})
    assert [row["value"] for row in rows(run)] == [2.0]


def test_what_a_short_write_left_and_cannot_be_removed_is_given_up_with_its_journal(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    run.log({"a": 1.0})

    def truncate(_descriptor: int, _length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(files, "write", FullDisk(10, short=True))
        disk.setattr(files, "truncate", truncate)
        run.log({"a": 2.0})
        run.log({"a": 3.0})
    run._writer._tick()
    run.log({"a": 4.0})
    assert [row["value"] for row in rows(run)] == [1.0, 2.0, 3.0, 4.0]
    found = own_writer(run)
    assert [part.path.name for part in found._parts if hasattr(part, "is_torn") and part.is_torn] in (
        ["000001.jsonl"],
        [],
    )
    assert found.damage() == []


def test_a_failing_new_journal_leaves_the_old_one_going(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", FullDisk(20, short=True))
        run._writer._rotate()
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", FullDisk(0, short=False))
        run._writer._rotate()
    run.log({"a": 1.0})
    assert [path.name for path in sorted(run._writer.folder.glob("*.jsonl"))] == ["000001.jsonl"]
    run._writer._rotate()
    run.log({"a": 2.0})
    assert journal_path(run).name == "000002.jsonl"
    assert [row["value"] for row in rows(run)] == [1.0, 2.0]
    assert own_writer(run).damage() == []


@pytest.mark.parametrize("stderr", [None, "closed", "broken pipe"])
def test_a_lost_stderr_never_raises_into_training(tmp_path, monkeypatch, stderr):
    run = begin_without_thread(tmp_path)
    listener = None
    if stderr == "closed":
        listener = io.StringIO()
        listener.close()
    elif stderr == "broken pipe":
        reading, writing = os.pipe()
        os.close(reading)
        listener = os.fdopen(writing, "w", buffering=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", listener)
        patch.setattr(files, "write", FullDisk(0, short=False))
        run.log({"a": object()})
    run._writer._tick()
    run.log({"a": 1.0})
    assert [row["value"] for row in rows(run)] == [None, 1.0]
    if stderr == "broken pipe":
        with pytest.raises(BrokenPipeError):
            listener.close()


def test_journals_are_chained_by_hash_and_length_when_they_rotate_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SEAL_BYTES", 4000)
    monkeypatch.setattr("spool.seal.start", lambda *_args, **_settings: Done())
    run = begin_without_thread(tmp_path)
    rotated = 0
    for step in range(400):
        run.log({"a": float(step)}, step=step)
        if step % 100 == 99:  # as the background thread does when it is woken
            before = journal_path(run)
            run._writer._tick()
            rotated += journal_path(run) != before
    journals = sorted(run._writer.folder.glob("*.jsonl"))
    assert len(journals) >= 4
    scans = [scan(path) for path in journals]
    for before, after in pairwise(scans):
        content = before.path.read_bytes()
        assert after.header["previous"] == {"length": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert after.header["first_seq"] == before.last_seq + 1
    assert [row["value"] for row in rows(run)] == [float(step) for step in range(400)]
    assert own_writer(run).damage() == []


class Done:
    """A sealing child that ended at once without having sealed."""

    returncode = 1

    def poll(self) -> int:
        return 1

    def wait(self) -> int:
        return 1


SYNCS = {"record": 3, "os": 0}


@pytest.mark.parametrize("durability", SYNCS)
def test_durability_decides_who_calls_fdatasync(tmp_path, monkeypatch, durability):
    run = begin(tmp_path, durability=durability)
    synced = []
    monkeypatch.setattr(files, "sync_data", synced.append)
    for _ in range(3):
        run.log({"a": 1.0})
    assert len(synced) == SYNCS[durability]


def test_interval_durability_syncs_in_the_background(tmp_path, monkeypatch):
    run = begin(tmp_path, durability="interval")
    synced = threading.Event()
    real = files.sync_data

    def sync_data(descriptor: int) -> None:
        real(descriptor)
        synced.set()

    monkeypatch.setattr(files, "sync_data", sync_data)
    run.log({"a": 1.0})
    assert synced.wait(30)


def test_a_failed_fdatasync_begins_a_new_journal_and_says_what_is_suspect(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="interval")
    run.log({"a": 1.0})

    def sync_data(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(files, "sync_data", sync_data)
        run._writer._tick()
    assert journal_path(run).name != "000001.jsonl"
    body = next(format.load_json(row["body"].encode()) for row in rows(run, "events") if row["kind"] == "loss")
    assert body["suspect"][1] >= 2
    assert "Input/output error" in body["reason"]


def test_a_record_whose_fdatasync_fails_is_written_into_a_new_journal(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="record")
    run.log({"a": 1.0})

    def sync_data(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(files, "sync_data", sync_data)
        run.log({"a": 2.0})
    run.log({"a": 3.0})  # the journal is not believed any more, even where the disk says "fine" again
    run._writer._tick()
    run.log({"a": 4.0})
    run._writer._tick()
    assert journal_path(run).name == "000002.jsonl"
    assert [row["value"] for row in rows(run)] == [1.0, 2.0, 3.0, 4.0]
    assert losses(run) == []
    assert own_writer(run).damage() == []


def test_a_whole_record_that_cannot_be_taken_back_keeps_its_seq(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="record")

    def fails(*_arguments: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(files, "sync_data", fails)
        disk.setattr(files, "truncate", fails)
        run.log({"a": 1.0})
    run._writer._tick()
    run.log({"a": 2.0})
    assert [row["value"] for row in rows(run)] == [1.0, 2.0]
    assert own_writer(run).damage() == []


@pytest.mark.parametrize("function", ["sync_data", "close"])
def test_a_disk_that_fails_at_the_end_is_a_warning_and_finish_returns(tmp_path, monkeypatch, capfd, function):
    run = begin_without_thread(tmp_path)
    run.log({"a": 1.0})

    def fails(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(files, function, fails)
        run.finish()
    assert "may not survive a power cut" in capfd.readouterr().err
    assert reader(run).status().state == "finished"


def test_a_silent_writer_says_that_it_is_alive(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    run._writer._tick()
    monkeypatch.setattr("spool.writer.ALIVE_AFTER_S", 0)
    run._writer._tick()
    assert [row["kind"] for row in rows(run, "events")][-1] == "alive"


def test_a_record_is_in_the_kernel_when_log_returns(tmp_path):
    script = """
        import os, signal, sys, spool
        run = spool.init(project="p", dir=sys.argv[1], run_id="r")
        run.log({"a": 1.5}, step=1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "s")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert spool.open(tmp_path / "s").run("r").metrics()["value"].to_pylist() == [1.5]


def test_one_write_a_record(writer, monkeypatch):
    written = []

    def write(descriptor: int, line: bytes) -> int:
        written.append(line)
        return os.write(descriptor, line)

    monkeypatch.setattr(files, "write", write)
    for value in (1.0, 2.0):
        writer.append(1, 1, metric(value))
    assert [line.count(b"\n") for line in written] == [1, 1]
    assert seqs(writer) == [1, 2]
    assert b"".join(line + b"\n" for line in writer.path.read_bytes().splitlines()[1:]) == b"".join(written)


def test_a_header_tells_run_writer_host_process_and_attempt(tmp_path):
    run = begin(tmp_path)
    header = scan(journal_path(run)).header
    assert header["run"] == run.id
    assert header["writer"] == journal_path(run).parent.name
    assert header["attempt"] == {"id": run.attempt, "number": 1}
    assert (header["pid"], header["lead"], header["journal"], header["first_seq"]) == (os.getpid(), True, 1, 1)
    assert {"host", "boot", "pid_namespace", "process_started", "created_ns", "format"} <= set(header)
    assert records(journal_path(run))[0]["event"] == "attempt"


def test_a_signal_at_any_line_of_catching_up_loses_nothing_and_raises_nothing(tmp_path):
    """A handler that logs comes at each line in turn of what does the calls from inside a call."""
    codes = (Writer._drain.__code__, Writer._write_first.__code__)
    lines = {line for code in codes for _, _, line in code.co_lines() if line}
    for at in sorted(lines):
        run = spool.init(project="p", experiment="e", dir=tmp_path)
        logged = []

        def log(*_: object, run=run, logged=logged) -> None:
            logged.append(len(logged))
            run.log({"sig": logged[-1]}, step=1)

        done: list[int] = []

        def trace(frame, _event, _argument, at=at, done=done, log=log):
            def at_line(frame, event, _argument):
                if event == "line" and frame.f_lineno == at and not done:
                    done.append(at)
                    log()
                return at_line

            return at_line if frame.f_code in codes else None

        writer = run._writer
        original = writer._live.sync_all

        def sync_all(log=log, original=original):
            log()  # as a handler would, inside flush: queued
            original()

        writer._live.sync_all = sync_all
        sys.settrace(trace)
        try:
            run.flush()
        finally:
            sys.settrace(None)
        writer._live.sync_all = original
        run.finish()
        found = spool.open(tmp_path).run(run.id)
        values = found.metrics()["value"].to_pylist()
        assert sorted(values) == logged, at
        assert found.damage() == []


def test_a_finish_that_ctrl_c_interrupts_can_be_done_again(tmp_path):
    run = spool.init(project="p", experiment="e", dir=tmp_path)
    run.log({"a": 1}, step=1)
    thread = run._writer._thread
    original = thread.join

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    thread.join = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    thread.join = original
    run.log({"b": 2}, step=2)
    run.flush()
    run.finish("killed")
    found = spool.open(tmp_path).run(run.id)
    assert found.status().state == "killed"
    assert found.metrics()["key"].to_pylist() == ["a", "b"]


def test_a_group_that_does_not_exist_is_refused_at_init_and_never_raises_later(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOOL_GROUP", "no-such-group")
    with pytest.raises(spool.SpoolError, match="no-such-group"):
        spool.init(project="p", experiment="e", dir=tmp_path / "one")
    monkeypatch.delenv("SPOOL_GROUP")
    run = spool.init(project="p", experiment="e", dir=tmp_path / "two")
    monkeypatch.setenv("SPOOL_GROUP", "no-such-group")
    (tmp_path / "file").write_text("x")
    run.log({"a": 1}, step=1)
    run.save(tmp_path / "file")
    assert "no-such-group" in capsys.readouterr().err
    monkeypatch.delenv("SPOOL_GROUP")
    run.finish()
    assert spool.open(tmp_path / "two").runs()[0].status().state == "finished"


@pytest.mark.parametrize("path", ["a" * 300, "a\0b", "\udc00", None, 3])
def test_a_path_that_is_none_is_said_and_raises_nothing(tmp_path, capsys, path):
    run = spool.init(project="p", experiment="e", dir=tmp_path)
    run.save(path)
    run.log_input(path)
    run.finish()
    assert "not saved" in capsys.readouterr().err
    assert spool.open(tmp_path).runs()[0].damage() == []


def test_a_tag_may_be_called_self(tmp_path):
    run = spool.init(project="p", experiment="e", dir=tmp_path)
    run.tag(self=1)
    run.finish()
    bodies = spool.open(tmp_path).runs()[0].events()["body"].to_pylist()
    assert '{"self":1}' in bodies
