"""What `import spool`, `init` and `finish` take in a fresh interpreter, and which modules the import pulls in.

python bench/start_cost.py [--rounds N]
"""

import subprocess
import sys
from pathlib import Path

from measure import median, parser, require, table, workplace

SCRIPT = """
import sys, time
clock = time.perf_counter
a = clock()
import spool
b = clock()
heavy = [name for name in ("pyarrow", "numpy", "pandas", "torch", "mlflow", "wandb", "swanlab") if name in sys.modules]
run = spool.init(project="bench", dir=sys.argv[1])
c = clock()
run.log({"a": 1.0})
d = clock()
run.finish()
e = clock()
print(b - a, c - b, e - d, *heavy)
"""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    chosen = arguments.parse_args()
    with workplace(chosen.folder) as folder:
        rounds = [start(folder) for _ in range(chosen.rounds)]
    names = ("import spool", "init", "finish")
    table(
        ["fresh interpreter", f"ms, median of {chosen.rounds}", "best"],
        [
            [name, f"{median(times):.0f}", f"{min(times):.0f}"]
            for name, times in zip(names, zip(*rounds, strict=True), strict=True)
        ],
    )


def start(folder: Path) -> list[float]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=True)
    (*times,) = done.stdout.split()[:3]
    heavy = done.stdout.split()[3:]
    require(not heavy, f"import spool pulls in {', '.join(heavy)}")
    return [float(word) * 1000 for word in times]


if __name__ == "__main__":
    main()
