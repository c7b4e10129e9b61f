"""NeMo Gym's ``POST /verify``: a request with the policy's response to the same with ``reward``.

The messages of ``responses_create_params.input`` are the prompt, the texts of ``response.output`` the response. Ground
truth is the field ``ground_truth``, ``expected_answer`` or ``label``; ``verifier_metadata`` becomes ``extra_info``.

OpenRLHF's ``--reward.remote_url``: ``{query, prompts, labels}`` to ``{rewards, scores, extra_logs}``, all lists.

A query is the prompt followed by the response.

slime's ``--rm-type remote_rm --rm-url``: ``{prompt, response, label}`` to a reward, which slime takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from plaudit_workers.service.callers import SampleAnswer
from plaudit_workers.service.lines import SampleInput, sample_input

_TRUTHS = ("ground_truth", "expected_answer", "label")


def nemo_gym_samples(body: Mapping[str, Any]) -> list[SampleInput]:
    """Return the one sample of a request. Raise ``ValueError``."""
    response = body.get("response")
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise ValueError("response.output: give the list of the policy's output items")
    parameters = body.get("responses_create_params")
    prompt = parameters.get("input", "") if isinstance(parameters, Mapping) else ""
    row = {
        "prompt": _messages(prompt),
        "response": "".join(_texts(response["output"])),
        "ground_truth": next((body[name] for name in _TRUTHS if body.get(name) is not None), None),
        "extra_info": body.get("verifier_metadata"),
        "data_source": body.get("data_source"),
    }
    return [sample_input(row, SampleInput)]


def nemo_gym_answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> dict[str, Any]:
    """Return the request with its reward.

    Raises:
        ValueError: the sample has no score; Gym has no reward that means so.
    """
    result = results[0]
    if result.score is None:
        raise ValueError(f"no score: {result.outcome}: {result.reason}")
    return {**body, "reward": result.score}


def _texts(output: Sequence[Any]) -> list[str]:
    parts = [
        item.get("content") or [] for item in output if isinstance(item, Mapping) and item.get("type") == "message"
    ]
    return [str(part.get("text", "")) for content in parts if isinstance(content, list) for part in content] + [
        content for content in parts if isinstance(content, str)
    ]


def _messages(prompt: Any) -> Any:
    """Return the prompt's messages with their content as text."""
    if not isinstance(prompt, list):
        return prompt
    messages = []
    for item in prompt:
        content = item.get("content", "") if isinstance(item, Mapping) else item
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        role = item.get("role", "user") if isinstance(item, Mapping) else "user"
        messages.append({"role": role, "content": content})
    return messages


def openrlhf_samples(body: Mapping[str, Any]) -> list[SampleInput]:
    """Return the samples of a request. Raise ``ValueError``."""
    queries = body.get("query")
    if not isinstance(queries, list):
        raise ValueError(f"query: give a list of texts, not {type(queries).__name__}")
    prompts = body.get("prompts") or [""] * len(queries)
    labels = body.get("labels") or [None] * len(queries)
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(f"query, prompts, labels: {len(queries)}, {len(prompts)}, {len(labels)} of each; give as many")
    return [_sample(query, prompt, label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]


def _sample(query: Any, prompt: Any, label: Any) -> SampleInput:
    response = query.removeprefix(prompt) if isinstance(query, str) and isinstance(prompt, str) else query
    return sample_input({"prompt": prompt, "response": response, "ground_truth": label}, SampleInput)


def openrlhf_answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> dict[str, Any]:
    """Return the lists; a sample without a score has null in both."""
    scores = [result.score for result in results]
    names = {name for result in results for name in result.scorers}
    logs = {
        name: [result.scorers[name].value if name in result.scorers else None for result in results] for name in names
    }
    return {"rewards": scores, "scores": scores, "extra_logs": logs}


def slime_samples(body: Mapping[str, Any]) -> list[SampleInput]:
    """Return the one sample of a request; ``metadata``, if present, becomes ``extra_info``. Raise ``ValueError``."""
    metadata = body.get("metadata") or {}
    row = {
        "prompt": body.get("prompt"),
        "response": body.get("response"),
        "ground_truth": body.get("label"),
        "extra_info": metadata,
        "data_source": metadata.get("data_source") if isinstance(metadata, Mapping) else None,
    }
    return [sample_input(row, SampleInput)]


def slime_answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> float | None:
    """Return the reward; None without one."""
    return results[0].score


class GatewayShape(NamedTuple):
    """Convert the request and answer of another system's reward server."""

    samples: Callable[[Mapping[str, Any]], list[SampleInput]]
    """Return the samples of a request. Raise ``ValueError``."""
    answer: Callable[[Mapping[str, Any], Sequence[SampleAnswer]], Any]
    """Return the answer. Raise ``ValueError`` where the shape cannot express a missing score."""


SHAPES = {
    "/slime": GatewayShape(slime_samples, slime_answer),
    "/openrlhf": GatewayShape(openrlhf_samples, openrlhf_answer),
    "/verify": GatewayShape(nemo_gym_samples, nemo_gym_answer),
}
"""Path → shape."""
