"""Format 1, the truth on disk, in code; `docs/format.md` is the same in prose. Pure: imports no file system.

One JSON object per line. The last 18 bytes before the newline are `,"crc":"hhhhhhhh"}`: CRC-32C of all bytes of the line
before them, found by position and never by searching. JSON escapes 0x0A, so a newline is always a record's end and the
place where reading resumes after damage.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from math import isfinite
from typing import Any

import orjson
from google_crc32c import extend as extend_crc32c
from google_crc32c import value as crc32c

from spool.errors import NewerFormatError
from spool.record import ITEM_TYPES, MAX_EXACT_INT, MAX_KEYS, Notes, Part, Redact, keep, metric_parts

FORMAT = 1
CRC_LENGTH = 18

TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "metrics": (("key", "dictionary"), ("value", "double"), ("exact", "string"), ("kind", "dictionary")),
    "generations": (
        ("split", "dictionary"),
        ("index", "int64"),
        ("input", "string"),
        ("output", "string"),
        ("label", "string"),
        ("score", "double"),
        ("extra", "string"),
    ),
    "spans": (
        ("trace_id", "string"),
        ("span_id", "string"),
        ("parent_id", "string"),
        ("name", "dictionary"),
        ("type", "dictionary"),
        ("start", "timestamp"),
        ("end", "timestamp"),
        ("status", "dictionary"),
        ("message", "string"),
        ("inputs", "string"),
        ("outputs", "string"),
        ("attributes", "string"),
        ("sample_index", "int64"),
        ("rollout_n", "int64"),
        ("validate", "bool"),
    ),
    "events": (("kind", "dictionary"), ("body", "string")),
}
"""Columns of each table after COMMON, with their types; nothing here ever depends on a user's keys."""

COMMON: tuple[tuple[str, str], ...] = (
    ("run_id", "dictionary"),
    ("writer_id", "dictionary"),
    ("attempt", "dictionary"),
    ("seq", "int64"),
    ("ts", "timestamp"),
    ("step", "int64"),
    ("ordinal", "int64"),
)

RUN_FILE = "run.json"
MANIFEST_FILE = "manifest.json"
FILES_FOLDER = "files"
STATE_FOLDER = ".sync"
"""Cursors, claims and accepted damage, beside the runs; or another folder, with --state-dir."""
JOURNAL_NAME = re.compile(r"(\d{6,})\.jsonl")
SEGMENT_NAME = re.compile(r"\d{6,}")


def journal_name(number: int) -> str:
    return f"{number:06d}.jsonl"


def segment_name(number: int) -> str:
    return f"{number:06d}"


# --- lines

_dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_floats: set[type] = {float}
_numbers: set[type] = {float, int}
_NUMPY_EXACT = {"float64": _floats, "int64": _numbers, "int32": _numbers}


def _learn(types: Iterable[type]) -> bool:
    """Admit numpy's types that the encoder writes exactly, when first met (so numpy is never imported here)."""
    learned = False
    for one in types:
        admitted = _NUMPY_EXACT.get(one.__name__) if one.__module__ == "numpy" else None
        if admitted is not None and one not in admitted:
            admitted.add(one)
            _numbers.add(one)
            learned = True
    return learned


def fast_metrics(data: Any) -> bytes | None:
    """The body for a plain dict of finite floats and small ints, or None for anything else.

    The common case is tested, not assumed: the encoder would write NaN as null, float32 as another double, and a
    one-element array as a list, all in silence.
    """
    if type(data) is not dict:
        return None
    try:
        values = data.values()
        if list(map(type, values)).count(float) == len(data):
            finite = isfinite(sum(values))  # one NaN or infinity makes the sum one; an overflow only costs the fast way
        else:
            types = set(map(type, values))
            if not types <= _numbers and not (_learn(types) and types <= _numbers):
                if not types <= _numbers | ITEM_TYPES:
                    return None
                return fast_metrics(
                    {key: value if type(value) in _numbers else value.item() for key, value in data.items()}
                )
            if not types <= _floats and not -MAX_EXACT_INT <= min(values) <= max(values) <= MAX_EXACT_INT:
                return None
            finite = all(map(isfinite, values))  # sum would add through numpy's scalars, slowly and with warnings
        if finite and len(data) <= MAX_KEYS:
            return b'"metrics":' + _dumps(data, option=_NUMPY)
    except (AttributeError, TypeError, OverflowError, ValueError, RuntimeError):
        pass  # keys or values for the careful way, or another thread changed the dict meanwhile
    return None


def metric_bodies(data: Any, notes: Notes, redact: Redact = keep) -> list[bytes]:
    """The bodies of the records for one call: `"metrics":{…}` and, where needed, decimals and texts."""
    first, *others = metric_parts(data, notes, redact)
    return [_part_body(first, notes.replaced), *(_part_body(part, 0) for part in others)]


def _part_body(part: Part, replaced: int) -> bytes:
    body = b'"metrics":' + _dumps(part.numbers)
    if part.decimals:
        body += b',"decimals":' + _dumps(part.decimals)
    if part.texts:
        body += b',"texts":' + _dumps(part.texts)
    return body + _replaced(replaced)


def _replaced(count: int) -> bytes:
    return b',"replaced":%d' % count if count else b""


def generation_body(body: dict[str, Any], replaced: int) -> bytes:
    return b'"generation":' + _dumps(body) + _replaced(replaced)


def span_body(body: dict[str, Any], replaced: int) -> bytes:
    return b'"span":' + _dumps(body) + _replaced(replaced)


def event_body(kind: str, body: dict[str, Any], replaced: int = 0) -> bytes:
    return b'"event":' + _dumps(kind) + b',"body":' + _dumps(body) + _replaced(replaced)


def table_of_body(body: bytes) -> str:
    """The table a body belongs to, by its first key."""
    return {b"m": "metrics", b"g": "generations", b"s": "spans", b"e": "events"}[body[1:2]]


def record_line(seq: int, ts: int, step: int | None, ordinal: int | None, body: bytes) -> bytes:
    """One record: ts in ns since the epoch; `ordinal` counts the step-less calls for metrics and generations, and stands only there."""
    if step is not None:
        line = b'{"seq":%d,"ts":%d,"step":%d,' % (seq, ts, step) + body
    elif ordinal is not None:
        line = b'{"seq":%d,"ts":%d,"step":null,"ordinal":%d,' % (seq, ts, ordinal) + body
    else:
        line = b'{"seq":%d,"ts":%d,"step":null,' % (seq, ts) + body
    return line + b',"crc":"%08x"}\n' % crc32c(line)


def header_line(header: dict[str, Any]) -> bytes:
    """The first line of a journal: has `format` and no `seq`."""
    return checked_json({"format": FORMAT, **header})


def checked_json(value: dict[str, Any]) -> bytes:
    """One JSON object that proves itself, as a line: run.json, headers and manifests."""
    line = _dumps(value)[:-1]
    return b'%b,"crc":"%08x"}\n' % (line, crc32c(line))


def load_checked_json(content: bytes) -> dict[str, Any]:
    """Raises ValueError when the checksum is not right."""
    line = content.removesuffix(b"\n")
    if not is_intact(line):
        raise ValueError("checksum mismatch")
    return decode(line)


def is_intact(line: bytes) -> bool:
    """Whether a line (without its newline) carries its own checksum."""
    return (
        len(line) > CRC_LENGTH
        and line[-CRC_LENGTH:-10] == b',"crc":"'
        and line[-10:] == b'%08x"}' % crc32c(line[:-CRC_LENGTH])
    )


_SEQ = re.compile(rb'\{"seq":(\d+),')


def seq_of_line(line: bytes) -> int | None:
    """The seq of an intact line; None for a header."""
    match = _SEQ.match(line)
    return int(match[1]) if match else None


MANIFEST_KEYS = {
    *("format", "run", "writer", "number", "first_seq", "last_seq", "last_ts"),
    *("journal", "header", "tables", "damaged", "end"),
}
"""What a reader counts on; a file that proves itself and lacks one of them is another, put in its place."""
_HEADER_KEYS = {"format", "run", "writer", "attempt", "journal", "first_seq"}


def is_header(line: dict[str, Any]) -> bool:
    """Whether a line that proves itself holds what a reader counts on in a header."""
    attempt = line.get("attempt")
    return line.keys() >= _HEADER_KEYS and isinstance(attempt, dict) and attempt.keys() >= {"id", "number"}


_START = b'{"seq":'
_END = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_EFFORT = 16


def salvage(line: bytes) -> list[tuple[int, bytes]]:
    """(offset, record) of the intact records at either end of a damaged line, in order: lost newlines have joined them.

    Nothing is taken from the middle of what does not prove itself: the inputs of a span may hold whole records with their
    checksums, and those are data.
    """
    front = leading(line)
    return front + _trailing(line, front[-1][0] + len(front[-1][1]) if front else 0)


def leading(line: bytes) -> list[tuple[int, bytes]]:
    """(offset, record) of the intact records that a line begins with, up to the first that does not prove itself."""
    found, start = [], 0
    while start >= 0 and (length := _intact_length(line, start)):
        found.append((start, line[start : start + length]))
        start = line.find(_START, start + length)
    return found


def _intact_length(line: bytes, start: int) -> int:
    """Length of the record that begins at `start`, 0 when none proves itself. Reads once, whatever checksums are inside."""
    checksum, done = 0, start
    for match in _END.finditer(line, start):
        checksum, done = extend_crc32c(checksum, line[done : match.start()]), match.start()
        if match[1] == b"%08x" % checksum:
            return match.end() - start
    return 0


def _trailing(line: bytes, start: int) -> list[tuple[int, bytes]]:
    """(offset, record) of the intact records that a line ends with, none of them before `start`.

    All tries together read no more than _EFFORT times the line, so that a line made to be hard costs no more than others.
    """
    found: list[tuple[int, bytes]] = []
    at = end = len(line)
    left = _EFFORT * len(line)
    while (at := line.rfind(_START, start, at)) >= 0 and (left := left - (end - at)) >= 0:
        if is_intact(line[at:end]):
            found.insert(0, (at, line[at:end]))
            end = line.rfind(b',"crc":"', start, at) + CRC_LENGTH
    return found


def decode(line: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = orjson.loads(line)
    return decoded


def end_of(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """{"status", "ts"} where a writer's last record is its finish, else None."""
    if record is None or record.get("event") != "finish":
        return None
    return {"status": record["body"]["status"], "ts": record["ts"]}


def check_format(found: object, where: str) -> None:
    """Refuse what a later release has written: reading it with today's rules would be a guess."""
    if not isinstance(found, int) or found > FORMAT:
        raise NewerFormatError(
            f"{where}: format {found}, this release reads up to format {FORMAT}; install a newer spool-sync"
        )


def check_newer(content: bytes, where: str) -> None:
    """Refuse JSON that does not prove itself because a later release wrote it another way; anything else is damage."""
    if content.removesuffix(b"\n")[-CRC_LENGTH:-10] == b',"crc":"':
        return  # a checksum as ours that does not fit: damage, perhaps in the very number
    with suppress(ValueError, AttributeError):
        found = load_json(content).get("format")
        if isinstance(found, int):
            check_format(found, where)


def dump_json(value: object) -> bytes:
    """JSON for people and for tools: cursors, claims, output."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def load_json(content: bytes) -> Any:
    return orjson.loads(content)


def json_text(value: object) -> str:
    """One JSON text in one line, as the tables hold it."""
    return orjson.dumps(value).decode()
