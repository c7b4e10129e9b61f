"""Describe a user's function, and convert what it returns into typed scores; a failure never becomes a number.

The description is written by the job and read by the process that loads the file. While a call lasts, the trace of its
sample is the current one: ``current_traceparent`` returns it as a W3C ``traceparent``. Where OpenTelemetry is installed
it is the current context too, so that spans of the function and requests of instrumented clients belong to the sample's
trace.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from plaudit_reward.scorer import Score
from plaudit_wire.plain import PlainDataError, error_text, plain, plain_text
from plaudit_wire.printable import shown
from plaudit_wire.records import OUTCOMES

_MAX_TEXT_CHARACTERS = 2_000
"""Longer texts in ``extra`` are cut, because every score carries them."""
_MAX_EXTRAS = 256
_NO_LISTS = (str, bytes, bytearray, Mapping, set, frozenset)
"""Have a length and can be iterated, and yet hold no scores in the order of their samples."""
OF_THE_STREAM: Final = ("poison", "given_up")
"""Outcomes that no scorer may give."""
_EXPECTED = "return a number, None, a dict with 'score', a (score, request_text, explanation) tuple, or a Score"


def to_score(value: Any) -> Score:
    """Return the score of one returned value.

    ``None`` is ``skipped``; NaN, infinities and anything that is not a number are a ``data_error``.
    """
    if isinstance(value, Score):
        number = _from_number(value.value, extra_of(value.extra))
        if value.outcome == "scored":
            return number
        if value.outcome in OF_THE_STREAM:
            return Score.failed(
                "data_error",
                f"returned the outcome {shown(value.outcome)}, which is not a function's to give: it says that the "
                "sample's delivery or its group ended. Return 'data_error', 'infra_error', 'timeout' or 'skipped'",
            )
        if value.outcome not in OUTCOMES:
            return Score.failed("data_error", f"returned the outcome {shown(value.outcome)}; {_EXPECTED}")
        return Score(value.outcome, reason=_text(value.reason), extra=number.extra)
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(_text, islice(value, _MAX_EXTRAS))) or "none"
            return Score.failed(
                "data_error", f"returned a dict without 'score' (its keys: {keys[:_MAX_TEXT_CHARACTERS]})"
            )
        return _from_number(value["score"], extra_of({key: item for key, item in value.items() if key != "score"}))
    if isinstance(value, tuple):
        if len(value) != 3:
            return Score.failed("data_error", f"returned a tuple of {len(value)}; {_EXPECTED}")
        score, request_text, explanation = value
        return _from_number(score, extra_of({"request_text": request_text, "explanation": explanation}))
    return _from_number(value, {})


def to_scores(values: Any, count: int) -> list[Score]:
    """Return the scores of a group's list; a ``data_error`` for each sample if it is not a list of ``count`` values."""
    if not isinstance(values, _NO_LISTS) and hasattr(values, "__len__") and hasattr(values, "__iter__"):
        length, listed = len(values), list(islice(values, count + 1))
        if length == len(listed) == count:
            return [_score_of_one(value) for value in listed]
        reason = f"returned {length if length != count else 'another number of'} scores for {count} samples"
    else:
        reason = f"returned {type(values).__name__} instead of a list of {count} scores"
    return [Score.failed("data_error", reason)] * count


def _score_of_one(value: Any) -> Score:
    """Return the score of one value of a list; one that cannot be read costs its own sample."""
    try:
        return to_score(value)
    except BaseException as error:  # the value's own code: sys.exit and the like included
        return Score.failed("data_error", f"returned {shown(value)}, which cannot be read: {error_text(error)}")


def _from_number(value: Any, extra: dict[str, float | str]) -> Score:
    if value is None:
        return Score("skipped", reason="the function returned None", extra=extra)
    is_complex = getattr(getattr(value, "dtype", None), "kind", "") == "c"  # NumPy's, which ``float`` would halve
    if isinstance(value, str | bytes) or is_complex or not hasattr(value, "__float__"):
        return Score("data_error", reason=f"returned {type(value).__name__}; {_EXPECTED}", extra=extra)
    try:
        number = float(value)
    except Exception as error:  # the value's own code
        problem = f"returned {type(value).__name__}, which is not a number: {_text(error)}"
        return Score("data_error", reason=problem, extra=extra)
    if not math.isfinite(number):
        return Score("data_error", reason=f"the value {number} is not finite", extra=extra)
    return Score("scored", number, extra=extra)


def extra_of(items: Mapping[Any, Any]) -> dict[str, float | str]:
    """Return the further numbers and texts of a result; values that are not finite are left out, never made zero.

    No extra loses its score: what has no plain form is shown as text. Beyond the first 256 they are left out.
    """
    named = ((_text(key), _extra(item)) for key, item in islice(items.items(), _MAX_EXTRAS))
    return {key: item for key, item in named if item is not None}


def _extra(item: Any) -> float | str | None:
    if item is None:
        return None
    if isinstance(item, str):
        return _text(item)
    if hasattr(item, "__float__"):
        try:
            number = float(item)
        except Exception:  # the value's own code, or an integer that no float holds
            return _text(item)
        return number if math.isfinite(number) else None
    try:
        return _text(json.dumps(plain(item)))
    except PlainDataError:
        pass
    try:
        return _text(json.dumps(item, default=str))
    except Exception:  # keys that are no text, the value's own code, a structure without end
        return shown(item)


def _text(value: Any) -> str:
    """Return a text of users' code, of limited length, as plain data."""
    try:
        text = str(value)[:_MAX_TEXT_CHARACTERS]
    except Exception:  # the value's own code, or an integer of thousands of digits
        return shown(value)
    return plain_text(str.__str__(text))


Scope = Literal["sample", "group", "combine", "answer", "answers"]
"""What one call of the function sees: a sample, the samples of a group, the values of one sample's scorers, a judge's
answer about one sample, or about the samples of a group."""
Isolation = Literal["process", "thread", "inline"]
CallingConvention = Literal["verl", "verl batch", "trl", "sample", "samples", "values", "combine", "answer", "answers"]
"""The calling convention of a function; see ``forms``."""


class ServedModel(msgspec.Struct, frozen=True):
    """Name the model that the job serves for a function, as verl serves its reward model."""

    source: str
    """Hub id or folder, with its tokenizer."""
    revision: str = "main"
    trust_remote_code: bool = False
    address: str = ""
    """``host:port`` of a server that speaks OpenAI's API; empty until it is known."""


class Target(msgspec.Struct, frozen=True):
    """Name a function in a user's file."""

    path: str
    function: str
    """Name of a function, of a class, or of a callable object in the file."""
    arguments: dict[str, Any] = {}
    """Keyword arguments from the job: to the class where its ``__init__`` names them, else to each call."""
    scope: Scope = "sample"
    isolation: Isolation | None = None
    """None: ``inline`` for an async function, ``process`` for any other."""
    by_cpu: bool = False
    """In a process of its own, its limit counts CPU seconds, so that a busy machine ends no computation early."""
    served: ServedModel | None = None
    """The function gets its address and tokenizer, under verl's names."""


class Description(msgspec.Struct, frozen=True):
    """Describe the function as found in the file."""

    form: CallingConvention
    is_async: bool
    isolation: Isolation
    """The place where it runs, with the default applied."""
    post_processes: bool = False
    """Its class has ``post_process_scores``."""


VARIABLE = "TRACEPARENT"
"""Environment variable in which programs expect the trace of their caller."""
_current: ContextVar[str] = ContextVar("traceparent", default="")


def current_traceparent() -> str:
    """Return the ``traceparent`` of the sample that is being scored; empty where nothing is traced."""
    return _current.get()


@contextmanager
def within_trace(traceparent: str, *, alone: bool) -> Iterator[None]:
    """Make a trace the current one while the context lasts.

    ``alone``: nothing else runs in this process, so that its environment can hold ``TRACEPARENT`` for programs.
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
