"""Format 1: a line proves itself, and a damaged newline is found by the checksum before it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool import format
from spool.errors import NewerFormatError

LINE = format.record_line(7, 123, 5, None, b'"metrics":{"a":1.5}')


def crc32c(content: bytes) -> int:
    """CRC-32C by its definition, bit by bit: another implementation than the one under test."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_a_line_is_json_that_ends_with_its_checksum_in_18_bytes():
    assert b'{"seq":7,"ts":123,"step":5,"metrics":{"a":1.5},"crc":"%08x"}\n' % crc32c(LINE[:-19]) == LINE
    assert json.loads(LINE)["metrics"] == {"a": 1.5}


def test_the_checksum_is_crc_32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert format.crc32c(b"123456789") == 0xE3069283


def test_a_step_less_line_has_null_and_an_ordinal():
    assert format.decode(format.record_line(1, 2, None, 3, b'"metrics":{}')[:-1])["ordinal"] == 3
    assert "ordinal" not in format.decode(format.record_line(1, 2, None, None, b'"event":"x","body":{}')[:-1])


def test_every_flipped_bit_and_every_cut_breaks_the_proof():
    line = LINE[:-1]
    assert format.is_intact(line)
    for at in range(len(line)):
        assert not format.is_intact(line[:at])
        for bit in range(8):
            assert not format.is_intact(line[:at] + bytes([line[at] ^ 1 << bit]) + line[at + 1 :])


def test_a_header_has_a_format_and_no_seq():
    line = format.header_line({"run": "r"})[:-1]
    assert format.is_intact(line)
    assert format.seq_of_line(line) is None
    assert format.decode(line)["format"] == 1
    assert format.seq_of_line(LINE) == 7


TRAP = b'"texts":{"x":"\\"}{\\"seq\\":"},"extra":[{"crc":"00000000"},{"seq":1}]'


@pytest.mark.parametrize("between", [b"", b"X", b"\x0b", b"}", b'"', b"\0" * 9])
def test_a_lost_newline_splits_into_records_that_prove_themselves(between):
    lines = [format.record_line(seq, 1, 1, None, TRAP if seq == 2 else b'"metrics":{}')[:-1] for seq in (1, 2, 3)]
    joined = between.join(lines)
    pieces = format.salvage(joined)
    assert [piece for _, piece in pieces] == lines
    assert all(joined[offset : offset + len(piece)] == piece for offset, piece in pieces)


def test_a_record_is_found_before_and_after_what_is_no_more():
    lines = [format.record_line(seq, 1, 1, None, b'"metrics":{}')[:-1] for seq in (1, 2, 3)]
    assert format.salvage(lines[0] + b"\0" * 50 + lines[2]) == [(0, lines[0]), (len(lines[0]) + 50, lines[2])]
    assert format.salvage(b"\0" * 50 + lines[1]) == [(50, lines[1])]
    assert format.salvage(lines[1][:-1]) == []


def test_a_hostile_line_is_given_up_after_reading_it_some_times(monkeypatch):
    hostile = b'{"seq":' * 3000 + b',"crc":"00000000"}' * 3000
    tried = []
    real = format.is_intact
    monkeypatch.setattr(format, "is_intact", lambda line: bool(tried.append(len(line))) or real(line))
    assert format.salvage(hostile) == []
    assert 0 < sum(tried) <= 16 * len(hostile)


def test_checked_json_proves_itself():
    content = format.checked_json({"a": [1, "键"]})
    assert json.loads(content)["a"] == [1, "键"]
    assert format.load_checked_json(content)["a"] == [1, "键"]
    for at in range(len(content) - 1):
        with pytest.raises(ValueError, match="checksum"):
            format.load_checked_json(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])


@pytest.mark.parametrize("found", [2, "1", None, 1.5])
def test_a_later_format_is_refused_in_one_sentence(found):
    with pytest.raises(NewerFormatError, match=r"here: format .* install a newer spool-sync$"):
        format.check_format(found, "here")


@pytest.mark.parametrize(
    "data",
    [
        {"a": float("nan")},
        {"a": float("inf"), "b": 1.0},
        {"a": True},
        {"a": 2**53 + 1},
        {"a": -(2**53) - 1},
        {"a": {"b": 1.0}},
        {1: 1.0},
        {"\ud800": 1.0},
        {f"k{at}": 1.0 for at in range(1001)},
        {"a": 1e308, "b": 1e308},
        {"a": None},
        {"a": "text"},
        [1.0],
        None,
        7,
    ],
    ids=repr,
)
def test_the_fast_way_leaves_what_it_cannot_write_exactly_to_the_careful_one(data):
    assert format.fast_metrics(data) is None
    assert format.metric_bodies(data, format.Notes())


@settings(deadline=None)
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False, allow_infinity=False))
)
def test_the_fast_way_writes_every_double_exactly(data):
    body = format.fast_metrics(data)
    if body is not None:
        found = json.loads(b"{" + body + b"}")["metrics"]
        assert {key: value.hex() for key, value in found.items()} == {key: value.hex() for key, value in data.items()}
