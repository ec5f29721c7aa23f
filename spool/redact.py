"""What must never reach the disk: secrets in configs and command lines, and whatever the user names in `redact=`. Pure."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from spool.record import Redact, ask

MASK = "[masked]"

_SECRET_WORDS = {
    "password",
    "passwd",
    "passphrase",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
    "authorization",
}
_SECRET_PAIRS = {
    ("api", "key"),
    ("access", "key"),
    ("private", "key"),
    ("secret", "key"),
    ("auth", "token"),
    ("access", "token"),
}
_TOKEN_TAILS = {"token"}  # "hf_token" is a secret, "max_tokens", "token2text" and "tokenizer" are not
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_TEXT = re.compile(
    r"(?:sk|pk|rk)-[A-Za-z0-9_\-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
    r"|xox[abprs]-[\w\-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w\-]{30,}"
    r"|eyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(?P<head>[a-z][a-z0-9+.\-]*://[^/\s:@]*:)[^/\s@]+(?=@)", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"(?P<key>[\w.\-]+)(?P<sep>\s*[=:]\s*['\"]?)(?P<value>[^\s'\",;]{3,})")


def is_secret_name(key: str) -> bool:
    """Whether a value under this name is one that people would not want on a page: `hf_token` yes, `max_tokens` no."""
    words = [word.lower() for word in _WORDS.findall(key)]
    while words and words[-1].isdigit():  # "hf_token_2", and the number of a key that was there already
        words.pop()
    return (
        bool(_SECRET_WORDS.intersection(words))
        or bool(_SECRET_PAIRS.intersection(pairwise(words)))
        or (len(words) > 1 and words[-1] in _TOKEN_TAILS)
    )


def mask_text(text: str) -> str:
    """Mask what looks like a secret in free text: known token shapes, passwords in URLs, `api_key=…`."""
    text = _URL_PASSWORD.sub(lambda match: match["head"] + MASK, _SECRET_TEXT.sub(MASK, text))

    def mask(match: re.Match[str]) -> str:
        secret = is_secret_name(match["key"])
        return match["key"] + match["sep"] + (MASK if secret else match["value"])

    return _ASSIGNMENT.sub(mask, text)


def mask_tree(value: Any) -> Any:
    """A JSON tree with secrets masked, by name and by shape."""
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_name(key) and isinstance(child, str) and child else mask_tree(child)
            for key, child in value.items()
        }
    if isinstance(value, list):
        return [mask_tree(child) for child in value]
    return mask_text(value) if isinstance(value, str) else value


class Patterns:
    """The user's patterns as one `Redact`; counts what it masks."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError naming the pattern that is not a regular expression."""
        self.masked = 0
        self._patterns = []
        for pattern in patterns:
            try:
                self._patterns.append(re.compile(pattern))
            except re.error as error:
                raise ValueError(f"redact pattern {pattern!r} is not a regular expression: {error}") from error

    def __call__(self, text: str) -> str:
        for pattern in self._patterns:
            text, count = pattern.subn(MASK, text)
            self.masked += count
        return text


def _mask_by(redact: Redact, text: str) -> str:
    """Logging must not fail, and what a failing function was to hide must not reach the disk: the text is masked whole."""
    masked, known = ask(lambda: redact(text))
    return masked if known and isinstance(masked, str) else MASK


def capture(redact: Redact | Iterable[str] | None) -> Redact | None:
    """`redact=` of `init`: a function from text to text, or regular expressions; by default SPOOL_REDACT, one a line."""
    if redact is None:
        redact = [line for line in os.environ.get("SPOOL_REDACT", "").splitlines() if line]
    if isinstance(redact, Callable):  # type: ignore[arg-type]
        return partial(_mask_by, redact)  # type: ignore[arg-type] # a union with Iterable is not narrowed by Callable
    patterns = [redact] if isinstance(redact, str) else list(redact)  # type: ignore[arg-type]
    return Patterns(patterns) if patterns else None
