"""What of a judge's answer is a number, and what is told when there is none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_job.rules.answers import find_json, score_path, without_reasoning
from plaudit_reward.endpoint.judge import FunctionParser, JsonParser, Parser, RegexParser
from plaudit_reward.functions.result import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import ConfigurationError, DataError
from reward_samples import make_sample

READ: list[tuple[Parser, str, float]] = [
    (RegexParser(r"score: ([\d.]+)"), "not score: 1, but\nscore: 3.5.", 3.5),
    (RegexParser(r"(?s).*score: (-?\d+)"), "score: 1\nno, score: -2", -2.0),
    (JsonParser("$.score"), '{"score": 4}', 4.0),
    (JsonParser("$.score"), 'Here:\n```json\n{"why": "{good}", "score": "0.25"}\n```', 0.25),
    (JsonParser("$.marks[-1]['the mark']"), '{"marks": [{}, {"the mark": true}]}', 1.0),
    (JsonParser("$[0]"), "set {x}: [7]", 7.0),
    (JsonParser("$.score"), 'As asked I use the form {"score": 5}. My verdict:\n{"score": 2}', 2.0),
    (JsonParser("$.score"), 'The student wrote {"score": 10}. {"score": 0}', 0.0),
    (JsonParser("$.score"), 'The form is {"score": <0-10>}. {"score": 3}', 3.0),
    (JsonParser("$.score"), 'The student wrote {"score": 10 and stopped. {"score": 0}', 0.0),
    (JsonParser("$.score"), 'Criteria [1] and [2, 3] are met. {"score": 7} See [4].', 7.0),
    (JsonParser("$.score"), '- [ ] complete\n- [x] right\n{"score": 7}', 7.0),
    (JsonParser("$.score"), '[] nothing, [a](http://b) {"score": 6}', 6.0),
    (JsonParser("$.score"), '{"reason": "two\nlines\tand a tab", "score": 8}', 8.0),
    (JsonParser("$.score"), '{"reason": "\\frac{1}{2} is \\pi", "score": 8}', 8.0),
    (JsonParser("$.score"), '{"score": 5} or rather {"score": 8,}', 8.0),
    (JsonParser("$.score"), '{"a": {"score": 1}, "score": 4} {"other": {"score": 9}}', 4.0),
    (JsonParser("$.score"), "{" * 100_000 + '{"score": 8}', 8.0),
    (JsonParser("$.score"), "[" * 100_000 + '{"score": 8}', 8.0),
    *(
        (JsonParser("$.score"), answer, 8.0)
        for answer in (
            *(
                "{'score': 8}",
                "{score: 8}",
                "{ score : 8, reason: 'good' }",
                "{'reason': None, 'score': 8, 'ok': True}",
            ),
            *(
                "{'reason': \"it's fine\", 'score': 8}",
                '{"reason": "a, }", "score": 8,}',
                "{'a': [1, 2,], 'score': 8,}",
            ),
            *("{“score”: 8}", '{“reason”: “a "b" c”, “score”: 8}', '{"score": 8 // of 10\n}', '{"score": 8, # fine\n}'),
            *(
                '{"score": +8}',
                '{"score": 8.}',
                '{"score": 08}',
                '{/* verdict */ "score": 8}',
                "{ // verdict\n 'score': 8}",
            ),
            *('{"score": "**8**"}', '{"score": "`8`"}', '{"score": " 8. "}', '**{"score": 8}**', '`{"score": 8}`'),
            *("```json\n{'score': 8}\n```", "~~~\n{score: 8}\n~~~", "```json5\n{score: 8,}\n```", "json\n{'score': 8}"),
            *("{'score': 3} is what the student wrote. {'score': 8}", '{"score": 3}\nFinal: {score: 8}'),
            *(
                "The form is {score: <0-10>}. {'score': 8}",
                "The form is {score: number}. {score: 8}",
                "{x: 1} {score: 8}",
            ),
            *(
                "{'reason': 'He said \\'yes\\'.', 'score': 8}",
                "{'reason': 'a \"b\"', 'score': 8}",
                "{'r': '{', score: 8}",
            ),
            *("{'reason': 'see http://a.b // c # d', 'score': 8}", '{"reason": "# 1", /* no */ "score": 8}'),
            *("<think>{score: 1}</think>{score: 8}", "{'reason': '\\frac{1}{2}', 'score': 8}", "{True: 1, 'score': 8}"),
        )
    ),
    (JsonParser("$.score"), "{'score': .5}", 0.5),
    (JsonParser("$.score"), "{'score': -0.5}", -0.5),
    (JsonParser("$.score"), "{'score': 1e1}", 10.0),
    (JsonParser("$.score"), "{'score': False}", 0.0),
    (JsonParser("$.score"), "{score: true}", 1.0),
    (JsonParser("$.a[0]"), "{'a': ['7', 8]}", 7.0),
    *(
        (JsonParser("$.score", highest=10.0), f'{{"score": "{text}"}}', 8.0)
        for text in ("8/10", "8 / 10", "8 out of 10")
    ),
    *(
        (RegexParser(r'(?i)score[*_":=\s]*([0-9]+(?:\.[0-9]+)?)'), answer, 8.0)
        for answer in (
            *("Score: 8", "**Score:** 8", "**Score**: 8", "score = 8", '"score": 8', "SCORE 8.", "Score: **8**/10"),
            *("Score: 8/10", "### Score: 8", "Score: 3? No.\nFinal score: 8", "__Score__: 8.0", "Score:\n8"),
        )
    ),
]


@pytest.mark.parametrize(("parser", "answer", "value"), READ)
async def test_a_number_is_found(parser: Parser, answer: str, value: float) -> None:
    (score,) = await parser.scores(answer, [make_sample()], Attempt(5.0))
    assert score.value == value


NOT_READ: list[tuple[Parser, str, str]] = [
    (RegexParser(r"score: ([\d.]+)"), "I cannot say", "matches nothing in 'I cannot say'"),
    (RegexParser(r"score: (\S+)"), "score: high", "'high' is not a number"),
    (RegexParser(r"score: (\d+)?"), "score: ", "matches nothing"),
    (RegexParser(r"()"), "a" * 3_000_000, "takes too long|'' is not a number"),
    (JsonParser("$.score"), '{"details": {"score": 2}, "explanation": "very', "it ends inside a JSON object"),
    (JsonParser("$.score"), '{"score": 5} and then {"score": 8', "it ends inside a JSON object"),
    (JsonParser("$.score"), '{"why": "he said "yes"", "part": {"score": 1}, "score": 8}', "is malformed"),
    (JsonParser("$.score"), '{"score": NaN}', "None is not a number"),
    (JsonParser("$.score"), '{"score": Infinity}', "is not a number"),
    (JsonParser("$.score"), f'{{"score": {10**30}}}', "is not a number"),
    (JsonParser("$.score"), '{"score": "1_0"}', "'1_0' is not a number"),
    (JsonParser("$.score"), f'{{"score": {"9" * 5000}}}', "is malformed"),
    (JsonParser("$.score"), '{"score": ' * 100_000, "too much broken JSON|ends inside"),
    (JsonParser("$.score"), '{"a": 1, b}' * 100_000 + '{"score": 1}', "too much broken JSON"),
    (RegexParser(r"(?:a+)+(?:b+)*(?:a+)+x(c)"), "a" * 5000, "takes too long"),
    (JsonParser("$.score"), "no JSON {here}", "it contains no JSON"),
    *(
        (JsonParser("$.score"), answer, words)
        for answer, words in (
            ("Score: 8/10", "Ask for the JSON alone, or set judge.parse.structured"),
            ("{'score': 8", "it ends inside a JSON object"),
            ("{'score': 5} and then {'score': 8", "it ends inside a JSON object"),
            ("{'reason': 'it's fine', 'score': 8}", "is malformed"),
            ("{'score': 5} or {'score': eight}", "is malformed"),
            ("{'score': 8 9}", "is malformed"),
            ("{'score': [8}", "ends inside|is malformed"),
            ("{'score': 8/10}", "is malformed"),
            ("{'score': nan}", "is malformed"),
            ("{'score': NaN}", "None is not a number"),
            ("{'score': None}", "None is not a number"),
            ("{'score': __import__('os').system('true')}", "is malformed"),
            ("{'score': 8; 'ok': 1}", "is malformed"),
            ('{"score": 8 "ok": 1}', "is malformed"),
            ("{score: <0-10>}", "it contains no JSON"),
            ('{"score": "8/10"}', "'8/10' is not a number.*set judge.parse.range"),
            ('{"score": "high"}', "'high' is not a number"),
            ('{"score": "8-9"}', "is not a number"),
            ("{'a': " * 50_000, "too much broken JSON|ends inside|no JSON"),
            ("{a: " * 100_000, "too much broken JSON|ends inside|no JSON"),
            ("{'" * 100_000, "too much broken JSON|ends inside|no JSON"),
            ("{// " * 100_000, "too much broken JSON|ends inside|no JSON"),
            ("{/* " * 100_000, "too much broken JSON|ends inside|no JSON"),
        )
    ),
    (JsonParser("$.score", highest=5.0), '{"score": "8/10"}', "is not a number"),
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


@pytest.mark.alike
@pytest.mark.parametrize(("parser", "answer", "words"), NOT_READ)
async def test_an_answer_without_a_number_is_a_data_error(parser: Parser, answer: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        await parser.scores(answer, [make_sample()], Attempt(5.0))


async def test_a_number_that_is_not_finite_is_a_data_error() -> None:
    (score,) = await JsonParser("$.score").scores('{"score": "nan"}', [make_sample()], Attempt(5.0))
    assert score.outcome == "data_error"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('<think>a {"score": 0}</think>\n{"score": 8}', '{"score": 8}'),
        ('a {"score": 0}</think>{"score": 8}', '{"score": 8}'),
        ('{"score": 8}<think>a</think>', '{"score": 8}'),
        ("<Think>a</Think><thinking>b</thinking> c", "c"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
        ("<|begin_of_thought|>a", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        ("<|channel|>analysis<|message|>a", ""),
        ("<think>a <think> b</think> c</think> d", "d"),
        ('<think>it ends here: {"score": 1}', ""),
        ("no tags", "no tags"),
        ('{"why": "it wrote </think>", "score": 2}', '{"why": "it wrote </think>", "score": 2}'),
        ('a </think>{"why": "it wrote </think>", "score": 2}', '{"why": "it wrote </think>", "score": 2}'),
        ('{"why": "it wrote <think>", "score": 2}', '{"why": "it wrote <think>", "score": 2}'),
        ('so {"score": </think>{"score": 2}', '{"score": 2}'),
        ("</think>" * 100_000, ""),
    ],
)
def test_reasoning_is_no_part_of_an_answer(answer: str, text: str) -> None:
    assert without_reasoning(answer) == text


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
async def test_a_group_has_one_value_a_response(parser: Parser, answer: str) -> None:
    samples = [make_sample(index=i) for i in range(3)]
    assert [score.value for score in await parser.scores(answer, samples, Attempt(5.0))] == [3.0, 1.0, 2.0]
    with pytest.raises(DataError, match="3 values for 2 responses"):
        await parser.scores(answer, samples[:2], Attempt(5.0))


@pytest.mark.parametrize(
    "answer",
    [
        "Response [1] beats [2]. [8, 3]",
        "[8, 3]\nbecause of [1] and [2, 1]",
        "Ranking:\n```json\n[8, 3]\n```\n- [ ] done",
        "As in [0, 0] you ask for. So [8, 3]",
    ],
)
async def test_what_stands_in_a_sentence_masks_no_group(answer: str) -> None:
    scores = await JsonParser("$", group=True).scores(answer, [make_sample(index=i) for i in range(2)], Attempt(5.0))
    assert [score.value for score in scores] == [8.0, 3.0]


async def test_one_value_of_a_group_that_is_no_number_costs_its_own_sample() -> None:
    samples = [make_sample(index=i) for i in range(3)]
    scores = await JsonParser("$.s", group=True).scores('{"s": ["8", "n/a", null]}', samples, Attempt(5.0))
    assert [(score.outcome, score.value) for score in scores] == [
        ("scored", 8.0),
        ("data_error", None),
        ("data_error", None),
    ]


async def test_a_group_needs_a_list() -> None:
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


async def test_a_function_reads_an_answer_and_may_see_the_sample(open_parser: Callable[..., Any]) -> None:
    source = "import os\ndef read(answer, sample, scale):\n    return len(answer) * scale + len(sample.response)"
    parser = await open_parser(source, scope="answer", arguments={"scale": 10})
    (score,) = await parser.scores("12345", [make_sample("ab")], Attempt(5.0))
    assert score.value == 52.0


async def test_a_function_ranks_a_group_and_its_faults_are_data_errors(open_parser: Callable[..., Any]) -> None:
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


PIECES = [
    *'{}[]":,',
    "score",
    '"score": ',
    "8",
    "-",
    "e",
    "NaN",
    "null",
    "<think>",
    "</think>",
    "\\",
    '\\"',
    "\\u12",
    "\n",
]
PIECES += ["\ud800", '{"score": 5}', '{"a": {"score": 1}}', "[1]", "9" * 5000]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["$.score", "$[0]", "$.a.score"]))
def test_whatever_a_judge_answers_has_a_value_or_none(answer: str, path: str) -> None:
    with contextlib.suppress(LookupError):
        find_json(without_reasoning(answer), score_path(path))


@given(st.lists(st.sampled_from(["a", " ", "\n", "[1]", "{x}", "- [ ] ", '{"score": 5} ']), max_size=20).map("".join))
def test_the_last_verdict_counts_whatever_stands_before_it(prose: str) -> None:
    assert find_json(without_reasoning(f'{prose}</think>{prose}\n{{"score": 8}}'), score_path("$.score")) == 8
