"""Load a sequence classifier of transformers, tokenise, and compute logits of many sequences in one forward pass.

Of the server's modules, only this one imports torch and transformers. The logits equal those of
``model(**tokenizer(text))`` for each sequence alone. Sequences of a pass are packed where the model allows it; else
they are padded, with an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from plaudit_model_server.batcher import ModelSettings
from plaudit_reward.attention import (
    PACKED_ATTENTION,
    SHORTEST_OF_LONGEST,
    PackedLayout,
    choose_attention,
    length_limits,
)
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
_SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest rounding difference of packed hidden states from those of a sequence alone, relative to their norm."""
_NO_LEAK = 1e-5
"""The largest change with the tokens before a sequence, in any precision: two rows of the same lengths round alike.
Otherwise a state-space layer's leak of 0.2 % would pass as bfloat16's rounding."""


@torch.inference_mode()
def enable_packing(model: PreTrainedModel) -> bool:
    """Switch a model to the packed attention, unless that would change its results; return True if it has.

    Sequences are then concatenated in a single row, without padding and mask: for decoders with a ``score`` head on a
    sequence's last token, if ``plaudit_reward.attention`` supports their attention. A comparison of results decides;
    the model's name does not count.
    """
    if not isinstance(model, GenericForSequenceClassification):
        return False
    for part, limit in length_limits(model):
        logger.info("sequences cannot be packed", reason=f"{part} depend on the longest sequence above {limit} tokens")
        return False
    own = model.config._attn_implementation
    vocabulary = int(model.config.get_text_config().vocab_size)
    probe, one, other = ([number % vocabulary for number in range(start, start + 12)] for start in (1, 20, 40))
    body: Any = model.base_model
    alone = body(input_ids=_row(probe, model), use_cache=False).last_hidden_state[0]
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        choose_attention(model, model.device, model.dtype)
        behind_one, behind_other = (_hidden(model, [before, probe])[12:] for before in (one, other))
        problem = _difference(alone, behind_one, behind_other)
    except Exception as error:  # the model's code may not support packed rows
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.info("sequences cannot be packed", reason=problem)
        model.set_attn_implementation(own)
    return not problem


def _difference(alone: Tensor, behind_one: Tensor, behind_other: Tensor) -> str:
    """Return the reason why a sequence behind two others has different hidden states; empty: they are equal."""
    leak, apart = _distance(behind_one, behind_other), _distance(behind_one, alone)
    if not leak <= _NO_LEAK:
        return f"hidden states move by {leak:.2g} with what lies before"
    return "" if apart <= _SAME[alone.dtype] else f"hidden states move by {apart:.2g}"


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@torch.inference_mode()
def packed_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of each sequence, in order, from one forward pass with packing enabled: float[n, labels]."""
    order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number]))
    lying = [sequences[number] for number in order]
    hidden = _hidden(model, lying)
    pad_id = model.config.get_text_config().pad_token_id
    ends = accumulate(map(len, lying))
    read = [end - len(tokens) + _read_token(tokens, pad_id) for end, tokens in zip(ends, lying, strict=True)]
    head: Any = model.score
    logits: Tensor = head(hidden[torch.tensor(read, device=hidden.device)])
    return logits[torch.tensor(order).argsort()]


def _hidden(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the hidden states of all tokens, float[T, width], of sequences sorted longest first."""
    lengths = [len(tokens) for tokens in sequences]
    layout = PackedLayout.of(lengths, 1 if model.device.type == "cpu" else SHORTEST_OF_LONGEST)
    body: Any = model.base_model
    hidden: Tensor = body(
        input_ids=_row([token for tokens in sequences for token in tokens], model),
        position_ids=_row([place for length in lengths for place in range(length)], model),
        packed_layout=layout.to(model.device),
        use_cache=False,
    ).last_hidden_state[0]
    return hidden


def _row(numbers: list[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([numbers], device=model.device)


def _read_token(tokens: Sequence[int], pad_id: int | None) -> int:
    """Return the position that transformers reads: a sequence's last token that is not the padding token.

    This is not always the last token: with some tokenizers the end-of-text token is the padding token.
    """
    place = len(tokens) - 1
    while place and tokens[place] == pad_id:
        place -= 1
    return place


class OneDnnLinear(torch.nn.Linear):
    """Compute a float32 linear layer on a CPU with oneDNN; it differs from its base class in rounding only.

    For float32 torch calls MKL, which leaves half of the vector units of AMD's CPUs idle: oneDNN is more than twice as
    fast there. In shorter formats, and on GPUs, torch's own choice is good.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in the base class)
        """Call the operation with which torch's compiler (Inductor) replaces linear layers."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return output


def use_onednn(model: torch.nn.Module) -> None:
    """Replace the layers of a model that compute in float32 on a CPU, if torch was built with oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for layer in model.modules():
        # Not subclasses: they compute something else.
        if type(layer) is torch.nn.Linear and (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu"):
            layer.__class__ = OneDnnLinear


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ENOUGH_ON_CPU = 2048
_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
_UNBOUNDED_TOKENS = 1_000_000
"""Tokenizers without a limit report 1e30."""


class Classifier:
    """Load a model with its tokenizer and compute with it; raise ``ConfigurationError`` if that fails."""

    def __init__(self, settings: ModelSettings) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._tokenizer = _load_tokenizer(settings)
        self._tokenizing = Lock()
        """Tokenizers are not thread-safe."""
        self._model = _load_model(settings)
        torch.nn.Module.to(self._model, self._device)  # transformers types its own for itself only
        use_onednn(self._model)
        config = self._model.config
        self.labels = {int(number): label for number, label in (config.id2label or {}).items()}
        self.max_length = settings.max_model_length or _max_length(self._model, self._tokenizer)
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._pad_id: int | None = config.get_text_config().pad_token_id
        self.packs = enable_packing(self._model)
        """True if sequences of a pass need no padding."""
        logger.info("loaded the model", device=str(self._device), rows="packed" if self.packs else "padded")

    @property
    def enough_tokens(self) -> int:
        """Return the number of tokens at which a packed pass is fastest per token; larger passes only delay others."""
        return _ENOUGH_ON_CPU if self._device.type == "cpu" else _UNBOUNDED_TOKENS

    @property
    def batches(self) -> bool:
        """Return True if sequences can share a pass: padding needs a padding token."""
        return self.packs or self._pad_id is not None

    def occupy(self, device: bool) -> None:
        """Move the weights to the device, or to host memory and return what the device's allocator holds."""
        torch.nn.Module.to(self._model, self._device if device else "cpu")
        if not device and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def tokenize(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""
        with self._tokenizing:
            ids: list[list[int]] = self._tokenizer(
                texts, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False
            )["input_ids"]
        return ids

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat as text, with the tokenizer's template.

        Raises ``DataError`` if there is none, it fails on these messages, or a variable is an argument of
        ``apply_chat_template``: with ``chat_template`` a client would run a template of its own.
        """
        if not self._tokenizer.chat_template:
            raise DataError("the model has no chat template: send input, or save a template beside the model")
        given = dict(variables or {})
        if reserved := sorted(_RESERVED & given.keys()):
            raise DataError(
                f"chat_template_kwargs.{reserved[0]} is reserved: only variables of the model's own template may be set"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **given,
            )
        except Exception as error:  # a template raises any exception
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return str(text)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise ``DataError`` for a sequence that no forward pass can compute: empty, too long, or with unknown ids."""
        if not tokens:
            raise DataError("an input has no tokens")
        if len(tokens) > self.max_length:
            raise DataError(
                f"an input has {len(tokens)} tokens, the model takes {self.max_length}: nothing is truncated, "
                "since a shortened text would have another score"
            )
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise DataError(f"token ids must be from 0 to {self._vocabulary - 1}")

    def activate(self, logits: list[float]) -> list[float]:
        """Apply vLLM's default activation: by ``problem_type``, else sigmoid of one logit, softmax of several."""
        problem = self._model.config.problem_type
        if problem == "regression":
            return logits
        values = torch.tensor(logits)
        several = len(logits) > 1 and problem != "multi_label_classification"
        activated: list[float] = (values.softmax(-1) if several else values.sigmoid()).tolist()
        return activated

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each checked sequence's logits, in order, from one forward pass; only one if not ``batches``."""
        values = packed_logits(self._model, sequences) if self.packs else self._padded_logits(sequences)
        result: list[list[float]] = values.float().tolist()
        return result

    def _padded_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return float[n, labels] of sequences padded on the right."""
        longest = max(map(len, sequences))
        rows = [[*tokens, *[self._pad_id or 0] * (longest - len(tokens))] for tokens in sequences]
        lengths = torch.tensor([len(tokens) for tokens in sequences])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self._device)
        logits: Tensor = self._model(input_ids=torch.tensor(rows, device=self._device), attention_mask=mask).logits
        return logits


def _load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.source, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:  # loading a tokenizer raises any kind of exception, including Rust ones
        raise _unloadable("tokenizer", settings.source, error) from error
    return tokenizer


def _load_model(settings: ModelSettings) -> PreTrainedModel:
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            settings.source,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=_DTYPES[settings.dtype],
            output_loading_info=True,
        )
    except Exception as error:  # network, disk, third-party code or memory may fail
        raise _unloadable("classifier", settings.source, error) from error
    if report["missing_keys"]:
        # transformers would fill them with random numbers and continue.
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigurationError(
            f"--model {settings.source} has no weights for {missing}: it is no trained sequence classifier. Name a "
            "model that was saved as …ForSequenceClassification"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _max_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the lower of the model's and the tokenizer's limit."""
    positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNBOUNDED_TOKENS)
    for name, module in model.named_modules():
        # RoBERTa and related models count positions from after the padding id: two entries of the table are never used.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions -= int(module.padding_idx) + 1
    return min(positions, int(min(tokenizer.model_max_length, _UNBOUNDED_TOKENS)))


def _unloadable(what: str, source: str, error: Exception) -> ConfigurationError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ConfigurationError(
        f"--model {source}: no {what} could be loaded from it ({first_line}). Give the id of a model on the hub that "
        "this machine can reach, or a folder with config.json, the weights and the tokenizer's files"
    )
