"""Decode images: the trainer and vLLM get the same pixels, because both get them from here. Pillow is imported late."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

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
