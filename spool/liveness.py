"""Whether the process that wrote a journal is provably dead.

Silence proves nothing (SIGSTOP, sleep, a suspended job). Proof needs the same boot and the same pid namespace, and the
pid gone or given to a process that started at another time. Everywhere else the answer is "unknown".
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any


def identity() -> dict[str, Any]:
    """What this process writes into its journal's header so that others can later prove its death."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": pid,
        "process_started": _started(pid),
    }


def is_alive(header: dict[str, Any]) -> bool | None:
    """True or False where it can be proven, None where it cannot."""
    boot, namespace = header.get("boot"), header.get("pid_namespace")
    if not boot or boot != _boot_id() or not namespace or namespace != _pid_namespace():
        return None
    pid, started = header.get("pid"), header.get("process_started")
    if not isinstance(pid, int) or started is None:
        return None
    return bool(_started(pid) == started)


def _boot_id() -> str | None:
    return _read("/proc/sys/kernel/random/boot_id") if sys.platform == "linux" else None


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or it is a zombie and writes no more."""
    stat = _read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    state, *rest = stat.rsplit(")", 1)[1].split()
    return None if state in "ZX" else int(rest[18])


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
