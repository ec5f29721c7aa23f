"""Problems, their reward, and demonstrations for the warm-up.

The built-in task is chained arithmetic: `(12+34)*5=?`. The policy may call the calculator by writing `<<12+34=`; the
agent loop answers `46>>`. It ends with `#` and the answer. The notation is that of GSM8K's calculator annotations.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


class DataError(Exception):
    """A file of problems cannot be used; the message says which and why."""


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
    """Yield different problems of two chained operations, for ever."""
    seen = set()
    while True:
        first, second, third = rng.randint(2, 50), rng.randint(2, 50), rng.randint(2, 50)
        operator = rng.choice("+-*")
        inner = f"{first}{operator}{second}"
        value = {"+": first + second, "-": first - second, "*": first * second}[operator]
        divides = value != 0 and value % third == 0
        outer = f"({inner}){rng.choice('+-*/' if divides else '+-*')}{third}"
        if outer not in seen:
            seen.add(outer)
            yield Problem(prompt=f"{outer}=?", answer=str(evaluate(outer)), data_source="chained_arithmetic")


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


def load_problems(path: str) -> list[Problem]:
    """Read problems from Parquet or JSONL: `question` and `answer` (GSM8K, final answer after `####`) or `prompt` and `answer`.

    `data_source` is optional and defaults to the file's stem. Raises `DataError`.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file")
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    problems = []
    for number, row in enumerate(rows, start=1):
        prompt = row.get("prompt", row.get("question"))
        answer = row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str | int | float):
            raise DataError(f"{path}: row {number} has no text 'prompt' or 'question' with an 'answer'")
        final = str(answer).rpartition("####")[2].strip()
        problems.append(Problem(prompt=prompt, answer=final, data_source=str(row.get("data_source", file.stem))))
    if not problems:
        raise DataError(f"{path}: holds no problems")
    return problems


def _jsonl_rows(file: Path) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise DataError(f"{file}: line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise DataError(f"{file}: line {number} is not a JSON object")
        rows.append(row)
    return rows


def _parquet_rows(file: Path) -> list[dict[str, object]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_table(file).to_pylist()
    except pa.ArrowInvalid:
        raise DataError(f"{file}: not a Parquet file") from None
