"""Sealing: the segment holds the journal's rows, whatever is killed, and a journal goes only when its segment holds all of it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from journals import begin, begin_without_thread, copy_of, journal_path, own_writer, reader, rows, small_journal

import spool
from spool import cli, format, seal
from spool.errors import SealError
from spool.reader import WriterReader
from spool.room import BALLAST_FILE


@pytest.fixture
def run(tmp_path):
    made = begin_without_thread(tmp_path)
    for step in range(20):
        made.log({"loss": step / 3, "tokens": 2**60 + step, "note": "é" * step, "none": None}, step=step)
    made.log({"stepless": 1.0})
    made.log_generations(step=1, rows=[{"input": "a", "output": "b", "score": 0.5, "x": 1}], split="val")
    with made.span("tool", step=1, inputs={"a": 1}, validate=True) as span:
        span.outputs = 42
    made.tag(stage="rl")
    return made


TABLES = ("metrics", "generations", "spans", "events")


def all_rows(run):
    return {name: rows(run, name) for name in TABLES}


def test_the_rows_of_a_segment_are_the_rows_of_its_journal(run):
    journal, before = journal_path(run), all_rows(run)
    seal.seal(journal)
    content = journal.read_bytes()
    journal.unlink()
    assert all_rows(run) == before
    journal.write_bytes(content)


def test_a_segment_is_plain_parquet_with_a_manifest(run):
    seal.seal(journal_path(run))
    folder = journal_path(run).parent / "000001"
    assert sorted(path.name for path in folder.iterdir()) == [
        "events.parquet",
        "generations.parquet",
        "manifest.json",
        "metrics.parquet",
        "spans.parquet",
    ]
    assert pq.read_table(folder / "metrics.parquet").num_rows == len(rows(run))
    manifest = format.load_json((folder / "manifest.json").read_bytes())
    assert manifest["journal"]["length"] == journal_path(run).stat().st_size
    assert (manifest["first_seq"], manifest["last_seq"]) == (1, own_writer(run).last_seq)


def test_sealing_twice_changes_nothing(run):
    seal.seal(journal_path(run))
    folder = journal_path(run).parent / "000001"
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    seal.seal(journal_path(run))
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before


def test_sealing_removes_what_a_killed_seal_left(run):
    leftover = journal_path(run).parent / ".000001.abc"
    leftover.mkdir()
    (leftover / "metrics.parquet.part").write_bytes(b"half")
    seal.seal(journal_path(run))
    assert sorted(path.name for path in journal_path(run).parent.iterdir() if path.name != BALLAST_FILE) == [
        "000001",
        "000001.jsonl",
    ]


def test_a_sealed_journal_is_removed_only_when_its_segment_holds_all_of_it(run):
    journal = journal_path(run)
    assert not seal.remove_sealed(journal)
    seal.seal(journal)
    content = journal.read_bytes()
    for other in (content + b"x", content[:-1], b"x" + content[1:]):
        journal.write_bytes(other)
        assert not seal.remove_sealed(journal)
        assert journal.is_file()
    journal.write_bytes(content)
    parquet = journal.parent / "000001" / "metrics.parquet"
    good = parquet.read_bytes()
    parquet.write_bytes(good[:100] + b"\xff" + good[101:])
    assert not seal.remove_sealed(journal)
    parquet.write_bytes(good)
    assert seal.remove_sealed(journal)
    assert not journal.exists()
    assert not seal.remove_sealed(journal)


def test_a_journal_with_damage_is_never_removed(tmp_path):
    with small_journal(tmp_path) as journal:
        journal.flip(journal.starts()[3] + 9)
        seal.seal(journal.path)
        assert not seal.remove_sealed(journal.path)
        found = WriterReader(journal.path.parent)
        assert [(one.offset, one.first_seq, one.last_seq) for one in found.damage()] == [(journal.starts()[3], 3, 3)]
        assert found.last_seq == 6


def test_a_torn_journal_is_sealed_up_to_its_tail_and_the_tail_is_no_damage(tmp_path):
    with small_journal(tmp_path) as journal:
        journal.cut(len(journal.content) - 5)
        seal.seal(journal.path)
        found = WriterReader(journal.path.parent)
        assert (found.last_seq, found.damage()) == (5, [])


def test_a_journal_longer_than_its_segment_is_read_to_its_end(run):
    seal.seal(journal_path(run))
    run.log({"after": 1.0}, step=99)
    run.log({"after": 2.0}, step=99)
    assert [row["value"] for row in rows(run) if row["key"] == "after"] == [1.0, 2.0]
    assert own_writer(run).damage() == []
    assert own_writer(run).last_seq == run._writer.seq


def test_a_damaged_segment_is_read_from_its_journal_and_named(run, tmp_path):
    before = all_rows(run)
    seal.seal(journal_path(run))
    copied = copy_of(run, tmp_path)
    folder = copied.path / journal_path(run).parent.name
    for name in ("metrics.parquet", "spans.parquet"):
        path = folder / "000001" / name
        content = path.read_bytes()
        path.write_bytes(content[:200] + bytes([content[200] ^ 8]) + content[201:])
    assert {name: getattr(copied, name)().to_pylist() for name in TABLES} == before
    assert [(one.path.rsplit("/", 1)[1], one.reason) for one in copied.damage()] == [
        ("metrics.parquet", "sha256 is not the manifest's"),
        ("spans.parquet", "sha256 is not the manifest's"),
    ]
    (folder / "000001.jsonl").unlink()
    again = spool.open(copied.path.parent).run(run.id)
    assert again.metrics().num_rows == 0
    assert again.generations().to_pylist() == before["generations"]
    assert len(again.damage()) == 2


@pytest.mark.parametrize("at", [0, 5, 60, -30, -3])
def test_a_damaged_manifest_is_found_and_the_journal_is_read_instead(run, at):
    before = all_rows(run)
    seal.seal(journal_path(run))
    path = journal_path(run).parent / "000001" / "manifest.json"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    assert all_rows(run) == before
    assert [one.path for one in reader(run).damage()] == [str(path)]
    assert not seal.remove_sealed(journal_path(run))


@pytest.mark.parametrize("name", ["metrics.parquet", "events.parquet"])
def test_a_missing_file_of_a_segment_is_named(run, name):
    seal.seal(journal_path(run))
    (journal_path(run).parent / "000001" / name).unlink()
    folder = journal_path(run).parent
    assert [one.fetch for one in reader(run).damage()] == [f"{run.id}/{folder.name}/000001/{name}"]


def test_a_journal_sealed_and_removed_behind_a_reader_is_read_from_its_segment(run):
    before = rows(run)
    found = own_writer(run)
    seal.seal(journal_path(run))
    content = journal_path(run).read_bytes()
    assert seal.remove_sealed(journal_path(run))
    assert [row for batch in found.batches("metrics") for row in batch.to_pylist()] == before
    journal_path(run).write_bytes(content)


def test_a_journal_without_any_header_says_why_it_is_not_sealed(tmp_path):
    with small_journal(tmp_path) as journal:
        journal.flip(3)
        with pytest.raises(SealError, match="the header is damaged"):
            seal.seal(journal.path)


@pytest.mark.parametrize("seed", range(6))
def test_a_sealing_child_killed_at_any_moment_loses_nothing(run, seed):
    before = all_rows(run)
    child = seal.start(journal_path(run), nice=0)
    time.sleep(random.Random(seed).random() * 0.8)
    child.kill()
    child.wait()
    assert all_rows(run) == before
    assert reader(run).damage() == []
    seal.seal(journal_path(run))
    assert all_rows(run) == before
    assert sorted(path.name for path in journal_path(run).parent.iterdir() if path.name != BALLAST_FILE) == [
        "000001",
        "000001.jsonl",
    ]


FILE_STEPS = ["sync_file", "sync_folder", "rename_new", "_give_to_group"]


@pytest.mark.parametrize("step", FILE_STEPS)
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_seal_killed_at_a_durable_step_loses_nothing(run, step, nth):
    before = all_rows(run)
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom spool import files, seal\n"
        f"real, calls = files.{step}, []\n"
        "def dies(*args):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == {nth}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*args)\n"
        f"files.{step} = dies\n"
        "seal.seal(Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(journal_path(run))], check=False)
    assert done.returncode in (0, -signal.SIGKILL)
    assert all_rows(run) == before
    assert reader(run).damage() == []
    seal.seal(journal_path(run))
    assert all_rows(run) == before


def test_a_writer_seals_as_it_goes_and_removes_what_was_sealed_before(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SEAL_BYTES", 20_000)
    monkeypatch.setattr("spool.seal.KEEP_SEALED_S", 0)
    run = begin_without_thread(tmp_path)
    writer = run._writer
    for step in range(900):
        run.log({"a": float(step)}, step=step)
        if step % 300 == 299:
            writer._tick()
            writer._sealer._child.wait()
    run.finish()
    assert [row["value"] for row in rows(run)] == [float(step) for step in range(900)]
    assert reader(run).damage() == []
    left = sorted(path.name for path in writer.folder.iterdir())
    assert {"000001", "000002", "000003", "000004"} <= set(left)
    assert "000001.jsonl" not in left
    assert "000004.jsonl" in left


def test_finish_seals(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0})
    folder = journal_path(run).parent
    run.finish()
    assert (folder / "000001" / "manifest.json").is_file()
    assert rows(run)[0]["value"] == 1.0


WRITES = """
import sys, time, spool
run = spool.init(project="p", dir=sys.argv[1], run_id="r")
run.log({"a": 1.0}, step=1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_writer(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path / "s")], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def spool_seal(path):
    return subprocess.run(
        [sys.executable, "-m", "spool.cli", "seal", str(path)], capture_output=True, text=True, check=False
    )


def segments(path):
    return list(path.glob("r/*/000001"))


@pytest.mark.usefixtures("other_writer")
def test_a_live_writer_is_not_sealed(tmp_path):
    done = spool_seal(tmp_path / "s")
    assert "its process is running" in done.stderr
    assert segments(tmp_path / "s") == []


def test_a_stopped_writer_is_not_sealed_since_silence_proves_nothing(other_writer, tmp_path):
    other_writer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other_writer.pid, os.WSTOPPED)
    done = spool_seal(tmp_path / "s")
    assert "its process is running" in done.stderr
    assert segments(tmp_path / "s") == []


def test_a_writer_that_is_proven_dead_is_sealed(other_writer, tmp_path):
    other_writer.kill()
    other_writer.wait()
    done = spool_seal(tmp_path / "s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "sealed 1 journals\n", "")
    assert len(segments(tmp_path / "s")) == 1
    assert spool.open(tmp_path / "s").run("r").metrics()["value"].to_pylist() == [1.0]


def test_a_zombie_writes_no_more_and_is_sealed(other_writer, tmp_path):
    other_writer.kill()
    os.waitid(os.P_PID, other_writer.pid, os.WEXITED | os.WNOWAIT)
    assert spool_seal(tmp_path / "s").stdout == "sealed 1 journals\n"


@pytest.mark.parametrize("key", ["boot", "pid_namespace", "process_started"])
def test_a_writer_of_another_machine_or_boot_is_unknown_and_not_sealed(tmp_path, key):
    run = begin(tmp_path)
    copied = copy_of(run, tmp_path)
    (path,) = copied.path.glob("*/000001.jsonl")
    first, rest = path.read_bytes().split(b"\n", 1)
    header = {**format.decode(first), key: None}
    header.pop("crc")
    path.write_bytes(format.header_line(header) + rest)
    (writer,) = spool.open(copied.path.parent).run(run.id).writers()
    assert "cannot be proven" in str(cli._open_reason(writer))
    assert spool.open(copied.path.parent).run(run.id).status().state == "unknown"
    shutil.rmtree(copied.path)


def test_a_pid_given_to_another_process_proves_the_death_of_the_first(tmp_path):
    run = begin(tmp_path)
    header = own_writer(run).header
    assert seal_allowed({**header, "process_started": header["process_started"] - 1})
    assert not seal_allowed(header)


def seal_allowed(header):
    from spool import liveness

    return liveness.is_alive(header) is False
