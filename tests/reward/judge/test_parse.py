"""What of a judge's answer is a number, and what is told when there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.endpoint.judge import FunctionParser, JsonParser, Parser, RegexParser
from plaudit_reward.functions.result import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.records import Sample

Make = Callable[..., Any]

READ: list[tuple[Parser, str, float]] = [
    (RegexParser(r"score: ([\d.]+)"), "I think\nscore: 3.5 of 5, not score: 1", 3.5),
    (RegexParser(r"(?s).*score: (-?\d+)"), "score: 1\nno, score: -2", -2.0),
    (JsonParser("$.score"), '{"score": 4}', 4.0),
    (JsonParser("$.score"), 'Here:\n```json\n{"why": "{good}", "score": "0.25"}\n```', 0.25),
    (JsonParser("$.marks[-1]['the mark']"), '{"marks": [{}, {"the mark": true}]}', 1.0),
    (JsonParser("$[0]"), "set {x}: [7]", 7.0),
]


@pytest.mark.parametrize(("parser", "answer", "value"), READ)
async def test_a_number_is_found(parser: Parser, answer: str, value: float, make_sample: Make) -> None:
    (score,) = await parser.scores(answer, [make_sample()], Attempt(5.0))
    assert score.value == value


NOT_READ: list[tuple[Parser, str, str]] = [
    (RegexParser(r"score: ([\d.]+)"), "I cannot say", "matches nothing in 'I cannot say'"),
    (RegexParser(r"score: (\S+)"), "score: high", "'high' is not a number"),
    (RegexParser(r"score: (\d+)?"), "score: ", "matches nothing"),
    (RegexParser(r"(?:a+)+(?:b+)*(?:a+)+x(c)"), "a" * 5000, "takes too long"),
    (JsonParser("$.score"), "no JSON {here}", "it contains no JSON"),
    (
        JsonParser("$.score"),
        '{"mark": 4}',
        r"\$\.score finds nothing: no member 'score' in an object of 'mark'",
    ),
    (JsonParser("$.a[3]"), '{"a": [1]}', "no item 3 in a list of 1"),
    (JsonParser("$.a[*]"), '{"a": 1}', "needs a list"),
    (JsonParser("$.score"), '{"score": null}', "None is not a number"),
    (JsonParser("$.score"), '{"score": {}}', "is not a number"),
]


@pytest.mark.parametrize(("parser", "answer", "words"), NOT_READ)
async def test_an_answer_without_a_number_is_a_data_error(
    parser: Parser, answer: str, words: str, make_sample: Make
) -> None:
    with pytest.raises(DataError, match=words):
        await parser.scores(answer, [make_sample()], Attempt(5.0))


async def test_a_number_that_is_not_finite_is_a_data_error(make_sample: Make) -> None:
    (score,) = await JsonParser("$.score").scores('{"score": NaN}', [make_sample()], Attempt(5.0))
    assert score.outcome == "data_error"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RegexParser("score: [0-9"), "does not compile"),
        (lambda: RegexParser(r"score: \d"), "has no group: put the number in parentheses"),
        (lambda: JsonParser("score"), r"does not begin with \$"),
        (lambda: JsonParser("$..score"), r"cannot be parsed from '\.\.score' on"),
        (lambda: JsonParser("$.a[?(@.b)]"), "cannot be parsed"),
    ],
)
def test_an_unusable_parser_is_reported_at_the_start(make: Callable[[], Parser], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        (JsonParser("$.scores", group=True), 'ranking: {"scores": [3, "1", 2]}'),
        (JsonParser("$[*].score", group=True), '[{"score": 3}, {"score": 1}, {"score": 2}]'),
        (RegexParser(r"\d: (\d)", group=True), "1: 3\n2: 1\n3: 2"),
    ],
)
async def test_a_group_has_one_value_a_response(parser: Parser, answer: str, make_sample: Make) -> None:
    samples = [make_sample(index=i) for i in range(3)]
    assert [score.value for score in await parser.scores(answer, samples, Attempt(5.0))] == [3.0, 1.0, 2.0]
    with pytest.raises(DataError, match="3 values for 2 responses"):
        await parser.scores(answer, samples[:2], Attempt(5.0))


async def test_a_group_needs_a_list(make_sample: Make) -> None:
    with pytest.raises(DataError, match="int instead of a list of 2 values"):
        await JsonParser("$.score", group=True).scores('{"score": 1}', [make_sample()] * 2, Attempt(5.0))


@pytest.fixture
async def open_parser(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[FunctionParser] = []

    async def make(source: str, **target: Any) -> FunctionParser:
        (tmp_path / "parse.py").write_text(source)
        function = FunctionScorer("big", Target(str(tmp_path / "parse.py"), "read", **target), processes=1)
        opened.append(FunctionParser(function))
        await opened[-1].open()
        return opened[-1]

    yield make
    for parser in opened:
        await parser.close()


async def test_a_function_reads_an_answer_and_may_see_the_sample(
    open_parser: Callable[..., Any], make_sample: Callable[..., Sample]
) -> None:
    source = "import os\ndef read(answer, sample, scale):\n    return len(answer) * scale + len(sample.response)"
    parser = await open_parser(source, scope="answer", arguments={"scale": 10})
    (score,) = await parser.scores("12345", [make_sample("ab")], Attempt(5.0))
    assert score.value == 52.0


async def test_a_function_ranks_a_group_and_its_faults_are_data_errors(
    open_parser: Callable[..., Any], make_sample: Callable[..., Sample]
) -> None:
    source = """
def read(answer, samples):
    places = answer.split(" > ")
    return [len(samples) - places.index(str(i + 1)) for i in range(len(places))]
"""
    parser = await open_parser(source, scope="answers")
    samples = [make_sample(index=i) for i in range(3)]
    assert [score.value for score in await parser.scores("2 > 3 > 1", samples, Attempt(5.0))] == [1.0, 3.0, 2.0]
    too_few = await parser.scores("2 > 1", samples, Attempt(5.0))
    assert [score.outcome for score in too_few] == ["data_error"] * 3
    assert "2 scores for 3 samples" in str(too_few[0].reason)
    raised = await parser.scores("none", samples, Attempt(5.0))
    assert "ValueError: '1' is not in list" in str(raised[0].reason)


async def test_a_function_of_the_wrong_shape_is_reported_at_the_start(open_parser: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"read in .*parse\.py: nothing gives parameter 'scale' a value"):
        await open_parser("def read(answer, scale): return 1", scope="answer")
