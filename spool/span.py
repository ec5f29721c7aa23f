"""Spans: what an agent did, when, inside what. Nesting follows the context, so threads and asyncio tasks do not mix.

A new thread starts with an empty context and so with a new trace; pass `parent=` to stay in one.
"""

import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from spool.record import ask, shown

_current: ContextVar["Span | None"] = ContextVar("spool_span", default=None)

Record = Callable[["Span", dict[str, Any]], None]
"""Writes one state of a span: its start, and later its end."""


class Span:
    """One operation. Set `inputs`, `outputs`, `attributes`, `status` ("OK" | "ERROR") and `message` while it is open.

    As a context manager it ends with the block, as ERROR when an exception leaves it. `start()` and `end()` do the same
    by hand; ending twice changes nothing. The start is recorded too, so an open span survives a kill.
    """

    def __init__(
        self,
        record: Record,
        name: str,
        type: str,
        step: object,
        parent: "Span | None",
        inputs: object,
        attributes: dict[str, Any] | None,
        indices: dict[str, Any],
    ) -> None:
        self._record = record
        self._outer: Span | None = None
        self._started_ns = 0
        self._clock_ns = 0
        self._parent = parent
        self._step = step
        self._indices = indices
        self.name = name
        self.type = type
        self.inputs = inputs
        self.outputs: object = None
        given, is_mapping = ask(lambda: dict(attributes or {}))
        self.attributes: dict[str, Any] = given if is_mapping else {"attributes": attributes}
        self.status: str | None = None
        self.message: str | None = None
        self.trace_id = ""
        self.span_id = ""
        self.parent_id: str | None = None
        self.step: object = step

    @property
    def is_open(self) -> bool:
        return self._clock_ns > 0

    def start(self) -> "Span":
        """Take ids and time, become the current span of this context, and record the start. Once: then it changes nothing."""
        if self.is_open:
            return self
        self._outer = _current.get()
        while self._outer is not None and not self._outer.is_open:  # ended by another thread or task, or out of order
            self._outer = self._outer._outer
        parent = self._parent or self._outer_of_this_run()
        self.span_id = os.urandom(8).hex()
        self.trace_id = parent.trace_id if parent else os.urandom(16).hex()
        self.parent_id = parent.span_id if parent else None
        if parent:  # every span carries its root's step and indices
            self.step = parent.step if self._step is None else self._step
            self._indices = {**parent._indices, **self._indices}
        self._started_ns, self._clock_ns = time.time_ns(), time.monotonic_ns()
        _current.set(self)
        self._record(self, {**self._body(), "status": "OPEN"})
        return self

    def _outer_of_this_run(self) -> "Span | None":
        """Two runs in one process share the context, and not their traces."""
        outer = self._outer
        while outer is not None and not (outer.is_open and outer._record == self._record):
            outer = outer._outer
        return outer

    def end(self) -> None:
        """Record the end. The duration is measured on the monotonic clock, so a clock set back cannot make it negative."""
        if not self.is_open:
            return
        ended_ns = self._started_ns + time.monotonic_ns() - self._clock_ns
        self._clock_ns = 0
        if _current.get() is self:
            _current.set(self._outer)
        body = {**self._body(), "end": ended_ns, "status": self.status or "OK"}
        if self.message is not None:
            body["message"] = self.message
        if self.outputs is not None:
            body["outputs"] = self.outputs
        self._record(self, body)

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"trace_id": self.trace_id, "span_id": self.span_id}
        if self.parent_id is not None:
            body["parent_id"] = self.parent_id
        body |= {"name": self.name, "type": self.type, "start": self._started_ns}
        body |= self._indices
        if self.inputs is not None:
            body["inputs"] = self.inputs
        if type(self.attributes) is not dict or self.attributes:
            body["attributes"] = self.attributes
        return body

    def __enter__(self) -> "Span":
        return self.start()

    async def __aenter__(self) -> "Span":
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.status = "ERROR"
            self.message = self.message or shown(error)
        self.end()
