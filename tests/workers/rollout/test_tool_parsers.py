"""vLLM's tool parsers by name, over text as the model families write it, and templates with one call a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import episodes
from chat_tokenizer import CHATML, SPECIAL, chat_tokenizer
from plaudit_wire.errors import RefusedError
from plaudit_workers.agents.messages import FunctionTool
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.chat import ChatSuffix
from plaudit_workers.rollout.agents.tool_calls import ParsedTurn, ToolCallParser, opens_reasoning
from plaudit_workers.rollout.agents.tools import ToolAgent, ToolLimits
from plaudit_workers.rollout.vllm_arguments import prepare_environment
from plaudit_workers.tokenizer import ChatTemplate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM and torch warn when they are imported


def tool(name: str, **types: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


TOOLS = [tool("get_weather", city="string", days="integer"), tool("get_time", zone="string")]
CALLS = [("get_weather", {"city": "Paris", "days": 2}), ("get_time", {"zone": "UTC"})]
FIRST, SECOND = '{"city": "Paris", "days": 2}', '{"zone": "UTC"}'
JSON = (
    f'{{"name": "get_weather", "arguments": {FIRST}}}',
    f'{{"name": "get_time", "arguments": {SECOND}}}',
)
LIST = f"[{JSON[0]}, {JSON[1]}]"
PYTHON = 'get_weather(city="Paris", days=2)', 'get_time(zone="UTC")'
HERMES = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in JSON)
QWEN_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n"
    "</tool_call>"
)
DSML = "\uff5cDSML\uff5c"


def deepseek(text: str) -> str:
    """Write DeepSeek's marks: a full-width bar, and a lower block for a space."""
    return text.replace("|", "\uff5c").replace("_", "\u2581").replace("get\u2581", "get_")


WRITTEN = {
    "hermes": f"I look.\n{HERMES}",
    "qwen3_json": f"I look.\n{HERMES}",
    "qwen3_coder": f"I look.\n{QWEN_XML}",
    "qwen3_xml": f"I look.\n{QWEN_XML}",
    "llama3_json": "; ".join(JSON).replace("arguments", "parameters"),
    "llama4_pythonic": f"<|python_start|>[{', '.join(PYTHON)}]<|python_end|>",
    "pythonic": f"[{', '.join(PYTHON)}]",
    "olmo3": "<function_calls>" + "\n".join(PYTHON) + "</function_calls>",
    "mistral": f"I look.\n[TOOL_CALLS]{LIST}",
    "granite": f"I look.\n<|tool_call|>{LIST}",
    "phi4_mini_json": f"functools{LIST}",
    "xlam": LIST,
    "deepseek_v3": "I look.\n"
    + deepseek("<|tool_calls_begin|>")
    + "\n".join(
        deepseek(f"<|tool_call_begin|>function<|tool_sep|>{name}")
        + f"\n```json\n{arguments}\n```"
        + deepseek("<|tool_call_end|>")
        for name, arguments in (("get_weather", FIRST), ("get_time", SECOND))
    )
    + deepseek("<|tool_calls_end|>"),
    "deepseek_v31": "I look.\n"
    + deepseek("<|tool_calls_begin|>")
    + "".join(
        deepseek(f"<|tool_call_begin|>{name}<|tool_sep|>") + arguments + deepseek("<|tool_call_end|>")
        for name, arguments in (("get_weather", FIRST), ("get_time", SECOND))
    )
    + deepseek("<|tool_calls_end|>"),
    "deepseek_v32": f'I look.\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
    f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
    f'<{DSML}invoke name="get_time">\n<{DSML}parameter name="zone" string="true">UTC</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}function_calls>",
    "glm45": "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n"
    "<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>",
    "kimi_k2": "I look.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{FIRST}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
    f"<|tool_call_argument_begin|>{SECOND}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": 'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n<parameter name="zone">'
    "UTC</parameter>\n</invoke>\n</minimax:tool_call>",
    "openai": "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{FIRST}<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{SECOND}",
}
"""Parser → a turn of its model that calls both tools."""
MARKS = {
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "qwen": ["<tool_call>", "</tool_call>"],
    "glm45": ["<tool_call>", "</tool_call>"],
    "granite": ["<|tool_call|>"],
    "deepseek": [
        deepseek(f"<|tool_{mark}|>") for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
    ],
    "kimi": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>"],
}
"""Beginning of a parser's name → special tokens that its model's tokenizer has."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    prepare_environment("")  # as a rollout does before it imports vLLM


@pytest.mark.parametrize("name", WRITTEN)
def test_a_family_writes_two_calls_and_both_are_parsed(name: str) -> None:
    marks = [mark for start, marks in MARKS.items() if name.startswith(start) for mark in marks]
    tokenizer = chat_tokenizer(special=[*SPECIAL, *marks])
    parser = ToolCallParser(name, tokenizer, TOOLS)
    ids = tokenizer(WRITTEN[name], add_special_tokens=False)["input_ids"]
    for _ in range(2):  # a parser serves many conversations, so it keeps no state
        turn = parser.parse(tokenizer.decode(ids, skip_special_tokens=False))
        assert [(call.name, call.arguments, call.problem) for call in turn.calls] == [(*call, "") for call in CALLS]
        assert turn.content.strip() in ("", "I look.")
    assert parser.parse("It is warm.").calls == []
    assert parser.parse("It is warm.").content == "It is warm."
    if name != "openai":  # its reasoning has a channel
        thought = f"<think>I could {WRITTEN[name]}</think>It is warm."
        assert parser.parse(thought) == ParsedTurn(thought, [])
        assert len(parser.parse(f"<think>Hm.</think>{WRITTEN[name]}").calls) == 2
    for end in range(0, len(ids), 7):  # whatever the policy writes, it is parsed or stays text
        assert len(parser.parse(tokenizer.decode(ids[:end], skip_special_tokens=False)).calls) <= 2


def written(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


F, G = written('{"name": "f", "arguments": {"x": "1"}}'), written('{"name": "g", "arguments": {"x": "<think>"}}')
BROKEN = written('{"name": "f", "arguments": {x}}')
TURNS = {
    F + G: ("", ["f", "g"]),
    f"See. {F} Done.": ("See.  Done.", ["f"]),
    '<tool_call>{"name": "f"}': ("", ["f"]),
    written('{"name": "f", "arguments": null}'): ("", ["f"]),
    F + BROKEN: (BROKEN, ["f"]),
    BROKEN + F: (BROKEN, ["f"]),
    BROKEN: (BROKEN, []),
    written('{"name": 5, "arguments": {}}'): (None, []),
    written("[" * 5000): (None, []),
    f"<think>Maybe {F}.</think>4": (None, []),
    f"Maybe {F}.</think>4": (None, []),
    f"<think>Maybe {F}.": (None, []),
    f"<reasoning>Maybe {F}.</reasoning>4": (None, []),
    f"Well. [THINK]Maybe {F}.[/THINK]4": (None, []),
    f"<think>Maybe {F}.</think>So {G}": (f"<think>Maybe {F}.</think>So ", ["g"]),
    f"Without `<think>` tags: {F}": ("Without `<think>` tags: ", ["f"]),
    f"{G}<think>Maybe {F}.</think>": (f"<think>Maybe {F}.</think>", ["g"]),
}
"""A turn, its content (None: the whole turn) and the names of its calls."""


@pytest.mark.parametrize("text", TURNS)
def test_only_valid_calls_outside_of_reasoning_are_run_and_everything_else_stays_in_the_message(text) -> None:
    parsed = ToolCallParser("hermes", None, []).parse(text)
    content, names = TURNS[text]
    assert (parsed.content, [call.name for call in parsed.calls]) == (text if content is None else content, names)


LLAMA = {
    '{"name": "get_time"}': ["get_time"],
    '{"name": "Paris"}': [],
    '{"name": "Paris", "population": 2}': [],
    '<|python_tag|>{"name": "f", "parameters": {"x": "}"}}; {"name": "f", "parameters": {x}}': ["f"],
    '{"name": "f", "parameters": {"name": "g", "arguments": {}': [],
    '{"name": "f", "parameters": {x: {"name": "g", "arguments": {}}}} {"name": "f", "arguments": null}': [],
    '{"name": "f", "parameters": {}} {"name": "get_time", "arguments": null}': ["f", "get_time"],
    '{"a":' * 5000: [],
}
"""A turn of Llama and the names of its calls."""


@pytest.mark.parametrize("text", LLAMA)
def test_llamas_calls_are_objects_with_the_name_of_a_tool_or_with_arguments(text) -> None:
    parsed = ToolCallParser("llama3_json", None, TOOLS).parse(text)
    assert [call.name for call in parsed.calls] == LLAMA[text]
    assert parsed.content == text or parsed.calls


NO_JSON = '{"name": "get_time", "arguments": {zone}}'
NO_ARGUMENTS = '{"name": "get_time"}'
TAGS = '{"name": "get_time", "arguments": {"zone": ["a]", "b"]}}'
MARKED = {
    "mistral": {
        f"[TOOL_CALLS][{JSON[0]}, {NO_JSON}]": ["get_weather"],
        f"[TOOL_CALLS] [{NO_JSON}, {JSON[0]}, 5] Done.": ["get_weather"],
        f"[TOOL_CALLS]{JSON[0]}": ["get_weather"],
        f"[TOOL_CALLS][TOOL_CALLS][{TAGS}]": ["get_time"],
        f"[TOOL_CALLS][{NO_ARGUMENTS}]": ["get_time"],
        '[TOOL_CALLS][{"name": "unknown"}]': [],
        f"[TOOL_CALLS]get_weather{FIRST}[TOOL_CALLS]get_time[ARGS]{SECOND}": ["get_weather", "get_time"],
        f"See. [TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{FIRST}": ["get_weather"],
        f"[TOOL_CALLS]get_time{{zone}}[TOOL_CALLS]get_weather{FIRST}": ["get_weather"],
        "[TOOL_CALLS]get_time": ["get_time"],
        "[TOOL_CALLS]get_time {": [],
        "[TOOL_CALLS][": [],
        f"[TOOL_CALLS][{JSON[0]}, {JSON[1][:-9]}": ["get_weather"],
        JSON[0]: [],
        f"[THINK][TOOL_CALLS][{JSON[0]}][/THINK]4": [],
        '[TOOL_CALLS][{"name": "f", "arguments": "{\\"x\\": \\"[TOOL_CALLS]get_time{}\\"}"}]': ["f"],
    },
    "xlam": {
        f"[{JSON[0]}, {NO_JSON}, {JSON[1]}]": ["get_weather", "get_time"],
        f"See.\n```json\n[{JSON[0]}, {NO_JSON}]\n```\nDone.": ["get_weather"],
        f"<tool_call>[{NO_JSON}, {TAGS}]</tool_call>": ["get_time"],
        f"<think>[{JSON[0]}]</think>[{JSON[1]}]": ["get_time"],
        f"[{NO_ARGUMENTS}]": ["get_time"],
        '[{"name": "Paris"}, {"name": "Rome"}]': [],
        "[1, 2]": [],
        f"The list is [{JSON[0]}]": [],
    },
    "phi4_mini_json": {
        f"functools[{JSON[0]}, {NO_JSON}, {JSON[1]}]": ["get_weather", "get_time"],
        f"See. functools[{TAGS}] Done.": ["get_time"],
        f"functools[{JSON[0].replace('arguments', 'parameters')}]": ["get_weather"],
        f"functools[{NO_ARGUMENTS}": ["get_time"],
        "functools[]": [],
        f"tools[{JSON[0]}]": [],
    },
}
"""Parser → turn → names of its calls: a broken call beside valid ones, brackets in arguments, arguments left out."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MARKED.items() for text in texts])
def test_a_broken_call_of_a_list_stays_text_and_the_others_are_run(name: str, text: str) -> None:
    parsed = ToolCallParser(name, None, TOOLS).parse(text)
    assert [call.name for call in parsed.calls] == MARKED[name][text]
    assert not any(call.problem for call in parsed.calls)
    assert parsed.content == text or parsed.calls
    assert (NO_JSON in text) == (NO_JSON in parsed.content)
    assert ("Done." in text) == ("Done." in parsed.content)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_long_call_is_read_wherever_the_reader_makes_its_cut(name: str) -> None:
    parser = ToolCallParser(name, None, TOOLS)
    mark, end = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS][", "]")}.get(name, ("", ""))
    rest = {"a\u00e9\u2028\U0001f600": [True, None, -12.5e-3, '\\"{'], "b": {}}
    for length in range(3940, 4056):
        arguments = {"x": "y" * length, **rest}
        call = json.dumps({"name": "get_weather", "arguments": arguments})
        parsed = parser.parse(f"See. {mark}{call}{end} Done.")
        assert [(each.name, each.arguments) for each in parsed.calls] == [("get_weather", arguments)]
        assert parsed.content == "See.  Done."
        broken = f"{mark}{call[:-9]}{end}"
        assert parser.parse(broken) == ParsedTurn(broken, [])


ARGUMENTS = st.dictionaries(
    st.text(max_size=3), st.integers(-(2**40), 2**40) | st.text(max_size=4) | st.none(), max_size=2
)


@pytest.mark.parametrize("name", MARKED)
@given(calls=st.lists(st.tuples(st.sampled_from(["get_weather", "get_time"]), ARGUMENTS), min_size=1, max_size=3))
def test_lists_that_vllm_reads_are_read_alike(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}])
    theirs = ToolParserManager.get_tool_parser(name)(chat_tokenizer(special=[*SPECIAL, "[TOOL_CALLS]"]), None)
    mark = {"mistral": "[TOOL_CALLS]", "xlam": "", "phi4_mini_json": "functools"}[name]
    text = mark + json.dumps([{"name": called, "arguments": arguments} for called, arguments in calls])
    found = [(call.name, call.arguments) for call in ToolCallParser(name, None, TOOLS).parse(text).calls]
    assert found == calls
    extracted = theirs.extract_tool_calls(text, request)
    if extracted.tool_calls:  # not where phi4's ends at a bracket of an argument
        assert [(call.function.name, json.loads(call.function.arguments)) for call in extracted.tool_calls] == found
    else:
        assert name == "phi4_mini_json"
        assert "]" in text[:-1]


def test_a_template_that_opens_the_thought_begins_every_turn_inside_of_it() -> None:
    tokenizer = chat_tokenizer()
    assert not opens_reasoning(ChatTemplate(tokenizer))
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert opens_reasoning(ChatTemplate(tokenizer))
    parser = ToolCallParser("hermes", tokenizer, [], opened=True)
    assert [len(parser.parse(text).calls) for text in (F, f"Maybe {F}</think>", f"Hm.</think>{F}")] == [0, 0, 1]


def test_the_response_template_of_a_tokenizer_is_read_as_transformers_does() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(RefusedError, match="needs a response_template in the tokenizer's configuration"):
        ToolCallParser("hf", tokenizer, TOOLS)
    call = {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": call, "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
    }
    parser = ToolCallParser("hf", tokenizer, TOOLS)
    assert [(call.name, call.arguments) for call in parser.parse(f"I look.\n{HERMES}").calls] == CALLS
    assert parser.parse("It is warm.").content == "It is warm."
    assert parser.parse("<tool_call>{").calls == []


def test_a_parser_that_works_only_in_a_server_is_refused() -> None:
    with pytest.raises(RefusedError, match="'cohere_command3' works only inside vLLM's server"):
        ToolCallParser("cohere_command3", chat_tokenizer(), TOOLS)


def test_the_answer_of_gpt_oss_is_its_final_channel() -> None:
    parser = ToolCallParser("openai", chat_tokenizer(), TOOLS)
    text = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert (parser.parse(text).content, parser.parse(text).calls) == ("Four.", [])


ONE_CALL = CHATML.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}"
    "{%- if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{%- endif %}"
    "{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without its call') }}{%- endif %}",
    1,
)
"""As gpt-oss's template: one call in a turn, and one result behind it."""
TOOL_FILE = '''
def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: what to look up
    """
    return f"value of {key}"
'''


async def test_with_a_template_of_one_call_a_turn_the_first_is_run_and_the_policy_reads_why(tmp_path) -> None:
    (tmp_path / "tools.py").write_text(TOOL_FILE)
    processes = AgentProcesses([FunctionTool(str(tmp_path / "tools.py"), "look_up")])
    tokenizer = chat_tokenizer(ONE_CALL)
    tools = await processes.open()
    template = ChatTemplate(tokenizer, [tool.schema for tool in tools])
    parser = ToolCallParser("hermes", tokenizer, template.tools)
    agent = ToolAgent(template, parser, processes, tools, ToolLimits())
    calls = "".join(
        f'<tool_call>\n{{"name": "look_up", "arguments": {{"key": "{key}"}}}}\n</tool_call>' for key in "ab"
    )
    try:
        _, body = await episodes.play(agent, tokenizer, calls, "Done.")
    finally:
        await processes.close()
    first, result, last = body.sample.completion
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"key": "a"}]
    assert result["content"] == "value of a\nError: only the first call of a turn is run"
    assert last["content"] == "Done."
    assert [call.outcome for call in body.generation.turns[0].calls] == ["ok", "refused"]
    assert not agent.suffix.renders_parallel_calls
    assert ChatSuffix(ChatTemplate(chat_tokenizer(), template.tools)).renders_parallel_calls
