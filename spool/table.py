"""Records become rows: the long, typed Arrow tables that segments hold and readers return. Pure but for pyarrow.

Arrays are built from buffers, never with `pa.array`: that imports pandas where it is installed, 0.36 s and 40 MB in every
sealing process (measured, `docs/decisions/0001-journal-and-parquet.md`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa

from spool import format

MAX_ROWS = 1 << 18
MAX_TEXT_BYTES = 64 << 20
"""A batch is closed at this much text: readers stay flat, and string offsets stay far from 2 GiB."""

_TYPES = {
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "string": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("ns", tz="UTC"),
    "bool": pa.bool_(),
}
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Identity(NamedTuple):
    """Whose records these are; the first columns of every row."""

    run_id: str
    writer_id: str
    attempt: str


def schema(table: str) -> pa.Schema:
    return pa.schema([(name, _TYPES[kind]) for name, kind in format.COMMON + format.TABLES[table]])


def number(stored: Any) -> tuple[float | None, str | None, str]:
    """(value, exact, kind) of an entry of the metrics map."""
    if type(stored) is float:
        return stored, None, "float"
    if type(stored) is bool:
        return float(stored), None, "bool"
    if type(stored) is int:
        return float(stored), None, "int"
    if stored is None:
        return None, None, "null"
    if stored in _WORDS:
        return _WORDS[stored], None, "float"
    return _nearest(stored), stored, "int"


def _nearest(digits: str) -> float:
    """The double nearest to a decimal text; infinity beyond the largest, as IEEE 754 rounds."""
    return float(Decimal(digits)) if len(digits) < 5000 else float(digits)


def batches(
    records: Iterable[dict[str, Any]], identity: Identity, tables: Iterable[str], max_rows: int = MAX_ROWS
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(table, rows) in record order, whole records, for the tables asked for; each at most about `max_rows` rows."""
    builders = {name: _Builder(name, identity) for name in tables}
    for record in records:
        for name, rows in _rows(record):
            builder = builders.get(name)
            if builder is not None:
                builder.add(record, rows)
                if builder.rows >= max_rows or builder.text_bytes >= MAX_TEXT_BYTES:
                    yield name, builder.take()
    for name, builder in builders.items():
        if builder.rows:
            yield name, builder.take()


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """The rows of a record, per table: values in the order of `format.TABLES`."""
    if "metrics" in record:
        rows = [(key, *number(stored)) for key, stored in record["metrics"].items()]
        rows += [(key, _nearest(text), text, "decimal") for key, text in record.get("decimals", {}).items()]
        rows += [(key, None, text, "text") for key, text in record.get("texts", {}).items()]
        yield "metrics", rows
    elif "generation" in record:
        yield "generations", [_generation(record["generation"])]
    elif "span" in record:
        yield "spans", [_span(record["span"])]
    elif "event" in record:
        yield "events", [(record["event"], format.json_text(record["body"]))]
    if record.get("replaced"):
        yield "events", [("replaced", format.json_text({"count": record["replaced"]}))]


def _generation(body: dict[str, Any]) -> tuple[Any, ...]:
    score = body.get("score")
    return (
        body["split"],
        body["index"],
        _text(body.get("input")),
        _text(body.get("output")),
        _text(body.get("label")),
        None if score is None else number(score)[0],
        _json(body.get("extra")),
    )


def _span(body: dict[str, Any]) -> tuple[Any, ...]:
    return (
        body["trace_id"],
        body["span_id"],
        body.get("parent_id"),
        body["name"],
        body["type"],
        body["start"],
        body.get("end"),
        body["status"],
        body.get("message"),
        _json(body.get("inputs")),
        _json(body.get("outputs")),
        _json(body.get("attributes")),
        body.get("sample_index"),
        body.get("rollout_n"),
        body.get("validate"),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) or value is None else format.json_text(value)


def _json(value: object) -> str | None:
    return None if value is None else format.json_text(value)


class _Builder:
    """Columns of one table, filled row by row."""

    def __init__(self, table: str, identity: Identity) -> None:
        self._schema = schema(table)
        self._identity = identity
        self._start()

    def _start(self) -> None:
        self.rows = 0
        self._columns = [_COLUMNS[kind]() for kind in self._kinds()]
        self._common, self._own = self._columns[:7], self._columns[7:]

    def _kinds(self) -> list[str]:
        names = {one: kind for kind, one in _TYPES.items()}
        return [names[one.type] for one in self._schema]

    @property
    def text_bytes(self) -> int:
        return sum(column.size_bytes for column in self._own if isinstance(column, _Strings))

    def add(self, record: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
        count = len(rows)
        if not count:
            return
        common = (*self._identity, record["seq"], record["ts"], record.get("step"), record.get("ordinal"))
        for column, value in zip(self._common, common, strict=True):
            column.extend([value] * count)
        for column, values in zip(self._own, zip(*rows, strict=True), strict=True):
            column.extend(values)
        self.rows += count

    def take(self) -> pa.RecordBatch:
        arrays = [column.array(field.type) for column, field in zip(self._columns, self._schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._start()
        return batch


class _Fixed:
    """int64, double or timestamp, as machine values with a list of the nulls."""

    code = "q"

    def __init__(self) -> None:
        self._values: array[Any] = array(self.code)
        self._nulls: list[int] = []

    def extend(self, values: Any) -> None:
        if None in values:
            base = len(self._values)
            self._nulls += [base + at for at, value in enumerate(values) if value is None]
            values = [0 if value is None else value for value in values]
        self._values.extend(values)

    def array(self, kind: pa.DataType) -> pa.Array:
        validity = _bitmap(len(self._values), self._nulls)
        return pa.Array.from_buffers(kind, len(self._values), [validity, pa.py_buffer(self._values)], len(self._nulls))


class _Doubles(_Fixed):
    code = "d"


class _Bools(_Fixed):
    code = "b"

    def array(self, kind: pa.DataType) -> pa.Array:
        zeros = [at for at, value in enumerate(self._values) if not value]
        bits = _bitmap(len(self._values), zeros) or pa.py_buffer(b"\xff" * ((len(self._values) + 7) // 8))
        validity = _bitmap(len(self._values), self._nulls)
        return pa.Array.from_buffers(kind, len(self._values), [validity, bits], len(self._nulls))


class _Strings:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._offsets = array("i", [0])
        self._nulls: list[int] = []
        self.size_bytes = 0

    def extend(self, values: Any) -> None:
        for value in values:
            if value is None:
                self._nulls.append(len(self._offsets) - 1)
            else:
                piece = value.encode()
                self._pieces.append(piece)
                self.size_bytes += len(piece)
            self._offsets.append(self.size_bytes)

    def array(self, kind: pa.DataType) -> pa.Array:
        count = len(self._offsets) - 1
        data = pa.py_buffer(b"".join(self._pieces))
        return pa.Array.from_buffers(
            kind, count, [_bitmap(count, self._nulls), pa.py_buffer(self._offsets), data], len(self._nulls)
        )


class _Dictionary:
    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._indices = array("i")
        self._nulls: list[int] = []

    def extend(self, values: Any) -> None:
        places = self._places
        for value in values:
            if value is None:
                self._nulls.append(len(self._indices))
                self._indices.append(0)
            else:
                self._indices.append(places.setdefault(value, len(places)))

    def array(self, kind: pa.DataType) -> pa.Array:
        words = _Strings()
        words.extend(self._places or [""])
        count = len(self._indices)
        validity = _bitmap(count, self._nulls)
        indices = pa.Array.from_buffers(
            kind.index_type, count, [validity, pa.py_buffer(self._indices)], len(self._nulls)
        )
        return pa.DictionaryArray.from_arrays(indices, words.array(kind.value_type))


_COLUMNS: dict[str, Any] = {
    "dictionary": _Dictionary,
    "string": _Strings,
    "int64": _Fixed,
    "timestamp": _Fixed,
    "double": _Doubles,
    "bool": _Bools,
}


def _bitmap(count: int, zeros: list[int]) -> pa.Buffer | None:
    """`count` bits, all one but for `zeros`; None when all are one."""
    if not zeros:
        return None
    bits = bytearray(b"\xff" * ((count + 7) // 8))
    for at in zeros:
        bits[at >> 3] &= ~(1 << (at & 7))
    return pa.py_buffer(bits)
