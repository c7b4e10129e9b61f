"""A sequence classifier of transformers: loads it, tokenises, computes logits of many sequences in one forward pass.

The only module of the server that imports torch and transformers.

Sequences of a pass are padded on the right. The logits are those that ``model(**tokenizer(text))`` gives for each
sequence alone. Most models are told by an attention mask what is padding. A causal decoder with a ``score`` head on its
last token needs no mask, since no token sees what follows it; without one the fast attention kernels apply. Whether a
model is of that kind is looked at when it is loaded, not guessed from its name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from plaudit_reward.errors import ConfigurationError, DataError
from plaudit_reward.model_server.settings import ModelSettings

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SAME = 1e-2
"""How far the probe's logits may move because of what follows, relative: rounding of any precision, no more."""
_UNBOUNDED_TOKENS = 1_000_000
"""Tokenizers without a limit say 1e30."""


class Classifier:
    """A loaded model with its tokenizer.

    Args:
        settings: what to load, how, and where.

    Raises:
        ConfigurationError: it cannot be loaded, or is no classifier.
    """

    def __init__(self, settings: ModelSettings) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._tokenizer = _load_tokenizer(settings)
        self._model = _load_model(settings)
        torch.nn.Module.to(self._model, self._device)  # transformers types its own for itself only
        config = self._model.config
        self.labels = {int(number): label for number, label in (config.id2label or {}).items()}
        self.max_length = settings.max_model_length or _max_length(self._model, self._tokenizer)
        self._vocabulary = int(config.get_text_config().vocab_size)
        self._pad_id: int | None = config.get_text_config().pad_token_id
        self._unmasked = isinstance(self._model, GenericForSequenceClassification) and self._is_causal()
        logger.info("loaded on %s, %s", self._device, "causal: no mask" if self._unmasked else "with a mask")

    @property
    def batches(self) -> bool:
        """Whether sequences of different lengths can share a pass: a model with masks needs a padding token."""
        return self._unmasked or self._pad_id is not None

    def tokenize(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        ids: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """A chat as text, by the tokenizer's template.

        Args:
            messages: with roles.
            **options: of ``apply_chat_template``, and the template's own.

        Raises:
            DataError: there is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise DataError("the model has no chat template: send input, or save a template beside the model")
        try:
            text = self._tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
        except Exception as error:  # a template raises what it likes
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return str(text)

    def check(self, tokens: Sequence[int]) -> None:
        """Refuses what no forward pass could compute.

        Raises:
            DataError: no tokens, too many, or ids that the model does not have.
        """
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
        """What vLLM makes of logits by default: by ``problem_type``, else sigmoid of one, softmax of several."""
        problem = self._model.config.problem_type
        if problem == "regression":
            return logits
        values = torch.tensor(logits)
        several = len(logits) > 1 and problem != "multi_label_classification"
        activated: list[float] = (values.softmax(-1) if several else values.sigmoid()).tolist()
        return activated

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logits of each sequence, in order: one forward pass.

        Args:
            sequences: token ids, checked. Where ``batches`` is false: all of one length or just one.
        """
        lengths = torch.tensor([len(tokens) for tokens in sequences])
        longest = int(lengths.max())
        # Under a causal mask any id pads; 0 is one that every vocabulary has.
        pad_id = self._pad_id if self._pad_id is not None else 0
        rows = [[*tokens, *[pad_id] * (longest - len(tokens))] for tokens in sequences]
        ids = torch.tensor(rows, device=self._device)
        values = self._causal(ids, lengths) if self._unmasked else self._masked(ids, lengths)
        result: list[list[float]] = values.float().tolist()
        return result

    def _masked(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask.long().to(self._device)).logits
        return logits

    def _causal(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """float[n, labels] from int64[n, L]: the head on each sequence's last token."""
        body = getattr(self._model, self._model.base_model_prefix)
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        last = self._last_tokens(ids, lengths).to(self._device)
        head: Any = self._model.score
        logits: Tensor = head(hidden[torch.arange(len(lengths), device=self._device), last])
        return logits

    def _last_tokens(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Where transformers reads a sequence: its last token that is not the padding token, wherever padding begins.

        The two differ for texts that end with the padding token, which with some tokenizers is the end-of-text token.
        """
        if self._pad_id is None:
            return lengths - 1
        places = torch.arange(ids.shape[1])
        return (places * (ids.cpu() != self._pad_id)).argmax(-1)

    @torch.inference_mode()
    def _is_causal(self) -> bool:
        """Whether the head's value of a short sequence is the same with other tokens behind it."""
        probe = (torch.arange(1, 17, device=self._device) * 7 % self._vocabulary)[None]
        alone = self._causal_at(probe[:, :8], 7)
        followed = self._causal_at(probe, 7)
        scale = max(1.0, float(alone.abs().max()))
        return bool((alone - followed).abs().max() <= _SAME * scale)

    def _causal_at(self, ids: Tensor, place: int) -> Tensor:
        body = getattr(self._model, self._model.base_model_prefix)
        hidden: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[:, place]


def _load_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.source, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:  # tokenizers fail to load with every kind of exception, their own Rust ones included
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
    except Exception as error:  # loading meets the network, the disk, other people's code and the memory's limit
        raise _unloadable("classifier", settings.source, error) from error
    if report["missing_keys"]:
        # transformers would fill them with random numbers and go on.
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigurationError(
            f"--model {settings.source} has no weights for {missing}: it is no trained sequence classifier. Name a "
            "model that was saved as …ForSequenceClassification"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _max_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The model's own limit and the tokenizer's, whichever is lower."""
    positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNBOUNDED_TOKENS)
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding id: two places of the table are never used.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions -= int(module.padding_idx) + 1
    return min(positions, int(min(tokenizer.model_max_length, _UNBOUNDED_TOKENS)))


def _unloadable(what: str, source: str, error: Exception) -> ConfigurationError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ConfigurationError(
        f"--model {source}: no {what} could be loaded from it ({first_line}). Give the id of a model on the hub that "
        "this machine can reach, or a folder with config.json, the weights and the tokenizer's files"
    )
