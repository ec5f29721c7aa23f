"""Spans on their way: raw rows come as a start and, later, an end; destinations get what has ended.

A span that its process left open is closed by the reader, at the process's last sign of life, as an error that says so.
"""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sync.batch import plain

MESSAGE = "the process ended before the span did"


class OpenSpans:
    """Pairs starts and ends of one writer, batch by batch, in seq order."""

    def __init__(self) -> None:
        self._open: dict[str, pa.Table] = {}
        self._schema: pa.Schema | None = None

    def __len__(self) -> int:
        return len(self._open)

    def take(self, rows: pa.Table) -> pa.Table:
        """The rows that have ended; the others are remembered until their end comes."""
        self._schema = rows.schema
        has_ended = pc.is_valid(rows["end"])
        for at, (span_id, ended) in enumerate(zip(rows["span_id"].to_pylist(), has_ended.to_pylist(), strict=True)):
            if ended:
                self._open.pop(span_id, None)
            else:
                self._open[span_id] = rows.slice(at, 1)
        return rows.filter(has_ended)

    def closed(self, last_ns: int) -> pa.Table:
        """The open spans, closed at `last_ns`: the last time the writer is known to have lived."""
        if self._schema is None or not self._open:
            return pa.table({"seq": pa.array([], pa.int64())})
        closed = [_closed(plain(row).to_pylist()[0], last_ns) for row in self._open.values()]
        return pa.Table.from_pylist(closed, schema=plain(self._schema.empty_table()).schema)


def _closed(row: dict[str, Any], last_ns: int) -> dict[str, Any]:
    attributes = json.loads(row["attributes"]) if row["attributes"] else {}
    row["attributes"] = json.dumps(attributes | {"spool.open": True})
    return row | {"end": max(last_ns, row["start"]), "status": "ERROR", "message": row["message"] or MESSAGE}
