"""The short form of benchmarks/scorers.py: it runs, and a rule of each kind has its rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_a_rule_of_each_kind_has_its_rates(
    quick_benchmark: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rules = quick_benchmark("scorers", "--rules", "gsm8k", "format")["rules"]
    printed = capsys.readouterr().out
    assert [one["rule"] for one in rules] == ["gsm8k", "format"]
    assert all(set(one["samples_per_s"]) == {"1", "2"} and one["rule"] in printed for one in rules)
    assert all(rate > 0 for one in rules for rate in one["samples_per_s"].values())
