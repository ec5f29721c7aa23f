"""What several suites need: a clean environment, a place without network, the project's own folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NETWORK_NAMESPACES = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, a tracker or a make around the tests must not reach into them."""
    for name in list(os.environ):
        if name.startswith(("SPOOL_", "MLFLOW_", "WANDB_", "SWANLAB_", "MAKE", "MFLAGS")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def bin_folder() -> Path:
    """Where `spool`, `spool-sync` and `mlflow` are: the scripts of the interpreter that runs the tests."""
    return Path(sys.executable).parent


@pytest.fixture(scope="session")
def without_network() -> list[str]:
    """Words to put before a command so that it sees no network at all; none where the kernel does not allow that."""
    if shutil.which("unshare"):
        for prefix in NETWORK_NAMESPACES:
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return prefix
    return []
