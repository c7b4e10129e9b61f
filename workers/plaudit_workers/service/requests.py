"""Read the bodies of requests into groups of samples; every error names the field and its position. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

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
SAMPLE_ID = re.compile(r"[^\s:]\S{0,199}")


@dataclass(frozen=True)
class SubmittedSamples:
    """Hold a group that a caller submits; a sample by itself is a group of one."""

    id: str
    samples: Sequence[SampleInput]
    is_group: bool = False


@dataclass(frozen=True)
class RequestBody:
    """Hold the content of a request."""

    groups: Sequence[SubmittedSamples]
    is_batch: bool
    """Several were submitted in a list, so the answer is one."""


class _Samples(msgspec.Struct):
    samples: list[msgspec.Raw]


class _Group(msgspec.Struct):
    samples: list[msgspec.Raw]
    id: str = ""


class _Groups(msgspec.Struct):
    groups: list[_Group]


_samples_decoder = msgspec.json.Decoder(_Samples)
_group_decoder = msgspec.json.Decoder(_Group)
_groups_decoder = msgspec.json.Decoder(_Groups)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_plain_decoder = msgspec.json.Decoder(dict[str, Any])
_sample_decoder = msgspec.json.Decoder(SampleInput)


def read_samples(body: bytes) -> RequestBody:
    """Read the body of ``POST /v1/score``: one sample, or ``{"samples": [sample, …]}``."""
    is_batch = "samples" in _decoded(_object_decoder, body)
    samples = _read_all(_decoded(_samples_decoder, body).samples if is_batch else [msgspec.Raw(body)], named=is_batch)
    return RequestBody([SubmittedSamples(sample.id or new_id(), [sample]) for sample in samples], is_batch)


def read_groups(body: bytes) -> RequestBody:
    """Read the body of ``POST /v1/groups``: ``{"samples": […], "id": …}``, or ``{"groups": […]}`` of such."""
    is_batch = "groups" in _decoded(_object_decoder, body)
    groups = _decoded(_groups_decoder, body).groups if is_batch else [_decoded(_group_decoder, body)]
    if sum(len(group.samples) for group in groups) > MOST_SAMPLES:
        raise RefusedRequestError(413, "too_many_samples", f"submit at most {MOST_SAMPLES} samples in a request")
    read, problems = [], {}
    for position, group in enumerate(groups):
        try:
            read.append(_submitted_group(group))
        except (RefusedRequestError, ValueError) as error:
            problems[position] = str(error)
    if problems:
        raise _invalid("groups", problems, named=is_batch)
    return RequestBody(read, is_batch)


def new_id() -> str:
    """Return an id for a sample without one."""
    return uuid.uuid4().hex


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body that is a JSON object. Raise ``RefusedRequestError``."""
    read: dict[str, Any] = _decoded(_plain_decoder, body)
    return read


def _submitted_group(group: _Group) -> SubmittedSamples:
    if not 1 <= len(group.samples) <= LARGEST_GROUP:
        raise ValueError(f"samples: the group has {len(group.samples)}; submit 1 to {LARGEST_GROUP}")
    return SubmittedSamples(_checked_id(group.id) or new_id(), _read_all(group.samples, named=True), is_group=True)


def _read_all(samples: Sequence[msgspec.Raw], *, named: bool) -> list[SampleInput]:
    if len(samples) > MOST_SAMPLES:
        raise RefusedRequestError(413, "too_many_samples", f"submit at most {MOST_SAMPLES} samples in a request")
    read, problems = [], {}
    for position, sample in enumerate(samples):
        try:
            read.append(_read_sample(sample))
        except ValueError as error:
            problems[position] = str(error)
    if problems:
        raise _invalid("samples", problems, named=named)
    return read


def _invalid(field: str, problems: Mapping[int, str], *, named: bool) -> RefusedRequestError:
    position, problem = next(iter(problems.items()))
    text = f"{field}[{position}]: {problem}" if named else problem
    return RefusedRequestError(422, "invalid_sample", text, samples=problems)


def _read_sample(raw: msgspec.Raw) -> SampleInput:
    try:
        sample = _sample_decoder.decode(raw)
    except msgspec.DecodeError:  # null for an absent field, or verl's columns; else the same error again
        sample = sample_input(_plain_decoder.decode(raw), SampleInput)
    _checked_id(sample.id)
    return sample


def _checked_id(own: str) -> str:
    if own and not SAMPLE_ID.fullmatch(own):
        raise ValueError(f"id {own[:80]!r}: give at most 200 characters without spaces")
    return own


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RefusedRequestError(422, "invalid_body", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedRequestError(400, "invalid_json", f"the body is not JSON: {error}") from error
