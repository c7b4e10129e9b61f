"""Name a step's bottleneck from its figures (``steps.step_statistics``).

The first rule that holds decides:

1. ``unscored``: no sample has a score, or the trainer paused for a fifth of the step or more because too many had none.
2. ``trainer``: the trainer waited for less than a fifth of the step. Faster rewards or rollouts would not help much.
3. ``straggler``: for more than half of the waiting, a single sample or group (of at least four) was missing. More
   workers would not help: that sample has to become faster, or be given up sooner.
4. ``generation`` or ``tools``: at least three fifths of the waiting was for rollouts, most of it for this part.
5. At least three fifths of it was for the reward side: its largest cause gives the name: ``reward`` (scorers at
   work), ``reward-queue`` (no free reward worker), ``limiter`` (a rate or concurrency limit of the job), ``endpoint``
   (the same wait, at least half of it because the endpoint asked for a pause, as with status 429),
   ``group-scorer``; for ``ready_queue`` (the groups were ready, the trainer had not taken them) ``trainer``.
6. ``balanced``: neither side holds three fifths.

The rules look at exposed time only, so they hold for synchronous and asynchronous schedules: time that overlaps with
the update is no part of a wait. Its threshold of a fifth is that of the alert RewardStarvesTrainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from plaudit_metrics.statistics.waits import CAUSES, ROLLOUT_CAUSES
from plaudit_wire.records import OUTCOMES, PAUSE

Verdict = Literal[
    "unscored",
    "generation",
    "tools",
    "reward",
    "reward-queue",
    "limiter",
    "endpoint",
    "group-scorer",
    "straggler",
    "trainer",
    "balanced",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

WAITING_SHARE = 0.2
"""Below this share of the step spent waiting, the trainer itself is the bottleneck."""
STRAGGLER_SHARE = 0.5
"""A straggler accounts for more than this share of the waiting."""
SIDE_SHARE = 0.6
"""Generation or the reward side accounts for at least this share of the waiting."""

_PROCESS_WAIT = re.compile(r"reward_pipeline/scorer/(.+)/wait_s/mean")
HELD_SHARE = 0.5
"""Of the waits for limits, the endpoints' own pauses take at least this share."""

_OUTCOME_KEYS = tuple(f"reward_pipeline/outcome/{outcome}" for outcome in OUTCOMES)
LIMITER_KEY, HELD_KEY = "reward_pipeline/limiter_total_s", "reward_pipeline/limiter_held_total_s"
_SCORED_KEY = "reward_pipeline/outcome/scored"

_NAMES: dict[str, Verdict] = {
    "generation": "generation",
    "tools": "tools",
    "sample_queue": "reward-queue",
    "limiter": "limiter",
    "score": "reward",
    "group_scorer": "group-scorer",
    "ready_queue": "trainer",
    PAUSE: "unscored",
}

_EXPLANATIONS: dict[Verdict, str] = {
    "unscored": "Too many samples have no score: the reasons are listed by scorer. Repair the scorer that fails.",
    "generation": "The trainer waited for generation: add rollouts, or shorten responses.",
    "tools": "The trainer waited for the tools of agents: make them faster, or raise agent.maxConcurrentSamples.",
    "reward": "The trainer waited for scorers at work: make them faster, or hide them (maxStaleness, mini-batches).",
    "reward-queue": "Finished samples waited for a free reward worker: add reward workers or raise their concurrency.",
    "limiter": "Scoring waited for a limit of the job (limits of a scorer): raise it, or send fewer requests.",
    "endpoint": "A judge's endpoint asked for pauses (429, Retry-After): raise its quota, or send fewer requests.",
    "group-scorer": "Groups waited for group-scope scorers: make them faster.",
    "straggler": "A single sample or group caused most of the wait: see the slowest sample, or lower its time limit.",
    "trainer": "The trainer hardly waited: the update itself is the bottleneck.",
    "balanced": "The trainer waited about as long for generation as for rewards: neither is the only bottleneck.",
}


def verdict(statistics: Mapping[str, float]) -> Verdict:
    """Name the bottleneck of a step.

    Args:
        statistics: the step's figures; read are ``step_s``, ``trainer_wait_s``, ``straggler_s``, ``wait/<cause>_s``
            (seconds) and ``reward_pipeline/outcome/<outcome>`` (counts); an absent one is 0.
    """
    waited_s = statistics.get("trainer_wait_s", 0.0)
    if nothing_scored(statistics) or pauses_hold(statistics):
        return "unscored"
    if waited_s <= 0 or waited_s < WAITING_SHARE * statistics.get("step_s", 0.0):
        return "trainer"
    if statistics.get("straggler_s", 0.0) > STRAGGLER_SHARE * waited_s:
        return "straggler"
    causes = {cause: statistics.get(f"wait/{cause}_s", 0.0) for cause in CAUSES}
    of_rollouts = {cause: causes.pop(cause) for cause in ROLLOUT_CAUSES}
    if sum(of_rollouts.values()) >= SIDE_SHARE * waited_s:
        return rollout_verdict(of_rollouts)
    if sum(causes.values()) >= SIDE_SHARE * waited_s:
        return reward_side(causes, statistics)[1]
    return "balanced"


def rollout_verdict(cause_s: Mapping[str, float]) -> Verdict:
    """Return the verdict for the larger of the rollouts' causes."""
    return _NAMES[max(cause_s, key=lambda cause: cause_s[cause])]


def nothing_scored(statistics: Mapping[str, float]) -> bool:
    """Return True when samples ended and none of them has a score."""
    ended = sum(statistics.get(key, 0.0) for key in _OUTCOME_KEYS)
    return ended > 0 and statistics.get(_SCORED_KEY, 0.0) == 0


def pauses_hold(statistics: Mapping[str, float]) -> bool:
    """Return True when the trainer's pauses for samples without a score took a fifth of the step or more."""
    paused_s = statistics.get(f"wait/{PAUSE}_s", 0.0)
    return paused_s > 0 and paused_s >= WAITING_SHARE * statistics.get("step_s", 0.0)


def reward_side(cause_s: Mapping[str, float], statistics: Mapping[str, float]) -> tuple[str, Verdict]:
    """Return the largest cause of the reward side, and the verdict that it gives."""
    largest = max(cause_s, key=lambda cause: cause_s[cause])
    held_s, limiter_s = statistics.get(HELD_KEY, 0.0), statistics.get(LIMITER_KEY, 0.0)
    if largest == "limiter" and held_s > 0 and held_s >= HELD_SHARE * limiter_s:
        return largest, "endpoint"
    return largest, _NAMES[largest]


def verdict_over(steps: Iterable[Mapping[str, float]]) -> Verdict:
    """Name the bottleneck of several steps together: the same rule over the sums of their seconds.

    In an asynchronous schedule steps come in bursts: one waits for two, and the next finds everything ready. A verdict
    on the second alone is "trainer"; this one weighs each step by its seconds.
    """
    causes = (f"wait/{cause}_s" for cause in CAUSES)
    keys = ("step_s", "trainer_wait_s", "straggler_s", *causes, *_OUTCOME_KEYS, HELD_KEY, LIMITER_KEY)
    sums = dict.fromkeys(keys, 0.0)
    for statistics in steps:
        for key in keys:
            sums[key] += statistics.get(key, 0.0)
    return verdict(sums)


def explain(name: str, statistics: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return a verdict's meaning and its remedy for people; empty for an unknown name.

    Args:
        statistics: the step's figures, for a remedy that they point to.
    """
    text = next((text for known, text in _EXPLANATIONS.items() if known == name), "")
    return " ".join(filter(None, (text, _more_processes(statistics) if name == "reward" else "")))


def _more_processes(statistics: Mapping[str, float]) -> str:
    """Return a sentence on the scorer whose calls waited longest for a process, if longer than they took."""
    waiting = []
    for key, wait_s in statistics.items():
        found = _PROCESS_WAIT.fullmatch(key)
        call_s = statistics.get(f"reward_pipeline/scorer/{found[1]}/call_s/mean", 0.0) if found else 0.0
        if found and wait_s > call_s:
            waiting.append((wait_s, call_s, found[1]))
    if not waiting:
        return ""
    wait_s, call_s, scorer = max(waiting)
    return (
        f"Calls of {scorer} waited {wait_s:.2f} s for a free process and took {call_s:.2f} s: raise workers.processes."
    )
