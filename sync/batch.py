"""A batch: consecutive rows of one table of one writer, small enough for one request. Pure but for pyarrow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

MAX_BYTES = 8 << 20
"""A request is kept near this size; a single larger row travels alone."""


@dataclass(frozen=True)
class Batch:
    table: str
    writer_id: str
    rows: pa.Table
    cursor: int | None
    """Seq of the last record that is complete once these rows are delivered; None when rows are sent again out of order."""

    def split(self, max_rows: int) -> Iterator["Batch"]:
        """Consecutive batches of at most `max_rows` rows and about MAX_BYTES. A record may end up in two of them: the
        first then carries the cursor of the record before.
        """
        step = max(1, min(max_rows, self.rows.num_rows * MAX_BYTES // max(1, self.rows.nbytes)))
        for start in range(0, self.rows.num_rows, step):
            yield self._part(start, min(start + step, self.rows.num_rows))

    def halves(self) -> Iterator["Batch"]:
        yield from self.split((self.rows.num_rows + 1) // 2)

    def _part(self, start: int, end: int) -> "Batch":
        rows = self.rows.slice(start, end - start)
        if self.cursor is None:
            return Batch(self.table, self.writer_id, rows, None)
        if end == self.rows.num_rows:
            return Batch(self.table, self.writer_id, rows, self.cursor)
        return Batch(self.table, self.writer_id, rows, self.rows["seq"][end].as_py() - 1)

    def only(self, wanted: list[bool]) -> "Batch":
        """The wanted rows, to be sent again: without a cursor."""
        return Batch(self.table, self.writer_id, self.rows.filter(pa.array(wanted, pa.bool_())), None)

    def dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts; times as integer nanoseconds, because Python's own times stop at microseconds."""
        return dicts(self.rows)


def plain(rows: pa.Table) -> pa.Table:
    """Timestamps as int64 nanoseconds, everything else as it is."""
    for at, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            rows = rows.set_column(at, field.name, pc.cast(rows.column(at), pa.int64()))
    return rows


def dicts(rows: pa.Table) -> list[dict[str, Any]]:
    names = rows.column_names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns(rows), strict=True)]


def columns(rows: pa.Table, *names: str) -> list[list[Any]]:
    """These columns, or all, as lists: for who has millions of rows to look at, a dict of each takes most of the time."""
    return list(map(_values, plain(rows.select(names) if names else rows).columns))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """What `to_pylist` gives; a text that many rows share is made once, not once a row, which takes most of a replay's time."""
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    found = []
    for chunk in column.chunks:
        texts = chunk.dictionary.to_pylist()
        found += [None if at is None else texts[at] for at in chunk.indices.to_pylist()]
    return found


def shown_step(step: int | None, ordinal: int | None) -> int:
    """The step a tracker shows; a record without a step is counted by its ordinal."""
    return step if step is not None else ordinal or 0


def place(table: str, row: dict[str, Any]) -> str:
    """Where a row is within its writer, readable and unique in its table: the seq, and the key where a record has several."""
    if table == "metrics":
        return f"{row['seq']}/{row['key']}"
    return f"{row['seq']}/{row['kind']}" if table == "events" else str(row["seq"])
