"""Compute log-probabilities and entropies of chosen tokens in the model's output head, chunk by chunk.

Logits of a vocabulary of 150,000 take 600 kB a token in float32, and the loss needs two numbers of them. While a
``TokenHead`` is active the head itself returns these two in place of logits: it computes the logits of a few hundred
tokens, reduces them, and computes them again for the gradient (``torch.utils.checkpoint``). The call stays inside the
model's forward pass, where sharded weights are gathered.

Models that change the logits behind the head (Gemma's soft cap, Cohere's scale) are recognised by a probe, not by name;
for them the whole logits are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

EntropyUse = Literal["none", "figure", "loss"]
"""The use of entropies: none (they are 0), a figure (computed without gradient), or a term of the loss (with it)."""
CHUNK_BYTES = 1 << 29
"""Float32 logits that are held at a time: about 900 tokens of a vocabulary of 150,000."""
_AMPLIFIED = 1000.0


class TokenHead:
    """Compute the output head of a model in chunks where the model allows it.

    Args:
        model: if sharded, building is a collective call.
        chunked: False if the model changes the logits behind its head; None: found out by a forward pass.
        device: None: the CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        chunked: bool | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._chunk = max(1, chunk_bytes // (4 * int(model.config.get_text_config().vocab_size)))
        if chunked is None:
            chunked = self._head is not None and _returns_the_heads_output(model, self._head, device)
        self.chunked = chunked
        """False: the model changes the logits behind its head."""

    @contextmanager
    def reducing(self, targets: Tensor, temperature: float, *, entropy: EntropyUse = "none") -> Iterator[None]:
        """Return (log-probability, entropy) of each token from the model in place of logits within the context.

        Args:
            targets: int64[R].
            temperature: > 0.
        """
        head, own = self._head, self._head.forward

        def reduce(hidden: Tensor, chosen: Tensor) -> Tensor:
            return reduced(own(hidden), chosen, temperature, entropy=entropy)

        def forward(hidden: Tensor) -> Tensor:
            parts = zip(torch.split(hidden[0], self._chunk), torch.split(targets, self._chunk), strict=True)
            if targets.numel() <= self._chunk:
                return reduce(hidden[0], targets).unsqueeze(0)
            return torch.cat([checkpoint(reduce, *part, use_reentrant=False) for part in parts]).unsqueeze(0)

        head.forward = forward
        try:
            yield
        finally:
            head.forward = own


def reduced(logits: Tensor, targets: Tensor, temperature: float, *, entropy: EntropyUse = "none") -> Tensor:
    """Return float32[R, 2]: the log-probability of each target and the entropy of its distribution, in nats.

    With z the logits ÷ temperature: ``z[target] - logsumexp(z)`` and ``logsumexp(z) - Σ_v softmax(z)_v · z_v``.

    Args:
        logits: float[R, V], any precision; computed in float32.
        targets: int64[R].
        temperature: > 0.
        entropy: each use takes two more passes over the logits.
    """
    scaled = logits.float() / temperature
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if entropy == "none":
        return torch.stack([logprobs, torch.zeros_like(logprobs)], -1)
    with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
        entropies = normalizer - ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).sum(-1)
    return torch.stack([logprobs, entropies], -1)


@torch.no_grad()
def _returns_the_heads_output(model: PreTrainedModel, head: torch.nn.Module, device: torch.device | None) -> bool:
    """Return True if the model's logits are its head's output, also where that is large."""
    amplified: list[Tensor] = []

    def amplify(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
        amplified.append(output * _AMPLIFIED)
        return amplified[0]

    from plaudit_workers.training.model.batches.packing import pack_single
    from plaudit_workers.training.model.model import forward_logits

    row = pack_single(torch.tensor([1, 0, 1])).to(device or torch.device("cpu"))
    hook = head.register_forward_hook(amplify)
    try:
        logits = forward_logits(model, row.input_ids, row.position_ids, row.layout, row.sources)
    finally:
        hook.remove()
    return len(amplified) == 1 and torch.equal(logits, amplified[0][0])
