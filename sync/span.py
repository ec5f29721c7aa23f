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
        self._open: dict[str, dict[str, Any]] = {}
        self._schema = pa.schema([("seq", pa.int64())])

    def __len__(self) -> int:
        return len(self._open)

    def take(self, rows: pa.Table) -> pa.Table:
        """The rows that have ended; the others are remembered until their end comes."""
        self._schema = plain(rows.schema.empty_table()).schema
        has_ended = pc.is_valid(rows["end"])
        opened: dict[str, int] = {}
        for at, (span_id, ended) in enumerate(zip(rows["span_id"].to_pylist(), has_ended.to_pylist(), strict=True)):
            if ended:
                opened.pop(span_id, None)
                self._open.pop(span_id, None)
            else:
                opened[span_id] = at
        starts = plain(rows.take(pa.array(opened.values(), pa.int64()))).to_pylist()
        self._open |= dict(zip(opened, starts, strict=True))
        return rows.filter(has_ended)

    def closed(self, last_ns: int) -> pa.Table:
        """The open spans, closed at `last_ns`: the last time the writer is known to have lived."""
        return pa.Table.from_pylist([_closed(row, last_ns) for row in self._open.values()], schema=self._schema)


def _closed(row: dict[str, Any], last_ns: int) -> dict[str, Any]:
    attributes = json.loads(row["attributes"]) if row["attributes"] else {}
    end = {"end": max(last_ns, row["start"]), "status": "ERROR", "message": row["message"] or MESSAGE}
    return row | end | {"attributes": json.dumps(attributes | {"spool.open": True})}
