"""Every bench runs at its smallest size, so that none rots; what it measures is nobody's promise here."""

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {
    "disk_bytes": ["--steps", "5", "--random-records", "5"],
    "full_disk": ["--rounds", "1"],
    "log_cost": ["--calls", "40", "--journal-bytes", "100000"],
    "log_while_sealing": ["--rounds", "1", "--journal-bytes", "100000"],
    "ls_speed": ["--runs", "2", "--rounds", "1"],
    "many_processes": ["--processes", "2", "--records", "10", "--rounds", "1"],
    "replay": ["--rounds", "1", "--metrics", "1000", "--direct-metrics", "1000", "--traces", "10"],
    "seal_speed": ["--rounds", "1", "--journal-bytes", "100000", "--segments", "0"],
    "start_cost": ["--rounds", "1"],
    "tail_latency": ["--records", "2", "--runs", "3", "--idle-s", "0.1"],
    "torch_step": ["--rounds", "1", "--seals", "1", "--width", "8", "--journal-bytes", "100000"],
    "verify_speed": ["--bytes", "300000", "--journal-bytes", "100000", "--rounds", "1"],
    "verl_day": ["--steps", "1", "--trace-bytes", "100000"],
}
PEERS = ["--rounds", "1", "--calls", "10", "--paced-calls", "2"]


def tables_of(root: Path, folder: Path, name: str, *arguments: str) -> str:
    """Its standard output, which must hold a table with figures."""
    command = [sys.executable, str(root / "bench" / f"{name}.py"), "--folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 3, done.stdout
    assert any(character.isdigit() for character in rows[-1]), done.stdout
    return done.stdout


def test_every_bench_has_a_smallest_size(root: Path) -> None:
    runnable = {path.stem for path in (root / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert runnable == {*SMALL, "peer_cost"}


def test_make_bench_runs_every_bench(root: Path) -> None:
    shown = subprocess.run(["make", "-n", "bench", "bench-peers"], capture_output=True, text=True, check=True, cwd=root)
    words = shown.stdout.replace(";", " ").split()
    assert [name for name in SMALL if name not in words] == []
    assert "bench/peer_cost.py" in words


SLOW = {"torch_step"}  # importing torch, and sealing with no core free


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in sorted(SMALL)])
def test_a_bench_runs(root: Path, tmp_path: Path, name: str) -> None:
    tables_of(root, tmp_path, name, *SMALL[name])


@pytest.mark.slow
def test_the_peers_bench_keeps_every_call_of_the_spool(root: Path, tmp_path: Path) -> None:
    python = root / ".venv-bench" / "bin" / "python"
    if not (root / ".venv-bench" / "ready").exists():
        pytest.skip("the other trackers are not installed; `make bench-peers` installs them")
    shown = tables_of(root, tmp_path, "peer_cost", "--python", str(python), *PEERS)
    [row] = [line for line in shown.splitlines() if line.startswith("| spool ")]
    for cell in row.strip("| ").split(" | ")[-2:]:
        kept, returned = cell.split(" / ")
        assert kept == returned != "0"
