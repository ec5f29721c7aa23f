"""What may be shown on a terminal, and whether anybody is there to see it.

What was recorded is anybody's text: it must not move the cursor, change colours or turn words around.
"""

import io
import select
import sys
import time
from datetime import datetime, timezone


def printable(text: str) -> str:
    r"""The text in one line; control characters, ANSI escapes, direction marks, lone surrogates are written as \x1b, \u202e."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def moment(ns: int, timespec: str = "seconds") -> str:
    """Nanoseconds since 1970 as `2026-12-01 09:30:00Z`; the number itself where no calendar has it."""
    try:
        return datetime.fromtimestamp(ns / 1e9, timezone.utc).isoformat(" ", timespec).replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"


def size(count: int) -> str:
    """Bytes for people: `1.3 GB`."""
    units = ("B", "kB", "MB", "GB")
    at = min(max(len(str(count)) - 1, 0) // 3, len(units) - 1)
    return f"{count / 1000**at:.{1 if at else 0}f} {units[at]}"


def wait_for_reader(seconds: float) -> bool:
    """Let time pass; false as soon as whoever read our stdout has gone, as `head` does after its lines."""
    try:
        descriptor = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):
        descriptor = -1
    if descriptor < 0 or not hasattr(select, "poll"):
        time.sleep(seconds)
        return True
    poll = select.poll()
    poll.register(descriptor, 0)
    return not poll.poll(seconds * 1000)
