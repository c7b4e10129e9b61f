"""Rows of data files as others write them, and prompts of a measured difficulty."""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import math

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from builders import make_prompt
from chat_tokenizer import chat_tokenizer
from plaudit_job.spec.rollout import PassRateSpec, TrainDataSpec
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import encode
from plaudit_workers.launch.data_checks import data_problem
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.data import PromptData
from plaudit_workers.training.prompts import PromptRenderer

RATES = [0.0, 0.05, 0.5, 0.95, 1.0, 1]


@pytest.fixture
def template(model_folder):
    return PromptRenderer(ChatTemplate(AutoTokenizer.from_pretrained(model_folder)))


@pytest.fixture
def write(tmp_path):
    def write(infos):
        path = tmp_path / "train.jsonl"
        rows = [
            {"data_source": "a", "prompt": f"{n}=", "reward_model": {"ground_truth": str(n)}, "extra_info": info}
            for n, info in enumerate(infos)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_rows_outside_the_bounds_are_left_out_and_the_order_is_the_same_at_every_start(write, template):
    path = write([{"pass_rate": rate} for rate in RATES])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(min=0.05, max=0.95))
    starts = [PromptData.load(section, template, seed=3) for _ in range(2)]
    orders = [[data.prompt_at(position).row for position in range(6)] for data in starts]
    assert orders[0] == orders[1]
    assert sorted(orders[0][:3]) == sorted(orders[0][3:]) == [1, 2, 3]
    assert starts[0].selection.left_out == 3


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "add", "run")]


@pytest.mark.parametrize(
    ("selection", "shown"),
    [
        (["add", "run"], ["add", "run"]),
        (["run", "add", "run"], ["run", "add"]),
        ([], ["search", "add", "run"]),
        (None, ["search", "add", "run"]),
    ],
)
def test_the_prompt_of_a_row_shows_the_tools_that_it_selects(tmp_path, selection, shown):
    tokenizer = chat_tokenizer()
    [prompt] = _rendered(tmp_path, PromptRenderer(ChatTemplate(tokenizer, TOOLS)), selection)
    assert prompt == ChatTemplate(tokenizer, [tool_named(name) for name in shown]).prompt(CHAT)


@pytest.mark.parametrize("selection", ["add", ["add", "sum"], [["add"]], {"add": True}, 1])
def test_a_row_that_selects_what_is_no_tool_is_refused_by_number(tmp_path, selection):
    renderer = PromptRenderer(ChatTemplate(chat_tokenizer(), TOOLS))
    with pytest.raises(RefusedError, match=r"row 1: extra_info\.tool_selection is .*the agent's tools are search, add"):
        _rendered(tmp_path, renderer, selection)


def test_a_selection_means_nothing_to_a_job_without_tools(tmp_path):
    tokenizer = chat_tokenizer()
    assert _rendered(tmp_path, PromptRenderer(ChatTemplate(tokenizer)), ["add"]) == [
        ChatTemplate(tokenizer).prompt(CHAT)
    ]


CHAT = [{"role": "user", "content": "Look it up."}]


def tool_named(name):
    return next(tool for tool in TOOLS if tool["function"]["name"] == name)


def _rendered(tmp_path, renderer, selection):
    """Return the prompts of a file with one row."""
    path = tmp_path / "train.parquet"
    row = {"data_source": "a", "prompt": CHAT, "reward_model": {"ground_truth": "1"}}
    info = {} if selection is None else {"extra_info": json.dumps({"tool_selection": selection})}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | info]), path)
    data = PromptData.load(TrainDataSpec(path=str(path)), renderer, seed=1)
    return [data.prompt_at(0).prompt_text]


@pytest.mark.parametrize("value", [None, "0.5", 1.5, -0.1, True])
def test_a_row_without_a_pass_rate_is_refused_by_number(write, template, value):
    path = write([{"solved": 0.5}, {"solved": value} if value is not None else {}])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(field="solved"))
    with pytest.raises(RefusedError, match=r"row 2: extra_info\['solved'\] is .*data.train.passRate requires"):
        PromptData.load(section, template, seed=0)


def test_bounds_without_any_prompt_are_refused(write, template):
    path = write([{"pass_rate": rate} for rate in RATES])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(min=0.6, max=0.7))
    with pytest.raises(RefusedError, match=r"Widen data\.train\.passRate"):
        PromptData.load(section, template, seed=0)
    with pytest.raises(ValidationError, match=r"min 0\.8 is above max 0\.2"):
        PassRateSpec(min=0.8, max=0.2)


def parquet(path, extra_infos, truths=None, prompts=None):
    """Write rows as Arrow types them; a column is an Arrow array or Python values."""
    number = len(extra_infos)
    truths = truths or ["1"] * number
    columns = {
        "data_source": ["a"] * number,
        "prompt": prompts or [f"{n}=" for n in range(number)],
        "reward_model": [{"ground_truth": truth} for truth in truths],
        "extra_info": extra_infos,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
READ = {
    "integers of 64 bits": ([{"n": 2**63 - 1}], {"n": 2**63 - 1}),
    "unsigned": (pyarrow.array([{"n": 2**64 - 1}], pyarrow.struct({"n": pyarrow.uint64()})), {"n": 2**64 - 1}),
    "a time": ([{"t": NOON}], {"t": "2026-01-02T12:00:00+00:00"}),
    "a decimal": ([{"p": decimal.Decimal("1.20")}], {"p": "1.20"}),
    "a day": ([{"d": datetime.date(2026, 1, 2)}], {"d": "2026-01-02"}),
    "half a float": (pyarrow.array([{"x": 1.5}], pyarrow.struct({"x": pyarrow.float16()})), {"x": 1.5}),
    "NaN": ([{"x": math.nan}], {"x": None}),
    "a map": (pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())), {"k": 1}),
    "categories": (
        pyarrow.StructArray.from_arrays([pyarrow.array(["x"]).dictionary_encode()], ["c"]),
        {"c": "x"},
    ),
    "JSON as bytes": ([b'{"n": [1, null]}'], {"n": [1, None]}),
    "null": (pyarrow.array([None], pyarrow.null()), {}),
}


@pytest.mark.parametrize(("column", "extra_info"), READ.values(), ids=READ)
def test_what_parquet_can_hold_is_read_as_plain_data(tmp_path, template, column, extra_info):
    path = parquet(tmp_path / "train.parquet", column)
    assert data_problem("data", str(path)) is None
    row = PromptData.load(TrainDataSpec(path=str(path)), template, 0).prompt_at(0)
    assert row.extra_info == extra_info
    encode(make_prompt(extra_info=row.extra_info, ground_truth=row.ground_truth))


NANOSECONDS = pyarrow.array([1], pyarrow.timestamp("ns"))
DEEP = functools.reduce(lambda inner, _: [inner], range(100), 1)
JSON_ROW = '{{"data_source": "a", "prompt": "1=", "reward_model": {{"ground_truth": {}}}, "extra_info": {}}}'
REFUSED_TABLES = {
    "an integer in JSON text": (
        ['{"n": [0, 12345678901234567890123]}'],
        "row 1: column extra_info.n[1] is an integer beyond 64 bits (12345678901234567890123). Write it as text",
    ),
    "bytes": ([{"b": b"\xff\x00"}], "row 1: column extra_info.b is bytes: b'\\xff\\x00'. Write text, such as base64"),
    "infinity": ([{"x": 0.5}, {"x": math.inf}], "row 2: column extra_info.x is inf, which JSON cannot hold"),
    "nanoseconds": (
        pyarrow.StructArray.from_arrays([NANOSECONDS], ["t"]),
        "row 1: column extra_info cannot be read (ValueError: ",
    ),
    "text that is no UTF-8": (
        pyarrow.StructArray.from_arrays([pyarrow.array([b"\xff"]).view(pyarrow.string())], ["s"]),
        "row 1: column extra_info cannot be read (UnicodeDecodeError: ",
    ),
    "a list": ([[1]], "row 1: column extra_info is [1]. Give a mapping"),
    "deep JSON text": ([json.dumps(DEEP)], "levels deep. Give flatter data"),
}
REFUSED_LINES = {
    "a truth beyond 64 bits": (
        JSON_ROW.format(10**30, "{}"),
        "row 1: column reward_model.ground_truth is an integer beyond 64 bits",
    ),
    "infinity": (JSON_ROW.format("Infinity", "{}"), "line 1: is not JSON"),
    "an object over many lines": (json.dumps({"data_source": "a"}, indent=1), "one JSON object a line, as jq -c does"),
    "an array": ("[1]", "line 1: is no JSON object"),
    "a deep row": ("[" * 100_000, "line 1: is nested more than 64 levels deep"),
    "a deep truth": (JSON_ROW.format(json.dumps(DEEP), "{}"), "is nested more than 64 levels deep. Give flatter data"),
    "no source": (JSON_ROW.format(1, "{}").replace('"a"', "null"), "row 1: column data_source is None"),
    "contents of null": (
        JSON_ROW.format(1, "{}").replace('"1="', '[{"role": "user", "content": null}]'),
        "row 1: column prompt[0].content is None. Give each prompt as messages",
    ),
    "a number as contents": (
        JSON_ROW.format(1, "{}").replace('"1="', '[{"role": "user", "content": 5}]'),
        "row 1: column prompt[0].content is 5",
    ),
    "a number as calls": (
        JSON_ROW.format(1, "{}").replace('"1="', '[{"role": "assistant", "content": "a", "tool_calls": 5}]'),
        "row 1: column prompt[0].tool_calls is 5. Give a list of {function: {name, arguments}}",
    ),
    "a text as a call": (
        JSON_ROW.format(1, "{}").replace(
            '"1="', '[{"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}]'
        ),
        "row 1: column prompt[0].tool_calls[0] is {'function': 'f'}",
    ),
}


@pytest.mark.parametrize(
    ("rows", "words"), [*REFUSED_TABLES.values(), *REFUSED_LINES.values()], ids=[*REFUSED_TABLES, *REFUSED_LINES]
)
def test_what_the_trainer_refuses_validate_finds(tmp_path, template, rows, words):
    if isinstance(rows, str):
        path = tmp_path / "train.jsonl"
        path.write_text(rows + "\n")
    else:
        path = parquet(tmp_path / "train.parquet", rows)
    problem = data_problem("data", str(path))
    with pytest.raises(RefusedError) as refused:
        PromptData.load(TrainDataSpec(path=str(path)), template, 0)
    assert problem is not None
    assert words in str(problem)
    assert str(refused.value) == f"data file {path}: {str(problem).removeprefix(f'data: {path}: ')}"


def test_the_nulls_of_a_table_are_no_keys_of_messages(tmp_path, template):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "1="}, call, {"role": "tool", "content": "2", "name": "f"}]
    template.template.tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | sort }}{% endfor %}"
    path = parquet(tmp_path / "train.parquet", [None], prompts=[messages])
    row = PromptData.load(TrainDataSpec(path=str(path)), template, 0).prompt_at(0)
    assert row.messages == messages
    assert row.prompt_text == "['content', 'role']['content', 'role', 'tool_calls']['content', 'name', 'role']"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, template):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + JSON_ROW.format(1, "{}").encode() + b"\r\n\r\n")
    assert data_problem("data", str(path)) is None
    assert len(PromptData.load(TrainDataSpec(path=str(path)), template, 0)) == 1


def test_a_last_message_of_the_assistant_is_continued(tmp_path, template):
    template.template.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    messages = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "Let me think.\n"}]
    path = tmp_path / "train.jsonl"
    path.write_text(JSON_ROW.format(1, "{}").replace('"1="', json.dumps(messages)))
    row = PromptData.load(TrainDataSpec(path=str(path)), template, 0).prompt_at(0)
    assert row.prompt_text == "<user>1=</><assistant>Let me think.\n"
    assert row.messages == messages


def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(tmp_path, template):
    tokenizer = template.template.tokenizer
    tokenizer.bos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 14)])
    path = tmp_path / "train.jsonl"
    path.write_text("".join(JSON_ROW.format(1, "{}").replace("1=", text) + "\n" for text in ("7=", "<eos>7=")))
    data = PromptData.load(TrainDataSpec(path=str(path), shuffle=False), template, 0)
    assert [list(memoryview(data.prompt_at(number).prompt_ids).cast("i")) for number in range(2)] == [[14, 7, 10]] * 2


@pytest.mark.parametrize(
    ("template_text", "error"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].content[0].text | length + messages.x.y }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_whatever_a_chat_template_raises_is_the_rows_refusal(tmp_path, template, template_text, error):
    template.template.tokenizer.chat_template = template_text
    parts = [{"role": "user", "content": [{"type": "text", "text": "1="}]}]
    path = parquet(tmp_path / "train.parquet", [None], prompts=[parts])
    with pytest.raises(RefusedError, match=rf"row 1: the chat template refuses these messages \({error}: "):
        PromptData.load(TrainDataSpec(path=str(path)), template, 0)
