"""`spool tail` and what it stands on: a writer's records followed while it writes, rotates, is sealed, dies and is damaged."""

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import pytest
from click.testing import CliRunner
from journals import (
    begin,
    begin_small,
    begin_without_thread,
    fill_journals,
    journal_path,
    records,
    seal_small,
    small_journal,
    writer_folder,
)

import spool
from spool import format, layout, seal
from spool.cli import main
from spool.follow import Follower
from spool.journal import scan
from spool.terminal import printable


def call(*arguments):
    return CliRunner().invoke(main, ["tail", *map(str, arguments)])


def without_crc(found):
    return [{key: value for key, value in record.items() if key != "crc"} for record in found]


def read(follower, *, is_final=False):
    return list(follower.read(is_final=is_final))


def seqs(follower, **options):
    return [record["seq"] for record in read(follower, **options)]


# --- the last records


@pytest.fixture
def run(tmp_path):
    made = spool.init(project="math", experiment="grpo", dir=tmp_path / "s", run_id="run-1")
    for step in range(20):
        made.log({"loss": step + 0.5, "note": "ok"}, step=step)
    return made


@pytest.mark.usefixtures("run")
def test_the_last_ten_records_one_a_line(tmp_path):
    done = call(tmp_path / "s")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    moment, writer, *rest = lines[-1].split("  ")
    assert moment.endswith("Z")
    assert writer.endswith(str(os.getpid()) + writer[-9:])
    assert rest == ["step 19", "loss=19.5 note=ok"]
    assert len(call(tmp_path / "s", "-n", 3).stdout.splitlines()) == 3
    assert call(tmp_path / "s", "-n", 0).stdout == ""
    assert len(call(tmp_path / "s", "-n", 1000).stdout.splitlines()) == 21


def test_json_is_the_record_as_the_journal_holds_it_with_run_and_writer(run, tmp_path):
    found = [json.loads(line) for line in call(tmp_path / "s", "--json", "-n", 100).stdout.splitlines()]
    whose = {"run": "run-1", "writer": writer_folder(run).name}
    assert found == [whose | record for record in without_crc(records(journal_path(run)))]


def test_without_a_run_named_it_is_the_newest(run, tmp_path):
    other = spool.init(project="code", dir=tmp_path / "s", run_id="a-newer-one", role="lead")
    other.log({"x": 1.0})
    assert {json.loads(line)["run"] for line in call(tmp_path / "s", "--json").stdout.splitlines()} == {"a-newer-one"}
    both = call(tmp_path / "s", "--run", "run-1", "--run", "code/*", "-n", 4)
    assert [line.split("  ")[1] for line in both.stdout.splitlines()] == [
        "run-1",
        "run-1",
        "a-newer-one",
        "a-newer-one",
    ]
    assert run.id == "run-1"


def test_records_of_all_writers_come_in_the_order_of_time(run, tmp_path):
    other = spool.init(dir=tmp_path / "s", run_id="run-1", role="worker")
    for step in range(20, 26):
        (run, other)[step % 2].log({"a": 1.0}, step=step)
    found = [json.loads(line) for line in call(tmp_path / "s", "--json", "-n", 6).stdout.splitlines()]
    assert [one["step"] for one in found] == list(range(20, 26))
    assert len({one["writer"] for one in found}) == 2


def test_only_the_tables_named_however_far_back_they_are(run, tmp_path):
    run.log_generations(step=3, rows=[{"input": "6*7", "output": "42", "score": 1.0}], split="val")
    for step in range(3000):
        run.log({"a": 1.0}, step=step)
    (line,) = call(tmp_path / "s", "--table", "generations", "-n", 5).stdout.splitlines()
    assert line.endswith("step 3  generation val[0] score=1.0 6*7 -> 42")


def test_the_last_records_are_found_without_reading_the_journal_from_its_start(tmp_path):
    run = begin(tmp_path, durability="os")
    for step in range(5000):
        run.log({f"k{at}": 0.5 for at in range(20)}, step=step)
    path = journal_path(run)
    follower = Follower(path.parent, after_seq=4990)
    assert seqs(follower) == list(range(4991, 5002))
    size = path.stat().st_size
    follower = Follower(path.parent, after_seq=4990)
    follower._find(layout.sources(path.parent))
    assert size - follower._offset < 100_000


@pytest.mark.parametrize("keep_journal", [True, False])
def test_sealed_records_are_the_same_whether_their_journals_are_there_or_not(tmp_path, keep_journal):
    run = begin_small(tmp_path / "spool", "sealed")
    fill_journals(run, journals=3)
    run.log(
        {
            "big": 2**70,
            "int": 3,
            "yes": True,
            "none": None,
            "inf": float("-inf"),
            "d": Decimal("0.1"),
        }
    )
    with run.span("call", type="TOOL", step=2, validate=True, attributes={"a": 1}) as span:
        span.outputs = ["x"]
    run.log({"lone": "\ud800"})
    run._writer._rotate()
    run.log({"last": 1.0})
    folder = writer_folder(run)
    expected = [
        record for number in (1, 2, 3, 4) for record in without_crc(records(folder / format.journal_name(number)))
    ]
    for number in (1, 2, 3):
        seal_small(folder, number, keep_journal=keep_journal)
    assert read(Follower(folder)) == expected
    assert read(Follower(folder, after_seq=6)) == expected[6:]


# --- following one writer


def test_only_what_is_new_is_handed_out_and_read(tmp_path):
    run = begin_without_thread(tmp_path)
    follower = Follower(writer_folder(run))
    assert seqs(follower) == [1]
    for step in range(1000):
        run.log({"a": 0.5}, step=step)
    assert seqs(follower) == list(range(2, 1002))
    before = journal_path(run).stat().st_size
    assert follower._offset == before
    assert seqs(follower) == []
    run.log({"a": 1.0})
    assert seqs(follower) == [1002]
    assert follower._offset == journal_path(run).stat().st_size
    assert follower.damage == []


def test_a_torn_tail_is_waited_for(tmp_path):
    with small_journal(tmp_path) as journal:
        follower = Follower(journal.path.parent)
        for length in range(journal.starts()[4], len(journal.content)):
            journal.path.write_bytes(journal.content[:length])
            if length == journal.starts()[4]:
                assert seqs(follower) == [1, 2, 3]
            else:
                assert len(seqs(follower)) == (length in journal.starts())
        journal.path.write_bytes(journal.content)
        assert seqs(follower) == [6]
        assert follower.damage == []


def test_a_short_write_that_is_taken_back_and_written_anew_is_read_right(tmp_path):
    with small_journal(tmp_path) as journal:
        follower = Follower(journal.path.parent)
        start = journal.starts()[5]
        journal.path.write_bytes(journal.content[: start + 30])
        assert seqs(follower) == [1, 2, 3, 4]
        journal.path.write_bytes(journal.content[:start])
        other = format.record_line(5, 1, 9, None, b'"metrics":{"another":1.5}')
        journal.path.write_bytes(journal.content[:start] + other)
        assert [record["metrics"] for record in follower.read()] == [{"another": 1.5}]
        assert follower.damage == []


def test_zeros_that_become_a_record_by_the_second_look_are_no_damage(tmp_path):
    with small_journal(tmp_path) as journal:
        follower = Follower(journal.path.parent)
        start, end = journal.starts()[3], journal.starts()[4] - 1
        journal.fill(start, end)
        assert seqs(follower) == [1, 2]
        assert follower.damage == []
        journal.path.write_bytes(journal.content)
        assert seqs(follower) == [3, 4, 5, 6]
        assert follower.damage == []


def test_damage_is_told_once_with_its_place_and_the_rest_goes_on(tmp_path):
    with small_journal(tmp_path) as journal:
        follower = Follower(journal.path.parent)
        start = journal.starts()[3]
        journal.flip(start + 20)
        assert seqs(follower) == [1, 2]
        assert seqs(follower) == [4, 5, 6]
        assert seqs(follower) == []
        (damage,) = follower.damage
        assert (damage.path, damage.offset, damage.length) == (str(journal.path), start, len(journal.lines[3]))
        assert (damage.reason, damage.first_seq, damage.last_seq) == ("checksum mismatch", 3, 3)


def test_whatever_byte_is_flipped_the_records_are_those_that_a_scan_finds(tmp_path):
    with small_journal(tmp_path) as journal:
        for at in range(0, len(journal.content), 7):
            journal.flip(at, bits=1 << at % 8)
            follower, expected = Follower(journal.path.parent), scan(journal.path)
            assert seqs(follower, is_final=True) == list(expected.seqs), at
            assert {one.first_seq for one in follower.damage} == {one.first_seq for one in expected.damage}, at


def test_a_lost_newline_a_repeated_line_and_a_missing_one_are_told(tmp_path):
    with small_journal(tmp_path) as journal:
        journal.flip(journal.starts()[3] - 1)
        follower = Follower(journal.path.parent)
        assert seqs(follower, is_final=True) == [1, 2, 3, 4, 5, 6]
        assert [one.reason for one in follower.damage] == ["damaged newline"]
        journal.arrange(0, 1, 2, 2, 3, 5, 6)
        follower = Follower(journal.path.parent)
        assert seqs(follower) == [1, 2, 3, 5, 6]
        assert [(one.reason, one.first_seq, one.last_seq) for one in follower.damage] == [
            ("record 2 out of order or repeated", None, None),
            ("records missing", 4, 4),
        ]


def test_rotation_is_followed_and_what_the_old_journal_got_last_is_not_missed(tmp_path):
    run = begin_without_thread(tmp_path)
    writer = run._writer
    follower = Follower(writer.folder)
    assert seqs(follower) == [1]
    run.log({"a": 1.0})
    (writer.folder / format.journal_name(2)).touch()  # as the writer makes it, before it goes over
    run.log({"a": 2.0})
    assert seqs(follower) == [2, 3]
    run.log({"a": 3.0})
    (writer.folder / format.journal_name(2)).unlink()
    writer._rotate()
    run.log({"a": 4.0})
    writer._rotate()
    run.log({"a": 5.0})
    assert seqs(follower) == [4, 5, 6]
    assert follower.damage == []


def test_journals_sealed_and_removed_before_they_were_read_are_read_from_their_segments(tmp_path):
    run = begin_without_thread(tmp_path)
    writer = run._writer
    follower = Follower(writer.folder)
    run.log({"a": 1.0}, step=1)
    assert seqs(follower) == [1, 2]
    run.log({"a": 2.0}, step=2)
    for step in (3, 4):
        writer._rotate()
        run.log({"a": float(step)}, step=step)
    for number in (1, 2):
        seal_small(writer.folder, number)
    found = read(follower)
    assert [(record["seq"], record["metrics"]) for record in found] == [
        (3, {"a": 2.0}),
        (4, {"a": 3.0}),
        (5, {"a": 4.0}),
    ]
    run.log({"a": 5.0})
    assert seqs(follower) == [6]
    assert follower.damage == []


def test_a_journal_that_was_damaged_after_it_was_sealed_is_read_from_its_segment(tmp_path):
    run = begin_without_thread(tmp_path)
    for step in range(5):
        run.log({"a": float(step)}, step=step)
    path = journal_path(run)
    run._writer._rotate()
    seal.seal(path)
    content = path.read_bytes()
    path.write_bytes(content[:-300] + b"x" + content[-299:])
    follower = Follower(path.parent)
    assert seqs(follower, is_final=True) == [1, 2, 3, 4, 5, 6]
    assert follower.damage == []


def test_records_that_are_gone_with_their_files_are_told_as_missing(tmp_path):
    run = begin_without_thread(tmp_path)
    for step in range(3):
        run.log({"a": float(step)}, step=step)
        run._writer._rotate()
    run.log({"a": 9.0})
    (run._writer.folder / format.journal_name(2)).unlink()
    follower = Follower(run._writer.folder)
    assert seqs(follower) == [1, 2, 4, 5]
    assert [(one.reason, one.first_seq, one.last_seq) for one in follower.damage] == [("records missing", 3, 3)]


def test_a_journal_of_another_writer_is_not_read(tmp_path):
    run = begin_without_thread(tmp_path)
    run._writer._rotate()
    stranger = begin_without_thread(tmp_path, run_id="other", role="lead")
    shutil.copy(journal_path(stranger), run._writer.folder / format.journal_name(1))
    follower = Follower(run._writer.folder)
    assert seqs(follower) == []
    assert [one.reason[:14] for one in follower.damage] == ["it belongs to ", "records missing"[:14]]


def test_nothing_follows_a_finish(tmp_path):
    run = begin(tmp_path)
    follower = Follower(writer_folder(run))
    run.finish()
    assert seqs(follower) == [1, 2]
    assert follower.is_finished
    shutil.rmtree(run.path)
    assert seqs(follower) == []


def test_a_run_moved_away_ends_without_an_error(tmp_path):
    run = begin_without_thread(tmp_path)
    follower = Follower(writer_folder(run))
    assert seqs(follower) == [1]
    run.path.rename(tmp_path / "elsewhere")
    assert seqs(follower) == []


def test_a_writer_at_full_speed_that_rotates_and_seals_is_followed_to_the_last_record(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SEAL_BYTES", 60_000)
    monkeypatch.setattr("spool.seal.KEEP_SEALED_S", 0)
    run = begin_without_thread(tmp_path)
    folder = writer_folder(run)

    def write():
        for step in range(4000):
            run.log({"a": float(step)}, step=step)
            if step % 400 == 399:
                run._writer._tick()
                if run._writer._sealer._child is not None:
                    run._writer._sealer._child.wait()
        run.finish()

    thread = threading.Thread(target=write)
    thread.start()
    follower, found = Follower(folder), []
    deadline = time.monotonic() + 60
    while not follower.is_finished and time.monotonic() < deadline:
        found += seqs(follower)
    thread.join()
    assert found == list(range(1, 4003))
    assert follower.damage == []
    assert not (folder / format.journal_name(1)).exists()


# --- the command, following


@contextlib.contextmanager
def following(path, *arguments):
    child = subprocess.Popen(
        [sys.executable, "-m", "spool.cli", "tail", str(path), "-f", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def steps(child, count):
    """The steps of the next `count` records; the suite's time limit is the deadline."""
    return [json.loads(child.stdout.readline())["step"] for _ in range(count)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_goes_on_with_records_writers_and_runs_until_a_signal(run, tmp_path, number):
    with following(tmp_path / "s", "-n", "2", "--table", "metrics") as child:
        assert steps(child, 2) == [18, 19]
        run.log({"a": 1.0}, step=100)
        assert steps(child, 1) == [100]
        run._writer._rotate()
        run.log({"a": 1.0}, step=101)
        assert steps(child, 1) == [101]
        worker = spool.init(dir=tmp_path / "s", run_id="run-1", role="worker")
        worker.log({"a": 1.0}, step=102)
        assert steps(child, 1) == [102]
        later = spool.init(project="p", dir=tmp_path / "s", run_id="a-later-one", role="lead")
        later.log({"a": 1.0}, step=103)
        assert steps(child, 1) == [103]
        child.send_signal(number)
        assert child.wait() == 0
        assert (child.stdout.read(), child.stderr.read()) == ("", "")


def test_following_a_selection_leaves_other_runs_out(run, tmp_path):
    with following(tmp_path / "s", "-n", "1", "--run", "math/*", "--table", "metrics") as child:
        assert steps(child, 1) == [19]
        spool.init(project="p", dir=tmp_path / "s", run_id="other", role="lead").log({"a": 1.0}, step=1)
        spool.init(project="math", experiment="x", dir=tmp_path / "s", run_id="meant", role="lead").log(
            {"a": 1.0}, step=2
        )
        assert steps(child, 1) == [2]
        run.log({"a": 1.0}, step=3)
        assert steps(child, 1) == [3]


@pytest.mark.usefixtures("run")
def test_following_ends_when_nobody_reads_any_more(tmp_path):
    with following(tmp_path / "s", "-n", "1") as child:
        assert steps(child, 1) == [19]
        child.stdout.close()
        assert child.wait() == 0
        assert child.stderr.read() == ""
        child.stdout = io.StringIO()


@pytest.mark.usefixtures("run")
def test_a_broken_pipe_ends_quietly(tmp_path):
    command = f"{sys.executable} -m spool.cli tail {tmp_path / 's'} -n 1000 | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""


def test_damage_is_said_once_while_following_and_is_the_exit_code_without(run, tmp_path):
    path = journal_path(run)
    content = path.read_bytes()
    at = content.rindex(b'"step":18')
    path.write_bytes(content[:at] + b"X" + content[at + 1 :])
    done = call(tmp_path / "s", "--json")
    assert done.exit_code == 3
    assert done.stderr.count("checksum mismatch") == 1
    assert "(seq 20)" in done.stderr
    with following(tmp_path / "s", "-n", "3", "--table", "metrics") as child:
        assert steps(child, 4) == [15, 16, 17, 19]
        assert "checksum mismatch" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait() == 0
        assert child.stderr.read() == ""


# --- hostile text

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b31m\u202eevil\u200f\u2066\u2028\ud800end"


@pytest.mark.parametrize(
    "log",
    [
        lambda run: run.log({f"key{HOSTILE}": HOSTILE}, step=1),
        lambda run: run.log_generations(
            step=1, rows=[{"input": HOSTILE, "output": HOSTILE, "label": HOSTILE}], split=HOSTILE
        ),
        lambda run: run.span(HOSTILE, type=HOSTILE, step=1, inputs=HOSTILE).start(),
        lambda run: run.tag(**{"stage": HOSTILE, HOSTILE.replace("\ud800", ""): "x"}),
    ],
    ids=["metrics", "generation", "span", "event"],
)
def test_hostile_text_is_escaped_for_people(tmp_path, log):
    run = begin(tmp_path)
    log(run)
    done = call(tmp_path / "spool", "-n", 1)
    (line,) = done.stdout.splitlines()
    assert line.isprintable()
    assert "\\x1b" in line or "\\u001b" in line


def test_other_commands_escape_too(tmp_path):
    run = spool.init(project=HOSTILE, experiment=HOSTILE, dir=tmp_path / "s", run_id="r", config={})
    run.log({HOSTILE: HOSTILE})
    for command in (["ls"], ["show", "--run", "r"], ["verify"]):
        done = CliRunner().invoke(main, [command[0], str(tmp_path / "s"), *command[1:]])
        assert done.exit_code == 0
        assert all(line.isprintable() for line in done.stdout.split("\n")), command


def test_printable_keeps_what_is_only_foreign():
    assert printable("学习率 é 🎉 שלום") == "学习率 é 🎉 שלום"
    assert printable("\x1b[31m\u202e\ud800\n") == "\\x1b[31m\\u202e\\ud800\\n"


def test_a_long_record_is_cut_for_people_and_whole_in_json(tmp_path):
    run = begin(tmp_path)
    run.log({"t": "x" * 100_000})
    assert len(call(tmp_path / "spool", "-n", 1).stdout) < 260
    assert len(json.loads(call(tmp_path / "spool", "-n", 1, "--json").stdout)["texts"]["t"]) == 100_000


def test_tail_writes_nothing_and_works_on_a_terminal(run, tmp_path):
    before = sorted((tmp_path / "s").rglob("*"))
    parent, child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "spool.cli", "tail", str(tmp_path / "s"), "-n", "1"], stdout=child, check=False
    )
    os.close(child)
    assert done.returncode == 0
    assert b"loss=19.5" in os.read(parent, 10_000)
    os.close(parent)
    assert sorted((tmp_path / "s").rglob("*")) == before
    assert run.id == "run-1"


def test_a_mistake_is_one_sentence(tmp_path):
    begin(tmp_path)
    done = call(tmp_path / "spool", "--run", "nosuch")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: {tmp_path}/spool: no run 'nosuch'; `spool ls {tmp_path}/spool` lists them\n"
    assert call(tmp_path / "spool", "-n", -1).exit_code == 2
    assert call(tmp_path / "spool", "--table", "nosuch").exit_code == 2
