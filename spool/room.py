"""How much of the disk the spool leaves to others, and what it keeps for its own last words.

A training job needs the disk for its checkpoints, so the spool stops before the disk is full, in the order of what can be
missed: spans below the reserve, generations below half of it, metrics and events never (they end where the disk ends).
Under SPOOL_MAX_BYTES the same holds for the run's own size, and there everything stops but the writer's own last words.
"""

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spool import files

BALLAST_BYTES = 64 << 10
BALLAST_FILE = ".ballast"
MEASURE_RUN_EACH_S = 10.0
_MAX_RESERVE_BYTES = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Limits:
    """`max_bytes`: of one run, None for no limit. `reserve_bytes`: free space to leave, None for 2 % of the disk, at most 1 GiB."""

    max_bytes: int | None = None
    reserve_bytes: int | None = None


def parse_size(text: str) -> int:
    """Bytes, from "500M", "2G" or "1048576", in powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write bytes, or 500M, 20G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class Room:
    """For one writer. `refused` are the tables that must wait now, and `reason` says why."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._measured_s = float("-inf")
        self._run_bytes = 0
        self._written_bytes = 0
        self.refused: frozenset[str] = frozenset()
        self.reason = ""
        self._ballast: int | None = None
        self._is_whole = False
        self.take_back()

    def measure(self, now_s: float, written_bytes: int) -> None:
        """Look at the disk and, each MEASURE_RUN_EACH_S, at the run's size. Takes a system call or more: not for the hot path.

        `written_bytes`: all that this writer has written so far; between two looks at the run it is known to have grown by it.
        """
        free, reserve = self._disk()
        self.refused = _refused(free, reserve, floor=0)
        self.reason = f"{free:,} bytes free on the disk; see SPOOL_RESERVE_BYTES" if self.refused else ""
        limit = self._limits.max_bytes
        if limit is not None:
            if now_s - self._measured_s >= MEASURE_RUN_EACH_S:
                self._measured_s, self._run_bytes, self._written_bytes = (
                    now_s,
                    _size_bytes(self._folder.parent),
                    written_bytes,
                )
            left = limit - self._run_bytes - (written_bytes - self._written_bytes)
            refused = _refused(left, limit // 20, floor=1)
            if len(refused) > len(self.refused):
                self.refused = refused
                self.reason = f"{max(0, left):,} bytes left to this run; see SPOOL_MAX_BYTES"

    def _disk(self) -> tuple[int, int]:
        """(free bytes, reserve in bytes); no limit where the file system cannot tell."""
        try:
            found = os.statvfs(self._folder)
        except (OSError, AttributeError):  # not on Windows
            return 1, 0
        if not found.f_blocks:  # a tmpfs without a limit, some network file systems
            return 1, 0
        reserve = self._limits.reserve_bytes
        if reserve is None:
            reserve = min(_MAX_RESERVE_BYTES, found.f_blocks * found.f_frsize // 50)
        return found.f_bavail * found.f_frsize, reserve

    # --- the ballast: room for the loss and finish records of a writer on a full disk

    def take_back(self) -> None:
        """Hold the whole ballast, where the disk has it: one that is full already, or that cannot, is only less safe."""
        if self._is_whole:
            return
        with suppress(OSError):
            if self._ballast is None:
                self._ballast = files.open_new(self._folder / BALLAST_FILE)
            files.allocate(self._ballast, BALLAST_BYTES)
            self._is_whole = True

    def lend(self) -> None:
        """Free half of the ballast for one record; the other half stays for the end."""
        if self._ballast is not None and self._is_whole:
            self._is_whole = False
            with suppress(OSError):
                files.truncate(self._ballast, BALLAST_BYTES // 2)

    def release(self) -> None:
        """The end: free all of it."""
        if self._ballast is not None:
            with suppress(OSError):
                files.unlink(self._folder / BALLAST_FILE)
            self.abandon()  # the bytes are free once nobody holds the file

    def abandon(self) -> None:
        """Let go of the file, as a forked child must: it is its parent's."""
        if self._ballast is not None:
            with suppress(OSError):
                files.close(self._ballast)
            self._ballast = None


def _refused(room: int, reserve: int, floor: int) -> frozenset[str]:
    """The tables that wait when `room` bytes are left: spans first; metrics and events only at less than `floor`."""
    least = {"spans": reserve, "generations": reserve // 2, "metrics": floor, "events": floor}
    return frozenset(table for table, bytes_ in least.items() if room < bytes_)


def _size_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError):  # removed while we look
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                total += _size_bytes(Path(entry.path))
            else:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total
