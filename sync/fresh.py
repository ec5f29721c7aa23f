"""A file that is made aside and appears complete, for what another library fills in several steps."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spool import files


def make(target: Path, fill: Callable[[Path], None]) -> None:
    """Make `target` appear with what `fill(path)` writes, unless it is there already or another process is faster.

    No lock, so that nobody waits for one that was killed; what such a one leaves is a dot file beside it. Durable when this
    returns.
    """
    if target.exists():
        return
    aside = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        fill(aside)
        files.sync_file(aside)
        with suppress(FileExistsError):
            files.rename_new(aside, target)
    finally:
        with suppress(FileNotFoundError):  # renamed, or never made
            files.unlink(aside)
    files.sync_folder(target.parent)
