"""What sealing beside training does to a torch step when no core is free.

    python bench/torch_step.py [--rounds N]

torch computes with as many threads as there are cores. Windows alternate: one while full journals are sealed by the child
at nice 10, one after another, and one of the same length without. A step is forward, backward and update of a small
network, and one `log()` of 50 metrics. The x is the ratio of a window's median step to that of the window after it, the
median of the rounds.
"""

import os
import time
from pathlib import Path
from subprocess import Popen

import torch
from measure import FLOATS, full_journal, median, parser, percentile, require, table, unseal, workplace

import spool
import spool.writer
from spool import seal
from spool.run import Run


class Training:
    def __init__(self, run: Run, width: int) -> None:
        self._run = run
        layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(256, width)  # (sample, feature)
        self._step = 0

    def step(self) -> float:
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = (self._model(self._batch) - self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        self._step += 1
        self._run.log(FLOATS, step=self._step)
        return (time.perf_counter() - begin) * 1000


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--seals", type=int, default=2, help="a window")
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--journal-bytes", type=int, default=spool.writer.SEAL_BYTES)
    chosen = arguments.parse_args()
    spool.writer.SEAL_BYTES = 1 << 40  # its own journal stays out of the windows
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    with workplace(chosen.folder) as folder:
        full, _ = full_journal(folder / "other", chosen.journal_bytes)
        run = spool.init(project="bench", experiment="torch", dir=folder / "spool")
        training = Training(run, chosen.width)
        for _ in range(10):
            training.step()
        without, sealing, seal_s = [], [], []
        for _ in range(chosen.rounds):
            begin = time.perf_counter()
            sealing.append(sealing_window(training, full, chosen.seals))
            took_s = time.perf_counter() - begin
            seal_s.append(took_s / chosen.seals)
            end = time.perf_counter() + took_s
            without.append([training.step()])
            while time.perf_counter() < end:
                without[-1].append(training.step())
        run.finish()
    ratio = median(median(a) / median(b) for a, b in zip(sealing, without, strict=True))
    p99 = [median(percentile(times, 0.99) for times in windows) for windows in (without, sealing)]
    print(
        f"{cores} torch threads on {cores} cores; {sum(map(len, without))} steps without, {sum(map(len, sealing))} while sealing\n"
    )
    table(
        ["step", "median ms", "p99 ms"],
        [
            ["not sealing", f"{median(map(median, without)):.1f}", f"{p99[0]:.1f}"],
            [f"sealing (a seal takes {median(seal_s):.1f} s)", f"{median(map(median, sealing)):.1f}", f"{p99[1]:.1f}"],
            ["x", f"{ratio:.2f}", f"{p99[1] / p99[0]:.2f}"],
        ],
    )


def sealing_window(training: Training, full: Path, seals: int) -> list[float]:
    times: list[float] = []
    for _ in range(seals):
        child: Popen[bytes] = seal.start(full)
        while child.poll() is None:
            times.append(training.step())
        require(child.returncode == 0, "the sealing child failed")
        unseal(full)
    return times


if __name__ == "__main__":
    main()
