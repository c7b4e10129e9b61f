"""NeMo Gym's ``POST /verify``: a request with the policy's response to the same with ``reward``.

The messages of ``responses_create_params.input`` are the prompt, the texts of ``response.output`` the response. Ground
truth is the field ``ground_truth``, ``expected_answer`` or ``label``; ``verifier_metadata`` becomes ``extra_info``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit_workers.gateway.callers.results import SampleAnswer
from plaudit_workers.scoring.offline.lines import SampleInput, sample_input

_TRUTHS = ("ground_truth", "expected_answer", "label")


def samples(body: Mapping[str, Any]) -> list[SampleInput]:
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


def answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> dict[str, Any]:
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
