"""The problems of a training: files of them in Parquet or JSONL, or the built-in task."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.tasks import Problem, chained_problems


class DataError(Exception):
    """The problems cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Problems:
    train: list[Problem]
    validation: list[Problem]
    more: Iterator[Problem]  # of the built-in task, in neither of the two
    steps_per_epoch: int


def load_data(
    train_files: list[str], val_files: list[str], train_limit: int, val_limit: int, batch_size: int, seed: int
) -> Problems:
    """Load the files; without files generate chained arithmetic, training and validation without a common problem.

    A limit of -1 takes whole files. Raises `DataError`.
    """
    chained = chained_problems(random.Random(seed))
    validation = _some(val_files, val_limit, chained)
    train = _some(train_files, train_limit, chained)
    steps_per_epoch = len(train) // batch_size
    if steps_per_epoch == 0:
        raise DataError(f"data.train_batch_size is {batch_size}, but there are {len(train)} training problems")
    return Problems(train, validation, chained, steps_per_epoch)


def _some(paths: list[str], limit: int, chained: Iterator[Problem]) -> list[Problem]:
    source = itertools.chain.from_iterable(load_problems(path) for path in paths) if paths else chained
    return list(itertools.islice(source, None if limit == -1 else limit))


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


def _jsonl_rows(file: Path) -> list[dict[str, Any]]:
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


def _parquet_rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except pa.ArrowInvalid:
        raise DataError(f"{file}: not a Parquet file") from None
    return rows
