"""Compare the prompts with images that vLLM computed with those that the trainer computes. Called by ``torch_backend``.

A sample carries the tokens that vLLM computed, and the trainer trains them with pixels of its own. Other versions of
the processor, or other files of it, would make other tokens of an image: the policy would learn from another prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plaudit_wire.errors import RefusedError
from plaudit_workers.images.processor import ImageProcessor
from plaudit_workers.stream.group import Group


def refuse_other_expansions(groups: Iterable[Group], images: ImageProcessor) -> None:
    """Check that each sample's prompt is the one that the trainer makes of the same images.

    Raises:
        RefusedError: a sample's is not.
    """
    for group in groups:
        if not group.prompt.images:
            continue
        own = images.expand(np.frombuffer(group.prompt.prompt_ids, "<i4"), group.prompt.images)
        for sample in group.samples:
            if sample.body is not None:
                _refuse_other(np.frombuffer(sample.body.prompt_ids, "<i4"), own, group.id, images.token_id)


def _refuse_other(
    sampled: np.ndarray[tuple[int], np.dtype[np.int32]],
    own: np.ndarray[tuple[int], np.dtype[np.int32]],
    group: str,
    token_id: int,
) -> None:
    if np.array_equal(sampled, own):
        return
    numbers = [int((ids == token_id).sum()) for ids in (sampled, own)]
    raise RefusedError(
        f"group {group}: vLLM made {numbers[0]} tokens of the prompt's images, the trainer {numbers[1]}, or they lie "
        "elsewhere. Give trainer and rollouts the same versions of transformers and vLLM, and the same files "
        "of the model's processor"
    )
