"""Run the policy on one rank: forward and backward passes over micro-batches, one optimizer step per update.

With several ranks, every public method except ``files`` is a collective operation: called on rank 0, it is sent to the
other ranks (``Commands``), which repeat it in ``follow``. The gradient of an update is a sum over tokens with weights
fixed beforehand, so apart from rounding it depends neither on the packing nor on the number of ranks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit_job.model_shape import ModelShape
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import RLJob, Spec
from plaudit_reward.attention import choose_attention
from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.images import ImageProcessor
from plaudit_workers.tokenizer import load_tokenizer
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.checks import (
    ImageRows,
    busy_sequence,
    read_sampled_images,
    refuse_unpackable_images,
)
from plaudit_workers.training.model.head import (
    DTYPES,
    FORWARD_DTYPES,
    EntropyUse,
    LoadedModel,
    TokenHead,
    companion_files,
    forward_logits,
    load_by_rows,
    load_whole,
    reduced,
    refuse_cut_sampling,
    refuse_long_packed,
    refuse_unpackable,
)
from plaudit_workers.training.model.lora import Adapters, original_name, published_name
from plaudit_workers.training.model.losses import (
    ESTIMATES,
    TokenInputs,
    choose_loss,
    mean_figures,
    mismatch_figures,
    mismatch_sums,
    policy_loss,
    token_weights,
)
from plaudit_workers.training.model.memory import checkpoint_layers, compile_layers, refuse_without_compiler
from plaudit_workers.training.model.optimizer import PROBE_LIMITS, PolicyOptimizer, probe_ids, work_figures
from plaudit_workers.training.model.packing import MicroBatch, assign_bins, pack, pack_single
from plaudit_workers.training.model.sequence_parallel import SequenceParallel, refuse_heads
from plaudit_workers.training.model.sharding import (
    Ranks,
    fill,
    fill_shards,
    gathered,
    join_ranks,
    leave_ranks,
    place,
    saved_buffers,
    sum_over_replicas,
)
from plaudit_workers.training.model.state_copy import Commands, StateCopy, read_own_rows, refuse_other_tensors
from plaudit_workers.training.model.trial import try_loss
from plaudit_workers.training.model.weight_offer import WeightOffer, part_of, shapes_of, weights_port
from plaudit_workers.weights.files import ShardReader, WeightFiles
from plaudit_workers.weights.image import CopiedWeights, WeightForm, WeightImage
from plaudit_workers.weights.index import MODEL_PREFIX, PROXIMAL_PREFIX, ShardError, ShardIndex, StateProgress
from plaudit_workers.weights.published import ADAPTER_FILE, WEIGHTS_FILE, Probe
from plaudit_workers.weights.send import WeightServer, file_layout, host_towards


class PolicyModel:
    """Hold the model, its optimizer and, if the loss needs them, proximal and reference weights. Belongs to one thread.

    Args:
        model: the same on every rank.
        tokenizer: published with the weights; bounds the probe's token ids.
        reference: the frozen starting model for the KL term; None when ``klCoefficient`` is 0 and with adapters.
        adapters: of the model, the only trained parameters; None: all parameters are trained.
    """

    def __init__(
        self,
        spec: Spec,
        ranks: Ranks,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        reference: LoadedModel | None,
        adapters: Adapters | None = None,
    ) -> None:
        self._spec = spec
        self._loss = spec.algorithm.loss
        self._policy_loss = choose_loss(spec.algorithm.loss)
        if self._loss.kind == "python":
            try_loss(self._policy_loss, self._loss, ranks.device)
        self._ranks = ranks
        self._parallel = None if ranks.sequence is None else SequenceParallel(ranks.sequence)
        self._commands = Commands(ranks)
        self._dtype = FORWARD_DTYPES[spec.model.dtype]
        trainer = spec.trainer
        if trainer.compile:
            refuse_without_compiler(ranks.device.type, os.environ)
            compile_layers(model.module)
        kind, offload = trainer.activation_checkpointing, trainer.activation_offload
        checkpoint_layers(model.module, kind, ranks.device, offload=offload)
        self._model = placed(model, ranks, self._dtype, cpu_offload=trainer.cpu_offload)
        self._images = None if model.images is None else ImageRows(model.images, self._model)
        with autocast(ranks, self._dtype):
            if self._images is not None:
                refuse_unpackable_images(self._model, self._images, ranks.device, rough=self._dtype != torch.float32)
            self._head = TokenHead(self._model, device=ranks.device)
        self._reference = (
            None if reference is None else placed(reference, ranks, self._dtype, cpu_offload=trainer.cpu_offload)
        )
        if self._reference is not None and self.images is not None:
            read_sampled_images(self._reference, self.images.token_id)
        with autocast(ranks, self._dtype):
            self._reference_head = None if self._reference is None else TokenHead(self._reference, device=ranks.device)
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        self._tensors = self._parameters | ({} if adapters else saved_buffers(self._model))
        self._parts = {} if adapters else model.published
        self._optimizer = PolicyOptimizer(self._parameters.items(), spec.algorithm)
        self._shape = _shape_of(model.module)
        self._proximal: dict[str, Tensor] | None = None
        """The published weights, after one of several updates of a step has changed the model's."""
        self._resumed_within_step = False
        """The proximal weights are those of a checkpoint, and are to be published again."""
        self._published: PolicyVersion | None = None
        """The version of those, or of the model's weights; None when neither are the published ones any more."""
        self._files: dict[str, bytes] = {}
        self._server: WeightServer | None = None
        self._image: WeightImage | None = None
        self._copy: StateCopy | None = None

    @property
    def images(self) -> ImageProcessor | None:
        """Return what reads the images of prompts; None: they are text."""
        return None if self._images is None else self._images.images

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Make one optimizer step on a batch and return its figures (verl's names where verl has one).

        A batch without sequences, or without any that has a gradient, changes nothing but the place in the schedule,
        and returns the batch's figures.
        """
        self._commands.send("update", batch)
        if not batch.sequences:
            self._optimizer.pass_over()
            return dict(batch.statistics)
        lengths = [sequence.num_trained_tokens for sequence in batch.sequences]
        weights = token_weights(self._loss.aggregation, lengths, self._spec.rollout.sampling.max_tokens)
        batch, weights = self._with_gradient(batch, weights)
        if not batch.sequences:
            self._optimizer.pass_over()
            return dict(batch.statistics)
        micro_batches = self._micro_batches(batch, weights)
        proximal = self._proximal_logprobs(micro_batches, batch.temperature)
        published = self._keep_published()
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self._ranks.device))
        for number, micro_batch in enumerate(micro_batches):
            tokens = self._token_inputs(micro_batch, batch.temperature, proximal[number] if proximal else None)
            terms = policy_loss(tokens, self._loss, self._policy_loss)
            sum_over_replicas(self._model, number == len(micro_batches) - 1)
            # Sharded gradients are averaged over the ranks, but each rank holds its part of a sum.
            torch.autograd.backward(terms.total * self._ranks.world_size)
            members = [batch.sequences[member] for member in micro_batch.members]
            compared = mismatch_sums(members, published, tokens.proximal, tokens.behaviour)
            for name, value in (terms.sums | compared).items():
                sums[name] = sums[name] + value
        limit = PROBE_LIMITS[self._spec.model.dtype]
        figures = mean_figures(mismatch_figures(self._summed(sums), limit))
        adapters = sum(each.numel() for each in self._parameters.values()) if self._adapters else None
        work = work_figures(self._shape, [sequence.num_tokens for sequence in batch.sequences], adapters)
        work["training/loss_tokens"] = float(batch.num_trained_tokens)
        return batch.statistics | figures | work | self._optimizer.step()

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """Compute log-probabilities of each response's tokens at the batch's temperature: float32[T], 0 if masked."""
        self._commands.send("logprobs", batch)
        rows = self._micro_batches(batch, [1.0] * len(batch.sequences))
        return self._by_sequence(batch, rows, (self._forward(row, batch.temperature)[0] for row in rows))

    @torch.no_grad()
    def divergences(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """Estimate the divergence of each token from the starting weights: float32[T], 0 if masked.

        The other policy is the one around which the loss is clipped: the published one, or with ``correction: none``
        the one that sampled.
        """
        self._commands.send("divergences", batch)
        rows = self._micro_batches(batch, [1.0] * len(batch.sequences))
        proximal = self._proximal_logprobs(rows, batch.temperature)
        estimate = ESTIMATES[self._loss.kl_estimator]

        def values(number: int, row: MicroBatch) -> Tensor:
            reference = self._reference_logprobs(row, batch.temperature)
            if self._loss.correction == "none":
                return estimate(row.behaviour, reference)
            anchor = proximal[number] if proximal else self._forward(row, batch.temperature)[0]
            return estimate(anchor, reference)

        return self._by_sequence(batch, rows, (values(number, row) for number, row in enumerate(rows)))

    def _by_sequence(
        self, batch: TrainingBatch, rows: Sequence[MicroBatch], of_rows: Iterable[Tensor]
    ) -> list[NDArray[np.float32]]:
        """Return the values of all ranks' rows by sequence: float32[T], 0 if masked."""
        lengths = [sequence.response_ids.size for sequence in batch.sequences]
        found = [np.zeros(length, dtype=np.float32) for length in lengths]
        for row, of_row in zip(rows, of_rows, strict=True):
            values = of_row.cpu().numpy()
            for member in row.members:
                sequence = batch.sequences[member]
                own, values = np.split(values, [sequence.num_trained_tokens])
                found[member][sequence.loss_mask] = own
        if not found:
            return []
        everywhere = self._ranks.sum(torch.from_numpy(np.concatenate(found))).numpy()
        return np.split(everywhere, np.cumsum(lengths)[:-1])

    def free_memory(self) -> None:
        """Return the memory that the allocator keeps between updates, on every rank."""
        self._commands.send("free_memory")
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self._commands.gather(b"")  # rank 0 returns after all have

    def hold_proximal(self, version: PolicyVersion) -> None:
        """Take the weights that were written or offered as the ones around which ``correction`` clips.

        The version's number is that of the steps done, so the schedule of the learning rate continues there.
        """
        self._commands.send("hold_proximal", version)
        self._optimizer.begin_step(version.number)
        if not self._resumed_within_step:
            self._proximal = None
        self._resumed_within_step, self._published = False, version

    def write_weights(self, folder: str) -> dict[str, str]:
        """Write the weights to publish as safetensors: each rank its file, and an index if there are several.

        They are the present ones in ``model.dtype``; after a resume within a step those from before its first update.
        Adapters are one file. The SHA-256 of each file is returned by its name, in hexadecimal.

        Args:
            folder: an empty one, on a volume that all ranks share.

        Raises:
            ShardError: another rank could not write its file.
            OSError: this rank could not.
        """
        self._commands.send("write_weights", folder)
        files, own = self._weight_files()

        def write() -> dict[str, str]:
            with self._published_weights():
                return files.write_own(Path(folder), self._ranks.rank, gathered(own, files.order))

        digests = self._written(write)
        if self._ranks.rank == 0:
            for name, content in files.index().items():
                (Path(folder) / name).write_bytes(content)
        return digests

    def copy_weights(self) -> CopiedWeights:
        """Copy the weights that ``write_weights`` writes to host memory, each rank its file, and find what changed."""
        self._commands.send("copy_weights")
        files, own = self._weight_files()
        self._image = self._image or WeightImage(files, self._ranks.rank)
        with self._published_weights():
            copied = self._image.replace(gathered(own, files.order))
        parts = self._commands.gather(msgspec.json.encode(copied))
        return CopiedWeights.of_ranks(msgspec.json.decode(part, type=CopiedWeights) for part in parts)

    def write_copied(self, form: WeightForm) -> None:
        """Write the weights that were copied last as files; see ``write_weights`` for the errors."""
        self._commands.send("write_copied", form)
        assert self._image is not None
        self._written(partial(self._image.write, form))

    def _weight_files(self) -> tuple[WeightFiles, dict[str, Tensor]]:
        """Return the files to publish, and the tensors by their published names."""
        name, num_files = (ADAPTER_FILE, 1) if self._adapters else (WEIGHTS_FILE, self._ranks.world_size)
        own = {published_name(name) if self._adapters else name: each for name, each in self._tensors.items()}
        return WeightFiles.plan(shapes_of(own, DTYPES[self._spec.model.dtype], self._parts), name, num_files), own

    def _written(self, write: Callable[[], dict[str, str] | None]) -> dict[str, str]:
        """Let each rank write its files; return the digests of all. An error of any rank is raised on rank 0."""
        digests, error = dict[str, str](), None
        try:
            digests = write() or {}
        except OSError as found:
            error = found
        reports = self._commands.gather(msgspec.json.encode([digests, "" if error is None else str(error)]))
        if error is not None and self._ranks.rank == 0:
            raise error
        for rank, report in enumerate(reports):
            others, message = msgspec.json.decode(report, type=tuple[dict[str, str], str])
            digests |= others
            if message and self._ranks.rank == 0:
                raise ShardError(f"rank {rank}: {message}")
        return digests

    def offer(self, offer: WeightOffer) -> Transfer:
        """Offer rollouts what ``write_weights`` writes, from every rank's memory; return the offer of all ranks."""
        self._commands.send("offer", offer)
        dtype = DTYPES[self._spec.model.dtype]
        host = host_towards(offer.redis_url)
        self._server = self._server or WeightServer(weights_port(), host)
        self._server.make_room()
        with self._published_weights():
            part = part_of(self._tensors, dtype, self._ranks.rank, offer.probe, self._parts)
        self._server.offer(offer.version, offer.token, part)
        own = TransferPart(f"{host}:{self._server.port}", part.digest)
        gathered = self._commands.gather(msgspec.msgpack.encode(own))
        parts = [msgspec.msgpack.decode(each, type=TransferPart) for each in gathered]
        layout = file_layout(shapes_of(self._tensors, dtype, self._parts))
        return Transfer(offer.token, layout.num_bytes, parts)

    @torch.no_grad()
    def probe(self) -> Probe:
        """Return a fixed sequence and its next-token log-probabilities, with which a rollout checks what it loaded.

        They are those of the weights that ``write_weights`` writes.
        """
        self._commands.send("probe")
        longest = self._spec.rollout.engine.max_model_length - 1
        ids = probe_ids(self._tokenizer, int(self._model.config.get_text_config().vocab_size), longest)
        row = pack_single(torch.tensor(ids)).to(self._ranks.device)
        with self._published_weights():
            logprobs = self._forward(row, temperature=1.0)[0]
        return Probe(ids, logprobs.tolist(), PROBE_LIMITS[self._spec.model.dtype])

    def files(self) -> dict[str, bytes]:
        """Return the files beside published weights (configuration and tokenizer, or of adapters) by file name."""
        if not self._files and self._adapters:
            self._files = self._adapters.files()
        elif not self._files:
            dtype = DTYPES[self._spec.model.dtype]
            self._files = companion_files(self._model, self._tokenizer, dtype, self.images)
        return self._files

    def copy_state(self) -> StateCopy:
        """Copy the state for a checkpoint: trained weights in float32, optimizer, schedule, random state.

        In the middle of a step it includes the weights from before the step's first update, if later ones need them.
        Rank 0 writes the copy while updates continue; the other ranks write with it.
        """
        self._commands.send("copy_state")
        if self._copy is not None:
            self._copy.join()
        optimizer = self._optimizer
        random_state = torch.get_rng_state().numpy().tobytes()
        progress = StateProgress(random_state, optimizer.updates, optimizer.steps, str(optimizer.place))
        self._copy = StateCopy(self._ranks, self._state() | _proximal_state(self._proximal or {}), progress)
        if self._ranks.rank:
            self._copy.follow()
        return self._copy

    def load(self, folder: str) -> None:
        """Load a state that any number of ranks wrote; each rank reads its own rows.

        Raises:
            ShardError: files are damaged, or of another model. Then the state is undefined.
            OSError: the index cannot be read.
        """
        if self._ranks.rank == 0:
            index = ShardIndex.read(Path(folder))
            if others := index.progress.steps.keys() - self._parameters.keys():
                raise ShardError(f"{min(others)} is no trained parameter of the model")
            self._optimizer.restore(index.progress.updates, index.progress.steps)
            refuse_other_tensors(index, self._state())
        self._commands.send("load", folder)
        errors = [error.decode() for error in self._commands.gather(self._read(Path(folder)).encode()) if error]
        if errors and self._ranks.rank == 0:
            raise ShardError("; ".join(errors))

    def _read(self, folder: Path) -> str:
        """Read this rank's rows; return an error that rank 0 raises."""
        try:
            reader = ShardReader(folder)
            progress = reader.index.progress
            self._restore_progress(progress)
            read_own_rows(reader, self._state())
            self._begin_from(progress)
            if any(name.startswith(PROXIMAL_PREFIX) for name in reader.index.tensors):
                proximal = {name: torch.empty_like(each.detach()) for name, each in self._parameters.items()}
                refuse_other_tensors(reader.index, _proximal_state(proximal))
                read_own_rows(reader, _proximal_state(proximal))
                self._proximal, self._resumed_within_step = proximal, True
        except (OSError, ShardError) as error:
            return f"rank {self._ranks.rank}: {error}"
        return ""

    def _restore_progress(self, progress: StateProgress) -> None:
        place = Fraction(progress.place) if progress.place else None
        self._optimizer.restore(progress.updates, progress.steps, place)

    def _begin_from(self, progress: StateProgress) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(progress.random_state), dtype=torch.uint8))
        self._proximal = self._published = None
        self._resumed_within_step = False

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; the same names on every rank."""
        return {f"{MODEL_PREFIX}{name}": each for name, each in self._tensors.items()} | self._optimizer.averages()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint in one file, as earlier versions wrote it."""
        optimizer = state["optimizer"]
        progress = StateProgress(state["rng"].numpy().tobytes(), int(optimizer["updates"]), optimizer["steps"])
        averages = {f"{key}/{name}": each for name, own in optimizer["moments"].items() for key, each in own.items()}
        self.restore(progress, {f"{MODEL_PREFIX}{name}": each for name, each in state["model"].items()} | averages)

    def restore(self, progress: StateProgress, state: Mapping[str, Tensor] | None = None) -> None:
        """Load a state from rank 0's memory.

        Args:
            state: unsharded by name; None on ranks other than 0, which get them from rank 0.
        """
        self._commands.send("restore", progress)
        self._restore_progress(progress)
        for name, tensor in self._state().items():
            fill(tensor, None if state is None else state[name])
        self._begin_from(progress)

    def close(self) -> None:
        """Release the other ranks and leave the process group."""
        self._commands.send("close")
        if self._server is not None:
            self._server.close()
        if self._copy is not None:
            self._copy.join()
        leave_ranks(self._ranks)

    def follow(self) -> None:
        """Repeat every call of rank 0's model on this rank, until rank 0 closes it."""
        name = ""
        while name != "close":
            name, argument = self._commands.receive()
            method = getattr(self, name)
            method() if argument is None else method(argument)

    def _with_gradient(self, batch: TrainingBatch, weights: list[float]) -> tuple[TrainingBatch, list[float]]:
        """Leave out the sequences whose advantage is 0, unless another term of the loss gives them a gradient.

        The others keep their weights.
        """
        if self._loss.has_kl_term or self._loss.entropy_coefficient or self._loss.kind == "python":
            return batch, weights
        pairs = zip(batch.sequences, weights, strict=True)
        kept = [(sequence, weight) for sequence, weight in pairs if sequence.has_signal]
        skipped = {"training/sequences_skipped": float(len(batch.sequences) - len(kept))}
        statistics = batch.statistics | (skipped if batch.sequences else {})
        sequences = tuple(sequence for sequence, _ in kept)
        return replace(batch, sequences=sequences, statistics=statistics), [weight for _, weight in kept]

    def _micro_batches(self, batch: TrainingBatch, weights: list[float]) -> list[MicroBatch]:
        """Return this rank's share of the batch: rows that it computes alone, or with the ranks that get the same."""
        size = self._ranks.sequence_size
        budget = self._spec.trainer.micro_batch_tokens * size
        lengths = [sequence.num_tokens for sequence in batch.sequences]
        bins = assign_bins(lengths, budget, self._ranks.world_size // size)
        own, beside = bins[self._ranks.rank // size], list(zip(*bins, strict=True))
        rows = (self._packed(batch, weights, members, beside[number]) for number, members in enumerate(own))
        return [row.to(self._ranks.device) for row in rows]

    def _packed(
        self, batch: TrainingBatch, weights: list[float], members: list[int], beside: Iterable[list[int]]
    ) -> MicroBatch:
        if self._images is None:
            return pack(batch.sequences, weights, members)
        busy = busy_sequence(batch.sequences, members, beside)
        return pack(batch.sequences, weights, members, self._images.lay, busy)

    def _forward(
        self, row: MicroBatch, temperature: float, *, of_reference: bool = False, entropy: EntropyUse = "none"
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the row's targets, with gradient where enabled, and entropies: float32[R] each.

        Without a use for them, entropies are 0.
        """
        model, head = (self._reference, self._reference_head) if of_reference else (self._model, self._head)
        assert model is not None
        assert head is not None
        parallel = self._parallel
        part = row if parallel is None else parallel.part(row)
        further: dict[str, Any] = {} if row.images is None else dict(row.images.arguments)
        if parallel is not None:
            further["token_exchange"] = parallel.exchange(row)
        reducing = head.reducing(part.targets, temperature, entropy=entropy) if head.chunked else nullcontext()
        with autocast(self._ranks, self._dtype), reducing:
            values = forward_logits(model, part.input_ids, part.position_ids, row.layout, part.sources, further)
        if not head.chunked:
            values = reduced(values, part.targets, temperature, entropy=entropy)
        if parallel is not None:
            values = parallel.collected(values, row)
        return values[:, 0], values[:, 1]

    def _token_inputs(self, row: MicroBatch, temperature: float, proximal: Tensor | None) -> TokenInputs:
        reference = self._reference_logprobs(row, temperature) if self._loss.has_kl_term else None
        entropy: EntropyUse = "loss" if self._loss.entropy_coefficient > 0 else "figure"
        logprobs, entropies = self._forward(row, temperature, entropy=entropy)
        return TokenInputs(
            logprobs=logprobs,
            proximal=logprobs.detach() if proximal is None else proximal,
            behaviour=row.behaviour,
            advantages=row.advantages,
            lengths=row.lengths,
            weights=row.weights,
            entropies=entropies,
            reference=reference,
        )

    @torch.no_grad()
    def _reference_logprobs(self, row: MicroBatch, temperature: float) -> Tensor:
        """Return log-probabilities under the starting weights."""
        if self._adapters is None:
            return self._forward(row, temperature, of_reference=True)[0]
        with self._adapters.disabled():
            return self._forward(row, temperature)[0]

    def _proximal_logprobs(self, rows: list[MicroBatch], temperature: float) -> list[Tensor] | None:
        """Return log-probabilities under the published policy; None while the model has its weights."""
        if self._proximal is None:
            return None
        with torch.no_grad(), self._exchanged(self._proximal):
            return [self._forward(row, temperature)[0] for row in rows]

    def _keep_published(self) -> PolicyVersion | None:
        """Copy the published weights if later updates of the step need them; return their version, if it is known."""
        published = self._published
        again = self._loss.correction != "none" and self._spec.algorithm.updates_per_step > 1
        if again and self._proximal is None:
            self._proximal = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        if not again:
            self._published = None
        return published

    def _published_weights(self) -> AbstractContextManager[None]:
        """Give the model the weights to publish within the context."""
        return self._exchanged(self._proximal) if self._resumed_within_step and self._proximal else nullcontext()

    @contextmanager
    def _exchanged(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Exchange the model's weights with others within the context."""
        self._exchange(weights)
        try:
            yield
        finally:
            self._exchange(weights)

    def _exchange(self, weights: dict[str, Tensor]) -> None:
        """Swap contents, tensor by tensor: sharded parameters cannot be replaced, a third copy would cost memory."""
        self._ranks.finish_passes()  # they may still read parameters that lie in host memory
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                present = parameter.detach().clone()
                parameter.copy_(weights[name])
                weights[name].copy_(present)

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Add each figure over the ranks."""
        names = sorted(sums)  # the same on every rank
        values = self._ranks.sum(torch.stack([sums[name] for name in names]).double().cpu())
        return dict(zip(names, values.tolist(), strict=True))


def autocast(ranks: Ranks, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which every pass of a model runs: sharded models cast by their own mixed precision."""
    return torch.autocast(ranks.device.type, dtype, enabled=ranks.world_size == 1 and dtype != torch.float32)


def placed(model: LoadedModel, ranks: Ranks, dtype: torch.dtype, *, cpu_offload: bool = False) -> PreTrainedModel:
    """Take this rank's part of a model, and read its parameters if it has none yet. See ``place``."""
    choose_attention(model.module, ranks.device, dtype)
    module = place(model.module, ranks, dtype, cpu_offload=cpu_offload)
    stored = model.stored
    if stored is not None:
        held_on = torch.device("cpu") if cpu_offload and ranks.world_size > 1 else ranks.device
        fill_shards(module, held_on, lambda name, first, count: stored.rows(original_name(name), first, count))
        with autocast(ranks, dtype):  # not earlier: without parameters it could not run
            refuse_unpackable(module, ranks.device, rough=dtype != torch.float32)
    return module


def _proximal_state(proximal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{PROXIMAL_PREFIX}{name}": each for name, each in proximal.items()}


def _shape_of(model: PreTrainedModel) -> ModelShape | None:
    try:
        return ModelShape.from_config(model.config.to_dict())
    except (KeyError, TypeError):
        return None  # another form: no MFU


def _load(model: ModelSpec, by_rows: bool, images: ImageProcessor | None) -> LoadedModel:
    loaded = (load_by_rows if by_rows else load_whole)(model, images=images is not None)
    return replace(loaded, images=images)


def build_model(job: RLJob, rank: int = 0, world_size: int = 1, images: ImageProcessor | None = None) -> PolicyModel:
    """Load the job's model and take this rank's part of it.

    Args:
        rank: ranks other than 0 then call ``follow``.
    """
    refuse_cut_sampling(job.spec.rollout.sampling)
    torch.manual_seed(job.spec.seed)
    lora = job.spec.trainer.lora
    by_rows = world_size > 1 or lora is not None  # frozen weights are read in the precision in which they are held
    model, tokenizer = _load(job.spec.model, by_rows, images), load_tokenizer(job.spec.model)
    refuse_long_packed(model.module, job.spec.rollout.engine.max_model_length)
    refuse_heads(model.module.config, job.spec.trainer.sequence_parallel_size)
    with_reference = job.spec.algorithm.loss.kl_coefficient and lora is None
    reference = _load(job.spec.model, by_rows, images) if with_reference else None
    dtype = FORWARD_DTYPES[job.spec.model.dtype]
    adapters = None if lora is None else Adapters(model.module, lora, job.spec.model.source, dtype)
    ranks = join_ranks(rank, world_size, job.spec.trainer.fsdp_size, job.spec.trainer.sequence_parallel_size)
    return PolicyModel(job.spec, ranks, model, tokenizer, reference, adapters)
