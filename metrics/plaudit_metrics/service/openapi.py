"""The OpenAPI document of the metrics service (routes, parameters, responses), and the reading of its parameters.

A wrong parameter is refused with its name, value and remedy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from starlette.requests import Request

from plaudit_metrics.sources.samples import MOST_CHARACTERS, SampleDetail
from plaudit_metrics.sources.search import FAILED, SampleOrder
from plaudit_metrics.sources.snapshot import MOST_LOOKS
from plaudit_metrics.sources.steps import RunEnding
from plaudit_metrics.statistics.audits import AuditorReport
from plaudit_metrics.statistics.stages import STAGES
from plaudit_metrics.statistics.verdict import VERDICTS
from plaudit_wire import VERSION
from plaudit_wire.records import OUTCOMES, Split, StepRecord

_MOST_DIGITS = 18
_SHOWN = 80
"""Characters of a wrong parameter that its error repeats."""
TEXT_CHARACTERS = 1000
"""Characters of a text parameter."""


class RefusedQueryError(Exception):
    """The service refuses a request, with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def shown(text: str) -> str:
    """Return the beginning of a wrong parameter, for its error."""
    return text[:_SHOWN]


def whole_number(text: str) -> int | None:
    """Return the number; None for other text (``²`` is a digit too) and for numbers of more digits than any count."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


@dataclass(frozen=True)
class Count:
    """A parameter that is a number from 1 to ``most``."""

    name: str
    description: str
    default: int
    most: int

    def of(self, request: Request) -> int:
        """Return the number of a request; raise ``RefusedQueryError`` for anything else."""
        text = request.query_params.get(self.name, str(self.default))
        number = whole_number(text)
        if number is None or not 1 <= number <= self.most:
            raise RefusedQueryError(400, f"{self.name} is {shown(text)!r}; give a whole number from 1 to {self.most}")
        return number

    def described(self) -> dict[str, Any]:
        """Return the parameter as the document has it."""
        schema = {"type": "integer", "minimum": 1, "maximum": self.most, "default": self.default}
        return _parameter(self.name, self.description, schema)


def step_number(request: Request, name: str) -> int | None:
    """Return the number of a step, None without the parameter; raise ``RefusedQueryError`` for other text."""
    text = request.query_params.get(name)
    if not text:
        return None
    number = whole_number(text)
    if number is None:
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give the number of a step")
    return number


def real_number(request: Request, name: str) -> float | None:
    """Return a finite number, None without the parameter; raise ``RefusedQueryError`` for other text."""
    text = request.query_params.get(name)
    if not text:
        return None
    number = _float(text)
    if not math.isfinite(number):
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give a number such as 0.5")
    return number


def point_in_time(request: Request, name: str) -> float:
    """Return seconds since the epoch, 0 without the parameter; raise ``RefusedQueryError`` for less or other text."""
    text = request.query_params.get(name, "0")
    time = _float(text)
    if not (math.isfinite(time) and time >= 0):
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give seconds since the epoch, at least 0")
    return time


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def text(request: Request, name: str) -> str:
    """Return a text, empty without the parameter; raise ``RefusedQueryError`` beyond ``TEXT_CHARACTERS``."""
    given = request.query_params.get(name, "")
    if len(given) > TEXT_CHARACTERS:
        raise RefusedQueryError(400, f"{name} has {len(given)} characters; give at most {TEXT_CHARACTERS}")
    return given


def choice(request: Request, name: str, choices: Collection[str]) -> str:
    """Return one of the choices, empty without the parameter; raise ``RefusedQueryError`` for other text."""
    given = request.query_params.get(name, "")
    if given and given not in choices:
        raise RefusedQueryError(400, f"{name} is {shown(given)!r}; give one of {', '.join(choices)}")
    return given


NEWEST_STEPS = Count("newest", "number of newest steps", 500, 500)
SLOWEST = Count("slowest", "number of slowest samples", 20, 100)
"""At most as many as ``KeptSteps`` keeps with a step."""
TRACED = Count("slowest", "number of slowest samples in the timeline", 5000, 5000)
"""More would overwhelm a browser."""
LISTED = Count("most", "number of samples on the page", 50, 200)
CHARACTERS = Count("characters", "number of characters of each text", 20_000, MOST_CHARACTERS)
LOOKS = Count("newest", "how many looks, the newest", MOST_LOOKS, MOST_LOOKS)
ORDERS = get_args(SampleOrder)
SAMPLE_OUTCOMES = (*OUTCOMES, FAILED)
_NUMBER = {"type": "number"}
_INTEGER = {"type": "integer"}
_TEXT = {"type": "string"}
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}


def document(run: str) -> dict[str, Any]:
    """Return the document of one run."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Plaudit metrics of {run}",
            "version": VERSION,
            "description": "Statistics of each step, what it waited for, and its slowest samples.",
        },
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> dict[str, Any]:
    steps = _object({"run": _TEXT, "steps": _array("Step")})
    samples = _object({"run": _TEXT, "step": _INTEGER, "samples": _array("Sample")})
    queues = _object(
        {
            "run": _TEXT,
            "service": {"type": "boolean", "description": "a scoring service: see /api/v1/service"},
            "open": _reference("OpenStep"),
            "ended": {"oneOf": [_reference("RunEnding"), {"type": "null"}], "description": "how the run ended"},
            "looks": _array("Look"),
            "workers": _array("Worker"),
        }
    )
    after = {"type": "number", "minimum": 0, "default": 0}
    return {
        "/api/v1/steps": _get("The newest steps, oldest first", steps, NEWEST_STEPS.described(), fails=("400",)),
        "/api/v1/steps/{step}": _get("One step", _reference("StepDetail"), _STEP, fails=("404",)),
        "/api/v1/steps/{step}/samples": _get(
            "Its slowest samples, with their stages", samples, _STEP, SLOWEST.described(), fails=("400", "404")
        ),
        "/api/v1/steps/{step}/trace": _get(
            "Its timeline in Chrome's trace format, for ui.perfetto.dev",
            _object({"traceEvents": {"type": "array", "items": {"type": "object"}}}),
            _STEP,
            TRACED.described(),
            fails=("400", "404"),
        ),
        "/api/v1/samples": _get(
            "Stored samples, the newest steps first, with the conditions that all of them fulfil",
            _reference("SamplePage"),
            *_conditions(),
            fails=("400", "403", "500"),
        ),
        "/api/v1/samples/{step}/{group}/{index}": _get(
            "One stored sample with its conversation",
            _reference("SampleDetail"),
            _STEP,
            _path("group", "id of the sample's group", _TEXT),
            _path("index", "index of the sample in its group", _INTEGER),
            CHARACTERS.described(),
            fails=("400", "403", "404", "500"),
        ),
        "/api/v1/audits": _get(
            "What each auditor says of the newest thousand steps with stored samples, as plaudit audit computes it",
            _object({"run": _TEXT, "auditors": _array("AuditorReport")}),
        ),
        "/api/v1/verdict": _get("What the open step waits for, and what the newest waited for", _reference("Verdict")),
        "/api/v1/failures": _get(
            "Samples without a score since the newest step closed, and the first reason of each kind",
            _object({"run": _TEXT, "samples": _INTEGER, "unscored": _INTEGER, "failures": _array("Failure")}),
        ),
        "/api/v1/service": _get(
            "A scoring service: samples of each minute, outcomes, scorers, callers, judges, newest samples",
            _reference("ScoringService"),
        ),
        "/api/v1/queues": _get(
            "Queues, workers and Redis over the last hour (a look every two seconds), and the workers of now",
            queues,
            _parameter("after", "only looks later than this: seconds since the epoch, as in their time", after),
            LOOKS.described(),
            fails=("400",),
        ),
        "/api/v1/openapi.json": _get("This document", {"type": "object"}),
        "/": _get("The live page", _TEXT, media_type="text/html"),
        "/metrics": _get("Prometheus; OpenMetrics where it is accepted", _TEXT, media_type="text/plain"),
        "/healthz": _get("Alive", _TEXT, media_type="text/plain"),
        "/readyz": _get(
            "Has read the run's events, and Redis responds", _TEXT, media_type="text/plain", fails=("503",)
        ),
    }


def _conditions() -> list[dict[str, Any]]:
    step, text = {"type": "integer", "minimum": 0}, {"type": "string", "maxLength": TEXT_CHARACTERS}
    return [
        _parameter("first_step", "the first step", step),
        _parameter("last_step", "the last step", step),
        _parameter("outcome", "how the scoring ended; failed: without a score", _one_of(SAMPLE_OUTCOMES)),
        _parameter("lowest", "the least score", _NUMBER),
        _parameter("highest", "the greatest score", _NUMBER),
        _parameter("data_source", "the data source", text),
        _parameter("split", "train or validation", _one_of(get_args(Split))),
        _parameter("group", "id of a group: its samples", text),
        _parameter("prompt_id", "prompt_id of a sample: the samples of the same prompt in all steps", text),
        _parameter("order", "of the samples of one step", _one_of(ORDERS)),
        _parameter("start", "the next of the page before; without it the first page", text),
        LISTED.described(),
    ]


def _path(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


_STEP = _path("step", "number of the step", _INTEGER)


def _schemas() -> dict[str, Any]:
    verdict = {"type": "string", "enum": [*VERDICTS, ""]}
    fields = msgspec.json.schema_components([StepRecord])[1]["StepRecord"]["properties"]
    own = {name: each for name, each in fields.items() if name not in ("statistics", "waits", "labels")}
    own |= {"verdict": verdict, "records_missing": _INTEGER}
    figures = {"additionalProperties": {"type": ["number", "string"]}, "description": "Keys of docs/metrics.md"}
    wait = _object({"start": _NUMBER, "end": _NUMBER, "awaited": {"type": "array", "items": _TEXT}})
    texts = dict.fromkeys(("question", "numbers", "needs"), _TEXT)
    rule = _object({"verdict": verdict, "holds": {"type": "boolean"}} | texts)
    stages = {"type": "object", "properties": dict.fromkeys(STAGES, _NUMBER), "additionalProperties": False}
    sample = {
        "group": _TEXT,
        "index": _INTEGER,
        "data_source": _TEXT,
        "wall_s": _NUMBER,
        "stages_s": stages,
        "traceparent": _TEXT,
    }
    ages = dict.fromkeys(("oldest_undelivered_s", "oldest_in_flight_s"), _NUMBER)
    depth = _object({"undelivered": _INTEGER, "in_flight": _INTEGER, **ages})
    states = {"type": "object", "additionalProperties": _INTEGER, "description": "busy, idle, starting → processes"}
    return {
        "Step": _object(own) | figures,
        "StepDetail": _object(
            own
            | {
                "explanation": _TEXT,
                "reasoning": {"type": "array", "items": rule, "description": "up to the first rule that holds"},
                "waits": {"type": "array", "items": wait},
            }
        ),
        "Sample": _object(sample | {key: {"type": "object"} for key in ("stamps", "scoring")}),
        "Verdict": _object(
            {
                "run": _TEXT,
                "open": _reference("OpenStep"),
                "step": {"type": ["integer", "null"], "description": "null, and an empty verdict: none has closed"},
                "verdict": verdict,
                "explanation": _TEXT,
                "seconds": {"type": "object", "additionalProperties": _NUMBER},
                "together": {"type": "boolean", "description": "steps overlap: recent_verdict says more"},
                "recent_verdict": verdict,
                "recent": {"type": "object", "additionalProperties": _INTEGER},
            }
        ),
        "OpenStep": _object(
            {
                "step": {"type": ["integer", "null"]},
                "seconds": {"type": ["number", "null"], "description": "since it began; null without a trainer"},
                "waits_for": _TEXT | {"description": "the first cause that holds, in one word"},
                "text": _TEXT | {"description": "what it waits for, as a sentence"},
            }
        ),
        "SamplePage": _object(
            {
                "run": _TEXT,
                "samples": _array("ListedSample"),
                "open": _array("ListedSample")
                | {"description": "on the first page: the newest samples of steps that have not closed, without texts"},
                "next": {"type": ["string", "null"], "description": "start of the next page; a page may be empty"},
                "first_step": {"type": ["integer", "null"], "description": "the first step with stored samples"},
                "last_step": {"type": ["integer", "null"]},
                "problem": {"type": "string", "description": "why there are no stored samples, and the remedy"},
            }
        ),
        **msgspec.json.schema_components(
            [SampleDetail, AuditorReport, RunEnding], ref_template="#/components/schemas/{name}"
        )[1],
        "Failure": _object({"scorer": _TEXT, "outcome": _TEXT, "reason": _TEXT, "count": _INTEGER}),
        "ScoringService": _object(
            {"run": _TEXT, "samples": _INTEGER, "outcomes": {"type": "object", "additionalProperties": _INTEGER}}
            | {key: _objects() for key in ("minutes", "scorers", "callers", "judges", "newest")}
        ),
        "Look": _object(
            {
                "time": _NUMBER,
                "streams": {"type": "object", "additionalProperties": depth},
                "workers": {"type": "object", "additionalProperties": states, "description": "by role"},
                "policy_version": {"type": ["integer", "null"]},
                "policy_version_lag": _INTEGER,
                "redis_memory_bytes": _INTEGER,
                "redis_memory_limit_bytes": _INTEGER,
            }
        ),
        "Worker": _object({"worker": _TEXT, "role": _TEXT})
        | {"description": "A heartbeat; slots and busy are absent where 0, ready where true"},
        "Error": _object({"error": _TEXT}),
    }


def _get(
    summary: str,
    answer: dict[str, Any],
    *parameters: dict[str, Any],
    fails: tuple[str, ...] = (),
    media_type: str = "application/json",
) -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": {media_type: {"schema": answer}}}}
    for status in fails:
        content = {"text/plain": {"schema": _TEXT}} if status == "503" else _ERROR
        responses[status] = {"description": "Refused", "content": content}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}


def _one_of(choices: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(choices)}


def _parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _objects() -> dict[str, Any]:
    return {"type": "array", "items": {"type": "object"}}


def _array(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _reference(name)}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
