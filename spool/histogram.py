"""Histograms: any array becomes 64 counts. Uses numpy where the user has it loaded, and is exact without."""

import sys
from math import isfinite
from typing import Any

BINS = 64


def summarize(values: object) -> dict[str, Any]:
    """{edges (65), counts (64), count, nonfinite, sum, min, max} of all numbers in `values` (list, array or tensor, any shape).

    Raises TypeError or ValueError when it holds anything else.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        return _summarize_array(numpy, values)
    flat: list[float] = []
    _flatten(values.tolist() if hasattr(values, "tolist") else values, flat)
    finite = [value for value in flat if isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    edges = _edges(low, high)
    counts = [0] * BINS
    width = edges[-1] - edges[0]
    for value in finite:
        counts[min(BINS - 1, int((value - edges[0]) / width * BINS))] += 1
    return _body(edges, counts, len(flat), len(flat) - len(finite), sum(finite), low, high)


def _summarize_array(numpy: Any, values: Any) -> dict[str, Any]:
    if hasattr(values, "detach"):  # a tensor: bf16 has no numpy counterpart
        values = values.detach().cpu().double()
    array = numpy.asarray(values)
    if array.dtype.kind in "cSUmM":  # the cast would drop imaginary parts, parse texts and forget units, in silence
        raise TypeError(f"{array.dtype} values")
    array = array.astype(numpy.float64, copy=False).ravel()
    finite = array[numpy.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    edges = _edges(low, high)
    counts = numpy.histogram(finite, bins=BINS, range=(edges[0], edges[-1]))[0].tolist()
    return _body(edges, counts, int(array.size), int(array.size - finite.size), float(finite.sum()), low, high)


def _edges(low: float, high: float) -> list[float]:
    if low == high:
        half = max(0.5, abs(low) * 1e-6)  # at 1e300 a half would be lost
        low, high = low - half, high + half
    return [low + (high - low) * at / BINS for at in range(BINS)] + [high]


def _body(
    edges: list[float], counts: list[int], count: int, nonfinite: int, total: float, low: float, high: float
) -> dict[str, Any]:
    return {
        "edges": edges,
        "counts": counts,
        "count": count,
        "nonfinite": nonfinite,
        "sum": total,
        "min": low,
        "max": high,
    }


def _flatten(values: Any, flat: list[float]) -> None:
    if isinstance(values, (list, tuple)):
        for value in values:
            _flatten(value, flat)
    elif isinstance(values, str):
        raise TypeError("texts")
    else:
        flat.append(float(values))
