"""Read, check, store and decode the images of prompts, and turn them into pixels.

A data row's column ``images`` has verl's forms. Its places in the prompt are ``<image>`` in a text, as in verl, or a
part of type ``image``. Trainer and vLLM get the same pixels, because both get decoded images from here. Pillow, numpy
and transformers are imported late.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from plaudit_wire.errors import RefusedError, described
from plaudit_workers.files import whole_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    from plaudit_job.spec.algorithm import ModelSpec
    from plaudit_job.spec.rljob import RLJob
    from plaudit_job.spec.rollout import ImagesSpec
    from plaudit_workers.tokenizer import ChatTemplate

PLACEHOLDER = "<image>"
MOST_BYTES = 32 << 20
"""Bytes of an image file."""
_SHOWN_CHARACTERS = 200
"""Of a path, which may be a whole image in base64."""
MOST_PIXELS = 1 << 25
"""Width times height of an image: a little above 7680 x 4320."""
MOST_SCALED_PIXELS = 1 << 24
"""The same as the model reads it; as numbers these take 400 MB."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's other decoders start programs (EPS) or are rarely used, and so rarely tested."""
_ORIENTATION = 0x0112
_FIRST_TURNED = 5
"""EXIF orientations from 5 on exchange width and height."""
_REMEDY = "Give {bytes: …}, {path: …} or a path; paths are relative to the data file"
_CACHE_BYTES = 1 << 29
"""Pixels that are held for the next row or update; the samples of a group have the same images."""
Made = TypeVar("Made")


class ImageError(ValueError):
    """Report an image that cannot be used; ``complaint`` continues a sentence about it."""

    def __init__(self, complaint: str, remedy: str) -> None:
        super().__init__(f"{complaint}. {remedy}")
        self.complaint = complaint
        self.remedy = remedy


def row_files(prompt: str | Sequence[dict[str, Any]], value: Any, folder: Path, most: int) -> list[bytes]:
    """Return a row's images as bytes: each can be decoded and has its place in the prompt. Raise ``ImageError``."""
    images = [] if value is None else value
    if not isinstance(images, list):
        raise ImageError(f"is {type(value).__name__}, no list", "Give a list of images; [] or null for none")
    num_images, places = len(images), _num_placeholders(prompt)
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
    files = []
    for number, image in enumerate(images, 1):
        try:
            files.append(_image_bytes(image, folder))
            decode_image(files[-1])
        except ImageError as error:
            raise ImageError(f"has image {number}, which {error.complaint}", error.remedy) from error
    return files


def _image_bytes(image: Any, folder: Path) -> bytes:
    """Return the bytes of one image as written: bytes, ``{bytes}``, ``{path}``, ``{image}``, or a path as text."""
    content = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(content, bytes | bytearray):
        return bytes(content)
    path = image.get("path") or image.get("image") if isinstance(image, dict) else image
    if not isinstance(path, str) or not path:
        kinds = f"has {', '.join(image) or 'nothing'}" if isinstance(image, dict) else f"is {type(image).__name__}"
        raise ImageError(kinds, _REMEDY)
    if "://" in path and not path.startswith("file://"):
        raise ImageError(f"is the address {path}", "Download it: a run reads images from files only")
    if path.startswith("data:"):
        raise ImageError(f"is the address {path[:_SHOWN_CHARACTERS]}", "Decode it: write its bytes, as {bytes: …}")
    file = folder / path.removeprefix("file://")
    name = str(file)[:_SHOWN_CHARACTERS]
    try:
        status = file.stat()
        is_file, is_small = stat.S_ISREG(status.st_mode), status.st_size <= MOST_BYTES
        content = file.read_bytes() if is_file and is_small else b""
    except (OSError, ValueError) as error:  # the second for a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"cannot be read: {name} ({reason})", "Correct the path") from error
    if not is_file:
        raise ImageError(f"cannot be read: {name} (no regular file)", "Correct the path")
    if not is_small:
        raise ImageError(f"has more than {MOST_BYTES:,} bytes: {name}", "Compress it or make it smaller")
    return content


def _num_placeholders(prompt: str | Sequence[dict[str, Any]]) -> int:
    """Return the number of places for images in a prompt, text or messages."""
    if isinstance(prompt, str):
        return prompt.count(PLACEHOLDER)
    return sum(part.get("type") == "image" for message in prompt for part in _parts(message["content"]))


def with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts wherever they have an image, as chat templates expect them."""
    return [{**message, "content": _content(message["content"])} for message in messages]


def _content(content: Any) -> Any:
    parts = _parts(content)
    return parts if any(part.get("type") == "image" for part in parts) else content


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        pieces = re.split(f"({re.escape(PLACEHOLDER)})", str(content))
        return [
            {"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece} for piece in pieces if piece
        ]
    return content


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def image_size(content: bytes) -> tuple[int, int]:
    """Return the height and width of a decoded image in pixels, from its header alone; raise ``ImageError``."""
    image = _opened(content)
    width, height = image.size
    try:
        turned = image.getexif().get(_ORIENTATION, 1) >= _FIRST_TURNED
    except Exception as error:
        raise _undecodable(error) from error
    return (width, height) if turned else (height, width)


def decode_image(content: bytes) -> Image:
    """Decode the first image of a file: in RGB, upright (EXIF), white where transparent. Raise ``ImageError``."""
    from PIL import Image, ImageOps

    image = _opened(content)
    try:
        upright: Any = ImageOps.exif_transpose(image)
        if not upright.has_transparency_data:
            return upright.convert("RGB")  # type: ignore[no-any-return]
        layers = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    except Exception as error:
        raise _undecodable(error) from error


def _undecodable(error: Exception) -> ImageError:
    """Return the error for what a decoder raises: many types, SyntaxError and struct.error among them."""
    return ImageError(f"cannot be decoded ({described(error)})", "Write the file again")


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


class ImageStore:
    """Store the images of one run once each, by the SHA-256 of their files: ``images/ab/abcd…`` in its folder.

    The trainer writes them before the first prompt is admitted; rollouts and every rank of the trainer read them.
    Prompts on the streams carry digests only.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "images"

    def path(self, digest: str) -> Path:
        """Return the file of an image; it may be missing."""
        return self._folder / digest[:2] / digest

    def add(self, content: bytes) -> str:
        """Store an image file, unless one of its size is stored already; return its digest, hexadecimal."""
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        if not path.is_file() or path.stat().st_size != len(content):
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
        return digest

    def read(self, digest: str) -> bytes:
        """Return an image file; raise ``ImageError`` if it is missing or damaged."""
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            remedy = "Trainer and rollouts need the run's folder at this path"
            raise ImageError(f"{path} cannot be read ({error.strerror or error})", remedy) from error
        if hashlib.sha256(content).hexdigest() != digest:
            remedy = "Delete it and start again with --resume: the trainer writes it again"
            raise ImageError(f"{path} is damaged", remedy)
        return content


class UnstoredImages(ImageStore):
    """Keep no image: who counts the tokens of a job's images before its run needs their sizes only."""

    def __init__(self) -> None:
        super().__init__(Path())

    def add(self, content: bytes) -> str:
        """Return the digest of an image file."""
        return hashlib.sha256(content).hexdigest()


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
        self._num_bytes = 0

    def get(self, digest: str) -> Made:
        """Return what is made of an image; raise what making it raises."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
        made = self._make(digest)
        with self._lock:
            if digest not in self._held and self._size(made) <= self._most_bytes:
                self._held[digest] = made
                self._num_bytes += self._size(made)
                while self._num_bytes > self._most_bytes:
                    self._num_bytes -= self._size(self._held.popitem(last=False)[1])
        return made


@dataclass(frozen=True)
class Pixels:
    """Hold one image as the vision tower reads it."""

    values: Tensor
    """float32[patches, values of a patch]."""
    grid: Tensor
    """int64[1, 3]: frames (1), patches of the height, patches of the width."""


class ImageProcessor:
    """Turn images into pixels and count their tokens, by the model's own processor of transformers.

    The trainer counts with it and computes with its pixels; vLLM has the same processor. The trainer compares the
    prompt of each sample, as vLLM computed it, with its own.
    """

    def __init__(self, processor: Any, settings: ImagesSpec, store: ImageStore) -> None:
        self._processor = processor
        self.settings = settings
        self.store = store
        self.token_id = int(processor.image_token_id)
        """The token that stands for an image in a prompt: once as rendered, once for each of its tokens when expanded.
        """
        self._num_tokens: dict[str, int] = {}
        self._pixels = ImageCache(self._computed, lambda pixels: pixels.values.nbytes, _CACHE_BYTES)

    @classmethod
    def of_job(cls, job: RLJob, run_folder: Path) -> Self | None:
        """Load the processor of a resolved job that reads images; raise as ``of_model`` does."""
        settings = job.spec.data.images
        return None if settings is None else cls.of_model(job.spec.model, settings, ImageStore(run_folder))

    @classmethod
    def of_model(cls, model: ModelSpec, settings: ImagesSpec, store: ImageStore, *, only_here: bool = False) -> Self:
        """Load the processor of ``model.source``; refuse one that does not read images by grids of patches.

        Args:
            only_here: download nothing.
        """
        from transformers import AutoProcessor

        from plaudit_workers.tokenizer import loading_message

        further = {} if settings.max_pixels is None else {"max_pixels": settings.max_pixels}
        try:
            processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                model.source,
                revision=model.revision,
                trust_remote_code=model.trust_remote_code,
                local_files_only=only_here,
                **further,
            )
        # As tokenizers do, processors fail to load with every kind of exception.
        except Exception as error:
            raise RefusedError(loading_message("processor of images", "model.source", model.source, error)) from error
        if "image_grid_thw" not in getattr(processor, "model_input_names", ()):
            raise RefusedError(
                f"model.source is {model.source!r}: its processor ({type(processor).__name__}) gives no grids of image "
                "patches, so data.images cannot be used. Use a model such as Qwen2.5-VL, or remove data.images"
            )
        return cls(processor, settings, store)

    def give_template(self, template: ChatTemplate, model: ModelSpec) -> None:
        """Let prompts be rendered by the processor's chat template where the job names none, as vLLM and verl do."""
        own = getattr(self._processor, "chat_template", None)
        if own and not model.chat_template:
            template.tokenizer.chat_template = own

    def add(self, content: bytes) -> str:
        """Store an image file and count its tokens; return its digest. Raise ``ValueError`` if it is refused."""
        num_tokens = self._tokens_of(image_size(content))
        digest = self.store.add(content)
        self._num_tokens[digest] = num_tokens
        return digest

    def num_tokens(self, digest: str) -> int:
        """Return the tokens that an image takes in a prompt; raise as ``ImageStore.read`` does."""
        if digest not in self._num_tokens:
            self._num_tokens[digest] = self._tokens_of(image_size(self.store.read(digest)))
        return self._num_tokens[digest]

    def expand(self, ids: NDArray[np.int32], digests: Sequence[str]) -> NDArray[np.int32]:
        """Return a rendered prompt, int32[P], with each image's token as often as the image takes tokens."""
        import numpy as np

        counts = np.ones(ids.size, dtype=np.int64)
        counts[ids == self.token_id] = [self.num_tokens(digest) for digest in digests]
        return np.repeat(ids, counts)

    def pixels(self, digest: str) -> Pixels:
        """Return an image's pixels, as the processor scales and normalises them; raise as ``decode_image`` does."""
        return self._pixels.get(digest)

    def pixels_of(self, image: Any) -> Pixels:
        """Return the pixels of a decoded image."""
        found = self._processor.image_processor(images=[image], return_tensors="pt")
        return Pixels(found["pixel_values"].float(), found["image_grid_thw"])

    def tokens_of_grid(self, grid: Tensor) -> int:
        """Return the tokens of an image with so many patches."""
        return int(grid.prod()) // int(self._processor.image_processor.merge_size) ** 2

    def save_pretrained(self, folder: Path) -> None:
        """Write the processor's files, the tokenizer's among them."""
        self._processor.save_pretrained(folder)

    def _computed(self, digest: str) -> Pixels:
        return self.pixels_of(decode_image(self.store.read(digest)))

    def _tokens_of(self, size: tuple[int, int]) -> int:
        """Return the tokens of an image of this height and width; refuse it if the processor leaves it too large."""
        counted = self._processor._get_num_multimodal_tokens(image_sizes=[size])
        num_tokens = int(counted["num_image_tokens"][0])
        of_images = self._processor.image_processor
        pixels = num_tokens * (int(of_images.merge_size) * int(of_images.patch_size)) ** 2
        if pixels > MOST_SCALED_PIXELS:
            raise ImageError(
                f"has an image of {size[1]} x {size[0]} pixels, which the model's processor scales to {pixels:,}, more "
                f"than {MOST_SCALED_PIXELS:,}",
                "Set data.images.maxPixels, or make it smaller",
            )
        return num_tokens
