"""Checkpoints in verl's layout, complete or absent: written aside, synced, renamed.

<folder>/global_step_5/state.pt
<folder>/latest_checkpointed_iteration.txt      "5", renamed into place after the checkpoint it names
<folder>/spool_run_id.txt                       the run these checkpoints belong to, from before the first of them
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

_LATEST = "latest_checkpointed_iteration.txt"
_RUN_ID = "spool_run_id.txt"


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message says which and what to do."""


class Checkpoints:
    """The checkpoints of one experiment. One trainer at a time writes here."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def prepare(self) -> None:
        """Make the folder. Raises `CheckpointError` if nothing can be written there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot hold checkpoints ({error.strerror})") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: cannot hold checkpoints (not writable)")

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keep `state` as that of `step`. Durable when this returns; killed at any moment, `load` finds this or the one before."""
        target = self.folder / f"global_step_{step}"
        aside = self.folder / f".global_step_{step}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with (aside / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        if (
            target.exists()
        ):  # of an earlier attempt or run; it is not the latest, so a kill between the two loses nothing
            shutil.rmtree(target)
        aside.rename(target)
        _sync_folder(self.folder)  # the name must be on disk before the file that points to it
        self._write_text(_LATEST, str(step))

    def latest_step(self) -> int | None:
        """Return the step of the last complete checkpoint, or None where there is none."""
        text = self._read_text(_LATEST)
        if text is None:
            return None
        if not text.isdigit():
            raise CheckpointError(f"{self.folder / _LATEST}: {text!r} is not a step; delete the file to start anew")
        return int(text) if (self.folder / f"global_step_{text}" / "state.pt").is_file() else None

    def load(self, step: int) -> dict[str, Any]:
        path = self.folder / f"global_step_{step}" / "state.pt"
        try:
            return torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({str(error).splitlines()[0]}); delete its folder or set trainer.resume_mode=disable"
            ) from None

    def run_id(self) -> str | None:
        return self._read_text(_RUN_ID)

    def begin_run(self, run_id: str) -> None:
        """Note that checkpoints from now on belong to `run_id`. Durable when this returns."""
        self._write_text(_RUN_ID, run_id)

    def forget(self) -> None:
        """Start anew: what is here is resumed from no more. Old checkpoints stay until new ones of their step replace them."""
        for name in (_LATEST, _RUN_ID):  # in this order: weights of an old run must not go on under a new one
            (self.folder / name).unlink(missing_ok=True)

    def _read_text(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_text(encoding="ascii").strip() if path.is_file() else None

    def _write_text(self, name: str, text: str) -> None:
        aside = self.folder / f".{name}.partial"
        with aside.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a name that points to an empty file would be worse than no name
        aside.rename(self.folder / name)
        _sync_folder(self.folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
