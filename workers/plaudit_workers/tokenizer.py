"""Load the policy's tokenizer and apply its chat template. Imports transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from plaudit_wire.errors import RefusedError

if TYPE_CHECKING:
    from plaudit_job.spec.algorithm import ModelSpec


def load_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """Load ``model.tokenizer`` (default: the one in ``model.source``), with ``model.chatTemplate``."""
    source = model.tokenizer or model.source
    revision = model.tokenizer_revision if model.tokenizer else model.revision
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=model.trust_remote_code
        )
        if model.chat_template:
            with open(model.chat_template, encoding="utf-8") as file:
                tokenizer.chat_template = file.read()
    # Tokenizers fail to load with every kind of exception, their own Rust ones included.
    except Exception as error:
        field = "model.tokenizer" if model.tokenizer else "model.source"
        raise RefusedError(loading_message("tokenizer", field, source, error)) from error
    return tokenizer


def loading_message(what: str, field: str, source: str, error: Exception) -> str:
    """Return the message of a model or tokenizer that cannot be loaded."""
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return (
        f"{field} is {source!r}: the {what} cannot be loaded ({first_line}). Give the id of a model on the hub "
        "that this machine can reach, or a folder with config.json, the weights and the tokenizer's files"
    )


class ChatTemplate:
    """Render with a tokenizer's chat template, and the job's tools and arguments.

    Args:
        tools: descriptions of the tools in OpenAI's format; empty for none.
        arguments: ``model.chatTemplateArguments``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = (), arguments: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self._arguments = dict(arguments or {})

    @classmethod
    def of_model(cls, model: ModelSpec, tools: Sequence[dict[str, Any]]) -> ChatTemplate:
        """Load the template of a job's model: trainer and rollouts render with the same arguments."""
        return cls(load_tokenizer(model), tools, model.chat_template_arguments)

    def render(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str:
        """Return messages as text, with ``generate`` up to the policy's next turn. Raise ``TemplateError``."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=self.tools or None, tokenize=False, add_generation_prompt=generate, **self._arguments
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; the template writes its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
