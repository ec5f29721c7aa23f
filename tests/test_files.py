"""Publishing: whole or not at all, never in place of something else, and a kill leaves only dot names."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from spool import files


def fill(folder):
    (folder / "a.parquet.part").write_bytes(b"a")
    (folder / "b.json.part").write_bytes(b"b")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_published_file_appears_whole_with_private_rights(tmp_path):
    files.publish_file(tmp_path / "run.json", b"content")
    assert (tmp_path / "run.json").read_bytes() == b"content"
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["run.json"]


def test_publish_never_replaces_a_file(tmp_path):
    (tmp_path / "run.json").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        files.publish_file(tmp_path / "run.json", b"new")
    assert (tmp_path / "run.json").read_bytes() == b"old"
    assert names(tmp_path) == ["run.json"]


def test_publish_never_replaces_where_the_kernel_has_no_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_args, **_kwargs: None)
    files.publish_file(tmp_path / "run.json", b"old")
    with pytest.raises(FileExistsError):
        files.publish_file(tmp_path / "run.json", b"new")
    assert (tmp_path / "run.json").read_bytes() == b"old"


def test_publish_never_replaces_a_folder(tmp_path):
    files.publish_folder(tmp_path / "000001", fill)
    assert names(tmp_path / "000001") == ["a.parquet", "b.json"]
    with pytest.raises(FileExistsError):
        files.publish_folder(tmp_path / "000001", fill)
    assert names(tmp_path) == ["000001"]
    assert (tmp_path / "000001").stat().st_mode & 0o777 == 0o700


def test_replace_shows_the_old_or_the_new(tmp_path):
    for content in (b"1", b"2"):
        files.replace_file(tmp_path / "cursor", content)
        assert (tmp_path / "cursor").read_bytes() == content
    assert names(tmp_path) == ["cursor"]


def test_a_publish_that_fails_leaves_nothing(tmp_path):
    def fails(folder):
        fill(folder)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        files.publish_folder(tmp_path / "000001", fails)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["sync_folder", "sync", "rename_new"])
@pytest.mark.parametrize("what", ["publish_file(target, b'x')", "publish_folder(target, fill)"])
def test_a_publish_that_is_killed_leaves_dot_names_or_the_whole(tmp_path, step, what):
    step = {"sync": "sync_file" if "folder" in what else "sync_data"}.get(step, step)
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from spool import files
        real = files.{step}
        def dies(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        files.{step} = dies
        def fill(folder):
            (folder / "a.parquet.part").write_bytes(b"a")
        target = Path(sys.argv[1]) / "target"
        files.{what}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 1
    assert left[0].startswith(".target.") or step == "sync_folder"
    files.remove_unfinished(tmp_path / "target")
    assert names(tmp_path) in ([], ["target"])


def test_removing_what_is_unfinished_makes_a_publish_at_work_fail_whole(tmp_path):
    def interrupted(folder):
        fill(folder)
        files.remove_unfinished(tmp_path / "000001")

    with pytest.raises(FileNotFoundError):
        files.publish_folder(tmp_path / "000001", interrupted)
    assert names(tmp_path) == []


def test_content_is_kept_once_under_its_hash(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"a: 1\n")
    first = files.publish_content(tmp_path / "config.yaml", tmp_path / "files")
    assert files.publish_content(tmp_path / "config.yaml", tmp_path / "files") == first
    assert names(tmp_path / "files") == [first[0]]
    assert files.sha256_file(tmp_path / "files" / first[0]) == first[0]
    assert first[1] == 5


def test_an_append_file_must_be_new(tmp_path):
    os.close(files.create_append(tmp_path / "000001.jsonl"))
    with pytest.raises(FileExistsError):
        files.create_append(tmp_path / "000001.jsonl")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"file"):
        files.make_folder(tmp_path / "file" / "below")


def test_a_group_may_read_where_spool_group_names_it(tmp_path, monkeypatch):
    import grp

    monkeypatch.setenv("SPOOL_GROUP", grp.getgrgid(os.getgid()).gr_name)
    files.make_folder(tmp_path / "spool")
    files.publish_file(tmp_path / "spool" / "run.json", b"")
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "spool" / "run.json").stat().st_mode & 0o777 == 0o640
