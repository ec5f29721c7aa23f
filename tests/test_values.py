"""The specification of values: what each becomes in the journal line, in the sealed Parquet file, and for a reader.

The journal is decoded with the standard library and Parquet read with pyarrow alone, so that neither trusts our own readers.
"""

import collections
import enum
import json
import math
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from journals import begin, begin_without_thread, journal_path, own_writer, reader
from omegaconf import OmegaConf

import spool
from spool import format, seal, table
from spool.record import step_number
from spool.run import Run

# --- the three places

NOT_COMPARED = ("run_id", "writer_id", "attempt", "ts")


def plain(read: pa.Table) -> list[dict[str, Any]]:
    """Rows without identity and time of the call; times of spans as ns."""
    kept = read.drop_columns(list(NOT_COMPARED))
    for at, field in enumerate(kept.schema):
        if pa.types.is_timestamp(field.type):
            kept = kept.set_column(at, field.name, kept.column(at).cast(pa.int64()))
    found: list[dict[str, Any]] = kept.to_pylist()
    return found


@dataclass
class Recorded:
    lines: list[dict[str, Any]]
    """The journal's records, the run's `attempt` event left out."""
    tables: dict[str, list[dict[str, Any]]]
    """What every reader hands out: pyarrow of the segment, ours of the live journal, ours of the segment."""
    stored: dict[str, list[dict[str, Any]]]
    """What pyarrow finds in the segment: two rows of an ended span, where readers hand out one."""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of each line what the call made of it: neither place nor time nor checksum."""
        return [
            {key: value for key, value in line.items() if key not in ("seq", "ts", "step", "ordinal", "crc")}
            for line in self.lines
        ]

    def columns(self, name: str, *columns: str) -> list[Any]:
        if len(columns) == 1:
            return [row[columns[0]] for row in self.tables[name]]
        return [tuple(row[column] for column in columns) for row in self.tables[name]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_bytes().split(b"\n")[1:-1]]
    return [line for line in found if line.get("event") != "attempt"]


def read_parquet(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {name: folder / f"{name}.parquet" for name in format.TABLES}
    stored = {name: plain(pq.read_table(path)) if path.exists() else [] for name, path in found.items()}
    stored["events"] = [row for row in stored["events"] if row["kind"] != "attempt"]
    return stored


def read_tables(run: Run) -> dict[str, list[dict[str, Any]]]:
    found = reader(run)
    tables = {name: plain(getattr(found, name)()) for name in format.TABLES}
    tables["events"] = [row for row in tables["events"] if row["kind"] != "attempt"]
    return tables


def recorded(run: Run) -> Recorded:
    """Read the live journal, seal it, remove it, and read the segment: all must tell the same to the last bit."""
    journal = journal_path(run)
    segment = journal.parent / "000001"
    assert not segment.exists()
    lines, live = read_lines(journal), read_tables(run)
    seal.seal(journal)
    journal.unlink()
    stored, sealed = read_parquet(segment), read_tables(run)
    last_states = {(row["trace_id"], row["span_id"]): row for row in stored["spans"]}
    assert repr({**stored, "spans": list(last_states.values())}) == repr(live)
    assert repr(sealed) == repr(live)
    assert not reader(run).damage()
    return Recorded(lines, live, stored)


def bits(value: Any) -> Any:
    """A value that compares equal only where every bit is: NaN with NaN, 0.0 not with -0.0, 1 not with 1.0 or True."""
    return struct.pack(">d", value) if type(value) is float else (type(value), value)


# --- values that are hard to take


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Word(str, enum.Enum):
    GOOD = "good"


@dataclass
class Point:
    x: int = 1


class Model:
    def model_dump(self) -> dict[str, float]:
        return {"y": math.nan}


def fail(*_: object) -> Any:
    raise KeyError("no")


class RaisingFloat:
    __float__ = fail

    def __repr__(self) -> str:
        return "RaisingFloat!"


class RaisingRepr:
    __repr__ = fail


class RaisingAll:
    __float__ = __repr__ = __getattr__ = __eq__ = __bool__ = __len__ = __iter__ = fail
    item = tolist = model_dump = fail
    __hash__ = object.__hash__


class RaisingType(type):
    __getattr__ = fail


class OfRaisingType(metaclass=RaisingType):
    def __repr__(self) -> str:
        return "OfRaisingType!"


class RaisingInt(int):
    __int__ = __index__ = __float__ = __repr__ = __str__ = __le__ = fail


class RaisingDouble(float):
    __float__ = __repr__ = __sub__ = __eq__ = fail
    __hash__ = float.__hash__


class RaisingStr(str):
    __slots__ = ()
    __str__ = __repr__ = isascii = encode = fail


class RaisingDecimal(Decimal):
    __str__ = __repr__ = is_finite = is_snan = __float__ = fail


class Pretender:
    """What a lazy proxy or a mock does: says that it is of a class that it is not."""

    def __init__(self, claimed: type) -> None:
        self._claimed = claimed

    @property
    def __class__(self) -> Any:
        return self._claimed

    def __repr__(self) -> str:
        return "Pretender!"


class Undecided:
    __class__ = property(fail)  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Undecided!"


class Broken(Mapping[str, Any]):
    """A mapping of which one value cannot be read, as OmegaConf's with a mandatory value that is missing."""

    def __iter__(self) -> Iterator[str]:
        return iter(("good", "bad"))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: str) -> float:
        return 1.5 if key == "good" else fail()


UNREADABLE = "<Broken value that cannot be read>"
SURROGATES = "a\ud800b\udc80c"
PAIR = "\ud83d\ude00"
MARKS = "\0\u2028\u202e\u200f\u200e😀 שלום\r\n\t\x7f\x85\ufeff\ufffe"

METRICS, DECIMALS, TEXTS = "metrics", "decimals", "texts"


def text(shown: str) -> tuple[str, str, tuple[None, str, str]]:
    return TEXTS, shown, (None, shown, "text")


def floating(value: float) -> tuple[str, float, tuple[float, None, str]]:
    return METRICS, value, (value, None, "float")


def whole(value: int) -> tuple[str, int, tuple[float, None, str]]:
    return METRICS, value, (float(value), None, "int")


def digits(value: int) -> tuple[str, str, tuple[float, str, str]]:
    return METRICS, str(value), (float(value), str(value), "int")


NAN = (METRICS, "NaN", (math.nan, None, "float"))
INFINITY = (METRICS, "Infinity", (math.inf, None, "float"))

VALUES: dict[str, tuple[Any, str, Any, tuple[float | None, str | None, str]]] = {
    # name: logged, then the map of the journal line, the entry there, and (value, exact, kind) of the row
    "0.1": (0.1, *floating(0.1)),
    "nan": (math.nan, *NAN),
    "inf": (math.inf, *INFINITY),
    "-inf": (-math.inf, METRICS, "-Infinity", (-math.inf, None, "float")),
    "-0.0": (-0.0, *floating(-0.0)),
    "5e-324": (5e-324, *floating(5e-324)),
    "largest": (1.7976931348623157e308, *floating(1.7976931348623157e308)),
    "7": (7, *whole(7)),
    "2**53": (2**53, *whole(2**53)),
    "2**53-1": (2**53 - 1, *whole(2**53 - 1)),
    "2**53+1": (2**53 + 1, METRICS, "9007199254740993", (9007199254740992.0, "9007199254740993", "int")),
    "-2**53-1": (-(2**53) - 1, METRICS, "-9007199254740993", (-9007199254740992.0, "-9007199254740993", "int")),
    "2**63-1": (2**63 - 1, METRICS, "9223372036854775807", (2.0**63, "9223372036854775807", "int")),
    "2**64": (2**64, METRICS, "18446744073709551616", (2.0**64, "18446744073709551616", "int")),
    "2**70": (2**70, METRICS, "1180591620717411303424", (2.0**70, "1180591620717411303424", "int")),
    "-2**70": (-(2**70), METRICS, "-1180591620717411303424", (-(2.0**70), "-1180591620717411303424", "int")),
    "10**400": (10**400, METRICS, "1" + "0" * 400, (math.inf, "1" + "0" * 400, "int")),
    "10**5000": (10**5000, METRICS, "1" + "0" * 5000, (math.inf, "1" + "0" * 5000, "int")),
    "True": (True, METRICS, True, (1.0, None, "bool")),
    "False": (False, METRICS, False, (0.0, None, "bool")),
    "None": (None, METRICS, None, (None, None, "null")),
    "Decimal": (Decimal("0.10"), DECIMALS, "0.10", (0.1, "0.10", "decimal")),
    "Decimal of 30 digits": (Decimal("1." + "3" * 29), DECIMALS, "1." + "3" * 29, (4 / 3, "1." + "3" * 29, "decimal")),
    "Decimal -0": (Decimal("-0"), DECIMALS, "-0", (-0.0, "-0", "decimal")),
    "Decimal 1E+400": (Decimal("1E+400"), DECIMALS, "1E+400", (math.inf, "1E+400", "decimal")),
    "Decimal NaN": (Decimal("NaN"), *NAN),
    "Decimal sNaN": (Decimal("sNaN"), *NAN),
    "Decimal Infinity": (Decimal("Infinity"), *INFINITY),
    "np.float64": (np.float64(0.1), *floating(0.1)),
    "np.float32": (np.float32(0.1), *floating(0.10000000149011612)),
    "np.float16": (np.float16(0.1), *floating(0.0999755859375)),
    "np.float32 nan": (np.float32("nan"), *NAN),
    "np.float16 inf": (np.float16("inf"), *INFINITY),
    "np.int8": (np.int8(-8), *whole(-8)),
    "np.int64": (np.int64(2**62), *digits(2**62)),
    "np.uint64": (np.uint64(2**64 - 1), METRICS, "18446744073709551615", (2.0**64, "18446744073709551615", "int")),
    "np.bool": (np.bool_(True), METRICS, True, (1.0, None, "bool")),
    "np.complex64": (np.complex64(1j), *text(repr(np.complex64(1j)))),
    "np.str": (np.str_("good"), *text("good")),
    "0-d array": (np.array(0.25), *floating(0.25)),
    "0-d array of float32": (np.array(0.1, dtype=np.float32), *floating(0.10000000149011612)),
    "0-d array of int64": (np.array(2**62), *digits(2**62)),
    "0-d array of bool": (np.array(False), METRICS, False, (0.0, None, "bool")),
    "0-d array of text": (np.array("good"), *text("good")),
    "1-element array": (np.array([[3]]), *whole(3)),
    "1-element array nan": (np.array([math.nan]), *NAN),
    "2-element array": (np.array([1.5, 2.0]), *text("array([1.5, 2. ])")),
    "empty array": (np.array([]), *text("array([], dtype=float64)")),
    "masked": (np.ma.masked, *text("masked")),
    "array without mask": (np.ma.array([1.5], mask=[False]), *floating(1.5)),
    "tensor": (torch.tensor(0.1), *floating(0.10000000149011612)),
    "tensor bf16": (torch.tensor(0.1, dtype=torch.bfloat16), *floating(0.10009765625)),
    "tensor with grad": (torch.tensor(1.5, requires_grad=True), *floating(1.5)),
    "tensor bf16 with grad": (torch.tensor(0.1, dtype=torch.bfloat16, requires_grad=True), *floating(0.10009765625)),
    "tensor of a graph": (torch.tensor(1.5, requires_grad=True) * 2, *floating(3.0)),
    "parameter": (torch.nn.Parameter(torch.tensor(1.5)), *floating(1.5)),
    "tensor of int64": (torch.tensor(2**62), *digits(2**62)),
    "tensor of bool": (torch.tensor(True), METRICS, True, (1.0, None, "bool")),
    "tensor nan": (torch.tensor(math.nan), *NAN),
    "1-element tensor": (torch.tensor([2]), *whole(2)),
    "2-element tensor": (torch.ones(2), *text("tensor([1., 1.])")),
    "tensor on meta": (torch.empty((), device="meta"), *text("tensor(..., device='meta', size=())")),
    "str": ("good", *text("good")),
    "empty str": ("", *text("")),
    "str NaN": ("NaN", *text("NaN")),
    "str of digits": ("9007199254740993", *text("9007199254740993")),
    "str with marks": (MARKS, *text(MARKS)),
    "str with lone surrogates": (SURROGATES, *text("a\ufffdb\ufffdc")),
    "str with a surrogate pair": (PAIR, *text("\ufffd\ufffd")),
    "bytes": (b"\xff", *text("b'\\xff'")),
    "datetime": (
        datetime(2026, 1, 2, tzinfo=timezone.utc),
        *text("datetime.datetime(2026, 1, 2, 0, 0, tzinfo=datetime.timezone.utc)"),
    ),
    "Enum": (Colour.RED, *text("<Colour.RED: 1>")),
    "IntEnum": (Level.HIGH, *whole(3)),
    "str Enum": (Word.GOOD, *text("good")),
    "dataclass": (Point(), *text("Point(x=1)")),
    "complex": (1j, *text("1j")),
    "list": ([1, 2], *text("[1, 2]")),
    "empty dict": ({}, *text("{}")),
    "long repr": (b"x" * 20_000, *text("b'" + "x" * 9_998 + "… (20003 characters)")),
    "raising __float__": (RaisingFloat(), *text("RaisingFloat!")),
    "raising repr": (RaisingRepr(), *text("<RaisingRepr whose repr fails>")),
    "raising everything": (RaisingAll(), *text("<RaisingAll whose repr fails>")),
    "raising type": (OfRaisingType(), *text("OfRaisingType!")),
    "raising int": (RaisingInt(3), *whole(3)),
    "raising float": (RaisingDouble(1.5), *floating(1.5)),
    "raising str": (RaisingStr("good"), *text("good")),
    "raising Decimal": (RaisingDecimal("0.10"), DECIMALS, "0.10", (0.1, "0.10", "decimal")),
    "pretends to be a bool": (Pretender(bool), *text("Pretender!")),
    "pretends to be an int": (Pretender(int), *text("Pretender!")),
    "pretends to be a float": (Pretender(float), *text("Pretender!")),
    "pretends to be a str": (Pretender(str), *text("Pretender!")),
    "pretends to be a Decimal": (Pretender(Decimal), *text("Pretender!")),
    "pretends to be a dict": (Pretender(dict), *text("Pretender!")),
    "class that raises": (Undecided(), *text("Undecided!")),
}


@pytest.fixture(scope="module")
def all_values(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = begin_without_thread(tmp_path_factory.mktemp("values"), durability="os")
    for name, (value, *_) in VALUES.items():
        run.log({name: value}, step=1)
    return recorded(run)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_exact_in_journal_parquet_and_reader(all_values, name):
    _, where, entry, row = VALUES[name]
    at = list(VALUES).index(name)
    line = all_values.lines[at]
    assert (line["seq"], line["step"]) == (at + 2, 1)
    assert {kind: line[kind] for kind in (METRICS, DECIMALS, TEXTS) if line.get(kind)} == {
        where: {name: line[where][name]}
    }
    assert bits(line[where][name]) == bits(entry)
    stored = all_values.tables["metrics"][at]
    assert (stored["seq"], stored["key"], stored["exact"], stored["kind"]) == (at + 2, name, *row[1:])
    assert bits(stored["value"]) == bits(row[0])


def test_a_value_beside_others_is_what_it_is_alone(tmp_path):
    run = begin_without_thread(tmp_path, durability="os")
    for name, (value, *_) in VALUES.items():
        run.log({"before": 0.5, name: value, "after": np.float32(0.5), "text": "x"}, step=1)
    found = recorded(run)
    for at, (name, (_, where, entry, row)) in enumerate(VALUES.items()):
        assert bits(found.lines[at][where][name]) == bits(entry)
        rows = {one["key"]: one for one in found.tables["metrics"] if one["seq"] == at + 2}
        assert {key: bits(one["value"]) for key, one in rows.items()} == {
            "before": bits(0.5), name: bits(row[0]), "after": bits(0.5), "text": bits(None)
        }  # fmt: skip


def test_lone_surrogates_are_counted_in_the_record_and_told_by_an_event(all_values):
    replaced = {line["seq"]: line["replaced"] for line in all_values.lines if "replaced" in line}
    names = list(VALUES)
    expected = {
        names.index("str with lone surrogates") + 2: 2,
        names.index("str with a surrogate pair") + 2: 2,
    }
    assert replaced == expected
    events = [(row["seq"], row["body"]) for row in all_values.tables["events"] if row["kind"] == "replaced"]
    assert events == [(seq, f'{{"count":{count}}}') for seq, count in expected.items()]


def test_what_is_kept_as_its_repr_is_said_once_and_counted_in_the_finish(tmp_path, capfd):
    run = begin(tmp_path)
    run.log({"a": object(), "b": object()})
    run.log({"a": object()})
    run.log_generations(rows=[{"output": "x", 5: "a key is no value"}])
    run.finish()
    assert capfd.readouterr().err.count("is kept as its repr") == 1
    stored, lines = read_parquet(journal_path(run).parent / "000001"), read_lines(journal_path(run))
    for body in (lines[-1]["body"], json.loads(stored["events"][-1]["body"]), last_event(run)):
        assert body["counts"] == {"untaken": {"object": 3}}


def last_event(run: Run) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(read_tables(run)["events"][-1]["body"])
    return body


# --- keys

KEYS: dict[Any, str] = {
    # as logged: as stored
    "": "",
    "键/奖励": "键/奖励",
    "k" * 4000: "k" * 4000,
    "a\nb": "a\nb",
    "a\0b": "a\0b",
    'a"b\\': 'a"b\\',
    "a\u2028b\u202ec": "a\u2028b\u202ec",
    "😀": "😀",
    "\ud800x": "\ufffdx",
    "step": "step",
    "ts": "ts",
    "seq": "seq",
    "crc": "crc",
    "metrics": "metrics",
    '"},{"seq":9,': '"},{"seq":9,',
    ',"crc":"00000000"}\n{"seq":9,': ',"crc":"00000000"}\n{"seq":9,',
    "/": "/",
    RaisingStr("raising str"): "raising str",
    Word.GOOD: "good",
    np.str_("np.str"): "np.str",
    5: "5",
    1.5: "1.5",
    None: "None",
    True: "True",
    (1, 2): "(1, 2)",
    b"x": "b'x'",
    RaisingRepr(): "<RaisingRepr whose str fails>",
    Pretender(str): "Pretender!",
}


def name_of(key: object) -> str:
    return ascii(KEYS[key])[:30]


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = begin_without_thread(tmp_path_factory.mktemp("keys"), durability="os")
    for key in KEYS:
        run.log({key: 1.5, "other": "x"}, step=3)
    for key in KEYS:
        run.log({key: 1.5, "other": 2.5}, step=3)
    return recorded(run)


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_any_key_is_kept(all_keys, key):
    at, stored = list(KEYS).index(key), KEYS[key]
    replaced = {"replaced": 1} if "\ufffd" in stored else {}
    assert all_keys.bodies[at] == {"metrics": {stored: 1.5}, "texts": {"other": "x"}, **replaced}
    assert all_keys.bodies[at + len(KEYS)] == {"metrics": {stored: 1.5, "other": 2.5}, **replaced}
    columns = all_keys.columns("metrics", "seq", "step", "key", "value", "exact", "kind")
    assert [row for row in columns if row[0] in (at + 2, at + 2 + len(KEYS))] == [
        (at + 2, 3, stored, 1.5, None, "float"),
        (at + 2, 3, "other", None, "x", "text"),
        (at + 2 + len(KEYS), 3, stored, 1.5, None, "float"),
        (at + 2 + len(KEYS), 3, "other", 2.5, None, "float"),
    ]


def test_a_key_may_change_its_type(tmp_path):
    run = begin_without_thread(tmp_path)
    for value in (1, 1.5, "one", None, True, Decimal("0.10"), 2**64, [1]):
        run.log({"key": value}, step=0)
    found = recorded(run)
    assert found.bodies == [
        {"metrics": {"key": 1}},
        {"metrics": {"key": 1.5}},
        {"metrics": {}, "texts": {"key": "one"}},
        {"metrics": {"key": None}},
        {"metrics": {"key": True}},
        {"metrics": {}, "decimals": {"key": "0.10"}},
        {"metrics": {"key": "18446744073709551616"}},
        {"metrics": {}, "texts": {"key": "[1]"}},
    ]
    assert found.columns("metrics", "key", "value", "exact", "kind") == [
        ("key", 1.0, None, "int"),
        ("key", 1.5, None, "float"),
        ("key", None, "one", "text"),
        ("key", None, None, "null"),
        ("key", 1.0, None, "bool"),
        ("key", 0.1, "0.10", "decimal"),
        ("key", 2.0**64, "18446744073709551616", "int"),
        ("key", None, "[1]", "text"),
    ]


@pytest.mark.parametrize(
    ("value", "row"),
    [
        (1.5, (1.5, None, "float")),
        (Decimal(1), (1.0, "1", "decimal")),
        ("x", (None, "x", "text")),
        (math.nan, (math.nan, None, "float")),
    ],
    ids=["fast", "decimal", "text", "careful"],
)
def test_ten_thousand_keys_in_one_call_are_ten_records_in_sequence(tmp_path, value, row):
    run = begin_without_thread(tmp_path)
    run.log({f"key{at}": value for at in range(10_000)}, step=4)
    found = recorded(run)
    assert [line["seq"] for line in found.lines] == list(range(2, 12))
    assert {line["step"] for line in found.lines} == {4}
    maps = [{**body["metrics"], **body.get("decimals", {}), **body.get("texts", {})} for body in found.bodies]
    assert [list(one) for one in maps] == [[f"key{at + 1000 * part}" for at in range(1000)] for part in range(10)]
    assert found.columns("metrics", "seq", "key") == [(2 + at // 1000, f"key{at}") for at in range(10_000)]
    assert {repr(one) for one in found.columns("metrics", "value", "exact", "kind")} == {repr(row)}


def test_step_less_parts_of_one_call_share_their_ordinal(tmp_path):
    run = begin_without_thread(tmp_path)
    run.log({f"key{at}": 1.5 for at in range(1001)})
    run.log({"a": 1.5})
    found = recorded(run)
    assert [(line["seq"], line["step"], line["ordinal"]) for line in found.lines] == [
        (2, None, 1),
        (3, None, 1),
        (4, None, 2),
    ]
    assert sorted(set(found.columns("metrics", "seq", "step", "ordinal"))) == [(2, None, 1), (3, None, 1), (4, None, 2)]


def test_dicts_three_deep_are_joined_with_a_slash_and_a_collision_keeps_both(tmp_path):
    run = begin_without_thread(tmp_path)
    run.log({"a": 0.5, "a/b": 1.5, "x": 9}, step=1)
    run.log({"a/b": 1.5, "a": {"b": 2.5, "c": {"d": {"e": 3}}, 7: "x"}, "last": None}, step=1)
    found = recorded(run)
    assert found.bodies == [
        {"metrics": {"a": 0.5, "a/b": 1.5, "x": 9}},
        {"metrics": {"a/b": 1.5}},
        {"metrics": {"a/b": 2.5, "a/c/d/e": 3, "last": None}, "texts": {"a/7": "x"}},
    ]
    assert found.columns("metrics", "seq", "key", "value", "exact", "kind") == [
        (2, "a", 0.5, None, "float"),
        (2, "a/b", 1.5, None, "float"),
        (2, "x", 9.0, None, "int"),
        (3, "a/b", 1.5, None, "float"),
        (4, "a/b", 2.5, None, "float"),
        (4, "a/c/d/e", 3.0, None, "int"),
        (4, "last", None, None, "null"),
        (4, "a/7", None, "x", "text"),
    ]


def test_metrics_whose_keys_become_one_text_are_all_kept(tmp_path):
    run = begin_without_thread(tmp_path)
    run.log({1: 1.5, "1": 2.5, chr(0xD800): 3.5, chr(0xDC00): 4.5}, step=1)
    found = recorded(run)
    assert found.columns("metrics", "seq", "key", "value") == [
        (2, "1", 1.5),
        (3, "1", 2.5),
        (3, "\ufffd", 3.5),
        (4, "\ufffd", 4.5),
    ]


@pytest.mark.parametrize(
    ("data", "metrics", "texts"),
    [
        (5, {"value": 5}, {}),
        (None, {"value": None}, {}),
        ("x", {}, {"value": "x"}),
        ([1.5], {}, {"value": "[1.5]"}),
        (np.float32(0.5), {"value": 0.5}, {}),
        (Undecided(), {}, {"value": "Undecided!"}),
        (Pretender(dict), {}, {"value": "Pretender!"}),
        (Broken(), {"good": 1.5}, {"bad": UNREADABLE}),
        ({"nested": Broken()}, {"nested/good": 1.5}, {"nested/bad": UNREADABLE}),
        (collections.OrderedDict(a=1.5), {"a": 1.5}, {}),
        (OmegaConf.create({"a": {"b": 1.5}}), {"a/b": 1.5}, {}),
        ({}, {}, {}),
    ],
    ids=["int", "None", "str", "list", "numpy", "undecided", "pretender", "broken", "nested broken", "ordered", "OmegaConf", "{}"],
)  # fmt: skip
def test_whatever_is_logged_is_a_record(tmp_path, data, metrics, texts):
    run = begin_without_thread(tmp_path)
    run.log(data, step=1)
    found = recorded(run)
    assert found.bodies == [{"metrics": metrics, **({"texts": texts} if texts else {})}]
    assert found.columns("metrics", "key") == [*metrics, *texts]


# --- steps

STEPS: dict[str, tuple[Any, int | None]] = {
    # name: given, stored. What is given and not stored is counted.
    "None": (None, None),
    "0": (0, 0),
    "1.0": (1.0, 1),
    "1.5": (1.5, None),
    "np.int64": (np.int64(5), 5),
    "np.int8": (np.int8(-5), -5),
    "np.float32": (np.float32(6.0), 6),
    "np.float64 6.5": (np.float64(6.5), None),
    "0-d array": (np.array(4), 4),
    "tensor": (torch.tensor(7), 7),
    "IntEnum": (Level.HIGH, 3),
    "-1": (-1, -1),
    "2**63-1": (2**63 - 1, 2**63 - 1),
    "np.int64 2**63-1": (np.int64(2**63 - 1), 2**63 - 1),
    "-2**63": (-(2**63), -(2**63)),
    "2**63": (2**63, None),
    "-2**63-1": (-(2**63) - 1, None),
    "np.uint64 2**63": (np.uint64(2**63), None),
    "float 2**63": (float(2**63), None),
    "nan": (math.nan, None),
    "inf": (math.inf, None),
    "True": (True, None),
    "str": ("5", None),
    "Decimal": (Decimal(5), None),
    "raising __float__": (RaisingFloat(), None),
    "raising int": (RaisingInt(5), 5),
    "raising everything": (RaisingAll(), None),
    "pretends to be an int": (Pretender(int), None),
    "class that raises": (Undecided(), None),
}


@pytest.fixture(scope="module")
def all_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, list[int]]:
    run = begin_without_thread(tmp_path_factory.mktemp("steps"), durability="os")
    counts = []
    for step, _ in STEPS.values():
        run.log({"a": 1.5}, step=step)
        counts.append(run._bad_steps)
    return recorded(run), counts


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_an_int64_or_null_and_counted(all_steps, name):
    step, stored = STEPS[name]
    at = list(STEPS).index(name)
    found, counts = all_steps
    line, row = found.lines[at], found.tables["metrics"][at]
    before = list(STEPS.values())[: at + 1]
    ordinal = sum(known is None for _, known in before) if stored is None else None
    assert step_number(step) == (stored, step is None or stored is not None)
    assert (line["seq"], line["step"], line.get("ordinal"), line["metrics"]) == (at + 2, stored, ordinal, {"a": 1.5})
    assert ("ordinal" in line) == (stored is None)
    assert (row["seq"], row["step"], row["ordinal"], row["value"]) == (at + 2, stored, ordinal, 1.5)
    assert counts[at] == sum(known is None and given is not None for given, known in before)


def test_steps_may_decrease_and_repeat_and_order_is_that_of_the_calls(tmp_path):
    run = begin_without_thread(tmp_path)
    steps = (5, 3, 3, -1, None, 2**63 - 1, None, 0)
    for step in steps:
        run.log({"a": 1.5}, step=step)
    found = recorded(run)
    ordinals = (None, None, None, None, 1, None, 2, None)
    assert [(line["step"], line.get("ordinal")) for line in found.lines] == list(zip(steps, ordinals, strict=True))
    assert found.columns("metrics", "step", "ordinal") == list(zip(steps, ordinals, strict=True))


# --- texts

BIG = (MARKS + "x" * 2000) * 24_600  # 50 MB of UTF-8


def log_metric(run: Run) -> None:
    run.log({"big": BIG, "a": 1.5}, step=1)


def log_generation(run: Run) -> None:
    run.log_generations(step=1, rows=[{"input": "q", "output": BIG}])


def log_span(run: Run) -> None:
    run.span("big", step=1, inputs={"q": BIG}).start()


@pytest.mark.parametrize(
    ("call", "in_line", "name", "in_row"),
    [
        (log_metric, lambda line: line["texts"]["big"], "metrics", lambda rows: rows[1]["exact"]),
        (log_generation, lambda line: line["generation"]["output"], "generations", lambda rows: rows[0]["output"]),
        (log_span, lambda line: line["span"]["inputs"]["q"], "spans", lambda rows: json.loads(rows[0]["inputs"])["q"]),
    ],
    ids=["metric", "generation", "span"],
)
def test_a_text_of_50_megabytes_is_whole(tmp_path, call, in_line, name, in_row):
    run = begin_without_thread(tmp_path, durability="os")
    call(run)
    run.log({"after": 1.5}, step=2)
    journal = journal_path(run)
    line, after = read_lines(journal)
    live = plain(getattr(reader(run), name)())
    seal.seal(journal)
    journal.unlink()
    stored = plain(pq.read_table(journal.parent / "000001" / f"{name}.parquet"))
    sealed = plain(getattr(reader(run), name)())
    for found in (in_line(line), in_row(live), in_row(stored), in_row(sealed)):
        assert len(found) == len(BIG)
        assert (found == BIG) is True  # no diff of 50 MB
    assert (after["seq"], after["metrics"]) == (3, {"after": 1.5})
    assert [row["value"] for row in plain(reader(run).metrics())][-1] == 1.5


TEXTS_IN_TREES = {
    "lone surrogates": (SURROGATES, "a\ufffdb\ufffdc", 2),
    "marks": (MARKS, MARKS, 0),
    "NUL": ("\0", "\0", 0),
    "U+2028": ("a\u2028b\u2029c", "a\u2028b\u2029c", 0),
    "emoji": ("👩‍👩‍👧 😀", "👩‍👩‍👧 😀", 0),
    "right to left": ("\u202eabc\u202c שלום \u2067x\u2069", "\u202eabc\u202c שלום \u2067x\u2069", 0),
    "a journal line": ('"}\n{"seq":9,"crc":"00000000"}', '"}\n{"seq":9,"crc":"00000000"}', 0),
}


@pytest.mark.parametrize("name", TEXTS_IN_TREES)
def test_a_text_is_exact_in_generations_spans_and_events(tmp_path, name):
    given, stored, replaced = TEXTS_IN_TREES[name]
    run = begin_without_thread(tmp_path)
    run.log_generations(step=1, split=given, rows=[{"input": given, "output": given, "label": given, "more": [given]}])
    run.span(given, given, inputs=[given], attributes={given: given}).start()
    run.tag(note=given)
    found = recorded(run)
    generation, span, tag = found.bodies
    assert generation["generation"] == {
        "split": stored, "index": 0, "input": stored, "output": stored, "label": stored, "extra": {"more": [stored]}
    }  # fmt: skip
    names = ("name", "type", "inputs", "attributes")
    assert [span["span"][key] for key in names] == [stored, stored, [stored], {stored: stored}]
    assert (tag["event"], tag["body"]) == ("tag", {"note": stored})
    assert [one.get("replaced", 0) for one in found.bodies] == [replaced * times for times in (5, 5, 1)]
    (row,) = found.tables["generations"]
    assert (row["split"], row["input"], row["output"], row["label"]) == (stored,) * 4
    assert json.loads(row["extra"]) == {"more": [stored]}
    (row,) = found.tables["spans"]
    assert (row["name"], row["type"], json.loads(row["inputs"])) == (stored, stored, [stored])
    assert json.loads(row["attributes"]) == {stored: stored}
    assert [json.loads(body) for kind, body in found.columns("events", "kind", "body") if kind == "tag"] == [
        {"note": stored}
    ]
    counts = [json.loads(body)["count"] for kind, body in found.columns("events", "kind", "body") if kind == "replaced"]
    assert counts == ([replaced * 5, replaced * 5, replaced] if replaced else [])


# --- trees: config, extra, inputs, outputs, attributes, tags

LOOP: list[Any] = [1]
LOOP.append(LOOP)

TREES: dict[str, tuple[Any, Any]] = {
    # name: given, as JSON
    "numbers": ([1, 1.5, -0.0, True, None], [1, 1.5, -0.0, True, None]),
    "words": ([math.nan, math.inf, -math.inf], ["NaN", "Infinity", "-Infinity"]),
    "large ints": ([2**53, 2**53 + 1, -(2**70)], [2**53, "9007199254740993", "-1180591620717411303424"]),
    "token ids": ((0, 151643, 2**53, -(2**53)), [0, 151643, 2**53, -(2**53)]),
    "one too small": ([1, -(2**53) - 1], [1, "-9007199254740993"]),
    "log probabilities": ([-0.5, -0.0, 5e-324, 1.5e308, 1.5e308], [-0.5, -0.0, 5e-324, 1.5e308, 1.5e308]),
    "infinities that cancel": ([0.5, math.inf, -math.inf], [0.5, "Infinity", "-Infinity"]),
    "Decimal": ([Decimal("0.10"), Decimal("NaN")], ["0.10", "NaN"]),
    "dict three deep": ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 1}}}),
    "numpy": ([np.float32(0.1), np.int8(3), np.array(2), np.array([2])], [0.10000000149011612, 3, 2, [2]]),
    "arrays": ([np.array([[1, 2]]), np.array([math.nan])], [[[1, 2]], ["NaN"]]),
    "tensors": (
        [torch.tensor(0.1, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), torch.empty(2, device="meta")],
        [0.10009765625, [1.0, 1.0], "tensor(..., device='meta', size=(2,))"],
    ),
    "masked": ([np.ma.masked, np.ma.array([1, 2], mask=[True, False])], ["masked", [None, 2]]),
    "dataclass": (Point(2), {"x": 2}),
    "pydantic's way": (Model(), {"y": "NaN"}),
    "sequences": ([(1, 2), {3}, frozenset([4]), collections.deque([5])], [[1, 2], [3], [4], [5]]),
    "OmegaConf": (OmegaConf.create({"a": [1, {"b": 2}]}), {"a": [1, {"b": 2}]}),
    "OmegaConf without a mandatory value": (
        OmegaConf.create({"a": "???", "b": 2}),
        {"a": "<DictConfig value that cannot be read>", "b": 2},
    ),
    "a mapping with a raising value": (Broken(), {"good": 1.5, "bad": UNREADABLE}),
    "kept as repr": (
        [b"\xff", Colour.RED, range(9), RaisingRepr(), RaisingAll(), Undecided(), Pretender(dict), object],
        ["b'\\xff'", "<Colour.RED: 1>", "range(0, 9)", "<RaisingRepr whose repr fails>", "<RaisingAll whose repr fails>",
         "Undecided!", "Pretender!", "<class 'object'>"],
    ),
    "a list that holds itself": (LOOP, [1, "[1, [...]]"]),
    "keys": ({1: "a", None: "b", (1, 2): "c", "": "d", "\0": "e"}, {"1": "a", "None": "b", "(1, 2)": "c", "": "d", "\0": "e"}),
    "keys of one text": ({1: "a", "1": "b"}, {"1": "a", "1 (2)": "b"}),
    "keys of one text, three times": (
        {"x": {1: "a", "1": "b", "1 (2)": "c", 2.5: "d", "2.5": "e"}},
        {"x": {"1": "a", "1 (2)": "b", "1 (2) (2)": "c", "2.5": "d", "2.5 (2)": "e"}},
    ),
    "keys of one text after cleaning": ({chr(0xD800): 1, chr(0xDC00): 2, "\ufffd": 3}, {"\ufffd": 1, "\ufffd (2)": 2, "\ufffd (3)": 3}),
    "a key that is taken already": ({"1 (2)": "a", 1: "b", "1": "c"}, {"1 (2)": "a", "1": "b", "1 (3)": "c"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_exact_wherever_it_is_given(tmp_path, name):
    given, stored = TREES[name]
    run = begin_without_thread(tmp_path, config={"tree": given}, durability="os")
    run.log_generations(step=1, rows=[{"output": given, "more": given}])
    with run.span("tool", step=1, inputs=given, attributes={"tree": given}) as span:
        span.outputs = given
    run.tag(tree=given)
    assert repr(reader(run).config) == repr({"tree": stored})
    found = recorded(run)
    generation, start, end, tag = found.bodies
    assert repr((generation["generation"]["output"], generation["generation"]["extra"])) == repr(
        (stored, {"more": stored})
    )
    assert repr((start["span"]["inputs"], start["span"]["attributes"])) == repr((stored, {"tree": stored}))
    assert repr((end["span"]["inputs"], end["span"]["outputs"])) == repr((stored, stored))
    assert repr(tag["body"]) == repr({"tree": stored})
    (row,) = found.tables["generations"]
    assert repr(json.loads(row["extra"])) == repr({"more": stored})
    assert repr(row["output"] if isinstance(stored, str) else json.loads(row["output"])) == repr(stored)
    (row,) = found.tables["spans"]
    assert repr([json.loads(row[key]) for key in ("inputs", "outputs")]) == repr([stored, stored])
    assert repr(json.loads(row["attributes"])) == repr({"tree": stored})
    assert repr([json.loads(body) for kind, body in found.columns("events", "kind", "body") if kind == "tag"]) == repr(
        [{"tree": stored}]
    )


def test_a_secret_under_a_key_that_got_a_number_is_masked(tmp_path):
    class Name:
        def __str__(self) -> str:
            return "hf_token"

    run = begin(tmp_path, config={"hf_token": "one", Name(): "two", "lr": 1})
    assert reader(run).config == {"hf_token": "[masked]", "hf_token (2)": "[masked]", "lr": 1}


# --- histograms


@pytest.mark.parametrize(
    ("values", "count", "nonfinite", "total", "low", "high"),
    [
        ([0.0, 64.0], 2, 0, 64.0, 0.0, 64.0),
        (np.array([[0.5], [64.0]], dtype=np.float16), 2, 0, 64.5, 0.5, 64.0),
        (torch.tensor([1.5, math.nan, -math.inf], dtype=torch.bfloat16, requires_grad=True), 3, 2, 1.5, 1.5, 1.5),
        ([True, 2**60, Decimal("0.5")], 3, 0, 2.0**60, 0.5, 2.0**60),
        ([], 0, 0, 0.0, 0.0, 0.0),
    ],
    ids=["list", "float16", "bf16 with grad", "mixed", "empty"],
)
def test_a_histogram_counts_every_number(tmp_path, values, count, nonfinite, total, low, high):
    run = begin_without_thread(tmp_path)
    run.log_histogram("grad", values, step=1)
    found = recorded(run)
    body = found.bodies[0]["body"]
    summary = {"count": count, "nonfinite": nonfinite, "sum": total, "min": low, "max": high}
    assert {key: body[key] for key in ("name", *summary)} == {"name": "grad", **summary}
    assert sum(body["counts"]) == count - nonfinite
    assert (len(body["counts"]), len(body["edges"]), sorted(body["edges"])) == (64, 65, body["edges"])
    assert found.columns("events", "kind", "step") == [("histogram", 1)]
    assert json.loads(found.tables["events"][0]["body"]) == body


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ("1.5", "'1.5'"),
        (["1.5"], "['1.5']"),
        ([1j], "[1j]"),
        (np.array([1 + 1j]), "array([1.+1.j])"),
        (np.array([1], dtype="m8[s]"), "array([1], dtype='timedelta64[s]')"),
        (torch.empty(2, device="meta"), "tensor(..., device='meta', size=(2,))"),
        ([10**400], f"[{10**400}]"),
        ([RaisingFloat()], "[RaisingFloat!]"),
        (RaisingAll(), "<RaisingAll whose repr fails>"),
    ],
    ids=["str", "list of str", "complex", "complex array", "timedelta64", "meta", "10**400", "raising", "raising everything"],
)  # fmt: skip
def test_a_histogram_of_anything_else_is_kept_as_text(tmp_path, values, shown, capfd):
    run = begin_without_thread(tmp_path)
    run.log_histogram("grad", values, step=1)
    found = recorded(run)
    assert found.bodies[0]["body"] == {"name": "grad", "text": shown}
    assert json.loads(found.tables["events"][0]["body"]) == {"name": "grad", "text": shown}
    assert "histogram 'grad': not an array of numbers; kept as text" in capfd.readouterr().err


# --- generations

GENERATIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # name: row as given, the journal's entry, the columns of the table (null where not named)
    "all columns": (
        {"input": "1+1", "output": "2", "label": "2", "score": 0.5, "turns": 2},
        {"input": "1+1", "output": "2", "label": "2", "score": 0.5, "extra": {"turns": 2}},
        {"input": "1+1", "output": "2", "label": "2", "score": 0.5, "extra": '{"turns":2}'},
    ),
    "no column": ({}, {}, {}),
    "only text": ("only text", {"output": "only text"}, {"output": "only text"}),
    "None": (None, {}, {}),
    "columns of None": ({"input": None, "output": None, "label": None, "score": None}, {}, {}),
    "number as label": ({"label": 2}, {"label": 2}, {"label": "2"}),
    "2**60 as label": ({"label": 2**60}, {"label": str(2**60)}, {"label": str(2**60)}),
    "nan as label": ({"label": math.nan}, {"label": "NaN"}, {"label": "NaN"}),
    "messages as output": (
        {"output": [{"role": "user", "content": "é"}]},
        {"output": [{"role": "user", "content": "é"}]},
        {"output": '[{"role":"user","content":"é"}]'},
    ),
    "bytes as output": ({"output": b"\xff"}, {"output": "b'\\xff'"}, {"output": "b'\\xff'"}),
    "score float32": ({"score": np.float32(0.1)}, {"score": 0.10000000149011612}, {"score": 0.10000000149011612}),
    "score int": ({"score": 1}, {"score": 1.0}, {"score": 1.0}),
    "score bool": ({"score": True}, {"score": 1.0}, {"score": 1.0}),
    "score nan": ({"score": math.nan}, {"score": "NaN"}, {"score": math.nan}),
    "score inf": ({"score": -math.inf}, {"score": "-Infinity"}, {"score": -math.inf}),
    "score -0.0": ({"score": -0.0}, {"score": -0.0}, {"score": -0.0}),
    "score 10**400": ({"score": 10**400}, {"score": "Infinity"}, {"score": math.inf}),
    "score Decimal": ({"score": Decimal("0.5")}, {"score": 0.5}, {"score": 0.5}),
    "score bf16": ({"score": torch.tensor([0.5], dtype=torch.bfloat16)}, {"score": 0.5}, {"score": 0.5}),
    "score text": ({"score": "high"}, {"extra": {"score": "high"}}, {"extra": '{"score":"high"}'}),
    "score list": ({"score": [0.5, 1]}, {"extra": {"score": [0.5, 1]}}, {"extra": '{"score":[0.5,1]}'}),
    "index of its own": ({"index": np.int64(9)}, {"index": 9}, {"index": 9}),
    "index beyond int64": ({"index": 2**63}, {"extra": {"index": str(2**63)}}, {"extra": f'{{"index":"{2**63}"}}'}),
    "index text": ({"index": "a"}, {"extra": {"index": "a"}}, {"extra": '{"index":"a"}'}),
    "arrays in extra": ({"ids": np.arange(3)}, {"extra": {"ids": [0, 1, 2]}}, {"extra": '{"ids":[0,1,2]}'}),
    "keys of one text": ({1: "a", "1": "b"}, {"extra": {"1": "a", "1 (2)": "b"}}, {"extra": '{"1":"a","1 (2)":"b"}'}),
    "a raising value": (Broken(), {"extra": {"good": 1.5, "bad": UNREADABLE}}, {"extra": f'{{"good":1.5,"bad":"{UNREADABLE}"}}'}),
    "raising": (RaisingAll(), {"output": "<RaisingAll whose repr fails>"}, {"output": "<RaisingAll whose repr fails>"}),
}  # fmt: skip
GENERATION_COLUMNS = ("split", "index", "input", "output", "label", "score", "extra")


@pytest.fixture(scope="module")
def all_generations(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = begin_without_thread(tmp_path_factory.mktemp("generations"), durability="os")
    run.log_generations(step=2, rows=[given for given, *_ in GENERATIONS.values()], split="val")
    return recorded(run)


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_generation_is_exact_in_journal_parquet_and_reader(all_generations, name):
    _, entry, columns = GENERATIONS[name]
    at = list(GENERATIONS).index(name)
    line, row = all_generations.lines[at], all_generations.tables["generations"][at]
    assert (line["seq"], line["step"], row["seq"], row["step"]) == (at + 2, 2, at + 2, 2)
    assert repr(line["generation"]) == repr({"split": "val", "index": at, **entry})
    expected = {**dict.fromkeys(GENERATION_COLUMNS), "split": "val", "index": at, **columns}
    assert repr({key: row[key] for key in GENERATION_COLUMNS}) == repr(expected)


@pytest.mark.parametrize(
    ("split", "stored"),
    [("验证", "验证"), ("", ""), (None, "None"), (3, "3"), ("\ud800", "\ufffd"), (Word.GOOD, "good"), (RaisingStr("x"), "x"), (Pretender(str), "Pretender!")],
    ids=["chinese", "empty", "None", "number", "surrogate", "enum", "raising", "pretender"],
)  # fmt: skip
def test_any_split_is_kept_as_text(tmp_path, split, stored):
    run = begin_without_thread(tmp_path)
    run.log_generations(step=1, rows=[{"output": "x"}], split=split)
    found = recorded(run)
    assert found.bodies[0]["generation"]["split"] == stored
    assert found.columns("generations", "split") == [stored]


def test_a_hundred_thousand_generations_in_one_call_are_all_there_in_order(tmp_path):
    count = 100_000
    run = begin_without_thread(tmp_path, durability="os")
    run.log_generations(
        rows=({"input": f"q{at}", "output": f"a{at}", "score": at / 4} for at in range(count)), split="val"
    )
    run.log({"after": 1.5})
    found = recorded(run)
    *lines, after = found.lines
    assert [line["seq"] for line in lines] == list(range(2, count + 2))
    assert {(line["step"], line["ordinal"]) for line in lines} == {(None, 1)}
    assert (after["seq"], after["ordinal"]) == (count + 2, 2)
    expected = [("val", at, f"q{at}", f"a{at}", at / 4) for at in range(count)]
    columns = ("split", "index", "input", "output", "score")
    assert [tuple(line["generation"][key] for key in columns) for line in lines] == expected
    assert found.columns("generations", *columns) == expected
    assert found.columns("generations", "seq") == list(range(2, count + 2))
    assert set(found.columns("generations", "ordinal", "label", "extra")) == {(1, None, None)}


# --- spans


def test_a_span_is_two_records_and_two_rows_and_one_for_a_reader(tmp_path):
    run = begin_without_thread(tmp_path)
    with run.span("agent", type="AGENT", step=5, sample_index=3, rollout_n=0, validate=True, inputs={"q": 1}) as agent:
        with run.span("tool", type="TOOL", attributes={"k": [math.nan]}) as tool:
            tool.outputs = 42
        agent.status, agent.message = "ERROR", "timeout"
    found = recorded(run)
    indices = {"sample_index": 3, "rollout_n": 0, "validate": True}
    ids = {"trace_id": agent.trace_id, "span_id": agent.span_id}
    tool_ids = {"trace_id": agent.trace_id, "span_id": tool.span_id, "parent_id": agent.span_id}
    agent_open, tool_open, tool_end, agent_end = [body["span"] for body in found.bodies]
    start, tool_start = agent_open["start"], tool_open["start"]
    one = {**ids, "name": "agent", "type": "AGENT", "start": start, **indices, "inputs": {"q": 1}}
    two = {**tool_ids, "name": "tool", "type": "TOOL", "start": tool_start, **indices, "attributes": {"k": ["NaN"]}}
    assert agent_open == {**one, "status": "OPEN"}
    assert tool_open == {**two, "status": "OPEN"}
    assert tool_end == {**two, "end": tool_end["end"], "status": "OK", "outputs": 42}
    assert agent_end == {**one, "end": agent_end["end"], "status": "ERROR", "message": "timeout"}
    assert start <= tool_start <= tool_end["end"] <= agent_end["end"]
    assert [line["step"] for line in found.lines] == [5, 5, 5, 5]
    assert [(row["seq"], row["name"], row["status"]) for row in found.stored["spans"]] == [
        (2, "agent", "OPEN"), (3, "tool", "OPEN"), (4, "tool", "OK"), (5, "agent", "ERROR")
    ]  # fmt: skip
    assert [row["end"] for row in found.stored["spans"]] == [None, None, tool_end["end"], agent_end["end"]]
    empty = dict.fromkeys(("parent_id", "message", "inputs", "outputs", "attributes"))
    common = {**empty, "step": 5, "ordinal": None, **indices}
    assert found.tables["spans"] == [
        {**common, **ids, "seq": 5, "name": "agent", "type": "AGENT", "start": start, "end": agent_end["end"],
         "status": "ERROR", "message": "timeout", "inputs": '{"q":1}'},
        {**common, **tool_ids, "seq": 4, "name": "tool", "type": "TOOL", "start": tool_start, "end": tool_end["end"],
         "status": "OK", "outputs": "42", "attributes": '{"k":["NaN"]}'},
    ]  # fmt: skip


def end_twice(span: spool.Span) -> None:
    span.end()
    span.outputs = "late"
    span.end()


def end_in_another_thread(span: spool.Span) -> None:
    thread = threading.Thread(target=span.end)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("end", "statuses"),
    [(end_twice, ["OPEN", "OK"]), (end_in_another_thread, ["OPEN", "OK"]), (lambda _: None, ["OPEN"])],
    ids=["twice", "in another thread", "never"],
)
def test_a_span_ended_in_any_way_is_one_row_and_no_parent_of_what_follows(tmp_path, end, statuses):
    run = begin_without_thread(tmp_path)
    span = run.span("tool", step=1, inputs="x").start()
    span.outputs = 7
    end(span)
    is_open = statuses == ["OPEN"]
    with run.span("next", step=1):
        pass
    found = recorded(run)
    assert [body["span"]["status"] for body in found.bodies] == [*statuses, "OPEN", "OK"]
    assert [row["status"] for row in found.stored["spans"]] == [*statuses, "OPEN", "OK"]
    assert [body["span"].get("outputs") for body in found.bodies[: len(statuses)]] == [None, 7][: len(statuses)]
    tool, following = found.tables["spans"]
    assert (tool["status"], tool["inputs"], tool["outputs"]) == (statuses[-1], '"x"', None if is_open else "7")
    assert (tool["end"] is None) == is_open
    assert following["parent_id"] == (span.span_id if is_open else None)
    assert (following["trace_id"] == span.trace_id) == is_open


def test_a_span_with_ten_thousand_children_is_whole(tmp_path):
    count = 10_000
    run = begin_without_thread(tmp_path, durability="os")
    with run.span("root", step=1, sample_index=7) as root:
        for at in range(count):
            with run.span(f"child {at}", type="TOOL") as child:
                child.outputs = at
    found = recorded(run)
    bodies = [body["span"] for body in found.bodies]
    assert [body["name"] for body in bodies] == [
        "root", *[f"child {at // 2}" for at in range(2 * count)], "root"
    ]  # fmt: skip
    assert [body["status"] for body in bodies] == ["OPEN", *["OPEN", "OK"] * count, "OK"]
    children = bodies[1:-1]
    assert {(body["trace_id"], body["parent_id"], body["sample_index"]) for body in children} == {
        (root.trace_id, root.span_id, 7)
    }
    assert [body.get("outputs") for body in children] == [None if at % 2 == 0 else at // 2 for at in range(2 * count)]
    assert [row["seq"] for row in found.stored["spans"]] == list(range(2, 2 * count + 4))
    first, *rows = found.tables["spans"]
    assert (first["name"], first["seq"], first["parent_id"]) == ("root", 2 * count + 3, None)
    assert [(row["name"], row["seq"], row["outputs"]) for row in rows] == [
        (f"child {at}", 2 * at + 4, str(at)) for at in range(count)
    ]  # fmt: skip
    assert {(row["parent_id"], row["step"], row["sample_index"], row["status"]) for row in rows} == {
        (root.span_id, 1, 7, "OK")
    }
    assert len({row["span_id"] for row in rows}) == count


@pytest.mark.parametrize(
    ("attributes", "stored"),
    [
        ({}, None),
        (None, None),
        ([("a", 1)], {"a": 1}),
        ("text", {"attributes": "text"}),
        (5, {"attributes": 5}),
        (np.array([1, 2]), {"attributes": [1, 2]}),
    ],
    ids=["empty", "None", "pairs", "text", "number", "array"],
)
def test_any_attributes_given_to_a_span_are_kept(tmp_path, attributes, stored):
    run = begin_without_thread(tmp_path)
    run.span("tool", step=1, attributes=attributes).start()
    found = recorded(run)
    assert found.bodies[0]["span"].get("attributes") == stored
    assert found.columns("spans", "attributes") == [stored and format.json_text(stored)]


def test_any_attributes_set_on_an_open_span_are_kept(tmp_path):
    run = begin_without_thread(tmp_path)
    with run.span("tool", step=1) as span:
        span.attributes = np.array([1, 2])
    found = recorded(run)
    assert [body["span"].get("attributes") for body in found.bodies] == [None, [1, 2]]
    assert found.columns("spans", "attributes") == ["[1,2]"]


# --- the end of a run


def everything(run: Run) -> None:
    """Each call that records something."""
    run.log({"late": 1.5}, step=9)
    run.log({"late": math.nan})
    run.log_generations(step=9, rows=["late", "late"])
    with run.span("late", step=9):
        pass
    run.log_histogram("late", [1.0], step=9)
    run.tag(stage="late")
    run.save(__file__)
    run.log_input(__file__)
    run.flush()


def on_disk(run: Run) -> dict[Path, bytes]:
    records = [path for path in run.path.rglob("*") if path.is_file() and path.parent.name != "files"]
    return {path: path.read_bytes() for path in records}


def test_calls_after_finish_change_neither_journal_nor_segment_and_raise_nothing(tmp_path, capfd):
    run = begin(tmp_path)
    run.log({"a": 1.5}, step=1)
    open_span = run.span("open", step=1).start()
    run.finish()
    before, tables = on_disk(run), read_tables(run)
    everything(run)
    open_span.end()
    assert on_disk(run) == before
    assert repr(read_tables(run)) == repr(tables)
    assert [line.get("event") for line in read_lines(journal_path(run))] == [None, None, "finish"]
    stored = read_parquet(journal_path(run).parent / "000001")
    assert [(row["key"], row["value"]) for row in stored["metrics"]] == [("a", 1.5)]
    assert [(row["name"], row["status"]) for row in stored["spans"]] == [("open", "OPEN")]
    assert [row["kind"] for row in stored["events"]] == ["finish"]
    assert tables["generations"] == []
    assert reader(run).status().state == "finished"
    assert "the run is finished" in capfd.readouterr().err


@pytest.mark.parametrize("call", [lambda run: run.log({"a": 1.5}), lambda run: run.tag(a=1), lambda run: run.span("a").start()],
                         ids=["log", "tag", "span"])  # fmt: skip
def test_a_call_after_finish_raises_where_strict_was_asked_for(tmp_path, call):
    run = begin(tmp_path, strict=True)
    run.finish()
    before = on_disk(run)
    with pytest.raises(spool.WriteError, match="the run is finished"):
        call(run)
    assert on_disk(run) == before


@pytest.mark.parametrize("second", ["finished", "failed", "killed"])
def test_finishing_twice_is_one_finish_and_the_first_status_holds(tmp_path, capfd, second):
    run = begin(tmp_path)
    run.log({"a": 1.5}, step=1)
    run.finish("failed")
    before = on_disk(run)
    run.finish(second)
    assert on_disk(run) == before
    *_, last = lines = read_lines(journal_path(run))
    assert [line.get("event") for line in lines] == [None, "finish"]
    writer = own_writer(run).id
    roster = {writer: {"seq": 2, "journal": 1, "length": last["body"]["roster"][writer]["length"]}}
    body = {"status": "failed", "lead": True, "counts": {}, "roster": roster}
    assert (last["seq"], last["body"]) == (3, body)
    assert roster[writer]["length"] == journal_path(run).read_bytes().index(b'{"seq":3,')
    stored = read_parquet(journal_path(run).parent / "000001")["events"]
    for (row,) in (stored, read_tables(run)["events"]):
        assert (row["seq"], row["step"], row["kind"], json.loads(row["body"])) == (3, None, "finish", body)
    assert reader(run).status().state == "failed"
    assert capfd.readouterr().err.count("to replay") == 1


# --- two runs at once in one process


def test_two_runs_at_once_in_one_process_do_not_mix(tmp_path):
    runs = [begin_without_thread(tmp_path) for _ in range(2)]
    calls, together = 200, threading.Barrier(2)

    def work(run: Run, sign: float) -> None:
        together.wait()
        for step in range(1, calls + 1):
            run.log({"same key": sign * step}, step=step)
            run.log_generations(step=step, rows=[{"output": str(sign * step)}])

    threads = [threading.Thread(target=work, args=one) for one in zip(runs, (1.0, -1.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs[0].id != runs[1].id
    for run, sign in zip(runs, (1.0, -1.0), strict=True):
        found = recorded(run)
        expected = [sign * step for step in range(1, calls + 1)]
        assert [line["seq"] for line in found.lines] == list(range(2, 2 * calls + 2))
        assert [body["metrics"]["same key"] for body in found.bodies[::2]] == expected
        assert [body["generation"]["output"] for body in found.bodies[1::2]] == [str(one) for one in expected]
        assert found.columns("metrics", "value") == expected
        assert found.columns("generations", "output") == [str(one) for one in expected]


def test_spans_of_two_runs_at_once_have_traces_of_their_own(tmp_path):
    one, two = begin_without_thread(tmp_path), begin_without_thread(tmp_path)
    with (
        one.span("a", step=1, sample_index=7) as outer,
        two.span("b") as other,
        one.span("c") as inner,
        two.span("d") as last,
    ):
        pass
    with one.span("after"):
        pass
    first, second = recorded(one), recorded(two)
    columns = ("name", "trace_id", "parent_id", "step", "sample_index")
    assert first.columns("spans", *columns)[:2] == [
        ("a", outer.trace_id, None, 1, 7),
        ("c", outer.trace_id, outer.span_id, 1, 7),
    ]
    assert first.columns("spans", "name", "parent_id")[2] == ("after", None)
    assert second.columns("spans", *columns) == [
        ("b", other.trace_id, None, None, None),
        ("d", other.trace_id, other.span_id, None, None),
    ]
    assert outer.trace_id != other.trace_id
    assert [body["span"].get("parent_id") for body in second.bodies] == [None, other.span_id, other.span_id, None]
    assert (inner.parent_id, last.parent_id) == (outer.span_id, other.span_id)


def test_the_end_of_one_of_two_runs_leaves_the_other_going(tmp_path):
    one, two = begin(tmp_path), begin_without_thread(tmp_path)
    one.log({"a": 1.5}, step=1)
    two.log({"a": 2.5}, step=1)
    one.finish()
    two.log({"a": 3.5}, step=2)
    assert (reader(one).status().state, reader(two).status().state) == ("finished", "running")
    assert recorded(two).columns("metrics", "value") == [2.5, 3.5]
    assert [row["value"] for row in read_parquet(journal_path(one).parent / "000001")["metrics"]] == [1.5]


# --- bounds


def test_batches_are_closed_by_the_text_of_their_keys_too():
    identity = table.Identity("r", "w", "1-a")
    keys = [letter * (table.MAX_TEXT_BYTES // 2) for letter in "abc"]
    records = [{"seq": seq, "ts": 1, "step": 1, "metrics": {key: 1.5}} for seq, key in enumerate(keys, 1)]
    found = [batch.num_rows for _, batch in table.batches(records, identity, ["metrics"])]
    assert found == [2, 1]
