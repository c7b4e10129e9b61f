"""Give a user's function the trace of the sample that it scores.

``current_traceparent`` returns it as a W3C ``traceparent``. Where OpenTelemetry is installed it is the current context
too, so that spans of the function and requests of instrumented clients belong to the sample's trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "TRACEPARENT"
"""Environment variable in which programs expect the trace of their caller."""
_current: ContextVar[str] = ContextVar("traceparent", default="")


def current_traceparent() -> str:
    """Return the ``traceparent`` of the sample that is being scored; empty where nothing is traced."""
    return _current.get()


@contextmanager
def within_trace(traceparent: str, *, alone: bool) -> Iterator[None]:
    """Make a trace the current one while the context lasts.

    Args:
        alone: nothing else runs in this process, so that its environment can hold ``TRACEPARENT`` for programs.
    """
    if not traceparent:
        yield
        return
    token = _current.set(traceparent)
    before = os.environ.get(VARIABLE)
    if alone:
        os.environ[VARIABLE] = traceparent
    try:
        with _opentelemetry(traceparent):
            yield
    finally:
        _current.reset(token)
        if alone and before is None:
            os.environ.pop(VARIABLE, None)
        elif alone and before is not None:
            os.environ[VARIABLE] = before


@contextmanager
def _opentelemetry(traceparent: str) -> Iterator[None]:
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        yield
        return
    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        context.detach(token)
