"""What a record may hold: user values made plain. Pure; knows neither JSON bytes nor files.

A user hands us numpy scalars, torch tensors, Decimals, nested dicts and objects we have never seen. Every function here
returns plain values, keeps numbers exact, and never raises for data: what we cannot take becomes its `repr`, and the
caller is told so that it can be counted.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from decimal import Decimal
from math import isnan, nan
from operator import index
from typing import Any

MAX_EXACT_INT = 2**53
"""Integers beyond this are not exact as a double, and many JSON readers read doubles: they are written as digits."""

MAX_KEYS = 1000
"""Metrics in one record; larger calls are split, each part with its own seq."""

MAX_REPR_CHARS = 10_000
_MAX_DEPTH = 64
_MIN_STEP, _MAX_STEP = -(2**63), 2**63 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")

Number = float | int | bool | str | None
"""A metric's value in the `metrics` map: a finite number, a bool, null, digits (a large int), or one of three words."""


@dataclass
class Part:
    """The metrics of one record: three maps, so that a text "NaN" and the float NaN can never be confused."""

    numbers: dict[str, Number] = field(default_factory=dict)
    decimals: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers) + len(self.decimals) + len(self.texts)

    def __contains__(self, key: str) -> bool:
        return key in self.numbers or key in self.decimals or key in self.texts


@dataclass
class Notes:
    """What had to be changed to record a call: counted, said once, and kept in the record where it matters."""

    replaced: int = 0
    """Lone surrogates stored as U+FFFD (UTF-8, and so JSON and Parquet, cannot hold them)."""
    untaken: list[str] = field(default_factory=list)
    """Type names of values stored as their repr."""


Redact = Callable[[str], str]
"""Masks what must never reach the disk, in one text."""


def keep(text: str) -> str:
    """The `Redact` that masks nothing."""
    return text


def clean_text(text: str, notes: Notes) -> str:
    if str.isascii(text):
        return str.__str__(text)
    cleaned, count = _SURROGATE.subn("�", text)
    notes.replaced += count
    return cleaned


def step_number(step: object) -> tuple[int | None, bool]:
    """(step, taken): an int64 from int, numpy int or integral float; None is a step-less call; anything else is not taken."""
    if step is None:
        return None, True
    if type(step) is bool:
        return None, False
    if issubclass(type(step), int):
        value, known = int.__int__(step), True  # type: ignore[arg-type]
    elif _method(step, "is_integer") is not None:
        value, known = ask(lambda: int(step) if step.is_integer() else None)  # type: ignore[call-overload,attr-defined]
    else:
        value, known = ask(lambda: index(step))  # type: ignore[arg-type]
    if known and type(value) is int and _MIN_STEP <= value <= _MAX_STEP:
        return value, True
    return None, False


def metric_parts(data: object, notes: Notes, redact: Redact = keep) -> list[Part]:
    """Flatten nested dicts with "/", make every value plain, and split so that no part has over MAX_KEYS or a key twice."""
    items = _items(data)
    parts = [Part()]
    for raw_key, value in _flatten("", [("value", data)] if items is None else items, (id(data),)):
        key = clean_text(raw_key, notes)
        part = parts[-1]
        if len(part) >= MAX_KEYS or key in part:
            part = Part()
            parts.append(part)
        _put(part, key, value, notes, redact)
    return parts


def _flatten(
    prefix: str, items: Iterable[tuple[object, object]], path: tuple[int, ...]
) -> Iterable[tuple[str, object]]:
    for raw_key, value in items:
        key = prefix + _key(raw_key)
        nested = len(path) < _MAX_DEPTH and type(value) is not float and id(value) not in path and _items(value)
        if nested:
            yield from _flatten(key + "/", nested, (*path, id(value)))
        else:
            yield key, value


def _key(raw: object) -> str:
    return str.__str__(raw) if issubclass(type(raw), str) else _repr(raw, Notes(), str)


def _items(value: object) -> list[tuple[object, object]] | None:
    """The pairs of a mapping, None for anything else. One that fails at some keys (OmegaConf's `???`) says so there."""
    if not ask(lambda: isinstance(value, Mapping))[0]:
        return None
    mapping: Mapping[object, object] = value  # type: ignore[assignment]
    # list(): one step under the interpreter lock, other threads may go on changing the original.
    items, known = ask(lambda: [(key, child) for key, child in list(mapping.items())])
    if not known:
        items, _ = ask(lambda: [(key, _child(mapping, key)) for key in list(mapping)])
    found: list[tuple[object, object]] | None = items
    return found


def _child(mapping: Mapping[object, object], key: object) -> object:
    child, known = ask(lambda: mapping[key])
    return child if known else f"<{type(mapping).__qualname__} value that cannot be read>"


def _put(part: Part, key: str, value: object, notes: Notes, redact: Redact) -> None:
    value, known = (value, True) if type(value) is float else scalar(value)
    if not known:
        part.texts[key] = clean_text(redact(_repr(value, notes)), notes)
    elif isinstance(value, Decimal):
        part.decimals[key] = str(value)
    elif isinstance(value, str):
        part.texts[key] = clean_text(redact(value), notes)
    elif isinstance(value, float):
        part.numbers[key] = value if value - value == 0.0 else _word(value)
    elif value is None or isinstance(value, bool) or -MAX_EXACT_INT <= value <= MAX_EXACT_INT:
        part.numbers[key] = value
    else:
        part.numbers[key] = _digits(value)


def _digits(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to print over 4,300 digits unless told otherwise
        return str(Decimal(value))


def _word(value: float) -> str:
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


_ITEM_NAMES = {("torch", "Tensor")} | {
    ("numpy", name)
    for name in ("float32", "float16", "int8", "int16", "uint8", "uint16", "uint32", "uint64", "ndarray")
}
ITEM_TYPES: set[type] = set()
"""numpy's and torch's own types, admitted when first met: their `item()` is exact, and known not to run foreign code."""
_MASKED_MODULES = ("numpy.ma", "numpy.ma.core")


def scalar(value: object) -> tuple[Any, bool]:
    """(plain value, True), or (value, False) when it is not one number, text or null.

    A 0-d or one-element numpy array or torch tensor counts as its number; float32 and bf16 widen exactly. Reading a CUDA
    tensor waits for the device, as in any tracker.
    """
    kind = type(value)
    if kind in ITEM_TYPES:
        try:
            plain = value.item()  # type: ignore[attr-defined]
        except (RuntimeError, ValueError, TypeError):  # many elements, or a meta tensor without any
            return value, False
        if type(plain) in (float, int, bool):
            return plain, True
    elif (kind.__module__, kind.__name__) in _ITEM_NAMES:
        ITEM_TYPES.add(kind)
        return scalar(value)
    if value is None or kind is bool:
        return value, True
    # By type and by the type's own method: a subclass may override anything, and a proxy lies about its class.
    if issubclass(kind, int):
        return int.__int__(value), True  # type: ignore[arg-type]
    if issubclass(kind, float):
        return float.__float__(value), True  # type: ignore[arg-type]
    if issubclass(kind, str):
        return str.__str__(value), True
    if issubclass(kind, Decimal):
        exact = Decimal(value)  # type: ignore[arg-type]
        return (exact, True) if exact.is_finite() else (float(exact) if not exact.is_snan() else float("nan"), True)
    item = _method(value, "item")
    if item is not None:
        if kind.__module__ in _MASKED_MODULES and ask(lambda: bool(value.mask))[0]:  # type: ignore[attr-defined]
            return value, False  # item() would tell what lies under the mask
        plain, known = ask(lambda: item(value))
        if known and issubclass(type(plain), (int, float, str)):
            return scalar(plain)
        if known and type(plain) is not type(value):
            return value, False
    if _method(value, "__float__") is not None:
        plain, known = ask(lambda: float(value))  # type: ignore[arg-type]
        if known:
            return plain, True
    return value, False


def jsonable(value: object, notes: Notes, redact: Redact = keep, depth: int = 0, path: tuple[int, ...] = ()) -> Any:
    """A tree of dict, list, str, number, bool and None that JSON holds exactly; NaN and large ints as in the metrics map.

    Arrays, tensors and sequences become lists, dataclasses and pydantic models dicts; a cycle, too deep a tree, or an
    unknown object becomes its repr. Of keys that are one text, the later ones get a number: {1: a, "1": b} is
    {"1": a, "1 (2)": b}.
    """
    plain, known = scalar(value)
    if known and not ask(lambda: bool(value.ndim))[0]:  # type: ignore[attr-defined] # a one-element array is a list here
        if isinstance(plain, str):
            return clean_text(redact(plain), notes)
        if isinstance(plain, Decimal):
            return str(plain)
        if isinstance(plain, float):
            return plain if plain - plain == 0.0 else _word(plain)
        if type(plain) is int and not -MAX_EXACT_INT <= plain <= MAX_EXACT_INT:
            return _digits(plain)
        return plain
    if depth < _MAX_DEPTH and id(value) not in path:
        opened, known = ask(lambda: _opened(value))
        children = opened if known else value
        inner = (*path, id(value))
        items = _items(children)
        if items is not None:
            return {key: jsonable(child, notes, redact, depth + 1, inner) for key, child in _distinct(items, notes)}
        elements, _ = ask(lambda: _elements(children))
        if elements is not None:
            if _are_plain(elements):
                return elements
            return [jsonable(child, notes, redact, depth + 1, inner) for child in elements]
    return clean_text(redact(_repr(value, notes)), notes)


def _opened(value: Any) -> object:
    """What stands for a dataclass, a pydantic model, an array or a tensor; any other value itself."""
    for method in ("model_dump", "tolist"):
        if _method(value, method) is not None:
            return getattr(value, method)()
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name, None) for one in dataclass_fields(value)}
    return value


def _elements(value: object) -> list[object] | None:
    is_list = isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, _NOT_LISTS)
    return list(value) if is_list else None  # type: ignore[call-overload]


_NOT_LISTS = (str, bytes, bytearray, memoryview, range)


def _are_plain(elements: list[Any]) -> bool:
    """Whether JSON holds all of these numbers as they are: token ids and log probabilities come by the thousand."""
    kinds = set(map(type, elements))
    if kinds == {int}:
        return bool(min(elements) >= -MAX_EXACT_INT and max(elements) <= MAX_EXACT_INT)
    total = sum(elements) if kinds == {float} else nan
    return bool(total - total == 0.0)


def _distinct(items: Iterable[tuple[object, object]], notes: Notes) -> Iterable[tuple[str, object]]:
    """Every pair under a key of its own, as text."""
    taken: set[str] = set()
    copies: dict[str, int] = {}
    for raw_key, child in items:
        name = key = clean_text(_key(raw_key), notes)
        while name in taken:
            copies[key] = copies.get(key, 1) + 1
            name = f"{key} ({copies[key]})"
        taken.add(name)
        yield name, child


def _method(value: object, name: str) -> Any:
    """A method of the value's type, or None; what the instance would say is not asked."""
    return ask(lambda: getattr(type(value), name, None))[0]


def _repr(value: object, notes: Notes, show: Callable[[object], str] = repr) -> str:
    notes.untaken.append(type(value).__qualname__)
    text, known = ask(lambda: show(value))
    if not known or not isinstance(text, str):
        return f"<{type(value).__qualname__} whose {show.__name__} fails>"
    return text if len(text) <= MAX_REPR_CHARS else f"{text[:MAX_REPR_CHARS]}… ({len(text)} characters)"


def ask(question: Callable[[], object]) -> tuple[Any, bool]:
    """(answer, True), or (None, False) when the user's object raises: its code may raise anything, and logging must not."""
    try:
        return question(), True
    except Exception:  # noqa: BLE001 - foreign __float__, __repr__ or item(): the one place where anything may come
        return None, False


def generation_body(row: object, position: int, split: object, notes: Notes, redact: Redact = keep) -> dict[str, Any]:
    """One generation: known columns by name, everything else in `extra`; texts stay whole at any length."""
    items = _items(row)
    fields: dict[Any, Any] = {"output": row} if items is None else dict(items)
    body: dict[str, Any] = {
        "split": clean_text(split if issubclass(type(split), str) else shown(split), notes),  # type: ignore[arg-type]
        "index": position,
    }
    own_index, known = scalar(fields.get("index"))
    if known and type(own_index) is int and _MIN_STEP <= own_index <= _MAX_STEP:
        body["index"] = own_index
        del fields["index"]
    for column in ("input", "output", "label"):
        if column in fields:
            value = jsonable(fields.pop(column), notes, redact)
            if value is not None:
                body[column] = value
    score, known = scalar(fields.get("score"))
    if known and isinstance(score, (bool, int, float, Decimal)):
        body["score"] = jsonable(
            float(Decimal(score)), notes
        )  # infinity beyond the largest double, where float(int) raises
        del fields["score"]
    elif known and score is None:
        fields.pop("score", None)
    if fields:
        body["extra"] = jsonable(fields, notes, redact)
    return body


def shown(value: object) -> str:
    """A value's repr for a message, whatever its own code does."""
    return clean_text(_repr(value, Notes()), Notes())
