"""Everything on disk that a job names is looked at before anything starts."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from plaudit_job.load import load_job
from plaudit_workers.launch.checks import check_files, short_model
from plaudit_workers.launch.data_checks import check_data
from small_job import changed

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the small job names, all in order."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "data").mkdir()
    pa.parquet.write_table(pa.Table.from_pylist([ROW]), tmp_path / "data" / "train.parquet")
    (tmp_path / "reward.py").write_text("def compute_score(sample):\n    return 1.0\n")
    return tmp_path


@pytest.fixture
def told(folder: Path, write_job: Callable[..., Path]) -> Callable[..., list[str]]:
    """What is said of the files of the small job with some fields changed."""

    def tell(**fields: Any) -> list[str]:
        job = load_job(write_job(changed({name.replace("__", "."): value for name, value in fields.items()})))
        found = [*check_files(job), *check_data(job, ["spec.model"]).problems]
        return [str(problem).replace(f"{folder}/", "") for problem in found]

    return tell


def test_complete_files_give_no_problems(told: Callable[..., list[str]]) -> None:
    assert told() == []


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("model/config.json", "spec.model.source: model has no config.json. Name a folder written by save_pretrained"),
        ("model/tokenizer.json", "spec.model.tokenizer: model has no tokenizer. Name a folder with one"),
        ("data/train.parquet", "spec.data.train.path: data/train.parquet: does not exist. Write the data first"),
        (
            "reward.py",
            "spec.reward.scorers[0].python.path: there is no file reward.py. Correct the path: it is relative",
        ),
    ],
)
def test_a_missing_file_is_reported(folder: Path, told: Callable[..., list[str]], missing: str, words: str) -> None:
    (folder / missing).unlink()
    (said,) = told()
    assert said.startswith(words)


@pytest.mark.parametrize(
    ("config", "is_short"),
    [
        ({}, False),
        ({"max_position_embeddings": 20}, True),
        ({"text_config": {"max_position_embeddings": 20}}, True),
        ({"max_position_embeddings": 100_000}, False),
        ({"max_position_embeddings": 20, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
    ],
)
def test_a_model_with_fewer_positions_than_samples_may_have_is_noted(
    folder: Path, write_job: Callable[..., Path], config: dict[str, Any], is_short: bool
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(config))
    notes = list(map(str, short_model(load_job(write_job(changed({}))))))
    assert bool(notes) == is_short
    assert all("the model has 20 positions, fewer than maxPromptLength" in note for note in notes)


def test_a_checkpoint_that_has_all_steps_is_named(folder: Path, told: Callable[..., list[str]]) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "state.json").write_text('{"extra": {"step": 158}}')
    begun = {"trainer": {"checkpoint": {"resumeFrom": "old"}}, "algorithm.steps": 158}
    assert told(**begun | {"algorithm.steps": 159}) == []
    (said,) = told(**begun)
    assert said.startswith("spec.algorithm.steps: 158 leaves nothing to train: the checkpoint of checkpoint.resumeFrom")
    assert said.endswith(" is of step 158. Give more than 158")


def test_a_pipe_is_no_file_of_python(folder: Path, told: Callable[..., list[str]]) -> None:
    (folder / "reward.py").unlink()
    os.mkfifo(folder / "reward.py")
    (said,) = told()
    assert said.startswith("spec.reward.scorers[0].python.path: reward.py is no regular file. Name a Python file")


def test_missing_folders_templates_and_checkpoints_are_reported(told: Callable[..., list[str]]) -> None:
    said = told(
        model={"source": "./nowhere", "chatTemplate": "chat.jinja"}, trainer={"checkpoint": {"resumeFrom": "old"}}
    )
    assert [line.split(". ")[0] for line in said] == [
        "spec.model.source: there is no folder nowhere",
        "spec.model.chatTemplate: there is no file chat.jinja",
        "spec.trainer.checkpoint.resumeFrom: there is no folder old",
    ]


JUDGES = [
    ({}, {"chat_template": "t"}, ""),
    ({}, {}, "spec.reward.scorers[0].judge.serve.source: a judge's prompt is a chat message, but the tokenizer in rm"),
    (
        {"architectures": ["Qwen2ForSequenceClassification"]},
        {"chat_template": "t"},
        "spec.reward.scorers[0].judge.serve.source: rm has class Qwen2ForSequenceClassification, which writes no text",
    ),
]

MODELS = [
    ({}, {}, {"input": "text"}, ""),
    ({"id2label": {"0": "LABEL_0"}}, {"chat_template": "{{ messages }}"}, {}, ""),
    ({}, {}, {}, "spec.reward.scorers[0].model.input: chat needs a chat template, but the tokenizer in rm has none"),
    *(
        (
            {"architectures": [name]},
            {"chat_template": "t"},
            fields,
            problem,
        )
        for name, fields, problem in (
            ("Qwen2ForRewardModeling", {}, "spec.reward.scorers[0].model.source: rm has class Qwen2ForRewardMod"),
            ("Qwen2RewardModel", {}, "spec.reward.scorers[0].model.source: rm has class Qwen2RewardModel"),
            ("Qwen2ForRewardModeling", {"engine": "plaudit"}, ""),
            ("Qwen2ForRewardModeling", {"arguments": {"hf_overrides": {"architectures": ["Q"]}}}, ""),
            ("Qwen2ForSequenceClassification", {}, ""),
        )
    ),
    (
        {"id2label": {"0": "a", "1": "b"}},
        {},
        {"input": "text"},
        "spec.reward.scorers[0].model.source: rm has 2 outputs",
    ),
]


@pytest.mark.parametrize(("config", "tokenizer", "fields", "words"), MODELS)
def test_a_reward_model_has_one_output_and_the_template_that_it_needs(
    folder: Path, told: Callable[..., list[str]], config: Any, tokenizer: Any, fields: dict[str, Any], words: str
) -> None:
    (folder / "rm").mkdir()
    (folder / "rm" / "config.json").write_text(json.dumps(config))
    (folder / "rm" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    said = told(reward={"scorers": [{"name": "m", "kind": "model", "model": {"source": "./rm", **fields}}]})
    assert len(said) == bool(words)
    assert all(line.startswith(words) for line in said)


@pytest.mark.parametrize(("config", "tokenizer", "words"), JUDGES)
def test_a_served_judge_writes_text_and_has_a_chat_template(
    folder: Path, told: Callable[..., list[str]], config: Any, tokenizer: Any, words: str
) -> None:
    (folder / "rm").mkdir()
    (folder / "rm" / "config.json").write_text(json.dumps(config))
    (folder / "rm" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "judge.j2").write_text("{{ response }}")
    judge = {"serve": {"source": "./rm"}, "promptTemplate": {"path": "judge.j2"}, "parse": {"regex": "(.)"}}
    said = told(reward={"scorers": [{"name": "j", "kind": "judge", "judge": judge}]})
    assert len(said) == bool(words)
    assert all(line.startswith(words) for line in said)


def test_a_source_that_can_be_no_hub_id_is_reported(told: Callable[..., list[str]]) -> None:
    assert told(model__source="no/such/folder") == [
        "spec.model.source: 'no/such/folder' is neither a folder nor a hub id. Write a folder with ./ or /"
    ]
    page = "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main"
    assert told(model__source=page) == [
        f"spec.model.source: '{page}' is the address of a page. Write the hub id Qwen/Qwen3-0.6B"
    ]


def test_an_address_in_place_of_a_file_is_shown_as_it_was_written(told: Callable[..., list[str]]) -> None:
    address = "https://example.com/reward.py"
    assert told(reward={"scorers": [{"name": "r", "kind": "python", "python": {"path": address}}]}) == [
        f"spec.reward.scorers[0].python.path: there is no file {address}. "
        "Download it: a run reads files of this machine"
    ]


def test_a_hub_id_is_looked_up_in_the_cache_when_the_hub_is_out_of_reach(
    told: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert told(model__source="some/model") == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "'some/model' is not a folder next to the job file, and HF_HUB_OFFLINE is set"
        in told(model__source="some/model")[0]
    )
    (tmp_path / "cache" / "models--some--model").mkdir(parents=True)
    assert told(model__source="some/model") == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def compute_score(:\n    pass\n",
            ".path: syntax error in line 1 of reward.py: invalid syntax. Fix the file",
        ),
        (
            "import re\ndef other(sample): ...\n",
            ".function: reward.py does not define 'compute_score'. It defines: other",
        ),
        (
            "def compute_score(sample):\n    score = 1\n",
            ".function: compute_score in reward.py returns no value, so that no sample gets a score. "
            "Return a number. See docs/rewards/python.md",
        ),
        ("# nothing\n", ".function: reward.py does not define 'compute_score'. It defines: nothing"),
    ],
)
def test_a_python_file_without_the_function_is_reported(
    folder: Path, told: Callable[..., list[str]], source: str, words: str
) -> None:
    (folder / "reward.py").write_text(source)
    assert told() == [f"spec.reward.scorers[0].python{words}"]


@pytest.mark.parametrize(
    "source",
    [
        "async def compute_score(sample): ...",
        "class compute_score: ...",
        "from elsewhere import score as compute_score",
        "from elsewhere import *",
        "compute_score = lambda sample: 1.0",
        "compute_score: object = print",
        "try:\n    from fast import compute_score\nexcept ImportError:\n    from slow import compute_score",
    ],
)
def test_a_function_may_come_about_in_many_ways(folder: Path, told: Callable[..., list[str]], source: str) -> None:
    (folder / "reward.py").write_text(source)
    assert told() == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows. Rows need data_source, prompt (messages or text)"),
        (
            [ROW, {**ROW, "reward_model": None}],
            "row 2: column reward_model is None. Give each row {ground_truth: …}; null",
        ),
        ([{**ROW, "reward_model": "2"}], "row 1: column reward_model is '2'. Give each row {ground_truth: …}; null"),
        ([*[ROW] * 20, {**ROW, "prompt": None}], "row 21: column prompt is None. Give each prompt as messages"),
        (
            [{**ROW, "extra_info": "{'a': 1}"}],
            "row 1: column extra_info is not JSON (JSON is malformed: object keys must be strings (byte 1)). Give",
        ),
        ([{"data_source": "a", "prompt": "b"}], "lacks column reward_model (it has data_source, prompt). Rows need"),
        ([{"question": "a"}], "lacks columns data_source, prompt, reward_model (it has question). Rows need"),
    ],
)
def test_a_parquet_file_with_wrong_columns_is_reported(
    folder: Path, told: Callable[..., list[str]], rows: list[dict[str, Any]], words: str
) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows or [ROW]).slice(0, len(rows)), folder / "data" / "train.parquet")
    (problem,) = told()
    assert problem.startswith(f"spec.data.train.path: data/train.parquet: {words}")


@pytest.mark.parametrize("extra_info", [None, "", "null", '{"a": 1}', {"a": 1}])
def test_extra_info_may_be_json_text_or_null(folder: Path, told: Callable[..., list[str]], extra_info: Any) -> None:
    rows = [{**ROW, "extra_info": extra_info}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet")
    (folder / "rows.jsonl").write_text(json.dumps(rows[0]))
    assert told() == told(data__train={"path": "rows.jsonl"}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ("{not json}\n", "line 1: is not JSON (JSON is malformed"),
        ("[1]\n", "line 1: is no JSON object. Write one JSON object a line"),
        (json.dumps(ROW) + '\n{"prompt": "a"}\n', "line 2: lacks columns data_source, reward_model (it has prompt)"),
        (json.dumps({**ROW, "reward_model": {}}) + "\n", "row 1: column reward_model is {}. Give each row"),
    ],
)
def test_a_jsonl_file_with_wrong_rows_is_reported(
    folder: Path, told: Callable[..., list[str]], text: str, words: str
) -> None:
    (folder / "rows.jsonl").write_text(text)
    (said,) = told(data__train={"path": "rows.jsonl"})
    assert said.startswith(f"spec.data.train.path: rows.jsonl: {words}")


def test_a_model_without_weights_is_named(folder: Path, told: Callable[..., list[str]]) -> None:
    weights, engine = folder / "model" / "model.safetensors", {"rollout.engine.kind": "vllm"}
    assert told(**engine) == []
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (said,) = told(**engine)
    assert said.startswith("spec.model.source: model/model.safetensors is a pointer of Git LFS, not weights. Run git")
    weights.unlink()
    (said,) = told(**engine)
    assert said.startswith("spec.model.source: model has config.json, but no weights (*.safetensors or *.bin). Save")


def test_a_hub_id_that_is_nearly_a_folder_is_one(told: Callable[..., list[str]]) -> None:
    (problem,) = told(model={"source": "modle"})
    assert problem.startswith("spec.model.source: there is no folder modle. Did you mean ./model?")
    (problem,) = told(model={"source": "./model/config.json"})
    assert problem.startswith("spec.model.source: model/config.json is a file. Name the folder that it is in, model")
    (problem,) = told(model={"source": "./modle"})
    assert problem.startswith("spec.model.source: there is no folder modle. Did you mean model?")


def test_other_data_files_are_reported(folder: Path, told: Callable[..., list[str]]) -> None:
    (folder / "rows.csv").write_text("a,b")
    (folder / "broken.parquet").write_text("no parquet")
    assert "ends with '.csv'. Give a file that ends with .parquet, .jsonl" in told(data__train={"path": "rows.csv"})[0]
    assert "broken.parquet: is not a Parquet file" in told(data__train={"path": "broken.parquet"})[0]
    (folder / "empty").mkdir()
    assert "empty: holds no data file" in told(data__train={"path": "empty"})[0]
    assert "data/x*: matches no file" in told(data__train={"path": "data/x*"})[0]


def test_a_data_source_without_a_rule_is_reported_before_sample_10000(
    folder: Path, told: Callable[..., list[str]]
) -> None:
    rules = [{"name": "correct", "kind": "rule"}]
    rows = [*[ROW] * 20, {**ROW, "data_source": "my/task"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert told(reward__scorers=[{**rules[0], "rule": "gsm8k"}]) == []
    for path in ("data/train.parquet", "rows.jsonl"):
        assert told(reward__scorers=rules, data__train={"path": path}) == [
            f"spec.data.train.path: {path} has data_source 'my/task', for which scorer 'correct' has no rule. Name a "
            "rule in the scorer (rule: gsm8k), or score it with a function (kind: python)"
        ]


def test_rows_whose_truth_a_rule_cannot_use_are_counted_by_rule(folder: Path, told: Callable[..., list[str]]) -> None:
    truths = [("openai/gsm8k", "2"), ("openai/gsm8k", None), ("math_dapo", " "), ("openai/gsm8k", 3)]
    rows = [{**ROW, "data_source": source, "reward_model": {"ground_truth": truth}} for source, truth in truths]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    by_source, fmt = {"name": "correct", "kind": "rule"}, {"name": "form", "kind": "rule", "rule": "format"}
    scorers = [by_source, {**fmt, "ruleArguments": {"pattern": "x"}}]
    said = told(reward__scorers=scorers, data__train={"path": "rows.jsonl"})
    assert [line.split(": ground")[0].removeprefix("spec.data.train.path: rows.jsonl: ") for line in said] == [
        "2 rows have ground truths that rule gsm8k of scorer 'correct' cannot use; the first is row 2",
        "1 row has a ground truth that rule math_dapo of scorer 'correct' cannot use; the first is row 3",
    ]
    assert all(line.endswith("Mend or remove these rows, or name another rule") for line in said)


def test_agents_tools_and_combinations_are_looked_into(folder: Path, told: Callable[..., list[str]]) -> None:
    (folder / "lib.py").write_text("def present(values): ...\n")
    absent = {"path": "lib.py", "function": "absent"}
    assert told(
        rollout={"agent": {"kind": "custom", "path": "lib.py", "class": "Agent"}},
        reward__combine={"kind": "python", **absent},
    ) == [
        "spec.rollout.agent.class: lib.py does not define 'Agent'. It defines: present",
        "spec.reward.combine.function: lib.py does not define 'absent'. It defines: present",
    ]
    assert told(rollout={"agent": {"kind": "endpoint", **absent}}) == [
        "spec.rollout.agent.function: lib.py does not define 'absent'. It defines: present"
    ]
    assert told(rollout={"agent": {"kind": "endpoint", "path": "lib.py"}}) == []
    assert told(rollout={"agent": {"kind": "tools", "tools": [absent]}}) == [
        "spec.rollout.agent.tools[0].function: lib.py does not define 'absent'. It defines: present"
    ]
