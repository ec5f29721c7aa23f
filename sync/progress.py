"""How far a sync is, on stderr: a bar on a terminal, a line a minute elsewhere. Used by several threads."""

import sys
import time
from contextlib import ExitStack
from threading import Lock
from types import TracebackType

import click

_LINE_EVERY_S = 60


class Progress:
    """`advance` as more records are behind us, of `total`."""

    def __init__(self, total: int, *, is_quiet: bool = False) -> None:
        self._total, self._done, self._is_quiet = total, 0, is_quiet
        self._began_s = self._said_at_s = time.monotonic()
        self._stack, self._lock = ExitStack(), Lock()
        self._bar = None
        if sys.stderr.isatty() and not is_quiet:
            self._bar = self._stack.enter_context(
                click.progressbar(length=total, file=sys.stderr, item_show_func=lambda at: str(at or ""))
            )

    def advance(self, run_id: str, table: str, count: int) -> None:
        with self._lock:
            self._done += count
            now_s = time.monotonic()
            if self._bar is not None:
                self._bar.update(count, f"{run_id} {table}")
            elif now_s - self._said_at_s >= _LINE_EVERY_S and not self._is_quiet:
                self._said_at_s = now_s
                rate = self._done / (now_s - self._began_s)
                left_s = (self._total - self._done) / rate if rate else 0
                click.echo(
                    f"{run_id} {table}: {self._done}/{self._total}, {rate:.0f}/s, about {left_s:.0f} s left", err=True
                )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
