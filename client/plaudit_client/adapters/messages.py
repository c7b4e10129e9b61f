"""Read texts from chat messages and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRUTHS = ("ground_truth", "solution", "answer", "expected_answer")
"""Columns that may hold the answer, the first with a value counts."""


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return chat messages as dictionaries, from dictionaries or pydantic models."""
    return [
        dict(message) if isinstance(message, Mapping) else message.model_dump(mode="json", exclude_none=True)
        for message in messages
    ]


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts of which only texts count."""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return ""


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """Return a row's answer: verl's ``reward_model.ground_truth``, SkyRL's ``reward_spec``, or a column for it."""
    for section in ("reward_model", "reward_spec"):
        if isinstance(row.get(section), Mapping) and "ground_truth" in row[section]:
            return row[section]["ground_truth"]
    return next((row[name] for name in TRUTHS if row.get(name) is not None), None)
