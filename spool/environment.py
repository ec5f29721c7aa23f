"""Where a run came from: code, machine, scheduler, seeds. Asked once at `init`, written into run.json, secrets masked."""

import getpass
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from spool.redact import mask_text

_MAX_DIFF_CHARS = 1_000_000
_GIT_TIMEOUT_S = 5
_SCHEDULER = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_NODELIST")
_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_SEEDS = ("PYTHONHASHSEED", "PL_GLOBAL_SEED", "SEED")


def describe() -> dict[str, Any]:
    """Everything run.json says of its origin; what cannot be found out is left out, nothing here raises."""
    return {
        "argv": [mask_text(argument) for argument in _hide_secret_options(sys.argv)],
        "executable": sys.executable,
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "user": _user(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "gpus": _gpus(),
        "git": _git(),
        "scheduler": _from_environment(_SCHEDULER),
        "distributed": _from_environment(_DISTRIBUTED),
        "seeds": _from_environment(_SEEDS),
        "ray": _ray(),
        "packages": _packages(),
    }


def _hide_secret_options(argv: list[str]) -> list[str]:
    """`--api-key VALUE` as two words: the second is joined to the first for masking."""
    hidden: list[str] = []
    for argument in argv:
        previous = hidden[-1] if hidden else ""
        if (
            previous.startswith("--")
            and "=" not in previous
            and mask_text(f"{previous}={argument}") != f"{previous}={argument}"
        ):
            argument = mask_text(f"{previous}={argument}").split("=", 1)[1]
        hidden.append(argument)
    return hidden


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        return None


def _from_environment(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _gpus() -> list[str]:
    return sorted(
        line.split(":", 1)[1].strip()
        for information in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    )


def _ray() -> dict[str, str]:
    """Session and job of a Ray that this process already uses; Ray is not imported for it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    return {"job_id": context.get_job_id(), "node_id": context.get_node_id()}


@cache
def _packages() -> dict[str, str]:
    found = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name))


def _git() -> dict[str, str]:
    commit = _run_git("rev-parse", "HEAD")
    if commit is None:
        return {}
    found = {"commit": commit, "branch": _run_git("rev-parse", "--abbrev-ref", "HEAD") or ""}
    remote = _run_git("config", "--get", "remote.origin.url")
    if remote:
        found["remote"] = mask_text(remote)
    diff = _run_git("diff", "HEAD", "--no-ext-diff", "--no-color")
    if diff:
        found["diff"] = mask_text(diff[:_MAX_DIFF_CHARS])
    return found


def _run_git(*arguments: str) -> str | None:
    """git's answer, or None where there is no git, no repository, or it takes too long (a cold network disk)."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
