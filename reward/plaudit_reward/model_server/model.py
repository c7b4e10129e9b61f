"""Load a sequence classifier of transformers, tokenise, and compute logits of many sequences in one forward pass.

Of the server's modules, only this one, ``packed`` and ``onednn`` import torch and transformers.

The logits equal those of ``model(**tokenizer(text))`` for each sequence alone. Sequences of a pass are packed where the
model allows it; else they are padded, with an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from plaudit_reward.model_server.onednn import use_onednn
from plaudit_reward.model_server.packed import enable_packing, packed_logits
from plaudit_reward.model_server.settings import ModelSettings
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ENOUGH_ON_CPU = 2048
_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
_UNBOUNDED_TOKENS = 1_000_000
"""Tokenizers without a limit report 1e30."""


class Classifier:
    """Load a model with its tokenizer and compute with it.

    Raises:
        ConfigurationError: the model cannot be loaded, or is no classifier.
    """

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
        logger.info("loaded on %s, %s", self._device, "packed" if self.packs else "padded")

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

        Raises:
            DataError: there is no template, it fails on these messages, or a variable is an argument of
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
