"""Names on their way to a destination: pure functions, verl's own mapping where verl has one.

verl's live logger and our replay give the same chart the same name. Two of our names may become one there; who keeps them apart
is the destination, which knows what is taken (`suffixed` gives the second name).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

MAX_CHARS = 225
"""Below MLflow's 250, which leaves room for a suffix and for a tag that names the key."""

_FORBIDDEN = re.compile(r"[^/\w.\- :]")


@lru_cache(maxsize=4096)  # a run has some hundred keys, and a row for each at every step
def tracker_key(key: str) -> str:
    """The key as verl's MLflow logger writes it (`@` -> `_at_`, `//` -> `/`, else `_`), and valid where verl's is not:
    no empty or dotted path parts, no line end, at most MAX_CHARS.
    """
    mapped = re.sub("/+", "/", _FORBIDDEN.sub("_", key.replace("@", "_at_").replace("\n", "_"))).strip("/")
    mapped = "/".join("_" * len(part) if set(part) <= {"."} else part for part in mapped.split("/")) or "_"
    return mapped if len(mapped) <= MAX_CHARS else f"{mapped[: MAX_CHARS - 9]}_{short_hash(key)}"


def suffixed(mapped: str, key: str) -> str:
    """Another name for `key` where `mapped` belongs to another key; the same on every machine."""
    return f"{mapped[: MAX_CHARS - 9]}_{short_hash(key)}"


def short_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def folder_name(text: str) -> str:
    """`text` as one part of a path. Not injective: what is put there must itself tell rows apart."""
    return tracker_key(text).replace("/", "_").replace(":", "_")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every leaf, as verl flattens: nested keys joined by `/`, a list as its `list_len` and its items."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}/")
        elif isinstance(value, list):
            items = {"list_len": len(value), **{str(at): item for at, item in enumerate(value)}}
            yield from flatten(items, f"{path}/")
        else:
            yield path, str(value)


def distinct(keys: Iterable[str]) -> dict[str, str]:
    """key -> its tracker key, no two alike, for keys that are all known at once."""
    taken: dict[str, str] = {}
    for key in sorted(keys, key=lambda one: (tracker_key(one) != one, one)):
        mapped = tracker_key(key)
        taken[mapped if mapped not in taken else suffixed(mapped, key)] = key
    return {key: mapped for mapped, key in taken.items()}
