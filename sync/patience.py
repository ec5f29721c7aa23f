"""How long an answer is waited for: back-off with full jitter, one limit for a call with all its tries, an end at any moment."""

import random
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from sync.errors import StoppedError, TryAgainError, UnreachableError

T = TypeVar("T")
MAX_WAIT_S = 30.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0


def back_off_s(failures: int) -> float:
    """How long to wait after that many failures in a row: half of an exponential, and up to as much again by chance, so that
    many who failed at the same moment do not come back at the same moment.
    """
    longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(failures, 16))
    return longest / 2 + random.uniform(0, longest / 2)  # noqa: S311 - no secret


class Patience:
    """Makes calls until they are answered, each for at most `max_wait_s` from its first try."""

    def __init__(self, max_wait_s: float = MAX_WAIT_S, stop: Event | None = None) -> None:
        self.max_wait_s = max_wait_s
        self._stop = stop or Event()

    @property
    def is_over(self) -> bool:
        """Whether we were asked to end: what is in hand is finished, nothing new is begun."""
        return self._stop.is_set()

    def call(self, question: Callable[[], T]) -> T:
        """The answer. Raises UnreachableError when none came in time, StoppedError when we were asked to end meanwhile.

        Where the destination says how long to wait (Retry-After), it is not asked earlier.
        """
        began_s, failures = time.monotonic(), 0
        while True:
            try:
                return question()
            except TryAgainError as error:
                delay_s = max(back_off_s(failures), error.after_s or 0.0)
                failures += 1
                if time.monotonic() - began_s + delay_s > self.max_wait_s:
                    raise UnreachableError(
                        f"{error}; nothing is lost: see that it runs, its address and its disk, and run spool-sync again"
                    ) from error
                if self._stop.wait(delay_s):
                    raise StoppedError(f"{error}; asked to end while waiting") from error
