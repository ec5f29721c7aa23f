"""`spool ls | show | verify | seal`: what they print, their exit codes, and one sentence for each mistake."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from journals import begin, copy_of, journal_path, reader, small_journal

import spool
from spool import format, liveness
from spool.cli import main


def call(*arguments):
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture
def run(tmp_path):
    made = spool.init(project="math", experiment="grpo", dir=tmp_path / "s", run_id="run-1")
    made.log({"loss": 0.5, "big": 2**60, "nan": float("nan")}, step=1)
    made.log({"loss": 0.25, "note": "ok"}, step=2)
    return made


@pytest.mark.usefixtures("run")
def test_ls_lists_every_run_in_one_line(tmp_path):
    other = spool.init(project="code", experiment="ppo", dir=tmp_path / "s", run_id="run-2", role="lead")
    other.finish()
    done = call("ls", tmp_path / "s")
    assert done.exit_code == 0
    first, second = done.stdout.splitlines()
    assert first.startswith("run-1  math/grpo  20")
    assert first.endswith("1 attempts, 1 writers, 3 records  running")
    assert second.endswith("finished")


def test_ls_as_json(run, tmp_path):
    (row,) = json.loads(call("ls", tmp_path / "s", "--json").stdout)
    created = reader(run).created_ns
    assert row == {
        "run": "run-1",
        "project": "math",
        "experiment": "grpo",
        "created_ns": created,
        "attempts": 1,
        "writers": 1,
        "records": 3,
        "status": "running",
    }


@pytest.mark.usefixtures("run")
def test_ls_takes_only_the_runs_named(tmp_path):
    spool.init(project="code", dir=tmp_path / "s", run_id="other", role="lead")
    assert len(call("ls", tmp_path / "s", "--run", "math/*").stdout.splitlines()) == 1
    assert len(call("ls", tmp_path / "s", "--run", "math/*", "--run", "other", "--run", "o").stdout.splitlines()) == 2


@pytest.mark.usefixtures("run")
def test_the_spool_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOOL_DIR", str(tmp_path / "s"))
    assert "run-1" in call("ls").stdout


@pytest.mark.usefixtures("run")
def test_show_tells_the_last_value_of_each_metric(tmp_path):
    done = call("show", tmp_path / "s", "--run", "run-1")
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "project math" in lines
    assert "status running" in lines
    assert lines[-4:] == ["big step 1: 1152921504606846976", "loss step 2: 0.25", "nan step 1: nan", "note step 2: ok"]


@pytest.mark.usefixtures("run")
def test_show_as_json_keeps_values_exact(tmp_path):
    found = json.loads(call("show", tmp_path / "s", "--run", "run", "--json").stdout)
    assert found["metrics"] == {
        "big": {"step": 1, "value": "1152921504606846976"},
        "loss": {"step": 2, "value": 0.25},
        "nan": {"step": 1, "value": "NaN"},
        "note": {"step": 2, "value": "ok"},
    }


@pytest.mark.usefixtures("run")
def test_verify_says_intact_and_exits_0(tmp_path):
    done = call("verify", tmp_path / "s")
    assert (done.exit_code, done.stdout) == (0, "run-1: 1 writers, 3 records, intact\n")


def test_verify_names_path_byte_and_seq_and_exits_3(tmp_path):
    with small_journal(tmp_path) as journal:
        start = journal.starts()[3]
        journal.flip(start + 20)
        done = call("verify", tmp_path / "spool")
        sentence = f"{journal.path}: checksum mismatch at byte {start}, {len(journal.lines[3])} bytes (seq 3)"
        assert done.exit_code == 3
        assert done.stdout.splitlines()[1] == f"  {sentence}"
        done = call("verify", tmp_path / "spool", "--json")
        assert done.exit_code == 3
        [damage] = json.loads(done.stdout)[0]["damage"]
    assert damage["message"] == sentence
    assert (damage["offset"], damage["first_seq"], damage["last_seq"], damage["fetch"]) == (start, 3, 3, None)


def test_verify_of_a_torn_tail_is_intact(tmp_path):
    with small_journal(tmp_path) as journal:
        journal.cut(len(journal.content) - 7)
        assert call("verify", tmp_path / "spool").exit_code == 0


def test_verify_of_a_read_only_copy_of_another_machine(run, tmp_path):
    copied = copy_of(run, tmp_path)
    for path in copied.path.rglob("*.jsonl"):
        path.chmod(0o400)
    assert call("verify", copied.path.parent).exit_code == 0


def test_seal_seals_what_has_finished_and_twice_is_once(run, tmp_path):
    run.finish()
    segment = journal_path(run).parent / "000001"
    content = (segment / "manifest.json").read_bytes()
    for path in segment.iterdir():
        path.unlink()
    segment.rmdir()
    assert call("seal", tmp_path / "s").stdout == "sealed 1 journals\n"
    assert call("seal", tmp_path / "s").stdout == "sealed 0 journals\n"
    assert (
        format.load_checked_json((segment / "manifest.json").read_bytes()).keys()
        == format.load_checked_json(content).keys()
    )


def test_a_proven_death_is_recorded_by_seal_and_known_to_a_copy_elsewhere(tmp_path, monkeypatch):
    script = "import os, sys, spool; spool.init(project='p', dir=sys.argv[1], run_id='r').log({'a': 1.0}); os._exit(1)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], check=False, stderr=subprocess.DEVNULL)
    shutil.copytree(tmp_path / "s", tmp_path / "early copy")
    assert call("seal", tmp_path / "s").stdout == "sealed 1 journals\n"
    shutil.copytree(tmp_path / "s", tmp_path / "late copy")
    monkeypatch.setattr(liveness, "_boot_id", lambda: "of another machine")
    assert spool.open(tmp_path / "early copy").run("r").status().state == "unknown"
    status = spool.open(tmp_path / "late copy").run("r").status()
    assert (status.state, status.proven_death) == ("failed", True)


def test_verify_of_an_altered_saved_file_exits_3(run, tmp_path):
    (tmp_path / "config.yaml").write_text("lr: 1")
    run.save(tmp_path / "config.yaml")
    assert call("verify", tmp_path / "s").exit_code == 0
    [saved] = run.path.glob("files/*")
    saved.write_text("lr: 2")
    done = call("verify", tmp_path / "s")
    assert done.exit_code == 3
    assert str(saved) in done.stdout


def test_seal_removes_a_journal_that_was_sealed_ten_minutes_ago_and_no_other(run, tmp_path):
    run.finish()
    before = call("show", tmp_path / "s", "--run", run.id).stdout
    [segment] = (tmp_path / "s").glob("*/*/000001")
    journal = segment.with_suffix(".jsonl")
    os.utime(segment, (1, time.time() - 599))
    assert call("seal", tmp_path / "s").stdout == "sealed 0 journals\n"
    os.utime(segment, (1, time.time() - 601))
    journal.write_bytes(journal.read_bytes() + b"x")
    assert call("seal", tmp_path / "s").stdout == "sealed 0 journals\n"
    journal.write_bytes(journal.read_bytes()[:-1])
    assert call("seal", tmp_path / "s").stdout == "sealed 0 journals, removed 1 that were sealed before\n"
    assert not journal.exists()
    assert call("show", tmp_path / "s", "--run", run.id).stdout == before
    assert call("verify", tmp_path / "s").exit_code == 0


@pytest.mark.usefixtures("run")
def test_seal_leaves_a_live_writer_alone(tmp_path):
    done = call("seal", tmp_path / "s")
    assert (done.exit_code, done.stdout) == (0, "sealed 0 journals\n")
    assert "left alone, its process is running" in done.stderr


def test_seal_of_what_cannot_be_sealed_says_why_and_exits_1(tmp_path):
    run = begin(tmp_path)
    path = journal_path(run)
    run.finish()
    shutil.rmtree(path.parent / "000001")
    path.write_bytes(b"x" + path.read_bytes()[1:])
    done = call("seal", tmp_path / "spool")
    assert (done.exit_code, done.stdout) == (1, "sealed 0 journals, 1 could not be sealed\n")
    assert "the header is damaged" in done.stderr


MISTAKES = {
    "missing": (["ls", "nowhere"], 1, "Error: nowhere: no such folder; name a spool, or set SPOOL_DIR\n"),
    "file": (["verify", "file"], 1, "Error: file: a file, not a spool folder\n"),
    "not a spool": (["ls", "empty"], 1, "Error: empty: not a spool, no folder in it has a run.json\n"),
    "no run": (["ls", "s", "--run", "x"], 1, "Error: s: no run 'x'; `spool ls s` lists them\n"),
    "no run to show": (["show", "s", "--run", "x"], 1, "Error: s: no run 'x'; `spool ls s` lists them\n"),
    "ambiguous": (["show", "s", "--run", "r"], 1, "Error: s: 'r' means 2 runs: run-1, run-2; name one\n"),
    "newer": (
        ["ls", "newer"],
        1,
        "Error: newer/run-9/run.json: format 9, this release reads up to format 1; install a newer spool-sync\n",
    ),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_no_traceback(tmp_path, mistake):
    spool.init(project="math", dir=tmp_path / "s", run_id="run-2", role="lead")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer" / "run-9").mkdir(parents=True)
    (tmp_path / "newer" / "run-9" / "run.json").write_text('{"format":9}')
    arguments, code, sentence = MISTAKES[mistake]
    done = subprocess.run(
        [sys.executable, "-m", "spool.cli", *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("SPOOL_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", sentence)


def test_an_unknown_option_is_a_usage_error():
    assert call("ls", "--no-such").exit_code == 2


@pytest.mark.usefixtures("run")
def test_a_damaged_run_json_does_not_hide_the_other_runs(tmp_path):
    other = begin(tmp_path)
    (other.path / "run.json").write_bytes(b"\0" * 10)
    done = call("verify", other.path.parent)
    assert done.exit_code == 3
    assert f"{other.path}/run.json" in done.stdout
    assert call("ls", other.path.parent).exit_code == 0
