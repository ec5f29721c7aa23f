"""What several suites need: a clean environment, a place without network, the project's own folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.process import open_runs

ROOT = Path(__file__).parent.parent
NETWORK_NAMESPACES = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, a tracker or a make around the tests must not reach into them."""
    for name in list(os.environ):
        if name.startswith(("SPOOL_", "MLFLOW_", "WANDB_", "SWANLAB_", "MAKE", "MFLAGS")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_writer_outlives_its_test() -> Iterator[None]:
    """A writer that a test leaves open would go on in its thread, into the faults that the next test injects."""
    yield
    for run in list(open_runs):
        writer = run._writer
        if writer is not None:
            writer._stop.set()
            writer._wake.set()
            writer._thread.join()
            writer.abandon()
        open_runs.discard(run)


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
