"""One sync at a time for a run and a destination: who holds a claim, and when it is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

from spool import claim, format, liveness


def test_a_claim_held_by_a_living_process_names_it_and_is_free_after_release(tmp_path: Path) -> None:
    path = tmp_path / "state" / "run.claim"
    held = claim.take(path)
    assert isinstance(held, claim.Claim)
    assert claim.take(path) == f"process {os.getpid()} on {liveness.identity()['host']}"
    held.release()
    assert isinstance(claim.take(path), claim.Claim)


def test_the_claim_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run.claim"
    script = (
        "import os, sys; from pathlib import Path; from spool import claim; claim.take(Path(sys.argv[1])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert path.is_file()
    assert isinstance(claim.take(path), claim.Claim)


def test_a_claim_from_another_machine_is_lost_by_silence_only(tmp_path: Path) -> None:
    path = tmp_path / "run.claim"
    path.write_bytes(format.dump_json({**liveness.identity(), "boot": "elsewhere", "host": "node2", "pid": 7}))
    assert claim.take(path) == "process 7 on node2"
    old = path.stat().st_mtime - claim.STALE_AFTER_S - 1
    os.utime(path, (old, old))
    assert isinstance(claim.take(path), claim.Claim)


def test_a_damaged_claim_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "run.claim"
    path.write_text(json.dumps(["half a"])[:-3])
    assert isinstance(claim.take(path), claim.Claim)


def test_a_touch_keeps_a_claim_from_going_silent(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claim, "TOUCH_EACH_S", 0.0)
    path = tmp_path / "run.claim"
    held = claim.take(path)
    assert isinstance(held, claim.Claim)
    os.utime(path, (1, 1))
    held.touch()
    assert path.stat().st_mtime > 1


def test_a_claim_whose_folder_was_cleared_ends_quietly(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claim, "TOUCH_EACH_S", 0.0)
    path = tmp_path / "run.claim"
    held = claim.take(path)
    assert isinstance(held, claim.Claim)
    path.unlink()
    held.touch()
    held.release()


def test_a_claim_taken_over_is_not_released_by_the_one_that_lost_it(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.claim"
    lost = claim.take(path)
    assert isinstance(lost, claim.Claim)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(liveness, "is_alive", lambda _header: False)
        assert isinstance(claim.take(path), claim.Claim)
    lost.release()
    assert isinstance(claim.take(path), str)
