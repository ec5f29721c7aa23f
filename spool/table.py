"""Records become rows: the long, typed Arrow tables that segments hold and readers return. Pure but for pyarrow.

Arrays are built from buffers, never with `pa.array`: that imports pandas where it is installed, 0.36 s and 40 MB in every
sealing process (measured, `docs/decisions/0001-journal-and-parquet.md`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
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
MARKS = {
    "metrics": (b'"metrics"',),
    "generations": (b'"generation"',),
    "spans": (b'"span"',),
    "events": (b'"event"', b'"replaced"'),
}
"""What the line of a record with rows of the table holds: who wants one table need not decode the lines of the others."""
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
        for name, columns in _columns(record):
            builder = builders.get(name)
            if builder is not None:
                builder.add(record, columns)
                if builder.rows >= max_rows or builder.text_bytes >= MAX_TEXT_BYTES:
                    yield name, builder.take()
    for name, builder in builders.items():
        if builder.rows:
            yield name, builder.take()


class _Repeated(NamedTuple):
    """One value for all rows of a record."""

    value: Any
    times: int


_Values = Sequence[Any] | _Repeated


def _columns(record: dict[str, Any]) -> Iterator[tuple[str, Sequence[_Values]]]:
    """The rows of a record, per table, as its columns in the order of `format.TABLES`."""
    if "metrics" in record:
        yield "metrics", _metrics(record)
    elif "generation" in record:
        yield "generations", [(value,) for value in _generation(record["generation"])]
    elif "span" in record:
        yield "spans", [(value,) for value in _span(record["span"])]
    elif "event" in record:
        yield "events", [(record["event"],), (format.json_text(record["body"]),)]
    if record.get("replaced"):
        yield "events", [("replaced",), (format.json_text({"count": record["replaced"]}),)]


_PLAIN = {float: "float", int: "int", bool: "bool"}
"""The kinds of what `number` only widens to a double, which `array` does too, 50 at a time."""


def _metrics(record: dict[str, Any]) -> Sequence[_Values]:
    stored = record["metrics"]
    count = len(stored)
    types = list(map(type, stored.values()))
    only_floats = types.count(float) == count
    if (only_floats or _PLAIN.keys() >= set(types)) and "decimals" not in record and "texts" not in record:
        kinds = _Repeated("float", count) if only_floats else [_PLAIN[one] for one in types]
        return [list(stored), list(stored.values()), _Repeated(None, count), kinds]
    rows = [(key, *number(value)) for key, value in stored.items()]
    rows += [(key, _nearest(text), text, "decimal") for key, text in record.get("decimals", {}).items()]
    rows += [(key, None, text, "text") for key, text in record.get("texts", {}).items()]
    return list(zip(*rows, strict=True))


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
    """Columns of one table, filled record by record."""

    def __init__(self, table: str, identity: Identity) -> None:
        self._schema = schema(table)
        self._identity = identity
        self._start()

    def _start(self) -> None:
        self.rows = 0
        self._columns = [_COLUMNS[kind]() for kind in self._kinds()]
        self._common, self._own = self._columns[: len(format.COMMON)], self._columns[len(format.COMMON) :]
        self._counts: list[int] = []
        self._positions: list[tuple[Any, ...]] = []
        self._texts = [column for column in self._own if isinstance(column, (_Strings, _Dictionary))]

    def _kinds(self) -> list[str]:
        names = {one: kind for kind, one in _TYPES.items()}
        return [names[one.type] for one in self._schema]

    @property
    def text_bytes(self) -> int:
        return sum(column.size_bytes for column in self._texts)

    def add(self, record: dict[str, Any], columns: Sequence[_Values]) -> None:
        count = len(columns[0]) if columns else 0
        if not count:
            return
        self._counts.append(count)
        self._positions.append((record["seq"], record["ts"], record.get("step"), record.get("ordinal")))
        for column, values in zip(self._own, columns, strict=True):
            if isinstance(values, _Repeated):
                column.repeat(*values)
            else:
                column.extend(values)
        self.rows += count

    def take(self) -> pa.RecordBatch:
        for column, value in zip(self._common, self._identity, strict=False):
            column.repeat(value, self.rows)
        for column, values in zip(self._common[len(self._identity) :], zip(*self._positions, strict=True), strict=True):
            if values.count(values[0]) == len(values):
                column.repeat(values[0], self.rows)
            else:
                for value, count in zip(values, self._counts, strict=True):
                    column.repeat(value, count)
        arrays = [column.array(field.type) for column, field in zip(self._columns, self._schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._start()
        return batch


# Columns. `_known` has a digit for each value: 1, or 0 where it is null; `int` makes bits of them at the speed of C.


class _Fixed:
    """int64, double or timestamp, as machine values."""

    code = "q"

    def __init__(self) -> None:
        self._values: array[Any] = array(self.code)
        self._known = bytearray()

    def extend(self, values: Sequence[Any]) -> None:
        try:
            self._values.extend(array(self.code, values))
            self._known += b"1" * len(values)
        except TypeError:  # a null is among them
            self._values.extend(array(self.code, [0 if value is None else value for value in values]))
            self._known += b"".join([b"0" if value is None else b"1" for value in values])

    def repeat(self, value: Any, count: int) -> None:
        if value is None:
            self._values.extend(array(self.code, [0]) * count)
            self._known += b"0" * count
        else:
            self._values.extend(array(self.code, [value]) * count)
            self._known += b"1" * count

    def array(self, kind: pa.DataType) -> pa.Array:
        return _array(kind, self._known, pa.py_buffer(self._values))


class _Doubles(_Fixed):
    code = "d"


class _Bools(_Fixed):
    code = "b"

    def array(self, kind: pa.DataType) -> pa.Array:
        return _array(kind, self._known, _bits(b"".join([b"1" if value else b"0" for value in self._values])))


class _Strings:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._offsets = array("i", [0])
        self._known = bytearray()
        self.size_bytes = 0

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            if value is None:
                self._known += b"0"
            else:
                piece = value.encode()
                self._pieces.append(piece)
                self.size_bytes += len(piece)
                self._known += b"1"
            self._offsets.append(self.size_bytes)

    def repeat(self, value: Any, count: int) -> None:
        if value is None:
            self._offsets.extend(array("i", [self.size_bytes]) * count)
            self._known += b"0" * count
        else:
            self.extend([value] * count)

    def array(self, kind: pa.DataType) -> pa.Array:
        return _array(kind, self._known, pa.py_buffer(self._offsets), pa.py_buffer(b"".join(self._pieces)))


class _Dictionary:
    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self.size_bytes = 0
        self._indices = array("i")
        self._known = bytearray()
        self._last: Sequence[Any] = ()
        self._last_indices = array("i")

    def extend(self, values: Sequence[Any]) -> None:
        if values != self._last:  # mostly the keys are those of the record before
            try:
                self._last_indices = array("i", [*map(self._places.__getitem__, values)])
                self._last = values
            except KeyError:  # a null, or a word not met before
                for value in values:
                    self.repeat(value, 1)
                return
        self._indices.extend(self._last_indices)
        self._known += b"1" * len(values)

    def repeat(self, value: Any, count: int) -> None:
        if value is not None and value not in self._places:
            self._places[value] = len(self._places)
            self.size_bytes += len(value.encode())
        place = 0 if value is None else self._places[value]
        self._indices.extend(array("i", [place]) * count)
        self._known += (b"0" if value is None else b"1") * count

    def array(self, kind: pa.DataType) -> pa.Array:
        words = _Strings()
        words.extend(self._places or [""])
        indices = _array(kind.index_type, self._known, pa.py_buffer(self._indices))
        return pa.DictionaryArray.from_arrays(indices, words.array(kind.value_type))


_COLUMNS: dict[str, Any] = {
    "dictionary": _Dictionary,
    "string": _Strings,
    "int64": _Fixed,
    "timestamp": _Fixed,
    "double": _Doubles,
    "bool": _Bools,
}


def _array(kind: pa.DataType, known: bytearray, *buffers: pa.Buffer) -> pa.Array:
    nulls = known.count(b"0")
    return pa.Array.from_buffers(kind, len(known), [_bits(known) if nulls else None, *buffers], nulls)


def _bits(digits: bytes | bytearray) -> pa.Buffer:
    """Arrow's bitmap of a text of 0 and 1: the first digit is the lowest bit."""
    return pa.py_buffer(int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little"))
