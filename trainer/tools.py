"""The calculator the policy may call. It evaluates exactly, without `eval()`, and it can fail.

expression = term (("+" | "-") term)*      term = factor (("*" | "/") factor)*
factor     = "-" factor | "(" expression ")" | number
"""

import random
import re
from fractions import Fraction

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")
_MAX_LENGTH = 64  # characters; bounds the recursion and the size of a product


class ToolError(Exception):
    """A tool call failed; the message is what the policy is answered."""


class Calculator:
    """Evaluates arithmetic; `failure_rate` of the calls fail as a busy service would (drawn from `rng`)."""

    def __init__(self, failure_rate: float, rng: random.Random) -> None:
        self._failure_rate = failure_rate
        self._rng = rng

    def __call__(self, expression: str) -> str:
        """Return the value as text: an integer where it is one, else six significant digits. Raises `ToolError`."""
        if self._rng.random() < self._failure_rate:
            raise ToolError("busy")
        value = evaluate(expression)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def evaluate(expression: str) -> Fraction:
    """Return the exact value of `expression`. Raises `ToolError`: "syntax" or "division by zero"."""
    if len(expression) > _MAX_LENGTH:
        raise ToolError("syntax")
    tokens = []
    position = 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ToolError("syntax")
        tokens.append(match[1])
        position = match.end()
    value, rest = _sum(tokens)
    if rest:
        raise ToolError("syntax")
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        right, rest = _product(tokens[1:])
        value = value + right if tokens[0] == "+" else value - right
        tokens = rest
    return value, tokens


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in "*/":
        right, rest = _factor(tokens[1:])
        if tokens[0] == "/" and right == 0:
            raise ToolError("division by zero")
        value = value * right if tokens[0] == "*" else value / right
        tokens = rest
    return value, tokens


def _factor(tokens: list[str]) -> tuple[Fraction, list[str]]:
    if not tokens:
        raise ToolError("syntax")
    head, rest = tokens[0], tokens[1:]
    if head == "-":
        value, rest = _factor(rest)
        return -value, rest
    if head == "(":
        value, rest = _sum(rest)
        if rest[:1] != [")"]:
            raise ToolError("syntax")
        return value, rest[1:]
    if head in "+*/)":
        raise ToolError("syntax")
    return Fraction(head), rest
