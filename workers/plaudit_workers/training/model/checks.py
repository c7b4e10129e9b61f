"""Lay the images of a packed row, and check that such a row is computed as its sequences alone.

A row has the pixels of all its sequences, and positions in three dimensions: within an image, tokens have the positions
of their patches (M-RoPE, Qwen2-VL, arXiv 2409.12191), which the model itself computes for each sequence. Attention over
the row needs no positions, so rows with images are packed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit_reward.attention import PackedLayout
from plaudit_wire.errors import RefusedError
from plaudit_workers.images import ImageProcessor, Pixels
from plaudit_workers.training.model.batch import TrainingSequence
from plaudit_workers.training.model.head import (
    NO_LEAK,
    PACKING_TOLERANCE,
    ROUGH_PACKING_TOLERANCE,
    forward_logits,
    kind_of,
    relative_difference,
)
from plaudit_workers.training.model.packing import RowImages, shortest

SAMPLED_IMAGE = -1
"""Stands for the token of an image that the policy sampled: no image belongs there, so it is embedded as text."""
_SIZES = ((224, 224), (224, 224), (140, 84), (84, 84))
"""Height and width of the images: one for each of two longer sequences, which precede in turn, two for the last."""
_Sequence = tuple[Tensor, list[Pixels]]


class ImageRows:
    """Lay out positions and pixels of packed rows, for a causal language model with a vision tower."""

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
        """Return the positions of one sequence, int64[3, 1, L]; those of text count on in all three dimensions."""
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
        raise RefusedError(
            f"a model of type {kind_of(model)!r} has no positions of images in three dimensions, so data.images cannot "
            "be used. Use a model such as Qwen2.5-VL, or remove data.images"
        )
    return index  # type: ignore[no-any-return]


def refuse_unpackable_images(
    model: PreTrainedModel, rows: ImageRows, device: torch.device, *, rough: bool = False
) -> None:
    """Check on small random images that a preceding sequence does not change a sequence's logits.

    Behind each of two other sequences they must be the same, and those of the sequence alone but for rounding.

    Args:
        model: if sharded, this is a collective call.
        rough: True if the model computes in bfloat16.
    """
    kind = kind_of(model)
    try:
        leak, apart = _differences(model, rows, device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(kind, f"a packed row with images fails ({error})") from error
    if not (leak <= NO_LEAK and apart <= (ROUGH_PACKING_TOLERANCE if rough else PACKING_TOLERANCE)):
        raise _refusal(kind, f"logits change by {max(leak, apart):.2g} when another sequence precedes")


@torch.no_grad()
def _differences(model: PreTrainedModel, rows: ImageRows, device: torch.device) -> tuple[float, float]:
    """Return how far the last sequence's logits are apart behind two others, and behind one and alone; relative."""
    random = np.random.default_rng(0)
    pixels = [rows.images.pixels_of(_noise(random, size)) for size in _SIZES]
    vocabulary = int(model.config.get_text_config().vocab_size)
    one, other, last = (_sequence(rows, own, vocabulary) for own in (pixels[:1], pixels[1:2], pixels[2:]))
    alone = _logits(model, rows, [last], device)
    behind_one, behind_other = (_logits(model, rows, [before, last], device)[-len(alone) :] for before in (one, other))
    return relative_difference(behind_one, behind_other), relative_difference(behind_one, alone)


def _noise(random: np.random.Generator, size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))


def _sequence(rows: ImageRows, pixels: list[Pixels], vocabulary: int) -> _Sequence:
    """Return a sequence with images between a few tokens of text."""
    text = [number for number in range(8) if number != rows.images.token_id and number < vocabulary]
    images = [[*text[:2], *[rows.images.token_id] * rows.images.tokens_of_grid(each.grid)] for each in pixels]
    return torch.tensor([token for image in images for token in image] + text), pixels


def _logits(model: PreTrainedModel, rows: ImageRows, row: Sequence[_Sequence], device: torch.device) -> Tensor:
    ids = torch.cat([own for own, _ in row])
    positions = torch.cat([rows.positions(*each) for each in row], dim=-1)
    images = joined([each for _, pixels in row for each in pixels])
    assert images is not None
    layout = PackedLayout.of([own.numel() for own, _ in row]).to(device)
    sources = torch.arange(ids.numel(), device=device)
    arguments = images.to(device).arguments
    return forward_logits(model, ids[None].to(device), positions.to(device), layout, sources, arguments).float()


def _refusal(kind: str, problem: str) -> RefusedError:
    return RefusedError(
        f"a model of type {kind!r} cannot be trained with images: {problem}. Use a model such as Qwen2.5-VL, or remove "
        "data.images"
    )
