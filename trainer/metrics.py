"""The metrics of a step, under verl's names. Pure functions from what a step produced to numbers."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from statistics import fmean

from torch import Tensor

from trainer.agent_loop import Trajectory

Metrics = dict[str, float | int]


class Timings:
    """Seconds spent in the named parts of a step; a part entered twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def data_metrics(trajectories: Sequence[Trajectory], rewards: Tensor, advantages: Tensor, mask: Tensor) -> Metrics:
    """Describe the rollouts of a step; `rewards` (B), `advantages` (B, 1), `mask` (B, T). Advantages count once per token."""
    prompts = [len(trajectory.prompt_tokens) for trajectory in trajectories]
    responses = [len(trajectory.response_tokens) for trajectory in trajectories]
    per_token = advantages.expand_as(mask)[mask.bool()].tolist()
    calls = sum(trajectory.tool_calls for trajectory in trajectories)
    errors = sum(trajectory.tool_errors for trajectory in trajectories)
    return {
        **_spread("critic/score", [trajectory.score for trajectory in trajectories]),
        **_spread("critic/rewards", rewards.tolist()),
        **_spread("critic/advantages", per_token),
        **_spread("critic/returns", per_token),  # without a critic verl's returns are the advantages
        **_spread("response_length", responses),
        "response_length/clip_ratio": fmean(trajectory.is_cut for trajectory in trajectories),
        **_spread("prompt_length", prompts),
        **_spread("num_turns", [trajectory.turns + 1 for trajectory in trajectories]),  # verl counts the prompt
        "training/acc": fmean(trajectory.accuracy for trajectory in trajectories),
        "tool_calls/count": calls,
        # No call, no rate: verl too logs NaN where there is nothing to average.
        "tool_calls/success_rate": (calls - errors) / calls if calls else float("nan"),
    }


def throughput_metrics(shares: Sequence[Sequence[Trajectory]], seconds: dict[str, float]) -> Metrics:
    """Describe the cost of a step from the trajectories of each worker and the seconds of its parts (`step` among them)."""
    lengths = [sum(len(one.prompt_tokens) + len(one.response_tokens) for one in share) for share in shares]
    total = sum(lengths)
    generated = sum(sum(one.response_mask) for share in shares for one in share)
    trajectories = [one for share in shares for one in share]
    return {
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        **_spread("timing_s/agent_loop/generate_sequences", [one.generate_s for one in trajectories]),
        **_spread("timing_s/agent_loop/tool_calls", [one.tool_s for one in trajectories]),
        "timing_per_token_ms/gen": 1e3 * seconds["gen"] / max(generated, 1),
        "timing_per_token_ms/update_actor": 1e3 * seconds["update_actor"] / total,
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds["step"],
        "perf/throughput": total / seconds["step"],
        **_spread("global_seqlen", lengths),
        "global_seqlen/minmax_diff": max(lengths) - min(lengths),
    }


def validation_metrics(trajectories: Sequence[Trajectory], rollouts: int) -> Metrics:
    """Average accuracy and score over the validation rollouts of each data source."""
    metrics: Metrics = {}
    for source in sorted({trajectory.prompt.problem.data_source for trajectory in trajectories}):
        own = [one for one in trajectories if one.prompt.problem.data_source == source]
        metrics[f"val-core/{source}/acc/mean@{rollouts}"] = fmean(one.accuracy for one in own)
        metrics[f"val-aux/{source}/score/mean@{rollouts}"] = fmean(one.score for one in own)
    return metrics | _spread("val-aux/num_turns", [trajectory.turns + 1 for trajectory in trajectories])


def _spread(name: str, values: Sequence[float]) -> Metrics:
    return {f"{name}/mean": fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
