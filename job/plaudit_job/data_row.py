"""Check the columns of one data row (verl's names) and read ``extra_info``.

The preflight checks every row with these functions before a run; the trainer, ``plaudit score`` and ``plaudit submit``
read rows with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
"""Columns that every row must have; ``extra_info`` is optional, further columns are ignored."""
IMAGES_COLUMN = "images"
"""The column that is read where a job sets ``data.images``."""
MEDIA_REMEDIES = {
    "images": "Set spec.data.images to train a model with a vision tower on them, or remove the column",
    "videos": "Prompts have text and images; remove the column if it is empty in every row, or use other data",
    "audios": "Prompts have text and images; remove the column if it is empty in every row, or use other data",
}
"""Columns of multi-modal data in verl's form. They are refused where they are not read: without them, a prompt would be
trained without what it asks about."""
_WITHOUT_IMAGES = "contents are text, and images where spec.data.images is set"
REMEDIES = {
    "data_source": "name the origin of each prompt (text); rule scorers are chosen by it",
    "prompt": f"give each prompt as messages ([{{role, content}}, …]) or as text; {_WITHOUT_IMAGES}",
    "reward_model": "give each row {ground_truth: …}; null where scorers need none",
    "extra_info": "give a mapping, the JSON text of a mapping, or null",
}


def extra_info_of(value: Any) -> dict[str, Any]:
    """Return ``extra_info`` as a mapping: null and empty text are empty, other text is parsed as JSON.

    Raise ``ValueError`` for anything else.
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


def is_prompt(value: Any, kinds: Collection[str] = ("text",)) -> bool:
    """Return True for text, and for a non-empty list of messages with role and content of these kinds."""
    if isinstance(value, str):
        return True
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() and _has_kinds(message["content"], kinds)
        for message in value
    )


def refused_media(images: bool) -> dict[str, str]:
    """Return the columns that are refused, each with its remedy; ``images`` if the job reads images."""
    return {column: remedy for column, remedy in MEDIA_REMEDIES.items() if not (images and column == IMAGES_COLUMN)}


def _has_kinds(content: Any, kinds: Collection[str]) -> bool:
    """Return False for contents with a part of another type: an image, a video or audio."""
    parts = content if isinstance(content, list) else []
    return all(not isinstance(part, dict) or (part.get("type") or "text") in kinds for part in parts)


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


CHECKS: dict[str, Callable[[Any], bool]] = {
    "prompt": is_prompt,
    "reward_model": has_ground_truth,
    "extra_info": is_extra_info,
}
"""By column; a row without ``extra_info`` counts as null."""
CHECKS_WITH_IMAGES = CHECKS | {"prompt": partial(is_prompt, kinds=("text", "image"))}
"""The same for a job that reads images."""
