"""Token exactness: over the chat templates of model families, ids that only grow equal the conversation's own ids.

The templates are short forms of the families' own: the same special tokens, the same places of calls and results.
"""

from __future__ import annotations

import json
import os
import random
from typing import NamedTuple

import pytest

from chat_tokenizer import CHATML, SPECIAL, chat_tokenizer
from conversations import conversation, sampled, words
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.rollout.agents.chat import ChatSuffix, decoded_turn, tool_call, tool_message
from plaudit_workers.tokenizer import ChatTemplate, load_tokenizer, text_of

CONVERSATIONS = int(os.environ.get("PLAUDIT_EXAMPLES", "40"))

_CALLS = (
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '\\n' }}"
    "{{- call.function.arguments | tojson }}{{- '</tool_call>' }}{%- endfor %}"
)


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    eos: str


def _of(body: str, opening: str, *special: str, eos: str) -> Family:
    """A template from the body of its loop over messages ``m`` and the opening of an assistant's turn."""
    template = "{%- for m in messages %}" + body + "{%- endfor %}{%- if add_generation_prompt %}{{- '" + opening
    return Family(template + "' }}{%- endif %}", special, eos)


FAMILIES = {
    "qwen2.5": Family(CHATML, SPECIAL, "<|im_end|>"),
    "llama3": _of(
        "{%- set role = 'ipython' if m.role == 'tool' else m.role %}"
        "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
        '{%- if m.tool_calls %}{%- for call in m.tool_calls %}{{- \'{"name": "\' + call.function.name }}'
        "{{- '\", \"parameters\": ' }}{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}"
        "{%- elif m.role == 'tool' %}{{- {'output': m.content} | tojson }}"
        "{%- else %}{{- m.content | trim }}{%- endif %}"
        "{{- '<|eot_id|>' }}",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        eos="<|eot_id|>",
    ),
    "mistral": _of(
        "{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
        "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}"
        "{{- '[TOOL_RESULTS]' }}{{- {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
        "{{- '[/TOOL_RESULTS]' }}"
        "{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}{{- call.function | tojson }}"
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}"
        "{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}",
        "",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "</s>",
        eos="</s>",
    ),
    "deepseek": _of(
        "{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}"
        "{%- elif m.role == 'tool' %}{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}"
        "{%- else %}{%- if loop.first or messages[loop.index0 - 1].role == 'user' %}{{- '<|Assistant|>' }}{%- endif %}"
        "{{- m.content }}" + _CALLS + "{{- '<|end_of_sentence|>' }}{%- endif %}",
        "' + ('<|Assistant|>' if messages[-1].role == 'user' else '') + '",
        "<|User|>",
        "<|Assistant|>",
        "<|tool_output_begin|>",
        "<|tool_output_end|>",
        "<|end_of_sentence|>",
        eos="<|end_of_sentence|>",
    ),
    "glm4": _of(
        "{%- if m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}"
        "{{- '<|observation|>' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}" + _CALLS + "{%- endif %}",
        "<|assistant|>\\n",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        eos="<|user|>",
    ),
    "granite": _of(
        "{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + m.content }}"
        + _CALLS
        + "{{- '<|end_of_text|>\\n' }}",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
        eos="<|end_of_text|>",
    ),
    "command": _of(
        "{{- '<|START_OF_TURN_TOKEN|>' }}"
        "{%- if m.role == 'tool' %}{{- '<|SYSTEM_TOKEN|><results>\\n' + m.content + '</results>' }}"
        "{%- else %}{{- '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' }}"
        "{{- m.content }}" + _CALLS + "{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        eos="<|END_OF_TURN_TOKEN|>",
    ),
    "phi4": _of(
        "{{- '<|' + m.role + '|>' + m.content }}" + _CALLS + "{{- '<|end|>' }}",
        "<|assistant|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|end|>",
        eos="<|end|>",
    ),
    "gemma": _of(
        "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
        + _CALLS
        + "{{- '<end_of_turn>\\n' }}",
        "<start_of_turn>model\\n",
        "<start_of_turn>",
        "<end_of_turn>",
        eos="<end_of_turn>",
    ),
}

QWEN3_THINKING = CHATML.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}",
    "{%- set earlier = message.role == 'assistant' and not loop.last %}"
    "{%- set text = message.content.split('</think>')[-1].lstrip('\\n') if earlier else message.content %}"
    "{{- '<|im_start|>' + message.role + '\\n' + text }}",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_that_only_grow_equal_the_whole_conversations(name: str) -> None:
    family = FAMILIES[name]
    template = ChatTemplate(chat_tokenizer(family.template, family.special, family.eos))
    suffix, draw = ChatSuffix(template), random.Random(name)
    for _ in range(CONVERSATIONS):
        messages = [{"role": "user", "content": words(draw)}]
        ids = template.encode(template.render(messages, generate=True))
        for message, *follows in conversation(draw):
            turn = sampled(template, messages, message, family.eos)
            ids += turn
            if "tool_calls" in message:
                ids += suffix.after_calls(message["tool_calls"], follows, turn[-1])
            else:
                ids += suffix.after_answer(follows, turn[-1])
            messages += [message, *follows]
            assert ids == template.encode(template.render(messages, generate=True))


def test_a_turn_that_ended_at_a_stop_text_gets_its_end_from_the_suffix() -> None:
    template = ChatTemplate(chat_tokenizer())
    call, result = tool_call("look_up", {"key": "a"}, 0), tool_message("look_up", "value", 0)
    written = template.encode('<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>')
    found = ChatSuffix(template).after_calls([call], [result], written[-1])
    assert template.tokenizer.decode(found).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nvalue\n")


@pytest.mark.parametrize("registered", [True, False])
def test_a_turn_that_ended_with_another_token_than_the_template_writes_is_not_ended_twice(registered) -> None:
    family = FAMILIES["llama3"]
    tokenizer = chat_tokenizer(family.template, family.special, family.eos)
    if registered:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    call, result = tool_call("look_up", {"key": "a"}, 0), tool_message("look_up", "value", 0)
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    found = ChatSuffix(ChatTemplate(tokenizer)).after_calls([call], [result], eom)
    assert tokenizer.decode(found).startswith("<|start_header_id|>ipython")
    assert decoded_turn(tokenizer, [*tokenizer("1")["input_ids"], eom]) == "1"


def test_the_ends_that_the_models_files_name_end_turns_and_call_syntax_does_not(tmp_path) -> None:
    tokenizer = chat_tokenizer(special=[*SPECIAL, "</tool_call>"])
    tokenizer.add_tokens(["[done]"])  # a token like any other
    tokenizer.save_pretrained(tmp_path)
    done, call = tokenizer.convert_tokens_to_ids(["[done]", "</tool_call>"])
    written = tokenizer("1")["input_ids"]
    ends = {"eos_token_id": [tokenizer.eos_token_id, done]}
    for name, config, text in (
        ("config.json", {}, "1[done]"),
        ("config.json", {"text_config": ends}, "1"),
        ("config.json", ends, "1"),
        ("generation_config.json", [], "1"),  # no object: config.json counts
        ("generation_config.json", ends, "1"),
    ):
        (tmp_path / name).write_text(json.dumps(config))
        loaded = load_tokenizer(ModelSpec(source=str(tmp_path)))
        assert decoded_turn(loaded, [*written, done]) == text
        assert text_of(loaded, [*written, done]) == text
    assert text_of(loaded, [done, *written]) == "[done]1"
    assert text_of(loaded, []) == ""
    assert decoded_turn(loaded, [*written, call]) == "1</tool_call>"
    found = ChatSuffix(ChatTemplate(loaded)).after_answer([{"role": "user", "content": "a1b"}], done)
    assert loaded.decode(found) == "\n<|im_start|>user\na1b<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_that_mark_a_thought_stay_in_the_response(tmp_path) -> None:
    chat_tokenizer(special=[*SPECIAL, "[THINK]", "[/THINK]"]).save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelSpec(source=str(tmp_path)))
    ids = loaded("[THINK]15<|im_start|>[/THINK]12<|im_end|>", add_special_tokens=False)["input_ids"]
    assert text_of(loaded, ids) == "[THINK]15[/THINK]12"


def test_a_template_whose_end_of_turn_does_not_end_the_engines_turn_is_reported() -> None:
    template = ChatTemplate(chat_tokenizer(eos="<|endoftext|>"))
    remark = ChatSuffix(template).check("look_up")
    assert "ends a turn with '<|im_end|>', which is no end of a sequence" in remark
    stop_token = template.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ChatSuffix(template).check("look_up", stop=["<|im_end|>"]) == ""
    assert ChatSuffix(template).check("look_up", stop=[stop_token]) == ""
    for family in FAMILIES.values():
        silent = ChatTemplate(chat_tokenizer(family.template, family.special, family.eos))
        assert "which is no end of a sequence" not in ChatSuffix(silent).check("look_up")


def test_a_result_that_imitates_the_marker_changes_nothing_else() -> None:
    template = ChatTemplate(chat_tokenizer())
    call, result = tool_call("look_up", {}, 0), tool_message("look_up", "zq7mark value zq7mark", 0)
    found = ChatSuffix(template).after_calls([call], [result], template.tokenizer.eos_token_id)
    assert "zq7mark value zq7mark" in template.tokenizer.decode(found)


def test_a_template_that_drops_reasoning_is_reported_and_one_without_tools_is_refused() -> None:
    assert ChatSuffix(ChatTemplate(chat_tokenizer())).check("look_up") == ""
    remark = ChatSuffix(ChatTemplate(chat_tokenizer(QWEN3_THINKING))).check("look_up")
    assert "drops the reasoning of earlier turns" in remark
    no_tools = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    with pytest.raises(RefusedError, match="does not render tool results"):
        ChatSuffix(ChatTemplate(chat_tokenizer(no_tools + "{% endfor %}"))).check("look_up")


def test_calls_are_rendered_in_the_form_that_the_template_expects() -> None:
    """DeepSeek's template concatenates the arguments as text, and takes calls only where the content is None."""
    concatenating = CHATML.replace("call.function.arguments | tojson", "call.function.arguments").replace(
        "'\\n' + message.content }}", "'\\n' + (message.content if message.content is not none else '') }}"
    )
    template = ChatTemplate(chat_tokenizer(concatenating))
    call, result = tool_call("look_up", {"key": "a"}, 0), tool_message("look_up", "value", 0)
    found = ChatSuffix(template).after_calls([call, call], [result, result], template.tokenizer.eos_token_id)
    assert template.tokenizer.decode(found).startswith("\n<|im_start|>user\n<tool_response>\nvalue\n")


def test_an_end_that_the_template_writes_otherwise_in_history_is_not_written_twice() -> None:
    """gpt-oss ends its answer with <|return|>, and the template writes <|end|> for it once another message follows."""
    body = "{{- '<|start|>' + m.role + '<|message|>' + m.content }}{{- '<|return|>' if ends else '<|end|>' }}"
    body = "{%- set ends = loop.last and m.role == 'assistant' %}" + body
    special = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|endoftext|>")
    family = _of(body, "<|start|>assistant", *special, eos="<|return|>")
    template = ChatTemplate(chat_tokenizer(family.template, family.special, family.eos))
    for end in ("<|return|>", "<|endoftext|>"):
        last = template.tokenizer.convert_tokens_to_ids(end)
        found = ChatSuffix(template).after_answer([{"role": "user", "content": "more"}], last)
        assert template.tokenizer.decode(found) == "<|start|>user<|message|>more<|end|><|start|>assistant"


_GEMMA4 = _of(
    "{%- if m.role == 'tool' %}{{- '<|tool_response>' + m.content + '<tool_response|>' }}"
    "{%- elif m.tool_calls %}{{- '<|turn>model\\n' }}{%- for call in m.tool_calls %}"
    "{{- '<|tool_call>' + call.function.name }}{{- call.function.arguments | tojson }}"
    "{{- '<tool_call|>' }}{%- endfor %}"
    "{%- else %}{{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{%- endif %}",
    "' + ('' if messages[-1].role == 'tool' else '<|turn>model\\n') + '",
    *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    eos="<|tool_response>",
)
_GLM45 = Family(
    FAMILIES["glm4"].template, (*FAMILIES["glm4"].special, "<tool_call>", "</tool_call>"), "<|observation|>"
)


@pytest.mark.parametrize("family", [_GEMMA4, _GLM45], ids=["gemma4", "glm4.5"])
def test_an_end_of_turn_that_opens_the_results_of_tools_is_not_written_twice(family: Family) -> None:
    """GLM ends a turn with calls by <|observation|>, Gemma 4 by <|tool_response>, right behind the call's own token."""
    template = ChatTemplate(chat_tokenizer(family.template, family.special, family.eos))
    call, result = tool_call("look_up", {"key": "a"}, 0), tool_message("look_up", "value", 0)
    user, message = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = [*template.encode(template.render([user, message], generate=False)), template.tokenizer.eos_token_id]
    ids += ChatSuffix(template).after_calls([call], [result], ids[-1])
    assert ids == template.encode(template.render([user, message, result], generate=True))
