"""What every kind of value, key and step becomes: in the journal line, in Parquet, and for a reader."""

import enum
import math
import struct
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import begin, journal_path, last_line, own_writer, records, rows

import spool
from spool import format, seal
from spool.record import Notes, generation_body, jsonable, metric_parts, scalar, step_number


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class RaisingFloat:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        return "RaisingFloat!"


class RaisingRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@dataclass
class Point:
    x: int = 1


METRICS, DECIMALS, TEXTS = "metrics", "decimals", "texts"
VALUES: list[tuple[str, Any, str, Any, tuple[float | None, str | None, str]]] = [
    # name, logged, map of the journal line, entry there, (value, exact, kind) of the row
    ("float", 0.1, METRICS, 0.1, (0.1, None, "float")),
    ("nan", math.nan, METRICS, "NaN", (math.nan, None, "float")),
    ("inf", math.inf, METRICS, "Infinity", (math.inf, None, "float")),
    ("-inf", -math.inf, METRICS, "-Infinity", (-math.inf, None, "float")),
    ("-0.0", -0.0, METRICS, -0.0, (-0.0, None, "float")),
    ("smallest", 5e-324, METRICS, 5e-324, (5e-324, None, "float")),
    ("largest", 1.7976931348623157e308, METRICS, 1.7976931348623157e308, (1.7976931348623157e308, None, "float")),
    ("int", 7, METRICS, 7, (7.0, None, "int")),
    ("2**53", 2**53, METRICS, 2**53, (2.0**53, None, "int")),
    ("2**53-1", 2**53 - 1, METRICS, 2**53 - 1, (2.0**53 - 1, None, "int")),
    ("2**53+1", 2**53 + 1, METRICS, "9007199254740993", (2.0**53, "9007199254740993", "int")),
    ("2**63-1", 2**63 - 1, METRICS, "9223372036854775807", (2.0**63, "9223372036854775807", "int")),
    ("2**64", 2**64, METRICS, "18446744073709551616", (2.0**64, "18446744073709551616", "int")),
    ("2**70", 2**70, METRICS, str(2**70), (2.0**70, str(2**70), "int")),
    ("-2**70", -(2**70), METRICS, str(-(2**70)), (-(2.0**70), str(-(2**70)), "int")),
    ("10**400", 10**400, METRICS, "1" + "0" * 400, (math.inf, "1" + "0" * 400, "int")),
    ("10**5000", 10**5000, METRICS, "1" + "0" * 5000, (math.inf, "1" + "0" * 5000, "int")),
    ("true", True, METRICS, True, (1.0, None, "bool")),
    ("false", False, METRICS, False, (0.0, None, "bool")),
    ("none", None, METRICS, None, (None, None, "null")),
    ("decimal", Decimal("0.10"), DECIMALS, "0.10", (0.1, "0.10", "decimal")),
    ("decimal nan", Decimal("NaN"), METRICS, "NaN", (math.nan, None, "float")),
    ("decimal snan", Decimal("sNaN"), METRICS, "NaN", (math.nan, None, "float")),
    ("float64", np.float64(0.1), METRICS, 0.1, (0.1, None, "float")),
    ("float32", np.float32(0.1), METRICS, 0.10000000149011612, (0.10000000149011612, None, "float")),
    ("float16", np.float16(0.1), METRICS, 0.0999755859375, (0.0999755859375, None, "float")),
    ("float32 nan", np.float32("nan"), METRICS, "NaN", (math.nan, None, "float")),
    ("int8", np.int8(-8), METRICS, -8, (-8.0, None, "int")),
    ("int64", np.int64(2**62), METRICS, str(2**62), (2.0**62, str(2**62), "int")),
    ("uint64", np.uint64(2**64 - 1), METRICS, str(2**64 - 1), (2.0**64, str(2**64 - 1), "int")),
    ("np.bool", np.bool_(True), METRICS, True, (1.0, None, "bool")),
    ("0-d", np.array(0.25), METRICS, 0.25, (0.25, None, "float")),
    ("1 element", np.array([[3]]), METRICS, 3, (3.0, None, "int")),
    ("tensor", torch.tensor(0.1), METRICS, 0.10000000149011612, (0.10000000149011612, None, "float")),
    ("bf16", torch.tensor(0.1, dtype=torch.bfloat16), METRICS, 0.10009765625, (0.10009765625, None, "float")),
    ("grad", torch.tensor(1.5, requires_grad=True), METRICS, 1.5, (1.5, None, "float")),
    ("1 tensor", torch.tensor([2]), METRICS, 2, (2.0, None, "int")),
    ("text", "good", TEXTS, "good", (None, "good", "text")),
    ("text nan", "NaN", TEXTS, "NaN", (None, "NaN", "text")),
    ("np.str", np.str_("good"), TEXTS, "good", (None, "good", "text")),
    ("bytes", b"\xff", TEXTS, "b'\\xff'", (None, "b'\\xff'", "text")),
    ("enum", Colour.RED, TEXTS, "<Colour.RED: 1>", (None, "<Colour.RED: 1>", "text")),
    ("int enum", Level.HIGH, METRICS, 3, (3.0, None, "int")),
    ("dataclass", Point(), TEXTS, "Point(x=1)", (None, "Point(x=1)", "text")),
    ("complex", np.complex64(1j), TEXTS, repr(np.complex64(1j)), (None, repr(np.complex64(1j)), "text")),
    ("raising float", RaisingFloat(), TEXTS, "RaisingFloat!", (None, "RaisingFloat!", "text")),
    ("raising repr", RaisingRepr(), TEXTS, "<RaisingRepr whose repr fails>", (None, "<RaisingRepr whose repr fails>", "text")),
    ("empty dict", {}, TEXTS, "{}", (None, "{}", "text")),
    ("list", [1, 2], TEXTS, "[1, 2]", (None, "[1, 2]", "text")),
    (
        "datetime",
        datetime(2026, 1, 2, tzinfo=timezone.utc),
        TEXTS,
        "datetime.datetime(2026, 1, 2, 0, 0, tzinfo=datetime.timezone.utc)",
        (None, "datetime.datetime(2026, 1, 2, 0, 0, tzinfo=datetime.timezone.utc)", "text"),
    ),
]  # fmt: skip


def bits(value: Any) -> Any:
    """A value that compares equal only where every bit is: NaN with NaN, 0.0 not with -0.0, 1 not with 1.0 or True."""
    return struct.pack(">d", value) if type(value) is float else (type(value), value)


def exactly(row: dict[str, Any]) -> tuple[Any, ...]:
    return bits(row["value"]), row["exact"], row["kind"]


@pytest.fixture(scope="module")
def all_values(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    run = begin(tmp_path_factory.mktemp("values"), durability="os")
    lines = {}
    for name, value, *_ in VALUES:
        run.log({name: value}, step=1)
        lines[name] = last_line(run)
    live = {row["key"]: row for row in rows(run)}
    seal.seal(journal_path(run))
    journal_path(run).unlink()
    parquet = {row["key"]: row for row in rows(run)}
    return lines, live, parquet


@pytest.mark.parametrize(
    ("name", "where", "entry", "row"), [(one[0], *one[2:]) for one in VALUES], ids=[one[0] for one in VALUES]
)
def test_a_value_is_exact_in_journal_parquet_and_reader(all_values, name, where, entry, row):
    lines, live, parquet = all_values
    line = lines[name]
    assert bits(line[where][name]) == bits(entry)
    assert [one for one in (METRICS, DECIMALS, TEXTS) if line.get(one)] == [where]
    assert exactly(live[name]) == (bits(row[0]), *row[1:])
    assert exactly(parquet[name]) == (bits(row[0]), *row[1:])


def test_a_meta_tensor_is_kept_as_its_repr(tmp_path):
    run = begin(tmp_path)
    run.log({"meta": torch.empty((), device="meta"), "many": torch.ones(3)})
    found = {row["key"]: row["exact"] for row in rows(run)}
    assert found == {"meta": "tensor(..., device='meta', size=())", "many": "tensor([1., 1., 1.])"}


def test_a_value_we_cannot_take_is_said_once_and_counted(tmp_path, capfd):
    run = begin(tmp_path)
    run.log({"a": object(), "b": object()})
    run.log({"a": object()})
    run.finish()
    assert capfd.readouterr().err.count("type object is kept as its repr") == 1
    body = format.load_json(rows(run, "events")[-1]["body"].encode())
    assert body["counts"]["untaken"] == {"object": 3}


def test_a_key_may_change_its_type(tmp_path):
    run = begin(tmp_path)
    for value in (1, 1.5, "one", None):
        run.log({"key": value})
    assert [(row["value"], row["exact"], row["kind"]) for row in rows(run)] == [
        (1.0, None, "int"),
        (1.5, None, "float"),
        (None, "one", "text"),
        (None, None, "null"),
    ]


KEYS = {
    "": "",
    "键/奖励": "键/奖励",
    "k" * 4000: "k" * 4000,
    "a\nb": "a\nb",
    "a\0b": "a\0b",
    'a"b\\': 'a"b\\',
    "step": "step",
    "ts": "ts",
    "crc": "crc",
    '"},{"seq":9,': '"},{"seq":9,',
    "😀\u2028": "😀\u2028",
    "\ud800x": "�x",
    5: "5",
    (1, 2): "(1, 2)",
    None: "None",
    b"x": "b'x'",
}


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_any_key_is_kept(tmp_path, key):
    run = begin(tmp_path, durability="os")
    run.log({key: 1.5, "other": 2.0}, step=3)
    assert {row["key"]: row["value"] for row in rows(run)} == {KEYS[key]: 1.5, "other": 2.0}
    assert not reader_damage(run)


def reader_damage(run: spool.Run) -> list[Any]:
    return own_writer(run).damage()


def test_a_lone_surrogate_is_stored_as_u_fffd_and_the_record_says_so(tmp_path):
    run = begin(tmp_path)
    run.log({"text": "a\udc80b\ud800", "emoji": "😀"})
    assert last_line(run)["replaced"] == 2
    assert {row["key"]: row["exact"] for row in rows(run)} == {"text": "a�b�", "emoji": "😀"}
    assert [row["body"] for row in rows(run, "events") if row["kind"] == "replaced"] == ['{"count":2}']


def test_a_call_without_keys_is_a_record_without_rows(tmp_path):
    run = begin(tmp_path)
    before = own_writer(run).last_seq
    run.log({}, step=1)
    assert own_writer(run).last_seq == before + 1
    assert rows(run) == []


@pytest.mark.parametrize("value", [1.0, Decimal(1), "x"], ids=["fast", "decimal", "text"])
def test_ten_thousand_keys_become_ten_records_in_sequence(tmp_path, value):
    run = begin(tmp_path)
    run.log({f"key{at}": value for at in range(10_000)}, step=4)
    found = [one for one in records(journal_path(run)) if "metrics" in one]
    assert [one["seq"] for one in found] == list(range(2, 12))
    assert {sum(len(one.get(name, {})) for name in (METRICS, DECIMALS, TEXTS)) for one in found} == {1000}
    assert {one["step"] for one in found} == {4}
    assert [row["key"] for row in rows(run)] == [f"key{at}" for at in range(10_000)]


def test_nested_dicts_are_joined_with_a_slash_and_a_collision_keeps_both(tmp_path):
    run = begin(tmp_path)
    run.log({"a/b": 1.0, "a": {"b": 2.0, "c": {"d": 3}}}, step=1)
    assert [(row["key"], row["value"]) for row in rows(run)] == [("a/b", 1.0), ("a/b", 2.0), ("a/c/d", 3.0)]
    assert [row["seq"] for row in rows(run)] == [2, 3, 3]


def test_a_dict_that_holds_itself_is_cut_at_its_repr():
    loop: dict[str, Any] = {"x": 1.0}
    loop["self"], loop["again"] = loop, loop
    parts = metric_parts(loop, Notes())
    assert parts[0].numbers == {"x": 1.0}
    assert set(parts[0].texts) == {"self", "again"}


def test_a_dict_nested_too_deep_is_cut_at_its_repr():
    deep: dict[str, Any] = {"end": 1.0}
    for _ in range(500):
        deep = {"d": deep}
    (part,) = metric_parts(deep, Notes())
    assert len(part.texts) == 1
    assert next(iter(part.texts)).count("/") < 100


STEPS = [
    (None, None, True),
    (0, 0, True),
    (1.0, 1, True),
    (1.5, None, False),
    (np.int64(5), 5, True),
    (np.float32(6.0), 6, True),
    (torch.tensor(7), 7, True),
    (-1, -1, True),
    (2**63 - 1, 2**63 - 1, True),
    (-(2**63), -(2**63), True),
    (2**63, None, False),
    (float(2**63), None, False),
    (math.nan, None, False),
    (math.inf, None, False),
    (True, None, False),
    ("5", None, False),
    (Decimal(5), None, False),
    (RaisingFloat(), None, False),
]


@pytest.mark.parametrize(("step", "stored", "taken"), STEPS, ids=[repr(one[0]) for one in STEPS])
def test_a_step_is_an_int64_or_null_and_counted(tmp_path, step, stored, taken):
    assert step_number(step) == (stored, taken)
    run = begin(tmp_path, durability="os")
    run.log({"a": 1.0}, step=step)
    (row,) = rows(run)
    assert (row["step"], row["ordinal"], run._bad_steps) == (stored, 1 if stored is None else None, 0 if taken else 1)


def test_steps_may_decrease_and_repeat_and_order_is_that_of_the_calls(tmp_path):
    run = begin(tmp_path)
    for step in (5, 3, 3, -1, None, None):
        run.log({"a": 1.0}, step=step)
    assert [(row["step"], row["ordinal"]) for row in rows(run)] == [
        (5, None),
        (3, None),
        (3, None),
        (-1, None),
        (None, 1),
        (None, 2),
    ]


def test_a_generation_keeps_known_columns_and_puts_the_rest_into_extra(tmp_path):
    run = begin(tmp_path)
    given_rows = [
        {
            "input": "1+1",
            "output": "2",
            "label": 2,
            "score": np.float32(0.5),
            "reward": {"fmt": math.nan},
            "ids": np.arange(3),
        },
        {"output": ["a", {"b": 2**60}], "score": "high", "index": np.int64(9)},
        "only text",
        {"score": 10**400},
        {"score": Decimal("0.5"), "label": None},
    ]
    run.log_generations(step=2, rows=given_rows, split="val")
    found = [
        {key: row[key] for key in ("seq", "split", "index", "input", "output", "label", "score", "extra")}
        for row in rows(run, "generations")
    ]
    empty = {"split": "val", "input": None, "output": None, "label": None, "score": None, "extra": None}
    extra = '{"reward":{"fmt":"NaN"},"ids":[0,1,2]}'
    assert found == [
        {**empty, "seq": 2, "index": 0, "input": "1+1", "output": "2", "label": "2", "score": 0.5, "extra": extra},
        {**empty, "seq": 3, "index": 9, "output": '["a",{"b":"1152921504606846976"}]', "extra": '{"score":"high"}'},
        {**empty, "seq": 4, "index": 2, "output": "only text"},
        {**empty, "seq": 5, "index": 3, "score": math.inf},
        {**empty, "seq": 6, "index": 4, "score": 0.5},
    ]


@pytest.mark.parametrize("split", [None, 3, "\ud800", "验证"], ids=repr)
def test_any_split_is_kept_as_text(tmp_path, split):
    run = begin(tmp_path)
    run.log_generations(step=1, rows=[{"output": "x"}], split=split)
    assert [row["split"] for row in rows(run, "generations")] == [
        {"\ud800": "�", "验证": "验证"}.get(split, repr(split))
    ]


def test_a_text_stays_whole_at_any_length(tmp_path):
    text = "\u2028\u202e😀\0\n" * 500_000
    run = begin(tmp_path)
    run.log_generations(step=1, rows=[{"input": text, "output": "end"}])
    run.finish()
    (row,) = rows(run, "generations")
    assert row["input"] == text


SCALARS = (
    st.floats()
    | st.integers()
    | st.booleans()
    | st.none()
    | st.text()
    | st.decimals()
    | st.floats(width=32).map(np.float32)
    | st.floats(width=16).map(np.float16)
    | st.integers(0, 2**64 - 1).map(np.uint64)
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text() | st.sampled_from(list("abc")), SCALARS, max_size=5))
def test_a_line_holds_exactly_what_was_logged(data):
    """Through the bytes of a journal line and back: the fast way and the careful way write the same."""
    fast, careful = format.fast_metrics(data), format.metric_bodies(data, Notes())
    bodies = careful if fast is None else [fast]
    lines = [format.record_line(seq, 1, None, 1, body) for seq, body in enumerate(bodies, 1)]
    decoded = [format.decode(line[:-1]) for line in lines]
    assert all(format.is_intact(line[:-1]) and b"\n" not in line[:-1] for line in lines)
    if fast is not None:
        (slow,) = [format.decode(format.record_line(1, 1, None, 1, body)) for body in careful]
        assert {key: bits(value) for key, value in decoded[0]["metrics"].items()} == {
            key: bits(value) for key, value in slow["metrics"].items()
        }
    stored = {
        key: value for one in decoded for name in (METRICS, DECIMALS, TEXTS) for key, value in one.get(name, {}).items()
    }
    cleaned = {
        key.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if key.isascii() else key: key for key in data
    }
    for key, value in data.items():
        if key not in cleaned or any("\ud800" <= one <= "\udfff" for one in key):
            continue
        plain, _ = scalar(value)
        if isinstance(plain, float) and math.isfinite(plain):
            assert bits(stored[key]) == bits(plain)
        elif type(plain) is int:
            assert int(stored[key]) == plain


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        SCALARS | st.binary(), lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)
    )
)
def test_any_tree_becomes_json_that_the_encoder_takes(tree):
    plain = jsonable(tree, Notes())
    assert format.load_json(format.dump_json(plain)) == plain


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["input", "output", "label", "score", "index", "x"]), SCALARS))
def test_any_generation_row_becomes_a_body(row):
    body = generation_body(row, 7, "val", Notes())
    assert format.load_json(format.dump_json(body)) == body
    assert type(body["index"]) is int
