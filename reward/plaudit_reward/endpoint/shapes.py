"""Encode and decode the protocols of reward endpoints: as the client that asks one, and as the gateway that is one.

``SHAPES`` holds the client's side: the request for a sample, and the reading of its answer. ``GATEWAY_SHAPES`` holds
the server's side, for the protocols that a gateway answers: the samples of a request, and the answer for their results.
A request that one side writes, the other reads back (tests/reward/remote/test_round_trips.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from yarl import URL

from plaudit_reward.functions.result import extra_of
from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.printable import shown
from plaudit_wire.records import Outcome, Sample

ShapeName = Literal["plaudit", "slime", "openrlhf", "nemo-gym", "sandbox-fusion"]


@dataclass(frozen=True)
class EndpointShape:
    """Hold the client's side of a protocol."""

    body: Callable[[Sample], dict[str, Any]]
    """Returns the request's JSON object."""
    score: Callable[[Any], Score]
    """Reads the answer, which is plain data. Raises ``MalformedAnswerError`` and ``DataError``."""
    seed_url: Callable[[str], str] = lambda url: ""
    """Returns the URL that opens a sample's session before it is scored; empty: the endpoint has no sessions."""
    unseeded: frozenset[str] = frozenset()
    """Members of the request that the opening of a session does not get."""


class GatewayResult(NamedTuple):
    """Hold the result of one sample, for the answer of a gateway."""

    score: float | None
    outcome: str = "scored"
    reason: str | None = None
    values: Mapping[str, float | None] = {}
    """By the names of the scorers."""
    drop_group: bool = False


@dataclass(frozen=True)
class GatewayShape:
    """Hold the server's side of a protocol."""

    rows: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
    """Returns a request's samples as rows with verl's columns. Raises ``ValueError``."""
    answer: Callable[[Mapping[str, Any], Sequence[GatewayResult]], Any]
    """Returns the answer. Raises ``ValueError`` where the protocol cannot express a missing score."""


class MalformedAnswerError(InfrastructureError):
    """The answer does not have the shape that the job names: something else answers at this address."""


def scored(value: Any, extra: Mapping[str, Any] | None = None) -> Score:
    """Return the score of a value of the answer, which is plain data: a finite number.

    Raises ``DataError`` for null and text: the endpoint answered, and has no score for this sample.
    """
    if value is None:
        raise DataError("the endpoint has no score for this sample: its answer is null, or a number that is not finite")
    if not isinstance(value, int | float):
        raise DataError(f"the endpoint's score is {shown(value)}, which is not a number")
    return Score("scored", float(value), extra=extra_of(extra or {}))


def _member(answer: Any, name: str) -> Any:
    """Return a member of the answer; raise ``MalformedAnswerError`` if it is not an object with this member."""
    if not isinstance(answer, dict):
        raise MalformedAnswerError(f"the answer is {type(answer).__name__}, not an object with {name!r}")
    if name not in answer:
        raise MalformedAnswerError(f"the answer has no {name!r} (its members: {', '.join(answer) or 'none'})"[:300])
    return answer[name]


def _other_values(answer: Mapping[str, Any], used: str) -> dict[str, Any]:
    """Return the numbers and texts of an answer besides the member ``used``."""
    return {name: item for name, item in answer.items() if name != used and isinstance(item, int | float | str)}


# ``plaudit``: ``POST /v1/score`` of a reward service's gateway, which decodes it itself (``service.requests``).

CALLER_HEADER = "plaudit-caller"
"""Header with the name of a run among those that share a token."""
_ENDED_ELSEWHERE = {"poison": "infra_error", "given_up": "infra_error"}
"""Outcomes that describe the other service's own processing."""


def _plaudit_body(sample: Sample) -> dict[str, Any]:
    # The id is the same in every attempt, so that the service scores the sample once. A sample that was generated
    # again after its rollout died has another response, and must not meet the earlier id.
    content = hashlib.sha256(f"{sample.prompt}\0{sample.response}".encode(errors="surrogatepass")).hexdigest()
    return {
        "id": f"{sample.group}/{sample.index}/{content[:12]}",
        "response": sample.response,
        "prompt": sample.messages or sample.prompt,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _plaudit_score(answer: Any) -> Score:
    """Read a typed result. The service has already retried: its failures are final here."""
    outcome = _member(answer, "outcome")
    if not isinstance(outcome, str) or outcome not in get_args(Outcome):
        raise MalformedAnswerError(f"the answer's outcome is {str(outcome)[:100]!r}")
    if outcome != "scored":
        ended = cast(Outcome, _ENDED_ELSEWHERE.get(outcome, outcome))
        return Score.failed(ended, str(answer.get("reason") or outcome)[:500])
    scorers = answer.get("scorers")
    scorers = scorers if isinstance(scorers, dict) else {}
    values = {name: result.get("value") for name, result in scorers.items() if isinstance(result, dict)}
    return scored(_member(answer, "score"), values)


# ``slime``: slime's ``--rm-type remote_rm --rm-url``: ``{prompt, response, label}`` to a reward.

_SLIME_SCORES = ("score", "reward")


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
    for name in _SLIME_SCORES:
        if name in answer:
            return scored(answer[name], _other_values(answer, name))
    raise MalformedAnswerError(
        f"the answer is an object without {' or '.join(_SLIME_SCORES)} (its members: {', '.join(answer) or 'none'}); "
        "name the member in http.jsonPath"[:400]
    )


def _slime_rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    metadata = body.get("metadata") or {}
    source = metadata.get("data_source") if isinstance(metadata, Mapping) else None
    row = {"prompt": body.get("prompt"), "response": body.get("response"), "ground_truth": body.get("label")}
    return [{**row, "extra_info": metadata, "data_source": source}]


def _slime_answer(body: Mapping[str, Any], results: Sequence[GatewayResult]) -> float | None:
    """Return the reward, which slime takes as it is; null without one."""
    return results[0].score


# ``openrlhf``: OpenRLHF's ``--reward.remote_url``: ``{query, prompts, labels}`` to ``{rewards, scores, extra_logs}``.
# All are lists; a query is the prompt followed by the response.


def _openrlhf_body(sample: Sample) -> dict[str, Any]:
    return {"query": [sample.prompt + sample.response], "prompts": [sample.prompt], "labels": [sample.ground_truth]}


def _openrlhf_score(answer: Any) -> Score:
    logs = answer.get("extra_logs") if isinstance(answer, dict) else None
    extra = {name: _only(item, name) for name, item in logs.items()} if isinstance(logs, dict) else {}
    return scored(_only(_member(answer, "rewards"), "rewards"), extra)


def _only(value: Any, name: str) -> Any:
    """Return the item of a list of one. Some servers answer a bare value."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise MalformedAnswerError(f"{name!r} has {len(value)} items for one sample")
    return value[0]


def _openrlhf_rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    queries = body.get("query")
    if not isinstance(queries, list):
        raise ValueError(f"query: give a list of texts, not {type(queries).__name__}")
    prompts = body.get("prompts") or [""] * len(queries)
    labels = body.get("labels") or [None] * len(queries)
    for name, values in (("prompts", prompts), ("labels", labels)):
        if not isinstance(values, list):
            raise ValueError(f"{name}: give a list, one for each query, not {type(values).__name__}")
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(f"query, prompts, labels: {len(queries)}, {len(prompts)}, {len(labels)} of each; give as many")
    rows = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query.removeprefix(prompt) if isinstance(query, str) and isinstance(prompt, str) else query
        rows.append({"prompt": prompt, "response": response, "ground_truth": label})
    return rows


def _openrlhf_answer(body: Mapping[str, Any], results: Sequence[GatewayResult]) -> dict[str, Any]:
    """Return the lists; a sample without a score has null in both."""
    scores = [result.score for result in results]
    names = {name for result in results for name in result.values}
    logs = {name: [result.values.get(name) for result in results] for name in names}
    return {"rewards": scores, "scores": scores, "extra_logs": logs}


# ``nemo-gym``: ``POST /verify`` of a NeMo Gym resources server: a row's members and an OpenAI ``response`` to the same
# with ``reward``. The row opens a session first (``/seed_session``): some servers verify by what they keep in it. From
# NeMo Gym 0.7 on, ``mask_sample`` says that the reward, a 0, measures nothing: a judge or the server's machine failed.

_SEED, _VERIFY = "seed_session", "verify"
_TRUTHS = ("ground_truth", "expected_answer", "label")


def seed_url(url: str) -> str:
    """Return the route that opens a session, beside the route ``/verify``; empty for another route."""
    address = URL(url)
    return str(address.with_name(_SEED)) if address.name == _VERIFY else ""


def _nemo_gym_body(sample: Sample) -> dict[str, Any]:
    """Return the row (``extra_info``), the request that the model answered, and its answer as a Responses object."""
    identity = f"{sample.group}-{sample.index}"
    message = {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": sample.response, "annotations": []}],
    }
    return {
        **sample.extra_info,
        "responses_create_params": {"input": sample.messages or [{"role": "user", "content": sample.prompt}]},
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


def refuse_masked(answer: Mapping[str, Any]) -> None:
    """Raise ``InfrastructureError`` for the answer of a resources server whose reward is no measurement."""
    if answer.get("mask_sample") is True:
        said = ": ".join(str(answer[name]) for name in ("failure_kind", "failure_reason") if answer.get(name))
        raise InfrastructureError(f"the resources server masks this sample ({said or 'without a reason'})"[:500])


def _nemo_gym_score(answer: Any) -> Score:
    reward = _member(answer, "reward")
    refuse_masked(answer)
    components = answer.get("reward_components")
    return scored(reward, components if isinstance(components, dict) else _other_values(answer, "reward"))


def _nemo_gym_rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row: the messages of the input, and the texts of the output as the response."""
    response = body.get("response")
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise ValueError("response.output: give the list of the policy's output items")
    parameters = body.get("responses_create_params")
    prompt = parameters.get("input", "") if isinstance(parameters, Mapping) else ""
    row = {
        "prompt": [_chat_message(item) for item in prompt] if isinstance(prompt, list) else prompt,
        "response": "".join(_output_texts(response["output"])),
        "ground_truth": next((body[name] for name in _TRUTHS if body.get(name) is not None), None),
        "extra_info": body.get("verifier_metadata"),
        "data_source": body.get("data_source"),
    }
    return [row]


def _output_texts(output: Sequence[Any]) -> list[str]:
    contents = [
        item.get("content") or [] for item in output if isinstance(item, Mapping) and item.get("type") == "message"
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ValueError("response.output: give each message's content as a list of objects with text")
    return [str(part.get("text", "")) for part in parts] + [content for content in contents if isinstance(content, str)]


def _chat_message(item: Any) -> dict[str, Any]:
    """Return a message of the input with its content as text."""
    if not isinstance(item, Mapping):
        return {"role": "user", "content": item}
    content = item.get("content", "")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return {"role": item.get("role", "user"), "content": content}


def _nemo_gym_answer(body: Mapping[str, Any], results: Sequence[GatewayResult]) -> dict[str, Any]:
    """Return the request with its reward; Gym has no reward that means "no score"."""
    (result,) = results
    if result.score is None:
        raise ValueError(f"no score: {result.outcome}: {result.reason}")
    return {**body, "reward": result.score}


# ``sandbox-fusion``: ``POST /submit`` of a Sandbox Fusion server, which finds the program in a response and tests it.
# The row names the problem: its ``ground_truth`` is ``config.provided_data`` where it is an object, ``extra_info.id``
# the problem's id. ``accepted`` is 1 or 0. Rule ``code`` runs test cases of the row through ``/run_code`` instead.


def _sandbox_fusion_body(sample: Sample) -> dict[str, Any]:
    config = {"provided_data": sample.ground_truth} if isinstance(sample.ground_truth, dict) else {}
    identity = sample.extra_info.get("id", f"{sample.group}/{sample.index}")
    return {"dataset": sample.data_source, "id": identity, "completion": sample.response, "config": config}


def _sandbox_fusion_score(answer: Any) -> Score:
    accepted = _member(answer, "accepted")
    if not isinstance(accepted, bool):
        raise MalformedAnswerError(f"'accepted' is {str(accepted)[:100]!r}, not true or false")
    return scored(float(accepted))


# The Open Reward Standard (the package ``openreward``): ``POST /score_group`` of a session. The session has the task, a
# data row; the request has the candidates, each a conversation of messages that consist of blocks.

_TASK_COLUMNS = ("prompt", "data_source", "ground_truth", "reward_model", "extra_info")
OPEN_REWARD_ROUTE = "/list_environments"
"""A server of the standard has it."""
OPEN_REWARD_BLOCKS = ("text", "reasoning", "tool_call", "tool_result")
"""Blocks that messages of candidates may have; an image is refused."""


def open_reward_rows(task: Mapping[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each candidate; raise ``ValueError``.

    The response is the visible text of the last turn of the assistant, as the standard's own judges read it, the prompt
    the task's, or the messages before that turn. What the task has besides a row's columns is its ``extra_info``.
    """
    candidates = body.get("candidates")
    if not isinstance(candidates, list):
        raise ValueError(f"candidates: give a list of objects with messages, not {shown(candidates)}")
    row = {name: task[name] for name in _TASK_COLUMNS if name in task}
    row.setdefault("extra_info", {name: value for name, value in task.items() if name not in row})
    if "reward_model" not in row:
        row.setdefault("ground_truth", next((task[name] for name in _TRUTHS if task.get(name) is not None), None))
    rows = []
    for position, candidate in enumerate(candidates):
        try:
            chat = list(_conversation(candidate))
        except DataError as error:
            raise ValueError(f"candidates[{position}].messages: {error}") from error
        last = max((i for i, message in enumerate(chat) if message["role"] == "assistant"), default=None)
        if last is None:
            raise ValueError(f"candidates[{position}].messages: there is no assistant's turn to score")
        rows.append({"prompt": chat[:last], **row, "response": chat[last]["content"]})
    return rows


def open_reward_answer(results: Sequence[GatewayResult]) -> dict[str, Any]:
    """Return the scores. Raise ``ValueError`` if one is missing: a reward of the standard is a number."""
    missing = [f"candidates[{i}]: {r.outcome}: {r.reason}" for i, r in enumerate(results) if r.score is None]
    if missing:
        raise ValueError(f"no score: {'; '.join(missing)}"[:2000])
    return {
        "scores": [
            {"reward": each.score, "metadata": {"scorers": each.values, "drop_group": each.drop_group}}
            for each in results
        ]
    }


def _conversation(candidate: Any) -> Iterator[dict[str, Any]]:
    messages = candidate.get("messages") if isinstance(candidate, Mapping) else None
    if not isinstance(messages, list):
        raise DataError(f"the candidate is {shown(candidate)}; give an object with a list of messages")
    for message in messages:
        yield from open_reward_chat(message)


def open_reward_chat(message: Any) -> Iterator[dict[str, Any]]:
    """Yield a message of the standard as messages of OpenAI's form: results of tools have messages of their own.

    Raise ``DataError`` for what is no message, and for an image.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"a message is {shown(message)}; it must be an object with role and blocks")
    blocks = _blocks(message.get("blocks"))
    calls = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = open_reward_text(block.get("blocks"))
            yield {"role": "tool", "tool_call_id": block.get("tool_call_id"), "content": content}
        elif block.get("type") == "tool_call":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    thoughts = [str(block.get("text")) for block in blocks if block.get("type") == "reasoning"]
    rest = [block for block in blocks if block.get("type") not in ("tool_result", "tool_call", "reasoning")]
    if rest or calls or thoughts or not blocks:
        yield {
            "role": message.get("role"),
            "content": open_reward_text(rest),
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": "\n".join(thoughts)} if thoughts else {}),
        }


def open_reward_text(blocks: Any, *, images: bool = False) -> str:
    """Return the text of blocks; name an image by its size where it may be done without, else raise ``DataError``."""
    texts = []
    for block in _blocks(blocks):
        if block.get("type") == "image" and images:
            texts.append(f"[{block.get('mimeType')}, {len(str(block.get('data'))) * 3 // 4} bytes]")
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise DataError(f"a block is {shown(block)}; prompts, answers and results are blocks of text")
    return "\n".join(texts)


def _blocks(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(block, Mapping) for block in value):
        raise DataError(f"blocks are {shown(value)}; they must be a list of objects")
    return value


SHAPES: dict[ShapeName, EndpointShape] = {
    "plaudit": EndpointShape(_plaudit_body, _plaudit_score),
    "slime": EndpointShape(_slime_body, _slime_score),
    "openrlhf": EndpointShape(_openrlhf_body, _openrlhf_score),
    "nemo-gym": EndpointShape(_nemo_gym_body, _nemo_gym_score, seed_url, unseeded=frozenset({"response"})),
    "sandbox-fusion": EndpointShape(_sandbox_fusion_body, _sandbox_fusion_score),
}
GATEWAY_SHAPES: dict[str, GatewayShape] = {
    "/slime": GatewayShape(_slime_rows, _slime_answer),
    "/openrlhf": GatewayShape(_openrlhf_rows, _openrlhf_answer),
    "/verify": GatewayShape(_nemo_gym_rows, _nemo_gym_answer),
}
"""By the path of the gateway."""
