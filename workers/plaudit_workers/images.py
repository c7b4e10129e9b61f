"""Check the images of one data row against its prompt. Called by the preflight and by the trainer, for every row.

Hold what was made of images within a bound of bytes: the least recently used goes first.

Read the column ``images`` of a data row: verl's forms, of which each names or holds the bytes of an image file.

Decode images: the trainer and vLLM get the same pixels, because both get them from here. Pillow is imported late.

Find the places of images in chat messages: ``<image>`` in a text, as in verl, or a part of type ``image``.

Store the images of a run once each, by the SHA-256 of their files: ``images/ab/abcd…`` in the run's folder.

Written by the trainer before the first prompt is admitted; read by rollouts and by every rank of the trainer. Prompts
on the streams carry digests only.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from plaudit_workers.files import whole_file

if TYPE_CHECKING:
    from PIL.Image import Image


MOST_BYTES = 32 << 20

"""Bytes of an image file."""

MOST_PIXELS = 1 << 26

"""Width times height of an image."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

"""Pillow's other decoders start programs (EPS) or are rarely used, and so rarely tested."""


class ImageError(ValueError):
    """Report an image that cannot be used; ``complaint`` continues a sentence about it."""

    def __init__(self, complaint: str, remedy: str) -> None:
        super().__init__(f"{complaint}. {remedy}")
        self.complaint = complaint
        self.remedy = remedy


def image_size(content: bytes) -> tuple[int, int]:
    """Return the height and width of a decoded image in pixels; only its header is read.

    Raises:
        ImageError: it has no such header.
    """
    image = _opened(content)
    width, height = image.size
    turned = image.getexif().get(_ORIENTATION, 1) >= _FIRST_TURNED
    return (width, height) if turned else (height, width)


def decode_image(content: bytes) -> Image:
    """Return an image in RGB, upright (EXIF) and on a white background where it is transparent; the first of several.

    Raises:
        ImageError: it cannot be decoded, or is too large.
    """
    from PIL import Image, ImageOps

    image = _opened(content)
    try:
        upright: Any = ImageOps.exif_transpose(image)
        if not upright.has_transparency_data:
            return upright.convert("RGB")  # type: ignore[no-any-return]
        layers = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    # Decoders fail with many types, SyntaxError and struct.error among them.
    except Exception as error:
        raise ImageError(f"cannot be decoded ({error})", "Write the file again") from error


_ORIENTATION = 0x0112

_FIRST_TURNED = 5

"""EXIF orientations from 5 on exchange width and height."""


def _opened(content: bytes) -> Image:
    from PIL import Image

    if len(content) > MOST_BYTES:
        raise ImageError(f"has {len(content):,} bytes, more than {MOST_BYTES:,}", "Compress it or make it smaller")
    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"is too large ({error})", "Make it smaller") from error
    except Exception as error:
        raise ImageError(f"is no {', '.join(_FORMATS)} image", "Write it in one of these formats") from error
    if image.width * image.height > MOST_PIXELS:
        raise ImageError(f"has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}", "Make it smaller")
    return image


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


Made = TypeVar("Made")


class ImageCache(Generic[Made]):
    """Cache objects made from images, by digest, within a bound. Any thread may call it.

    Args:
        make: makes it of a digest; two threads may make the same.
        size: bytes of what was made.
        most_bytes: a larger one is returned, but not kept.
    """

    def __init__(self, make: Callable[[str], Made], size: Callable[[Made], int], most_bytes: int) -> None:
        self._make = make
        self._size = size
        self._most_bytes = most_bytes
        self._held: OrderedDict[str, Made] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes held at this moment."""

    def get(self, digest: str) -> Made:
        """Return what is made of an image; raise what making it raises."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
        made = self._make(digest)
        self._keep(digest, made)
        return made

    def _keep(self, digest: str, made: Made) -> None:
        with self._lock:
            if digest in self._held or self._size(made) > self._most_bytes:
                return
            self._held[digest] = made
            self.num_bytes += self._size(made)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._size(self._held.popitem(last=False)[1])


FOLDER = "images"


class ImageStore:
    """Store the images of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    def path(self, digest: str) -> Path:
        """Return the file of an image; it may be missing."""
        return self._folder / digest[:2] / digest

    def add(self, content: bytes) -> str:
        """Store an image file, unless one of its size is stored already; return its digest, hexadecimal.

        Raises:
            RefusedError: the disk is full.
        """
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        if not path.is_file() or path.stat().st_size != len(content):
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
        return digest

    def read(self, digest: str) -> bytes:
        """Return an image file.

        Raises:
            ImageError: it is missing or damaged.
        """
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ImageError(
                f"{path} cannot be read ({error.strerror or error})",
                "Trainer and rollouts need the run's folder at this path",
            ) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise ImageError(
                f"{path} is damaged", "Delete it and start again with --resume: the trainer writes it again"
            )
        return content
