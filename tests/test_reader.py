"""Reading: which runs, in which state, in which order, segments and live journal together."""

import subprocess
import sys
from itertools import pairwise

import pytest
from journals import begin, begin_without_thread, copy_of, journal_path, own_writer, reader, rows

import spool
from spool import format, liveness, seal
from spool.errors import SealError
from spool.reader import WriterReader


def names(runs):
    return [run.id for run in runs]


@pytest.fixture
def runs(tmp_path):
    """Three ids in two projects."""
    for project, experiment, run_id in (("math", "ppo", "a-1"), ("math", "grpo", "a-2"), ("code", "grpo", "b-1")):
        spool.init(project=project, experiment=experiment, run_id=run_id, dir=tmp_path / "s", role="lead")
    return spool.open(tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a-1", ["a-1"]),
        ("a", ["a-1", "a-2"]),
        ("*-1", ["a-1", "b-1"]),
        ("math/ppo", ["a-1"]),
        ("*/grpo", ["a-2", "b-1"]),
        ("math/*", ["a-1", "a-2"]),
    ],
)
def test_a_run_is_selected_by_id_prefix_glob_or_project(runs, name, found):
    assert names(runs.select(name)) == found


@pytest.mark.usefixtures("runs")
def test_a_whole_id_wins_over_a_prefix(tmp_path):
    spool.init(project="x", run_id="a", dir=tmp_path / "s", role="lead")
    assert spool.open(tmp_path / "s").run("a").id == "a"


def test_no_match_and_several_matches_are_said_in_one_sentence(runs):
    with pytest.raises(spool.UnknownRunError, match="no run 'c'; `spool ls"):
        runs.run("c")
    with pytest.raises(spool.UnknownRunError, match="'a' means 2 runs: a-1, a-2; name one"):
        runs.run("a")


def test_a_run_is_running_while_its_process_lives_and_finished_by_its_finish(tmp_path):
    run = begin(tmp_path)
    assert reader(run).status().state == "running"
    run.finish()
    status = reader(run).status()
    assert (status.state, status.proven_death) == ("finished", False)
    assert status.end_ns == reader(run).events()["ts"].cast("int64").to_pylist()[-1]


@pytest.mark.parametrize("state", ["failed", "preempted", "killed"])
def test_a_finish_says_how(tmp_path, state):
    run = begin(tmp_path)
    run.finish(state)
    assert reader(run).status().state == state


def test_a_run_whose_processes_are_provably_dead_has_failed(tmp_path):
    script = "import sys, os, spool; r = spool.init(dir=sys.argv[1], run_id='r'); r.log({'a': 1.0}); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], check=True, capture_output=True)
    run = spool.open(tmp_path / "s").run("r")
    status = run.status()
    assert (status.state, status.proven_death) == ("failed", True)
    assert status.end_ns == run.metrics()["ts"].cast("int64").to_pylist()[-1]


def test_a_run_of_another_machine_is_unknown(tmp_path, monkeypatch):
    run = begin(tmp_path)
    run.log({"a": 1.0})
    monkeypatch.setattr(liveness, "_boot_id", lambda: "another")
    assert copy_of(run, tmp_path).status().state == "unknown"


def test_only_the_lead_writer_of_the_latest_attempt_ends_the_run(tmp_path):
    lead = begin(tmp_path)
    worker = spool.init(dir=tmp_path / "spool", run_id=lead.id, role="worker")
    worker.finish("failed")
    assert reader(lead).status().state == "running"
    lead.finish()
    assert reader(lead).status().state == "finished"
    again = spool.init(dir=tmp_path / "spool", run_id=lead.id, resume=True)
    assert reader(lead).status().state == "running"
    again.finish("failed")
    assert reader(lead).status().state == "failed"


def test_attempts_and_writers_come_in_order_the_lead_first(tmp_path):
    first = begin(tmp_path)
    workers = [spool.init(dir=tmp_path / "spool", run_id=first.id, role="worker") for _ in range(3)]
    second = spool.init(dir=tmp_path / "spool", run_id=first.id, resume=True, resumed_from_step=7)
    third = spool.init(dir=tmp_path / "spool", run_id=first.id, resume=True)
    for number, run in enumerate([third, *workers, second, first]):
        run.log({"a": float(number)})
    found = reader(first)
    assert [(one.id, one.number, one.continues, one.resumed_from_step) for one in found.attempts()] == [
        (first.attempt, 1, None, None),
        (second.attempt, 2, first.attempt, 7),
        (third.attempt, 3, second.attempt, None),
    ]
    writers = found.writers()
    assert [(one.attempt, one.is_lead) for one in writers] == [
        (first.attempt, True),
        *[(first.attempt, False)] * 3,
        (second.attempt, True),
        (third.attempt, True),
    ]
    assert sorted(one.id for one in writers[1:4]) == [one.id for one in writers[1:4]]
    values = [row["value"] for row in rows(first)]
    assert (values[0], sorted(values[1:4]), values[4:]) == (5.0, [1.0, 2.0, 3.0], [4.0, 0.0])


def test_every_row_says_whose_it_is(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0}, step=3)
    (row,) = rows(run)
    assert (row["run_id"], row["writer_id"], row["attempt"]) == (run.id, own_writer(run).id, run.attempt)
    assert (row["seq"], row["step"], row["ts"].tzinfo is not None) == (2, 3, True)


def test_segments_and_the_live_journal_are_one_sequence(tmp_path):
    run = begin_without_thread(tmp_path)
    for step in range(30):
        run.log({"a": float(step), "b": 1}, step=step)
        if step in (9, 19):
            run._writer._rotate()
    seal.seal(journal_path(run).parent / "000001.jsonl")
    found = own_writer(run)
    assert [row["step"] for batch in found.batches("metrics") for row in batch.to_pylist()] == [
        at // 2 for at in range(60)
    ]
    for after in range(found.last_seq + 1):
        seqs = [seq for batch in found.batches("metrics", after_seq=after) for seq in batch["seq"].to_pylist()]
        assert seqs == [seq for seq in range(max(2, after + 1), 32) for _ in "ab"], after


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("max_rows", [1, 2, 7, 100])
def test_batches_hold_whole_records_and_are_bounded(tmp_path, sealed, max_rows):
    run = begin(tmp_path, durability="os")
    sizes = [1, 5, 3, 1, 1, 20, 2]
    for size in sizes:
        run.log({f"k{at}": 1.0 for at in range(size)}, step=1)
    if sealed:
        seal.seal(journal_path(run))
        content = journal_path(run).read_bytes()
        journal_path(run).unlink()
    batches = [batch["seq"].to_pylist() for batch in own_writer(run).batches("metrics", max_rows=max_rows)]
    assert [seq for batch in batches for seq in batch] == [
        seq for seq, size in enumerate(sizes, 2) for _ in range(size)
    ]
    assert all(before[-1] < after[0] for before, after in pairwise(batches))
    assert max(map(len, batches)) < 2 * max_rows + 20
    if sealed:
        journal_path(run).write_bytes(content)


def test_a_copy_of_a_live_run_is_a_valid_prefix(tmp_path):
    run = begin(tmp_path)
    for step in range(10):
        run.log({"a": float(step)}, step=step)
    copied = copy_of(run, tmp_path)
    run.log({"a": 10.0}, step=10)
    assert copied.metrics()["value"].to_pylist() == [float(step) for step in range(10)]
    assert copied.damage() == []


def test_reading_writes_nothing(tmp_path):
    run = begin(tmp_path, durability="os")
    run.log({"a": 1.0})
    seal.seal(journal_path(run))

    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.path.parent.rglob("*")}

    before = state()
    found = reader(run)
    assert found.metrics().num_rows == 1
    assert found.damage() == []
    assert found.status().state == "running"
    assert state() == before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _path: None, "no such folder; name a spool, or set SPOOL_DIR"),
        (lambda path: path.write_bytes(b""), "a file, not a spool folder"),
        (lambda path: path.mkdir(), "not a spool, no folder in it has a run.json"),
    ],
)
def test_what_is_no_spool_is_refused_in_one_sentence(tmp_path, make, sentence):
    make(tmp_path / "s")
    with pytest.raises(spool.NotASpoolError, match=sentence):
        spool.open(tmp_path / "s")


def test_a_run_is_not_a_spool_and_its_spool_is_named(tmp_path):
    run = begin(tmp_path)
    with pytest.raises(spool.NotASpoolError, match=f"this is one run; its spool is {run.path.parent}"):
        spool.open(run.path)


def test_a_later_format_is_refused_and_never_guessed(tmp_path):
    run = begin(tmp_path)
    info = format.load_json((run.path / "run.json").read_bytes())
    (run.path / "run.json").write_bytes(format.dump_json({**info, "format": 2}))
    with pytest.raises(spool.NewerFormatError, match=r"run.json: format 2, this release reads up to format 1"):
        spool.open(run.path.parent).runs()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format":1}', b"\0\xff"])
def test_a_damaged_run_json_is_named_and_the_records_are_read(tmp_path, content):
    run = begin(tmp_path)
    run.log({"a": 1.0})
    other = begin(tmp_path)
    (run.path / "run.json").write_bytes(content)
    found = spool.open(run.path.parent)
    assert sorted(names(found.runs())) == sorted([run.id, other.id])
    assert found.run(run.id).metrics()["value"].to_pylist() == [1.0]
    (damage,) = found.run(run.id).damage()
    assert damage.path == str(run.path / "run.json")


def test_dot_names_and_foreign_files_are_not_read(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0})
    folder = journal_path(run).parent
    (folder / ".000001.half").mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "000009.jsonl.bak").write_text("x")
    (run.path / "files").mkdir()
    (run.path / "empty").mkdir()
    (run.path.parent / ".sync").mkdir()
    (run.path.parent / "lost+found").mkdir()
    assert names(spool.open(run.path.parent).runs()) == [run.id]
    assert (len(rows(run)), len(reader(run).writers()), reader(run).damage()) == (1, 1, [])


def test_a_reader_remembers_what_it_scanned(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0})
    found = own_writer(run)
    run.log({"a": 2.0})
    assert [row["value"] for batch in found.batches("metrics") for row in batch.to_pylist()] == [1.0]
    assert WriterReader(found.path).last_seq == found.last_seq + 1


def test_two_runs_are_read_apart(tmp_path):
    one, two = begin(tmp_path), begin(tmp_path)
    one.log({"a": 1.0})
    two.log({"a": 2.0})
    assert [row["value"] for row in rows(one)] == [1.0]
    assert [row["value"] for row in rows(two)] == [2.0]


def test_a_journal_swapped_for_another_of_equal_seqs_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.writer.SEAL_BYTES", 1)
    monkeypatch.setattr("spool.seal.start", no_sealing)
    run = begin_without_thread(tmp_path)
    for value in (1.0, 2.0):
        run.log({"a": value}, step=1)
        run._writer._tick()
    assert own_writer(run).damage() == []
    journal = run._writer.folder / "000002.jsonl"
    header, *lines = journal.read_bytes().splitlines(keepends=True)
    body = format.fast_metrics({"a": 9.0})
    forged = [format.record_line(format.seq_of_line(line), 1, 1, None, body) for line in lines]
    journal.write_bytes(b"".join([header, *forged]))
    [damage] = own_writer(run).damage()
    assert "000002.jsonl" in str(damage)
    assert "sha256" in damage.reason
    assert 9.0 in [row["value"] for row in rows(run)], "reported, and still delivered"


def test_a_last_segment_that_cannot_be_read_is_a_loss_from_its_first_seq_on(tmp_path):
    run = begin(tmp_path)
    run.log({"a": 1.0}, step=1)
    run.finish()
    folder = journal_path(run).parent
    (folder / "000001.jsonl").unlink()
    (folder / "000001" / "manifest.json").write_text("{}")
    assert any((one.first_seq, one.last_seq) == (1, None) for one in own_writer(run).damage())


def no_sealing(*_arguments, **_settings):
    raise SealError("not in this test")
