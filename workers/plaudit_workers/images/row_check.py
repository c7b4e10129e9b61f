"""Check the images of one data row against its prompt. Called by the preflight and by the trainer, for every row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plaudit_workers.images.column import image_files, row_images
from plaudit_workers.images.decoding import ImageError, decode_image
from plaudit_workers.images.placeholders import PLACEHOLDER, num_placeholders


def row_files(prompt: str | Sequence[dict[str, Any]], value: Any, folder: Path, most: int) -> list[bytes]:
    """Return the bytes of a row's images, of which each can be decoded and has its place in the prompt.

    Raises:
        ImageError: an image is missing, has no place or cannot be decoded, or there are too many; the message continues
            a sentence about the column.
    """
    num_images, places = len(row_images(value)), num_placeholders(prompt)
    if num_images > most:
        raise ImageError(f"has {num_images} images, data.images.maxPerPrompt is {most}", "Raise it, or remove images")
    if num_images and isinstance(prompt, str):
        raise ImageError(
            "has images, but the prompt is text, which the chat template does not see",
            f"Give messages, with {PLACEHOLDER} where an image belongs",
        )
    if num_images != places and not isinstance(prompt, str):
        raise ImageError(
            f"has {_count(num_images, 'image')}, but the prompt has {_count(places, 'place')} for one",
            f"Write {PLACEHOLDER} (or a part of type image) once for each image",
        )
    files = list(image_files(value, folder))
    for number, content in enumerate(files, 1):
        try:
            decode_image(content)
        except ImageError as error:
            raise ImageError(f"has image {number}, which {error.complaint}", error.remedy) from error
    return files


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
