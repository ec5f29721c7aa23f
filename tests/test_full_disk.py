"""Disks that are full, that must not fill, or that turn read-only: real ones, small. Training goes on, what is lost is counted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from journals import begin, begin_without_thread, rows
from tally import Tally, check, fill, mounted, steps, until

import spool
from spool import files, format
from spool.reader import RunReader, Spool
from spool.room import BALLAST_BYTES, BALLAST_FILE
from spool.run import Run

CHILD = """
    import json, os, resource, sys
    sys.path.insert(0, sys.argv[1])
    import spool
    from tally import Tally
    limit, rounds, pad, waits = map(int, sys.argv[3:])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    run = spool.init(project="tests", experiment="full", dir=sys.argv[2])
    tally = Tally(run, pad)
    tally.log(5)
    if waits:
        print("ready", flush=True)
        sys.stdin.readline()
    tally.log(rounds)
    print(json.dumps({"run": run.id, "steps": tally.steps}), flush=True)
    if waits == 2:
        sys.stdin.readline()
"""


def start(folder: Path, rounds: int, *, limit: int = 0, pad: int = 200, waits: int = 0) -> "subprocess.Popen[str]":
    """A training process; `waits`: 1 before it logs its rounds, 2 also before it ends."""
    words = [str(Path(__file__).parent), str(folder / "spool"), *map(str, (limit, rounds, pad, waits))]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), *words],
        env={**os.environ, "SPOOL_RESERVE_BYTES": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(child: "subprocess.Popen[str]", answer: str | None = None) -> tuple[dict[str, object], str]:
    """What the child said of itself, and its stderr; its exit is a normal one."""
    output, errors = child.communicate(answer, timeout=120)
    assert child.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors


def all_of(steps_: int) -> dict[str, int]:
    return dict.fromkeys(("metrics", "generations", "spans"), steps_)


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A file system in memory of the size asked for, without a reserve of the spool's unless the test sets one."""
    folder = tmp_path / "disk"

    def make(size: str) -> Path:
        why = mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "none")
        if why:
            pytest.skip(f"no small file system can be mounted here: {why}")
        return folder

    yield make
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


@pytest.fixture
def fast(monkeypatch) -> None:
    """The background thread looks fifty times a second, and memory holds a few hundred records."""
    monkeypatch.setenv("SPOOL_RESERVE_BYTES", "0")
    monkeypatch.setattr("spool.writer.SYNC_EACH_S", 0.02)
    monkeypatch.setattr("spool.backlog.MAX_BYTES", 200_000)


def reader(run: Run) -> RunReader:
    return Spool(run.path.parent).run(run.id)


# --- a full disk


@pytest.mark.usefixtures("fast")
def test_what_a_full_disk_drops_is_counted_and_what_fits_again_is_written_again(tmpfs, capfd):
    disk = tmpfs("2M")
    run = begin(disk)
    tally = Tally(run)
    tally.log(50)
    filler = fill(disk)
    tally.log(1000)
    until(lambda: [one.is_open for one in reader(run).losses()] == [True])
    filler.unlink()
    tally.log(50)
    until(lambda: not run._writer._deferred.is_hindered)
    tally.log(50)
    run.finish()
    lost = tally.check(losses=True)
    assert lost["spans"] >= lost["generations"] >= lost["metrics"] < lost["spans"]
    for table in ("metrics", "generations", "spans"):
        (found,) = steps(reader(run), table).values()
        assert found[:50] == list(range(50))
        assert found[-50:] == list(range(1150 - 50, 1150))
    assert [one.is_open for one in reader(run).losses()] == [False]
    said = capfd.readouterr().err
    assert said.count("could not write") == 1
    assert f"the disk takes records again; {lost.total()} were lost" in said
    assert f"{lost.total()} lost to a full or failing disk" in said


@pytest.mark.usefixtures("fast")
def test_episodes_that_follow_one_another_are_each_written_and_counted(tmpfs):
    disk = tmpfs("2M")
    run = begin(disk)
    tally = Tally(run)
    for _ in range(4):
        filler = fill(disk)
        tally.log(300)
        until(lambda: reader(run).losses()[-1:] and reader(run).losses()[-1].is_open)
        filler.unlink()
        until(lambda: not run._writer._deferred.is_hindered)
        tally.log(5)
    run.finish()
    tally.check(losses=True)
    assert len(reader(run).losses()) == 4


def test_a_run_that_ends_on_a_full_disk_says_so_and_is_sealed_once_there_is_room(tmpfs, bin_folder):
    disk = tmpfs("1M")
    said, errors = finished(start(disk, 1000, pad=600))
    run = Spool(disk / "spool").run(said["run"])
    assert run.status().state == "finished"
    lost = check(run, all_of(said["steps"]), losses=True)
    assert 0 < lost["metrics"] <= lost["generations"] <= lost["spans"]
    assert errors.count("could not write") == 1
    assert f"{lost.total()} lost to a full or failing disk" in errors
    assert "the journal stays, nothing is lost" in errors
    (writer,) = run.writers()
    assert list(writer.path.glob("*.jsonl"))
    assert not list(writer.path.glob("[0-9]*[0-9]"))
    subprocess.run(["mount", "-o", "remount,size=16M", str(disk)], check=True)
    subprocess.run([bin_folder / "spool", "seal", str(disk / "spool")], check=True, capture_output=True)
    assert list(writer.path.glob("[0-9]*[0-9]"))
    for journal in writer.path.glob("*.jsonl"):
        journal.unlink()
    assert check(Spool(disk / "spool").run(said["run"]), all_of(said["steps"])) == lost


def test_a_process_killed_on_a_full_disk_leaves_word_that_records_are_missing(tmpfs, bin_folder):
    disk = tmpfs("1M")
    child = start(disk, 1000, pad=600, waits=2)
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()
    said = json.loads(child.stdout.readline())
    until(lambda: Spool(disk / "spool").run(said["run"]).losses())
    child.kill()
    child.communicate()
    run = Spool(disk / "spool").run(said["run"])
    (loss,) = run.losses()
    assert loss.is_open
    assert "No space left" in loss.reason
    assert "more may be, its process has not recorded the end of it" in str(loss)
    (metrics,) = steps(run, "metrics").values()
    assert metrics == list(range(len(metrics)))
    assert 5 < len(metrics) < said["steps"]
    assert run.damage() == []
    for command, place in (("verify",), "  recorded: "), (("show", "--run", said["run"]), "loss        "):
        words = [bin_folder / "spool", command[0], str(disk / "spool"), *command[1:]]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert f"{place}{loss}\n" in printed
        shown = json.loads(subprocess.run([*words, "--json"], capture_output=True, check=True).stdout)
        [told] = shown[0]["losses"] if command[0] == "verify" else shown["losses"]
        assert told["is_open"]
        assert told["reason"] == loss.reason


@pytest.mark.usefixtures("fast")
def test_several_writers_on_one_full_disk_each_count_their_own(tmpfs):
    disk = tmpfs("2M")
    run = begin(disk)
    children = [start(disk, 200, pad=800, waits=1) for _ in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    fill(disk)
    tally = Tally(run, pad=800)
    said = [finished(child, "go\n")[0] for child in children]
    tally.log(200)
    run.finish()
    total = tally.steps + sum(one["steps"] for one in said)
    found = reader(run)
    assert len(found.writers()) == 4
    check(found, all_of(total), losses=True)
    assert {one.writer for one in found.losses()} == {one.id for one in found.writers()}
    assert all(one.finished for one in found.writers())


@pytest.mark.usefixtures("fast")
def test_a_fork_while_records_wait_in_memory_writes_them_once(tmpfs):
    disk = tmpfs("2M")
    run = begin(disk)
    tally = Tally(run)
    filler = fill(disk)
    tally.log(50)
    until(lambda: run._writer._deferred.full)
    filler.unlink()
    pid = os.fork()
    if pid == 0:
        tally.log(3)
        run.finish()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    until(lambda: not run._writer._deferred.is_hindered)
    run.finish()
    found = reader(run)
    check(found, all_of(53), losses=False)
    assert sorted(map(len, steps(found, "metrics").values())) == [3, 50]


@pytest.mark.usefixtures("fast")
def test_a_child_forked_on_a_full_disk_trains_on_and_its_own_journal_begins_with_what_it_lost(tmpfs):
    disk = tmpfs("2M")
    run = begin(disk)
    filler = fill(disk)
    pid = os.fork()
    if pid == 0:
        tried = []
        real = files.make_one_folder
        files.make_one_folder = lambda path: tried.append(path) or real(path)
        tally = Tally(run)
        tally.log(5)
        assert len(tried) == 1  # not at each record: a try takes several syncs
        filler.unlink()
        run._rejoin_after_s = 0.0
        tally.log(4)
        run.finish()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    run.finish()
    lost = check(reader(run), all_of(9), losses=True)
    assert lost == dict.fromkeys(("metrics", "generations", "spans"), 5)
    assert len(list(run.path.glob("*/*.jsonl"))) == 2
    assert len([path for path in run.path.iterdir() if path.is_dir()]) == 2


def test_a_disk_that_is_full_at_init_is_refused_in_one_sentence_and_leaves_no_half_run(tmpfs):
    disk = tmpfs("1M")
    filler = fill(disk)
    with pytest.raises(spool.NotASpoolError, match=r"cannot write the spool here \(No space left on device\)"):
        begin(disk)
    filler.unlink()
    run = begin(disk)
    run.finish()
    assert [one.id for one in Spool(disk / "spool").runs()] == [run.id]
    assert reader(run).damage() == []


def test_the_ballast_is_held_while_the_run_goes_on_and_given_back_at_its_end(tmpfs):
    disk = tmpfs("4M")
    run = begin(disk)
    ballast = run._writer.folder / BALLAST_FILE
    assert ballast.stat().st_blocks * 512 == BALLAST_BYTES
    run.finish()
    assert not ballast.exists()


# --- a disk that must not fill


def test_a_checkpoint_fits_into_what_the_spool_leaves_free(tmpfs, monkeypatch):
    monkeypatch.setenv("SPOOL_RESERVE_BYTES", "4M")
    disk = tmpfs("8M")
    run = begin_without_thread(disk)
    tally = Tally(run, pad=10_000)
    for _ in range(300):
        tally.log(1)
        run._writer._tick()
    found = reader(run)
    written = {table: len(steps(found, table)[run._writer.id]) for table in ("metrics", "generations", "spans")}
    assert 0 < written["spans"] < written["generations"] < written["metrics"] == 300
    free = shutil.disk_usage(disk).free
    metrics_alone = (300 - written["generations"]) * 11_000
    assert (2 << 20) - 100_000 - metrics_alone <= free < (2 << 20)
    (disk / "checkpoint").write_bytes(bytes(free - (128 << 10)))
    (disk / "checkpoint").unlink()
    run.finish()
    lost = tally.check(losses=True)
    assert lost["metrics"] == 0


def test_spans_wait_for_the_reserve_and_are_written_when_it_is_back(tmpfs, monkeypatch, capfd):
    monkeypatch.setenv("SPOOL_RESERVE_BYTES", "4M")
    disk = tmpfs("8M")
    run = begin_without_thread(disk)
    tally = Tally(run)
    checkpoint = disk / "checkpoint"
    checkpoint.write_bytes(bytes(5 << 20))
    run._writer._tick()
    tally.log(10)
    run._writer._tick()
    found = reader(run)
    assert [len(steps(found, table)[run._writer.id]) for table in ("metrics", "generations", "spans")] == [10, 10, 0]
    assert [one.is_open for one in found.losses()] == [True]
    assert "see SPOOL_RESERVE_BYTES" in found.losses()[0].reason
    checkpoint.unlink()
    run._writer._tick()
    assert not run._writer._deferred.is_hindered
    run.finish()
    tally.check(losses=False)
    assert "see SPOOL_RESERVE_BYTES" in capfd.readouterr().err


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_run_stays_within_its_size_but_for_what_is_logged_between_two_looks(tmp_path, monkeypatch):
    limit, burst = 1 << 20, 10
    monkeypatch.setenv("SPOOL_MAX_BYTES", "1M")
    monkeypatch.setenv("SPOOL_RESERVE_BYTES", "0")
    run = begin_without_thread(tmp_path)
    tally = Tally(run, pad=1000)
    for _ in range(100):
        tally.log(burst)
        run.log_histogram("h", [random.random() for _ in range(100)])
        run._writer._tick()
        assert size_of(run.path) <= limit + burst * 4_000 + 4_000
    assert size_of(run.path) > limit * 0.9
    run.finish()
    segments = sum(size_of(path) for path in run.path.glob("*/0*") if path.is_dir())
    assert size_of(run.path) - segments <= limit + burst * 4_000 + 4_000
    lost = tally.check(losses=True)
    assert 0 < lost["metrics"] <= lost["generations"] <= lost["spans"]
    assert reader(run).status().state == "finished"


@pytest.mark.parametrize("name", ["SPOOL_MAX_BYTES", "SPOOL_RESERVE_BYTES"])
@pytest.mark.parametrize("text", ["much", "-5", "1.5.2G", "10X", "nan", "1e9", "9" * 400])
def test_a_wrong_size_is_refused_in_one_sentence(tmp_path, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(spool.SpoolError, match=rf"^{name}: '.*' is no size; write bytes, or 500M, 20G$"):
        begin(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", 1 << 20), ("500M", 500 << 20), ("2 GiB", 2 << 30), ("1.5k", 1536)]
)
def test_a_size_is_in_powers_of_1024(text, size):
    assert spool.room.parse_size(text) == size


# --- files that must not grow, a disk that turns read-only


def test_where_files_must_not_grow_there_are_more_of_them_and_nothing_is_lost(tmp_path):
    pytest.importorskip("resource")
    said, errors = finished(start(tmp_path, 1000, limit=300_000))
    run = Spool(tmp_path / "spool").run(said["run"])
    check(run, all_of(said["steps"]), losses=False)
    assert len(run.writers()[0]._parts) >= 4
    assert "File too large" in errors
    assert run.status().state == "finished"


@pytest.mark.usefixtures("fast")
def test_a_disk_that_turns_read_only_ends_no_training_and_keeps_what_was_synced(tmp_path, capfd):
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4 here")
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    why = mounted(disk, "-o", "loop", str(image))
    if why:
        pytest.skip(f"no loop device can be mounted here: {why}")
    try:
        run = begin(disk)
        tally = Tally(run)
        tally.log(50)
        run.flush()
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)  # as the kernel does after a disk error
        tally.log(50)
        until(lambda: run._writer._live.unwritable)
        tally.log(500)
        assert run._writer._deferred.backlog.size_bytes <= 200_000
        run.finish()
        said = capfd.readouterr().err
        assert said.count("could not write") == 1
        assert "the end could not be recorded" in said
        subprocess.run(["umount", str(disk)], check=True)
        assert mounted(disk, "-o", "loop", str(image)) == ""
        found = reader(run)
        assert found.status().state != "finished"
        assert found.damage() == []
        assert [len(steps(found, table)[run._writer.id]) for table in ("metrics", "generations", "spans")] == [
            50,
            50,
            50,
        ]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)


# --- what is told of it


@pytest.mark.usefixtures("fast")
def test_losses_are_read_from_segments_as_from_journals(tmpfs):
    disk = tmpfs("4M")
    run = begin(disk)
    tally = Tally(run)
    filler = fill(disk)
    tally.log(300)
    until(lambda: reader(run).losses())
    before = reader(run).losses()
    filler.unlink()
    run.finish()
    (writer,) = reader(run).writers()
    in_journal = writer.losses()
    (writer.path / "000001.jsonl").unlink()
    (writer,) = reader(run).writers()
    assert writer.losses() == in_journal
    (loss,) = in_journal
    assert loss.since_ns == before[0].since_ns
    first = next(row["ts"] for row in rows(run, "metrics"))
    assert abs(loss.since_ns - first.value) < 60e9
    assert str(loss).startswith(f"{run._writer.id}: lost ")
    assert f"{loss.records['spans']} of spans, since 20" in str(loss)
    assert "No space left on device" in str(loss)


def test_a_killed_writers_ballast_is_freed_when_its_death_is_sealed(tmp_path, bin_folder):
    child = start(tmp_path, 5, waits=2)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (folder,) = [path for path in (tmp_path / "spool").glob("*/*") if (path / format.journal_name(1)).is_file()]
    assert (folder / BALLAST_FILE).is_file()
    subprocess.run([bin_folder / "spool", "seal", str(tmp_path / "spool")], check=True, capture_output=True)
    assert not (folder / BALLAST_FILE).exists()


def test_a_file_system_that_does_not_tell_its_size_has_no_reserve(tmpfs, monkeypatch):
    disk = tmpfs("0")
    assert os.statvfs(disk).f_blocks == 0
    monkeypatch.setenv("SPOOL_RESERVE_BYTES", "1G")
    run = begin(disk)
    Tally(run).log(3)
    assert steps(reader(run), "spans") == {run._writer.id: [0, 1, 2]}
    run.finish()
