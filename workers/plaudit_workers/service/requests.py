"""Read requests into groups of samples; every error names the field and its position."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from plaudit_reward.endpoint.shapes import GatewayShape, open_reward_rows
from plaudit_wire.plain import mended_json, not_utf8, plain, plain_json
from plaudit_wire.printable import shown
from plaudit_workers.service.lines import SampleInput, sample_input
from plaudit_workers.stream.sessions import LARGEST_GROUP


class RefusedRequestError(Exception):
    """A request that the gateway does not serve.

    Args:
        kind: for programs: ``invalid_sample``, ``unauthorized``, ``busy``, ….
        samples: by position in the request, what is wrong with each; the others were not refused.
        retry_after_s: seconds after which the same request may succeed; None: it will not.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        samples: Mapping[int, str] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.samples = samples or {}
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        error: dict[str, Any] = {"type": self.kind, "message": str(self)}
        if self.samples:
            error["samples"] = {str(position): message for position, message in self.samples.items()}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


MOST_SAMPLES = 1024
"""Samples of one request."""
MOST_BYTES = 64 << 20
"""Bytes of a request's body."""
MOST_PARTS = 1 << 18
"""Values in a request's body, counted by its commas and brackets: each costs far more than its bytes."""
SAMPLE_ID = re.compile(r"[^\s:]\S{0,199}")
T = TypeVar("T")
Read = TypeVar("Read")


@dataclass(frozen=True)
class SubmittedSamples:
    """Hold a group that a caller submits; a sample by itself is a group of one."""

    id: str
    samples: Sequence[SampleInput]
    is_group: bool = False
    is_named: bool = True
    """The caller gave the id; without it, nobody can ask for the result later."""


@dataclass(frozen=True)
class RequestBody:
    """Hold the content of a request."""

    groups: Sequence[SubmittedSamples]
    is_batch: bool
    """Several were submitted in a list, so the answer is one."""


class _Samples(msgspec.Struct, Generic[T]):
    samples: list[T] | msgspec.UnsetType = msgspec.UNSET


class _Group(msgspec.Struct):
    samples: list[msgspec.Raw]
    id: str = ""


class _Groups(msgspec.Struct):
    groups: list[_Group]


_inputs_decoder = msgspec.json.Decoder(_Samples[SampleInput])
_samples_decoder = msgspec.json.Decoder(_Samples[msgspec.Raw])
_group_decoder = msgspec.json.Decoder(_Group)
_groups_decoder = msgspec.json.Decoder(_Groups)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_plain_decoder = msgspec.json.Decoder(dict[str, Any])
_sample_decoder = msgspec.json.Decoder(SampleInput)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_samples(body: bytes) -> RequestBody:
    """Read the body of ``POST /v1/score``: one sample, or ``{"samples": [sample, …]}``."""
    body = _checked(body)
    given: Sequence[msgspec.Raw | SampleInput] | msgspec.UnsetType
    try:
        given = _inputs_decoder.decode(body).samples  # in one pass
    except _UNREADABLE:  # each sample by itself is mended, or tells what is wrong with it
        given = _decoded(_samples_decoder, body).samples
    is_batch = not isinstance(given, msgspec.UnsetType)
    if isinstance(given, msgspec.UnsetType):
        _decoded(_object_decoder, body)
        given = [msgspec.Raw(body)]
    _check_number(len(given))
    samples = _each(given, _read_sample, "samples", named=is_batch)
    return RequestBody([_submitted(sample.id, [sample]) for sample in samples], is_batch)


def read_groups(body: bytes) -> RequestBody:
    """Read the body of ``POST /v1/groups``: ``{"samples": […], "id": …}``, or ``{"groups": […]}`` of such."""
    body = _checked(body)
    is_batch = "groups" in _decoded(_object_decoder, body)
    groups = _decoded(_groups_decoder, body).groups if is_batch else [_decoded(_group_decoder, body)]
    _check_number(sum(len(group.samples) for group in groups))
    return RequestBody(_each(groups, _submitted_group, "groups", named=is_batch), is_batch)


def read_shape(body: bytes, shape: GatewayShape) -> tuple[dict[str, Any], RequestBody]:
    """Read the body of a trainer's shape; return it as plain data, and its samples, which have no ids."""
    content, samples = _read_rows(body, shape.rows)
    return content, RequestBody([_submitted("", [sample]) for sample in samples], is_batch=True)


def read_candidates(body: bytes, task: Mapping[str, Any]) -> SubmittedSamples:
    """Read the body of the Open Reward Standard's ``/score_group``: candidates for a task, which are one group.

    Its ``task_id``, by which the client resumes what a connection has broken off, is the group's id.
    """
    content, samples = _read_rows(body, lambda content: open_reward_rows(task, content))
    try:
        own_id = _checked_id(str(content.get("task_id") or uuid.uuid4().hex))
        return _submitted(own_id, _checked_group(samples, "candidates"), is_group=True)
    except ValueError as error:
        raise RefusedRequestError(422, "invalid_sample", str(error)) from error


def read_task(body: bytes) -> dict[str, Any]:
    """Read the body of the Open Reward Standard's ``/create``; return its ``task_spec``."""
    body = _checked(body)
    _decoded(_object_decoder, body)
    try:
        content: dict[str, Any] = plain_json(body)
    except ValueError as error:
        raise RefusedRequestError(422, "invalid_body", str(error)) from error
    task = content.get("task_spec")
    if not isinstance(task, dict):
        problem = "task_spec: give the task's data row, an object; a reward service has no tasks of its own"
        raise RefusedRequestError(422, "invalid_body", problem)
    return task


def _read_rows(
    body: bytes, rows: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
) -> tuple[dict[str, Any], list[SampleInput]]:
    body = _checked(body)
    _decoded(_object_decoder, body)
    try:
        content: dict[str, Any] = plain_json(body, most_units=MOST_BYTES + 16 * MOST_PARTS)
        found = rows(content)
        _check_number(len(found))
    except ValueError as error:
        raise RefusedRequestError(422, "invalid_sample", str(error)) from error
    return content, _each(found, lambda row: sample_input(row, SampleInput), "samples", named=len(found) > 1)


def _submitted(own_id: str, samples: Sequence[SampleInput], *, is_group: bool = False) -> SubmittedSamples:
    return SubmittedSamples(own_id or uuid.uuid4().hex, samples, is_group, is_named=bool(own_id))


def _submitted_group(group: _Group) -> SubmittedSamples:
    samples = _each(_checked_group(group.samples, "samples"), _read_sample, "samples", named=True)
    return _submitted(_checked_id(group.id), samples, is_group=True)


def _checked_group(samples: Sequence[T], field: str) -> Sequence[T]:
    if not 1 <= len(samples) <= LARGEST_GROUP:
        raise ValueError(f"{field}: the group has {len(samples)}; submit 1 to {LARGEST_GROUP}")
    return samples


def _each(given: Sequence[T], read: Callable[[T], Read], field: str, *, named: bool) -> list[Read]:
    """Read each part of a request; ``named``: the message about the first wrong one begins with field and position."""
    found, problems = [], {}
    for position, one in enumerate(given):
        try:
            found.append(read(one))
        except (RefusedRequestError, ValueError) as error:
            problems[position] = str(error)
    if problems:
        position, problem = next(iter(problems.items()))
        text = f"{field}[{position}]: {problem}" if named else problem
        raise RefusedRequestError(422, "invalid_sample", text, samples=problems)
    return found


def _read_sample(given: msgspec.Raw | SampleInput) -> SampleInput:
    try:
        sample = given if isinstance(given, SampleInput) else _sample_decoder.decode(given)
    except _UNREADABLE:  # null, or verl's columns; else an error by name
        assert isinstance(given, msgspec.Raw)
        sample = sample_input(_as_object(given), SampleInput)
    else:
        _check_open_fields(sample)
    _checked_id(sample.id)
    return sample


def _as_object(raw: msgspec.Raw) -> dict[str, Any]:
    """Return a sample as a mapping of any values. Raise ``ValueError``, which names the field where it can."""
    try:
        try:
            return _plain_decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):  # such as a number that no double holds
            return {name: plain_json(bytes(value), name) for name, value in _object_decoder.decode(raw).items()}
    except RecursionError:
        raise ValueError("the sample is nested too deeply; give flatter data") from None


def _check_open_fields(sample: SampleInput) -> None:
    """Check the fields whose type allows anything; what JSON holds is plain but for its integers, depth and size."""
    if sample.ground_truth is not None and type(sample.ground_truth) is not str:
        plain(sample.ground_truth, "ground_truth")
    if sample.extra_info:
        plain(sample.extra_info, "extra_info")
    if type(sample.prompt) is not str:
        plain(sample.prompt, "prompt")


def _checked_id(own: str) -> str:
    if own and not SAMPLE_ID.fullmatch(own):
        raise ValueError(f"id {shown(own)}: give at most 200 characters without spaces")
    return own


def _check_number(num_samples: int) -> None:
    if num_samples > MOST_SAMPLES:
        message = f"the request has {num_samples:,} samples: submit at most {MOST_SAMPLES:,} in one"
        raise RefusedRequestError(413, "too_many_samples", message)


def _checked(body: bytes) -> bytes:
    """Return a body of texts that can be encoded; refuse one of more than ``MOST_PARTS`` values, before any is made."""
    body = mended_json(body)
    if _num_brackets(body) <= MOST_PARTS:  # texts have commas too: look closer only where there are many
        return body
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * MOST_PARTS and _num_brackets(b"".join(unescaped.split(b'"')[::2])) <= MOST_PARTS:
        return body
    message = f"the body has more than {MOST_PARTS:,} values: split it, or write nested data as one text"
    raise RefusedRequestError(413, "too_many_values", message)


def _num_brackets(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RefusedRequestError(422, "invalid_body", str(error)) from error
    except msgspec.DecodeError as error:
        raise RefusedRequestError(400, "invalid_json", f"the body is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise RefusedRequestError(400, "invalid_json", str(not_utf8(error, "the body"))) from error
    except RecursionError as error:
        raise RefusedRequestError(400, "invalid_json", "the body is nested too deeply: give flatter data") from error


LONGEST_WAIT_S = 3600.0
"""Seconds that a request waits for its results."""
_BODY_WITHIN_S = 60.0
_NDJSON = "application/x-ndjson"
_NOT_ACCEPTED = re.compile(r"q=0(\.0*)?")


class BodyRoom:
    """Count the bytes of the bodies that come in at the same time. What was read counts as queued instead."""

    def __init__(self, most_bytes: int = 4 * MOST_BYTES, most_of_token: int = 2 * MOST_BYTES) -> None:
        self._most, self._most_of_token = most_bytes, most_of_token
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, token: str) -> Iterator[Callable[[int], None]]:
        """Yield what counts the bytes of one body as they come, and raises ``RefusedRequestError`` for one too many.

        One token's bodies leave room for the others'.
        """
        own = 0

        def add(num_bytes: int) -> None:
            nonlocal own
            if self._held[token] + num_bytes > self._most_of_token or self._held.total() + num_bytes > self._most:
                message = "too many large bodies come in at once: send fewer at a time"
                raise RefusedRequestError(429, "busy", message, retry_after_s=1)
            self._held[token] += num_bytes
            own += num_bytes

        try:
            yield add
        finally:
            self._held[token] -= own
            if not self._held[token]:
                del self._held[token]


async def read_body(request: Request, hold: Callable[[int], None]) -> bytes:
    """Return the body, whose bytes ``hold`` counts. Raise ``RefusedRequestError``: compressed, large, slow."""
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise RefusedRequestError(415, "compressed", "content-encoding: send the body uncompressed")
    too_large = RefusedRequestError(413, "too_large", f"the body has more than {MOST_BYTES >> 20} MiB: split it")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                hold(len(part))
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise RefusedRequestError(408, "slow_body", f"the body took more than {_BODY_WITHIN_S:.0f} s") from error
    return b"".join(parts)


def accepts_lines(request: Request) -> bool:
    """Return whether ``Accept`` names ``application/x-ndjson``, and not with the weight 0, which forbids it."""
    for accepted in ",".join(request.headers.getlist("accept")).split(","):
        kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
        if kind == _NDJSON:
            return not any(_NOT_ACCEPTED.fullmatch(parameter) for parameter in parameters)
    return False


def query_seconds(request: Request, name: str, default: float) -> float:
    """Return the seconds that a query parameter gives; raise ``RefusedRequestError`` for what is none."""
    written = request.query_params.get(name)
    if written is None:
        return default
    try:
        seconds = float(written)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT_S:
        problem = f"{name}={written!r}: give seconds from 0 to {LONGEST_WAIT_S:.0f}"
        raise RefusedRequestError(422, "invalid_query", problem)
    return seconds
