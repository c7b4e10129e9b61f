"""Hold the chat template and the parser of tool calls for one list of tools: requests bring their own tools."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from plaudit_workers.rollout.agents.chat.suffix import ChatSuffix
from plaudit_workers.rollout.agents.chat.tool_calls import ToolCallParser
from plaudit_workers.rollout.agents.endpoint.history import tools_key
from plaudit_workers.tokenizer import ChatTemplate

_MOST_KEPT = 64


@dataclass(frozen=True)
class ChatFormat:
    """Render and parse conversations with the same tools."""

    template: ChatTemplate
    suffix: ChatSuffix
    parser: ToolCallParser | None
    """None: there are no tools."""


class ChatFormats:
    """Keep the chat formats of recent requests.

    Args:
        arguments: ``model.chatTemplateArguments``.
        parser: name of vLLM's parser.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any], parser: str) -> None:
        self.tokenizer = tokenizer
        self._arguments = arguments
        self._parser = parser
        self._kept: OrderedDict[str, ChatFormat] = OrderedDict()

    def of(self, tools: Sequence[dict[str, Any]]) -> ChatFormat:
        """Return the chat format of a list of tools.

        Raises:
            RefusedError: there is no such parser, or it does not suit the tokenizer.
        """
        key = tools_key(tools)
        found = self._kept.pop(key, None)
        if found is None:
            template = ChatTemplate(self.tokenizer, tools, self._arguments)
            parser = ToolCallParser(self._parser, self.tokenizer, tools) if tools else None
            found = ChatFormat(template, ChatSuffix(template), parser)
        self._kept[key] = found
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decode a turn with the special tokens that parsers look for, without its end and its stop text."""
        ended = bool(ids) and ids[-1] in self.tokenizer.all_special_ids
        text = str(self.tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=False))
        places = [place for place in map(text.find, stop) if place >= 0]
        return text[: min(places, default=len(text))]
