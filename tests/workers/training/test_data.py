"""Data: verl's columns from either format, endless epochs by position, files that are wrong told in words."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import chat_tokenizer
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rollout import DataSpec, TrainDataSpec, ValidationDataSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.data_checks import data_problem
from plaudit_workers.tokenizer import ChatTemplate, load_tokenizer
from plaudit_workers.training import prompts
from plaudit_workers.training.data import LENGTHS_FILE, PromptData
from plaudit_workers.training.prompts import PromptRenderer


@pytest.fixture
def tokenizer(model_folder):
    return load_tokenizer(ModelSpec(source=str(model_folder)))


def row(number, prompt=None):
    return {
        "data_source": "copy",
        "prompt": [{"role": "user", "content": f"{number}="}] if prompt is None else prompt,
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"index": number},
    }


def write(folder, rows, suffix):
    path = folder / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def load(path, tokenizer, seed=1, **section):
    return PromptData.load(TrainDataSpec(path=path, **section), PromptRenderer(ChatTemplate(tokenizer)), seed)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_row_in_verls_columns_becomes_a_prompt(tmp_path, tokenizer, suffix):
    data = load(write(tmp_path, [row(number) for number in range(3)], suffix), tokenizer, shuffle=False)
    prompt = data.prompt_at(1)
    assert len(data) == 3
    assert (prompt.row, prompt.data_source, prompt.ground_truth) == (1, "copy", "1")
    assert prompt.extra_info == {"index": 1}
    assert prompt.messages == [{"role": "user", "content": "1="}]
    assert prompt.prompt_text == "u1=a"
    assert np.frombuffer(prompt.prompt_ids, "<i4").tolist() == [11, 1, 10, 12]


def test_prompts_are_rendered_with_the_jobs_template_and_its_arguments(tmp_path, model_folder):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}u{{ m.content }}{% endfor %}{% if enable_thinking %}1{% else %}0{% endif %}"
    )
    path = write(tmp_path, [row(7)], ".jsonl")
    for arguments, text in (({}, "u7=0"), ({"enable_thinking": True}, "u7=1")):
        model = ModelSpec(
            source=str(model_folder),
            chat_template=str(tmp_path / "chat.jinja"),
            chat_template_arguments=arguments,
        )
        data = PromptData.load(TrainDataSpec(path=path), PromptRenderer(ChatTemplate.of_model(model, [])), 1)
        assert data.prompt_at(0).prompt_text == text


def test_messages_without_a_chat_template_get_the_tokenizers_own_special_tokens(tmp_path, tokenizer):
    rows = [row(7, [{"role": "user", "content": "7="}]), row(7, "7=")]
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 14)])
    data = load(write(tmp_path, rows, ".jsonl"), tokenizer, shuffle=False)
    for number in range(2):
        assert np.frombuffer(data.prompt_at(number).prompt_ids, "<i4").tolist() == [14, 7, 10]


def test_a_prompt_may_be_text_and_columns_may_hold_nothing(tmp_path, tokenizer):
    rows = [{**row(7, "7="), "reward_model": {"ground_truth": None}, "extra_info": None}]
    prompt = load(write(tmp_path, rows, ".jsonl"), tokenizer).prompt_at(0)
    assert (prompt.prompt_text, prompt.messages, prompt.ground_truth, prompt.extra_info) == ("7=", [], None, {})
    assert np.frombuffer(prompt.prompt_ids, "<i4").tolist() == [7, 10]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_extra_info_may_be_json_text(tmp_path, tokenizer, suffix):
    rows = [{**row(7), "extra_info": text} for text in ('{"index": 3}', "null", "")]
    data = load(write(tmp_path, rows, suffix), tokenizer, shuffle=False)
    assert [data.prompt_at(position).extra_info for position in range(3)] == [{"index": 3}, {}, {}]


def test_extra_info_of_another_kind_is_refused_by_row(tmp_path, tokenizer):
    rows = [row(7), {**row(8), "extra_info": "[1"}]
    with pytest.raises(
        RefusedError, match=r"data.jsonl: row 2: column extra_info is not JSON \(.*\)\. Give one JSON value"
    ):
        load(write(tmp_path, rows, ".jsonl"), tokenizer)


def test_without_a_chat_template_contents_are_joined(tmp_path, tokenizer):
    tokenizer.chat_template = None
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2="}]
    assert load(write(tmp_path, [row(0, messages)], ".jsonl"), tokenizer).prompt_at(0).prompt_text == "1\n2="


def test_every_epoch_holds_every_prompt_in_an_order_of_its_own(tmp_path, tokenizer):
    path = write(tmp_path, [row(number) for number in range(20)], ".parquet")
    data = load(path, tokenizer)
    orders = [[data.prompt_at(epoch * 20 + place).row for place in range(20)] for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != list(range(20))
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != [load(path, tokenizer, seed=2).prompt_at(place).row for place in range(20)]


def test_a_position_alone_determines_the_prompt(tmp_path, tokenizer):
    path = write(tmp_path, [row(number) for number in range(20)], ".parquet")
    forward, backward = load(path, tokenizer), load(path, tokenizer)
    rows = [forward.prompt_at(position).row for position in range(70)]
    assert [backward.prompt_at(position).row for position in reversed(range(70))] == rows[::-1]


def test_the_order_of_a_seed_never_changes(tmp_path, tokenizer):
    """A run resumed by a later release must go on with the same prompts."""
    data = load(write(tmp_path, [row(number) for number in range(8)], ".jsonl"), tokenizer, seed=5)
    assert [data.prompt_at(position).row for position in range(8)] == [7, 4, 3, 5, 6, 2, 0, 1]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [row(0, "1" * length) for length in (3, 9, 5, 10)]
    data = load(write(tmp_path, rows, ".jsonl"), tokenizer, max_prompt_length=5)
    assert (len(data), data.selection.left_out) == (2, 2)
    assert sorted(data.prompt_at(position).row for position in range(2)) == [0, 2]


@pytest.fixture
def tokenized(monkeypatch):
    """Collect the texts that tokenizers are given."""
    texts, call = [], PreTrainedTokenizerFast.__call__

    def collect(tokenizer, given, **how):
        texts.extend(given)
        return call(tokenizer, given, **how)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", collect)
    return texts


def test_a_second_start_of_a_run_tokenizes_what_changed_and_has_the_same_prompts(tmp_path, tokenized):
    rows = [row(0, [{"role": "user", "content": "the " * (number % 7)}]) for number in range(200)]
    path = write(tmp_path, rows, ".jsonl")

    def start(max_length):
        tokenized.clear()
        data = DataSpec(train=TrainDataSpec(path=path, max_prompt_length=max_length))
        loaded = PromptData.for_training(data, PromptRenderer(ChatTemplate(chat_tokenizer())), 1, tmp_path)
        return loaded.selection.too_long, len(tokenized), [loaded.prompt_at(position) for position in range(150)]

    too_long, count, admitted = start(24)
    assert (too_long, count) == (84, 200)
    assert start(24) == (too_long, 0, admitted)
    assert start(26)[:2] == (56, 200)  # how a long prompt is counted depends on the limit
    write(tmp_path, [*rows[:-1], row(0, "the")], ".jsonl")
    assert start(26)[:2] == (56, 200 - 128)
    (tmp_path / LENGTHS_FILE).write_bytes(b"not lengths")
    assert start(26)[:2] == (56, 200)


@pytest.mark.parametrize(
    ("normalizer", "spared"),
    [(None, 4), (normalizers.Sequence([normalizers.NFC()]), 3), (normalizers.Replace("a", "aaa"), 0)],
)
def test_rows_that_fit_for_certain_are_tokenized_when_they_are_used(
    tmp_path, monkeypatch, tokenized, normalizer, spared
):
    monkeypatch.setattr(prompts, "_COUNTED_ROWS", 0)
    texts = ["", "a", "äöü a", " ", "the the", "\U0001d15e", "x" * 12, "x" * 13, "the " * 9]
    path = write(tmp_path, [row(number, text) for number, text in enumerate(texts)], ".jsonl")
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    section = TrainDataSpec(path=path, max_prompt_length=12, shuffle=False)
    starts, counts = [], []
    for lengths in (None, prompts.PromptLengths(ChatTemplate(tokenizer), 12, None)):
        tokenized.clear()
        data = PromptData.load(section, PromptRenderer(ChatTemplate(tokenizer)), 0, known=lengths)
        counts.append(len(tokenized))
        starts.append((data.selection.left_out_by(), [data.prompt_at(position) for position in range(len(data))]))
    assert starts[0] == starts[1]
    assert counts == [9, 9 - spared]


def test_validation_keeps_the_order_of_the_file_and_the_length_limit(tmp_path, tokenizer):
    path = write(tmp_path, [row(number, "1" * number) for number in range(1, 9)], ".jsonl")
    section = DataSpec(train=TrainDataSpec(path=path, max_prompt_length=6), validation=ValidationDataSpec(path=path))
    data = PromptData.for_validation(section, PromptRenderer(ChatTemplate(tokenizer)))
    assert data is not None
    assert [data.prompt_at(position).row for position in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert (
        PromptData.for_validation(DataSpec(train=TrainDataSpec(path=path)), PromptRenderer(ChatTemplate(tokenizer)))
        is None
    )


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named_with_the_file_and_the_remedy(tmp_path, tokenizer, suffix, column):
    rows = [{name: value for name, value in row(0).items() if name != column} | {"question": "?"}]
    path = write(tmp_path, rows, suffix)
    with pytest.raises(RefusedError, match=rf"data{suffix}.*lacks column {column} \(it has .*question"):
        load(path, tokenizer)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no rows"),
        (b'{"data_source": "a", "prompt": "1", "reward_model": {"ground_truth": 1}}\n{broken\n', "line 2: is not JSON"),
        (b'["a list"]\n', "line 1: is no JSON object"),
        (b'{"data_source": "a", "prompt": 7, "reward_model": {"ground_truth": 1}}\n', "row 1: column prompt is 7"),
        (
            b'{"data_source": "a", "prompt": [{"content": "no role"}], "reward_model": {"ground_truth": 1}}\n',
            "row 1: column prompt\\[0\\] is ",
        ),
        (
            b'{"data_source": "a", "prompt": "", "reward_model": {"ground_truth": 1}}\n',
            r"none of its 1 prompts can be used: 1 without a token\. They have 0 tokens each",
        ),
    ],
)
def test_a_bad_jsonl_file_is_reported_by_line(tmp_path, tokenizer, content, words):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(RefusedError, match=words):
        load(str(tmp_path / "data.jsonl"), tokenizer)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_images_are_refused_and_not_left_out(tmp_path, tokenizer, suffix):
    path = write(tmp_path, [row(1, "<image> what is it?") | {"images": [{"path": "cat.png"}]}], suffix)
    with pytest.raises(RefusedError, match=r"has column images\. Set spec\.data\.images to train"):
        load(path, tokenizer)
    assert "has column images" in str(data_problem("spec.data.train.path", path))


def test_a_part_of_a_message_that_is_an_image_is_refused_by_row(tmp_path, tokenizer):
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "what is it?"}]
    path = write(tmp_path, [row(1, [{"role": "user", "content": parts}])], ".jsonl")
    with pytest.raises(
        RefusedError, match=r"row 1: column prompt\[0\]\.content\[0\] is .*contents are text, and images where"
    ):
        load(path, tokenizer)


def test_a_row_without_a_ground_truth_is_reported_by_row(tmp_path, tokenizer):
    path = write(tmp_path, [{**row(0), "reward_model": {"truth": 1}}], ".jsonl")
    with pytest.raises(RefusedError, match=r"row 1: column reward_model is .*Give each row {ground_truth"):
        load(path, tokenizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.parquet", r"does not exist\. Write the data first"),
        ("s3:/bucket/train.parquet", r"does not exist\. Rows are read from files of this machine: download them"),
        ("data.csv", "ends with '.csv'. Give a file that ends"),
    ],
)
def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path, tokenizer, name, words):
    (tmp_path / "data.csv").touch()
    with pytest.raises(RefusedError, match=words):
        load(str(tmp_path / name), tokenizer)


def test_a_file_that_only_has_the_name_of_parquet_is_refused(tmp_path, tokenizer):
    (tmp_path / "data.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(RefusedError, match="is not a Parquet file"):
        load(str(tmp_path / "data.parquet"), tokenizer)


def test_messages_that_the_chat_template_refuses_are_reported_by_row(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(RefusedError, match=r"row 1: the chat template refuses .*no system messages"):
        load(write(tmp_path, [row(0)], ".jsonl"), tokenizer)
