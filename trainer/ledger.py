"""What the trainer records, and the independent list of it.

All recording goes through `Recorder`. Where the environment variable `TRAINER_LEDGER` names a folder, each process also
appends one JSON line to its own file there AFTER each call returned. The list shares no code with spool, so that a test
which kills the trainer can compare the two. Numbers are written exactly: floats by `float.hex()`, integers as integers.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spool


class Ledger:
    """The list of one process: `<folder>/<pid>.jsonl`, one write(2) per line, never read by the trainer."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{os.getpid()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, entry: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")


class Recorder:
    """A spool run and, where asked for, the ledger beside it. Without a run (`None`) nothing is recorded."""

    def __init__(self, run: spool.Run | None) -> None:
        self._run = run
        folder = os.environ.get("TRAINER_LEDGER")
        self._ledger = Ledger(folder) if folder and run is not None else None

    def log(self, metrics: dict[str, float | int], step: int) -> None:
        if self._run is None:
            return
        self._run.log(metrics, step=step)
        values = {key: value if isinstance(value, int) else value.hex() for key, value in metrics.items()}
        self._note({"kind": "metrics", "step": step, "values": values})

    def log_generations(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        if self._run is None:
            return
        self._run.log_generations(step=step, rows=rows, split=split)
        for index, row in enumerate(rows):
            self._note({"kind": "generation", "step": step, "split": split, "index": index, **row})

    @contextlib.contextmanager
    def span(self, name: str, **details: Any) -> Iterator[Any]:
        """Record a span below the current one; an exception marks it as an error and goes on."""
        assert self._run is not None, "trajectories are traced only where a run records them"
        span = self._run.span(name, **details)
        try:
            with span:
                yield span
        finally:
            self._note({"kind": "span", "span_id": span.span_id, "name": name, "step": details["step"]})

    def flush(self) -> None:
        """What is recorded so far survives a power cut when this returns."""
        if self._run is not None:
            self._run.flush()

    def finish(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(status=status)

    def _note(self, entry: dict[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.append(entry)
