"""One trajectory: the policy writes, calls the calculator, reads its answer, and writes on until it ends or must end.

Spans have verl's names: `agent_loop` around the trajectory, below it `ToolAgentLoop.generate` for each turn of the policy
and `calculator` for each tool call, which is an error span if the tool failed. The policy reads a failure as text.
"""

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from trainer.decoder import BatchDecoder
from trainer.tasks import CALL_END, CALL_START, Problem, reward
from trainer.tokenizer import EOS, decode, encode
from trainer.tools import Calculator, ToolError

_CALL_STOP = encode("=")[0]
STOP_TOKENS = frozenset({EOS, _CALL_STOP})

Span = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Prompt:
    """A problem to be rolled out: where it stands in its data set, and which rollout of its group this is."""

    problem: Problem
    sample_index: int
    rollout_n: int


@dataclass
class Trajectory:
    prompt: Prompt
    prompt_tokens: list[int]
    response_tokens: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)  # 1 where the policy wrote, 0 where a tool answered
    text: str = ""
    score: float = 0.0
    accuracy: float = 0.0
    turns: int = 0  # of the policy and of the tools, without the prompt
    tool_calls: int = 0
    tool_errors: int = 0
    is_cut: bool = False  # True if the length limit or the turn limit ended it
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass
class _Untraced:
    outputs: Any = None


def no_span(*_: object, **__: object) -> AbstractContextManager[Any]:
    """Stand in for `run.span` where a trajectory is not traced."""
    return contextlib.nullcontext(_Untraced())


class ToolAgent:
    """Rolls out one prompt in row `row` of `decoder`, with at most `max_turns` turns of the policy."""

    def __init__(
        self, decoder: BatchDecoder, row: int, calculator: Calculator, max_turns: int, span: Span, trace_text: bool
    ) -> None:
        """`span` opens spans (`no_span`: none); with `trace_text` they hold the policy's turns as text, else as token ids."""
        self._decoder = decoder
        self._row = row
        self._calculator = calculator
        self._max_turns = max_turns
        self._span = span
        self._trace_text = trace_text

    async def run(self, prompt: Prompt, prompt_tokens: list[int]) -> Trajectory:
        trajectory = Trajectory(prompt, prompt_tokens)
        with self._span("agent_loop", type="AGENT", inputs={"prompt": prompt.problem.prompt}) as root:
            tool_answer = ""
            for _ in range(self._max_turns):
                written, is_last = await self._generate(trajectory, tool_answer)
                if is_last:
                    break
                tool_answer = self._call_tool(trajectory, written)
            else:
                trajectory.is_cut = True
            trajectory.text = decode(trajectory.response_tokens)
            result = reward(trajectory.text, prompt.problem.answer)
            trajectory.score, trajectory.accuracy = result.score, result.accuracy
            root.outputs = {"response": trajectory.text, "score": result.score, "acc": result.accuracy}
        return trajectory

    async def _generate(self, trajectory: Trajectory, tool_answer: str) -> tuple[str, bool]:
        """Let the policy write a turn after `tool_answer`; return its text and whether it was the last."""
        started = time.perf_counter()
        with self._span("ToolAgentLoop.generate", type="LLM", inputs={"tool_answer": tool_answer}) as span:
            turn = await self._decoder.generate(self._row, encode(tool_answer))
            written = decode(turn.sampled)
            span.outputs = {"text": written} if self._trace_text else {"token_ids": turn.sampled}
        trajectory.generate_s += time.perf_counter() - started
        trajectory.turns += 1
        trajectory.response_tokens += turn.forced + turn.sampled
        trajectory.response_mask += [0] * len(turn.forced) + [1] * len(turn.sampled)
        is_ended = turn.sampled[-1:] == [EOS]
        trajectory.is_cut = turn.exhausted and not is_ended
        return written, turn.exhausted or is_ended

    def _call_tool(self, trajectory: Trajectory, written: str) -> str:
        """Make the call that ends `written`, if there is one, and return what the policy is to read."""
        _, start, expression = written.removesuffix("=").rpartition(CALL_START)
        if not start:
            return ""
        started = time.perf_counter()
        trajectory.tool_calls += 1
        trajectory.turns += 1
        try:
            with self._span("calculator", type="TOOL", inputs={"expression": expression}) as span:
                answer = span.outputs = self._calculator(expression)
        except ToolError as error:
            trajectory.tool_errors += 1
            answer = f"error: {error}"
        trajectory.tool_s += time.perf_counter() - started
        return answer + CALL_END
