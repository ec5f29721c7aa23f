"""`spool gc`: only what is over and proven to be everywhere goes; it asks; and neither a kill nor a race loses a record."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from dying import kill_at_steps
from journals import begin_small, fill_journals, seal_small, whole_rows, writer_folder

import spool
from spool import acceptance, claim, cursor, files, format, layout, removal
from spool.cli import main
from spool.errors import RemoveError
from spool.reader import WriterReader
from spool.writer import Writer


def call(*arguments):
    return CliRunner().invoke(main, ["gc", *map(str, arguments)])


def gc(root, *arguments):
    """With the usual words: delivered to mlflow, without asking."""
    return call(root, "--delivered-to", "mlflow", "--yes", *arguments)


def record(root, run_id="run-1", *, finish=True):
    run = begin_small(root, run_id)
    fill_journals(run, journals=2)
    run._writer._sealer._waiting.clear()
    if finish:
        run.finish()
    seal_small(writer_folder(run), 1)
    return run


def deliver(root, run_id="run-1", destination="mlflow", identity=None, *, folder=None, **changes):
    """The cursor that a sync leaves which has delivered and proven everything."""
    run = spool.open(root).run(run_id)
    found = cursor.Cursor(
        (folder or root / ".sync") / destination / f"{identity or run_id}.json", destination, identity or run_id, run_id
    )
    found.delivered = {writer.id: dict.fromkeys(format.TABLES, writer.last_seq) for writer in run.writers()}
    found.status = run.status().state
    for name, value in changes.items():
        setattr(found, name, value)
    found.save()
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """run-1 and run-2, finished; run-1 is delivered to mlflow."""
    root = tmp_path_factory.mktemp("gc") / "s"
    for run_id in ("run-1", "run-2"):
        record(root, run_id)
    deliver(root)
    return root


@pytest.fixture
def root(template, tmp_path):
    shutil.copytree(template, tmp_path / "s")
    return tmp_path / "s"


def visible(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".sync")


def writer_of(root, run_id="run-1"):
    (writer,) = layout.writers(root / run_id)
    return writer


def stays(root, reason, *arguments):
    """Nothing goes, and why is said."""
    before = layout.fingerprint(root)
    done = gc(root, *arguments)
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if " run-1  " in line]
    assert line.startswith("stays  ")
    assert reason in line
    assert layout.fingerprint(root) == before


def test_what_is_over_and_delivered_goes_and_the_rest_stays(root):
    done = gc(root)
    assert done.exit_code == 0
    goes, left, total = done.stdout.splitlines()
    assert goes.startswith("goes   run-1  ")
    assert goes.endswith("mlflow: run-1")
    assert left.startswith("stays  run-2  ")
    assert left.endswith("mlflow has not got it")
    assert total.startswith("removed 1 runs, ")
    assert visible(root) == ["run-2"]


def test_cursors_are_kept(root):
    gc(root)
    assert [one.identity for one in cursor.of_run(root / ".sync", "mlflow", "run-1")] == ["run-1"]
    assert [path.name for path in (root / ".sync").rglob("*") if path.is_file()] == ["run-1.json"]


def test_every_destination_named_must_have_it(root):
    stays(root, "wandb has not got it", "--delivered-to", "wandb")
    deliver(root, destination="wandb")
    assert gc(root, "--delivered-to", "WandB").exit_code == 0
    assert visible(root) == ["run-2"]


def test_cursors_may_be_in_another_folder(root, tmp_path):
    (root / ".sync").rename(tmp_path / "state")
    stays(root, "mlflow has not got it")
    assert gc(root, "--state-dir", tmp_path / "state").exit_code == 0
    assert visible(root) == ["run-2"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rejected": {"w": {"metrics": {"seq 3": "bad"}}}}, "mlflow run run-1 has rejected records"),
        ({"status": "unknown"}, "is not proven to hold it as finished"),
        ({"status": ""}, "is not proven to hold it as finished"),
        ({"waiting": 1}, "is not proven to hold it as finished"),
        ({"delivered": {}}, "mlflow run run-1 has 0 of "),
    ],
    ids=["rejected", "unknown", "failed proof", "open spans", "nothing delivered"],
)
def test_a_cursor_that_does_not_prove_everything_keeps_the_run(root, changes, reason):
    deliver(root, **changes)
    stays(root, reason)


@pytest.mark.parametrize("table", list(format.TABLES))
def test_one_record_behind_in_one_table_keeps_the_run(root, table):
    found = deliver(root)
    seqs = found.delivered[writer_of(root).name]
    seqs[table] -= 1
    found.save()
    stays(root, f"mlflow run run-1 has {seqs[table]} of {seqs[table] + 1} records of")


def test_a_second_cursor_that_is_behind_keeps_the_run_until_it_is_removed(root):
    found = deliver(root, identity="an-older-one", status="running")
    stays(root, f"or remove {found.path} if that run is of no interest")
    found.path.unlink()
    gc(root)
    assert visible(root) == ["run-2"]


def test_a_cursor_that_cannot_be_read_proves_nothing_and_is_left_there(root):
    path = root / ".sync" / "mlflow" / "run-1.json"
    path.write_bytes(b"{}")
    stays(root, "mlflow has not got it")
    assert path.read_bytes() == b"{}"


def test_records_of_a_later_attempt_keep_the_run(root):
    later = spool.init(dir=root, run_id="run-1", resume=True)
    stays(root, "is still writing (process")
    later.finish()
    stays(root, f"mlflow run run-1 has 0 of 2 records of {writer_folder(later).name}")


def test_a_run_whose_writer_lives_or_may_live_stays(root, monkeypatch):
    open_run = record(root, "run-3", finish=False)
    deliver(root, "run-3")
    assert "is still writing (process" in gc(root, "--run", "run-3").stdout
    monkeypatch.setattr("spool.liveness._boot_id", lambda: "of another machine")
    done = gc(root, "--run", "run-3")
    assert "no finish record, and the death of" in done.stdout
    assert open_run.path.is_dir()


def test_a_worker_that_lives_on_after_the_leads_finish_keeps_the_run(root):
    run = begin_small(root, "run-3")
    begin_small(root, "run-3", is_lead=False).log({"a": 1.0})
    run.finish()
    deliver(root, "run-3", status="finished")
    assert "is still writing (process" in gc(root, "--run", "run-3").stdout
    assert run.path.is_dir()


def test_a_proven_death_is_as_good_as_a_finish(root):
    script = "import os, sys, spool; spool.init(project='p', dir=sys.argv[1], run_id='r').log({'a': 1.0}); os._exit(1)"
    subprocess.run([sys.executable, "-c", script, str(root)], check=False, stderr=subprocess.DEVNULL)
    deliver(root, "r", status="running")
    assert "not proven to hold it as failed" in gc(root, "--run", "r").stdout
    deliver(root, "r")
    gc(root, "--run", "r")
    assert visible(root) == ["run-1", "run-2"]


def test_damage_keeps_the_run_until_it_is_accepted(root):
    (parquet,) = root.glob("run-1/*/000001/metrics.parquet")
    content = parquet.read_bytes()
    parquet.write_bytes(content[:50] + b"\xff" + content[51:])
    stays(root, "sha256 is not the manifest's")
    run = spool.open(root).run("run-1")
    acceptance.load(root / ".sync", run.path).add(run.damage())
    gc(root)
    assert visible(root) == ["run-2"]


def test_what_is_absent_keeps_the_run(root):
    shutil.rmtree(next(root.glob("run-1/*/000001")))
    stays(root, "incomplete copy: fetch")


def test_a_damaged_run_json_keeps_the_run(root):
    (root / "run-1" / "run.json").write_bytes(b"{}")
    stays(root, "not what `init` writes")


def test_a_run_that_a_sync_holds_stays(root):
    held = claim.take(root / ".sync" / "wandb" / "run-1.claim")
    stays(root, f"process {os.getpid()} on ")
    held.release()
    gc(root)
    assert visible(root) == ["run-2"]


def test_a_sync_that_begins_after_the_look_keeps_the_run(root):
    conditions = removal.Conditions(("mlflow",), root / ".sync", time.time_ns())
    verdict = removal.judge(spool.open(root).run("run-1"), conditions)
    assert verdict.why == ""
    held = claim.take(root / ".sync" / "mlflow" / "run-1.claim")
    with pytest.raises(RemoveError, match="has begun to deliver it"):
        removal.remove(verdict, conditions)
    held.release()
    deliver(root, status="")
    with pytest.raises(RemoveError, match="is not proven"):
        removal.remove(verdict, conditions)
    assert visible(root) == ["run-1", "run-2"]
    deliver(root)
    removal.remove(verdict, conditions)
    assert visible(root) == ["run-2"]


@pytest.mark.parametrize(("age", "goes"), [("1d", False), ("30s", True), ("0.5m", True), ("1w", False)])
def test_only_runs_that_ended_long_enough_ago(root, monkeypatch, age, goes):
    later_ns = time.time_ns() + 60_000_000_000
    monkeypatch.setattr("time.time_ns", lambda: later_ns)
    if not goes:
        stays(root, "it ended too recently", "--older-than", age)
    else:
        gc(root, "--older-than", age)
        assert visible(root) == ["run-2"]


# --- asking


def test_without_a_terminal_and_without_yes_nothing_happens(root):
    before = layout.fingerprint(root)
    done = call(root, "--delivered-to", "mlflow")
    assert done.exit_code == 1
    assert (
        done.stderr == "Error: nothing is removed, since there is no terminal to ask on; --yes removes without asking\n"
    )
    assert layout.fingerprint(root) == before


@pytest.mark.parametrize(
    ("answer", "left"), [(b"n\n", ["run-1", "run-2"]), (b"\n", ["run-1", "run-2"]), (b"y\n", ["run-2"])]
)
def test_on_a_terminal_it_asks_and_no_is_the_answer_by_default(root, answer, left):
    parent, child = pty.openpty()
    asked = subprocess.Popen(
        [sys.executable, "-m", "spool.cli", "gc", str(root), "--delivered-to", "mlflow"],
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(child)
    os.write(parent, answer)
    _, err = asked.communicate(timeout=60)
    os.close(parent)
    assert b"Remove 1 runs, " in err
    assert visible(root) == left
    assert asked.returncode == (0 if left == ["run-2"] else 1)


def test_a_dry_run_changes_nothing_and_says_what_would_go(root):
    before = layout.fingerprint(root)
    done = call(root, "--delivered-to", "mlflow", "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith("would remove 1 runs, ")
    assert layout.fingerprint(root) == before


def test_json_says_what_went_and_why_the_rest_stays(root):
    size = layout.size_bytes(root / "run-1")
    found = json.loads(gc(root, "--json").stdout)
    assert found["leftovers"] == []
    first, second = found["runs"]
    assert first == {
        "run": "run-1",
        "size_bytes": size,
        "delivered_to": {"mlflow": ["run-1"]},
        "why": None,
        "removed": True,
    }
    assert (second["run"], second["removed"], second["why"]) == ("run-2", False, "mlflow has not got it")


def test_mistakes(root, tmp_path):
    assert call(root).exit_code == 2
    assert call(root, "--delivered-to", "../up").exit_code == 2
    assert gc(root, "--older-than", "soon").exit_code == 2
    assert (
        gc(tmp_path / "nowhere").stderr
        == f"Error: {tmp_path}/nowhere: no such folder; name a spool, or set SPOOL_DIR\n"
    )
    assert gc(root, "--run", "nosuch").exit_code == 1
    assert visible(root) == ["run-1", "run-2"]


# --- links and names


@pytest.mark.parametrize("inside", ["link", "files/link"])
def test_a_symbolic_link_is_never_followed_and_keeps_the_run(root, tmp_path, inside):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (root / "run-1" / "files").mkdir(exist_ok=True)
    (root / "run-1" / inside).symlink_to(tmp_path / "precious")
    stays(root, "is a symbolic link")
    assert (tmp_path / "precious" / "file").exists()


def test_a_run_that_is_a_link_stays_as_does_what_it_leads_to(root, tmp_path):
    (root / "run-1").rename(tmp_path / "elsewhere")
    (root / "run-1").symlink_to(tmp_path / "elsewhere")
    stays(root, "is a symbolic link")
    trash = root / f".trash-run-1-{'0' * 16}"
    trash.symlink_to(tmp_path / "elsewhere")
    gc(root)
    assert (tmp_path / "elsewhere" / "run.json").exists()


@pytest.mark.parametrize("name", ["[a-z]*", "-rf", "a b;$(x)", "键", "x\ny\x1b[2J"])
def test_hostile_names_of_runs_are_only_names(root, name):
    (root / "run-1").rename(root / name)
    (path,) = (root / name).glob("*/000002.jsonl")
    path.parent.with_name("w").mkdir()
    path.parent.with_name("w").rmdir()
    deliver(root, name, identity="hostile")
    info = layout.run_info(root / name)
    done = gc(root)
    assert info["run"] == "run-1"
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert sorted({*visible(root), "run-2"}) == visible(root)


# --- kills


def check_killed(root, template):
    """A killed gc leaves the run whole, or trash that the next one removes; never a part of a run that anybody would read."""
    if (root / "run-1").exists():
        run = spool.open(root).run("run-1")
        assert run.damage() == []
        assert whole_rows(run) == whole_rows(spool.open(template).run("run-1"))
    assert [name for name in visible(root) if not name.startswith(".trash-run-1-")][-1:] == ["run-2"]
    had_trash = any(name.startswith(".trash-") for name in visible(root))
    done = gc(root)
    assert done.exit_code == 0
    assert ("removed, left by a gc that was interrupted" in done.stderr) == had_trash
    assert visible(root) == ["run-2"]
    assert spool.open(root).run("run-2").damage() == []


def kill_and_check(template, tmp_path, **steps):
    words = ("gc", tmp_path / "s{}", "--delivered-to", "mlflow", "--yes")
    killed = kill_at_steps(*words, template=template, **steps)
    for step in killed:
        check_killed(tmp_path / f"s{step}", template)
    return len(killed)


def test_killed_before_a_durable_step_the_next_gc_finishes_it(template, tmp_path):
    assert kill_and_check(template, tmp_path, first=2, each=4) > 5


@pytest.mark.slow
def test_killed_before_any_durable_step_the_next_gc_finishes_it(template, tmp_path):
    assert kill_and_check(template, tmp_path) > 20


def test_what_is_left_is_removed_although_it_was_the_last_run(root):
    shutil.rmtree(root / "run-2")
    (root / "run-1").rename(root / f".trash-run-1-{layout.fingerprint(root / 'run-1')}")
    done = call(root, "--delivered-to", "mlflow", "--dry-run")
    assert "would be removed, left by a gc that was interrupted" in done.stderr
    assert len(visible(root)) == 1
    assert gc(root).exit_code == 0
    assert visible(root) == []


def test_run_json_goes_first_and_for_good_before_anything_else_does(root, monkeypatch):
    steps = []
    for name in ("unlink", "sync_folder"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda path, name=name, real=real: (steps.append((name, path)), real(path)))
    gc(root)
    in_trash = [(name, path) for name, path in steps if ".trash-run-1-" in str(path)]
    assert [(name, path.name) for name, path in in_trash[:1]] == [("unlink", "run.json")]
    assert in_trash[1] == ("sync_folder", in_trash[0][1].parent)


def test_trash_that_is_not_what_was_proven_is_put_back(root):
    trash = root / f".trash-run-1-{layout.fingerprint(root / 'run-1')}"
    (root / "run-1").rename(trash)
    (trash / "late").write_text("x")
    done = gc(root, "--run", "run-2")
    assert done.exit_code == 1
    assert "something was written into it while it was removed" in done.stderr
    assert (root / "run-1" / "late").exists()


# --- races


def resumed_before_the_rename(monkeypatch, root):
    """Another process resumes the run after gc's last look at it, in the moment before the rename."""
    runs = []
    real = files.rename_new

    def rename_new(source, target):
        if source == root / "run-1" and not runs:
            runs.append(spool.init(dir=root, run_id="run-1", resume=True))
            runs[0].log({"late": 1.0}, step=77)
        real(source, target)

    monkeypatch.setattr(files, "rename_new", rename_new)
    return runs


def test_a_run_resumed_in_the_last_moment_is_put_back_and_goes_on(root, monkeypatch):
    runs = resumed_before_the_rename(monkeypatch, root)
    done = gc(root, "--run", "run-1")
    assert done.exit_code == 1
    assert "run-1: stays, something was written into it while it was removed" in done.stderr
    assert visible(root) == ["run-1", "run-2"]
    (run,) = runs
    run.log({"late": 2.0}, step=78)
    run._writer._rotate()
    run.log({"late": 3.0}, step=79)
    assert [record["step"] for record in WriterReader(writer_folder(run)).parts[-1].records()] == [79]
    run.finish()
    found = spool.open(root).run("run-1")
    assert found.damage() == []
    late = [row["value"] for row in found.metrics().to_pylist() if row["key"] == "late"]
    assert late == [1.0, 2.0, 3.0]


def test_a_run_begun_anew_under_the_name_is_not_mixed_with_what_is_put_back(root, monkeypatch):
    resumed_before_the_rename(monkeypatch, root)
    real = files.sync_folder

    def sync_folder(path):
        real(path)
        if path == root and not (root / "run-1").exists():
            (root / "run-1").mkdir()
            (root / "run-1" / "run.json").write_text("{}")

    monkeypatch.setattr(files, "sync_folder", sync_folder)
    done = gc(root, "--run", "run-1")
    assert done.exit_code == 1
    assert "a new run has its name; nothing of it is removed" in done.stderr
    (trash,) = root.glob(".trash-run-1-*")
    assert (trash / "run.json").exists()
    assert len(layout.writers(trash)) == 2


def removed_once_seen(monkeypatch, run):
    """`spool gc` takes the run away after an init has looked at it, and before that has made its writer."""
    real = Writer.__init__

    def begin(self, *arguments, **options):
        monkeypatch.setattr(Writer, "__init__", real)
        shutil.rmtree(run)
        real(self, *arguments, **options)

    monkeypatch.setattr(Writer, "__init__", begin)


def test_a_run_removed_while_it_is_resumed_does_not_come_back_without_its_run_json(root, monkeypatch):
    removed_once_seen(monkeypatch, root / "run-1")
    run = spool.init(dir=root, run_id="run-1", resume=True, project="p")
    run.log({"a": 1.0}, step=1)
    run.finish()
    found = spool.open(root).run("run-1")
    assert found.damage() == []
    assert [one.number for one in found.attempts()] == [1]
    assert found.metrics()["value"].to_pylist() == [1.0]


def test_a_run_removed_while_it_must_be_resumed_is_unknown(root, monkeypatch):
    removed_once_seen(monkeypatch, root / "run-1")
    with pytest.raises(spool.UnknownRunError, match="no run run-1 to resume"):
        spool.init(dir=root, run_id="run-1", resume="must")
    assert not (root / "run-1").exists()


# --- disks


def test_a_read_only_disk_is_one_sentence_and_nothing_is_lost(root, tmp_path):
    mount = ["mount", "--bind", str(root), str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        assert call(root, "--delivered-to", "mlflow", "--dry-run").exit_code == 0
        done = gc(root)
        assert done.exit_code == 1
        assert "Read-only file system" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
    assert spool.open(root).run("run-1").damage() == []
    assert tmp_path.exists()


@pytest.mark.parametrize("step", ["rename_new", "sync_folder", "unlink", "remove_empty_folder"])
def test_a_disk_that_fails_in_the_middle_is_said_and_the_next_gc_finishes_it(root, monkeypatch, step):
    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(files, step, fails)
        done = gc(root)
    assert done.exit_code == 1
    assert "Input/output error" in done.stderr
    for left in (root / ".sync" / "mlflow").glob("*.claim"):
        left.unlink()  # worth nothing once the process that took it has ended, which this one has not
    assert gc(root).exit_code == 0
    assert visible(root) == ["run-2"]
