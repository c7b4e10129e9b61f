"""Split the trainer's waiting by its causes, name a step's bottleneck from its figures, and explain the verdict.

**The rule of the split.** Each instant of a wait goes wholly to the earliest cause in which any awaited group still
is::

    generation < sandboxes < tools < sample_queue < limiter < score < group_scorer < ready_queue

A group is in the earliest cause of any of its samples; once all of them are terminal it is in ``group_scorer`` until it
is ready and in ``ready_queue`` until the wait ends. Other waits count as their neighbour: those for a
rollout, for weights and for the engine as ``generation``; time with a reward worker that was lost as
``sample_queue``; retries and the commit as ``score``. A wait for no known group (none admitted yet, rollouts reading a
checkpoint) is ``generation``. Turns and tool calls of a conversation alternate: its seconds in tools are placed at the
end of its work in the rollout, and before them those in which it waited for its machine.

So every sample only moves forward through the causes, and the earliest cause among many samples does too: a wait splits
at the points in time at which the *last* awaited sample leaves each cause. No sampling, no sweep, and the parts add up
to the wait. A wait whose cause the trainer recorded itself goes wholly to it: ``pause`` (too many samples had no score,
so the trainer paused before it admitted their prompts again), ``redis`` (Redis did not answer it for over a second, so
nobody could hand anything on), ``unknown`` (Redis's clock was set, and stamps of two clocks cannot be compared).

**The verdict.** The first rule that holds decides:

1. ``unscored``: no sample has a score, or the trainer paused for a fifth of the step or more because too many had none.
2. ``redis``: Redis did not answer for a fifth of the step or more; or each reply took a tenth of a second or more, and
   ten of them, as many as a sample's way from its prompt to its update has one after the other, a fifth of the step.
   Ten such replies do not fit into a step of less than a second: its few replies were late for another reason.
3. ``trainer``: the trainer waited for less than a fifth of the step. Faster rewards or rollouts would not help much.
4. ``straggler``: for more than half of the waiting, a single sample or group (of at least four) was missing. More
   workers would not help: that sample has to become faster, or be given up sooner.
5. ``generation``, ``sandboxes`` or ``tools``: at least three fifths of the waiting was for rollouts, most of it for
   this part.
6. At least three fifths of it was for the reward side: its largest cause gives the name: ``reward`` (scorers at
   work), ``reward-queue`` (no free reward worker), ``limiter`` (a rate or concurrency limit of the job), ``endpoint``
   (the same wait, at least half of it because the endpoint asked for a pause, as with status 429), ``sandboxes`` (the
   same wait, at least half of it of tests that wait for a place), ``group-scorer``; for ``ready_queue`` (the groups
   were ready, the trainer had not taken them) ``trainer``.
7. ``balanced``: neither side holds three fifths, or it is unknown which one does.

The rules look at exposed time only, so they hold for synchronous and asynchronous schedules: time that overlaps with
the update is no part of a wait. The threshold of a fifth is that of the alert RewardStarvesTrainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from plaudit_metrics.statistics.columns import Floats, Integers, SampleColumns
from plaudit_wire.records import OUTCOMES, PAUSE, REDIS, UNKNOWN, GroupRecord, WaitRecord

CAUSES = ("generation", "sandboxes", "tools", "sample_queue", "limiter", "score", "group_scorer", "ready_queue", PAUSE)
"""In the order of the pipeline; all but the first three are the reward side's."""
ALL_CAUSES = (*CAUSES, REDIS, UNKNOWN)
"""With those that are nobody's; their figures are absent where Redis always answered and its clock was not set."""
ROLLOUT_CAUSES = CAUSES[:3]
_OF_GROUPS = CAUSES[:-1]
"""Causes that follow from the stamps of the awaited groups."""
_FEWEST_PEERS = 4
"""Among fewer awaited samples (or groups) the last always accounts for a large part, which makes it no straggler."""


@dataclass(frozen=True)
class WaitSplit:
    """Hold the trainer's waiting in one step, by cause."""

    total_s: float
    """Sum of the waits."""
    cause_s: dict[str, float]
    """Seconds for each of ``CAUSES``, and for ``REDIS`` and ``UNKNOWN`` if any; they add up to ``total_s``."""
    straggler_s: float
    """Seconds in which the trainer waited for a single sample or group (of at least four)."""

    @property
    def exposed_reward_s(self) -> float:
        """Return the seconds in which the trainer waited for rewards after generation had ended."""
        return sum(seconds for cause, seconds in self.cause_s.items() if cause in CAUSES[len(ROLLOUT_CAUSES) :])


def split_waits(samples: SampleColumns, groups: Sequence[GroupRecord], waits: Sequence[WaitRecord]) -> WaitSplit:
    """Split the trainer's waiting, disjoint stretches of the transport's clock, over ``ALL_CAUSES`` by the rule above.

    For an awaited group without samples its record decides; a group without either is left out.
    """
    timeline = _Timeline(samples, {record.group: record for record in groups})
    cause_s = np.zeros(len(ALL_CAUSES))
    straggler_s = 0.0
    for wait in waits:
        if wait.cause in ALL_CAUSES:
            cause_s[ALL_CAUSES.index(wait.cause)] += wait.end - wait.start
            continue
        awaited = timeline.find(wait.awaited)
        cause_s[: len(_OF_GROUPS)] += _causes(wait, timeline.left[:, awaited])
        by_group = _held_by_last(wait, timeline.left[-1, awaited])
        by_sample = _held_by_last(wait, timeline.committed_in(awaited))
        straggler_s += max(by_group, by_sample)
    return WaitSplit(
        total_s=float(sum(wait.end - wait.start for wait in waits)),
        cause_s={cause: s for cause, s in zip(ALL_CAUSES, cause_s.tolist(), strict=True) if s or cause in CAUSES},
        straggler_s=straggler_s,
    )


class _Timeline:
    """Hold the points in time at which the last sample of each group left each cause."""

    def __init__(self, samples: SampleColumns, groups: Mapping[str, GroupRecord]) -> None:
        names = list(dict.fromkeys((*samples.groups, *groups)))
        self._codes = {name: code for code, name in enumerate(names)}
        self._order = np.argsort(samples.group, kind="stable")
        counts = np.bincount(samples.group, minlength=len(names))
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        of_samples = _times_left(samples)
        self._committed = of_samples[-1][self._order]
        self.left = np.full((len(_OF_GROUPS) - 1, len(names)), -np.inf)
        """Seconds since the epoch by cause, all but the last, and group; shape [7, number of groups]."""
        for cause, left in enumerate(of_samples):
            np.maximum.at(self.left[cause], samples.group, left)
        if groups:
            self._complete(groups)

    def _complete(self, groups: Mapping[str, GroupRecord]) -> None:
        codes = np.array([self._codes[name] for name in groups], dtype=np.int64)
        terminal = [record.terminal or record.ready or record.closed for record in groups.values()]
        ready = np.array([record.ready for record in groups.values()], dtype=np.float64)
        # Of a group without known samples the record alone tells when they were terminal.
        without = np.isneginf(self.left[0, codes])
        self.left[:-1, codes[without]] = np.array(terminal, dtype=np.float64)[without]
        self.left[-1, codes] = np.fmax(self.left[-2, codes], ready)

    def find(self, names: Sequence[str]) -> Integers:
        """Return the positions of the groups that are known."""
        return np.array([self._codes[name] for name in names if name in self._codes], dtype=np.int64)

    def committed_in(self, groups: Integers) -> Floats:
        """Return when each sample of the given groups became terminal."""
        counts = self._ends[groups] - self._starts[groups]
        before = np.cumsum(counts) - counts
        places = np.repeat(self._starts[groups] - before, counts) + np.arange(counts.sum())
        committed: Floats = self._committed[places]
        return committed


def _times_left(samples: SampleColumns) -> list[Floats]:
    _, taken, published, _, score_taken, committed = samples.stamps
    generated = np.maximum(published - np.fmax(samples.tool_s, 0.0), taken)
    has_machine = np.minimum(generated + samples.sandbox_s, published)
    limited = np.minimum(score_taken + np.fmax(samples.limiter_s, 0.0), committed)
    return [generated, has_machine, published, score_taken, limited, committed]


def _causes(wait: WaitRecord, left: Floats) -> Floats:
    """Return the seconds of one wait by cause, shape [len(_OF_GROUPS)]; ``left`` has shape [7, awaited groups]."""
    if left.shape[1] == 0:
        return np.array([wait.end - wait.start, *[0.0] * (len(_OF_GROUPS) - 1)])
    borders = np.maximum.accumulate(left.max(axis=1))
    return np.diff(np.concatenate([[wait.start], np.clip(borders, wait.start, wait.end), [wait.end]]))


def _held_by_last(wait: WaitRecord, done: Floats) -> float:
    """Return the seconds of the wait between the last two of ``done``; 0 among fewer than four."""
    if len(done) < _FEWEST_PEERS:
        return 0.0
    before, last = np.clip(np.partition(done, -2)[-2:], wait.start, wait.end)
    return float(last - before)


Verdict = Literal[
    "unscored",
    "redis",
    "generation",
    "sandboxes",
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
HELD_SHARE = 0.5
"""Of the waits for limits, the endpoints' own pauses, or the tests' waits for places, take at least this share."""
VERIFY_WAIT_KEY = "reward_pipeline/sandbox/verify_wait_total_s"
_OUTCOME_KEYS = tuple(f"reward_pipeline/outcome/{outcome}" for outcome in OUTCOMES)
LIMITER_KEY, HELD_KEY = "reward_pipeline/limiter_total_s", "reward_pipeline/limiter_held_total_s"
REPLY_KEY = "reward_pipeline/redis_reply_s"
"""Seconds until Redis replied to the trainer, in the step (first quartile)."""
SLOW_REPLY_S = 0.1
"""Faster replies are not slow, whatever share of a short step they take."""
_REPLIES_OF_A_SAMPLE = 10
_SLOW_STEP_S = _REPLIES_OF_A_SAMPLE * SLOW_REPLY_S
"""Slow replies do not let a step be shorter than that."""
_SCORED_KEY = "reward_pipeline/outcome/scored"
_NAMES: dict[str, Verdict] = {
    "generation": "generation",
    "sandboxes": "sandboxes",
    "tools": "tools",
    "sample_queue": "reward-queue",
    "limiter": "limiter",
    "score": "reward",
    "group_scorer": "group-scorer",
    "ready_queue": "trainer",
    PAUSE: "unscored",
    REDIS: "redis",
}
_EXPLANATIONS: dict[str, str] = {
    "unscored": "Too many samples have no score: the reasons are listed by scorer. Repair the scorer that fails.",
    "redis": "Redis did not answer, and every process of the run waited: look at its pod, its disk and its memory.",
    "generation": "The trainer waited for generation: add rollouts, or shorten responses.",
    "sandboxes": "The trainer waited for machines of samples.",
    "tools": "The trainer waited for the tools of agents: make them faster, or raise agent.maxConcurrentSamples.",
    "reward": "The trainer waited for scorers at work: make them faster, or hide them (maxStaleness, mini-batches).",
    "reward-queue": "Finished samples waited for a free reward worker: add reward workers, or raise "
    "workers.maxConcurrentSamples, or workers.processes where functions block.",
    "limiter": "Scoring waited for a limit of the job (limits of a scorer): raise it, or send fewer requests.",
    "endpoint": "A judge's endpoint asked for pauses (429, Retry-After): raise its quota, or send fewer requests.",
    "group-scorer": "Groups waited for group-scope scorers: make them faster.",
    "straggler": "A single sample or group caused most of the wait: see the slowest sample, or lower its time limit.",
    "trainer": "The trainer hardly waited: the update itself is the bottleneck.",
    "balanced": "The trainer waited about as long for generation as for rewards: neither is the only bottleneck.",
}

_REPLIED_SLOWLY = (
    "Redis replied slowly, after {reply_s:.2f} s and more, and a sample waits for about {replies} replies: look "
    "at the network to it, at its CPU and at slow commands (SLOWLOG GET)."
)
_CLOCK_WAS_SET = (
    "Redis's clock was set, so the stamps do not give what the trainer waited for: the next steps give it again."
)
_READY_WAITED = (
    "Groups were ready, and the trainer had not taken them: it waited for the GPUs, for weights or for Redis, or was "
    "frozen."
)


def verdict(statistics: Mapping[str, float]) -> Verdict:
    """Name the bottleneck of a step by its figures; an absent one is 0.

    Read are ``step_s``, ``trainer_wait_s``, ``straggler_s``, ``wait/<cause>_s`` and
    ``reward_pipeline/outcome/<outcome>``.
    """
    return reasoning(statistics)[-1].verdict


def _reward_side(cause_s: Mapping[str, float], statistics: Mapping[str, float]) -> tuple[str, Verdict]:
    """Return the largest cause of the reward side, and the verdict that it gives."""
    largest = max(cause_s, key=lambda cause: cause_s[cause])
    held_s, limiter_s = statistics.get(HELD_KEY, 0.0), statistics.get(LIMITER_KEY, 0.0)
    if largest == "limiter" and held_s > 0 and held_s >= HELD_SHARE * limiter_s:
        return largest, "endpoint"
    tests_s = statistics.get(VERIFY_WAIT_KEY, 0.0)
    if largest == "limiter" and tests_s > 0 and tests_s >= HELD_SHARE * limiter_s:
        return largest, "sandboxes"
    return largest, _NAMES[largest]


def verdict_over(steps: Iterable[Mapping[str, float]]) -> Verdict:
    """Name the bottleneck of several steps together: the same rule over the sums of their seconds.

    In an asynchronous schedule steps come in bursts: one waits for two, and the next finds everything ready. A verdict
    on the second alone is "trainer"; this one weighs each step by its seconds.
    """
    causes = (f"wait/{cause}_s" for cause in ALL_CAUSES)
    keys = ("step_s", "trainer_wait_s", "straggler_s", *causes, *_OUTCOME_KEYS, HELD_KEY, LIMITER_KEY, VERIFY_WAIT_KEY)
    sums = dict.fromkeys((*keys, REPLY_KEY), 0.0)
    for statistics in steps:
        for key in keys:
            sums[key] += statistics.get(key, 0.0)
        sums[REPLY_KEY] += _slow_reply_s(statistics)
    return verdict(sums)


def explain(name: str, statistics: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return a verdict's meaning, and its remedy by the step's figures, for people; empty for an unknown name."""
    step_s = statistics.get("step_s", math.inf)
    if name == "trainer" and statistics.get("trainer_wait_s", 0.0) >= WAITING_SHARE * step_s:
        return _READY_WAITED
    has_paused = statistics.get(f"wait/{REDIS}_s", 0.0) >= WAITING_SHARE * step_s
    if name == "redis" and not has_paused and replies_are_slow(statistics.get(REPLY_KEY, 0.0), step_s):
        return _REPLIED_SLOWLY.format(reply_s=statistics[REPLY_KEY], replies=_REPLIES_OF_A_SAMPLE)
    if name == "balanced" and statistics.get(f"wait/{UNKNOWN}_s", 0.0) >= WAITING_SHARE * step_s:
        return _CLOCK_WAS_SET
    details = {"reward": _slowest_scorer, "generation": _of_generation, "tools": _slowest_tool}
    details |= {"reward-queue": _taken_over, "straggler": _last_of_all, "sandboxes": _slowest_of_machines}
    details |= {"limiter": _most_limited, "endpoint": _most_limited, "group-scorer": _slowest_of_groups}
    more = details[name](statistics) if name in details else ""
    return " ".join(filter(None, (_EXPLANATIONS.get(name, ""), more)))


def _slow_reply_s(statistics: Mapping[str, float]) -> float:
    """Return the seconds of a reply of Redis; 0 where it is fast, and for a step that is too short to tell."""
    reply_s, step_s = statistics.get(REPLY_KEY, 0.0), statistics.get("step_s", math.inf)
    return reply_s if reply_s >= SLOW_REPLY_S and step_s >= _SLOW_STEP_S else 0.0


def replies_are_slow(reply_s: float, step_s: float | None) -> bool:
    """Return True where the replies on a sample's way, of so many seconds each, take a fifth of the step or more.

    Args:
        step_s: None where there is no step: whatever is scored, ten slow replies are too many.
    """
    if reply_s < SLOW_REPLY_S or step_s is None:
        return reply_s >= SLOW_REPLY_S
    return step_s >= _SLOW_STEP_S and _REPLIES_OF_A_SAMPLE * reply_s >= WAITING_SHARE * step_s


def _of_generation(statistics: Mapping[str, float]) -> str:
    """Return sentences on lost rollouts, and on weights whose loading took half of the wait or more."""
    loaded_s, waited_s = statistics.get("timing_s/load_weights", 0.0), statistics.get("wait/generation_s", 0.0)
    loading = ""
    if loaded_s > 0 and loaded_s >= HELD_SHARE * waited_s:
        loading = f"The slowest rollout took {loaded_s:.2f} s to load new weights: use a faster volume."
    lost = statistics.get("reward_pipeline/redelivered_prompts", 0.0)
    prompts = "1 prompt was" if lost == 1 else f"{lost:.0f} prompts were"
    taken_over = f"{prompts} taken over from a rollout that was frozen or lost." if lost else ""
    return " ".join(filter(None, (loading, taken_over)))


_FAILED_ATTEMPTS = (
    "Attempts of {scorer} that failed, with the pauses after them, took {seconds:.2f} s of a sample: see why in the "
    "log of a reward worker, and whether fewer retries do."
)
_THROTTLED = (
    "Requests of {scorer} that its endpoint refused (429, too many requests), with the pauses after them, took "
    "{seconds:.2f} s of a sample: raise its quota, or lower the limits of {scorer} to what it allows."
)


def _of_retries(statistics: Mapping[str, float], scorer: str, place: str) -> str:
    """Return a sentence on the failed attempts of a scorer, by their seconds at this place of the distribution."""
    failed_s, throttled_s = (
        statistics.get(f"reward_pipeline/scorer/{scorer}/{part}_s/{place}", 0.0) for part in ("retry", "throttled")
    )
    if throttled_s > HELD_SHARE * failed_s:
        return _THROTTLED.format(scorer=scorer, seconds=throttled_s)
    return _FAILED_ATTEMPTS.format(scorer=scorer, seconds=failed_s)


def _taken_over(statistics: Mapping[str, float]) -> str:
    """Return a sentence on samples of a reward worker that was lost."""
    lost = statistics.get("reward_pipeline/redelivered", 0.0)
    if not lost:
        return ""
    longest_s = statistics.get("reward_pipeline/redelivery_s/max", 0.0)
    samples = "1 sample was" if lost == 1 else f"{lost:.0f} samples were"
    return (
        f"{samples} with a reward worker that was frozen or lost, for {longest_s:.0f} s at most: look at its log and "
        "its node before you add workers."
    )


_MACHINE_WAITS = {
    "claim": "Samples waited {} for a place for their machine: raise sandboxes.maxConcurrent, and add nodes if it is "
    "as high as they allow.",
    "start": "Machines took {} to start: use smaller images, and have them on the nodes before the run.",
    "wait": "Commands waited {} for a place: raise sandboxes.maxConcurrent.",
    "verify_wait": "Tests waited {} for a place: raise sandboxes.maxConcurrent, or add reward workers.",
}
"""The waits for machines, by stage, with the remedy."""


def _slowest_of_machines(statistics: Mapping[str, float]) -> str:
    """Return a sentence on the longest of the waits for machines."""

    def place(stage: str, figure: str) -> float:
        return statistics.get(f"reward_pipeline/sandbox/{stage}_s/{figure}", 0.0)

    longest = max(_MACHINE_WAITS, key=lambda stage: place(stage, "mean"))
    if not place(longest, "max"):
        return ""
    times = f"{place(longest, 'p50'):.2f} s at the median, {place(longest, 'p95'):.2f} s at the 95th percentile,"
    return _MACHINE_WAITS[longest].format(times)


def _slowest_tool(statistics: Mapping[str, float]) -> str:
    """Return a sentence on the tool whose calls took longest at the 95th percentile."""
    slow = _of_each("tool", statistics, "call_s/p95")
    if not slow:
        return ""
    tool = max(slow, key=lambda name: slow[name])
    calls = statistics.get("tool_call_counts/max", 1.0)
    if calls * slow[tool] < HELD_SHARE * statistics.get("reward_pipeline/tools_s/p95", 0.0):
        return "Most of it was in no call of a tool: look at how environments begin and end."
    median_s = statistics.get(f"reward_pipeline/tool/{tool}/call_s/p50", slow[tool])
    return f"The slowest is {tool}: {median_s:.2f} s at the median, {slow[tool]:.2f} s at the 95th percentile."


def _slowest_scorer(statistics: Mapping[str, float]) -> str:
    """Return sentences on the scorer for which the step waited, and on what was most of it, if not its calls.

    A sample waits for the scorer that ends last, however many others wait for their processes meanwhile.
    """
    names = _of_each("scorer", statistics, "call_s/mean")
    held = {name: _held(statistics, name) for name in names if not _is_of_group(statistics, name)}
    if not held:
        return ""
    scorer = max(held, key=lambda name: (held[name].behind_s, held[name].slow_s))
    slowest, all_s = held[scorer], sum(each.all_s for each in held.values())
    share = f", {slowest.all_s / all_s:.0%} of the seconds of all scorers" if all_s > 0 else ""
    times = f"{slowest.median_s:.2f} s at the median, {slowest.slow_s:.2f} s at the 95th percentile"
    most = f", {slowest.most_s:.2f} s at most" if slowest.most_s > 2 * slowest.slow_s else ""
    sentence = f"The slowest is {scorer}: {times}{most}{share}."
    if slowest.retry_s > slowest.wait_s + slowest.call_s:
        return f"{sentence} {_of_retries(statistics, scorer, 'mean')}"
    if slowest.wait_s <= slowest.call_s:
        return sentence
    return (
        f"{sentence} Calls of {scorer} waited {slowest.wait_s:.2f} s for a free process and took "
        f"{slowest.call_s:.2f} s: raise workers.processes."
    )


def _most_limited(statistics: Mapping[str, float]) -> str:
    """Return a sentence on the scorer that waited longest for its limits."""
    limited = _of_each("scorer", statistics, "limiter_s/p95")
    limited = {name: seconds for name, seconds in limited.items() if not _is_of_group(statistics, name)}
    scorer = max(limited, key=lambda name: limited[name], default="")
    if not limited.get(scorer, 0.0):
        return ""
    median_s = statistics.get(f"reward_pipeline/scorer/{scorer}/limiter_s/p50", limited[scorer])
    return (
        f"It is {scorer} that waited: {median_s:.2f} s at the median, {limited[scorer]:.2f} s at the 95th percentile."
    )


def _slowest_of_groups(statistics: Mapping[str, float]) -> str:
    """Return sentences on the scorer that held groups longest, and on what was most of it, if not its calls."""
    slow = _of_each("scorer", statistics, "group_s/p95")
    stage_s = statistics.get("reward_pipeline/group_scorer_s/p95", 0.0)
    if sum(slow.values()) < HELD_SHARE * stage_s:
        return f"Most of {stage_s:.2f} s was the wait for a free reward worker: add reward workers."
    if not slow:
        return ""
    scorer = max(slow, key=lambda name: slow[name])
    median_s, mean_s = (statistics.get(f"reward_pipeline/scorer/{scorer}/group_s/{of}", 0.0) for of in ("p50", "mean"))
    sentence = f"The slowest is {scorer}: {median_s:.2f} s at the median, {slow[scorer]:.2f} s at the 95th percentile."
    if not _is_of_group(statistics, scorer):
        return f"{sentence} It is its post_process_scores that took so long."
    limited_s, retry_s = (
        statistics.get(f"reward_pipeline/scorer/{scorer}/{part}_s/mean", 0.0) for part in ("limiter", "retry")
    )
    if retry_s > HELD_SHARE * mean_s:
        return f"{sentence} {_of_retries(statistics, scorer, 'mean')}"
    if limited_s > HELD_SHARE * mean_s:
        return f"{sentence} It waited {limited_s:.2f} s for its limits: raise them, or send fewer requests."
    return sentence


def _is_of_group(statistics: Mapping[str, float], scorer: str) -> bool:
    """Return True for a scorer of group scope: samples did not wait for it, groups did."""
    key = f"reward_pipeline/scorer/{scorer}"
    return f"{key}/group_s/mean" in statistics and f"{key}/work_s/mean" not in statistics


def _of_each(kind: str, statistics: Mapping[str, float], figure: str) -> dict[str, float]:
    """Return a figure of each scorer, or of each tool, by its name."""
    key = re.compile(f"reward_pipeline/{kind}/(.+)/{figure}")
    return {found[1]: value for name, value in statistics.items() if (found := key.fullmatch(name))}


def _last_of_all(statistics: Mapping[str, float]) -> str:
    """Return sentences on why a straggler is one, where its worker was lost, or a scorer took half of it or more."""
    half_s = HELD_SHARE * statistics.get("straggler_s", math.inf)
    retried = _of_each("scorer", statistics, "retry_s/max")
    scorer = max(retried, key=lambda name: retried[name], default="")
    if retried.get(scorer, 0.0) >= half_s:
        return " ".join(filter(None, (_taken_over(statistics), _of_retries(statistics, scorer, "max"))))
    beyond = {
        (name, seconds): most_s - statistics.get(f"reward_pipeline/scorer/{name}/{seconds}/p50", most_s)
        for seconds in ("work_s", "group_s")
        for name, most_s in _of_each("scorer", statistics, f"{seconds}/max").items()
    }
    scorer, seconds = max(beyond, key=lambda each: beyond[each], default=("", ""))
    slowest, beyond_s = "", beyond.get((scorer, seconds), 0.0)
    if beyond_s >= half_s:
        most_s = statistics[f"reward_pipeline/scorer/{scorer}/{seconds}/max"]
        slowest = f"Its scorer {scorer} took {most_s:.2f} s, {most_s - beyond_s:.2f} s at the median."
    return " ".join(filter(None, (_taken_over(statistics), slowest)))


class _Held(NamedTuple):
    """Hold how long a scorer held its samples: failed attempts, the wait for a process and the call, in seconds."""

    retry_s: float
    wait_s: float
    call_s: float
    median_s: float
    slow_s: float
    """At the 95th percentile."""
    most_s: float
    behind_s: float
    """While most unfinished calls were its; 0 where that is unknown."""
    all_s: float
    """Over all samples."""


def _held(statistics: Mapping[str, float], scorer: str) -> _Held:
    key = f"reward_pipeline/scorer/{scorer}"
    calls = sum(statistics.get(f"{key}/outcome/{outcome}", 0.0) for outcome in OUTCOMES)
    retry_s, wait_s, call_s = (statistics.get(f"{key}/{part}_s/mean", 0.0) for part in ("retry", "wait", "call"))
    parts = {"retry": retry_s, "wait": wait_s, "call": call_s}
    median_s, slow_s, most_s = (
        statistics.get(
            f"{key}/work_s/{place}",  # absent in records of earlier releases
            sum(statistics.get(f"{key}/{part}_s/{place}", mean_s) for part, mean_s in parts.items()),
        )
        for place in ("p50", "p95", "max")
    )
    behind_s = statistics.get(f"{key}/behind_s", 0.0)
    return _Held(retry_s, wait_s, call_s, median_s, slow_s, most_s, behind_s, sum(parts.values()) * calls)


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
    """Apply the rules to a step's figures (those that ``verdict`` reads), up to the first that holds: it decides."""
    rules: list[VerdictRule] = []
    for rule in _rules(statistics):
        rules.append(rule)
        if rule.holds:
            break
    return rules


def _rules(statistics: Mapping[str, float]) -> Iterable[VerdictRule]:
    step_s, waited_s = statistics.get("step_s", 0.0), statistics.get("trainer_wait_s", 0.0)
    paused_s = statistics.get(f"wait/{PAUSE}_s", 0.0)
    ended = sum(statistics.get(key, 0.0) for key in _OUTCOME_KEYS)
    nothing_scored = ended > 0 and statistics.get(_SCORED_KEY, 0.0) == 0
    yield VerdictRule(
        "unscored",
        "Did too many samples have no score?",
        "no sample has a score" if nothing_scored else f"pauses for them took {_share(paused_s, step_s, 'the step')}",
        f"no score at all, or at least {WAITING_SHARE:.0%}",
        nothing_scored or (paused_s > 0 and paused_s >= WAITING_SHARE * step_s),
    )
    if redis_s := statistics.get(f"wait/{REDIS}_s", 0.0):
        yield VerdictRule(
            "redis",
            "Did Redis not answer for a fifth of the step?",
            f"it did not answer for {_share(redis_s, step_s, 'the step')}",
            f"at least {WAITING_SHARE:.0%}",
            redis_s >= WAITING_SHARE * step_s,
        )
    if reply_s := _slow_reply_s(statistics):
        replies_s = _REPLIES_OF_A_SAMPLE * reply_s
        yield VerdictRule(
            "redis",
            f"Did {_REPLIES_OF_A_SAMPLE} replies of Redis, as many as a sample waits for, take a fifth of the step?",
            f"they took {_share(replies_s, step_s, 'the step')}",
            f"at least {WAITING_SHARE:.0%}",
            replies_are_slow(reply_s, step_s),
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
    parts = (f", {cause} {of_rollouts[cause]:.2f} s of it" for cause in ROLLOUT_CAUSES[1:] if of_rollouts[cause])
    yield VerdictRule(
        _NAMES[max(of_rollouts, key=lambda cause: of_rollouts[cause])],
        "Did the trainer wait mostly for generation?",
        f"generation took {_share(rollout_s, waited_s, 'the waiting')}{''.join(parts)}",
        f"at least {SIDE_SHARE:.0%}",
        rollout_s >= SIDE_SHARE * waited_s,
    )
    reward_s = sum(causes.values())
    largest, name = _reward_side(causes, statistics)
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
