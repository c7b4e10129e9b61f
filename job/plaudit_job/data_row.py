"""Turn one row of a data file into plain data, or say which column is wrong and what to write.

``plaudit validate`` and ``plaudit try`` read rows through ``data_row``, and so does the trainer: what one refuses, all
refuse. Columns are verl's, and further ones are ignored, unless ``data.columns`` names others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_job.spec.rollout import ColumnsSpec
from plaudit_wire.plain import PlainDataError, json_value, plain, plain_json, plain_text
from plaudit_wire.printable import shown

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
_MESSAGES_TEXT = re.compile(r"""\[\s*\{\s*["'](role|content)["']\s*:""")
"""The beginning of messages in a text, written as JSON or as Python shows a list."""
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


def data_row(
    row: Mapping[str, Any], *, columns: ColumnsSpec | None = None, source: str = "", images: bool = False
) -> DataRow:
    """Return a row as Parquet or JSON lines gave it as plain data.

    Args:
        columns: ``data.columns``. None: verl's.
        source: With ``columns``, the origin of a row that names none.
        images: The job reads images.

    Raises:
        PlainDataError: A column is wrong, or has a part that cannot travel; ``where`` begins with the column.
    """
    if columns is not None:
        return _row_of_columns(row, columns, source, images=images)
    origin, reward_model = row.get("data_source"), _opened(row.get("reward_model"), "{")
    if not isinstance(origin, str):
        raise _wrong("data_source", origin)
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise _wrong("reward_model", reward_model)
    return DataRow(
        plain_text(origin),
        _prompt(row.get("prompt"), images=images),
        plain(reward_model["ground_truth"], "reward_model.ground_truth"),
        extra_info_of(row.get("extra_info")),
    )


def needed_columns(columns: ColumnsSpec | None) -> tuple[str, ...]:
    """Return the columns that every row must have."""
    if columns is None:
        return REQUIRED_COLUMNS
    return tuple(dict.fromkeys(filter(None, (columns.prompt, columns.ground_truth, *columns.extra_info))))


def read_columns(columns: ColumnsSpec | None, images: bool) -> tuple[str, ...] | None:
    """Return the columns that are read where a file has them; None for all."""
    if columns is None:
        return (*REQUIRED_COLUMNS, "extra_info", *([IMAGES_COLUMN] if images else []))
    if not columns.extra_info:
        return None
    optional = (columns.data_source, "extra_info", *(["reward_model"] if not columns.ground_truth else []))
    return tuple(dict.fromkeys((*needed_columns(columns), *optional, *([IMAGES_COLUMN] if images else []))))


def _row_of_columns(row: Mapping[str, Any], columns: ColumnsSpec, source: str, *, images: bool) -> DataRow:
    """Return a row whose columns have other names than verl's."""
    messages, truth = row.get(columns.prompt), _ground_truth(row, columns)
    if columns.ground_truth == columns.prompt:
        messages, truth = _without_answer(_opened(messages, "["), columns.prompt)
    origin = row.get(columns.data_source)
    if origin is None or origin != origin:  # NaN, which pandas writes for an absent text
        origin = source
    if not isinstance(origin, str):
        raise _wrong("data_source", origin, columns.data_source)
    return DataRow(
        plain_text(origin),
        _prompt(messages, columns.prompt, images=images),
        plain(truth, columns.ground_truth or "reward_model.ground_truth"),
        _extra_info(row, columns),
    )


def _ground_truth(row: Mapping[str, Any], columns: ColumnsSpec) -> Any:
    if columns.ground_truth:
        truth = row.get(columns.ground_truth)
        return _text_of_completion(truth) if isinstance(truth, list) else truth
    reward_model = _opened(row.get("reward_model"), "{")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def _text_of_completion(value: list[Any]) -> Any:
    """Return the text of TRL's completion, a list of one message; other lists are ground truths as they are."""
    if len(value) == 1 and isinstance(value[0], Mapping) and isinstance(value[0].get("role"), str):
        return value[0].get("content")
    return value


def _without_answer(messages: Any, column: str) -> tuple[Any, Any]:
    """Return a conversation up to the last message of the assistant, and the text of this message."""
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if isinstance(last, Mapping) and "role" not in last:
        raise _wrong("prompt", last, f"{column}[{len(messages) - 1}]")
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise PlainDataError(
            "does not end with a message of the assistant", "give one, or name another groundTruth column", column
        )
    return messages[:-1], last.get("content")


def _extra_info(row: Mapping[str, Any], columns: ColumnsSpec) -> dict[str, Any]:
    """Return the named columns, else those that have no other use, after those of ``extra_info`` itself."""
    used = {columns.prompt, columns.data_source, "extra_info", "reward_model", IMAGES_COLUMN}
    names = columns.extra_info or [name for name in row if name not in used]
    return extra_info_of(row.get("extra_info")) | {name: plain(row.get(name), name) for name in names}


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


def _opened(value: Any, start: str) -> Any:
    """Return what JSON text holds, if it is of the kind that begins with ``start``; any other value as it is."""
    if isinstance(value, str) and value.startswith(start):
        with contextlib.suppress(PlainDataError):
            return json_value(value)
    return value


def _prompt(value: Any, column: str = "prompt", *, images: bool) -> str | list[dict[str, Any]]:
    value = _messages_of(value, column)
    if isinstance(value, str):
        return plain_text(value)
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", value, column)
    messages: list[dict[str, Any]] = plain(
        [_message(message, f"{column}[{number}]", images=images) for number, message in enumerate(value)], column
    )
    return messages


def _messages_of(value: Any, column: str) -> Any:
    """Return the messages of a text that holds them as JSON, as pandas and CSV keep them; other values as they are."""
    if not isinstance(value, str) or not value.startswith("[") or not _MESSAGES_TEXT.match(value):
        return value
    try:
        return json_value(value, column)
    except PlainDataError as error:
        raise PlainDataError(
            f"is text that begins like messages, but {error.complaint}",
            "write messages as JSON (json.dumps, not str), or as a list",
            column,
        ) from None


def _message(message: Any, where: str, *, images: bool) -> dict[str, Any]:
    """Return a message without the nulls that a table has in place of keys that only other messages have."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong("prompt", message, where)
    content = message.get("content")
    if isinstance(content, list):
        content = _content(content, f"{where}.content", images=images)
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise _wrong("prompt", content, f"{where}.content")
    _check_calls(message.get("tool_calls") or [], f"{where}.tool_calls")
    return {**without_nulls(message), "content": content}


def _check_calls(calls: Any, where: str) -> None:
    """Refuse calls of tools that no chat template and no page could write."""
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function", call) if isinstance(call, Mapping) and isinstance(calls, list) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            place = f"{where}[{number}]" if isinstance(calls, list) else where
            raise PlainDataError(f"is {shown(call)}", "give a list of {function: {name, arguments}}", place)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that a table fills with null in every row once one row has them."""
    if type(value) is str:
        return value
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _content(parts: list[Any], where: str, *, images: bool) -> str | list[dict[str, Any]]:
    """Return parts as a text, which every chat template takes; with images they stay parts.

    Texts are joined by line ends, as vLLM joins them for such templates.
    """
    kinds = ("text", "image") if images else ("text",)
    checked = [_part(part, kinds, f"{where}[{number}]") for number, part in enumerate(parts)]
    if any(part["type"] == "image" for part in checked):
        return checked
    return "\n".join(part["text"] for part in checked)


def _part(part: Any, kinds: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return a part of a content: text, or an image without its file, which is in another column."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = (part.get("type") or "text") if isinstance(part, Mapping) else None
    if kind not in kinds or (kind == "text" and not isinstance(part.get("text"), str)):
        raise _wrong("prompt", part, where)
    return {"type": "image"} if kind == "image" else {"type": "text", "text": part["text"]}


def _wrong(column: str, value: Any, where: str = "") -> PlainDataError:
    return PlainDataError(f"is {shown(value)}", REMEDIES[column], where or column)
