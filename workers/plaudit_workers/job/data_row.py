"""Check the columns of one data row (verl's names) and read ``extra_info``.

The preflight checks every row with these functions before a run; the trainer, ``plaudit score`` and ``plaudit submit``
read rows with them.
"""

from __future__ import annotations

from typing import Any

import msgspec

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
"""Columns that every row must have; ``extra_info`` is optional, further columns are ignored."""

MEDIA_COLUMNS = ("images", "videos", "audios")
"""Columns of multi-modal data in verl's form. They are refused: without them, a prompt would be trained without what it
asks about."""

MEDIA_REMEDY = "Prompts are text only; remove the column if it is empty in every row, or use other data"

REMEDIES = {
    "data_source": "name the origin of each prompt (text); rule scorers are chosen by it",
    "prompt": "give each prompt as messages ([{role, content}, …]) or as text; contents are text, not images",
    "reward_model": "give each row {ground_truth: …}; null where scorers need none",
    "extra_info": "give a mapping, the JSON text of a mapping, or null",
}


def extra_info_of(value: Any) -> dict[str, Any]:
    """Return ``extra_info`` as a mapping: null and empty text are empty, other text is parsed as JSON.

    Raises:
        ValueError: it is neither a mapping, nor null, nor the JSON text of one of them.
    """
    if isinstance(value, str | bytes) and value:
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"is text but not JSON ({error})") from error
    if not value:
        return {}
    if not isinstance(value, dict):
        raise ValueError("is not a mapping")
    return value


def is_prompt(value: Any) -> bool:
    """Return True for text, and for a non-empty list of messages with role and content, which is text."""
    if isinstance(value, str):
        return True
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() and _is_text(message["content"])
        for message in value
    )


def _is_text(content: Any) -> bool:
    """Return False for contents with a part that is an image, a video or audio."""
    parts = content if isinstance(content, list) else []
    return all(not isinstance(part, dict) or part.get("type", "text") == "text" for part in parts)


def has_ground_truth(value: Any) -> bool:
    """Return True for a mapping with ``ground_truth``, which may be null."""
    return isinstance(value, dict) and "ground_truth" in value


def is_extra_info(value: Any) -> bool:
    """Return True for a value that ``extra_info_of`` accepts."""
    try:
        extra_info_of(value)
    except ValueError:
        return False
    return True


CHECKS = {"prompt": is_prompt, "reward_model": has_ground_truth, "extra_info": is_extra_info}
"""By column; a row without ``extra_info`` counts as null."""
