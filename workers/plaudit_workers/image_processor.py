"""The model's own processor: turns images into pixels, and counts the tokens that an image takes in a prompt.

The trainer counts with it and computes with its pixels; vLLM has the same processor. The trainer compares the prompt
of each sample, as vLLM computed it, with its own (``backend.expansion``). Imports transformers and torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor

from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ImagesSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.images import ImageCache, ImageStore, decode_image, image_size
from plaudit_workers.tokenizer import ChatTemplate, loading_message

_CACHE_BYTES = 1 << 29
"""Pixels that are held for the next row or update; the samples of a group have the same images."""


@dataclass(frozen=True)
class Pixels:
    """Hold one image as the vision tower reads it."""

    values: Tensor
    """float32[patches, values of a patch]."""
    grid: Tensor
    """int64[1, 3]: frames (1), patches of the height, patches of the width."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that they take."""
        return self.values.nbytes


class ImageProcessor:
    """Convert images for a job's model by transformers' own processor."""

    def __init__(self, processor: Any, settings: ImagesSpec, store: ImageStore) -> None:
        self._processor = processor
        self.settings = settings
        self.store = store
        self.token_id = int(processor.image_token_id)
        """The token that stands for an image in a prompt: once as rendered, once for each of its tokens when expanded.
        """
        self._num_tokens: dict[str, int] = {}
        self._pixels = ImageCache(self._computed, lambda pixels: pixels.num_bytes, _CACHE_BYTES)

    @classmethod
    def of_job(cls, job: RLJob, run_folder: Path) -> Self | None:
        """Load the processor of a resolved job that reads images; raise as ``of_model`` does."""
        settings = job.spec.data.images
        return None if settings is None else cls.of_model(job.spec.model, settings, ImageStore(run_folder))

    @classmethod
    def of_model(cls, model: ModelSpec, settings: ImagesSpec, store: ImageStore) -> Self:
        """Load the processor of ``model.source``.

        Raises:
            RefusedError: it cannot be loaded, or reads images in another way than by grids of patches.
        """
        further = {} if settings.max_pixels is None else {"max_pixels": settings.max_pixels}
        try:
            processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                model.source, revision=model.revision, trust_remote_code=model.trust_remote_code, **further
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
        """Store an image file and count its tokens; return its digest.

        Raises:
            ImageError: its header cannot be read.
            ValueError: the processor refuses its size.
            RefusedError: the disk is full.
        """
        num_tokens = self._tokens_of(image_size(content))
        digest = self.store.add(content)
        self._num_tokens[digest] = num_tokens
        return digest

    def num_tokens(self, digest: str) -> int:
        """Return the tokens that an image takes in a prompt.

        Raises:
            ImageError: it is missing or damaged.
        """
        if digest not in self._num_tokens:
            self._num_tokens[digest] = self._tokens_of(image_size(self.store.read(digest)))
        return self._num_tokens[digest]

    def expand(self, ids: NDArray[np.int32], digests: Sequence[str]) -> NDArray[np.int32]:
        """Return a prompt with each image's token repeated as often as the image takes tokens.

        Args:
            ids: int32[P] as rendered, with ``token_id`` once for each image.
        """
        counts = np.ones(ids.size, dtype=np.int64)
        counts[ids == self.token_id] = [self.num_tokens(digest) for digest in digests]
        return np.repeat(ids, counts)

    def pixels(self, digest: str) -> Pixels:
        """Return the pixels of an image, as the processor scales and normalises them.

        Raises:
            ImageError: it is missing or damaged.
        """
        return self._pixels.get(digest)

    def pixels_of(self, image: Any) -> Pixels:
        """Return the pixels of a decoded image."""
        found = self._processor.image_processor(images=[image], return_tensors="pt")
        return Pixels(found["pixel_values"].to(torch.float32), found["image_grid_thw"])

    def tokens_of_grid(self, grid: Tensor) -> int:
        """Return the tokens of an image with so many patches."""
        return int(grid.prod()) // int(self._processor.image_processor.merge_size) ** 2

    def save_pretrained(self, folder: Path) -> None:
        """Write the processor's files, the tokenizer's among them."""
        self._processor.save_pretrained(folder)

    def _computed(self, digest: str) -> Pixels:
        return self.pixels_of(decode_image(self.store.read(digest)))

    def _tokens_of(self, size: tuple[int, int]) -> int:
        counted = self._processor._get_num_multimodal_tokens(image_sizes=[size])
        return int(counted["num_image_tokens"][0])
