"""`spool ls` of 2,000 runs.

    python bench/ls_speed.py [--runs N] [--rounds N]

One real finished run is copied, sealed and with its journal as a trainer leaves it, under as many ids; the time holds the
start of the process, the page cache is warm.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from measure import FLOATS, median, parser, require, table, workplace

import spool


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=2000)
    arguments.add_argument("--rounds", type=int, default=7)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        run = spool.init(project="bench", experiment="ls", dir=folder / "spool")
        for step in range(100):
            run.log(FLOATS, step=step)
        run.finish()
        for number in range(1, chosen.runs):
            shutil.copytree(run.path, run.path.with_name(f"{run.id[:-6]}{number:06x}"))
        times = [listing(folder / "spool", chosen.runs) for _ in range(chosen.rounds)]
    table(["spool ls", f"s, median of {chosen.rounds}"], [[f"{chosen.runs:,} finished runs", f"{median(times):.2f}"]])


def listing(folder: Path, runs: int) -> float:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "spool.cli", "ls", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - begin
    require(done.returncode == 0, f"spool ls failed: {done.stderr}")
    lines = done.stdout.splitlines()
    require(len(lines) >= runs and sum("finished" in line for line in lines) == runs, f"{len(lines)} lines")
    return took_s


if __name__ == "__main__":
    main()
