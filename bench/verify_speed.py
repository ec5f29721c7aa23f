"""`spool verify` beside `sha256sum` over the same journals, in the same run.

    python bench/verify_speed.py [--bytes N] [--metrics N] [--rounds N]

A run of unsealed journals of 16 MiB each is verified and hashed in turn, with a warm page cache; both times hold the start
of the process. The speed is bytes of the journals by seconds.
"""

import signal
import subprocess
import sys
import time

from measure import median, parser, require, table, workplace

import spool
import spool.writer

KILLED = """
import os, signal, sys
import spool, spool.writer, spool.seal
spool.seal.Sealer.add = lambda *_: None
run = spool.init(project="bench", experiment="verify", dir=sys.argv[1])
data = {f"actor/metric_{place:02d}": place / 7 for place in range(int(sys.argv[4]))}
size, full, step = int(sys.argv[2]), int(sys.argv[3]), 0
spool.writer.SEAL_BYTES = full
while sum(path.stat().st_size for path in run.path.rglob("*.jsonl")) < size:
    for _ in range(500): step += 1; run.log(data, step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A writer that is killed leaves journals; its sealer is out of the way, so that all of them are left."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--bytes", type=int, default=256 << 20)
    arguments.add_argument("--metrics", type=int, default=50, help="how many a record holds: 50 make lines of 1.7 KB")
    arguments.add_argument("--journal-bytes", type=int, default=spool.writer.SEAL_BYTES)
    arguments.add_argument("--rounds", type=int, default=7)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        command = [
            sys.executable,
            "-c",
            KILLED,
            str(folder),
            *map(str, (chosen.bytes, chosen.journal_bytes, chosen.metrics)),
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        require(done.returncode == -signal.SIGKILL, f"the writer failed: {done.stderr.decode()}")
        journals = sorted(folder.rglob("*.jsonl"))
        size = sum(path.stat().st_size for path in journals)
        verify = [sys.executable, "-m", "spool.cli", "verify", str(folder)]
        verify_s, sha_s = [], []
        for _ in range(chosen.rounds):
            verify_s.append(seconds(verify))
            sha_s.append(seconds(["sha256sum", *map(str, journals)]))
    print(f"{len(journals)} journals, {size / 2**20:.0f} MiB, medians of {chosen.rounds}\n")
    table(
        ["", "s", "MB/s", "x sha256sum"],
        [
            ["sha256sum", f"{median(sha_s):.2f}", f"{size / median(sha_s) / 1e6:.0f}", "1.00"],
            [
                "spool verify",
                f"{median(verify_s):.2f}",
                f"{size / median(verify_s) / 1e6:.0f}",
                f"{median(sha_s) / median(verify_s):.2f}",
            ],
        ],
    )


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{command[0]} failed: {done.stdout}{done.stderr}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
