"""Explain a step's verdict: each rule of ``verdict.py`` in order, with the step's numbers and its result.

The first rule that holds gives the verdict; a test compares the two on any figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from plaudit_metrics.statistics.verdict import (
    SIDE_SHARE,
    STRAGGLER_SHARE,
    WAITING_SHARE,
    Verdict,
    nothing_scored,
    pauses_hold,
    reward_side,
    rollout_verdict,
)
from plaudit_metrics.statistics.waits import CAUSES, ROLLOUT_CAUSES
from plaudit_wire.records import PAUSE


class VerdictRule(msgspec.Struct, frozen=True):
    """Hold one rule, applied to one step."""

    verdict: Verdict
    """The verdict when the rule holds; of the reward side's rule the name of its largest cause."""
    question: str
    numbers: str
    """The seconds that it compared, and their share."""
    needs: str
    holds: bool


def reasoning(statistics: Mapping[str, float]) -> list[VerdictRule]:
    """Apply the rules to a step's figures (those that ``verdict`` reads), up to the first that holds."""
    rules: list[VerdictRule] = []
    for rule in _rules(statistics):
        rules.append(rule)
        if rule.holds:
            break
    return rules


def _rules(statistics: Mapping[str, float]) -> Iterable[VerdictRule]:
    step_s, waited_s = statistics.get("step_s", 0.0), statistics.get("trainer_wait_s", 0.0)
    paused_s = statistics.get(f"wait/{PAUSE}_s", 0.0)
    yield VerdictRule(
        "unscored",
        "Did too many samples have no score?",
        "no sample has a score"
        if nothing_scored(statistics)
        else f"pauses for them took {_share(paused_s, step_s, 'the step')}",
        f"no score at all, or at least {WAITING_SHARE:.0%}",
        nothing_scored(statistics) or pauses_hold(statistics),
    )
    yield VerdictRule(
        "trainer",
        "Did the trainer wait for less than a fifth of the step?",
        f"waited {_share(waited_s, step_s, 'the step')}",
        f"less than {WAITING_SHARE:.0%}",
        waited_s <= 0 or waited_s < WAITING_SHARE * step_s,
    )
    straggler_s = statistics.get("straggler_s", 0.0)
    yield VerdictRule(
        "straggler",
        "Was a single sample or group missing most of the time?",
        f"a single one was missing for {_share(straggler_s, waited_s, 'the waiting')}",
        f"more than {STRAGGLER_SHARE:.0%}",
        straggler_s > STRAGGLER_SHARE * waited_s,
    )
    causes = {cause: statistics.get(f"wait/{cause}_s", 0.0) for cause in CAUSES}
    of_rollouts = {cause: causes.pop(cause) for cause in ROLLOUT_CAUSES}
    rollout_s = sum(of_rollouts.values())
    tools = f", tools {of_rollouts['tools']:.2f} s of it" if of_rollouts["tools"] else ""
    yield VerdictRule(
        rollout_verdict(of_rollouts),
        "Did the trainer wait mostly for generation?",
        f"generation took {_share(rollout_s, waited_s, 'the waiting')}{tools}",
        f"at least {SIDE_SHARE:.0%}",
        rollout_s >= SIDE_SHARE * waited_s,
    )
    reward_s = sum(causes.values())
    largest, name = reward_side(causes, statistics)
    yield VerdictRule(
        name,
        "Did it wait mostly for rewards?",
        f"rewards took {_share(reward_s, waited_s, 'the waiting')}; "
        f"the largest cause is {largest.replace('_', ' ')}: {causes[largest]:.2f} s",
        f"at least {SIDE_SHARE:.0%}",
        reward_s >= SIDE_SHARE * waited_s,
    )
    yield VerdictRule(
        "balanced",
        "None of these?",
        "neither generation nor rewards took enough of the waiting",
        "no other rule holds",
        True,
    )


def _share(part_s: float, whole_s: float, name: str) -> str:
    share = f"{part_s / whole_s:.0%}" if whole_s > 0 else "nothing"
    return f"{part_s:.2f} s of {whole_s:.2f} s, {share} of {name}"
