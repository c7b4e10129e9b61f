"""Register the rule ``code`` in ``rules.routing``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_reward.code.options import CodeOptions
from plaudit_reward.scorer import Scorer


class CodeRule:
    """Score programs by their test cases."""

    def read(self, given: Mapping[str, Any]) -> CodeOptions:
        """Read the options, see ``rules.rule.Rule``."""
        return CodeOptions.from_arguments(given)

    def scorer(self, name: str, arguments: Any, processes: int) -> Scorer:
        """Return a scorer that is not opened yet."""
        from plaudit_reward.code.scorer import CodeScorer  # ctypes and HTTP: a reader of jobs does not need them

        return CodeScorer(name, arguments, processes=processes)
