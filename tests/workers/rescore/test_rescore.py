"""``plaudit rescore`` over samples as a run stores them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from builders import make_body, make_generation, make_prompt, make_sample
from harbor_tasks import write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_job.tasks import read_task
from plaudit_metrics.sources.audits import append_audit, audits_file
from plaudit_metrics.sources.sample_schema import COLUMNS
from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample
from plaudit_reward.machines import KEPT, KeptMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_wire.records import AgentReward, CallRecord, GroupRecord, ScorerRecord, ScoringRecord, Stamps, TurnRecord
from plaudit_workers.cli import EXIT_REFUSED, main
from plaudit_workers.commands.rescore import ScoreChange, ScoreComparison
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.groups import Group, GroupSample

REWARDS = """
def length(solution_str):
    return float(len(solution_str))

def by_group(rewards):
    return [reward - min(rewards) for reward in rewards]
"""
LENGTH = "{name: length, kind: python, python: {path: rewards.py, function: length}}"
GROUP = "{name: group, kind: python, scope: group, weight: 0, python: {path: rewards.py, function: by_group}}"


@pytest.fixture
def job(tmp_path: Path) -> Any:
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(*scorers: str) -> str:
        listed = "\n".join(f"      - {scorer}" for scorer in scorers)
        path = tmp_path / "new.yaml"
        path.write_text(
            "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: new}\nspec:\n"
            f"  reward:\n    workers: {{processes: 1}}\n    scorers:\n{listed}\n"
        )
        return str(path)

    return write


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """Stores rows in files as the trainer does; a row is (group, index, response, score or outcome)."""

    def store(name: str, *rows: tuple[str, int, str | None, float | str]) -> str:
        folder = tmp_path / "samples"
        folder.mkdir(exist_ok=True)
        about = {"split": "train", "data_source": "made-up", "prompt": "?", "ground_truth_json": "null"}
        lines = [
            about
            | {"step": int(name[5:11]), "group": group, "index": index, "response": response, "extra_info_json": "{}"}
            | ({"outcome": was} if isinstance(was, str) else {"outcome": "scored", "score": was})
            for group, index, response, was in rows
        ]
        table = pyarrow.Table.from_pylist(lines, schema=pyarrow.schema(COLUMNS))
        pyarrow.parquet.write_table(table, folder / name)
        return str(folder)

    return store


def test_other_scorers_are_compared_with_the_stored_scores(
    job: Any, stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored("step-000001-i1.parquet", ("t-0-1.0", 0, "rolled back", 0.0))
    stored("step-000001-i2.parquet", ("t-0-2.0", 0, "ab", 2.0), ("t-0-2.0", 1, "abc", 1.0))
    folder = stored(
        "step-000002-i2.parquet",
        ("t-1-2.0", 0, "abcd", 9.0),
        ("t-1-2.0", 1, None, "given_up"),
        ("t-2-2.0", 0, "a", "timeout"),
    )
    for output in (tmp_path / "out.parquet", tmp_path / "out.jsonl"):
        assert main(["rescore", folder, "--job", job(LENGTH), "--json", "-o", str(output)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    changes = summary.pop("changed_most")
    assert summary == {
        "samples": 4,
        "outcomes_before": {"scored": 3, "timeout": 1},
        "outcomes_after": {"scored": 4},
        "scored_both": 3,
        "mean_before": 4.0,
        "mean_after": 3.0,
        "mean_change": -1.0,
        "agreement": pytest.approx(1 / 3),
        "rank_correlation": pytest.approx(0.5),
        "failures": [],
        "auditors": {},
    }
    assert [(c["group"], c["before"], c["after"]) for c in changes] == [("t-1-2.0", 9.0, 4.0), ("t-0-2.0", 1.0, 3.0)]
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["score_before"], row["score"]) for row in rows] == [(2.0, 2.0), (1.0, 3.0), (9.0, 4.0), (None, 1.0)]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["scorer/length/value"] for line in lines] == [row["scorer/length/value"] for row in rows]


def test_a_mended_reward_is_compared_with_what_the_runs_auditors_said(
    job: Any, stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = "step-000001-i1.parquet"
    scored = {"g": [3.0, 2.0, 1.0], "h": [1.0, 2.0, 3.0]}
    rows = [
        (group, index, "x" * (index + 1), score)
        for group, scores in scored.items()
        for index, score in enumerate(scores)
    ]
    samples = stored(file, *rows, ("not audited", 0, "x", 1.0))
    for group, scores in scored.items():  # the auditor wants long responses
        audits = [
            AuditedSample(index, score, {"judge": ScorerRecord("scored", float(index))})
            for index, score in enumerate(scores)
        ]
        append_audit(audits_file(tmp_path, tmp_path / "samples" / file), AuditedGroup(group, 1, "made-up", audits))
    command = ["rescore", samples, "--job", job(LENGTH)]
    assert main([*command, "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out)["auditors"]["judge"]
    assert (before["groups"], before["agreement"]["value"], after["agreement"]["value"]) == (2, 0.0, 1.0)
    assert before["gap"]["value"] < after["gap"]["value"]
    assert main(command) == 0
    assert (
        "auditor judge, 2 groups: rank correlation 0.00 (-1.00 to 1.00) → 1.00 (1.00 to 1.00)"
        in capsys.readouterr().out
    )


def test_reasons_of_samples_without_a_score_are_counted(
    job: Any, stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored("step-000001-i1.parquet", *((f"t-0-{n}.0", 0, "a", 1.0) for n in range(3)))
    (tmp_path / "rewards.py").write_text("def length(solution_str, extra_info):\n    return extra_info['answer']\n")
    assert main(["rescore", folder, "--job", job(LENGTH)]) == 0
    assert "  length: 3 × KeyError: 'answer' (rewards.py:2 in length)" in capsys.readouterr().out.splitlines()


def test_group_scorers_see_whole_groups(job: Any, stored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [(f"t-{n}-1.0", index, "x" * (index + n), float(index)) for n in range(300) for index in range(3)]
    folder = stored("step-000001-i1.parquet", *groups)
    assert main(["rescore", folder, "--job", job(LENGTH, GROUP)]) == 0
    told = capsys.readouterr().out
    assert "same score        100.0 %" in told
    assert "samples           900" in told
    assert "rank correlation  1.000" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["nowhere"],
            "no stored samples of nowhere: give a run's id (with --runs-folder, now runs), a run's folder",
        ),
        (["new.yaml"], "cannot be read"),
        (["samples", "-o", "out.csv"], "end its name in .parquet or .jsonl"),
    ],
)
def test_unusable_input_is_reported(
    job: Any,
    stored: Any,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    stored("step-000001-i1.parquet", ("t-0-1.0", 0, "a", 1.0))
    assert main(["rescore", *arguments, "--job", job(LENGTH)]) == EXIT_REFUSED
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("extra_info", ["[1]", "null", "{", '{"n": 36893488147419103232}'])
def test_a_file_whose_values_no_scorer_could_read_is_refused(
    job: Any, stored: Any, extra_info: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored("step-000001-i1.parquet", ("t-0-1.0", 0, "a", 1.0))
    file = Path(folder) / "step-000001-i1.parquet"
    (row,) = pyarrow.parquet.read_table(file).to_pylist()
    changed = pyarrow.Table.from_pylist([row | {"extra_info_json": extra_info}], schema=pyarrow.schema(COLUMNS))
    pyarrow.parquet.write_table(changed, file)
    assert main(["rescore", folder, "--job", job(LENGTH)]) == EXIT_REFUSED
    assert f"{file}, row 1 is no stored sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "value"), [("score", "much"), ("step", "first"), ("step", None), ("outcome", 5), ("outcome", ["a"])]
)
def test_a_file_of_other_types_is_refused(
    job: Any, stored: Any, column: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored("step-000001-i1.parquet", ("t-0-1.0", 0, "a", 1.0))
    file = Path(folder) / "step-000001-i1.parquet"
    table = pyarrow.parquet.read_table(file)
    place = table.column_names.index(column)
    pyarrow.parquet.write_table(table.set_column(place, column, pyarrow.array([value])), file)
    assert main(["rescore", folder, "--job", job(LENGTH)]) == EXIT_REFUSED
    refused = capsys.readouterr().err
    assert f"{file}, row 1 is no stored sample" in refused
    assert f"`$.{column}`" in refused


def test_of_many_changes_the_largest_are_kept() -> None:
    sizes = random.Random(1).sample(range(1, 1001), 1000)
    comparison = ScoreComparison(num_changes=3)
    for index, size in enumerate(sizes):
        comparison.add_outcomes("scored", "scored")
        comparison.add_scores(ScoreChange(1, "t-0-1.0", index, 0.0, float(size), ""))
    assert [change.after for change in comparison.summary().changed_most] == [1000.0, 999.0, 998.0]


TRL = "{name: trl, kind: python, scope: group, python: {path: trl.py, function: trl}}"


def test_a_run_is_found_by_its_id_or_folder_and_messages_reach_trl_functions(
    job: Any, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trl.py").write_text(
        "def trl(prompts, completions):\n"
        "    return [float(p[-1]['content'] + c[0]['content']) for p, c in zip(prompts, completions)]\n"
    )
    messages = json.dumps([{"role": "user", "content": "4"}])
    folder = Path(stored("step-000001-i1.parquet", ("t-0-1.0", 0, "2", 0.0), ("t-0-1.0", 1, "3", 0.0)))
    table = pyarrow.parquet.read_table(folder / "step-000001-i1.parquet")
    column = table.schema.get_field_index("messages_json")
    table = table.set_column(column, "messages_json", pyarrow.array([messages, messages]))
    pyarrow.parquet.write_table(table, folder / "step-000001-i1.parquet")
    (tmp_path / "runs" / "mine-1").mkdir(parents=True)
    folder.rename(tmp_path / "runs" / "mine-1" / "samples")
    monkeypatch.chdir(tmp_path)
    for run in ("mine-1", "runs/mine-1", "runs/mine-1/samples", "runs/mine-1/samples/step-000001-i1.parquet"):
        assert main(["rescore", run, "--job", job(TRL), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["mean_after"] == 42.5


def test_samples_of_an_older_run_have_no_messages(job: Any, stored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(stored("step-000001-i1.parquet", ("t-0-1.0", 0, "ab", 0.0)))
    file = folder / "step-000001-i1.parquet"
    table = pyarrow.parquet.read_table(file).drop_columns(["messages_json", "max_tokens"])
    pyarrow.parquet.write_table(table, file)
    assert main(["rescore", str(file), "--job", job(LENGTH), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_after"] == 2.0


CONVERSATION = """
def figures(solution_str, extra_info):
    return extra_info["num_turns"] + sum(extra_info["tool_rewards"]) + sum(extra_info["turn_scores"])

def held(completions, environments):
    return [environment.score for environment in environments]
"""


def test_conversations_are_scored_as_in_the_run(job: Any, tmp_path: Path) -> None:
    completion = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "41", "name": "look_up"},
        {"role": "assistant", "content": "40"},
    ]
    prompt = make_prompt("t-0-1.0", 2)
    about = {
        "completion": completion,
        "tool_rewards": [0.25, 0.5],
        "turn_rewards": [0.1, 0.2],
        "environment": {"score": 100.0},
    }
    ends = ({"agent_reward": AgentReward("scored", 0.75)}, {"failure": AgentReward("timeout", reason="too slow")})
    call = CallRecord("look_up", "ok", 0.1, 0.2)
    generation = make_generation(turns=[TurnRecord(0, 2, 0.0, 0.1, calls=[call]), TurnRecord(3, 1, 0.3, 0.1)])
    members = []
    for index, end in enumerate(ends):
        sample = make_sample("raw text", index, prompt=prompt.prompt, **about, **end)
        body = make_body(prompt, index, generation=generation, sample=sample)
        members.append(
            GroupSample(index, Stamps(admitted=1.0), body, scoring=ScoringRecord("scored", value=1.0), deliveries=1)
        )
    group = Group("t-0-1.0", "ready", prompt, members, incarnation=1, admitted=1.0)
    record = GroupRecord("t-0-1.0", "train", 1, "trained", 2, 2, 1.0, 2.5)
    path = store_groups(tmp_path, 1, 1, [group], {group.id: record})
    (row, _) = pyarrow.parquet.read_table(path).to_pylist()
    assert json.loads(row["completion_json"]) == completion
    assert msgspec.json.decode(row["turns_json"], type=list[TurnRecord]) == generation.turns

    (tmp_path / "rewards.py").write_text(CONVERSATION)
    function = "{name: figures, kind: python, python: {path: rewards.py, function: figures}}"
    held = "{name: held, kind: python, python: {path: rewards.py, function: held}}"
    output = tmp_path / "out.jsonl"
    assert (
        main(
            ["rescore", str(path), "--job", job(function, "{name: tools, kind: environment}", held), "-o", str(output)]
        )
        == 0
    )
    done, failed = (json.loads(line) for line in output.read_text().splitlines())
    assert done["scorer/figures/value"] == pytest.approx(4 + 0.75 + 0.3)
    assert done["scorer/tools/value"] == 0.75
    assert done["scorer/held/value"] == 100.0
    assert (failed["outcome"], failed["score"]) == ("timeout", None)


KEEPING_JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: keeps}
spec:
  model: {source: model}
  data: {train: {tasks: task}}
  algorithm: {steps: 1}
  trainer: {}
  rollout: {agent: {kind: tools, tools: [{sandbox: bash}], toolParser: hermes}}
  reward: {scorers: [{name: tests, kind: verifier}]}
"""


@pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
def test_kept_machines_are_tested_again_by_the_tests_as_they_are_now(
    stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    task = read_task(write_sum_task(tmp_path / "task"))
    kept = KeptMachines(tmp_path / KEPT, ProcessProvider(MachineChoice()))
    for name, answer in (("t-0-1.0/0-aa", "7"), ("t-0-1.0/0-bb", "none"), ("t-0-1.0/1-cc", "8")):
        (folder := kept.folder / name).mkdir(parents=True)
        kept.provider.make(folder, task)
        (folder / "files" / "app" / "sum").write_text(answer)
    (kept.folder / "t-0-1.0/0-aa/verdict-tests.json").write_text('{"outcome": "scored", "value": 0.0}')
    rows = [("t-0-1.0", index, "done", 0.0) for index in range(3)]
    samples = stored("step-000001-i1.parquet", *rows)
    table = pyarrow.parquet.read_table(f"{samples}/step-000001-i1.parquet").to_pylist()
    extra = json.dumps({"task": str(task.folder), "digest": "of the run"})
    table = [row | {"extra_info_json": extra} for row in table]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(table, schema=pyarrow.schema(COLUMNS)), f"{samples}/step-000001-i1.parquet"
    )
    (tmp_path / "keeps.yaml").write_text(KEEPING_JOB)
    arguments = ["rescore", samples, "--job", str(tmp_path / "keeps.yaml"), "--json", "-o", str(tmp_path / "o.jsonl")]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(line["outcome"], line["score"]) for line in lines] == [
        ("scored", 1.0),
        ("scored", 0.0),
        ("data_error", None),
    ]
    assert "was not kept" in lines[2]["scorer/tests/reason"]
    assert (kept.folder / "t-0-1.0/0-aa/verdict-tests.json").read_text() == '{"outcome": "scored", "value": 0.0}'
    capsys.readouterr()
    kept.folder.rename(tmp_path / "elsewhere")
    assert main(arguments[:4]) == EXIT_REFUSED
    assert "only machines that sandboxes.keep kept can be tested again" in capsys.readouterr().err
