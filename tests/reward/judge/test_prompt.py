"""The prompt's template: what it sees, and what is told at the start when it cannot work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.endpoint.judge import PromptTemplate
from plaudit_wire.errors import ConfigurationError, DataError
from reward_samples import make_sample


@pytest.fixture
def make_template(tmp_path: Path) -> Callable[..., PromptTemplate]:
    def make(source: str, **options: Any) -> PromptTemplate:
        path = tmp_path / "judge.j2"
        path.write_text(source)
        return PromptTemplate(str(path), **options)

    return make


def test_a_template_sees_the_sample(make_template: Callable[..., PromptTemplate]) -> None:
    template = make_template(
        "{% if extra_info.hard is defined %}Hard. {% endif %}{{ data_source }}: {{ messages[-1].content }} -> "
        "{{ response | trim }} (not {{ ground_truth }}) {{ prompt | length }}\n"
    )
    sample = make_sample(" 5 ", messages=[{"role": "user", "content": "2 + 2?"}], extra_info={"hard": True})
    assert template.render([sample]) == "Hard. openai/gsm8k: 2 + 2? -> 5 (not 4) 6"


def test_a_template_of_a_group_sees_all_responses(make_template: Callable[..., PromptTemplate]) -> None:
    template = make_template("{% for r in responses %}\n{{ loop.index }}: {{ r }}\n{% endfor %}", group=True)
    assert template.render([make_sample("a"), make_sample("b", 1)]) == "1: a\n2: b\n"


def test_each_prompt_has_a_fence_of_its_own(make_template: Callable[..., PromptTemplate]) -> None:
    template = make_template("<a-{{ fence }}>{{ response }}</a-{{ fence }}>")
    prompts = {template.render([make_sample("x")]) for _ in range(20)}
    assert len(prompts) == 20
    assert all(re.fullmatch(r"<a-(\w{16})>x</a-\1>", prompt) for prompt in prompts)


def test_a_response_is_never_rendered_as_a_template(make_template: Callable[..., PromptTemplate]) -> None:
    assert make_template("{{ response }}").render([make_sample("{{ 6 * 7 }} <b>")]) == "{{ 6 * 7 }} <b>"


WRONG = [
    ("fine\n{{ response", r"judge\.j2, line 2: unexpected end of template"),
    (
        "\n\n{{ respons }}",
        r"judge\.j2, line 3: unknown variable 'respons'. The variables are data_source, extra_info",
    ),
    ("{{ responses }}", r"line 1: unknown variable 'responses' \(scope: sample\)"),
    ("{{ response | shout }}", r"judge\.j2, line 1: No filter named 'shout'"),
    ("{% include 'other.j2' %}", "includes another file"),
]


@pytest.mark.parametrize(("source", "words"), WRONG)
def test_an_unusable_template_is_reported_at_the_start(
    make_template: Callable[..., PromptTemplate], source: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_template(source)


def test_files_that_are_missing_or_no_text_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.j2 cannot be read: No such file"):
        PromptTemplate(str(tmp_path / "none.j2"))
    (tmp_path / "binary.j2").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        PromptTemplate(str(tmp_path / "binary.j2"))


FAILING = [
    ("ok\n{{ extra_info.rubric }}", r"judge\.j2, line 2: 'dict object' has no attribute 'rubric'"),
    ("{{ ground_truth + 1 }}", "line 1: TypeError"),
    ("{{ response.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
    ("{{ messages.append(1) }}", "line 1: access to attribute 'append' of 'list' object is unsafe"),
    ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
]


@pytest.mark.parametrize(("source", "words"), FAILING)
def test_a_missing_field_or_a_forbidden_expression_is_a_data_error(
    make_template: Callable[..., PromptTemplate], source: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make_template(source).render([make_sample()])
