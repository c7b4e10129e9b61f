"""Token exactness over the model families' own chat templates, as TRL's wheel carries them.

A tokenizer made here gets each template. For random conversations, the suffix that a rollout appends between two turns
must be what the template writes there; where the template keeps the history as it was, the ids that only grew must
also read as the whole conversation does.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from trainer_environments import CACHE, python

from chat_tokenizer import chat_tokenizer
from conversations import conversation, sampled, words, written
from plaudit_workers.rollout.agents.chat import ChatSuffix
from plaudit_workers.tokenizer import ChatTemplate

FAMILIES = {
    "cohere2_training": ("<|END_OF_TURN_TOKEN|>", 0),
    "deepseekv3": ("<\uff5cend\u2581of\u2581sentence\uff5c>", 0),
    "gemma3_training": ("<end_of_turn>", 0),
    "gemma4_v4": ("<turn|>", 3),
    "glm4moe_training": ("<|user|>", 3),
    "gptoss_training": ("<|return|>", 1),
    "lfm2_v2_training": ("<|im_end|>", 3),
    "llama3_1": ("<|eot_id|>", 1),
    "llama3_training": ("<|eot_id|>", 0),
    "nemotron_3_nano_training": ("<|im_end|>", 3),
    "qwen2_5": ("<|im_end|>", 3),
    "qwen3": ("<|im_end|>", 3),
    "qwen3_training": ("<|im_end|>", 3),
    "qwen3_5_nothink_training": ("<|im_end|>", 3),
    "qwen3_5_think": ("<|im_end|>", 3),
    "qwen3_8_training": ("<|im_end|>", 3),
    "qwen3_vl_training": ("<|im_end|>", 3),
}
"""Template → the token that ends an answer, and the most calls of a turn (0: a template without tools, or DeepSeek's,
which does not open the results of a second round of calls)."""

REWRITING = {"deepseekv3", "glm4moe_training", "nemotron_3_nano_training", "qwen3", "qwen3_5_think"}
"""Templates that drop reasoning of earlier turns."""

CONVERSATIONS = int(os.environ.get("PLAUDIT_EXAMPLES", "10000")) // len(FAMILIES) + 1
_SPECIAL = re.compile(
    r"<[|\uff5c][^<>\s{}]{1,40}?(?:[|\uff5c]>|>)|<[a-z_]{3,20}[|]>|<(?:start_of_turn|end_of_turn|bos|eos)>"
)


def load(name: str) -> ChatTemplate:
    """Return a family's template with a tokenizer that has its special tokens."""
    if python("trl") is None:
        pytest.skip(f"the environment trl is not built in {CACHE}: make trainers-build")
    (folder,) = Path(CACHE, "trl", "lib").glob("python3*/site-packages/trl/chat_templates")
    text, end = (folder / f"{name}.jinja").read_text(), FAMILIES[name][0]
    special = sorted({*_SPECIAL.findall(text), end, "<bos>"})
    properties = {
        "key": {"type": "string", "description": "a key"},
        "n": {"type": "integer", "description": "a number"},
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "A tool.", "parameters": parameters}}
        for n in range(3)
    ]
    return ChatTemplate(chat_tokenizer(text, special, end, bos="<bos>"), tools if FAMILIES[name][1] else [])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_appended_is_what_the_template_writes(name: str) -> None:
    template, (end, most_calls) = load(name), FAMILIES[name]
    suffix, draw, decode = ChatSuffix(template), random.Random(name), template.tokenizer.decode
    same, differences = 0, []
    for _ in range(CONVERSATIONS):
        messages = [{"role": "user", "content": words(draw)}]
        ids = template.encode(template.render(messages, generate=True))
        for message, *follows in conversation(draw, most_calls):
            keeps = written(template, messages, message) is not None
            turn = sampled(template, messages, message, end) if keeps else template.encode(f"x{end}")
            last = turn[-1]
            calls = message.get("tool_calls")
            new = suffix.after_calls(calls, follows, last) if calls else suffix.after_answer(follows, last)
            messages += [message, *follows]
            whole = template.render(messages, generate=True)
            ids = ids + turn + new
            text = decode(new)
            if not whole.endswith(text) or _holds_the_turn(text, message) or not _holds_all(text, follows):
                differences.append((text[-200:], whole[-300:]))
            if decode(ids) == whole:
                same += 1
            elif name not in REWRITING and _as_history(decode(ids), end) != whole:
                differences.append((decode(ids)[-300:], whole[-300:]))
            ids = template.encode(whole)  # a difference is reported once
    assert differences[:2] == []
    assert same or name in REWRITING


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_that_drop_reasoning_are_detected(name: str) -> None:
    assert ChatSuffix(load(name)).rewrites_history() == (name in REWRITING)


def test_a_template_without_tools_is_refused_with_the_remedy() -> None:
    with pytest.raises(Exception, match="does not render tool results"):
        ChatSuffix(load("gemma3_training")).check("tool_0")
    assert ChatSuffix(load("gemma3_training")).check("") == ""


def _holds_the_turn(text: str, message: dict) -> bool:
    # Short contents may also be those of the messages that follow.
    return len(message["content"] or "") > 9 and str(message["content"]) in text


def _holds_all(text: str, follows: list[dict]) -> bool:
    # The longest run of letters: templates escape and strip the others.
    return all(max(re.findall(r"[a-z0-9]+", each["content"]), key=len) in text for each in follows)


def _as_history(text: str, end: str) -> str:
    """Return the text as gpt-oss's template writes it in history: <|end|> for the <|return|> that was sampled."""
    return text.replace(end, "<|end|>") if end == "<|return|>" else text
