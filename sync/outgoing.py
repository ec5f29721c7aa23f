"""What of a run goes out, and in what form: a choice of the user's that never changes the spool. Pure but for pyarrow.

A choice depends on the row and on the run's attempts alone, so it is the same on every machine and in every sync: a rewound
step, a trace that is not in the sample, a text that is cut. What does not go out is withheld: counted, and passed over by the
cursor.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spool.layout import Attempt

_CUT_COLUMNS = ("inputs", "outputs")


@dataclass(frozen=True)
class Choice:
    """`rewind`: keep or drop steps that a later attempt has trained again; `trace_sample`: the share of traces, 0 to 1;
    `trace_max_chars`: where the texts of traces are cut.
    """

    rewind: str = "keep"
    trace_sample: float = 1.0
    trace_max_chars: int | None = None


class Outgoing:
    """A choice, for one run."""

    def __init__(self, choice: Choice, run_id: str, last_steps: dict[str, int]) -> None:
        """`last_steps`: attempt -> the last step of it that survives; see `surviving`."""
        self._choice, self._run_id = choice, run_id
        self._last_steps = last_steps if choice.rewind == "drop" else {}

    def of(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that go out, as they go out."""
        if table in ("metrics", "generations") and self._last_steps and rows.num_rows:
            last = self._last_steps.get(rows["attempt"][0].as_py())
            if last is not None:
                rows = rows.filter(pc.fill_null(pc.less_equal(rows["step"], last), True))
        if table == "spans":
            if self._choice.trace_sample < 1 and rows.num_rows:
                columns = (rows[name].to_pylist() for name in ("trace_id", "step", "sample_index"))
                rows = rows.filter(pa.array([self._is_sampled(*one) for one in zip(*columns, strict=True)], pa.bool_()))
            if self._choice.trace_max_chars is not None:
                rows = self._cut(rows, self._choice.trace_max_chars)
        return rows

    def _is_sampled(self, trace_id: str, step: int | None, sample_index: int | None) -> bool:
        """A prompt's rollouts of a step are one group, which is sampled as a whole; a trace without indices is its own."""
        group = trace_id if sample_index is None else f"{step}/{sample_index}"
        digest = sha256(f"{self._run_id}/{group}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self._choice.trace_sample * 2.0**64

    def _cut(self, rows: pa.Table, limit: int) -> pa.Table:
        for name in _CUT_COLUMNS:
            texts = [
                text if text is None or len(text) <= limit else _shortened(text, limit)
                for text in rows[name].to_pylist()
            ]
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), pa.array(texts, pa.string()))
        return rows


def surviving(attempts: Iterable[Attempt], first_steps: dict[str, int]) -> dict[str, int]:
    """attempt -> the last of its steps that no later attempt has trained again.

    An attempt goes back to the checkpoint it says it resumed from; where it does not say, to before the first step that it
    logs (`first_steps`). What it goes back behind is rewound in every attempt before it.
    """
    last: dict[str, int] = {}
    earlier: list[str] = []
    for attempt in attempts:
        resumed = attempt.resumed_from_step
        start = resumed if resumed is not None else first_steps[attempt.id] - 1 if attempt.id in first_steps else None
        if start is not None and attempt.continues is not None:
            last |= {one: min(last.get(one, start), start) for one in earlier}
        earlier.append(attempt.id)
    return last


def _shortened(text: str, limit: int) -> str:
    """A JSON text with every text in it cut at `limit` characters, saying how long it was."""
    return json.dumps(_cut_texts(json.loads(text), limit), ensure_ascii=False)


def _cut_texts(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}… [cut by spool-sync: {len(value)} characters]"
    if isinstance(value, dict):
        return {key: _cut_texts(one, limit) for key, one in value.items()}
    return [_cut_texts(one, limit) for one in value] if isinstance(value, list) else value
