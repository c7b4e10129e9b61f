"""Parse the turns of gpt-oss, which are written in OpenAI's Harmony format.

A turn consists of messages, each in a channel; one with a recipient calls a tool::

    <|channel|>analysis<|message|>I should look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a"}<|call|>

vLLM's own parser of this name works only inside its server, with an encoding that is downloaded.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NAME = "openai"
"""The parser's name, as for vLLM's ``--tool-call-parser``."""

_MESSAGE = re.compile(
    r"(?P<header>[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>(?P<content>.*?)"
    r"(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+?)(?=\s|<|$)")
_HIDDEN = "<|channel|>analysis"


class HarmonyTurn(NamedTuple):
    """Hold a turn of the policy."""

    content: str
    """What a user reads: all messages without a recipient but those of the channel ``analysis``."""
    calls: list[tuple[str, str]]
    """Name and arguments, as JSON, of each call."""


def parse_harmony(text: str) -> HarmonyTurn:
    """Split a turn into its messages; text in another format has no calls and stays as it is."""
    content, calls = [], []
    for message in _MESSAGE.finditer(text):
        recipient = _RECIPIENT.search(message["header"])
        if recipient:
            calls.append((recipient[1], message["content"]))
        elif _HIDDEN not in message["header"]:
            content.append(message["content"])
    if not calls and not content and "<|message|>" not in text:
        return HarmonyTurn(text, [])
    return HarmonyTurn("\n".join(content), calls)
