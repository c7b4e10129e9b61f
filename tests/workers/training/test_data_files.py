"""Data as other tools write it: formats, folders, patterns and columns, each read from a file as the tool leaves it.

pandas writes a column of dictionaries as structs and keeps an index; ``datasets`` saves Arrow streams beside a
state.json, writes JSON lines under .json, and gives every message the keys of all; polars writes Arrow files.
"""

from __future__ import annotations

import gzip
import json
import math
import os

import pyarrow
import pyarrow.parquet
import pytest

from plaudit_job.spec.rollout import ColumnsSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.data_files import RowError, RowForm, checked_rows


def row(number, **fields):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
        **fields,
    }


ROWS = [row(number) for number in range(3)]
LINES = "".join(json.dumps(each) + "\n" for each in ROWS)


def table(rows=ROWS):
    return pyarrow.Table.from_pylist(rows)


def parquet(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table(rows), path)


def saved(folder, rows=ROWS):
    """Write what ``Dataset.save_to_disk`` writes."""
    folder.mkdir()
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table().schema) as stream:
        stream.write_table(table(rows))
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "f", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def polars_file(path):
    with pyarrow.ipc.new_file(path, table().schema) as file:
        file.write_table(table())


def compressed(path):
    with pyarrow.output_stream(path, compression="zstd") as stream:
        stream.write(LINES.encode())


def in_pieces(folder):
    for number in range(3):
        parquet(folder / f"train-0000{number}-of-00003.parquet", ROWS[number : number + 1])
    (folder / "README.md").write_text("a card")


WRITTEN = {
    "Parquet": ("rows.parquet", parquet),
    "JSON lines": ("rows.jsonl", lambda path: path.write_text(LINES)),
    "lines of polars": ("rows.ndjson", lambda path: path.write_text(LINES)),
    "lines of datasets": ("rows.json", lambda path: path.write_text(LINES)),
    "an array": ("rows.json", lambda path: path.write_text(json.dumps(ROWS))),
    "an array over lines": ("rows.json", lambda path: path.write_text(json.dumps(ROWS, indent=2))),
    "an array below a key": ("rows.json", lambda path: path.write_text(json.dumps({"data": ROWS}))),
    "Windows": ("rows.jsonl", lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode())),
    "gzip": ("rows.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES.encode()))),
    "zstd": ("rows.jsonl.zst", compressed),
    "Arrow": ("rows.arrow", polars_file),
    "save_to_disk": ("rows", saved),
    "a folder of shards": ("shards", in_pieces),
}


@pytest.mark.parametrize(("name", "write"), WRITTEN.values(), ids=WRITTEN)
def test_the_same_rows_are_read_whatever_wrote_them(tmp_path, name, write):
    write(tmp_path / name)
    found = list(checked_rows(tmp_path / name))
    assert [each.row.ground_truth for each in found] == ["1", "2", "3"]
    assert [each.row.extra_info for each in found] == [{"index": number} for number in range(3)]
    assert found[0].row.prompt == [{"role": "user", "content": "0 + 1 ="}]


def test_a_pattern_names_the_shards_of_one_split_in_order(tmp_path):
    in_pieces(tmp_path)
    parquet(tmp_path / "test-00000-of-00001.parquet")
    found = list(checked_rows(tmp_path / "train-*.parquet"))
    assert [(each.path.name[:11], each.number) for each in found] == [(f"train-0000{number}", 1) for number in range(3)]
    with pytest.raises(RowError, match=r"holds files of several splits: test, train\. Name those of one"):
        list(checked_rows(tmp_path))


REFUSED = {
    "a dataset of splits": (lambda path: (path / "dataset_dict.json").write_text("{}"), "dataset of several splits"),
    "no data": (lambda path: (path / "notes.txt").write_text("x"), "holds no data file"),
    "kinds": (
        lambda path: [parquet(path / "a.parquet"), (path / "b.jsonl").write_text(LINES)],
        "several kinds: .jsonl",
    ),
    "another state.json": (lambda path: (path / "state.json").write_text("[]"), "has a state.json that save_to_disk"),
}


@pytest.mark.parametrize(("write", "words"), REFUSED.values(), ids=REFUSED)
def test_a_folder_that_is_not_one_kind_of_rows_is_refused(tmp_path, write, words):
    write(tmp_path)
    with pytest.raises(RowError, match=words):
        list(checked_rows(tmp_path))


@pytest.mark.long
def test_a_small_file_that_unpacks_to_one_huge_line_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", 1) as packed:
        packed.writelines([b"x" * (1 << 20)] * 257)
    with pytest.raises(RefusedError, match=r"rows.jsonl.gz has a line above 256 MiB: write one JSON object a line"):
        list(checked_rows(path))


BROKEN = {
    "columns of pandas": (
        "a.json",
        json.dumps({"prompt": {"0": "1"}, "data_source": {"0": "a"}}),
        "no rows, but columns",
    ),
    "UTF-16": ("a.jsonl", LINES.encode("utf-16"), "is UTF-16 text. Write it again as UTF-8"),
    "no gzip": ("a.jsonl.gz", "no gzip", "cannot be read"),
    "no Arrow": ("a.arrow", "no arrow", "is not an Arrow file"),
    "Python's text": (
        "a.jsonl",
        json.dumps(row(1, prompt=str(ROWS[0]["prompt"]))),
        "row 1: column prompt is text that begins like messages, but is not JSON",
    ),
}


@pytest.mark.parametrize(("name", "content", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_written_wrongly_is_refused_with_the_remedy(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RowError) as refused:
        list(checked_rows(tmp_path / name))
    assert words in str(refused.value)


@pytest.mark.parametrize("write", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_an_arrow_file_that_is_cut_while_it_is_read_is_refused(tmp_path, write):
    rows, path = table([row(number, extra_info={"a": "x" * 10_000}) for number in range(200)]), tmp_path / "a.arrow"
    with write(path, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)
    read = checked_rows(path)
    next(read)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RowError, match=r"a\.arrow: (cannot be read|is not an Arrow file)"):
        list(read)


def test_two_columns_of_a_name_are_refused(tmp_path):
    twice = table()
    both = pyarrow.Table.from_arrays([*twice.columns, twice.column("prompt")], names=[*twice.column_names, "prompt"])
    pyarrow.parquet.write_table(both, tmp_path / "a.parquet")
    with pytest.raises(RowError, match="has several columns prompt"):
        list(checked_rows(tmp_path / "a.parquet"))


def test_messages_and_rewards_may_be_json_text(tmp_path):
    parquet(
        tmp_path / "a.parquet",
        [
            row(
                number, prompt=json.dumps(ROWS[number]["prompt"]), reward_model=json.dumps(ROWS[number]["reward_model"])
            )
            for number in range(3)
        ],
    )
    found = [each.row for each in checked_rows(tmp_path / "a.parquet")]
    assert [(each.prompt[0]["content"], each.ground_truth) for each in found] == [
        (f"{number} + 1 =", str(number + 1)) for number in range(3)
    ]


def test_parts_of_text_become_a_text_and_padding_is_dropped_at_every_depth(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps(row(0, prompt=messages)))
    (found,) = checked_rows(tmp_path / "a.jsonl")
    assert found.row.prompt == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    ]


def test_nested_columns_are_read_as_they_were_written(tmp_path):
    values = [
        {"steps": [{"at": [1, 2], "by": "ä"}, None], "scores": []},
        {"steps": None, "scores": [0.5, None]},
        None,
        {"steps": [], "scores": None},
        {"steps": [{"at": [], "by": None}], "scores": [1.0]},
    ]
    written = table([row(number, extra_info=value) for number, value in enumerate(values)])
    large = pyarrow.large_list(written.schema.field("prompt").type.value_type)
    written = written.set_column(1, "prompt", written["prompt"].cast(large))
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", written.schema) as file:
        file.write_table(written)
        file.write_table(written.slice(3))  # its offsets do not begin at 0
    pyarrow.parquet.write_table(written, tmp_path / "a.parquet")
    found = [each.row for each in checked_rows(tmp_path / "a.arrow")]
    assert [each.extra_info for each in found] == [value or {} for value in [*values, *values[3:]]]
    assert [each.prompt for each in found[:5]] == [row(number)["prompt"] for number in range(5)]
    assert [each.row for each in checked_rows(tmp_path / "a.parquet")] == found[:5]


def test_nan_which_pythons_json_writes_is_null(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row(0, extra_info={"x": math.nan, "y": [1, math.nan]})))
    (found,) = checked_rows(tmp_path / "a.jsonl")
    assert found.row.extra_info == {"x": None, "y": [1, None]}


ASKED = [{"role": "user", "content": "1 + 1 ="}]
OTHER_COLUMNS = {
    "TRL": (
        {"prompt": ASKED, "answer": "2", "level": 3},
        ColumnsSpec(ground_truth="answer"),
        {"answer": "2", "level": 3},
    ),
    "TRL's completion": (
        {"prompt": ASKED, "completion": [{"role": "assistant", "content": "2"}]},
        ColumnsSpec(ground_truth="completion", extra_info=["level"]),
        {"level": 3},
    ),
    "OpenAI": (
        {"messages": [*ASKED, {"role": "assistant", "content": "2"}]},
        ColumnsSpec(prompt="messages", ground_truth="messages"),
        {"level": 3},
    ),
    "verl": (
        {"prompt": ASKED, "reward_model": {"ground_truth": "2"}, "extra_info": {"a": 1}},
        ColumnsSpec(),
        {"a": 1, "level": 3},
    ),
}


@pytest.mark.parametrize(("fields", "columns", "extra_info"), OTHER_COLUMNS.values(), ids=OTHER_COLUMNS)
def test_other_columns_are_read_by_their_names(tmp_path, fields, columns, extra_info):
    (tmp_path / "sums.jsonl").write_text(json.dumps({"level": 3, **fields}))
    (found,) = checked_rows(tmp_path / "sums.jsonl", RowForm(columns))
    assert (found.row.data_source, found.row.prompt, found.row.ground_truth) == ("sums", ASKED, "2")
    assert found.row.extra_info == extra_info


def test_the_columns_of_other_trainers_are_recognised_in_the_refusal(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "1 + 1 =", "answer": "2"}))
    with pytest.raises(RowError, match=r"set spec\.data\.columns: \{prompt: question, groundTruth: answer\}"):
        list(checked_rows(tmp_path / "a.jsonl"))
    with pytest.raises(RowError, match=r"lacks column solution \(it has question, answer\)\. Correct data\.columns"):
        list(checked_rows(tmp_path / "a.jsonl", RowForm(ColumnsSpec(prompt="question", ground_truth="solution"))))


def test_a_conversation_without_an_answer_has_no_truth_to_take(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ASKED}))
    with pytest.raises(RowError, match="row 1: column messages does not end with a message of the assistant"):
        list(checked_rows(tmp_path / "a.jsonl", RowForm(ColumnsSpec(prompt="messages", ground_truth="messages"))))


def test_a_conversation_in_another_form_is_shown_with_the_form_that_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"from": "human", "value": "1"}, {"from": "gpt"}]}))
    with pytest.raises(RowError, match=r"messages\[1\] is {'from': 'gpt'}\. Give each prompt as messages \(\[{role"):
        list(checked_rows(tmp_path / "a.jsonl", RowForm(ColumnsSpec(prompt="messages", ground_truth="messages"))))
