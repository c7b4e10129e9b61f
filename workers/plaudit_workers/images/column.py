"""Read the column ``images`` of a data row: verl's forms, of which each names or holds the bytes of an image file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit_workers.images.decoding import MOST_BYTES, ImageError

_REMEDY = "Give {bytes: …}, {path: …} or a path; paths are relative to the data file"


def row_images(value: Any) -> list[Any]:
    """Return the images of a row as written; null is none.

    Raises:
        ImageError: it is no list.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise ImageError(f"is {type(value).__name__}, no list", "Give a list of images; [] or null for none")
    return value


def image_files(value: Any, folder: Path) -> Iterator[bytes]:
    """Yield the bytes of each image of a row.

    Raises:
        ImageError: an image is written in another form, or its file cannot be read; the message names its number.
    """
    for number, image in enumerate(row_images(value), 1):
        try:
            yield image_bytes(image, folder)
        except ImageError as error:
            raise ImageError(f"has image {number}, which {error.complaint}", error.remedy) from error


def image_bytes(image: Any, folder: Path) -> bytes:
    """Return the bytes of one image as written: bytes, ``{bytes}``, ``{path}``, ``{image}``, or a path as text.

    Raises:
        ImageError: it is none of these, or its file cannot be read.
    """
    content = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(content, bytes | bytearray):
        return bytes(content)
    path = image.get("path") or image.get("image") if isinstance(image, dict) else image
    if not isinstance(path, str) or not path:
        kinds = f"has {', '.join(image) or 'nothing'}" if isinstance(image, dict) else f"is {type(image).__name__}"
        raise ImageError(kinds, _REMEDY)
    if "://" in path and not path.startswith("file://"):
        raise ImageError(f"is the address {path}", "Download it: a run reads images from files only")
    return _read(folder / path.removeprefix("file://"))


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ImageError(f"has more than {MOST_BYTES:,} bytes: {file}", "Compress it or make it smaller")
        return file.read_bytes()
    except OSError as error:
        raise ImageError(f"cannot be read: {file} ({error.strerror or error})", "Correct the path") from error
