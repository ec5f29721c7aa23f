"""`spool compact`: the same rows in fewer files, the chain kept as evidence, damage copied as it is, and no half of a run ever."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from dying import kill_at_steps
from journals import begin, begin_small, fill_journals, seal_small, whole_rows, writer_folder

import spool
from spool import compact, files, format, layout
from spool.cli import main
from spool.follow import Follower
from spool.reader import WriterReader


def call(*arguments):
    return CliRunner().invoke(main, ["compact", *map(str, arguments)])


def fill(root, run_id, *, journals=4):
    """A run of several journals: the first ones sealed and removed, then one sealed and kept, the last only a journal."""
    run = begin_small(root, run_id)
    fill_journals(run, journals=journals)
    run.log({"nan": float("nan"), "minus": -0.0, "big": 2**70, "tiny": 5e-324})
    (root.parent / "config.yaml").write_text("lr: 1")
    run.save(root.parent / "config.yaml")
    folder = writer_folder(run)
    run._writer._sealer._waiting.clear()  # sealed below, in this process
    run.finish()
    shutil.rmtree(folder / format.segment_name(journals))
    for number in range(1, journals):
        seal_small(folder, number, keep_journal=number == journals - 1)
    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Read by all tests of this module, written by none."""
    root = tmp_path_factory.mktemp("compact") / "s"
    fill(root, "run-1")
    fill(root, "run-2", journals=3)
    return root


@pytest.fixture(autouse=True)
def _source_stays(source):
    before = layout.fingerprint(source)
    yield
    assert layout.fingerprint(source) == before


def runs(root):
    return {run.id: run for run in spool.open(root).runs()}


def rows(root):
    return {name: whole_rows(run) for name, run in runs(root).items()}


def writer_of(root, run_id="run-1"):
    (writer,) = layout.writers(root / run_id)
    return writer


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_rows_are_equal_and_each_writer_has_one_segment(source, tmp_path):
    done = call(source, tmp_path / "t")
    assert done.exit_code == 0
    assert rows(tmp_path / "t") == rows(source)
    assert all(run.damage() == [] for run in runs(tmp_path / "t").values())
    assert [path.name for path in sorted(writer_of(tmp_path / "t").iterdir())] == ["000001"]
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "t")]).exit_code == 0


def test_run_json_and_saved_files_are_the_same_bytes(source, tmp_path):
    call(source, tmp_path / "t")
    copied = [name for name in names(source) if name.endswith("run.json") or "/files/" in name]
    assert len(copied) == 4
    for name in copied:
        assert (tmp_path / "t" / name).read_bytes() == (source / name).read_bytes()
        assert (tmp_path / "t" / name).stat().st_mode & 0o777 == 0o600


def test_the_manifest_keeps_the_chain_as_evidence(source, tmp_path):
    call(source, tmp_path / "t")
    found = layout.manifest(writer_of(tmp_path / "t") / "000001")
    before = WriterReader(writer_of(source))
    sealed = [part.manifest for part in before.parts[:3]]
    last = before.parts[3]
    assert found["merged"] == [
        *({name: one[name] for name in ("number", "first_seq", "last_seq", "journal")} for one in sealed),
        {
            "number": 4,
            "first_seq": last.header["first_seq"],
            "last_seq": last.last_seq,
            "journal": {"length": last.valid_length, "sha256": last.sha256},
        },
    ]
    assert last.sha256 == files.sha256_file(last.path)
    assert (found["number"], found["first_seq"], found["last_seq"]) == (1, 1, last.last_seq)
    assert found["header"] == sealed[0]["header"]
    assert found["journal"] == found["merged"][-1]["journal"]
    assert found["end"]["status"] == "finished"
    assert found["last_ts"] == found["end"]["ts"]


def test_the_run_stands_as_before(source, tmp_path):
    call(source, tmp_path / "t")
    for name, run in runs(source).items():
        there = runs(tmp_path / "t")[name]
        assert (there.status(), there.attempts(), there.info) == (run.status(), run.attempts(), run.info)
        assert layout.last(writer_of(tmp_path / "t", name)) == layout.last(writer_of(source, name))


def test_every_seq_is_where_a_cursor_expects_it(source, tmp_path):
    call(source, tmp_path / "t")
    before, after = WriterReader(writer_of(source)), WriterReader(writer_of(tmp_path / "t"))
    for seq in range(before.last_seq + 1):
        assert [one["seq"] for one in Follower(after.path, seq).read()] == list(range(seq + 1, before.last_seq + 1))
        for table in format.TABLES:
            expected = [at for batch in before.batches(table, seq) for at in batch["seq"].to_pylist()]
            assert [at for batch in after.batches(table, seq) for at in batch["seq"].to_pylist()] == expected


def test_segments_are_merged_up_to_a_size(source, tmp_path, monkeypatch):
    parts = WriterReader(writer_of(source)).parts
    sizes = [compact._size_bytes(part) for part in parts]
    monkeypatch.setattr(compact, "SEGMENT_SIZE_BYTES", sizes[0] + sizes[1])
    call(source, tmp_path / "t", "--run", "run-1")
    there = WriterReader(writer_of(tmp_path / "t"))
    assert [(part.first_number, part.last_number) for part in there.parts] == [(1, 2), (3, 4)]
    assert there.damage() == []
    assert whole_rows(runs(tmp_path / "t")["run-1"]) == whole_rows(runs(source)["run-1"])
    shutil.rmtree(there.path / "000001")
    (damage,) = WriterReader(there.path).damage()
    assert (damage.first_seq, damage.last_seq) == (1, parts[1].last_seq)
    assert damage.fetch == f"run-1/{there.id}/{{000001..000002}}"


def test_many_small_batches_become_few_row_groups(tmp_path):
    run = begin_small(tmp_path / "s", "r")
    for number in range(1, 9):
        run.log({"a": 1.0}, step=number)
        run._writer._rotate()
        seal_small(writer_folder(run), number)
    run._writer._sealer._waiting.clear()
    run.finish()
    call(tmp_path / "s", tmp_path / "t")
    assert pq.ParquetFile(writer_of(tmp_path / "t", "r") / "000001" / "metrics.parquet").num_row_groups == 1


def test_compacting_what_was_compacted_keeps_the_bytes_and_the_evidence(source, tmp_path):
    call(source, tmp_path / "t")
    assert call(tmp_path / "t", tmp_path / "u").exit_code == 0
    assert names(tmp_path / "u") == names(tmp_path / "t")
    for name in names(tmp_path / "t"):
        assert (tmp_path / "u" / name).read_bytes() == (tmp_path / "t" / name).read_bytes()


def test_a_later_attempt_is_merged_with_the_evidence_of_the_first(source, tmp_path):
    call(source, tmp_path / "t", "--run", "run-1")
    later = spool.init(dir=tmp_path / "t", run_id="run-1", resume=True)
    later.log({"a": 1.0})
    later.finish()
    assert call(tmp_path / "t", tmp_path / "u").exit_code == 0
    assert rows(tmp_path / "u") == rows(tmp_path / "t")
    assert len(runs(tmp_path / "u")["run-1"].attempts()) == 2


# --- damage is copied


@pytest.mark.parametrize("name", ["000001/metrics.parquet", "000001/manifest.json", "000003.jsonl", "000004.jsonl"])
def test_a_writer_with_damage_is_copied_as_it_is(source, tmp_path, name):
    root = tmp_path / "s"
    shutil.copytree(source, root)
    path = writer_of(root) / name
    content = path.read_bytes()
    at = len(content) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    if name == "000003.jsonl":
        shutil.rmtree(writer_of(root) / "000003")
    done = call(root, tmp_path / "t")
    assert done.exit_code == 0
    assert f"writer {path.relative_to(root).parts[1]} is copied as it is" in done.stdout
    there = tmp_path / "t" / "run-1"
    assert names(there) == names(root / "run-1")
    assert all((there / one).read_bytes() == (root / "run-1" / one).read_bytes() for one in names(there))
    assert [one.reason for one in runs(tmp_path / "t")["run-1"].damage()] == [
        one.reason for one in runs(root)["run-1"].damage()
    ]
    assert len(names(writer_of(tmp_path / "t", "run-2"))) < len(names(writer_of(root, "run-2")))


def test_a_torn_tail_is_no_damage(source, tmp_path):
    root = tmp_path / "s"
    shutil.copytree(source, root)
    path = writer_of(root) / "000004.jsonl"
    path.write_bytes(path.read_bytes() + b'{"seq":99,"ts"')
    call(root, tmp_path / "t")
    assert rows(tmp_path / "t") == rows(source)
    assert names(tmp_path / "t") != names(root)


def test_what_goes_on_after_its_segment_is_copied_as_it_is(tmp_path):
    run = begin_small(tmp_path / "s", "r")
    run.log({"a": 1.0})
    seal_small(writer_folder(run), 1, keep_journal=True)
    run.log({"a": 2.0})
    run.finish()
    call(tmp_path / "s", tmp_path / "t")
    assert names(tmp_path / "t") == names(tmp_path / "s")
    assert rows(tmp_path / "t") == rows(tmp_path / "s")


def test_what_else_lies_in_a_run_comes_with_it_but_unfinished_work_does_not(source, tmp_path):
    root = tmp_path / "s"
    shutil.copytree(source, root)
    (root / "run-1" / "notes").mkdir()
    (root / "run-1" / "notes" / "today.md").write_text("good")
    (writer_of(root) / "why.txt").write_text("because")
    (writer_of(root) / ".000009.abc").mkdir()
    call(root, tmp_path / "t")
    assert (tmp_path / "t" / "run-1" / "notes" / "today.md").read_text() == "good"
    assert [path.name for path in sorted(writer_of(tmp_path / "t").iterdir())] == ["000001", "why.txt"]


# --- what is refused


def test_a_run_that_is_not_over_is_refused_by_name_and_nothing_is_written(source, tmp_path):
    shutil.copytree(source, tmp_path / "s")
    begin(tmp_path / "x", run_id="open")
    shutil.copytree(tmp_path / "x" / "spool" / "open", tmp_path / "s" / "open")
    done = call(tmp_path / "s", tmp_path / "t")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "open: left out, " in done.stderr
    assert f"is still writing (process {os.getpid()} on this machine)" in done.stderr
    assert "1 of 3 runs are not over, so nothing is written; --over-only leaves them out" in done.stderr
    assert not (tmp_path / "t").exists()
    assert call(tmp_path / "s", tmp_path / "t", "--over-only").exit_code == 0
    assert sorted(runs(tmp_path / "t")) == ["run-1", "run-2"]
    assert call(tmp_path / "s", tmp_path / "u", "--run", "run-*").exit_code == 0


def test_a_proven_death_is_over_and_is_recorded(tmp_path):
    script = "import os, sys, spool; spool.init(project='p', dir=sys.argv[1], run_id='r').log({'a': 1.0}); os._exit(1)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], check=False, stderr=subprocess.DEVNULL)
    assert call(tmp_path / "s", tmp_path / "t").exit_code == 0
    assert layout.last(writer_of(tmp_path / "t", "r")).end == {"status": "died"}
    assert rows(tmp_path / "t") == rows(tmp_path / "s")


@pytest.mark.parametrize("place", ["", "inside", "run-1", "run-1/deep"])
def test_it_never_writes_into_the_spool_it_reads(source, tmp_path, place):
    link = tmp_path / "link"
    link.symlink_to(source)
    for target in (source / place, link / place):
        done = call(source, target)
        assert done.exit_code == 1
        assert done.stderr == f"Error: {target}: a new spool folder is needed, outside {source}\n"


def test_a_folder_that_holds_anything_else_is_refused(source, tmp_path):
    for name in ("x", ".git", "run-9"):
        target = tmp_path / name
        (target / name).mkdir(parents=True)
        done = call(source, target)
        assert (done.exit_code, done.stderr) == (
            1,
            f"Error: {target}: not empty, it holds '{name}'; name a new folder\n",
        )
    (tmp_path / "file").write_text("")
    assert call(source, tmp_path / "file").stderr == f"Error: {tmp_path / 'file'}: a file, not a folder\n"
    (tmp_path / "empty").mkdir()
    assert call(source, tmp_path / "empty").exit_code == 0


def test_another_run_of_that_name_is_never_touched(source, tmp_path):
    fill(tmp_path / "t", "run-1", journals=2)
    before = layout.fingerprint(tmp_path / "t")
    done = call(source, tmp_path / "t")
    assert done.exit_code == 1
    assert "there already, and not a copy of" in done.stderr
    assert layout.fingerprint(tmp_path / "t") == before


def test_twice_is_once(source, tmp_path):
    call(source, tmp_path / "t")
    before = layout.fingerprint(tmp_path / "t")
    done = call(source, tmp_path / "t")
    assert done.exit_code == 0
    assert done.stdout.count("there already and equal") == 2
    assert layout.fingerprint(tmp_path / "t") == before


def test_rows_that_read_otherwise_are_not_published(source, tmp_path, monkeypatch):
    real = compact._row_groups

    def loses_a_row(batches):
        for one in real(batches):
            yield one.slice(0, one.num_rows - 1) if "key" in one.schema.names else one

    monkeypatch.setattr(compact, "_row_groups", loses_a_row)
    done = call(source, tmp_path / "t")
    assert done.exit_code == 1
    assert "its metrics do not read as those of" in done.stderr
    assert list((tmp_path / "t").iterdir()) == []


def test_a_run_that_changes_meanwhile_is_not_published(source, tmp_path, monkeypatch):
    root = tmp_path / "s"
    shutil.copytree(source, root)
    real = compact._check_equal_rows

    def resumed(before, after):
        real(before, after)
        (root / "run-1" / "late").write_text("x")

    monkeypatch.setattr(compact, "_check_equal_rows", resumed)
    done = call(root, tmp_path / "t", "--run", "run-1")
    assert done.exit_code == 1
    assert "changed while it was compacted" in done.stderr
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("name", ["link", "files/link"])
def test_a_symbolic_link_is_not_followed(source, tmp_path, name):
    root = tmp_path / "s"
    shutil.copytree(source, root)
    (tmp_path / "secret").write_text("secret")
    (root / "run-1" / name).symlink_to(tmp_path / "secret")
    done = call(root, tmp_path / "t")
    assert done.exit_code == 1
    assert f"{root / 'run-1' / name}: neither a file nor a folder" in done.stderr
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("name", ["[a-z]*", "a b;$(x)", "-rf", "键", "x\ny"])
def test_hostile_names_of_runs_are_only_names(source, tmp_path, name):
    shutil.copytree(source / "run-1", tmp_path / "s" / name)
    (tmp_path / "t").mkdir()
    done = call(tmp_path / "s", tmp_path / "t")
    assert done.exit_code == 0
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert [path.name for path in (tmp_path / "t").iterdir()] == [name]
    assert call(tmp_path / "s", tmp_path / "t").exit_code == 0


def test_json_says_bytes_before_and_after(source, tmp_path):
    found = json.loads(call(source, tmp_path / "t", "--json").stdout)
    assert found["left_out"] == {}
    assert [one["run"] for one in found["runs"]] == ["run-1", "run-2"]
    for one in found["runs"]:
        for root, size in ((source, one["size_before_bytes"]), (tmp_path / "t", one["size_after_bytes"])):
            folder = root / one["run"]
            assert size == sum((folder / name).stat().st_size for name in names(folder))


# --- killed, and no room


def check_killed(source, target):
    """Whatever a killed compact has left: whole runs under their names, and dot names; and running it again is enough."""
    expected = rows(source)
    if target.exists():
        assert all(path.name in expected or path.name.startswith(".") for path in target.iterdir())
        for name in {path.name for path in target.iterdir()} & set(expected):
            assert whole_rows(runs(target)[name]) == expected[name]
            assert runs(target)[name].damage() == []
    assert call(source, target).exit_code == 0
    assert rows(target) == expected
    assert {path.name for path in target.iterdir()} == set(expected)


@pytest.fixture(scope="module")
def small_source(tmp_path_factory):
    root = tmp_path_factory.mktemp("small") / "s"
    fill(root, "run-1", journals=2)
    fill(root, "run-2", journals=2)
    return root


def test_killed_before_a_durable_step_it_leaves_whole_runs_and_can_be_run_again(small_source, tmp_path):
    steps = kill_at_steps("compact", small_source, tmp_path / "t{}", first=3, each=8)
    assert len(steps) > 6
    for step in steps:
        check_killed(small_source, tmp_path / f"t{step}")


@pytest.mark.slow
def test_killed_before_any_durable_step_it_leaves_whole_runs_and_can_be_run_again(source, tmp_path):
    for step in kill_at_steps("compact", source, tmp_path / "t{}"):
        check_killed(source, tmp_path / f"t{step}")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "spool-tests", str(folder)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a reader may still have a file open


def test_a_full_disk_is_one_sentence_and_leaves_nothing(source, small_disk):
    done = call(source, small_disk / "t")
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert all(path.name in ("run-1", "run-2") for path in (small_disk / "t").iterdir())
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    check_killed(source, small_disk / "t")


def test_a_read_only_spool_is_enough(source, tmp_path):
    shutil.copytree(source, tmp_path / "s")
    try:
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            path.chmod(0o500 if path.is_dir() else 0o400)
        before = layout.fingerprint(tmp_path / "s")
        assert call(tmp_path / "s", tmp_path / "t").exit_code == 0
        assert layout.fingerprint(tmp_path / "s") == before  # root may write, and does not
        assert rows(tmp_path / "t") == rows(source)
    finally:
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            path.chmod(0o700)
