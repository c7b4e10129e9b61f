"""Check that a packed row with images is computed as its sequences alone. Called by ``policy_model`` at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit_reward.packed_attention import PackedLayout
from plaudit_wire.errors import RefusedError
from plaudit_workers.images.processor import Pixels
from plaudit_workers.training.model.images.rows import ImageRows, joined
from plaudit_workers.training.model.model import NO_LEAK, PACKING_TOLERANCE, ROUGH_PACKING_TOLERANCE, forward_logits

_SIZES = ((224, 224), (224, 224), (140, 84), (84, 84))
"""Height and width of the images: one for each of two longer sequences, which precede in turn, two for the last."""

_Sequence = tuple[Tensor, list[Pixels]]


def refuse_unpackable_images(
    model: PreTrainedModel, rows: ImageRows, device: torch.device, *, rough: bool = False
) -> None:
    """Check on small random images that a preceding sequence does not change a sequence's logits.

    Behind each of two other sequences they must be the same, and those of the sequence alone but for rounding.

    Args:
        model: if sharded, this is a collective call.
        rough: True if the model computes in bfloat16.

    Raises:
        RefusedError: it does, or the model cannot compute such a row.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
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
    return _apart(behind_one, behind_other), _apart(behind_one, alone)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


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
