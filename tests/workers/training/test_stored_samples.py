"""Stored samples read back as what the groups were."""

from __future__ import annotations

import json
import os

import msgspec
import pyarrow.parquet
import pytest

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import GroupRecord
from plaudit_workers.stored_samples import store_groups


def records_of(groups):
    return {
        group.id: GroupRecord(
            group.id, "train", 12, "trained", len(group.samples), 2, 1.0, 2.5, terminal=1.8, ready=1.9, taken=2.0
        )
        for group in groups
    }


def test_one_row_a_sample_with_texts_scores_times_and_versions(make_groups, tmp_path):
    groups = make_groups([[0.25, None], [1.0, 0.5]])
    path = store_groups(tmp_path, 12, 1, groups, records_of(groups))
    assert path.name == "step-000012-i1.parquet"
    assert os.listdir(tmp_path) == [path.name]
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [(row["group"], row["index"]) for row in rows] == [(g.id, i) for g in groups for i in (0, 1)]
    first, second = rows[0], rows[1]
    assert (first["step"], first["incarnation"], first["end"]) == (12, 1, "trained")
    assert (first["prompt"], first["response"]) == ("12=", groups[0].samples[0].body.sample.response)
    assert json.loads(first["ground_truth_json"]) == "12"
    assert (first["score"], first["outcome"], first["scorer/mine/value"]) == (0.25, "scored", 0.25)
    assert (second["score"], second["outcome"], second["reason"]) == (None, "timeout", "too slow")
    assert second["scorer/mine/value"] is None
    assert (first["admitted_at"], first["committed_at"], first["group_closed_at"]) == (1.0, 1.7, 2.5)
    assert first["score_first_taken_at"] is None
    assert (first["version_max"], json.loads(first["version_spans_json"])) == (0, [[0, 1, 0]])


def test_a_prompt_that_an_environment_changed_is_stored_as_the_policy_read_it(make_groups, tmp_path):
    (group,) = make_groups([[0.25, 0.5]])
    first, second = group.samples
    messages = [{"role": "user", "content": "12=Begin."}]
    sample = msgspec.structs.replace(first.body.sample, prompt="12=Begin.", messages=messages)
    first = msgspec.structs.replace(first, body=msgspec.structs.replace(first.body, sample=sample))
    group = msgspec.structs.replace(group, samples=[first, second])
    changed, plain = pyarrow.parquet.read_table(store_groups(tmp_path, 1, 1, [group], records_of([group]))).to_pylist()
    assert (changed["prompt"], json.loads(changed["messages_json"])) == ("12=Begin.", messages)
    assert (plain["prompt"], json.loads(plain["messages_json"])) == ("12=", [])
    assert changed["prompt_id"] == plain["prompt_id"]


def test_extras_of_a_scorer_have_columns(make_groups, tmp_path):
    (group,) = make_groups([[0.25, 0.5]])
    extras = [{"acc": 1.0, "pred": "12", "mixed": 3.0}, {"acc": 0.0, "mixed": "text"}]
    samples = []
    for sample, extra in zip(group.samples, extras, strict=True):
        mine = msgspec.structs.replace(sample.scoring.scorers["mine"], extra=extra)
        scoring = msgspec.structs.replace(sample.scoring, scorers={"mine": mine})
        samples.append(msgspec.structs.replace(sample, scoring=scoring))
    group = msgspec.structs.replace(group, samples=samples)
    first, second = pyarrow.parquet.read_table(store_groups(tmp_path, 1, 1, [group], records_of([group]))).to_pylist()
    key = "scorer/mine/extra/"
    assert (first[key + "acc"], first[key + "pred"], first[key + "mixed"]) == (1.0, "12", "3.0")
    assert (second[key + "acc"], second[key + "pred"], second[key + "mixed"]) == (0.0, None, "text")


def test_the_groups_that_an_earlier_trainer_stored_come_first(make_groups, tmp_path):
    def with_extra(group, value):
        def scored(sample):
            mine = msgspec.structs.replace(sample.scoring.scorers["mine"], extra={"pred": value})
            return msgspec.structs.replace(
                sample, scoring=msgspec.structs.replace(sample.scoring, scorers={"mine": mine})
            )

        return msgspec.structs.replace(group, samples=[scored(sample) for sample in group.samples])

    first, second = make_groups([[0.25], [1.0]])
    first, second = with_extra(first, 12.0), with_extra(second, "twelve")
    store_groups(tmp_path, 7, 1, [first], records_of([first]))
    path = store_groups(tmp_path, 7, 2, [second], records_of([second]), begun_by=1)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [(row["group"], row["incarnation"]) for row in rows] == [(first.id, 1), (second.id, 2)]
    assert [row["scorer/mine/extra/pred"] for row in rows] == ["12", "twelve"]
    alone = store_groups(tmp_path, 8, 2, [second], records_of([second]), begun_by=1)  # none had ended
    (tmp_path / "step-000009-i1.parquet").write_bytes(b"damaged")
    beside = store_groups(tmp_path, 9, 2, [second], records_of([second]), begun_by=1)
    assert [pyarrow.parquet.read_table(each).num_rows for each in (alone, beside)] == [1, 1]


def test_the_file_is_zstd(make_groups, tmp_path):
    groups = make_groups([[0.25]])
    path = store_groups(tmp_path, 1, 1, groups, records_of(groups))
    assert pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_dropped_group_of_samples_that_never_came_is_stored_too(make_groups, tmp_path):
    group = make_groups([[0.25, 0.5]])[0]
    empty = [msgspec.structs.replace(sample, body=None, scoring=None) for sample in group.samples]
    group = msgspec.structs.replace(group, samples=empty)
    record = msgspec.structs.replace(records_of([group])[group.id], end="dropped", reason="too_few_scored")
    rows = pyarrow.parquet.read_table(store_groups(tmp_path, 3, 2, [group], {group.id: record})).to_pylist()
    assert [(row["end_reason"], row["response"], row["outcome"]) for row in rows] == [
        ("too_few_scored", None, None)
    ] * 2


def test_a_step_without_groups_is_an_empty_file(tmp_path):
    assert pyarrow.parquet.read_table(store_groups(tmp_path, 4, 1, [], {})).num_rows == 0


def test_a_full_disk_is_reported_and_leaves_nothing(make_groups, tmp_path, small_files_only):
    groups = make_groups([[0.25] * 4] * 4)
    with small_files_only(1_000), pytest.raises(RefusedError, match="no room for"):
        store_groups(tmp_path, 1, 1, groups, records_of(groups))
    assert os.listdir(tmp_path) == []
