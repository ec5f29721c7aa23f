"""Metrics sealed a second by the child at nice 10, what that costs in memory, and in the trainer's.

    python bench/seal_speed.py [--rounds N]

The best round is what the machine does when its other users leave it alone. One full journal (16 MiB, 50 metrics a record) is sealed again and again: in the child, whose time holds the start of an
interpreter and the import of pyarrow, and in a warm process, which has both behind it. The trainer's growth is measured in
a process of its own, which logs three journals full while its sealer works, beside the same process before that.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

from measure import full_journal, median, parser, require, table, unseal, workplace

from spool import seal
from spool.writer import SEAL_BYTES

TRAINER = """
import sys, time
from pathlib import Path
import spool
from spool.writer import SEAL_BYTES
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
run = spool.init(project="bench", experiment="rss", dir=sys.argv[1])
data = {f"actor/metric_{place:02d}": place / 7 for place in range(50)}
for step in range(1000): run.log(data, step=step)
before = peak = rss()
folder, full = run.path, int(sys.argv[2])
deadline = time.monotonic() + 60
while len(list(folder.glob("*/[0-9]*/manifest.json"))) < full and time.monotonic() < deadline:
    for _ in range(200): step += 1; run.log(data, step=step)
    peak = max(peak, rss())
    time.sleep(0.01)
print(before, peak, len(list(folder.glob("*/[0-9]*/manifest.json"))), "pyarrow" in sys.modules)
run.finish()
"""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--journal-bytes", type=int, default=SEAL_BYTES)
    arguments.add_argument("--segments", type=int, default=3, help="that the trainer's sealer makes")
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        full, metrics = full_journal(folder / "other", chosen.journal_bytes)
        child_s, child_cpu_s, warm_s = [], [], []
        for _ in range(chosen.rounds):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            begin = time.perf_counter()
            child = seal.start(full)
            require(child.wait() == 0, "the sealing child failed")
            child_s.append(time.perf_counter() - begin)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            child_cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            unseal(full)
            begin = time.perf_counter()
            seal.seal(full)
            warm_s.append(time.perf_counter() - begin)
            unseal(full)
        child_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"{full.stat().st_size / 2**20:.1f} MiB, {metrics:,} metrics, medians of {chosen.rounds}\n")
        table(
            ["sealing", "s", "CPU s", "metrics/s", "metrics/s, best round", "metrics a CPU second", "peak RSS MB"],
            [
                ["child, nice 10", *figures(child_s, metrics, child_cpu_s), f"{child_mb:.0f}"],
                ["warm process", *figures(warm_s, metrics, []), ""],
            ],
        )
        trainer(folder / "trainer", chosen.segments)


def figures(times_s: list[float], metrics: int, cpu_s: list[float]) -> list[str]:
    cpu, by_cpu = (f"{median(cpu_s):.2f}", f"{metrics / median(cpu_s):,.0f}") if cpu_s else ("", "")
    return [
        f"{median(times_s):.2f}",
        cpu,
        f"{metrics / median(times_s):,.0f}",
        f"{metrics / min(times_s):,.0f}",
        by_cpu,
    ]


def trainer(folder: Path, segments: int) -> None:
    command = [sys.executable, "-c", TRAINER, str(folder), str(segments)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    before, peak, sealed = map(int, words[:3])
    require(
        sealed >= segments and words[3] == "False", f"the trainer sealed {sealed} of {segments}, pyarrow: {words[3]}"
    )
    grown_mb = (peak - before) / 1e6
    table(
        ["trainer that logs while its sealer works", "RSS MB"],
        [
            ["after 1,000 calls", f"{before / 1e6:.1f}"],
            [f"largest until {sealed} segments are there", f"+{grown_mb:.1f}"],
        ],
    )


if __name__ == "__main__":
    main()
