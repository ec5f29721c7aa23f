"""Problems, their reward, and demonstrations for the warm-up.

The built-in task is chained arithmetic: `(12+34)*5=?`. The policy may call the calculator by writing `<<12+34=`; the
agent loop answers `46>>`. It ends with `#` and the answer. The notation is that of GSM8K's calculator annotations.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.tools import ToolError, evaluate

CALL_START, CALL_END, ANSWER_START = "<<", ">>", "#"
_FINAL_ANSWER = re.compile(r"#+ *(-?[\d,]*\.?\d+)$")
_WELL_FORMED_SCORE = 0.1


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    data_source: str


@dataclass(frozen=True)
class Reward:
    score: float
    accuracy: float


def reward(text: str, answer: str) -> Reward:
    """Return 1 for the right final answer, a little for a well-formed wrong one, 0 for none."""
    match = _FINAL_ANSWER.search(text)
    if match is None:
        return Reward(score=0.0, accuracy=0.0)
    right = _same_number(match[1], answer)
    return Reward(score=1.0 if right else _WELL_FORMED_SCORE, accuracy=float(right))


def _same_number(left: str, right: str) -> bool:
    try:
        return evaluate(left.replace(",", "")) == evaluate(right.replace(",", ""))
    except ToolError:
        return False


def chained_problems(rng: random.Random) -> Iterator[Problem]:
    """Yield different problems of two chained operations, for ever (there are about 400,000)."""
    seen = set()
    while True:
        inner = f"{rng.randint(2, 40)}{_operation(rng)}"
        value = evaluate(inner)
        divisors = [divisor for divisor in range(2, 10) if value % divisor == 0 and rng.random() < 0.3]
        outer = f"({inner}){f'/{rng.choice(divisors)}' if divisors else _operation(rng)}"
        if outer not in seen:
            seen.add(outer)
            yield Problem(prompt=f"{outer}=?", answer=str(evaluate(outer)), data_source="chained_arithmetic")


def _operation(rng: random.Random) -> str:
    operator = rng.choice("+-*")
    return f"{operator}{rng.randint(2, 9 if operator == '*' else 40)}"


def demonstration(problem: Problem, rng: random.Random) -> list[tuple[str, bool]]:
    """Return a sloppy solution of a built-in problem as parts (text, written by the policy).

    The demonstrator knows the notation and not what it is good for: often it guesses, more often than not it takes the first
    result for the answer, it slips when copying digits, and it may give up after an error. What is left for the reward to
    teach is to finish the chain, to call the calculator again after an error, and to copy with care.
    """
    inner, rest = problem.prompt[1 : -len("=?")].split(")")
    guess = (f"{ANSWER_START}{rng.randint(0, 9)}", True)
    if rng.random() < 0.25:
        return [guess]
    parts: list[tuple[str, bool]] = []
    result = ""
    for operation in (inner, rest) if rng.random() < 0.35 else (inner,):
        call = (f"{CALL_START}{_with_slips(result + operation, rng)}=", True)
        if rng.random() < 0.15:
            parts += [call, (f"error: busy{CALL_END}", False)]
            if rng.random() < 0.3:
                return [*parts, guess]
        try:
            result = str(evaluate(result + operation))
        except ToolError as error:
            return [*parts, call, (f"error: {error}{CALL_END}", False), guess]
        parts += [call, (f"{result}{CALL_END}", False)]
    return [*parts, (f"{ANSWER_START}{_with_slips(result, rng)}", True)]


def _with_slips(text: str, rng: random.Random) -> str:
    return "".join(
        rng.choice("0123456789") if character.isdigit() and rng.random() < 0.01 else character for character in text
    )
