"""Errors of the read side, as a tree by what the caller must do. A message says where, what was found, what to do.

SyncError
├── SetupError             the user changes something, then runs again: wrong use, a missing package (exit 1)
├── TryAgainError          back off and make the same call again; it was not refused, only not answered
├── RejectedRecordError    the destination refuses these records for what they are: set aside, count, go on (exit 3)
├── StoppedError           we were asked to end while waiting for an answer; nothing is lost
└── UnreachableError       give up for now; nothing is lost, the next run delivers all (exit 4)
    └── RefusedError       the destination answers, and says no to this run: other runs may still go on (exit 4)
"""


class SyncError(Exception):
    """Anything sync refuses; the message is one sentence for the user."""


class SetupError(SyncError):
    pass


class TryAgainError(SyncError):
    def __init__(self, message: str, after_s: float | None = None) -> None:
        """`after_s`: how long the destination asks us to wait (Retry-After); None where it does not say."""
        super().__init__(message)
        self.after_s = after_s


class RejectedRecordError(SyncError):
    pass


class StoppedError(SyncError):
    pass


class UnreachableError(SyncError):
    pass


class RefusedError(UnreachableError):
    pass
