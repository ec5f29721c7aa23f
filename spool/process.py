"""What a process has only one of: its stderr, its environment, its exit, its forks. Knows of runs only that they are open."""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol


class OpenRun(Protocol):
    id: str
    path: Path
    attempt: str

    def finish(self, status: str = "finished") -> None: ...
    def after_fork(self) -> None: ...


open_runs: set[OpenRun] = set()
"""Held here until they finish: a script may drop its last reference at the end of `main()`, and is still told how it ended."""
_exported: dict[str, str] = {}
"""Environment variables that this process set for its children."""
_exported_by = 0
_exit_codes: list[object] = []
_sys_exit = sys.exit
_is_watching = False


def warn(message: str) -> None:
    """One line on stderr; where nobody listens any more (closed, a broken pipe), training goes on all the same.

    RuntimeError: a signal handler that warns in the middle of another warning.
    """
    if sys.stderr is not None:
        with suppress(OSError, ValueError, RuntimeError):
            print(f"spool: {message}", file=sys.stderr, flush=True)


def opened(run: OpenRun) -> None:
    """From now on the run hears of this process's forks and of its end."""
    global _is_watching  # noqa: PLW0603 - sys.exit is as global
    if not _is_watching:
        _is_watching = True
        sys.exit = _exit
    open_runs.add(run)


def closed(run: OpenRun) -> None:
    """The run has finished: children started from now on do not find it any more."""
    open_runs.discard(run)
    if _exported_by == os.getpid() and _exported.get("SPOOL_RUN_ID") == run.id:
        for name, value in _exported.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        _exported.clear()


def export(run: OpenRun) -> None:
    """Let child processes (Ray actors, ranks, forks) find the run with no other communication."""
    global _exported_by  # noqa: PLW0603 - the environment it speaks of is as global
    _exported_by = os.getpid()
    _exported.update(SPOOL_DIR=str(run.path.parent), SPOOL_RUN_ID=run.id, SPOOL_ATTEMPT=run.attempt)
    os.environ.update(_exported)


def inherited(name: str) -> str | None:
    """An environment variable as this process got it: None where it was this process that set it for its children."""
    value = os.environ.get(name)
    if _exported_by == os.getpid() and value is not None and _exported.get(name) == value:
        return None
    return value or None


def _exit(code: Any = None) -> NoReturn:
    """`sys.exit`, whose code the interpreter no longer tells when it ends."""
    _exit_codes.append(code)
    _sys_exit(code)


def _finish_at_exit() -> None:
    """Politeness, never safety: an interpreter that ends by itself says how."""
    raised = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    failed = raised is not None or _exit_codes[-1:] not in ([], [None], [0])
    for run in list(open_runs):
        run.finish("failed" if failed else "finished")


def _after_fork() -> None:
    for run in list(open_runs):
        run.after_fork()


atexit.register(_finish_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
