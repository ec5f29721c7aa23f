"""spool: metrics, generations and agent traces to local files, at the price of one write(2) a call.

    import spool

    run = spool.init(project="verl_math", experiment="qwen2_7b_grpo_gsm8k", config=cfg)
    run.log({"critic/score/mean": 0.41}, step=5)
    run.finish()

    spool.open("spool-data").runs()[0].metrics()   # pyarrow.Table

Importing costs < 100 ms and pulls in neither pyarrow nor any tracker; pyarrow comes with the first read.
"""

import os
from typing import TYPE_CHECKING

from spool.errors import FinishedRunError, NewerFormatError, NotASpoolError, SpoolError, UnknownRunError, WriteError
from spool.run import Run
from spool.span import Span
from spool.start import init

if TYPE_CHECKING:
    from spool.reader import Spool

__version__ = "0.1.0"
__all__ = [
    "FinishedRunError",
    "NewerFormatError",
    "NotASpoolError",
    "Run",
    "Span",
    "SpoolError",
    "UnknownRunError",
    "WriteError",
    "init",
    "open",
]


def open(path: str | os.PathLike[str]) -> "Spool":
    """Read a spool, live or copied; writes nothing into it.

    Raises NotASpoolError, or NewerFormatError for what a later release wrote.
    """
    from spool.reader import Spool

    return Spool(path)
