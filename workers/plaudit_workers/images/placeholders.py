"""Find the places of images in chat messages: ``<image>`` in a text, as in verl, or a part of type ``image``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PLACEHOLDER = "<image>"


def num_placeholders(prompt: str | Sequence[dict[str, Any]]) -> int:
    """Return the number of places for images in a prompt, text or messages."""
    if isinstance(prompt, str):
        return prompt.count(PLACEHOLDER)
    return sum(part.get("type") == "image" for message in prompt for part in _parts(message["content"]))


def with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts wherever they have an image, as chat templates expect them.

    Image parts become ``{"type": "image"}``: a template that looks for keys must not find Arrow's nulls.
    """
    return [{**message, "content": _content(message["content"])} for message in messages]


def without_files(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as they are written, without the files or addresses in their image parts."""
    return [
        message if isinstance(message["content"], str) else {**message, "content": _parts(message["content"])}
        for message in messages
    ]


def _content(content: Any) -> Any:
    parts = _parts(content)
    return parts if any(part.get("type") == "image" for part in parts) else content


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        pieces = re.split(f"({re.escape(PLACEHOLDER)})", str(content))
        return [_image() if piece == PLACEHOLDER else _text_part(piece) for piece in pieces if piece]
    return [_plain(part) for part in content]


def _plain(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        return _text_part(str(part))
    if part.get("type") == "image":
        return _image()
    return {key: value for key, value in part.items() if value is not None}


def _image() -> dict[str, Any]:
    return {"type": "image"}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
