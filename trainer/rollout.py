"""Rolls out prompts with a copy of the policy. The same class works in the trainer's process and as a Ray actor."""

import asyncio
import functools
import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.agent_loop import STOP_TOKENS, Prompt, ToolAgent, Trajectory, no_span
from trainer.decoder import BatchDecoder
from trainer.ledger import Recorder
from trainer.model import TinyGPT
from trainer.tokenizer import encode
from trainer.tools import Calculator


class RolloutWorker:
    def __init__(
        self,
        new_model: Callable[[], TinyGPT],
        open_recorder: Callable[[], Recorder],
        seed: int,
        max_prompt_length: int,
        max_response_length: int,
        max_turns: int,
        tool_failure_rate: float,
        traced_samples: int,
        trace_text: bool,
    ) -> None:
        """`open_recorder` is called here, in the worker's process: a Ray actor joins the run as a writer of its own.

        Of the prompts of a call the groups of `traced_samples` are traced; a prompt longer than `max_prompt_length`
        tokens keeps its end.
        """
        torch.set_num_threads(1)
        self._model = new_model().eval()
        self._recorder = open_recorder()
        self._seed = seed
        self._max_prompt_length = max_prompt_length
        self._max_response_length = max_response_length
        self._max_turns = max_turns
        self._tool_failure_rate = tool_failure_rate
        self._traced_samples = traced_samples
        self._trace_text = trace_text

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(weights)

    def generate(self, prompts: list[Prompt], temperature: float, step: int, validate: bool) -> list[Trajectory]:
        """Return a trajectory per prompt, in order; the same for the same weights, prompts, seed and step."""
        if not prompts:
            return []
        tokens = [encode(prompt.problem.prompt)[-self._max_prompt_length :] for prompt in prompts]
        key = f"{self._seed}/{step}/{validate}"
        generator = torch.Generator().manual_seed(_hash(f"{key}/{prompts[0].sample_index}") % 2**63)
        decoder = BatchDecoder(self._model, tokens, STOP_TOKENS, self._max_response_length, temperature, generator)
        traced = sampled_groups((prompt.sample_index for prompt in prompts), key, self._traced_samples)
        trajectories = []
        for row, prompt in enumerate(prompts):
            indices: dict[str, Any] = {"step": step, "sample_index": prompt.sample_index, "rollout_n": prompt.rollout_n}
            is_traced = prompt.sample_index in traced
            span = functools.partial(self._recorder.span, **indices, validate=validate) if is_traced else no_span
            rng = random.Random(f"{key}/{prompt.sample_index}/{prompt.rollout_n}")
            calculator = Calculator(self._tool_failure_rate, rng)
            agent = ToolAgent(decoder, row, calculator, self._max_turns, span, self._trace_text)
            trajectories.append(agent.run(prompt, tokens[row]))
        return asyncio.run(decoder.run(trajectories))

    def finish(self) -> None:
        self._recorder.finish("finished")


def sampled_groups(sample_indices: Iterable[int], key: str, count: int) -> set[int]:
    """Choose `count` of the samples by hash: the same ones in every attempt, always with all rollouts of their group."""
    return set(sorted(set(sample_indices), key=lambda index: _hash(f"{key}/{index}"))[:count])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
