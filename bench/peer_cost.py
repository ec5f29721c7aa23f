"""What a call with 50 metrics costs the training thread, and what is left after SIGKILL: the spool beside its peers.

    python bench/peer_cost.py [--rounds N] [--calls N] [--python .venv-bench/bin/python]

Each tracker runs the same loop (bench/peers/loop.py) in a process, HOME and folder of its own, without network settings,
with telemetry and error reporting off. Rounds are interleaved: every tracker once, then again; the figures are medians of
the rounds. SIGKILL hits the trainer's process alone (a tracker's own helper may still flush, and gets time to) in the
middle of the tight loop, and, in a second part, after 20 calls at 10 a second. "kept" counts whole calls, read back with
the tracker's own reader.
"""

import mmap
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from measure import median, parser, percentile, require, table, workplace

ROOT = Path(__file__).resolve().parent.parent
LOOP = ROOT / "bench" / "peers" / "loop.py"
SLOW = ("mlflow",)
"""Take a tenth of the calls: 40 ms each."""
NAMES = {
    "spool": "spool",
    "wandb": "wandb offline",
    "swanlab": "SwanLab offline",
    "mlflow": "MLflow sqlite",
    "mlflow_async": "MLflow sqlite, async",
    "trackio": "trackio",
    "tensorboard": "TensorBoard",
}
QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_DISABLE_GIT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "SWANLAB_PROBE_HARDWARE": "0",
    "SWANLAB_PROBE_MONITOR": "0",
    "GIT_PYTHON_REFRESH": "quiet",
}


class Outcome(NamedTuple):
    times_us: list[float]
    returned: int
    kept: int


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--calls", type=int, default=2000)
    arguments.add_argument("--paced-calls", type=int, default=20)
    arguments.add_argument("--python", type=Path, default=ROOT / ".venv-bench" / "bin" / "python")
    arguments.add_argument("--only", nargs="*", default=list(NAMES), choices=list(NAMES))
    chosen = arguments.parse_args()
    if not chosen.python.exists():
        sys.exit(f"{chosen.python}: not there; `make bench-peers` installs the trackers, and runs this")
    with workplace(chosen.folder) as folder:
        tight: dict[str, list[Outcome]] = {name: [] for name in chosen.only}
        paced: dict[str, list[Outcome]] = {name: [] for name in chosen.only}
        for number in range(chosen.rounds):
            for name in chosen.only:
                calls = max(10, chosen.calls // 10) if name in SLOW else chosen.calls
                tight[name].append(run(chosen.python, name, folder / f"{name}-{number}-tight", calls, 0.0))
            for name in chosen.only:
                paced[name].append(run(chosen.python, name, folder / f"{name}-{number}-paced", chosen.paced_calls, 0.1))
        show(tight, paced)


def run(python: Path, name: str, folder: Path, calls: int, pause_s: float) -> Outcome:
    """Log until `calls` have returned, kill in the middle of what follows, read back."""
    home = folder / "home"
    home.mkdir(parents=True)
    times = folder / "times"
    room = calls + 200_000
    with times.open("wb") as file:
        file.truncate(8 * (room + 1))
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment |= QUIET | {"HOME": str(home), "TRACKIO_DIR": str(folder / "trackio")}

    def command(*words: object) -> list[str]:
        return [str(python), str(LOOP), *map(str, words)]

    with times.open("r+b") as file, (folder / "output").open("wb") as output:
        slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        child = subprocess.Popen(
            command("log", name, times, room, pause_s), cwd=folder, env=environment, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 300
        while slots[0] < calls and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        child.kill()
        child.wait()
        returned = slots[0]
        require(returned >= calls, f"{name}: {returned} of {calls} calls; see {folder / 'output'}:\n{tail(folder)}")
        times_us = [slots[1 + at] / 1000 for at in range(calls)]
    wait_until_quiet(folder)
    read = subprocess.run(
        command("read", name), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    words = read.stdout.split()
    if read.returncode:
        print(f"{name}: its reader failed: {read.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return Outcome(times_us, returned, int(words[-1]) if words and not read.returncode else 0)


def tail(folder: Path) -> str:
    return "\n".join((folder / "output").read_text(errors="replace").splitlines()[-20:])


def wait_until_quiet(folder: Path, still_s: float = 1.0) -> None:
    """A tracker's helper may go on writing after the trainer's death; wait until nothing changes any more."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < still_s:
        now = 0
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                now += path.stat().st_size
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


def show(tight: dict[str, list[Outcome]], paced: dict[str, list[Outcome]]) -> None:
    rounds = len(next(iter(tight.values())))
    medians = {name: median(median(one.times_us) for one in found) for name, found in tight.items()}
    ours = medians.get("spool", 0.0)
    rows = []
    for name, found in tight.items():
        p99 = median(percentile(one.times_us, 0.99) for one in found)
        rows.append([
            NAMES[name], f"{medians[name]:.1f}", f"{p99:.0f}", f"{medians[name] / ours:.1f}" if ours else "",
            kept(found), kept(paced[name]),
        ])  # fmt: skip
    print(
        f"{len(next(iter(tight.values()))[0].times_us)} calls of 50 metrics, medians of {rounds} interleaved rounds\n"
    )
    table(
        [
            "tracker",
            "median µs",
            "p99 µs",
            "x spool",
            "kept / returned, killed in a tight loop",
            "killed at 10 calls/s",
        ],
        rows,
    )
    peers = {name: value for name, value in medians.items() if name != "spool"}
    if peers and ours:
        cheapest = min(peers, key=lambda name: peers[name])
        print(f"cheapest peer: {NAMES[cheapest]}, {peers[cheapest] / ours:.1f} times the spool\n")


def kept(found: list[Outcome]) -> str:
    kept_calls, returned = sum(one.kept for one in found), sum(one.returned for one in found)
    return f"{kept_calls} / {returned}"


if __name__ == "__main__":
    main()
