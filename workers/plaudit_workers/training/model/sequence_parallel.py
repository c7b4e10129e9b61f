"""Parallelise over the sequence: consecutive ranks compute a packed row together, each a run of its tokens.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). All operations but attention work token by token, so each of n
ranks keeps the activations of T ÷ n tokens. Attention needs all tokens of a sequence, but treats heads alike: before it
an all-to-all gives each rank all tokens of H ÷ n heads, behind it another one the outputs of all heads for its tokens.

Log-probabilities are then collected on all n ranks, which compute the same loss of whole sequences. Each passes back
the gradient of its own tokens only, so parameter gradients are summed over ranks as without sequence parallelism.

Shape letters: T tokens of the row, padded to a multiple of n; H heads, D head width; R trained tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn.functional import pad
from transformers import PretrainedConfig

from plaudit_job.model_shape import divides_heads
from plaudit_reward.attention import UnsupportedAttentionError
from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.packing import MicroBatch, round_up


class SequenceParallel:
    """Hold this rank's place among the ranks that compute the same rows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._index = dist.get_rank(group)

    def part(self, row: MicroBatch) -> MicroBatch:
        """Return the row with this rank's tokens only, and with those targets that they predict, possibly none.

        All other fields remain those of the whole row.
        """
        start, end = self._own_places(row)
        targets = slice(*self._own_targets(row))

        def own(tokens: Tensor) -> Tensor:
            found = tokens[:, start:end]
            return pad(found, (0, end - start - found.shape[1]))

        return replace(
            row,
            input_ids=own(row.input_ids),
            position_ids=own(row.position_ids),
            sources=row.sources[targets] - start,
            targets=row.targets[targets],
        )

    def exchange(self, row: MicroBatch) -> HeadExchange:
        """Return the exchange of the row's tokens for heads."""
        return HeadExchange(self._group, row.input_ids.shape[1])

    def collected(self, values: Tensor, row: MicroBatch) -> Tensor:
        """Return the values of all of a row's targets, float[R, …], from this rank's, whose gradient flows back."""
        first, _ = self._own_targets(row)
        found: Tensor = _Collected.apply(values, first, row.targets.numel(), self._group)  # type: ignore[no-untyped-call]
        return found

    def _own_targets(self, row: MicroBatch) -> tuple[int, int]:
        """Return the first of the row's targets that this rank predicts, and the one behind the last."""
        bounds = torch.tensor(self._own_places(row), device=row.sources.device)
        first, end = torch.searchsorted(row.sources, bounds).tolist()
        return first, end

    def _own_places(self, row: MicroBatch) -> tuple[int, int]:
        """Return the first of this rank's tokens in the padded row, and the one behind the last."""
        length = round_up(row.input_ids.shape[1], self._size) // self._size
        return self._index * length, (self._index + 1) * length


class HeadExchange:
    """Exchange tokens for heads around the attention of a row of ``num_tokens`` unpadded; see ``packed_attention``."""

    def __init__(self, group: dist.ProcessGroup, num_tokens: int) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._num_tokens = num_tokens

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Return all tokens of this rank's heads.

        Args:
            *parts: query, key and value: float[1, H, T ÷ n, D] each. With fewer heads than ranks, neighbours share one.

        Returns:
            float[1, H ÷ n, tokens of the row, D] each.

        Raises:
            UnsupportedAttentionError: the ranks cannot divide the heads.
        """
        by_rank = [self._shares(part) for part in parts]
        joined = torch.cat([part.flatten(1) for part in by_rank], 1)
        received = torch.split(self._exchanged(joined), [part[0].numel() for part in by_rank], 1)
        return [
            part.view(shares.shape).transpose(0, 1).flatten(1, 2)[None, :, : self._num_tokens]
            for part, shares in zip(received, by_rank, strict=True)
        ]

    def to_tokens(self, output: Tensor) -> Tensor:
        """Return all heads of this rank's tokens: float[tokens of the row, H ÷ n, D] → float[T ÷ n, H, D]."""
        padding = round_up(self._num_tokens, self._size) - self._num_tokens
        by_rank = pad(output, (0, 0, 0, 0, 0, padding)).reshape(self._size, -1, *output.shape[1:])
        return self._exchanged(by_rank).transpose(0, 1).flatten(1, 2)

    def _shares(self, part: Tensor) -> Tensor:
        """Return the heads by rank: float[1, H, T ÷ n, D] → float[n, H ÷ n, T ÷ n, D]."""
        heads = part.shape[1]
        if heads % self._size and self._size % heads:
            raise UnsupportedAttentionError(f"{self._size} ranks cannot divide {heads} heads")
        if heads < self._size:
            part = part.repeat_interleave(self._size // heads, 1)
        return part.reshape(self._size, -1, *part.shape[2:])

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        """Send each rank its row, and return the rows received; the gradient takes the way back."""
        received: Tensor = all_to_all_single(by_rank.contiguous(), None, None, self._group)
        return received


class _Collected(torch.autograd.Function):
    """Join values of all ranks; every rank has the gradient of all, and passes back that of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, first: int, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(first, first + own.shape[0])
        values = own.new_zeros(total, *own.shape[1:])
        values[ctx.own] = own
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.own], None, None, None


def refuse_heads(config: PretrainedConfig, size: int) -> None:
    """Check that the ranks can share the heads of a model's attention (``trainer.sequenceParallelSize``)."""
    if size == 1:
        return
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    if not divides_heads(size, heads, groups):
        smaller = (fewer for fewer in range(size - 1, 0, -1) if size % fewer == 0)
        fitting = next(fewer for fewer in smaller if divides_heads(fewer, heads, groups))
        raise RefusedError(
            f"spec.trainer.sequenceParallelSize: {size} does not divide the model's {heads} attention heads, or its "
            f"{groups} key/value heads neither divide it nor are divided by it. Set it to {fitting}"
        )
