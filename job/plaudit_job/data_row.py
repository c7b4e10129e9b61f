"""Turn one row of a data file (verl's columns) into plain data, or say which column is wrong and what to write.

``plaudit validate`` and ``plaudit try`` read rows through ``data_row``, and so does the trainer: what one refuses, all
refuse. Further columns are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_wire.plain import PlainDataError, plain, plain_json, plain_text, shown

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
"""Columns that every row must have; ``extra_info`` is optional."""
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


class DataRow(msgspec.Struct, frozen=True, array_like=True):
    """Hold one row as plain data."""

    data_source: str
    prompt: str | list[dict[str, Any]]
    """Text, or chat messages; an image in them is ``{"type": "image"}``."""
    ground_truth: Any
    extra_info: dict[str, Any]


def data_row(row: Mapping[str, Any], *, images: bool = False) -> DataRow:
    """Return a row as Parquet or JSON lines gave it as plain data.

    Args:
        images: The job reads images.

    Raises:
        PlainDataError: A column is wrong, or has a part that cannot travel; ``where`` begins with the column.
    """
    source, reward_model = row.get("data_source"), row.get("reward_model")
    if not isinstance(source, str):
        raise _wrong("data_source", source)
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise _wrong("reward_model", reward_model)
    return DataRow(
        plain_text(source),
        _prompt(row.get("prompt"), ("text", "image") if images else ("text",)),
        plain(reward_model["ground_truth"], "reward_model.ground_truth"),
        extra_info_of(row.get("extra_info")),
    )


def extra_info_of(value: Any) -> dict[str, Any]:
    """Return ``extra_info`` as a mapping of plain data: null and empty text are empty, other text is read as JSON.

    Raise ``PlainDataError`` for anything else.
    """
    if isinstance(value, str | bytes) and value:
        read = plain_json(value, "extra_info")
    else:
        read = plain(value or None, "extra_info")
    if not isinstance(read or {}, dict):
        raise _wrong("extra_info", value)
    return read or {}


def refused_media(images: bool) -> dict[str, str]:
    """Return the columns that are refused, each with its remedy; ``images`` if the job reads images."""
    return {column: remedy for column, remedy in MEDIA_REMEDIES.items() if not (images and column == IMAGES_COLUMN)}


def _prompt(value: Any, kinds: tuple[str, ...]) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return plain_text(value)
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", value)
    messages: list[dict[str, Any]] = plain(
        [_message(message, kinds, f"prompt[{number}]") for number, message in enumerate(value)], "prompt"
    )
    return messages


def _message(message: Any, kinds: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return a message without the nulls that a table has in place of keys that only other messages have."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong("prompt", message, where)
    content = message.get("content")
    if isinstance(content, list):
        content = [_part(part, kinds, f"{where}.content[{number}]") for number, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise _wrong("prompt", content, f"{where}.content")
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "content": content}


def _part(part: Any, kinds: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return a part of a content: text, or an image without its file, which is in another column."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = (part.get("type") or "text") if isinstance(part, Mapping) else None
    if kind not in kinds or (kind == "text" and not isinstance(part.get("text"), str)):
        raise _wrong("prompt", part, where)
    if kind == "image":
        return {"type": "image"}
    return {key: value for key, value in part.items() if value is not None}


def _wrong(column: str, value: Any, where: str = "") -> PlainDataError:
    return PlainDataError(f"is {shown(value)}", REMEDIES[column], where or column)
