"""``plaudit validate`` renders the data as the trainer will: lengths, rows left out, templates that cannot work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import CHATML, chat_tokenizer
from plaudit_job.load import load_job
from plaudit_workers.launch.data_checks import DataReport, check_data
from small_job import changed
from tiny_vision import mixed_rows, save_vision_policy, write_rows

TOOL = (
    'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: one\n        b: other\n    """\n'
)


def row(content: str, **fields: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": "a", "prompt": prompt, "reward_model": {"ground_truth": "1"}, **fields}


@pytest.fixture
def report(tmp_path: Path, write_job: Callable[..., Path]) -> Callable[..., DataReport]:
    """What is said of rows with a template and some fields of the small job."""

    def tell(rows: list[dict[str, Any]], template: str = CHATML, **fields: Any) -> DataReport:
        chat_tokenizer(template).save_pretrained(tmp_path / "model")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        given = {"data.train.path": "rows.jsonl"} | {name.replace("__", "."): value for name, value in fields.items()}
        return check_data(load_job(write_job(changed(given))))

    return tell


def test_rows_that_are_left_out_are_counted_with_the_lengths(report: Callable[..., DataReport]) -> None:
    rows = [row("x" * length) for length in (1, 2, 30, 40)]
    found = report(rows, data__train__maxPromptLength=40, algorithm={"steps": 10, "promptsPerStep": 4})
    assert found.problems == []
    (note,) = found.notes
    assert "rows.jsonl: 2 of 4 rows are used; 2 are longer than maxPromptLength 40" in note.message
    assert "the longest is row 4 of rows.jsonl. 10 steps use each 20 times" in note.remedy


def test_a_reward_function_without_a_single_ground_truth_is_noted(report: Callable[..., DataReport]) -> None:
    rows = [row("1", reward_model={"ground_truth": truth}) for truth in (None, None, "1")]
    scorer = {"name": "mine", "kind": "python", "python": {"path": "rewards.py"}}
    notes = [report(part, reward__scorers=[scorer]).notes for part in (rows[:2], rows)]
    assert [sum("every ground truth is null" in note.message for note in each) for each in notes] == [1, 0]


def test_prompts_that_are_all_too_long_are_a_problem_with_their_lengths(report: Callable[..., DataReport]) -> None:
    (problem,) = report([row("x" * 30)] * 3, data__train__maxPromptLength=5).problems
    assert problem.field == "spec.data.train.path"
    words = "none of its 3 prompts can be used: 3 longer than maxPromptLength 5. They have 48 tokens each"
    assert words in problem.message
    assert problem.remedy == "Raise data.train.maxPromptLength"


def test_of_a_prompt_of_megabytes_the_start_decides(report: Callable[..., DataReport]) -> None:
    """Its length is estimated; one whose start has few tokens is counted whole."""
    rows = [row("x" * 8), row("x" * (4 << 20)), row("<|endoftext|>" * 6000)]
    fields = {"data__train__maxPromptLength": 4096, "rollout__engine__maxModelLength": 8192}
    (note,) = report(rows, **fields).notes
    assert "1 of 3 rows are used; 2 are longer than maxPromptLength 4,096" in note.message
    assert "half at most 6,018" in note.remedy
    assert "the longest is row 2 of" in note.remedy


IN_ORDER = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "broken Jinja": ("{% for m in messages %}{{ m.content }", "the chat template is no Jinja (line 1"),
    "ignores messages": ("What is 1 + 1?", "the chat template ignores messages"),
    "needs more": ("{{ tenant.name.first }}" + IN_ORDER, "the chat template refuses a message of the user"),
    "refuses a system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + IN_ORDER,
        "row 2: the chat template refuses these messages (TemplateError: no system role)",
    ),
}


@pytest.mark.parametrize(("template", "words"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_cannot_work_is_found(report: Callable[..., DataReport], template: str, words: str) -> None:
    system = row("1", prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "1"}])
    (problem,) = report([row("1"), system], template).problems
    assert words in problem.message


@pytest.mark.long
def test_a_template_without_a_place_for_tools_is_found(report: Callable[..., DataReport], tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOL)
    agent = {"kind": "tools", "toolParser": "hermes", "tools": [{"path": "tools.py", "function": "add"}]}
    (problem,) = report([row("1")], IN_ORDER, rollout__agent=agent).problems
    assert "the chat template has no place for tools" in problem.message
    with_tools = report([row("1")], rollout__agent=agent)
    assert with_tools.problems == []
    assert "1 of 1 rows are used" in with_tools.notes[0].message


def test_tools_that_cannot_be_described_are_found(report: Callable[..., DataReport], tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("import nowhere_to_be_found\n" + TOOL)
    agent = {"kind": "tools", "toolParser": "hermes", "tools": [{"path": "tools.py", "function": "add"}]}
    (problem,) = report([row("1")], rollout__agent=agent).problems
    assert problem.field.startswith("spec.rollout.agent")
    assert "nowhere_to_be_found" in problem.message


def test_arguments_that_the_template_does_not_read_are_noted(report: Callable[..., DataReport]) -> None:
    model = {"source": "./model", "chatTemplateArguments": {"enable_thinkin": True}}
    notes = [str(note) for note in report([row("1")], model=model).notes]
    assert any("chatTemplateArguments.enable_thinkin: is not read by the chat template" in note for note in notes)


def test_a_template_behind_whose_end_of_turn_the_policy_writes_on_is_noted(report: Callable[..., DataReport]) -> None:
    template = CHATML.replace("<|im_end|>", "<|endoftext|>")  # the tokenizer's end is <|im_end|>
    notes = [str(note) for note in report([row("1")], template).notes]
    assert any("ends a turn with '<|endoftext|>', which is no end of a sequence" in note for note in notes)
    stops = {"stop": ["<|endoftext|>"]}
    assert not any(
        "no end of a sequence" in str(note) for note in report([row("1")], template, rollout__sampling=stops).notes
    )


def test_without_the_tokenizers_files_it_says_that_nothing_was_rendered(report: Callable[..., DataReport]) -> None:
    (note,) = report([row("1")], model={"source": "nobody/has-this"}).notes
    assert "nobody/has-this are not on this machine: prompts were not rendered, lengths not counted" in note.message


def test_an_agent_without_tools_is_loaded_and_also_without_the_models_files(
    report: Callable[..., DataReport], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text("import nowhere_to_be_found\ndef play(prompt): ...\n")
    elsewhere = {"source": "nobody/has-this"}
    agents = {
        f"No module named 'nowhere_to_be_found' (line 1). Install it for {sys.executable}": {
            "path": "agent.py",
            "function": "play",
        },
        "there is no program 'nowhere-to-be-found'": {"command": ["nowhere-to-be-found"]},
    }
    for words, given in agents.items():
        found = report([row("1")], model=elsewhere, rollout__agent={"kind": "endpoint", **given})
        assert [words in problem.message for problem in found.problems] == [True], found.problems


def test_a_last_message_of_the_assistant_is_left_open_and_agents_refuse_it(
    report: Callable[..., DataReport], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text("class Mine:\n    async def run(self, prompt, generate): ...\n")
    prefilled = row("1", prompt=[{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>\nSo"}])
    assert report([prefilled]).problems == []
    agent = {"kind": "custom", "path": "agent.py", "class": "Mine"}
    (problem,) = report([prefilled], rollout__agent=agent).problems
    assert "row 1: the prompt ends with a message of the assistant" in problem.message


@pytest.mark.parametrize(
    ("longest", "words"), [(200, "4 of 4 rows are used"), (40, "1 is longer than maxPromptLength 40")]
)
def test_prompts_with_images_are_counted_with_the_tokens_of_their_images(
    tmp_path: Path, write_job: Callable[..., Path], longest: int, words: str
) -> None:
    save_vision_policy(tmp_path / "model")
    write_rows(tmp_path / "rows.parquet", mixed_rows())
    given = {"data.train": {"path": "rows.parquet", "maxPromptLength": longest}, "data.images": {}}
    found = check_data(load_job(write_job(changed(given))))
    assert found.problems == []
    (note,) = (each for each in found.notes if each.field == "spec.data.train.path")
    assert words in note.message
    assert "the longest is row 4" in note.remedy
    assert not (tmp_path / "images").exists()
