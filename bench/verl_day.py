"""One day of a verl run with traces, 12 MB of them a step: disk, processor and memory, from a measured sample.

    python bench/verl_day.py [--steps N] [--trace-bytes N] [--step-s SECONDS]

The sample logs a few steps (bench/verl.py: metrics, each fifth step generations, and agent trajectories as nested spans
until their inputs and outputs are 12 MB of JSON), without the pauses of training between them, and finishes. A day is the
sample by the number of steps in 24 hours; what journals take is stated for the middle of the run: a sealed journal stays
for ten minutes and goes with the next seal.
"""

import random
import resource
import time
from pathlib import Path

import orjson
import verl
from measure import median, parser, require, size_bytes, table, workplace

import spool
from spool.reader import RunReader
from spool.run import Run
from spool.seal import KEEP_SEALED_S
from spool.span import Span


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--trace-bytes", type=int, default=12_000_000)
    arguments.add_argument("--step-s", type=float, default=120, help="how long a step takes in training")
    chosen = arguments.parse_args()
    rng = random.Random(0)
    pool, raw = [], 0
    while raw < chosen.trace_bytes:
        pool.append(verl.trajectory(rng))
        raw += sum(len(orjson.dumps([call.inputs, call.outputs])) for call in verl.all_calls(pool[-1]))
    spans = sum(1 for one in pool for _ in verl.all_calls(one))
    with workplace(chosen.folder) as folder:
        run = spool.init(project="bench", experiment="day", dir=folder)
        before_bytes = resident_bytes()
        peak_bytes, wall_s, cpu_s = before_bytes, [], []
        for step in range(1, chosen.steps + 1):
            metrics = verl.metrics(rng, step)
            begin, cpu = time.perf_counter(), time.thread_time()
            log_step(run, step, metrics, pool)
            wall_s.append(time.perf_counter() - begin)
            cpu_s.append(time.thread_time() - cpu)
            peak_bytes = max(peak_bytes, resident_bytes())
        run.finish()
        peak_bytes = max(peak_bytes, resident_bytes())
        sealing = resource.getrusage(resource.RUSAGE_CHILDREN)
        [found] = spool.open(folder).runs()
        check(found, chosen.steps * spans)
        sample = {
            "journals": size_bytes(found.path, "*.jsonl") / chosen.steps,
            "segments": size_bytes(found.path, "*.parquet") / chosen.steps,
            "seal CPU": (sealing.ru_utime + sealing.ru_stime) / chosen.steps,
        }
    show(chosen.steps, chosen.step_s, raw, len(pool), spans, sample, median(wall_s), median(cpu_s))
    table(
        ["memory", "MB"],
        [
            ["trainer, growth", f"{(peak_bytes - before_bytes) / 1e6:.0f}"],
            ["sealing child, peak", f"{sealing.ru_maxrss / 1024:.0f}"],
        ],
    )


def log_step(run: Run, step: int, metrics: dict[str, float | int], pool: list[verl.Call]) -> None:
    run.log(metrics, step=step)
    if step % 5 == 0:
        run.log_generations(step=step, rows=verl.generations(random.Random(step)), split="val")
    for place, call in enumerate(pool):
        indices = {"sample_index": place // verl.ROLLOUTS, "rollout_n": place % verl.ROLLOUTS, "validate": False}
        log_call(run.span(call.name, call.kind, step, inputs=call.inputs, **indices), run, call)


def log_call(span: Span, run: Run, call: verl.Call) -> None:
    with span:
        for inner in call.calls:
            log_call(run.span(inner.name, inner.kind, inputs=inner.inputs), run, inner)
        span.outputs = call.outputs


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check(run: RunReader, spans: int) -> None:
    ended = sum(
        sum(batch["end"].is_valid().to_pylist()) for writer in run.writers() for batch in writer.batches("spans")
    )
    require(ended == spans, f"{ended} spans read back, {spans} logged")


def show(
    steps: int,
    step_s: float,
    raw: int,
    trajectories: int,
    spans: int,
    sample: dict[str, float],
    wall_s: float,
    cpu_s: float,
) -> None:
    day = 86400 / step_s
    kept = KEEP_SEALED_S / step_s + 2  # the one being written, and the one that goes with the next seal
    print(
        f"sample: {steps} steps of {trajectories} trajectories, {spans} spans, {raw / 1e6:.1f} MB raw; "
        f"a day: {day:.0f} steps of {step_s:.0f} s, extrapolated\n"
    )
    rows = [
        ["traces as JSON", f"{raw / 1e6:.1f} MB", f"{raw * day / 1e9:.1f} GB"],
        ["written to journals", f"{sample['journals'] / 1e6:.1f} MB", f"{sample['journals'] * day / 1e9:.1f} GB"],
        [
            "disk: segments, at the end",
            f"{sample['segments'] / 1e6:.1f} MB",
            f"{sample['segments'] * day / 1e9:.1f} GB",
        ],
        ["disk: journals, at any time", "", f"{sample['journals'] * kept / 1e9:.2f} GB"],
        ["the trainer waits", f"{wall_s:.2f} s", f"{wall_s * day:.0f} s ({wall_s / step_s:.2%})"],
        ["CPU of the trainer", f"{cpu_s:.2f} s", f"{cpu_s * day:.0f} s"],
        ["CPU of the sealing children", f"{sample['seal CPU']:.2f} s", f"{sample['seal CPU'] * day:.0f} s"],
    ]
    table(["", "a step", "a day"], rows)


if __name__ == "__main__":
    main()
