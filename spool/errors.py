"""Errors of the spool, as a tree. A message says where, what was found, and what to do.

SpoolError
├── NotASpoolError         the folder is not a spool, or cannot be made one
├── NewerFormatError       written by a later release; this one must not guess
├── UnknownRunError        no run, or several runs, answer to the name
├── FinishedRunError       joining a run that has ended; resuming it is meant, or another run
├── SealError              a journal could not be sealed; it stays as it is
└── WriteError             a record could not be written (raised with strict=True only)

Damage to recorded data is not an exception: readers report it (`spool.journal.Damage`) and go on.
"""


class SpoolError(Exception):
    """Anything the spool refuses; the message is one sentence for the user."""


class NotASpoolError(SpoolError):
    pass


class NewerFormatError(SpoolError):
    pass


class UnknownRunError(SpoolError):
    pass


class FinishedRunError(SpoolError):
    pass


class SealError(SpoolError):
    pass


class CompactError(SpoolError):
    pass


class RemoveError(SpoolError):
    pass


class WriteError(SpoolError):
    pass
