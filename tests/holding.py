"""What MLflow answers, through its own client, about one run of a spool; and what the journals say it should."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import syncing


def read(folder: Path, uri: str, run_id: str, **environment: str | None) -> dict[str, Any]:
    """Asked by a process of its own: {"runs", "status", "params", "metrics", "spans", "linked", "generations"}."""
    settings = {"HOME": str(folder / "home"), **environment}
    process = syncing._processes.Process(target=_read, args=(folder, uri, run_id, settings))
    process.start()
    process.join(300)
    assert process.exitcode == 0, f"{uri} could not be read: {process.exitcode}"
    return json.loads((folder / "held.json").read_text())


def _read(folder: Path, uri: str, run_id: str, environment: dict[str, str | None]) -> None:
    os.chdir(folder)
    for key, value in environment.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    import mlflow

    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`spool.run_id` = '{run_id}'")
    held: dict[str, Any] = {"runs": len(runs)}
    if len(runs) == 1:
        [run] = runs
        held |= {"status": run.info.status, "params": run.data.params, "metrics": [], "spans": {}, "linked": []}
        for key in run.data.metrics:
            for one in client.get_metric_history(run.info.run_id, key):
                value = "NaN" if math.isnan(one.value) else one.value
                held["metrics"].append([one.key, value, one.timestamp, one.step])
        here, token = [run.info.experiment_id], None
        while token is None or token:
            page = client.search_traces(locations=here, max_results=100, page_token=token)
            token = page.token or ""
            for trace in page:
                for one in trace.data.spans:
                    held["spans"][one.span_id] = [
                        trace.info.trace_id.removeprefix("tr-"),
                        one.parent_id,
                        one.name,
                        one.span_type,
                        one.start_time_ns,
                        one.end_time_ns,
                        one.status.status_code.value,
                        one.inputs,
                        one.outputs,
                    ]
        token = None
        while token is None or token:
            page = client.search_traces(
                locations=here, run_id=run.info.run_id, include_spans=False, max_results=100, page_token=token
            )
            token = page.token or ""
            held["linked"] += [trace.info.trace_id.removeprefix("tr-") for trace in page]
        target = folder / f"downloaded-{os.getpid()}"
        if any(one.path == "generations" for one in client.list_artifacts(run.info.run_id)):
            mlflow.artifacts.download_artifacts(
                run_id=run.info.run_id, artifact_path="generations", dst_path=str(target.absolute())
            )
        held["generations"] = syncing.stored_generations(target)
    (folder / "held.json").write_text(json.dumps(held))


def recorded_metrics(spool: Path) -> Counter[tuple[Any, ...]]:
    """Each row once: MLflow cannot tell equal ones apart."""
    return Counter(set(syncing.logged_metrics(spool)))


def recorded_spans(spool: Path) -> dict[str, tuple[Any, ...]]:
    bodies = {one["span"]["span_id"]: one["span"] for one in syncing.records(spool) if one.get("span", {}).get("end")}
    return {
        key: (*rest, bodies[key].get("inputs"), bodies[key].get("outputs"))
        for key, rest in syncing.logged_spans(spool).items()
    }


def assert_exact(spool: Path, held: dict[str, Any], status: str = "FINISHED") -> None:
    """Value by value: MLflow holds what the journals hold, once, and nothing else. Of a spool with one run."""
    sealed = [path.parent for path in spool.glob("*/*/*/metrics.parquet")]
    assert all(path.with_suffix(".jsonl").exists() for path in sealed), "only journals are read here"
    assert held["runs"] == 1
    assert held["status"] == status
    assert Counter(tuple(one) for one in held["metrics"]) == recorded_metrics(spool)
    spans = recorded_spans(spool)
    assert {key: tuple(one) for key, one in held["spans"].items()} == spans
    assert sorted(held["linked"]) == sorted({one[0] for one in spans.values()})
    assert [tuple(one) for one in held["generations"]] == syncing.logged_generations(spool)
