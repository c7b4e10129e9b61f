"""Random conversations, and a policy that writes its turns as a chat template does."""

from __future__ import annotations

import random
from typing import Any

from plaudit_workers.rollout.agents.chat import tool_call, tool_message
from plaudit_workers.tokenizer import ChatTemplate


def words(draw: random.Random) -> str:
    """Return text with everything that templates escape or strip inside."""
    letters = "the inner answer {}\"'<>[]:,.\n0123456789äß語🙂"
    return ("x" + "".join(draw.choices(letters, k=draw.randrange(0, 30))) + "y").strip()


def conversation(draw: random.Random, most_calls: int = 3) -> list[list[dict[str, Any]]]:
    """Return turns: each an assistant's message and what follows it."""
    turns, number = [], 0
    for _ in range(draw.randrange(1, 5)):
        count = draw.randrange(0, most_calls + 1)
        calls = [tool_call(f"tool_{place}", {"key": words(draw), "n": place}, number + place) for place in range(count)]
        results = [tool_message(f"tool_{place}", words(draw), number + place) for place in range(count)]
        number += count
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else words(draw)}
        follows = results or [{"role": "user", "content": words(draw)}]
        turns.append([message | ({"tool_calls": calls} if calls else {}), *follows])
    return turns


def written(template: ChatTemplate, before: list[dict[str, Any]], message: dict[str, Any]) -> str | None:
    """Return the text that the template writes for an assistant's message; None where it rewrites what was before."""
    opened = template.render(before, generate=True)
    text = template.render([*before, message], generate=False)
    return text[len(opened) :] if text.startswith(opened) else None


def sampled(template: ChatTemplate, before: list[dict[str, Any]], message: dict[str, Any], end: str) -> list[int]:
    """Return the ids of the policy that writes this message as the template does, up to its end-of-turn token."""
    text = written(template, before, message)
    assert text is not None
    cut = text.rfind(end)
    return template.encode(text[: cut + len(end)] if cut >= 0 else text)
