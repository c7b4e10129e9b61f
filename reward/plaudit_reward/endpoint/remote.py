"""Send one sample to a reward endpoint and read its score: one score or one typed error.

It is one request; two for an endpoint with sessions (``session``).

List the remedies when an endpoint refuses every request, by the section of the scorer that names the endpoint.

``kind: http``: wait for the limits → send the sample → read its score.

Keep sessions of NeMo Gym's resources servers: ``/seed_session`` opens one, its cookies name it in ``/verify``.

``nemo-gym``: ``POST /verify`` of a NeMo Gym resources server: the row's members and an OpenAI ``response``.

The row opens a session first (``/seed_session``): some servers verify by what they keep in it.

``openrlhf``: OpenRLHF's ``--reward.remote_url``. Lists with one item: ``query``, ``prompts``, ``labels``.

``plaudit``: the gateway of a reward service, ``POST /v1/score``.

Map the name of a shape to the shape.

``sandbox-fusion``: ``POST /submit`` of a Sandbox Fusion server, which finds the program in a response and tests it.

The row names the problem: its ``ground_truth`` is ``config.provided_data`` where it is an object, ``extra_info.id`` the
problem's id. ``accepted`` is 1 or 0. Rule ``code`` runs test cases of the row through ``/run_code`` instead.

Define the interface of a shape: the request that an endpoint expects, and the reading of its answer.

``slime``: slime's ``remote_rm``. The request has ``prompt``, ``response``, ``label``; the answer is the reward.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Literal, get_args

import msgspec
from multidict import MultiMapping
from yarl import URL

from plaudit_job.rules.answers import json_path, value_at
from plaudit_reward.endpoint.access import EndpointAccess, EndpointUsage, UsageReport, failure_of
from plaudit_reward.endpoint.budget import Limiter
from plaudit_reward.functions.result import extra_of
from plaudit_reward.http import HttpClient, Response, error_message, excerpt, proxy_for
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.records import Outcome, Sample


@dataclass(frozen=True)
class Remedies:
    """The remedies of one kind of scorer.

    Attributes:
        section: of the scorer, for errors about its other fields.
        key_field: field that names the Secret of the token.
    """

    section: str
    key_field: str
    by_status: Mapping[int, str]


HTTP = Remedies(
    "http",
    "http.apiKeySecret",
    {
        401: "check http.apiKeySecret",
        403: "check http.apiKeySecret and the key's permissions",
        404: "check http.url: it includes the route",
    },
)

_REJECTED_CALLER = (
    "service.tokenSecret must hold a token that the service accepts: a value of the Secret that its gateway reads, or "
    "'token' in its service.json. If the service was created again, its token has changed"
)

SERVICE = Remedies(
    "service",
    "service.tokenSecret",
    {
        401: _REJECTED_CALLER,
        403: "something in front of the gateway refuses the request: check service.url and network policies",
        404: "check service.url: it is the address of a gateway, without a route",
    },
)

NO_SESSIONS = frozenset({404, 405})
"""Statuses of a server without the route: it verifies without a session."""
_SEED, _VERIFY = "seed_session", "verify"


def seed_url(url: str) -> str:
    """Return the route that opens a session, beside the route ``/verify``; empty for another route."""
    address = URL(url)
    return str(address.with_name(_SEED)) if address.name == _VERIFY else ""


def cookie_header(headers: MultiMapping[str]) -> dict[str, str]:
    """Return the header that sends a response's cookies (any number of ``Set-Cookie``) back; empty without cookies."""
    cookies: dict[str, str] = {}
    for line in headers.getall("Set-Cookie", []):
        try:
            cookies |= {name: morsel.coded_value for name, morsel in SimpleCookie(line).items()}
        except CookieError:
            continue  # a cookie that cannot be sent back
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} if cookies else {}


@dataclass(frozen=True)
class EndpointShape:
    """One protocol of reward endpoints."""

    body: Callable[[Sample], dict[str, Any]]
    """Returns the request's JSON object."""
    score: Callable[[Any], Score]
    """Reads the answer's JSON. Raises ``MalformedAnswerError`` and ``DataError``."""
    seed_url: Callable[[str], str] = lambda url: ""
    """Returns the URL that opens a sample's session before it is scored; empty: the endpoint has no sessions."""
    unseeded: frozenset[str] = frozenset()
    """Members of the request that the opening of a session does not get."""


class MalformedAnswerError(InfrastructureError):
    """The answer does not have the shape that the job names: something else answers at this address."""


def member(answer: Any, name: str) -> Any:
    """Return a member of the answer; raise ``MalformedAnswerError`` if it is not an object with this member."""
    if not isinstance(answer, dict):
        raise MalformedAnswerError(f"the answer is {type(answer).__name__}, not an object with {name!r}")
    if name not in answer:
        raise MalformedAnswerError(f"the answer has no {name!r} (its members: {', '.join(answer) or 'none'})"[:300])
    return answer[name]


def scored(value: Any, extra: Mapping[str, Any] | None = None) -> Score:
    """Return the score of a value: a finite number.

    Raises:
        DataError: the value is null, text or not finite. The endpoint answered, and has no score for this sample.
    """
    if value is None:
        raise DataError("the endpoint has no score for this sample: its answer is null")
    if isinstance(value, str) or not isinstance(value, int | float):
        raise DataError(f"the endpoint's score is {str(value)[:100]!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(f"the endpoint's score {number} is not finite")
    return Score("scored", number, extra=extra_of(extra or {}))


def others(answer: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """Return the numbers and texts of an answer besides the members ``used``."""
    return {name: item for name, item in answer.items() if name not in used and isinstance(item, int | float | str)}


class RemoteClient:
    """Send samples to one reward endpoint.

    Args:
        api_key: sent as a bearer token; empty: none.
        arguments: further members of each request; an object is merged into the shape's own.
        path: of the score in the answer (``json_path``), in place of the shape's own; empty: the shape's own.
        max_connections: requests at a time; the rest wait, which counts as part of their call.

    Raises:
        ConfigurationError: an HTTP header cannot carry ``api_key``, ``path`` is not a path, or the process may not open
            so many connections.
    """

    def __init__(
        self,
        url: str,
        shape: EndpointShape,
        usage: EndpointUsage,
        *,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
        path: str = "",
        max_connections: int = 256,
        remedies: Remedies = HTTP,
    ) -> None:
        self.url = url
        self._shape = shape
        self._usage = usage
        self._api_key = api_key
        self._headers = dict(headers or {})
        self._arguments = dict(arguments or {})
        self._path = path
        self._remedies = remedies.by_status
        try:
            self._steps = json_path(path) if path else None
        except ValueError as error:
            raise ConfigurationError(f"{remedies.section}.jsonPath {error}") from error
        self._http = HttpClient(
            max_connections=max_connections,
            bearer_token=api_key,
            key_field=remedies.key_field,
            proxy=proxy_for(url),
        )

    async def score(
        self,
        sample: Sample,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Score:
        """Send one sample and return its score.

        Args:
            limit_s: seconds until the whole answer has arrived; opening a session included.
            on_sent: called when the request has been written to its connection.

        Raises:
            CallTimeoutError: no whole answer within ``limit_s``.
            InfrastructureError: the endpoint is unreachable, busy, broken, refuses all requests (see ``failures``), or
                its answer does not have the shape.
            DataError: it refuses this sample, or has no finite number for it.
        """
        began = time.monotonic()
        body = _merged(self._shape.body(sample), self._arguments)
        sent = {**self._headers, **(headers or {})}
        sent |= await self._opened(body, limit_s, sent)
        left_s = max(0.0, limit_s - (time.monotonic() - began))
        request = self._http.post(self.url, msgspec.json.encode(body), left_s, headers=sent, on_sent=on_sent)
        response = await self._usage.counted(request)
        self._check(self.url, response)
        return self._read(response.body)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _opened(self, body: Mapping[str, Any], limit_s: float, headers: Mapping[str, str]) -> dict[str, str]:
        """Open the sample's session; return the header that names it, empty where the endpoint has no sessions."""
        url = self._shape.seed_url(self.url)
        if not url:
            return {}
        row = {name: item for name, item in body.items() if name not in self._shape.unseeded}
        request = self._http.post(url, msgspec.json.encode(row), limit_s, headers=headers)
        response = await self._usage.counted(request)
        if response.status in NO_SESSIONS:
            return {}
        self._check(url, response)
        return cookie_header(response.headers)

    def _check(self, url: str, response: Response) -> None:
        if response.status != 200:
            message = error_message(response.body, self._api_key)
            raise failure_of(url, response.status, response.headers, message, self._remedies)

    def _read(self, body: bytes) -> Score:
        try:
            answer = json.loads(body)  # reads NaN, which Python's servers write: this sample has no score
            if self._steps is None:
                return self._shape.score(answer)
            return scored(value_at(answer, self._steps))
        except (ValueError, RecursionError) as error:
            raise MalformedAnswerError(f"{self.url}: the answer is not JSON: {self._excerpt(body)}") from error
        except LookupError as error:
            found = f"{self._path} finds nothing: {error.args[0]}"
            raise MalformedAnswerError(f"{self.url}: {found}: {self._excerpt(body)}") from error
        except MalformedAnswerError as error:
            raise MalformedAnswerError(f"{self.url}: {error}: {self._excerpt(body)}") from error

    def _excerpt(self, body: bytes) -> str:
        return excerpt(body, self._api_key)


def _merged(body: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``body`` with ``arguments``; objects on both sides are merged, member by member."""
    merged = dict(body)
    for name, value in arguments.items():
        own = merged.get(name)
        merged[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return merged


class RemoteScorer:
    """Score samples by somebody else's endpoint.

    Args:
        client: asks the endpoint; closed here.
        limiter: started and stopped here.
        report: adds the usage to the run's; started and stopped here. None outside of a run.
        traceparent: returns the trace context of a sample, sent as a header. None where nothing is traced.
    """

    def __init__(
        self,
        name: str,
        client: RemoteClient,
        limiter: Limiter,
        report: UsageReport | None = None,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._access = EndpointAccess(name, client.url, limiter, report)
        self._traceparent = traceparent

    async def open(self) -> None:
        """Start the limiter. The endpoint may come up later: the first sample connects to it."""
        self._access.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._access.circuit_open

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
        async with self._access.request(0, attempt) as passage:
            return await self._client.score(sample, attempt.limit_s, self._access.on_sent(passage), headers)

    def room(self) -> int:
        """Return how many more samples could begin soon; one, the probe, while the circuit is open."""
        return self._access.room()

    async def close(self) -> None:
        """Stop the limiter and the report, and close the connections."""
        await self._access.stop()
        await self._client.close()


def _nemo_gym_body(sample: Sample) -> dict[str, Any]:
    """Return the row (``extra_info``), the request that the model answered, and its answer as a Responses object."""
    identity = f"{sample.group}-{sample.index}"
    text = {"type": "output_text", "text": sample.response, "annotations": []}
    message = {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        **sample.extra_info,
        "responses_create_params": {
            "input": sample.messages or [{"role": "user", "content": sample.prompt}],
        },
        "response": {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        },
    }


def _nemo_gym_score(answer: Any) -> Score:
    reward = member(answer, "reward")
    components = answer.get("reward_components")
    return scored(reward, components if isinstance(components, dict) else others(answer, "reward"))


NEMO_GYM = EndpointShape(_nemo_gym_body, _nemo_gym_score, seed_url, unseeded=frozenset({"response"}))


def _openrlhf_body(sample: Sample) -> dict[str, Any]:
    return {
        "query": [sample.prompt + sample.response],
        "prompts": [sample.prompt],
        "labels": [sample.ground_truth],
    }


def _openrlhf_score(answer: Any) -> Score:
    logs = answer.get("extra_logs") if isinstance(answer, dict) else None
    extra = {name: _only(item, name) for name, item in logs.items()} if isinstance(logs, dict) else {}
    return scored(_only(member(answer, "rewards"), "rewards"), extra)


def _only(value: Any, name: str) -> Any:
    """Return the item of a list of one. Some servers answer a bare value."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise MalformedAnswerError(f"{name!r} has {len(value)} items for one sample")
    return value[0]


OPENRLHF = EndpointShape(_openrlhf_body, _openrlhf_score)
CALLER_HEADER = "plaudit-caller"
"""Header with the name of a run among those that share a token."""
_ENDED_ELSEWHERE = {"poison": "infra_error", "given_up": "infra_error"}
"""Outcomes that describe the other service's own processing."""


def _plaudit_body(sample: Sample) -> dict[str, Any]:
    return {
        "id": _id(sample),
        "response": sample.response,
        "prompt": sample.messages or sample.prompt,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _id(sample: Sample) -> str:
    """Return the same id for a sample in every attempt, so that the service scores it once.

    A sample that was generated again after its rollout died has another response, and must not meet the earlier id.
    """
    content = hashlib.sha256(f"{sample.prompt}\0{sample.response}".encode(errors="surrogatepass")).hexdigest()
    return f"{sample.group}/{sample.index}/{content[:12]}"


def _plaudit_score(answer: Any) -> Score:
    """Read a typed result. The service has already retried: its failures are final here."""
    outcome = member(answer, "outcome")
    if outcome not in get_args(Outcome):
        raise MalformedAnswerError(f"the answer's outcome is {str(outcome)[:100]!r}")
    if outcome == "scored":
        return scored(member(answer, "score"), _values(answer.get("scorers")))
    return Score.failed(_ENDED_ELSEWHERE.get(outcome, outcome), str(answer.get("reason") or outcome)[:500])


def _values(scorers: Any) -> dict[str, Any]:
    """Return the values of the service's own scorers, by name."""
    if not isinstance(scorers, dict):
        return {}
    return {name: result.get("value") for name, result in scorers.items() if isinstance(result, dict)}


PLAUDIT = EndpointShape(_plaudit_body, _plaudit_score)


def _sandbox_fusion_body(sample: Sample) -> dict[str, Any]:
    config = {"provided_data": sample.ground_truth} if isinstance(sample.ground_truth, dict) else {}
    identity = sample.extra_info.get("id", f"{sample.group}/{sample.index}")
    return {"dataset": sample.data_source, "id": identity, "completion": sample.response, "config": config}


def _sandbox_fusion_score(answer: Any) -> Score:
    accepted = member(answer, "accepted")
    if not isinstance(accepted, bool):
        raise MalformedAnswerError(f"'accepted' is {str(accepted)[:100]!r}, not true or false")
    return scored(float(accepted))


SANDBOX_FUSION = EndpointShape(_sandbox_fusion_body, _sandbox_fusion_score)
_NAMES = ("score", "reward")


def _slime_body(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.messages or sample.prompt,
        "response": sample.response,
        "label": sample.ground_truth,
        "metadata": sample.extra_info,
    }


def _slime_score(answer: Any) -> Score:
    """Read a number, or an object with ``score`` or ``reward``."""
    if not isinstance(answer, dict):
        return scored(answer)
    for name in _NAMES:
        if name in answer:
            return scored(answer[name], others(answer, name))
    raise MalformedAnswerError(
        f"the answer is an object without {' or '.join(_NAMES)} (its members: {', '.join(answer) or 'none'}); name the "
        "member in http.jsonPath"[:400]
    )


SLIME = EndpointShape(_slime_body, _slime_score)
ShapeName = Literal["plaudit", "slime", "openrlhf", "nemo-gym", "sandbox-fusion"]

SHAPES: dict[ShapeName, EndpointShape] = {
    "plaudit": PLAUDIT,
    "slime": SLIME,
    "openrlhf": OPENRLHF,
    "nemo-gym": NEMO_GYM,
    "sandbox-fusion": SANDBOX_FUSION,
}
