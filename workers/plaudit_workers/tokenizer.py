"""Load the policy's tokenizer and apply its chat template. Imports transformers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from plaudit_wire.errors import RefusedError
from plaudit_wire.printable import shown

if TYPE_CHECKING:
    from plaudit_job.spec.algorithm import ModelSpec


def load_tokenizer(model: ModelSpec, *, only_here: bool = False) -> PreTrainedTokenizerBase:
    """Load ``model.tokenizer`` (default: the one in ``model.source``), with ``model.chatTemplate``.

    Args:
        only_here: download nothing.
    """
    source = model.tokenizer or model.source
    revision = model.tokenizer_revision if model.tokenizer else model.revision
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=model.trust_remote_code, local_files_only=only_here
        )
        if model.chat_template:
            with open(model.chat_template, encoding="utf-8") as file:
                tokenizer.chat_template = file.read()
        with_model_ends(tokenizer, model.source, model.revision, only_here=only_here)
    # Tokenizers fail to load with every kind of exception, their own Rust ones included.
    except Exception as error:
        field = "model.tokenizer" if model.tokenizer else "model.source"
        raise RefusedError(loading_message("tokenizer", field, source, error)) from error
    return tokenizer


_MODEL_ENDS = "_plaudit_model_ends"
"""Attribute of a tokenizer: the ends of sequences that its model's own files name."""
TOOL_SELECTION = "tool_selection"
"""The key of ``extra_info`` with the names of the tools that a row may use."""
_THOUGHT_MARKS = "_plaudit_thought_marks"
"""Attribute of a tokenizer: the special tokens that open or close a thought, such as Magistral's ``[/THINK]``."""
_CALL_SYNTAX = re.compile("tool|call|function|think|python|arg", re.IGNORECASE)


def with_model_ends(tokenizer: Any, source: str, revision: str, *, only_here: bool = False) -> Any:
    """Return the tokenizer, with the tokens that the files of its model name as ends, and those that mark thoughts."""
    setattr(tokenizer, _MODEL_ENDS, _model_ends(source, revision, only_here))
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()  # vLLM's tokenizer for Mistral has none
    marks = frozenset(number for number, token in added if token.special and "think" in token.content.lower())
    setattr(tokenizer, _THOUGHT_MARKS, marks)
    return tokenizer


def _model_ends(source: str, revision: str, only_here: bool) -> frozenset[int]:
    """Return ``eos_token_id`` of the model's generation_config.json, else of its config.json, as vLLM reads them.

    A config.json of several parts, such as Gemma 3's, names it in ``text_config``.
    """
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: JSON that is no object
            path = cached_file(source, name, revision=revision, local_files_only=only_here)
            config = json.loads(Path(path or "").read_text(encoding="utf-8"))
            for part in (config, config.get("text_config") or {}):
                ends = part.get("eos_token_id")
                if ends is not None:
                    return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


def engine_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which the engine ends a turn: the tokenizer's and the model's ends of sequences."""
    own = tokenizer.eos_token_id
    return frozenset(getattr(tokenizer, _MODEL_ENDS, ())) | ({own} if isinstance(own, int) else frozenset())


def text_of(tokenizer: Any, ids: Sequence[int], *, whole: bool = False) -> str:
    """Decode a response without special tokens, and without the token that ended it, which may be none of them.

    Special tokens that mark a thought stay: without them the thought would be a part of the answer. A prompt
    (``whole``) keeps all of its tokens.
    """
    if whole:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    own = ids[:-1] if ids and ids[-1] in engine_ends(tokenizer) else ids
    marks: frozenset[int] = getattr(tokenizer, _THOUGHT_MARKS, frozenset())
    if marks.isdisjoint(own):
        return str(tokenizer.decode(own, skip_special_tokens=True))
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} - marks
    return str(tokenizer.decode([number for number in own if number not in special], skip_special_tokens=False))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text at the end of a turn.

    Beside the engine's these are the special tokens, one of which may be a stop text, such as ``<|eom_id|>``; but not
    those that close a call or a thought.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = (number for number, token in added if token.special and not _CALL_SYNTAX.search(token.content))
    return engine_ends(tokenizer) | frozenset((*tokenizer.all_special_ids, *special))


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
    def of_model(cls, model: ModelSpec, tools: Sequence[dict[str, Any]], *, only_here: bool = False) -> ChatTemplate:
        """Load the template of a job's model: trainer and rollouts render with the same arguments.

        Args:
            only_here: download nothing.
        """
        return cls(load_tokenizer(model, only_here=only_here), tools, model.chat_template_arguments)

    def for_row(self, extra_info: dict[str, Any]) -> ChatTemplate:
        """Return the template with those tools alone that a row names in verl's ``tool_selection``; else this one.

        Raise ``ValueError`` for a selection of anything but this template's tools.
        """
        names = extra_info.get(TOOL_SELECTION)
        if not names or not self.tools:
            return self
        tools = {str(tool["function"]["name"]): tool for tool in self.tools}
        if not isinstance(names, list) or not all(isinstance(name, str) and name in tools for name in names):
            raise ValueError(f"extra_info.{TOOL_SELECTION} is {shown(names)}; the agent's tools are {', '.join(tools)}")
        return ChatTemplate(self.tokenizer, [tools[name] for name in dict.fromkeys(names)], self._arguments)

    def render(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str:
        """Return messages as text, with ``generate`` up to the policy's next turn. Raise ``TemplateError``."""
        return self._rendered(messages, generate=generate)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return messages as the text that the policy continues; a last message of the assistant is left open.

        Raise ``TemplateError``, or ``ValueError`` for a template that changes the last message.
        """
        last = messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            return self.render(messages, generate=True)
        return self._rendered(messages, generate=False, continued=True)

    def _rendered(self, messages: Sequence[dict[str, Any]], *, generate: bool, continued: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=self.tools or None,
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=continued,
            **self._arguments,
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; the template writes its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
