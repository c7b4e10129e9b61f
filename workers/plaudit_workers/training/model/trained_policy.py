"""One rank's part of the policy: forward and backward passes over micro-batches, one optimizer step an update.

Built by ``policy.build_policy``; its methods are those of ``policy.Policy``, and with several ranks each is a
collective call (``commands`` sees to that). The gradient of an update is a sum over tokens with weights fixed
beforehand, so it depends neither on the packing nor on the number of ranks, but for rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.job.spec.rljob import Spec
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.loss import TokenInputs, policy_loss, token_weights
from plaudit_workers.training.model.mismatch import mismatch_figure, mismatch_sums
from plaudit_workers.training.model.model import DTYPES, FORWARD_DTYPES, companion_files, forward_logits
from plaudit_workers.training.model.optimizer import PolicyOptimizer
from plaudit_workers.training.model.packing import MicroBatch, assign_bins, pack, pack_single
from plaudit_workers.training.model.sharding import Ranks, fill, gather, leave_ranks, place
from plaudit_workers.training.model.temperature import token_entropies, token_logprobs

PROBE_TOKENS = 16
"""Length of the probe: short enough for any model, long enough that a wrong layer shows."""
_PROBE_STRIDE = 7919
"""A prime: the probe's tokens are spread over the vocabulary."""


@dataclass(frozen=True)
class Probe:
    """What a rollout computes again after loading; L tokens."""

    ids: list[int]
    """[L]."""
    logprobs: list[float]
    """[L - 1]: of ``ids[1:]``, each given all before it, at temperature 1."""


class TrainedPolicy:
    """The model, its optimizer and, where the loss asks for them, proximal and reference weights.

    Args:
        spec: the job.
        ranks: this process's place.
        model: float32 on the CPU, the same on every rank.
        tokenizer: published with the weights; bounds the probe's token ids.
        reference: the frozen starting model for the KL term; None when ``klCoefficient`` is 0.
    """

    def __init__(
        self,
        spec: Spec,
        ranks: Ranks,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reference: PreTrainedModel | None,
    ) -> None:
        self._spec = spec
        self._loss = spec.algorithm.loss
        self._ranks = ranks
        self._dtype = FORWARD_DTYPES[spec.model.dtype]
        self._model = place(model, ranks, self._dtype)
        self._reference = None if reference is None else place(reference, ranks, self._dtype)
        self._tokenizer = tokenizer
        self._parameters = dict(self._model.named_parameters())
        self._tensors = self._parameters | _saved_buffers(self._model)
        self._optimizer = PolicyOptimizer(self._parameters.items(), spec.algorithm)
        self._proximal: dict[str, Tensor] | None = None
        """The published weights, once one of several updates of a step has moved away from them."""
        self._published: PolicyVersion | None = None
        """Which version those, or the present weights, are; None once they are at hand no longer."""
        self._files: dict[str, bytes] = {}

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """See ``Policy.update``."""
        if not batch.sequences:
            return dict(batch.statistics)
        weights = token_weights(self._loss.aggregation, [s.num_trained_tokens for s in batch.sequences])
        micro_batches = self._micro_batches(batch, weights)
        proximal = self._proximal_logprobs(micro_batches, batch.temperature)
        published = self._keep_published()
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self._ranks.device))
        for number, micro_batch in enumerate(micro_batches):
            tokens = self._token_inputs(micro_batch, batch.temperature, proximal[number] if proximal else None)
            terms = policy_loss(tokens, self._loss)
            # Sharded gradients are averaged over the ranks, but each rank holds its part of a sum.
            torch.autograd.backward(terms.total * self._ranks.world_size)
            members = [batch.sequences[member] for member in micro_batch.members]
            compared = mismatch_sums(members, published, tokens.proximal, tokens.behaviour)
            for name, value in (terms.sums | compared).items():
                sums[name] = sums[name] + value
        return batch.statistics | mismatch_figure(self._summed(sums)) | self._optimizer.step()

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """See ``Policy.logprobs``."""
        lengths = [sequence.response_ids.size for sequence in batch.sequences]
        found = [np.zeros(length, dtype=np.float32) for length in lengths]
        for micro_batch in self._micro_batches(batch, [1.0] * len(lengths)):
            values = self._forward(self._model, micro_batch, batch.temperature)[0].cpu().numpy()
            for member in micro_batch.members:
                sequence = batch.sequences[member]
                own, values = np.split(values, [sequence.num_trained_tokens])
                found[member][sequence.loss_mask] = own
        if not found:
            return []
        everywhere = self._ranks.sum(torch.from_numpy(np.concatenate(found))).numpy()
        return np.split(everywhere, np.cumsum(lengths)[:-1])

    def hold_proximal(self, version: PolicyVersion) -> None:
        """See ``Policy.hold_proximal``: from here on the present weights are the published ones."""
        self._proximal, self._published = None, version

    def full_state(self) -> dict[str, Tensor]:
        """See ``Policy.full_state``."""
        state = gather(self._tensors, keep=self._ranks.rank == 0)
        dtype = DTYPES[self._spec.model.dtype]
        return {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in state.items()
        }

    @torch.no_grad()
    def probe(self) -> Probe:
        """See ``Policy.probe``."""
        vocabulary = min(len(self._tokenizer), int(self._model.config.vocab_size))
        ids = (torch.arange(PROBE_TOKENS) * _PROBE_STRIDE + 1) % vocabulary
        row = pack_single(ids).to(self._ranks.device)
        logprobs = self._forward(self._model, row, temperature=1.0)[0]
        return Probe(ids.tolist(), logprobs.tolist())

    def files(self) -> dict[str, bytes]:
        """See ``Policy.files``."""
        if not self._files:
            self._files = companion_files(self._model, self._tokenizer, DTYPES[self._spec.model.dtype])
        return self._files

    def state_dict(self) -> dict[str, Any]:
        """See ``Policy.state_dict``."""
        keep = self._ranks.rank == 0
        return {
            "model": gather(self._tensors, keep),
            "optimizer": self._optimizer.state_dict(keep),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Policy.load_state_dict``. Ranks other than 0 need neither ``model`` nor the optimizer's ``moments``."""
        weights: dict[str, Tensor] = state.get("model", {})
        for name, tensor in self._tensors.items():
            fill(tensor, weights.get(name))
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self._proximal = self._published = None

    def close(self) -> None:
        """See ``Policy.close``."""
        leave_ranks(self._ranks)

    def _micro_batches(self, batch: TrainingBatch, weights: list[float]) -> list[MicroBatch]:
        """This rank's share of the batch."""
        budget = self._spec.trainer.micro_batch_tokens
        lengths = [sequence.num_tokens for sequence in batch.sequences]
        bins = assign_bins(lengths, budget, self._ranks.world_size)[self._ranks.rank]
        return [pack(batch.sequences, weights, members).to(self._ranks.device) for members in bins]

    def _forward(self, model: PreTrainedModel, row: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the row's targets, with gradient where enabled, and the logits they come from."""
        # Sharded models cast by their own mixed precision.
        autocast = self._ranks.world_size == 1 and self._dtype != torch.float32
        with torch.autocast(self._ranks.device.type, self._dtype, enabled=autocast):
            logits = forward_logits(model, row.input_ids, row.position_ids, row.blocks, row.sources)
        return token_logprobs(logits, row.targets, temperature), logits

    def _token_inputs(self, row: MicroBatch, temperature: float, proximal: Tensor | None) -> TokenInputs:
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._forward(self._reference, row, temperature)[0]
        logprobs, logits = self._forward(self._model, row, temperature)
        with torch.set_grad_enabled(self._loss.entropy_coefficient > 0):
            entropies = token_entropies(logits, temperature)
        return TokenInputs(
            logprobs=logprobs,
            proximal=logprobs.detach() if proximal is None else proximal,
            behaviour=row.behaviour,
            advantages=row.advantages,
            weights=row.weights,
            entropies=entropies,
            reference=reference,
        )

    def _proximal_logprobs(self, rows: list[MicroBatch], temperature: float) -> list[Tensor] | None:
        """Log-probabilities under the published policy; None while the present weights are those."""
        if self._proximal is None:
            return None
        with torch.no_grad(), self._exchanged(self._proximal):
            return [self._forward(self._model, row, temperature)[0] for row in rows]

    def _keep_published(self) -> PolicyVersion | None:
        """Copies the published weights before the first update moves away from them, where they are needed again.

        Returns:
            The version that the proximal log-probabilities of this update are of, if it is known.
        """
        published = self._published
        again = self._loss.correction != "none" and self._spec.algorithm.mini_batches_per_step > 1
        if again and self._proximal is None:
            self._proximal = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        if not again:
            self._published = None
        return published

    @contextmanager
    def _exchanged(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Runs the model with other weights for a while, which hold the model's own meanwhile."""
        self._exchange(weights)
        try:
            yield
        finally:
            self._exchange(weights)

    def _exchange(self, weights: dict[str, Tensor]) -> None:
        """Swaps contents, tensor by tensor: sharded parameters cannot be replaced, a third copy would cost memory."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                present = parameter.detach().clone()
                parameter.copy_(weights[name])
                weights[name].copy_(present)

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Adds each figure over the ranks."""
        names = sorted(sums)  # the same on every rank
        values = self._ranks.sum(torch.stack([sums[name] for name in names]).double().cpu())
        return dict(zip(names, values.tolist(), strict=True))


def _saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
