"""Score by a language model as judge (``kind: judge``), behind any OpenAI-compatible endpoint.

Render the prompt from a template, wait for the limits, ask the endpoint, parse its answer. One request has one answer
or one typed error; the pipeline retries.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plaudit_job.rules.answers import find_json, score_path, score_pattern, without_reasoning
from plaudit_reward.endpoint.access import EndpointAccess, EndpointUsage, UsageReport, failure_of
from plaudit_reward.endpoint.budget import Limiter
from plaudit_reward.endpoint.served import ServerPool, ServerResponseError
from plaudit_reward.functions.result import extra_of
from plaudit_reward.http import HttpClient, Response, Token, error_message, excerpt, proxy_for
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import plain
from plaudit_wire.printable import shown
from plaudit_wire.records import Sample

logger = get_logger(__name__)


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    """Reasoning stands beside it (``reasoning_content``), or in parts of another type, and does not count."""
    refusal: Any = None

    @property
    def text(self) -> str:
        """Return the answer's text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content if part.type in {"text", "output_text"})
        return self.content or ""


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Any = None

    @property
    def ended(self) -> str:
        """Return why the answer ended; providers write it in small or in capital letters."""
        return self.finish_reason.lower() if isinstance(self.finish_reason, str) else ""


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None
    """A report that cannot be read costs no score."""


_ROUTE = "/chat/completions"
_decode = msgspec.json.Decoder(_Completion).decode
_MOST_TOKENS = 10**9
_CUT_SHORT = {
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), "max_tokens in judge.arguments"),
    **dict.fromkeys(
        ("content_filter", "safety", "sensitive", "recitation", "blocklist", "prohibited_content"),
        "what the endpoint's filter accepts",
    ),
}
"""Reasons of an answer that ends before its verdict, as providers name them, and what would let it go on."""
_BROKEN_OFF = frozenset({"abort", "cancelled", "error", "insufficient_system_resource", "network_error"})
"""Reasons of an answer that the endpoint itself broke off: it may give another one."""
_SCHEMA_REFUSED = frozenset({400, 404, 415, 422, 501})
_REMEDIES = {
    401: "check apiKeySecret",
    403: "check apiKeySecret and the key's permissions",
    404: "check baseUrl (up to and with /v1) and model",
}


@dataclass(frozen=True)
class JudgeAnswer:
    """Hold the text that a judge wrote, and its cost."""

    text: str
    prompt_tokens: int | None = None
    """None where the endpoint reports no usage."""
    completion_tokens: int | None = None


class JudgeClient:
    """Send prompts to one endpoint, or to the servers of a model that the job serves.

    Args:
        base_url: up to and with ``/v1``; with ``pool`` a name of the servers, for logs and errors.
        api_key: sent as a bearer token (``Token``); empty: none.
        arguments: further members of each request (``temperature``, ``max_tokens``).
        max_connections: requests at a time; the rest wait, which counts as part of their call.
        pool: the servers, opened and closed here; None: ``base_url`` is asked.

    Raises as ``HttpClient``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        usage: EndpointUsage,
        *,
        api_key: Token = "",
        arguments: Mapping[str, Any] | None = None,
        max_connections: int = 256,
        pool: ServerPool | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._url = f"{self.base_url}{_ROUTE}"
        self._body = {"model": model, **(arguments or {})}
        self._usage = usage
        self._pool = pool
        self._http = HttpClient(
            max_connections=max_connections,
            bearer_token=api_key,
            key_field="judge.apiKeySecret",
            proxy=None if pool else proxy_for(self._url),
        )

    async def open(self) -> None:
        """Start to look for the job's own servers, if it serves the judge. Raises ``ConfigurationError``."""
        if self._pool is not None:
            await self._pool.open()

    @property
    def reachable(self) -> bool:
        """Return False while the job serves the judge and none of its servers is healthy."""
        return self._pool is None or self._pool.any_healthy

    async def ask(
        self,
        prompt: str,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> JudgeAnswer:
        """Send one prompt and return the answer; call ``on_sent`` once the request is written to its connection.

        With a ``schema``, the answer is requested as JSON of that form.

        Raises:
            SchemaRefusedError: the endpoint refuses the request with the schema; it may accept it without.
            CallTimeoutError: the whole answer has not arrived within ``limit_s``.
            InfrastructureError: the endpoint is unreachable, busy, broken or refuses all requests (``failure_of``).
            DataError: it refuses this prompt, or its answer is empty or cut short.
        """
        asked = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        if schema is not None:
            form = {"name": "verdict", "strict": True, "schema": schema}
            asked["response_format"] = {"type": "json_schema", "json_schema": form}
        body = msgspec.json.encode(asked)
        response = await self._usage.counted(self._send(body, limit_s, on_sent, headers))
        if response.status != 200:
            message = error_message(response.body, response.token)
            if schema is not None and response.status in _SCHEMA_REFUSED:
                raise SchemaRefusedError(f"{self.base_url} responded {response.status}: {message}")
            raise failure_of(self.base_url, response.status, response.headers, message, _REMEDIES)
        return self._answer(response.body)

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            await self._pool.close()
        await self._http.close()

    async def _send(
        self, body: bytes, limit_s: float, on_sent: Callable[[], None] | None, headers: Mapping[str, str] | None
    ) -> Response:
        if self._pool is None:
            return await self._http.post(self._url, body, limit_s, headers=headers, on_sent=on_sent)
        try:
            _, response = await self._pool.post(
                f"/v1{_ROUTE}", body, Attempt(limit_s), headers=headers, on_sent=on_sent
            )
        except ServerResponseError as error:
            self._usage.requests[str(error.status)] += 1
            raise
        return response

    def _answer(self, body: bytes) -> JudgeAnswer:
        try:
            completion = _completion(body)
        except (ValueError, RecursionError) as error:
            raise InfrastructureError(
                f"{self.base_url}: the response is not a chat completion: {error}: {excerpt(body, self._http.token)}"
            ) from error
        if not completion.choices:
            raise InfrastructureError(f"{self.base_url}: the response is not a chat completion: it has no choices")
        tokens = completion.usage if isinstance(completion.usage, dict) else {}
        prompt_tokens, answer_tokens = (_count(tokens.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        self._usage.tokens.update(prompt=prompt_tokens or 0, completion=answer_tokens or 0)
        choice = completion.choices[0]
        if choice.ended in _BROKEN_OFF:
            raise InfrastructureError(
                f"{self.base_url} broke its answer off (finish_reason {choice.finish_reason}): "
                f"{_excerpt(choice.message.text)}"
            )
        if choice.ended in _CUT_SHORT:
            raise DataError(
                f"the judge's answer is cut short (finish_reason {choice.finish_reason}), so its verdict is missing or "
                f"a draft: {_excerpt(choice.message.text)}. Raise or change {_CUT_SHORT[choice.ended]}"
            )
        if not choice.message.text and isinstance(choice.message.refusal, str):
            raise DataError(f"the judge refuses to answer: {_excerpt(choice.message.refusal)}")
        if not choice.message.text:
            raise DataError(
                f"the judge's answer is empty (finish_reason {choice.finish_reason}). A reasoning model may need more "
                "max_tokens in judge.arguments"
            )
        return JudgeAnswer(choice.message.text, prompt_tokens, answer_tokens)


def _completion(body: bytes) -> _Completion:
    try:
        return _decode(body)
    except (ValueError, RecursionError):
        # NaN and halves of surrogate pairs, as Python's servers write them, and numbers that nothing holds: they cost
        # the answer only where its text is one of them.
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.convert(_readable(json.loads(body, parse_int=float)), _Completion)
        raise


def _readable(content: Any) -> Any:
    """Return the parts of a completion that are read."""
    if not isinstance(content, dict) or not isinstance(content.get("choices"), list):
        return content
    choices = [
        plain({name: choice.get(name) for name in ("message", "finish_reason")}) if isinstance(choice, dict) else choice
        for choice in content["choices"][:1]
    ]
    return {"choices": choices, "usage": content.get("usage")}


class SchemaRefusedError(DataError):
    """The endpoint refuses a request for an answer of a certain form."""


def _count(tokens: Any) -> int | None:
    """Return a number of tokens that an endpoint reports; None for anything else."""
    return int(tokens) if type(tokens) in (int, float) and 0 <= tokens <= _MOST_TOKENS else None


_FIRST_TOKENS_PER_BYTE = 1 / 3
"""English text has about one token for four bytes."""
_FIRST_ANSWER_TOKENS = 512
_FORGETTING = 0.98
"""Factor by which a past maximum shrinks with each answer: estimates err upwards, but not for ever."""


class TokenEstimate:
    """Estimate the tokens of a request, which the budget reserves before, from the endpoint's counts of earlier ones.

    A request's ``max_completion_tokens`` or ``max_tokens`` bounds the answer.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        bound = arguments.get("max_completion_tokens", arguments.get("max_tokens"))
        self._most_answer = float(bound) if isinstance(bound, int) else math.inf
        self._answer = min(_FIRST_ANSWER_TOKENS, self._most_answer)
        self._per_byte = _FIRST_TOKENS_PER_BYTE

    def tokens(self, prompt: str) -> int:
        """Return the tokens to reserve for a prompt and its answer."""
        return math.ceil(len(prompt.encode()) * self._per_byte + min(self._answer, self._most_answer))

    def learn(self, prompt: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Update the estimate by the real count of one request."""
        self._per_byte = max(prompt_tokens / max(1, len(prompt.encode())), self._per_byte * _FORGETTING)
        self._answer = max(float(answer_tokens), self._answer * _FORGETTING)


_MATCH_WITHIN_S = 1.0
_EXCERPT_CHARACTERS = 200


class Parser(ABC):
    """Parse a judge's answer into numbers."""

    async def open(self) -> None:
        """Start child processes where needed. Raises ``ConfigurationError``."""
        return

    @abstractmethod
    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """Return one score for each sample that the answer is about; raise ``DataError`` if it has no value."""

    async def close(self) -> None:
        """End the child processes."""
        return


class RegexParser(Parser):
    """Take the first group of the last match; for a group of samples of every match, one for each sample.

    ``highest`` as in ``JsonParser``. Raises ``ConfigurationError`` for a pattern that does not compile or has no group.
    """

    def __init__(self, pattern: str, *, group: bool = False, highest: float | None = None) -> None:
        self._pattern = score_pattern(pattern)
        self._group = group
        self._highest = highest

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        found: list[str] = []
        ends_s = time.monotonic() + _MATCH_WITHIN_S
        try:
            for match in self._pattern.finditer(answer, timeout=_MATCH_WITHIN_S):
                if match.group(1) is not None:
                    found.append(match.group(1))
                if time.monotonic() > ends_s:
                    raise TimeoutError
        except TimeoutError:
            raise DataError(f"the regular expression takes too long on {_excerpt(answer)}") from None
        if not found:
            raise DataError(f"the regular expression matches nothing in {_excerpt(answer)}")
        if self._group:
            return _many(found, len(samples), answer, self._highest)
        return [_score(found[-1], answer, self._highest)]


class JsonParser(Parser):
    """Take the value at a path of the answer's last JSON that has it; for a group a list with a value for each sample.

    Raises ``ConfigurationError`` for a path that cannot be parsed.

    Args:
        highest: the largest value of the rubric, so that 8/10 is 8 of 10; None: 8/10 is no number.
    """

    def __init__(self, path: str, *, group: bool = False, highest: float | None = None) -> None:
        self._steps = score_path(path)
        self._path = path
        self._group = group
        self._highest = highest

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        try:
            value = find_json(answer, self._steps)
        except LookupError as error:
            raise DataError(
                f"{self._path} finds nothing: {error.args[0]}: {_excerpt(answer)}. Ask for the JSON alone, or set "
                "judge.parse.structured, or read such answers with judge.parse.regex"
            ) from error
        if self._group:
            return _many(value, len(samples), answer, self._highest)
        return [_score(value, answer, self._highest)]


class FunctionParser(Parser):
    """Call a function ``(answer)`` or ``(answer, sample)``; for a group ``(answer, samples)``, for one value each."""

    def __init__(self, function: FunctionScorer) -> None:
        self._function = function

    async def open(self) -> None:
        """Start the child processes."""
        await self._function.open()

    async def scores(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """See ``Parser``."""
        return await self._function.parse(answer, samples, attempt)

    async def close(self) -> None:
        """End the child processes."""
        await self._function.close()


_OF_HIGHEST = re.compile(r"(.*\d\.?)\s*(?:/|out of)\s*(\d+(?:\.\d+)?)")


def _score(value: Any, answer: str, highest: float | None = None) -> Score:
    """Return the score of a number, also from text (``"4"``, ``"8.5."``, ``"**8**"``); true and false are 1 and 0.

    ``"8/10"`` is 8 where 10 is the ``highest``. Raises ``DataError`` for anything else.
    """
    try:
        value = plain(value)
        if isinstance(value, str) and "_" not in value:
            text = value.strip().strip("*`").strip().rstrip(".,;:!")
            share = _OF_HIGHEST.fullmatch(text)
            value = float(share[1] if share is not None and float(share[2]) == highest else text)
        if isinstance(value, int | float):
            return Score.scored(float(value))
    except ValueError:
        pass
    remedy = ". Ask for the number alone, or set judge.parse.range to the rubric's" if "/" in str(value) else ""
    raise DataError(f"{shown(value)} is not a number, in {_excerpt(answer)}{remedy}")


def _one_of_many(value: Any, answer: str, highest: float | None) -> Score:
    try:
        return _score(value, answer, highest)
    except DataError as error:
        return Score.failed("data_error", str(error))


def _many(values: Any, count: int, answer: str, highest: float | None) -> list[Score]:
    """Return one score for each value; one that is no number costs its own sample alone."""
    if not isinstance(values, list):
        raise DataError(f"{type(values).__name__} instead of a list of {count} values, in {_excerpt(answer)}")
    if len(values) != count:
        raise DataError(f"{len(values)} values for {count} responses, in {_excerpt(answer)}")
    return [_one_of_many(value, answer, highest) for value in values]


def _within(score: Score, limits: tuple[float, float], answer: str) -> Score:
    """Return a score that is inside the rubric's range; a ``data_error`` for any other."""
    low, high = limits
    if score.value is None or low <= score.value <= high:
        return score
    reason = f"{score.value:g} is outside judge.parse.range, {low:g} to {high:g}, in {_excerpt(answer)}"
    return msgspec.structs.replace(score, outcome="data_error", value=None, reason=reason)


def _excerpt(answer: str) -> str:
    text = " ".join(answer.split())
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "…")


_SHARED = ("prompt", "messages", "ground_truth", "data_source", "extra_info")
_FENCE, _FENCE_BYTES = "fence", 8


class PromptTemplate:
    """Render the prompt from a file with a sandboxed Jinja template, read and checked once.

    Its variables are the sample's ``prompt``, ``messages``, ``ground_truth``, ``data_source``, ``extra_info`` and
    ``response``; with ``scope: group`` the list ``responses`` replaces ``response``. ``fence`` is a random word,
    another one in each prompt, which no response can foresee.

    Raises ``ConfigurationError``, which names file and line, if the file cannot be read, is not a template, or names an
    unknown variable.
    """

    def __init__(self, path: str, *, group: bool = False) -> None:
        self._path = path
        self._group = group
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=False, trim_blocks=True, lstrip_blocks=True
        )
        try:
            source = Path(path).read_text(encoding="utf-8")
            tree = environment.parse(source, filename=path)
            self._check(tree)
            code = environment.compile(source, filename=path)
        except OSError as error:
            raise ConfigurationError(f"prompt template {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"prompt template {path} is not UTF-8: {error.reason}") from error
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"{path}, line {error.lineno}: {error.message}") from error
        self._template = environment.template_class.from_code(environment, code, environment.globals)

    def render(self, samples: Sequence[Sample]) -> str:
        """Render the prompt for one sample, or for the samples of a group.

        Raises ``DataError`` if the template fails on them, for instance on a missing item of ``extra_info``.
        """
        first = samples[0]
        variables = {name: getattr(first, name) for name in _SHARED} | {_FENCE: secrets.token_hex(_FENCE_BYTES)}
        if self._group:
            variables["responses"] = [sample.response for sample in samples]
        else:
            variables["response"] = first.response
        try:
            return self._template.render(variables)
        except Exception as error:  # the user's template: filters and operators raise any exception
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == self._path]
            where = f"{self._path}, line {lines[-1]}" if lines else self._path
            reason = str(error.message) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{where}: {reason}") from error

    def _check(self, tree: nodes.Template) -> None:
        if any(name is not None for name in meta.find_referenced_templates(tree)):
            raise ConfigurationError(
                f"{self._path} includes another file. Copy its text into this one: a judge's prompt is one file"
            )
        known = {*_SHARED, _FENCE, "responses" if self._group else "response"}
        for name in sorted(meta.find_undeclared_variables(tree) - known):
            line = min(node.lineno for node in tree.find_all(nodes.Name) if node.name == name)
            scope = f" (scope: {'group' if self._group else 'sample'})" if name in {"response", "responses"} else ""
            raise ConfigurationError(
                f"{self._path}, line {line}: unknown variable {name!r}{scope}. The variables are "
                f"{', '.join(sorted(known))}"
            )


_LEAST_PARSE_S = 1.0


class JudgeScorer:
    """Score samples by an endpoint's answers; of sample or group scope as its template and parser are.

    Opens and closes its parts. ``report`` is None outside of a run, ``traceparent`` where nothing is traced; it returns
    the trace context of a sample (a group's is its first sample's), which is sent as a header.

    Args:
        limits: The smallest and the largest value of the rubric; None: any number.
        schema: Returns the JSON schema to ask for, by the number of samples; None: the answer has any form.
    """

    def __init__(
        self,
        name: str,
        template: PromptTemplate,
        client: JudgeClient,
        parser: Parser,
        limiter: Limiter,
        estimate: TokenEstimate,
        report: UsageReport | None = None,
        traceparent: Callable[[Sample], str] | None = None,
        *,
        limits: tuple[float, float] | None = None,
        schema: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self._limits = limits
        self._schema = schema
        self._template = template
        self._client = client
        self._parser = parser
        self._access = EndpointAccess(name, client.base_url, limiter, report)
        self._estimate = estimate
        self._traceparent = traceparent

    async def open(self) -> None:
        """Start the limiter and the parser. The endpoint may come up later: the first sample connects to it.

        Raises ``ConfigurationError`` if the parser's function cannot be loaded, or the servers have no address.
        """
        await self._client.open()
        await self._parser.open()
        self._access.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._access.circuit_open

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        (score,) = await self.score_group([sample], [], attempt)
        return score

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Score all samples of a group by one answer."""
        prompt = self._template.render(samples)
        headers = {"traceparent": self._traceparent(samples[0])} if self._traceparent else None
        answer, spent_s = await self._ask_in_form(prompt, len(samples), attempt, headers)
        parsing = Attempt(max(_LEAST_PARSE_S, attempt.limit_s - spent_s))
        text = without_reasoning(answer.text)
        if not text:
            raise DataError(f"the judge's answer is reasoning alone: {_excerpt(answer.text)}")
        scores = await self._parser.scores(text, samples, parsing)
        if self._limits is not None:
            scores = [_within(score, self._limits, text) for score in scores]
        attempt.queued_s += parsing.queued_s
        counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        extra = extra_of({"answer": answer.text, **counts})
        # An answer about several samples is recorded once.
        first = msgspec.structs.replace(scores[0], extra={**extra, **scores[0].extra})
        return [first, *scores[1:]]

    def room(self) -> int:
        """Return how many more samples could begin soon; one, the probe, while the circuit is open.

        None while the job serves the judge and no server is healthy, so that the samples' time stays whole.
        """
        return self._access.room() if self._client.reachable else 0

    async def close(self) -> None:
        """Stop the limiter, the parser and the report, and close the connections."""
        await self._access.stop()
        await self._client.close()
        await self._parser.close()

    async def _ask_in_form(
        self, prompt: str, count: int, attempt: Attempt, headers: Mapping[str, str] | None
    ) -> tuple[JudgeAnswer, float]:
        """Ask for the schema, if there is one; an endpoint that refuses it is asked without, from then on."""
        if self._schema is None:
            return await self._ask(prompt, attempt, headers)
        began = time.monotonic()
        waited_s = attempt.waited_s
        try:
            return await self._ask(prompt, attempt, headers, self._schema(count))
        except SchemaRefusedError as refused:
            spent_s = time.monotonic() - began - (attempt.waited_s - waited_s)
            second = Attempt(max(_LEAST_PARSE_S, attempt.limit_s - spent_s))
            answer, of_second_s = await self._ask(prompt, second, headers)
            attempt.waited_s, attempt.held_s = attempt.waited_s + second.waited_s, attempt.held_s + second.held_s
            if self._schema is not None:
                logger.warning("the endpoint refuses response_format; it is asked without", reason=str(refused))
            self._schema = None
            return answer, spent_s + of_second_s

    async def _ask(
        self, prompt: str, attempt: Attempt, headers: Mapping[str, str] | None, schema: Mapping[str, Any] | None = None
    ) -> tuple[JudgeAnswer, float]:
        """Return the answer and the seconds of the call."""
        async with self._access.request(self._estimate.tokens(prompt), attempt) as passage:
            began = time.monotonic()
            answer = await self._client.ask(prompt, attempt.limit_s, self._access.on_sent(passage), headers, schema)
            spent_s = time.monotonic() - began
            if answer.prompt_tokens is not None and answer.completion_tokens is not None:
                passage.tokens = answer.prompt_tokens + answer.completion_tokens
                self._estimate.learn(prompt, answer.prompt_tokens, answer.completion_tokens)
        return answer, spent_s
