"""Decodes many trajectories together: each is a coroutine that asks for its next turn, the decoder advances all by a token.

All rows are padded on the left to one length and every open row takes exactly one token per forward pass, drawn from the
policy or forced by whoever asked (the answer of a tool). So one forward pass serves all rows, whatever turn each is in.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from trainer.model import TinyGPT
from trainer.tokenizer import PAD

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Turn:
    forced: list[int]  # the forced tokens that fitted
    sampled: list[int]  # what the policy wrote after them, the stop token included
    exhausted: bool  # True if the response may not grow any more


@dataclass
class _Request:
    forced: list[int]
    answer: asyncio.Future[Turn]
    taken: int = 0
    sampled: list[int] = field(default_factory=list)


class BatchDecoder:
    def __init__(
        self,
        model: TinyGPT,
        prompts: Sequence[list[int]],
        stop_tokens: frozenset[int],
        max_response_length: int,
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        """`temperature` 0 decodes greedily."""
        self._model = model
        self._stop_tokens = stop_tokens
        self._tokens_left = max_response_length
        self._temperature = temperature
        self._generator = generator
        length = max(len(prompt) for prompt in prompts)
        self._prompts = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in prompts])  # (B, P)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        visible = torch.arange(length)[None, :] >= length - lengths[:, None]
        self._cache = model.new_cache(visible, capacity=length + max_response_length)
        self._rows = list(range(len(prompts)))  # trajectory of each row of the cache
        self._requests: dict[int, _Request] = {}
        self._running = len(prompts)
        self._all_wait = asyncio.Event()  # set when every running trajectory waits for its turn

    async def generate(self, trajectory: int, forced: list[int]) -> Turn:
        """Append `forced`, then sample until a stop token or the length limit."""
        if self._tokens_left == 0:
            return Turn([], [], exhausted=True)
        request = _Request(forced, asyncio.get_running_loop().create_future())
        self._requests[trajectory] = request
        self._tell_if_all_wait()
        return await request.answer

    async def run(self, trajectories: Sequence[Coroutine[None, None, _Result]]) -> list[_Result]:
        """Run one coroutine per prompt to its end and return their results in order."""
        with torch.inference_mode():
            logits = self._model(self._prompts, self._cache)[:, -1]  # (B, vocabulary)
            tasks = [asyncio.create_task(self._count(trajectory)) for trajectory in trajectories]
            while True:
                if len(self._requests) < self._running:
                    self._all_wait.clear()
                    await self._all_wait.wait()  # tools run here
                if not self._requests:
                    return await asyncio.gather(*tasks)
                logits = self._drop_closed_rows(logits)
                tokens = self._advance(self._sample(logits))
                if self._tokens_left:
                    logits = self._model(torch.tensor(tokens)[:, None], self._cache)[:, -1]

    async def _count(self, trajectory: Coroutine[None, None, _Result]) -> _Result:
        try:
            return await trajectory
        finally:
            self._running -= 1
            self._tell_if_all_wait()

    def _tell_if_all_wait(self) -> None:
        if len(self._requests) == self._running:
            self._all_wait.set()

    def _sample(self, logits: Tensor) -> list[int]:
        if self._temperature == 0:
            return logits.argmax(dim=-1).tolist()
        probabilities = torch.softmax(logits / self._temperature, dim=-1)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0].tolist()

    def _advance(self, sampled: list[int]) -> list[int]:
        """Give each open row its next token, answer the turns that end with it, and return the tokens (B)."""
        self._tokens_left -= 1
        tokens = []
        for trajectory, token in zip(self._rows, sampled, strict=True):
            request = self._requests.get(trajectory)
            if request is None:
                tokens.append(PAD)
                continue
            is_forced = request.taken < len(request.forced)
            if is_forced:
                token = request.forced[request.taken]
                request.taken += 1
            else:
                request.sampled.append(token)
            tokens.append(token)
            if self._tokens_left == 0 or (not is_forced and token in self._stop_tokens):
                del self._requests[trajectory]
                turn = Turn(request.forced[: request.taken], request.sampled, exhausted=self._tokens_left == 0)
                request.answer.set_result(turn)
        return tokens

    def _drop_closed_rows(self, logits: Tensor) -> Tensor:
        """Shrink the batch once half of its rows are closed: copying the cache costs less than decoding padding."""
        if 2 * len(self._requests) > len(self._rows):
            return logits
        kept = [row for row, trajectory in enumerate(self._rows) if trajectory in self._requests]
        rows = torch.tensor(kept)
        self._cache.keep(rows)
        self._rows = [self._rows[row] for row in kept]
        return logits[rows]
