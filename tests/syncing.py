"""What the suites of sync share: spools made by real processes, spool-sync run (and killed) in real processes, and two independent
readings: what was recorded, from the journal's lines, and what MLflow stores, from its database."""

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WRITING = {
    "mlflow.store.tracking.sqlalchemy_store": (
        "SqlAlchemyStore",
        (
            "create_experiment",
            "create_run",
            "log_batch",
            "log_spans",
            "link_traces_to_run",
            "set_trace_tag",
            "update_run_info",
        ),
    ),
    "sync.bulk": ("Bulk", ("log",)),
    "mlflow.store.artifact.local_artifact_repo": ("LocalArtifactRepository", ("log_artifact",)),
}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["sync.cli", "sync.destinations.mlflow"]
)  # importing MLflow takes seconds: once is enough


def record(folder: Path, source: str, *, expect: int = 0) -> Path:
    """Run a program that uses spool; returns the spool it wrote."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    environment |= {"SPOOL_DIR": str(folder / "spool-data"), "PYTHONPATH": str(ROOT)}
    program = f"import math, os, signal, spool\n{source}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == expect, done.stderr.decode()
    return folder / "spool-data"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        [run] = json.loads(self.out)["runs"]
        return run["tables"]


def sync(
    folder: Path,
    *arguments: str,
    uri: str | None = None,
    kill_after: int | None = None,
    kill_after_s: float | None = None,
    environment: dict[str, str | None] | None = None,
    clock_s: float = 0,
    timeout_s: float = 120,
    prepare: Callable[[], None] | None = None,
) -> Result:
    """`spool-sync --to mlflow …` in `folder`, as a process of its own; SIGKILLed once that many remote writes are done, or
    after that time. `clock_s`: how far its clock is wrong. `prepare`, a function of a module, is called in that process before.
    """
    settings = {"HOME": str(folder / "home"), "MLFLOW_TRACKING_URI": uri, **(environment or {})}
    process = _processes.Process(target=_sync, args=(folder, list(arguments), settings, kill_after, clock_s, prepare))
    process.start()
    if kill_after_s is not None:
        process.join(kill_after_s)
        process.kill()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"spool-sync hangs: {(folder / 'err').read_text()}")
    return Result(process.exitcode, _text(folder / "out"), _text(folder / "err"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""  # killed before it had begun


def _sync(
    folder: Path,
    arguments: list[str],
    environment: dict[str, str | None],
    kill_after: int | None,
    clock_s: float,
    prepare: Callable[[], None] | None,
) -> None:
    os.chdir(folder)
    for key, value in environment.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    if clock_s:
        now, now_ns = time.time, time.time_ns
        time.time, time.time_ns = lambda: now() + clock_s, lambda: now_ns() + int(clock_s * 1e9)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), descriptor)
    if kill_after is not None:
        _die_after(kill_after)
    if prepare is not None:
        prepare()
    from sync.cli import main

    main(["--to", "mlflow", *arguments])


def _die_after(count: int) -> None:
    """Arrange for SIGKILL right after the `count`-th remote write has been answered."""
    import importlib

    import requests

    left = [count]

    def counted(call: Any, *, is_write: Any = lambda *_: True) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            left[0] -= bool(is_write(*arguments))
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return wrapper

    for module, (owner, methods) in WRITING.items():
        found = getattr(importlib.import_module(module), owner)
        for method in methods:
            setattr(found, method, counted(getattr(found, method)))
    reads = ("/search", "/batchGet", "search-traces")
    requests.Session.request = counted(  # type: ignore[method-assign]
        requests.Session.request, is_write=lambda _, method, url: method != "GET" and not url.endswith(reads)
    )


# --- what was recorded


def records(spool: Path) -> list[dict[str, Any]]:
    """Every line of every journal, read as what it is documented to be: JSON with a seq."""
    found = []
    for journal in sorted(spool.glob("*/*/*.jsonl")):
        for line in journal.read_text().splitlines():
            body = json.loads(line)
            if "seq" in body:
                found.append(body | {"writer": journal.parent.name})
    return found


def logged_metrics(spool: Path) -> Counter[tuple[str, float | str, int, int]]:
    """(key, value, ms, step) of all numbers; NaN as a text, because it equals nothing."""
    words = {"NaN": "NaN", "Infinity": 1.7976931348623157e308, "-Infinity": -1.7976931348623157e308}
    found: Counter[tuple[str, float | str, int, int]] = Counter()
    for one in records(spool):
        for key, value in one.get("metrics", {}).items():
            step = one["step"] if one["step"] is not None else one["ordinal"]
            found[key, words.get(value, value), one["ts"] // 1_000_000, step] += 1
    return found


def logged_spans(spool: Path) -> dict[str, tuple[Any, ...]]:
    ended = [one["span"] for one in records(spool) if one.get("span", {}).get("end")]
    return {
        one["span_id"]: (
            one["trace_id"],
            one.get("parent_id"),
            one["name"],
            one["type"],
            one["start"],
            one["end"],
            one["status"],
        )
        for one in ended
    }


# --- what MLflow stores


def query(database: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def stored_metrics(database: Path) -> Counter[tuple[str, float | str, int, int]]:
    rows = query(database, "select key, value, timestamp, step, is_nan from metrics")
    return Counter((key, "NaN" if is_nan else value, ms, step) for key, value, ms, step, is_nan in rows)


def stored_spans(database: Path) -> dict[str, tuple[Any, ...]]:
    columns = "span_id, trace_id, parent_span_id, name, type, start_time_unix_nano, end_time_unix_nano, status"
    return {
        span_id: (trace_id.removeprefix("tr-"), *rest)
        for span_id, trace_id, *rest in query(database, f"select {columns} from spans")
    }


def linked_traces(database: Path) -> Counter[str]:
    return Counter(
        one for (one,) in query(database, "select source_id from entity_associations where source_type = 'trace'")
    )


def stored_generations(artifacts: Path) -> list[tuple[Any, ...]]:
    """(step, split, index, input, output, score) of all tables, wherever the artifacts of one run are."""
    found = []
    for path in sorted(artifacts.glob("**/generations/**/*.json")):
        document = json.loads(path.read_text())
        for values in document["data"]:
            row = dict(zip(document["columns"], values, strict=True))
            found.append(tuple(row[key] for key in ("step", "split", "index", "input", "output", "score")))
    return sorted(found)


def logged_generations(spool: Path) -> list[tuple[Any, ...]]:
    bodies = [(one["step"], one["generation"]) for one in records(spool) if "generation" in one]
    columns = ("split", "index", "input", "output", "score")
    return sorted((step, *(body.get(key) for key in columns)) for step, body in bodies)


def assert_equal(spool: Path, database: Path, artifacts: Path, names: dict[str, str] | None = None) -> None:
    """Value by value: MLflow holds what was recorded, once, and nothing else."""
    expected = Counter({((names or {}).get(key, key), *rest) for key, *rest in logged_metrics(spool)})
    assert stored_metrics(database) == expected
    assert stored_spans(database) == logged_spans(spool)
    assert linked_traces(database) == Counter({f"tr-{span[0]}": 1 for span in logged_spans(spool).values()})
    assert stored_generations(artifacts) == logged_generations(spool)
    assert query(database, "select count(*) from runs") == [(1,)]
