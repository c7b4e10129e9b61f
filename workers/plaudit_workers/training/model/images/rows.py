"""Lay the images of a packed row: pixels of all its sequences, and positions in three dimensions.

Within an image, tokens have the positions of their patches (M-RoPE, Qwen2-VL, arXiv 2409.12191), which the model itself
computes for each sequence. Attention over the row needs no positions, so rows with images are packed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit_wire.errors import RefusedError
from plaudit_workers.images.processor import ImageProcessor, Pixels
from plaudit_workers.training.model.batches.batch import TrainingSequence
from plaudit_workers.training.model.batches.packing import RowImages, shortest

SAMPLED_IMAGE = -1
"""Stands for the token of an image that the policy sampled: no image belongs there, so it is embedded as text."""


class ImageRows:
    """Lay out positions and pixels of packed rows, for a causal language model with a vision tower.

    Raises:
        RefusedError: the model does not compute positions of images.
    """

    def __init__(self, images: ImageProcessor, model: PreTrainedModel) -> None:
        self.images = images
        self._index = _position_index(model)
        read_sampled_images(model, images.token_id)

    def lay(self, sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor, RowImages | None]:
        """Return the ids that the model reads, int64[1, T], their positions, int64[3, 1, T], and the row's images.

        Args:
            sequences: in the row's order; prompts are expanded.
        """
        pixels = [[self.images.pixels(digest) for digest in sequence.images] for sequence in sequences]
        ids = [self._read(sequence) for sequence in sequences]
        positions = [self.positions(own, found) for own, found in zip(ids, pixels, strict=True)]
        images = joined([each for found in pixels for each in found])
        return torch.cat(ids).unsqueeze(0), torch.cat(positions, dim=-1), images

    def _read(self, sequence: TrainingSequence) -> Tensor:
        """Return int64[L]: the sequence as the model reads it."""
        sampled = sequence.response_ids.astype(np.int64)
        sampled[sampled == self.images.token_id] = SAMPLED_IMAGE
        return torch.from_numpy(np.concatenate([sequence.prompt_ids.astype(np.int64), sampled]))

    def positions(self, ids: Tensor, pixels: Sequence[Pixels]) -> Tensor:
        """Return the positions of one sequence, int64[3, 1, L]; those of text count on in all three dimensions.

        Args:
            ids: int64[L].
        """
        if not pixels:
            return torch.arange(ids.numel()).expand(3, 1, -1)
        grids = torch.cat([each.grid for each in pixels])
        kinds = (ids == self.images.token_id).int()
        positions: Tensor = self._index(ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)[0]
        return positions


def read_sampled_images(model: PreTrainedModel, token_id: int) -> None:
    """Let a model's embedding read ``SAMPLED_IMAGE``. The model itself puts images wherever it finds ``token_id``."""

    def read(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, *further = arguments
        return ids.masked_fill(ids == SAMPLED_IMAGE, token_id), *further

    model.get_input_embeddings().register_forward_pre_hook(read)


def joined(pixels: Sequence[Pixels]) -> RowImages | None:
    """Return the images of a row; None for none."""
    if not pixels:
        return None
    return RowImages(torch.cat([each.values for each in pixels]), torch.cat([each.grid for each in pixels]))


def busy_sequence(
    sequences: Sequence[TrainingSequence], members: Sequence[int], beside: Iterable[Sequence[int]]
) -> int | None:
    """Return a sequence whose images keep the vision tower busy in a row that has none of its own.

    All ranks gather the parameters of the vision tower together, or none does.

    Args:
        members: of the row; empty: see ``pack``.
        beside: members of the rows that the other ranks compute at the same time.

    Returns:
        The shortest one with images; None if this row has images, or no rank's has.
    """

    def has_images(row: Sequence[int]) -> bool:
        return any(sequences[number].images for number in row or [shortest(sequences)])

    if has_images(members) or not any(has_images(row) for row in beside):
        return None
    with_images = [number for number, sequence in enumerate(sequences) if sequence.images]
    return min(with_images, key=lambda number: sequences[number].num_tokens)


def _position_index(model: PreTrainedModel) -> Callable[..., Any]:
    index = getattr(getattr(model, "model", None), "get_rope_index", None)
    if index is None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise RefusedError(
            f"a model of type {kind!r} has no positions of images in three dimensions, so data.images cannot be used. "
            "Use a model such as Qwen2.5-VL, or remove data.images"
        )
    return index  # type: ignore[no-any-return]
