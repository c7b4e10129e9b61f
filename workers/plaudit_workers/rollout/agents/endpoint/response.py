"""Write answers in the forms of OpenAI's Chat Completions and Models API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from plaudit_workers.rollout.agents.endpoint.session import Completion

MODEL = "policy"
"""The id of the model; requests may name any."""


def completion_document(completion: Completion, model: str) -> dict[str, Any]:
    """Return a whole answer."""
    choice = {"index": 0, "message": completion.message, "finish_reason": completion.finish_reason, "logprobs": None}
    return {**_head(completion, model, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def completion_events(completion: Completion, model: str, *, include_usage: bool) -> Iterator[str]:
    """Return an answer as server-sent events, in few parts."""
    head = _head(completion, model, "chat.completion.chunk")
    message = completion.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(message.get("tool_calls") or [])]
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": completion.finish_reason}]})
    if include_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield "data: [DONE]\n\n"


def models_document() -> dict[str, Any]:
    """Return the list of models: the policy."""
    return {"object": "list", "data": [model_document(MODEL)]}


def model_document(name: str) -> dict[str, Any]:
    """Return one model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "plaudit"}


def error_document(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(completion: Completion, model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{completion.number}",
        "object": kind,
        "created": int(time.time()),
        "model": model or MODEL,
    }


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_tokens,
    }


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
