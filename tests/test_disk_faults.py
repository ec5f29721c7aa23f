"""Each step on the disk failing in turn, once, twice or always: nothing raises into training, and the sum is exact."""

import errno
import gc
import os
import signal
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import begin, begin_without_thread, journal_path, reader, rows
from tally import TABLES, Tally, check, seal_all, steps, until

import spool
from spool import backlog, files, seal
from spool.backlog import ORDER, RECORD_BYTES, Backlog, Kept
from spool.errors import SealError, SpoolError
from spool.reader import Spool

FOR_EVER = 1 << 30
CODES = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO, "read-only": errno.EROFS}


class Faulty:
    """One step that fails so many times and then works; what a failing close has closed is closed, what a write has written stands."""

    def __init__(self, step: str, code: int, times: int = FOR_EVER, *, half: bool = False) -> None:
        self.step, self.code, self.times, self.half = step, code, times, half
        self.real: Callable = getattr(files, step)
        self.met = 0

    def __call__(self, *arguments: object) -> object:
        self.met += 1
        if self.times <= 0:
            return self.real(*arguments)
        self.times -= 1
        if self.step == "close":
            self.real(*arguments)
        if self.half:
            descriptor, line = arguments
            os.write(descriptor, line[: len(line) // 2])
        raise OSError(self.code, os.strerror(self.code))


class Sealed:
    """A sealing child that ended at once without having sealed."""

    returncode = 1

    def poll(self) -> int:
        return 1

    def wait(self) -> int:
        return 1


@pytest.fixture
def unsealed(monkeypatch) -> None:
    monkeypatch.setattr("spool.seal.start", lambda *_arguments, **_settings: Sealed())


def recover(run: spool.Run) -> None:
    """As after some time: the background looks again, and no back-off holds it up."""
    for _ in range(3):
        run._writer._deferred._retry_after_s = 0.0
        run._writer._tick()
    assert not run._writer._deferred.is_hindered
    assert len(run._writer._deferred.backlog) == 0


@pytest.mark.usefixtures("unsealed")
@pytest.mark.parametrize("durability", ["interval", "record"])
@pytest.mark.parametrize("times", [1, 2, FOR_EVER])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("step", [*files.STEPS, "half a write"])
def test_a_step_that_fails_while_a_run_is_written_loses_nothing(tmp_path, monkeypatch, step, code, times, durability):
    run = begin_without_thread(tmp_path, durability=durability)
    tally = Tally(run)
    tally.log(2)
    is_half = step == "half a write"
    name = "write" if is_half else step
    with monkeypatch.context() as disk:
        disk.setattr(files, name, Faulty(name, CODES[code], times, half=is_half))
        tally.log(2)
        run.flush()
        run._writer._tick()
        tally.log(2)
        run._writer._rotate()
        tally.log(2)
        run._writer._tick()
    tally.log(2)
    recover(run)
    tally.log(2)
    run.finish()
    tally.check(losses=False)
    assert reader(run).status().state == "finished"


@pytest.mark.usefixtures("unsealed")
@pytest.mark.parametrize("waiting", [0, 3])
@pytest.mark.parametrize("times", [1, 2, FOR_EVER])
@pytest.mark.parametrize("code", ["full", "broken"])
@pytest.mark.parametrize("step", [*files.STEPS, "half a write"])
def test_a_run_whose_end_a_disk_fails_is_finished_only_where_all_is_there_or_counted(
    tmp_path, monkeypatch, step, code, times, waiting
):
    run = begin_without_thread(tmp_path)
    tally = Tally(run)
    tally.log(2)
    if waiting:
        with monkeypatch.context() as disk:
            disk.setattr(files, "write", Faulty("write", CODES[code]))
            tally.log(waiting)
    is_half = step == "half a write"
    name = "write" if is_half else step
    with monkeypatch.context() as disk:
        disk.setattr(files, name, Faulty(name, CODES[code], times, half=is_half))
        run.finish()
    found = reader(run)
    assert found.damage() == []
    if found.status().state == "finished":
        tally.check()
    else:
        assert (name == "write" and times > 1) or (waiting and code == "broken")
        assert len(steps(found, "metrics")[run._writer.id]) >= 2
    if times == 1 and name != "write":
        assert found.status().state == "finished"


@pytest.mark.parametrize("times", [1, FOR_EVER])
@pytest.mark.parametrize("code", ["full", "broken"])
@pytest.mark.parametrize("step", [*files.STEPS, "half a write"])
@pytest.mark.usefixtures("unsealed")
def test_an_init_that_a_disk_fails_is_one_sentence_and_the_next_one_works(tmp_path, monkeypatch, step, code, times):
    is_half = step == "half a write"
    name = "write" if is_half else step
    threads = threading.active_count()
    with monkeypatch.context() as disk:
        disk.setattr(files, name, Faulty(name, CODES[code], times, half=is_half))
        try:
            run = begin(tmp_path)
        except SpoolError as error:
            refusal, run = str(error), None
    if run is None:
        assert "\n" not in refusal
        assert threading.active_count() == threads
        run = begin(tmp_path)
    tally = Tally(run)
    tally.log(2)
    until(lambda: not run._writer._deferred.is_hindered)
    run.finish()
    tally.check(losses=False)
    assert all(one.damage() == [] for one in Spool(run.path.parent).runs())


@pytest.mark.parametrize("times", [1, FOR_EVER])
@pytest.mark.parametrize("code", ["full", "broken"])
@pytest.mark.parametrize("step", [*files.STEPS, "half a write"])
def test_sealing_that_a_disk_fails_leaves_the_journal_and_is_done_later(tmp_path, monkeypatch, step, code, times):
    with monkeypatch.context() as patch:
        patch.setattr("spool.seal.start", lambda *_arguments, **_settings: Sealed())
        run = begin_without_thread(tmp_path)
        tally = Tally(run)
        tally.log(5)
        run.finish()
    before = journal_path(run).read_bytes()
    is_half = step == "half a write"
    name = "write" if is_half else step
    with monkeypatch.context() as disk:
        disk.setattr(files, name, Faulty(name, CODES[code], times, half=is_half))
        try:
            seal.seal(journal_path(run))
        except (OSError, SealError):
            assert not (run._writer.folder / "000001").exists() or step == "sync_folder"
    tally.check(losses=False)
    seal_all(run.path)
    assert journal_path(run).read_bytes() == before
    journal_path(run).unlink()
    tally.check(losses=False)


# --- the background, threads, signals


class Switch:
    """A disk that is full or broken while it is switched so."""

    def __init__(self) -> None:
        self.code = 0
        self.taken = 0

    def __call__(self, descriptor: int, line: bytes) -> int:
        if self.code:
            os.write(descriptor, line[: len(line) // 3])
            raise OSError(self.code, os.strerror(self.code))
        self.taken += 1
        return os.write(descriptor, line)


@pytest.mark.usefixtures("unsealed")
def test_threads_that_log_while_a_disk_comes_and_goes_each_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SYNC_EACH_S", 0.005)
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 100_000)
    run = begin(tmp_path, durability="os")
    disk = Switch()
    monkeypatch.setattr(files, "write", disk)
    is_over = threading.Event()
    counts: Counter[str] = Counter()

    def work(name: str) -> None:
        while not is_over.is_set():
            at = counts[name]
            run.log({name: float(at)}, step=at)
            run.log_generations(step=at, rows=[{"input": "x" * 300}], split=name)
            run.span(name, step=at, inputs="y" * 300).start()
            counts[name] += 1

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for code in (errno.ENOSPC, errno.EIO, errno.ENOSPC, errno.EDQUOT) * 3:
        disk.code = code
        time.sleep(0.03)
        disk.code = 0
        seen = disk.taken
        run._writer._deferred._retry_after_s = 0.0
        until(lambda seen=seen: disk.taken > seen)
    is_over.set()
    for thread in threads:
        thread.join()
    run._writer._deferred._retry_after_s = 0.0
    until(lambda: not run._writer._deferred.is_hindered)
    run.finish()
    found = reader(run)
    lost = sum((Counter(one.records) for one in found.losses()), Counter())
    columns = {"metrics": "key", "generations": "split", "spans": "name"}
    for table, column in columns.items():
        by_name: dict[str, list[int]] = {}
        for row in getattr(found, table)().to_pylist():
            by_name.setdefault(row[column], []).append(row["step"])
        assert all(mine == sorted(set(mine)) for mine in by_name.values())
        assert sum(map(len, by_name.values())) + lost[table] == counts.total()
    assert lost["spans"] > 0
    assert found.damage() == []


@pytest.mark.usefixtures("unsealed")
def test_ctrl_c_on_a_full_disk_leaves_no_record_twice_and_none_uncounted(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 5_000)
    run = begin_without_thread(tmp_path, durability="os")
    disk = Switch()
    monkeypatch.setattr(files, "write", disk)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    began_s = time.perf_counter()
    for at in range(100):
        run.log({"a": float(at)}, step=at)
    call_s = (time.perf_counter() - began_s) / 100
    returned: set[int] = set(range(100))
    interrupted = 0
    old = signal.signal(signal.SIGALRM, handler)
    try:
        for at in range(100, 50_000):
            if at % 1000 == 0 and interrupted > 300 and run._writer.lost > 300:
                break
            disk.code = errno.ENOSPC if at % 100 > 20 else 0
            if at % 100 == 0:
                run._writer._tick()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + call_s * (at % 40) / 5)  # from its begin to long after it
                run.log({"a": float(at)}, step=at)
                signal.setitimer(signal.ITIMER_REAL, 0)
                returned.add(at)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    disk.code = 0
    recover(run)
    run.finish()
    found = reader(run)
    (mine,) = steps(found, "metrics").values()
    lost = sum((Counter(one.records) for one in found.losses()), Counter())["metrics"]
    assert interrupted > 100
    assert lost > 100
    assert mine == sorted(set(mine))
    assert len(returned) <= len(mine) + lost <= len(returned) + interrupted
    assert found.damage() == []


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("unsealed")
def test_a_finish_from_a_signal_handler_inside_a_flush_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SYNC_EACH_S", 0.005)
    run = begin(tmp_path, durability="os")
    tally = Tally(run)
    tally.log(1)
    real = files.sync_data

    def sync_data(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(files, "sync_data", real)
            run._writer._deferred._give_up("a new journal is wanted")  # the background thread asks for the lock
            time.sleep(0.05)
            signal.raise_signal(signal.SIGUSR1)
        real(descriptor)

    old = signal.signal(signal.SIGUSR1, lambda *_: run.finish("preempted"))
    monkeypatch.setattr(files, "sync_data", sync_data)
    try:
        run.flush()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert reader(run).status().state == "preempted"
    tally.check(losses=False)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("unsealed")
def test_a_statvfs_that_hangs_holds_up_no_call(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SYNC_EACH_S", 0.005)
    run = begin(tmp_path)
    hangs, goes_on = threading.Event(), threading.Event()
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        hangs.set()
        goes_on.wait()
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert hangs.wait(30)
    tally = Tally(run)
    tally.log(100)
    assert steps(reader(run), "metrics") == {run._writer.id: list(range(100))}
    goes_on.set()
    run.finish()
    tally.check(losses=False)


@pytest.mark.parametrize("strict", [False, True])
def test_a_flush_that_fails_is_not_forgotten_when_the_disk_says_fine_again(tmp_path, monkeypatch, strict):
    run = begin_without_thread(tmp_path, strict=strict)
    tally = Tally(run)
    tally.log(1)
    with monkeypatch.context() as disk:
        disk.setattr(files, "sync_data", Faulty("sync_data", errno.EIO))
        if strict:
            with pytest.raises(spool.WriteError, match="not synced"):
                run.flush()
        else:
            run.flush()
    seq = run._writer.seq
    run._writer._tick()
    assert journal_path(run).name == "000002.jsonl"
    assert [one.suspect for one in reader(run).losses()] == [(1, seq)]
    assert f"seq 1 to {seq} may not survive a power cut" in str(reader(run).losses()[0])
    tally.check(losses=False)


# --- what is dropped, and how much is kept


def test_what_waits_in_memory_takes_no_more_than_its_bound(tmp_path, monkeypatch):
    bound = 4 << 20
    monkeypatch.setattr("spool.backlog.MAX_BYTES", bound)
    run = begin_without_thread(tmp_path)
    monkeypatch.setattr(files, "write", Faulty("write", errno.ENOSPC))
    run.log({"a": 0.0}, step=0)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for step in range(60_000):
        run.log({"a": step / 3}, step=step)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert run._writer._deferred.backlog.size_bytes <= bound
    assert run._writer._deferred.backlog.lost["metrics"] > 10_000
    assert bound / 2 < held <= 1.1 * bound


def test_a_record_too_long_for_memory_is_counted_and_drives_nothing_out(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 10_000)
    run = begin_without_thread(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Faulty("write", errno.ENOSPC))
        run.log({"a": 1.0}, step=1)
        run.log({"text": "x" * 6000}, step=2)
    recover(run)
    assert [row["step"] for row in rows(run)] == [1]
    assert [one.records for one in reader(run).losses()] == [{"metrics": 1}]


@given(
    st.lists(st.tuples(st.sampled_from(ORDER), st.integers(0, 900)), max_size=80),
    st.integers(RECORD_BYTES, 20 * RECORD_BYTES),
)
def test_the_oldest_of_the_least_needed_table_goes_first(added, bound):
    old, backlog.MAX_BYTES = backlog.MAX_BYTES, bound
    try:
        kept = Backlog()
    finally:
        backlog.MAX_BYTES = old
    model: list[tuple[str, int, int]] = []
    for place, (table, length) in enumerate(added):
        kept.add(table, Kept(place, None, None, bytes(length)))
        if RECORD_BYTES + length <= bound // 2:
            model.append((table, place, RECORD_BYTES + length))
        while sum(size for _, _, size in model) > bound:
            model.remove(max(model, key=lambda one: (ORDER.index(one[0]), -one[1])))
    assert kept.size_bytes == sum(size for _, _, size in model) <= bound
    assert sum(kept.lost.values()) + len(kept) == len(added)
    for table in ORDER:
        found = []
        while kept.holds(table):
            found.append(kept.first(table).ts)
            kept.remove_first(table)
        assert found == [place for name, place, _ in model if name == table]
    assert kept.size_bytes == 0


class Room:
    """A disk with room for so many more records."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __call__(self, descriptor: int, line: bytes) -> int:
        if not self.records:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.records -= 1
        return os.write(descriptor, line)


def test_metrics_are_written_first_when_there_is_room_again(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    tally = Tally(run)
    disk = Room(0)
    monkeypatch.setattr(files, "write", disk)
    tally.log(4)
    for more, written in ((3, [3, 0, 0]), (3, [4, 2, 0]), (4, [4, 4, 2])):
        disk.records = more
        run._writer._tick()
        found = reader(run)
        assert [len(steps(found, table)[run._writer.id]) for table in TABLES] == written
    disk.records = FOR_EVER
    run._writer._tick()
    run.finish()
    tally.check(losses=False)


@pytest.mark.usefixtures("unsealed")
def test_what_waits_is_not_written_behind_a_record_that_was_torn_meanwhile(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="os")
    tally = Tally(run)
    disk = Switch()
    torn = []

    def tear(_seconds: float) -> None:
        """What another thread may do while the background leaves it the lock, between two chunks of what waits."""
        if not torn:
            with monkeypatch.context() as dying:
                dying.setattr(files, "write", Faulty("write", errno.EIO, half=True))
                dying.setattr(files, "truncate", Faulty("truncate", errno.EIO))
                run.tag(torn="x")
            torn.append(len(run._writer._deferred.backlog))

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", disk)
        disk.code = errno.ENOSPC
        tally.log(400)
        disk.code = 0
        patched.setattr("spool.deferred.time.sleep", tear)
        run._writer._tick()
    assert torn[0] > 0
    recover(run)
    run.finish()
    tally.check(losses=False)


@pytest.mark.usefixtures("unsealed")
def test_strict_raises_keeps_nothing_and_counts_it_all_the_same(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, strict=True)
    tally = Tally(run)
    tally.log(2)
    for code in (errno.ENOSPC, errno.EIO):
        with monkeypatch.context() as disk:
            disk.setattr(files, "write", Faulty("write", code))
            for _ in range(3):
                with pytest.raises(spool.WriteError, match="could not write"):
                    run.log({"a": 1.0}, step=-1)
            assert len(run._writer._deferred.backlog) == 0
        recover(run)
        tally.log(2)
    run.finish()
    assert check(reader(run), {"metrics": 12, "generations": 6, "spans": 6}) == {"metrics": 6}
    assert [row["step"] for row in rows(run)] == [step for step in range(6) for _ in ("a", "text")]


@pytest.mark.usefixtures("unsealed")
def test_a_dying_disk_is_not_strewn_with_journals(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    tally = Tally(run)
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    begun = []
    real = files.create_append
    monkeypatch.setattr(files, "create_append", lambda path: begun.append(path) or real(path))
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Faulty("write", errno.EIO))
        for _ in range(600):
            clock[0] += 1
            tally.log(1)
            run._writer._tick()
    assert 5 < len(begun) < 20
    clock[0] += 61
    run._writer._tick()
    assert not run._writer._deferred.is_hindered
    assert len(list(run._writer.folder.glob("*.jsonl"))) == 2
    tally.check(losses=False)


def test_a_writer_on_a_full_disk_still_says_that_it_is_alive_and_counts_no_loss_for_it(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Faulty("write", errno.ENOSPC))
        run.log({"a": 1.0})
        disk.setattr("spool.writer.ALIVE_AFTER_S", 0)
        run._writer._ticked_seq = run._writer.seq
        run._writer._tick()
    assert len(run._writer._deferred.backlog) == 1
    recover(run)
    run.finish()
    assert reader(run).losses() == []


class Refusing:
    """A disk that refuses what `refuses(descriptor, line)` says."""

    def __init__(self, refuses: Callable[[int, bytes], bool], code: int) -> None:
        self.refuses, self.code = refuses, code

    def __call__(self, descriptor: int, line: bytes) -> int:
        if self.refuses(descriptor, line):
            raise OSError(self.code, os.strerror(self.code))
        return os.write(descriptor, line)


@pytest.mark.usefixtures("unsealed")
def test_a_run_whose_loss_cannot_be_recorded_has_no_finish(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 1000)
    run = begin_without_thread(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Faulty("write", errno.ENOSPC))
        for step in range(20):
            run.log({"a": 1.0}, step=step)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Refusing(lambda _, line: b'"event":"loss"' in line, errno.EIO))
        run.finish()
    assert reader(run).status().state != "finished"
    assert "the end could not be recorded" in capfd.readouterr().err


def test_a_loss_that_is_open_stays_so_until_its_end_is_recorded(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    tally = Tally(run)
    tally.log(1)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Refusing(lambda _, line: b'"event":"loss"' not in line, errno.ENOSPC))
        tally.log(3)
        run._writer._tick()
    assert [one.is_open for one in reader(run).losses()] == [True]
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Refusing(lambda _, line: b'"event":"loss"' in line, errno.ENOSPC))
        run._writer._tick()
    assert [one.is_open for one in reader(run).losses()] == [True]
    run._writer._tick()
    assert reader(run).losses() == []
    assert not run._writer._deferred.is_hindered
    tally.check(losses=False)


@pytest.mark.usefixtures("unsealed")
def test_a_journal_that_took_much_is_followed_by_the_next_without_a_wait(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="os")
    tally = Tally(run, pad=2000)
    limit = journal_path(run).stat().st_size + 100_000
    now = time.monotonic()
    with monkeypatch.context() as disk:
        disk.setattr(time, "monotonic", lambda: now)
        disk.setattr(files, "write", Refusing(lambda one, line: os.fstat(one).st_size + len(line) > limit, errno.EFBIG))
        for _ in range(20):
            tally.log(10)
            run._writer._tick()
        assert len(run._writer._deferred.backlog) == 0
    assert int(journal_path(run).stem) >= 3
    run.finish()
    tally.check(losses=False)


@pytest.mark.usefixtures("unsealed")
def test_at_its_end_a_run_takes_as_many_journals_as_what_waits_needs(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path, durability="os")
    tally = Tally(run, pad=2000)
    limit = journal_path(run).stat().st_size + 100_000
    monkeypatch.setattr(
        files, "write", Refusing(lambda one, line: os.fstat(one).st_size + len(line) > limit, errno.EFBIG)
    )
    tally.log(500)
    run.finish()
    tally.check(losses=False)
    assert int(journal_path(run).stem) >= 5
    assert reader(run).status().state == "finished"


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("unsealed")
def test_a_long_journal_that_nothing_can_follow_ends_all_the_same(tmp_path, monkeypatch):
    run = begin_without_thread(tmp_path)
    tally = Tally(run, pad=10_000)
    tally.log(10)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", Faulty("write", errno.EIO))
        tally.log(2)
        run.finish()
    assert reader(run).status().state != "finished"
    assert reader(run).damage() == []
