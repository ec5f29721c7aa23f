"""A run as a process sees it: begun durably, joined by environment, resumed, finished once, and never in the way."""

import errno
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
from journals import begin, own_writer, reader, rows

import spool
from spool import files, format


def python(script, *arguments, **settings):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **settings,
    )


def events(run, kind):
    return [json.loads(row["body"]) for row in rows(run, "events") if row["kind"] == kind]


def test_a_run_killed_right_after_init_can_be_read(tmp_path):
    script = """
        import os, signal, sys, spool
        spool.init(project="p", experiment="e", config={"lr": 0.1}, dir=sys.argv[1], run_id="r")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(script, tmp_path / "s").returncode == -9
    run = spool.open(tmp_path / "s").run("r")
    assert (run.project, run.experiment, run.config) == ("p", "e", {"lr": 0.1})
    assert (len(run.writers()), run.status().state, run.damage()) == (1, "failed", [])


@pytest.mark.parametrize("step", ["publish_file", "create_append", "sync_data"])
def test_an_init_killed_at_a_durable_step_leaves_a_spool_that_can_be_used(tmp_path, step):
    script = """
        import os, signal, sys, spool
        from spool import files
        setattr(files, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        spool.init(project="p", dir=sys.argv[1], run_id="r")
    """
    assert python(script, tmp_path / "s", step).returncode == -9
    run = spool.init(project="p", dir=tmp_path / "s", run_id="r", resume=True)
    run.log({"a": 1.0})
    assert [row["value"] for row in rows(run)] == [1.0]
    assert reader(run).damage() == []


JOINS = """
    import sys, spool
    run = spool.init(project=sys.argv[1] if len(sys.argv) > 1 else None)
    run.log({"child": 1.0})
    print(run.id, run.attempt, run.is_lead)
"""


def test_a_child_process_joins_by_environment_as_another_writer(tmp_path):
    run = begin(tmp_path)
    for project in ([], ["tests"]):
        done = python(JOINS, *project)
        assert done.stdout.split() == [run.id, run.attempt, "False"], done.stderr
    assert reader(run).status().state == "running"
    assert len(reader(run).writers()) == 3
    assert [row["key"] for row in rows(run)] == ["child", "child"]


def test_a_child_of_another_project_starts_its_own_run(tmp_path):
    run = begin(tmp_path)
    done = python(JOINS, "another")
    other, _, is_lead = done.stdout.split()
    assert (other != run.id, is_lead) == (True, "True")
    assert spool.open(tmp_path / "spool").run(other).project == "another"


def test_a_child_after_the_finish_starts_its_own_run(tmp_path):
    run = begin(tmp_path)
    run.finish()
    done = python(JOINS, cwd=tmp_path)
    assert done.stdout.split()[0] != run.id


def test_resume_continues_as_the_next_attempt_and_names_positions(tmp_path):
    script = """
        import os, signal, sys, spool
        run = spool.init(project="p", dir=sys.argv[1], run_id="r", resume=True)
        for step in range(5): run.log({"a": float(step)}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(script, tmp_path / "s").returncode == -9
    (dead,) = spool.open(tmp_path / "s").run("r").writers()
    run = spool.init(dir=tmp_path / "s", run_id="r", resume=True, resumed_from_step=3)
    assert own_writer(run).header["continues"] == {"attempt": dead.attempt, "positions": {dead.id: 6}}
    assert run.attempt.startswith("2-")
    run.log({"a": 4.0}, step=4)
    assert [(row["attempt"], row["step"]) for row in rows(run)] == [(dead.attempt, at) for at in range(5)] + [
        (run.attempt, 4)
    ]
    assert events(run, "attempt")[-1]["continues"] == {"attempt": dead.attempt, "positions": {dead.id: 6}}


def test_resume_begins_a_run_that_does_not_exist_and_must_insists(tmp_path):
    with pytest.raises(spool.UnknownRunError, match="no run r to resume"):
        begin(tmp_path, run_id="r", resume="must")
    run = begin(tmp_path, run_id="r", resume=True)
    assert (run.id, run.attempt[:2], run.is_lead) == ("r", "1-", True)


def test_a_run_begun_by_six_processes_at_once_is_one_run(tmp_path):
    script = """
        import sys, spool
        run = spool.init(project="p", dir=sys.argv[1], run_id="r")
        run.log({"a": 1.0})
        print(run.is_lead, flush=True)
        sys.stdin.read()
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "s")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(6)
    ]
    leads = [child.stdout.readline() for child in children]
    for child in children:
        child.communicate()
    assert sorted(leads) == [b"False\n"] * 5 + [b"True\n"]
    run = spool.open(tmp_path / "s").run("r")
    assert len(run.writers()) == 6
    assert run.metrics().num_rows == 6
    assert len(run.attempts()) == 1


def test_a_run_id_given_again_after_the_end_is_refused_and_resume_continues(tmp_path):
    begin(tmp_path, run_id="r").finish()
    with pytest.raises(spool.FinishedRunError, match="this run is finished; resume=True continues it"):
        begin(tmp_path, run_id="r")
    assert len(spool.open(tmp_path / "spool").run("r").writers()) == 1
    assert begin(tmp_path, run_id="r", resume=True).is_lead


def test_of_the_ranks_that_resume_the_first_begins_the_attempt(tmp_path, monkeypatch):
    begin(tmp_path, run_id="r").finish()
    attempts = []
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        run = begin(tmp_path, run_id="r", resume=True)
        attempts.append((run.is_lead, run.attempt))
    assert [is_lead for is_lead, _ in attempts] == [True, False, False]
    assert len({attempt for _, attempt in attempts}) == 1


def test_save_of_a_folder_leaves_the_spool_in_it_out(tmp_path):
    (tmp_path / "train.py").write_text("pass")
    run = begin(tmp_path)
    run.save(tmp_path)
    [saved] = events(run, "file")
    assert saved["name"] == f"{tmp_path.name}/train.py"


def test_a_run_given_to_another_process_says_what_to_do(tmp_path):
    with pytest.raises(TypeError, match=r"call spool\.init"):
        pickle.dumps(begin(tmp_path))


def test_an_unknown_status_is_refused(tmp_path):
    run = begin(tmp_path)
    with pytest.raises(ValueError, match="one of finished, failed, preempted, killed"):
        run.finish("done")
    assert reader(run).status().state == "running"


def test_the_context_manager_says_how_it_ended(tmp_path):
    with begin(tmp_path) as good:
        good.log({"a": 1.0})
    with pytest.raises(ZeroDivisionError), begin(tmp_path) as bad:
        raise ZeroDivisionError
    with pytest.raises(SystemExit), begin(tmp_path) as left:
        sys.exit(0)
    states = [reader(run).status().state for run in (good, bad, left)]
    assert states == ["finished", "failed", "finished"]


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("pass", "finished"),
        ("raise RuntimeError('boom')", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("sys.exit(0)", "finished"),
        ("sys.exit(1)", "failed"),
        ("sys.exit('no such file')", "failed"),
    ],
    ids=["returns", "raises", "interrupted", "exits", "exits with a code", "exits with a message"],
)
def test_an_interpreter_that_ends_says_how_even_where_the_run_was_dropped(tmp_path, ending, state):
    script = f"""
        import sys, spool
        def main():
            run = spool.init(project="p", dir=sys.argv[1], run_id="r")
            run.log({{"a": 1.0}})
        main()
        {ending}
    """
    python(script, tmp_path / "s")
    assert spool.open(tmp_path / "s").run("r").status().state == state


def test_a_finish_names_every_writer_and_how_far_it_got(tmp_path):
    run = begin(tmp_path)
    worker = spool.init(dir=tmp_path / "spool", run_id=run.id, role="worker")
    worker.log({"a": 1.0})
    worker_id = worker._writer.id
    run.finish()
    roster = events(run, "finish")[-1]["roster"]
    assert roster[worker_id] == {"seq": 1}
    assert roster[own_writer(run).id]["seq"] == 1


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/spool"])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(spool.NotASpoolError, match=r"choose another folder with dir= or SPOOL_DIR$"):
        spool.init(project="p", dir=tmp_path / name)


def test_a_run_of_a_newer_format_is_not_continued(tmp_path):
    run = begin(tmp_path, run_id="r")
    path = run.path / "run.json"
    path.write_bytes(format.dump_json({**format.load_json(path.read_bytes()), "format": 2}))
    with pytest.raises(spool.NewerFormatError, match="install a newer spool-sync"):
        begin(tmp_path, run_id="r", resume=True)


def test_a_run_with_a_damaged_run_json_is_not_continued(tmp_path):
    run = begin(tmp_path, run_id="r")
    (run.path / "run.json").write_bytes(b"{")
    with pytest.raises(spool.NotASpoolError, match=r"run.json: not what `init` writes"):
        begin(tmp_path, run_id="r", resume=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"run_id": "../x"}, "run id '../x': use letters"),
        ({"run_id": ""}, "run id ''"),
        ({"durability": "always"}, "durability 'always': one of interval, record, os"),
        ({"role": "boss"}, "role 'boss': lead or worker"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(tmp_path, settings, sentence):
    with pytest.raises(spool.SpoolError, match=sentence):
        begin(tmp_path, **settings)
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize("experiment", ["实验", "a/b", "x" * 300, "..", "e v\nil", "\ud800"], ids=ascii)
def test_any_experiment_name_makes_a_run_and_is_kept(tmp_path, experiment):
    run = spool.init(project="项目", experiment=experiment, dir=tmp_path / "s")
    other = spool.init(project="项目", experiment=experiment + "!", dir=tmp_path / "s")
    assert run.id.isascii()
    assert run.id.split("-", 1)[1][:-7] != other.id.split("-", 1)[1][:-7]
    assert reader(run).project == "项目"
    assert reader(run).experiment == experiment.replace("\ud800", "�")


def test_run_json_tells_where_the_run_came_from(tmp_path):
    info = reader(begin(tmp_path, may_leave=False)).info
    assert {"argv", "cwd", "host", "user", "python", "packages", "git", "seeds"} <= set(info)
    assert (info["format"], info["may_leave"]) == (1, False)
    assert info["packages"]["pyarrow"]


def test_a_config_of_any_shape_is_kept(tmp_path):
    class Odd:
        def __repr__(self):
            return "Odd"

    config = {"a": {"b": [1, None, float("nan")]}, 3: Odd(), "big": 2**70}
    assert reader(begin(tmp_path, config=config)).config == {
        "a": {"b": [1, None, "NaN"]},
        "3": "Odd",
        "big": str(2**70),
    }


def test_saved_files_are_kept_once_and_a_missing_one_is_a_warning(tmp_path, capfd):
    (tmp_path / "code").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "code" / name).write_text("same")
    run = begin(tmp_path)
    run.save(tmp_path / "code")
    run.save(tmp_path / "missing")
    assert [body["name"] for body in events(run, "file")] == ["code/a.py", "code/b.py"]
    assert len(list((run.path / "files").iterdir())) == 1
    assert "not saved" in capfd.readouterr().err


def test_an_input_is_described_and_not_copied(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a":1}\n\n{"a":2}\n')
    run = begin(tmp_path)
    run.log_input(tmp_path / "train.jsonl")
    run.log_input(tmp_path / "missing.parquet")
    first, second = events(run, "input")
    assert (first["rows"], first["size"], len(first["sha256"])) == (2, 17, 64)
    assert "No such file" in second["error"]
    assert not (run.path / "files").exists()


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, float("nan"), 5.0], [], [3, 3], (1e308, -1e308), "text", [[1], [2]]], ids=repr
)
def test_a_histogram_never_raises_and_counts_what_it_is_given(tmp_path, values):
    run = begin(tmp_path)
    run.log_histogram("grad", values, step=2)
    (body,) = events(run, "histogram")
    assert ("text" in body) or sum(body["counts"]) + body["nonfinite"] == body["count"]


def test_import_pulls_in_neither_pyarrow_nor_numpy_nor_a_tracker():
    script = """
        import sys, spool
        print(sorted({"pyarrow", "numpy", "pandas", "torch", "mlflow", "click"} & set(sys.modules)))
    """
    assert python(script).stdout == "[]\n"


def test_flush_syncs_before_it_returns_and_a_failing_disk_is_a_warning(tmp_path, monkeypatch, capfd):
    run = begin(tmp_path, durability="os")
    run.log({"a": 1.0})
    synced = []
    monkeypatch.setattr(files, "sync_data", synced.append)
    run.flush()
    assert len(synced) == 1

    def sync_data(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync_data", sync_data)
    run.flush()
    assert "not synced" in capfd.readouterr().err
