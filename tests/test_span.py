"""Spans nest by context: with blocks, threads, asyncio tasks, and whatever order their ends come in."""

import asyncio
import threading

import pytest
from journals import begin, reader, rows

import spool


@pytest.fixture
def run(tmp_path):
    return begin(tmp_path)


def tree(run: spool.Run) -> dict[str, str | None]:
    """Name of each span → name of its parent."""
    found = rows(run, "spans")
    names = {row["span_id"]: row["name"] for row in found}
    return {row["name"]: names.get(row["parent_id"]) for row in found}


def one(run: spool.Run) -> dict:
    (row,) = rows(run, "spans")
    return row


def test_spans_nest_and_carry_their_roots_step_and_indices(run):
    with run.span("root", type="AGENT", step=5, sample_index=3, rollout_n=1, validate=True, inputs={"q": 1}) as root:
        with run.span("tool", type="TOOL", attributes={"k": [1]}) as tool:
            tool.outputs = {"v": 2}
        with run.span("other", step=9, sample_index=4):
            pass
        root.outputs = "done"
    found = {row["name"]: row for row in rows(run, "spans")}
    assert tree(run) == {"root": None, "tool": "root", "other": "root"}
    assert len({row["trace_id"] for row in found.values()}) == 1
    common = ("step", "sample_index", "rollout_n", "validate")
    assert [found["tool"][key] for key in common] == [5, 3, 1, True]
    assert [found["other"][key] for key in common] == [9, 4, 1, True]
    assert (found["tool"]["inputs"], found["tool"]["outputs"], found["tool"]["attributes"]) == (
        None,
        '{"v":2}',
        '{"k":[1]}',
    )
    assert (found["root"]["inputs"], found["root"]["outputs"], found["root"]["type"]) == ('{"q":1}', '"done"', "AGENT")
    assert all(row["status"] == "OK" and row["start"] <= row["end"] for row in found.values())
    assert (len(found["root"]["trace_id"]), len(found["root"]["span_id"])) == (32, 16)


def test_siblings_at_the_top_are_traces_of_their_own(run):
    for name in ("a", "b"):
        with run.span(name):
            pass
    assert len({row["trace_id"] for row in rows(run, "spans")}) == 2


def test_threads_have_traces_of_their_own_unless_a_parent_is_given(run):
    def work(parent: spool.Span | None, name: str) -> None:
        with run.span(name, parent=parent), run.span(f"inner {name}"):
            pass

    with run.span("root") as root:
        threads = [
            threading.Thread(target=work, args=(given, name)) for given, name in ((None, "own"), (root, "child"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tree(run) == {"root": None, "own": None, "inner own": "own", "child": "root", "inner child": "child"}


def test_concurrent_asyncio_tasks_do_not_mix(run):
    async def task(name: str, barrier: list[asyncio.Event]) -> None:
        with run.span(name):
            barrier[0].set()
            await barrier[1].wait()
            with run.span(f"inner {name}"):
                await asyncio.sleep(0)

    async def main() -> None:
        one, two = asyncio.Event(), asyncio.Event()
        with run.span("root"):
            await asyncio.gather(task("a", [one, two]), task("b", [two, one]))

    asyncio.run(main())
    assert tree(run) == {"root": None, "a": "root", "b": "root", "inner a": "a", "inner b": "b"}


def test_an_exception_marks_the_span_as_error_and_goes_on(run):
    with pytest.raises(ZeroDivisionError), run.span("tool"):
        raise ZeroDivisionError("by zero")
    assert (one(run)["status"], one(run)["message"]) == ("ERROR", "ZeroDivisionError('by zero')")


def test_a_status_and_message_set_by_hand_are_kept(run):
    with run.span("tool") as span:
        span.status, span.message = "ERROR", "timeout"
    assert (one(run)["status"], one(run)["message"]) == ("ERROR", "timeout")


def test_a_span_started_twice_is_one_span(run):
    span = run.span("tool").start()
    assert span.start() is span
    span.end()
    assert one(run)["status"] == "OK"
    with run.span("next"):
        pass
    assert tree(run)["next"] is None


def test_a_span_that_was_never_started_records_nothing(run):
    seq = run._writer.seq
    run.span("tool").end()
    assert run._writer.seq == seq


def test_spans_that_end_out_of_order_leave_the_context_clean(run):
    outer, inner = run.span("outer").start(), run.span("inner").start()
    outer.end()
    inner.end()
    with run.span("next"):
        pass
    assert tree(run) == {"outer": None, "inner": "outer", "next": None}


def test_any_value_in_any_field_is_recorded_and_can_be_read(run):
    with run.span(7, type=None, sample_index="x", rollout_n=2.0, validate="yes", step="no", inputs=object) as span:
        span.outputs, span.status, span.message = {1, 2}, 5, {"a": 1}
    row = one(run)
    assert (row["name"], row["type"], row["status"], row["message"]) == ("7", "None", "5", "{'a': 1}")
    assert (row["sample_index"], row["rollout_n"], row["validate"], row["step"]) == (None, 2, True, None)
    assert row["outputs"] == "[1,2]"


def test_a_clock_set_back_makes_no_duration_negative(run, monkeypatch):
    span = run.span("tool").start()
    monkeypatch.setattr("time.time_ns", lambda: 1)
    span.end()
    assert one(run)["end"] >= one(run)["start"]


def test_async_with_does_what_with_does(tmp_path):
    run = begin(tmp_path)

    async def agent() -> None:
        async with run.span("outer"), run.span("inner"):
            await asyncio.sleep(0)

    asyncio.run(agent())
    spans = {
        row["name"]: row for row in reader(run).spans().select(["name", "span_id", "parent_id", "status"]).to_pylist()
    }
    assert spans["inner"]["parent_id"] == spans["outer"]["span_id"]
    assert {row["status"] for row in spans.values()} == {"OK"}
