"""``lifecycle.failurePolicy.rules``: the first rule that applies to the end of an attempt decides what follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plaudit_workers.job.spec.kubernetes.lifecycle import FailureRuleSpec


def deciding_rule(
    rules: Sequence[FailureRuleSpec], codes: Collection[int], reasons: Collection[str]
) -> tuple[FailureRuleSpec, str] | None:
    """Return the rule that decides, and the rule as text with what it applies to; None if none applies.

    Args:
        codes: exit codes of the attempt's ranks.
        reasons: of its pods.
    """
    for number, rule in enumerate(rules):
        match = _match(rule, codes, reasons)
        if match:
            return rule, f"lifecycle.failurePolicy.rules[{number}]: {rule.action} on {match}"
    return None


def _match(rule: FailureRuleSpec, codes: Collection[int], reasons: Collection[str]) -> str:
    if (listed := rule.on_exit_codes) is not None:
        decides = (code for code in sorted(codes) if code != 0 and (code in listed.values) == (listed.operator == "In"))
        return next((f"exit code {code}" for code in decides), "")
    return next((f"reason {reason}" for reason in sorted(reasons) if reason in rule.on_reasons), "")
