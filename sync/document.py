"""Documents: JSON tables (`{"columns": […], "data": [[…]]}`) for what a destination keeps as a file. Pure.

A document is a set of rows, each known by its writer, seq and (where a record has several) key or kind, so putting rows in
twice changes nothing, and two syncs that each bring half of a step's rows end in the whole table. Where a row belongs
depends on the row alone.
"""

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sync.batch import dicts, place, shown_step
from sync.name import folder_name

CHUNK = 10_000
"""Seqs per document of a writer's events and texts: what must be rewritten when one record is added stays bounded."""

COLUMNS = {
    "generations": ("step", "split", "index", "input", "output", "score", "label", "extra"),
    "metrics": ("key", "step", "exact", "value", "kind"),
    "events": ("kind", "step", "body"),
}
FOLDERS = {"generations": ("generations/",), "metrics": ("spool/metrics/",), "events": ("spool/events/", "histograms/")}
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_ORIGIN = ("ts_ns", "attempt", "writer_id", "seq")


def step_of(row: dict[str, Any]) -> int:
    """The step a tracker shows."""
    return shown_step(row["step"], row["ordinal"])


def path_of(table: str, row: dict[str, Any]) -> str:
    """The document a row belongs to."""
    if table == "generations":
        return f"generations/{folder_name(row['split'] or 'default')}/step_{step_of(row):06d}.json"
    if table == "events" and row["kind"] == "histogram":
        return f"histograms/step_{step_of(row):06d}.json"
    return f"spool/{table}/{row['writer_id']}/{row['seq'] // CHUNK:06d}.json"


def are_documented(table: str, rows: pa.Table) -> pa.Array:
    """Which of the rows need a document, as booleans. Of metrics those that a double cannot say: texts, nulls, decimals, large
    ints, infinities.
    """
    if table != "metrics":
        return pa.repeat(table in COLUMNS, rows.num_rows)
    value, exact = rows["value"], rows["exact"]
    return pc.or_(pc.is_valid(exact), pc.invert(pc.fill_null(pc.or_(pc.is_finite(value), pc.is_nan(value)), False)))


def documented(table: str, rows: pa.Table) -> list[dict[str, Any]]:
    """The rows that need a document."""
    return dicts(rows.filter(are_documented(table, rows)))


def add(content: bytes | None, table: str, rows: Iterable[dict[str, Any]]) -> bytes:
    """The document with these rows in it, whatever of them was there."""
    known = {} if content is None else _rows(content, table)
    for row in rows:
        entry = {column: _json_value(column, row[column]) for column in COLUMNS[table]}
        entry |= {"ts_ns": row["ts"], **{column: row[column] for column in _ORIGIN[1:]}}
        known[identity(table, entry)] = entry
    columns = (*COLUMNS[table], *_ORIGIN)
    ordered = sorted(known.items(), key=lambda item: (item[1]["writer_id"], item[1]["seq"], item[0]))
    data = [[entry.get(column) for column in columns] for _, entry in ordered]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False, allow_nan=False).encode()


def identities(content: bytes, table: str) -> set[str]:
    """Which rows a document holds; none when it is cut or was never one."""
    return set(_rows(content, table))


def identity(table: str, row: dict[str, Any]) -> str:
    return f"{row['writer_id']}/{place(table, row)}"


def _rows(content: bytes, table: str) -> dict[str, dict[str, Any]]:
    try:
        document = json.loads(content)
        entries = [dict(zip(document["columns"], values, strict=True)) for values in document["data"]]
        return {identity(table, entry): entry for entry in entries}
    except (ValueError, KeyError, TypeError):  # cut by a kill, or edited by hand: its rows are delivered again
        return {}


def _json_value(column: str, value: Any) -> Any:
    if column in ("extra", "body") and value is not None:
        return json.loads(value)
    if isinstance(value, float) and not isfinite(value):
        return _WORDS[str(value)]
    return value
