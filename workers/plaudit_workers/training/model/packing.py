"""Make micro-batches within a token budget, without padding, balanced over bins and ranks.

``assign_bins`` is pure arithmetic over lengths; ``pack`` lays the sequences of one bin one behind another in a single
row. Which sequence lies where changes nothing but rounding: positions begin anew with each sequence, attention stays
within it (``packed_attention``), and every token carries the aggregation weight that it has in the whole update.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from plaudit_reward.attention import PackedLayout
from plaudit_workers.training.model.batch import TrainingSequence


@dataclass(frozen=True)
class RowImages:
    """Hold the images of a row, in the order of their tokens."""

    pixel_values: Tensor
    """float32[patches of all images, values of a patch]."""
    grids: Tensor
    """int64[images, 3]: frames, patches of the height, patches of the width."""

    def to(self, device: torch.device) -> RowImages:
        """Return the images on a device."""
        return RowImages(self.pixel_values.to(device, non_blocking=True), self.grids.to(device, non_blocking=True))

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the arguments by which a model reads them."""
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.grids}


LayImages = Callable[[Sequence[TrainingSequence]], tuple[Tensor, Tensor, RowImages | None]]
"""Returns of a row's sequences the ids that the model reads, int64[1, T], their positions in three dimensions,
int64[3, 1, T], and their images."""


@dataclass(frozen=True)
class MicroBatch:
    """Hold one forward pass: T packed tokens, R of them trained."""

    input_ids: Tensor
    """int64[1, T]. Of a model with images see ``checks.SAMPLED_IMAGE``."""
    position_ids: Tensor
    """int64[1, T]: 0, 1, … anew for each sequence. Of a model with images int64[3, 1, T]."""
    layout: PackedLayout
    sources: Tensor
    """int64[R]: positions whose logits predict a trained token."""
    targets: Tensor
    """int64[R]: those next tokens."""
    behaviour: Tensor
    """float32[R]: log-probabilities under the policy that sampled."""
    advantages: Tensor
    """float32[R]."""
    lengths: Tensor
    """int64[S]: trained tokens of each sequence."""
    weights: Tensor
    """float32[R]: aggregation weights; 0 in a bin that only keeps a rank busy."""
    members: tuple[int, ...]
    """Indices of its sequences in the batch, in order; empty in a bin that only keeps a rank busy."""
    images: RowImages | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        images = None if self.images is None else self.images.to(device)
        return replace(self, layout=self.layout.to(device), images=images, **moved)


def assign_bins(lengths: Sequence[int], budget: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Distribute sequences over ranks and bins: every rank gets the same number of bins, all about equally full.

    Longest first, each into the emptiest bin; more bins until none is above the budget. A sequence longer than the
    budget lies alone in its bin.

    Args:
        budget: tokens of a bin at most.
        num_ranks: ranks that work at the same time; collective calls want equally many bins on each.

    Returns:
        For each rank its bins, for each bin the numbers of its sequences, longest first. With fewer sequences than
        ranks some bins are empty.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    num_bins = round_up(max(1, -(-sum(lengths) // budget)), num_ranks)
    while True:
        bins = _fill(order, lengths, num_bins)
        if all(len(members) <= 1 or sum(lengths[number] for number in members) <= budget for members in bins):
            return [bins[rank::num_ranks] for rank in range(num_ranks)]
        num_bins += num_ranks


def _fill(order: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, number) for number in range(num_bins)]
    for sequence in order:
        filled, number = heapq.heappop(emptiest)
        bins[number].append(sequence)
        heapq.heappush(emptiest, (filled + lengths[sequence], number))
    return bins


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple


def pack(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[float],
    members: Sequence[int],
    lay: LayImages | None = None,
    busy: int | None = None,
) -> MicroBatch:
    """Concatenate sequences.

    Args:
        sequences: of the whole update, each with at least one prompt token.
        members: which to pack, longest first. Empty: the update's shortest one with weight 0, so that a rank without
            work takes part in the collective calls of the others.
        busy: a sequence with images that is computed beside the others and of which no token is trained, because
            another rank's row has images and the vision tower takes part in the same collective calls.
    """
    if not members:
        return replace(pack(sequences, [0.0] * len(sequences), [shortest(sequences)], lay, busy), members=())
    chosen = [sequences[number] for number in members]
    row = chosen if busy is None else _with_busy(chosen, sequences[busy])
    lengths = [sequence.num_tokens for sequence in row]
    firsts = np.cumsum([0, *lengths[:-1]])
    ids = np.concatenate([part for sequence in row for part in (sequence.prompt_ids, sequence.response_ids)])
    plain = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    places = torch.from_numpy(np.arange(ids.size) - np.repeat(firsts, lengths)).unsqueeze(0)
    trained = np.concatenate([_in_loss(sequence) for sequence in row])
    targets = np.flatnonzero(trained)
    counts = [sequence.num_trained_tokens for sequence in chosen]
    read, positions, images = (plain, places, None) if lay is None else lay(row)
    return MicroBatch(
        input_ids=read,
        position_ids=positions,
        images=images,
        layout=PackedLayout.of(lengths),
        sources=torch.from_numpy(targets - 1),
        targets=torch.from_numpy(ids[targets].astype(np.int64)),
        behaviour=torch.from_numpy(np.concatenate([s.behaviour_logprobs[s.loss_mask] for s in chosen])),
        advantages=torch.from_numpy(np.concatenate([sequence.trained_advantages for sequence in chosen])),
        lengths=torch.tensor(counts),
        weights=torch.from_numpy(np.repeat(np.array([weights[number] for number in members], np.float32), counts)),
        members=tuple(members),
    )


def shortest(sequences: Sequence[TrainingSequence]) -> int:
    """Return the number of the shortest sequence."""
    return min(range(len(sequences)), key=lambda number: sequences[number].num_tokens)


def _with_busy(chosen: Sequence[TrainingSequence], busy: TrainingSequence) -> list[TrainingSequence]:
    """Return the sequences of a row, longest first, with one of which no token is trained."""
    untrained = replace(busy, loss_mask=np.zeros_like(busy.loss_mask))
    return sorted([*chosen, untrained], key=lambda sequence: -sequence.num_tokens)


def pack_single(ids: Tensor) -> MicroBatch:
    """Return a row of one sequence, int64[T], whose every next token is a target: for log-probabilities only."""
    length = ids.numel()
    zeros = torch.zeros(length - 1)
    return MicroBatch(
        input_ids=ids.unsqueeze(0),
        position_ids=torch.arange(length).unsqueeze(0),
        layout=PackedLayout.of([length]),
        sources=torch.arange(length - 1),
        targets=ids[1:],
        behaviour=zeros,
        advantages=zeros,
        lengths=torch.tensor([length - 1]),
        weights=zeros,
        members=(0,),
    )


def _in_loss(sequence: TrainingSequence) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return bool[P + T]: the tokens of the sequence that are trained."""
    marks = np.zeros(sequence.num_tokens, dtype=np.bool_)
    marks[sequence.prompt_ids.size :] = sequence.loss_mask
    return marks
