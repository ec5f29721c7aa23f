"""How far a replay is, on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import ExitStack
from types import TracebackType

import click

_LINE_EVERY_S = 60


class Progress:
    """`advance(n)` as n more records are behind us, of `total`."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._said_at = time.monotonic()
        self._stack = ExitStack()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = self._stack.enter_context(click.progressbar(range(total), label=label, file=sys.stderr))

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._said_at = time.monotonic()
            click.echo(f"{self._label}: {self._done}/{self._total}", err=True)

    def __enter__(self) -> "Progress":
        if self._bar is None:
            click.echo(f"{self._label}: delivering", err=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
