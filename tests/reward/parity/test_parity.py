"""Every rule gives what verl's published scorer gives (``verl.json``), and arguments correct what is wrong there."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.rules.arguments import RULE_ARGUMENTS
from plaudit_reward.rules.rule import FunctionRule
from plaudit_reward.rules.scorer import PREFIXES, RULES, SOURCES, rule_of
from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample

FOLDER = Path(__file__).parent
CASES = runpy.run_path(str(FOLDER / "cases.py"))["CASES"]
ROWS = json.loads((FOLDER / "verl.json").read_text())["rows"]
CODE = {"codecontests", "apps", "codeforces", "taco"}
"""Scored in a sandbox and tested there: verl's results depend on the machine."""

Result = tuple[float | str, dict[str, float | str]]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Ours for every case."""
    return [_result(case, case.arguments) for case in CASES]


def _result(case: Any, arguments: dict[str, Any]) -> Result:
    name = case.rule or rule_of(case.data_source)
    rule = RULES[name]
    assert isinstance(rule, FunctionRule)
    sample = Sample("g", 0, case.data_source, "?", case.response, case.ground_truth)
    try:
        result = rule.function(sample, **RULE_ARGUMENTS[name].read(arguments))
    except DataError:
        return "data_error", {}
    return (result.value, result.extra) if isinstance(result, Score) else (result, {})


def test_the_table_is_of_these_cases() -> None:
    inputs = [(case.data_source, case.response, case.ground_truth) for case in CASES]
    assert inputs == [(row["data_source"], row["response"], row["ground_truth"]) for row in ROWS]
    assert len(CASES) >= 250


def test_every_routed_source_has_rows() -> None:
    sources = {row["data_source"] for row in ROWS if "function" not in row}
    assert set(SOURCES) - CODE <= sources
    assert all(any(source.startswith(prefix) for source in sources) for prefix in PREFIXES)


@pytest.mark.long
def test_results_are_verls_where_verl_has_one(results: list[Result]) -> None:
    different = [
        (case.data_source, case.response, case.ground_truth, score, row["verl"])
        for case, row, (score, _) in zip(CASES, ROWS, results, strict=True)
        if score != row["verl"].get("score") and not _unusable(case)
    ]
    assert different == []


def test_extras_of_a_result_equal_those_of_verl(results: list[Result]) -> None:
    compared = 0
    for row, (_, extra) in zip(ROWS, results, strict=True):
        if "acc" in row["verl"]:
            pred = {} if row["verl"]["pred"] is None else {"pred": row["verl"]["pred"]}
            assert extra == {"acc": float(row["verl"]["acc"]), **pred}
            compared += 1
    assert compared > 100


def test_an_unusable_ground_truth_is_an_error_where_verl_scores_0_or_raises(results: list[Result]) -> None:
    rows = [(row["verl"], score) for case, row, (score, _) in zip(CASES, ROWS, results, strict=True) if _unusable(case)]
    assert {score for _, score in rows} == {"data_error"}
    assert {verl.get("score", verl.get("raised")) for verl, _ in rows} <= {
        0.0,
        "AttributeError",
        "TypeError",
        "KeyError",
    }


def _unusable(case: Any) -> bool:
    """The ground truth has not the type that the rule needs."""
    truth = case.ground_truth
    if (case.rule or rule_of(case.data_source)) == "search_r1_like_qa_em":
        return not isinstance(truth, dict) or not isinstance(truth.get("target"), str | list)
    return not isinstance(truth, str | int | float if "numina" in case.data_source else str)


def test_arguments_correct_verls_flaws() -> None:
    flawed = [(case, row["verl"]["score"]) for case, row in zip(CASES, ROWS, strict=True) if case.corrected]
    assert {rule_of(case.data_source) for case, _ in flawed} == {"gsm8k", "math_reward", "math_dapo", "prime_math"}
    for case, verls_score in flawed:
        arguments, right = case.corrected
        assert _result(case, arguments[rule_of(case.data_source)])[0] == right != verls_score, case
