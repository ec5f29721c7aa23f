"""Rows become records again: what a journal held, from the segment it was sealed into, once the journal is gone.

Equal to the journal's records but for what rows do not keep: the checksum, a record without any row (an empty call), and
whether an input or output was JSON or the text of it.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import inf, isfinite, isnan
from operator import itemgetter
from typing import Any

import pyarrow as pa

from spool import format
from spool.segment import Segment

_BATCH_ROWS = 1 << 12
_JSON = ("inputs", "outputs", "attributes")


def records(segment: Segment, after_seq: int) -> Iterator[dict[str, Any]]:
    """The records with seq > after_seq, in seq order, from those tables whose files are intact."""
    streams = [_rows(segment, name, after_seq) for name in format.TABLES if segment.is_intact(name)]
    merged = heapq.merge(*streams, key=itemgetter("seq"))
    for _, rows in groupby(merged, key=itemgetter("seq")):
        yield _record(list(rows))


def _rows(segment: Segment, name: str, after_seq: int) -> Iterator[dict[str, Any]]:
    for batch in segment.batches(name, after_seq, _BATCH_ROWS):
        columns = [
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns
        ]
        for row in pa.table(columns, names=batch.column_names).to_pylist():
            yield {**row, "table": name}


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    record = {name: first[name] for name in ("seq", "ts", "step")}
    if first["ordinal"] is not None:
        record["ordinal"] = first["ordinal"]
    if first["table"] == "metrics":
        record |= _metrics([row for row in rows if row["table"] == "metrics"])
    elif first["table"] == "generations":
        record["generation"] = _generation(first)
    elif first["table"] == "spans":
        record["span"] = _span(first)
    for row in rows:
        if row["table"] == "events":
            body = format.load_json(row["body"].encode())
            record |= {"replaced": body["count"]} if row["kind"] == "replaced" else {"event": row["kind"], "body": body}
    return record


def _metrics(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {"metrics": {}, "decimals": {}, "texts": {}}
    for row in rows:
        if row["kind"] == "decimal":
            found["decimals"][row["key"]] = row["exact"]
        elif row["kind"] == "text":
            found["texts"][row["key"]] = row["exact"]
        else:
            found["metrics"][row["key"]] = _number(row)
    return {name: values for name, values in found.items() if values or name == "metrics"}


def _number(row: dict[str, Any]) -> Any:
    value = row["value"]
    if row["exact"] is not None or value is None:
        return row["exact"]
    if row["kind"] == "float":
        return _stored(value)
    return bool(value) if row["kind"] == "bool" else int(value)


def _stored(value: float) -> float | str:
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value == inf else "-Infinity"


def _own(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {column: row[column] for column, _ in format.TABLES[name] if row[column] is not None}


def _generation(row: dict[str, Any]) -> dict[str, Any]:
    body = _own(row, "generations")
    if "score" in body:
        body["score"] = _stored(body["score"])
    if "extra" in body:
        body["extra"] = format.load_json(body["extra"].encode())
    return body


def _span(row: dict[str, Any]) -> dict[str, Any]:
    body = _own(row, "spans")
    return body | {column: format.load_json(body[column].encode()) for column in _JSON if column in body}
