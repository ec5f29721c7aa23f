"""Making plain, as a pure function: whatever tree comes in, what goes out is bounded, exact and JSON. By name: test_values.py."""

import math
import struct
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spool import format
from spool.record import Notes, generation_body, jsonable, metric_parts, scalar

METRICS, DECIMALS, TEXTS = "metrics", "decimals", "texts"


def bits(value: Any) -> Any:
    """A value that compares equal only where every bit is: NaN with NaN, 0.0 not with -0.0, 1 not with 1.0 or True."""
    return struct.pack(">d", value) if type(value) is float else (type(value), value)


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
def test_any_tree_becomes_json_that_the_encoder_takes_with_every_leaf(tree):
    plain = jsonable(tree, Notes())
    assert format.load_json(format.dump_json(plain)) == plain
    assert leaves(plain) == leaves(tree)


def leaves(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(map(leaves, tree.values()))
    return sum(map(leaves, tree)) if isinstance(tree, list) else 1


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["input", "output", "label", "score", "index", "x"]), SCALARS))
def test_any_generation_row_becomes_a_body(row):
    body = generation_body(row, 7, "val", Notes())
    assert format.load_json(format.dump_json(body)) == body
    assert type(body["index"]) is int
