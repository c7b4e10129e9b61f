"""Load the policy's model, run packed rows through it, and reduce its logits to what the loss needs.

What cannot be loaded, trained in packed rows or compared with its rollouts is refused. Parameters are held in float32,
whatever ``model.dtype`` says: updates at a learning rate of 1e-6 would vanish in bfloat16. ``model.dtype`` is the
precision of the forward passes and of the published weights.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from plaudit_reward.attention import PACKED_ATTENTION, PackedLayout, UnsupportedAttentionError, length_limits
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.images import ImageProcessor
from plaudit_workers.tokenizer import load_tokenizer, loading_message
from plaudit_workers.weights.parameters import ModelFiles, StoredParameters

if TYPE_CHECKING:
    from plaudit_job.spec.algorithm import ModelSpec
    from plaudit_job.spec.rollout import SamplingSpec
    from plaudit_workers.weights.send import TensorParts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""``model.dtype`` → torch's."""
FORWARD_DTYPES = DTYPES | {"float16": torch.float32}
"""``model.dtype`` → precision of the trainer's forward passes. Gradients in float16 would need a scaled loss, which the
trainer does not do: its passes run in float32 then, and only the published weights are float16."""
_CLASSES: dict[bool, Any] = {False: AutoModelForCausalLM, True: AutoModelForImageTextToText}
"""By whether prompts have images."""
_ATTENTION: dict[bool, Any] = {
    False: PACKED_ATTENTION,
    True: {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"},  # a vision tower's attention is not causal
}
PACKING_TOLERANCE = 1e-3
"""Largest change of a sequence's logits when another sequence precedes it in the row, relative to their size: rounding
in float32. Models whose layers look across sequences differ by far more."""
ROUGH_PACKING_TOLERANCE = 0.05
"""The same in bfloat16, whose steps are 0.4 %."""
NO_LEAK = 1e-5
"""The largest change between two preceding sequences of the same length, in any precision: such rows round alike, but
for experts in bfloat16, which get other numbers of tokens. Else a state-space layer would pass whose leak is below
bfloat16's rounding."""
EntropyUse = Literal["none", "figure", "loss"]
"""The use of entropies: none (they are 0), a figure (computed without gradient), or a term of the loss (with it)."""
CHUNK_BYTES = 1 << 29
"""Float32 logits that are held at a time: about 900 tokens of a vocabulary of 150,000. Twice as many tokens where the
reduction is compiled, which keeps no copy of its own: each chunk adds a gradient of the whole head to the others'."""
_TRIED_TOKENS = 64
_REDUCTION_TOLERANCE = 0.01
"""Largest difference of a compiled reduction, in nats, and of its gradients."""
_AMPLIFIED = 1000.0


def load_model(model: ModelSpec, *, images: bool = False) -> PreTrainedModel:
    """Load ``model.source`` on the CPU: float32, packed attention, evaluation mode (no dropout)."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: PreTrainedModel = _CLASSES[images].from_pretrained(
            model.source,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=torch.float32,
            attn_implementation=_ATTENTION[images],
        )
    # Loading meets the network, the disk, other people's code and the memory's limit.
    except Exception as error:
        raise RefusedError(loading_message("model", "model.source", model.source, error)) from error
    torch.nn.Module.eval(loaded)
    refuse_unpackable(loaded)
    return loaded


@dataclass(frozen=True)
class LoadedModel:
    """Hold a model, and where to read its parameters if it has none yet."""

    module: PreTrainedModel
    """float32, packed attention, evaluation mode; on the CPU, or with all parameters on the meta device."""
    stored: StoredParameters | None = None
    """Where to read the parameters that are on the meta device."""
    published: Mapping[str, TensorParts] = field(default_factory=dict)
    """Name of a parameter → the tensors as which it is published, where they are not itself."""
    images: ImageProcessor | None = None
    """Reads the images of its prompts; None: they are text."""


def load_whole(model: ModelSpec, *, images: bool = False) -> LoadedModel:
    """Load a model with its parameters."""
    loaded = load_model(model, images=images)
    files = None if model.trust_remote_code else ModelFiles.find(model.source, model.revision)
    stored = None if files is None else StoredParameters.find(loaded, files)
    return LoadedModel(loaded, published={} if stored is None else stored.published())


def load_by_rows(model: ModelSpec, *, images: bool = False) -> LoadedModel:
    """Load a model without parameters, if their rows can be read from its files one by one after it is placed.

    They cannot where the files do not hold all of them (or quantised ones), where they have another format than
    safetensors, and for a model with code of its own. Such a model is loaded whole on each rank.
    """
    empty = build_empty(model, images=images)
    return load_whole(model, images=images) if empty is None else empty


def build_empty(model: ModelSpec, *, images: bool = False) -> LoadedModel | None:
    """Build a model with parameters on the meta device and real buffers.

    Return None if its parameters cannot be read one by one.
    """
    files = ModelFiles.find(model.source, model.revision)
    if files is None or model.trust_remote_code:
        return None
    from accelerate import init_empty_weights  # late: the benchmark on GPUs runs without it

    try:
        config = AutoConfig.from_pretrained(model.source, revision=model.revision)
        with init_empty_weights(include_buffers=False):
            built = _CLASSES[images].from_config(config, dtype=torch.float32, attn_implementation=_ATTENTION[images])
    except Exception:  # ``load_model`` meets the same problem, and reports it
        return None
    built.tie_weights()
    if getattr(config, "quantization_config", None):
        return None
    with suppress(OSError):  # a model without generation settings has no such file
        built.generation_config = GenerationConfig.from_pretrained(model.source, revision=model.revision)
    torch.nn.Module.eval(built)
    stored = StoredParameters.find(built, files)
    return None if stored is None else LoadedModel(built, stored, stored.published())


def forward_logits(
    model: torch.nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: PackedLayout,
    sources: Tensor,
    further: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run a packed row, or this rank's tokens of one, through the model.

    Args:
        input_ids: int64[1, T].
        position_ids: int64[1, T]; with images int64[3, 1, T].
        sources: int64[R]: the positions whose logits are needed; the others are never computed.
        further: ``token_exchange`` with the ranks that have the row's other tokens, pixels.

    Returns:
        float[R, V].
    """
    arguments: dict[str, Any] = {"packed_layout": layout, "use_cache": False, "logits_to_keep": sources}
    arguments |= further or {}
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, **arguments).logits[0]
    return logits


def companion_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, images: ImageProcessor | None = None
) -> dict[str, bytes]:
    """Return the files that an engine needs beside the weights (configuration, tokenizer, …), by file name."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        if images is not None:
            images.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def save_companions(model: ModelSpec, folder: Path, images: ImageProcessor | None = None) -> None:
    """Write the configuration and the tokenizer of ``model.source`` for weights in ``model.dtype``."""
    arguments = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model.source, **arguments)
    except Exception as error:  # as for ``load_model``
        raise RefusedError(loading_message("model", "model.source", model.source, error)) from error
    config.dtype = DTYPES[model.dtype]
    config.save_pretrained(folder)
    with suppress(OSError):  # a model without generation settings has no such file
        GenerationConfig.from_pretrained(model.source, revision=model.revision).save_pretrained(folder)
    if images is not None:
        images.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)


def refuse_unpackable(model: PreTrainedModel, device: torch.device | None = None, *, rough: bool = False) -> None:
    """Check on a few tokens that a preceding sequence in the row does not change a sequence's logits.

    Behind each of two other sequences they must be the same, and those of the sequence alone but for rounding.

    Args:
        model: if sharded, this is a collective call.
        rough: True if the model computes in bfloat16.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    one, other, ids = torch.tensor_split((torch.arange(18) * 7 + 1) % vocabulary, 3)
    try:
        with torch.no_grad():
            alone = _logits_of(model, [ids], device)
            behind_one, behind_other = (_logits_of(model, [before, ids], device)[6:] for before in (one, other))
        leak, apart = relative_difference(behind_one, behind_other), relative_difference(behind_one, alone)
        tolerance = ROUGH_PACKING_TOLERANCE if rough else PACKING_TOLERANCE
        leak_tolerance = tolerance if rough and _has_experts(model) else NO_LEAK
        packs = leak <= leak_tolerance and apart <= tolerance
        problem = "" if packs else f"logits change by {max(leak, apart):.2g} when another sequence precedes"
    except UnsupportedAttentionError as error:
        problem = f"its attention is not supported: {error}"
    except TypeError as error:
        problem = f"it does not accept packed rows: {error}"
    if problem:
        raise RefusedError(
            f"a model of type {kind_of(model)!r} cannot be trained: {problem}. Use a model with causal softmax "
            "attention (Qwen2, Qwen3, Llama, Mistral, …)"
        )


def kind_of(model: PreTrainedModel) -> str:
    """Return the type of a model, for messages."""
    return str(getattr(model.config, "model_type", type(model).__name__))


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest element if that is above 1."""
    return (one - other).abs().max().item() / max(1.0, other.abs().max().item())


def _has_experts(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def refuse_long_packed(model: PreTrainedModel, longest: int) -> None:
    """Check that no layer treats a long row differently from the sequences in it.

    See ``length_limits``: below its limit, such a layer computes the same in a packed row.

    Args:
        longest: tokens of a prompt and its response together.
    """
    for reason, limit in length_limits(model):
        if longest > limit:
            raise RefusedError(
                f"a model of type {kind_of(model)!r} with {reason} cannot be trained on sequences of more than {limit} "
                "tokens, because packed sequences would change each other's results, and rollout.engine.maxModelLength "
                f"is {longest}. Set maxModelLength to {limit} or less, or use another model"
            )


def _logits_of(model: PreTrainedModel, sequences: list[Tensor], device: torch.device | None) -> Tensor:
    lengths = [sequence.numel() for sequence in sequences]
    ids = torch.cat(sequences).unsqueeze(0).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)
    layout = PackedLayout.of(lengths) if device is None else PackedLayout.of(lengths).to(device)
    return forward_logits(model, ids, positions, layout, torch.arange(ids.numel(), device=device)).float()


class TokenHead:
    """Compute log-probabilities and entropies of chosen tokens in the model's output head, chunk by chunk.

    Logits of a vocabulary of 150,000 take 600 kB a token in float32, and the loss needs two numbers of them. Within
    ``reducing`` the head itself returns these two in place of logits: it computes the logits of a few hundred tokens,
    reduces them, and computes them again for the gradient (``torch.utils.checkpoint``). The call stays inside the
    model's forward pass, where sharded weights are gathered.

    Models that change the logits behind the head (Gemma's soft cap, Cohere's scale) are recognised by a probe, not by
    name; for them the whole logits are kept.

    Args:
        model: if sharded, building is a collective call.
        chunk_bytes: float32 logits that are held at a time.
        chunked: False if the model changes the logits behind its head; None: found out by a forward pass.
        device: of the passes, whose autocast is on; None: the CPU.
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
        vocabulary = int(model.config.get_text_config().vocab_size)
        self._chunk = max(1, chunk_bytes // (4 * vocabulary))
        if chunked is None:
            chunked = self._head is not None and _returns_the_heads_output(model, self._head, device)
        self.chunked = chunked
        """False: the model changes the logits behind its head."""
        self._reduced: Callable[..., Tensor] = reduced
        if chunked and device is not None and device.type == "cuda":
            compiled = _compiled_reduction(device, 2 * self._chunk, vocabulary)
            if compiled is not None:
                self._reduced, self._chunk = compiled, 2 * self._chunk

    @contextmanager
    def reducing(self, targets: Tensor, temperature: float, *, entropy: EntropyUse = "none") -> Iterator[None]:
        """Return (log-probability, entropy) of each token from the model in place of logits within the context."""
        head, own = self._head, self._head.forward

        def reduce(hidden: Tensor, chosen: Tensor) -> Tensor:
            return self._reduced(own(hidden), chosen, temperature, entropy=entropy)

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

    With z the logits ÷ temperature: ``log_softmax(z)[target]`` and ``-Σ_v softmax(z)_v · log_softmax(z)_v``.

    Every step over the logits costs a pass over the GPU's memory, so there are few. What is computed without gradient
    comes last, behind what the backward pass needs: a checkpoint that computes a chunk again stops before it.

    Args:
        logits: float[R, V], any precision; computed in float32.
        entropy: each use takes two more passes over the logits.
    """
    if temperature != 1:
        logits = logits.float() / temperature
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return torch.stack([chosen, torch.zeros_like(chosen)], -1)
    with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack([chosen, entropies], -1)


def _compiled_reduction(device: torch.device, num_tokens: int, vocabulary: int) -> Callable[..., Tensor] | None:
    """Compile ``reduced`` for a GPU, where most of its steps over the logits then cost no pass over the memory.

    It is tried on a chunk of random logits. Return None, and log why, if it fails (no Triton, no C compiler) or gives
    other values or gradients than the eager function.
    """
    compiled = torch.compile(reduced, dynamic=True)
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    try:
        logits = torch.randn(num_tokens, vocabulary, device=device, dtype=dtype, generator=generator)
        targets = torch.randint(0, vocabulary, (num_tokens,), device=device, generator=generator)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # the compiler's, about its own choices
            found = _outcome(compiled, logits, targets)
            expected = _outcome(reduced, logits[:_TRIED_TOKENS], targets[:_TRIED_TOKENS])
        apart = torch.stack([(own - other).abs().max() for own, other in zip(found, expected, strict=True)]).max()
        problem = "" if apart <= _REDUCTION_TOLERANCE else f"its results differ by {apart:.2g} from the eager ones"
    # A compiler meets drivers, other compilers and the disk.
    except Exception as error:
        problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    if problem:
        get_logger(__name__).info("the reduction of logits is not compiled", reason=problem)
    return None if problem else compiled


def _outcome(function: Callable[..., Tensor], logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and gradients of the first tokens of a chunk."""
    logits = logits.detach().requires_grad_()
    values = function(logits, targets, 1.0, entropy="figure")
    gradients = torch.autograd.grad(values[:, 0].sum(), logits)[0]
    return values[:_TRIED_TOKENS].detach(), gradients[:_TRIED_TOKENS].float()


@torch.no_grad()
def _returns_the_heads_output(model: PreTrainedModel, head: torch.nn.Module, device: torch.device | None) -> bool:
    """Return True if the model's logits are its head's output, also where that is large."""
    amplified: list[Tensor] = []

    def amplify(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
        amplified.append(output * _AMPLIFIED)
        return amplified[0]

    from plaudit_workers.training.model.packing import pack_single

    row = pack_single(torch.tensor([1, 0, 1])).to(device or torch.device("cpu"))
    hook = head.register_forward_hook(amplify)
    try:
        logits = forward_logits(model, row.input_ids, row.position_ids, row.layout, row.sources)
    finally:
        hook.remove()
    return len(amplified) == 1 and torch.equal(logits, amplified[0][0])


def refuse_cut_sampling(sampling: SamplingSpec) -> None:
    """Check that the trainer can compute the distribution of the training samples.

    The rollout keeps log-probabilities under the distribution it drew from: logits divided by the temperature. The
    trainer does the same, so that both describe the same policy. Sampling that cuts the distribution gives every cut
    token the probability 0, and the set of cut tokens depends on the weights: the trainer's weights cut others than the
    rollout's, so a sampled token may have no probability at all. Such sampling is refused, not approximated.
    """
    if sampling.temperature <= 0:
        raise RefusedError(
            f"rollout.sampling.temperature is {sampling.temperature}: all samples of a group would be equal; "
            "give a value above 0 (1.0 is the policy itself)"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise RefusedError(
            f"rollout.sampling has topP {sampling.top_p} and topK {sampling.top_k}: the trainer cannot compute the "
            "probabilities of a cut distribution; set topP: 1.0 and topK: -1 (validation may sample as it likes)"
        )
