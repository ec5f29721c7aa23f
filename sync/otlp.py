"""Spans as OpenTelemetry's protocol (OTLP) carries them, with the attributes by which MLflow knows types, inputs and outputs."""

import json
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


def span(row: dict[str, Any], trace_tags: dict[str, str]) -> Span:
    """An ended span; a root span carries the tags of its trace."""
    attributes = json.loads(row["attributes"]) if row["attributes"] else {}
    attributes["mlflow.spanType"] = row["type"]
    for column, key in (("inputs", "mlflow.spanInputs"), ("outputs", "mlflow.spanOutputs")):
        if row[column] is not None:
            attributes[key] = json.loads(row[column])
    if row["parent_id"] is None:
        attributes |= {f"mlflow.traceTag.{key}": text for key, text in trace_tags.items()}
    is_error = row["status"] == "ERROR"
    return Span(
        trace_id=bytes.fromhex(row["trace_id"]),
        span_id=bytes.fromhex(row["span_id"]),
        parent_span_id=bytes.fromhex(row["parent_id"] or ""),
        name=row["name"],
        start_time_unix_nano=row["start"],
        end_time_unix_nano=row["end"],
        attributes=[KeyValue(key=str(key), value=_any(value)) for key, value in attributes.items()],
        status=Status(
            code=Status.STATUS_CODE_ERROR if is_error else Status.STATUS_CODE_OK, message=row["message"] or ""
        ),
    )


def _any(value: Any) -> AnyValue:
    """A JSON value; integers beyond 64 bits, which OTLP does not have, become texts."""
    if value is None:
        return AnyValue()
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, dict):
        return AnyValue(
            kvlist_value=KeyValueList(values=[KeyValue(key=key, value=_any(one)) for key, one in value.items()])
        )
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_any(one) for one in value]))
    return AnyValue(string_value=str(value))
