"""Build the API's responses about steps, closed and open, as plain data, for the live page and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import msgspec

from plaudit_metrics.service.trace import chrome_trace
from plaudit_metrics.sources.snapshot import SILENT_AFTER_S, RunSnapshot, StreamDepth
from plaudit_metrics.sources.steps import VALIDATION_FIRST, ClosedStep, flat_step
from plaudit_metrics.statistics.stages import stages_of
from plaudit_metrics.statistics.steps import slowest_samples
from plaudit_metrics.statistics.verdict import explain, reasoning, replies_are_slow, verdict_over
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import VALIDATES, GroupRecord, SampleRecord, ScorerWork, StepRecord, WorkerRecord

RECENT_STEPS = 10
"""The number of steps in the verdict over several."""


def step_summary(step: ClosedStep) -> dict[str, Any]:
    """Return the step's figures by the keys of docs/metrics.md, without its waits."""
    flat = flat_step(step.record)
    del flat["waits"]
    return flat | {"records_missing": step.records_missing}


def step_detail(step: ClosedStep) -> dict[str, Any]:
    """Return the figures, the waits, the explanation of the verdict and the rules that led to it."""
    record = step.record
    return step_summary(step) | {
        "explanation": explain(record.verdict, record.statistics),
        "reasoning": msgspec.to_builtins(reasoning(_own_figures(record))),
        "waits": msgspec.to_builtins(record.waits),
    }


def sample_details(step: ClosedStep, count: int) -> list[dict[str, Any]]:
    """Return the step's slowest samples, each with its stages."""
    return [
        msgspec.to_builtins(sample)
        | {"wall_s": sample.wall_s, "stages_s": stages_of(sample, step.groups.get(sample.group))}
        for sample in step.slowest[:count]
    ]


def step_timeline(
    step: ClosedStep, samples: Iterable[SampleRecord], groups: Iterable[GroupRecord], count: int
) -> dict[str, Any]:
    """Return the timeline of the ``count`` slowest of a step's samples, in Chrome's trace format."""
    chosen = slowest_samples(samples, count)
    drawn = {sample.group for sample in chosen}
    return chrome_trace(step.record, chosen, [group for group in groups if group.group in drawn])


def verdict_detail(recent: Sequence[StepRecord], *, together: bool = False) -> dict[str, Any]:
    """Return the newest step's verdict and where its time went, and the verdicts of all given steps.

    ``together``: steps overlap, so one waits for two and the next for none, and the verdict of several says more.
    """
    recent = [record for record in recent if record.step != VALIDATION_FIRST]  # which trains nothing
    if not recent:
        empty: dict[str, Any] = {"step": None, "verdict": "", "explanation": "No step has closed yet.", "seconds": {}}
        return empty | {"together": together, "recent_verdict": "", "recent": {}}
    newest = recent[-1]
    waits = {key: value for key, value in newest.statistics.items() if key.startswith("wait/")}
    own_s = newest.length_s - sum(waits.values())
    of_all = verdict_over(_own_figures(record) for record in recent)
    figures = newest.statistics if not together or of_all == newest.verdict else {}
    return {
        "step": newest.step,
        "verdict": newest.verdict,
        "explanation": explain(of_all if together else newest.verdict, figures),
        "seconds": {"trainer_s": own_s, **{key.removeprefix("wait/"): value for key, value in sorted(waits.items())}},
        "together": together,
        "recent_verdict": of_all,
        "recent": Counter(record.verdict for record in recent),
    }


def _own_figures(record: StepRecord) -> dict[str, float]:
    return {"step_s": record.length_s} | record.statistics


class Ages(NamedTuple):
    """Hold how old the newest snapshot is, in seconds."""

    snapshot_s: float = 0.0
    unheard_s: float = 0.0
    """Seconds in which Redis has not responded to a question; 0 while none is open."""


_FRESH = Ages()


def open_step(
    seen: RunSnapshot,
    closed: Sequence[StepRecord],
    opened: float | None,
    ages: Ages = _FRESH,
    *,
    max_staleness: int = 0,
) -> dict[str, Any]:
    """Return what the open step waits for now, from the newest snapshot, as a sentence and in one word.

    Args:
        closed: the newest closed steps, oldest first; none before the first, and of a service.
        opened: when the open step began (seconds since the epoch, Redis's clock); None: no trainer has started.
        max_staleness: of the job; from 1 on, prompts of so many later steps are generated meanwhile.
    """
    trainer = next((worker for worker in seen.worker_records if worker.role == "trainer"), None)
    number = None if not closed and trainer is None else _trained(closed, trainer) + 1
    seconds = None if opened is None else max(seen.time - opened, 0.0) + ages.snapshot_s
    lengths = [record.length_s for record in closed if record.num_samples]
    usual_s = median(lengths) if lengths else 0.0
    awaited_for_s = _awaited_for(seconds or 0.0, closed, max_staleness) if not seen.is_validating else 0.0
    waits_for, facts = _waits_for(seen, trainer, ages.unheard_s, _Open(seconds, usual_s, awaited_for_s))
    step = "" if number is None or seconds is None else f"step {number}, open for {_long(seconds)}: "
    if seen.is_validating:
        step += "the trainer validates; "
    return {"step": number, "seconds": seconds, "waits_for": waits_for, "text": step + "; ".join(facts)}


def _trained(closed: Sequence[StepRecord], trainer: WorkerRecord | None) -> int:
    """Return the step before the open one. A trainer that took over goes on from its checkpoint, which may be older."""
    newest = closed[-1].step if closed else 0
    with suppress(ValueError):  # it has loaded none
        began = PolicyVersion.parse(trainer.version if trainer else "")
        if closed and began.incarnation > closed[-1].incarnation:
            return min(newest, began.number)
    return newest


def judges(seen: RunSnapshot) -> list[dict[str, Any]]:
    """Return what was asked of each judge since the run began, and whether it is asked now."""
    names = {labels[0] for labels in (*seen.judge_requests, *seen.judge_tokens)}
    return [
        {
            "judge": name,
            "requests": {labels[1]: count for labels, count in seen.judge_requests.items() if labels[0] == name},
            "tokens": {labels[1]: count for labels, count in seen.judge_tokens.items() if labels[0] == name},
            "circuit_open": seen.circuits_open.get(name, False),
        }
        for name in sorted(names)
    ]


REDIS_AWAY, REDIS_SLOW = "redis", "redis-slow"
"""What the open step waits for while Redis does not respond, or responds slowly."""
_REDIS_AWAY_S = 6.0
"""Redis is asked every two seconds."""
_MOST_FACTS = 3
_OLD_ATTEMPT_S = 5.0
"""Younger attempts than that tell less than the number of calls: the scorer with the most is behind the others."""
Facts = list[tuple[str, str]]
"""Causes in one word each, and what is known of them."""


class _Open(NamedTuple):
    """Hold what is known of the open step's length."""

    seconds: float | None
    """None where there is no step: before a trainer starts, and in a service."""
    usual_s: float
    """The median of the newest closed steps; 0 before the first."""
    awaited_for_s: float
    """The prompts of this step were admitted so long ago, or longer."""

    @property
    def length_s(self) -> float | None:
        """Return how long the step takes as far as one can tell."""
        return None if self.seconds is None else max(self.seconds, self.usual_s)


def _waits_for(seen: RunSnapshot, trainer: WorkerRecord | None, unheard_s: float, step: _Open) -> tuple[str, list[str]]:
    """Return the first cause that holds, and what is known of the next ones.

    A cause of the pipeline is found as in a step's record: that of the earliest stage in which work of the step is.
    """
    if unheard_s > _REDIS_AWAY_S:
        return REDIS_AWAY, [f"Redis has not responded for {_long(unheard_s)}, and every process of the run waits"]
    if len(seen.silent) > 1 and seen.all_silent_s > SILENT_AFTER_S:
        silence = f"no process of the run has sent a heartbeat for {seen.all_silent_s:.0f} s"
        return "silent", [f"{silence}: they are lost, or cut off from Redis"]
    facts: Facts = _of_replies(seen, step.length_s)
    facts += [(f"silent-{worker.role}", _silence(worker, silent_s)) for worker, silent_s in seen.silent]
    if trainer is not None and trainer.problem:
        facts.append(("unscored", trainer.problem))
    if trainer is not None and trainer.doing and trainer.doing != VALIDATES:
        facts.append(("trainer", f"the trainer {trainer.doing}"))
    lost = {worker.worker for worker, _ in seen.silent}  # what they told of their work is as old as their heartbeats
    heard = replace(seen, worker_records=tuple(each for each in seen.worker_records if each.worker not in lost))
    of_rollouts, of_rewards = _of_rollouts(heard), _of_scorers(heard) + _of_reward_queue(heard)
    facts += of_rollouts + of_rewards if _awaits_rollouts(seen, step.awaited_for_s) else of_rewards + of_rollouts
    facts += _of_ready(seen, trainer)
    if not facts:
        facts = [_of_nothing(seen, trainer, has_step=step.seconds is not None)]
    return facts[0][0], [text for _, text in facts[:_MOST_FACTS]]


def _of_nothing(seen: RunSnapshot, trainer: WorkerRecord | None, *, has_step: bool) -> tuple[str, str]:
    """Return what is known where no work is in any stream."""
    unready = (worker for worker in seen.worker_records if not worker.ready and not _ready(seen, worker.role))
    if starting := sorted(worker.worker for worker in unready):
        more = f" and {len(starting) - 2} more" if len(starting) > 2 else ""
        return "starting", f"not ready yet: {', '.join(starting[:2])}{more}"
    if trainer is not None:
        return "trainer", "nothing is in work" if trainer.doing else "the trainer is at work"
    return ("silent-trainer", "no trainer is ready") if has_step else ("nothing", "nothing is in work")


def _awaited_for(seconds: float, closed: Sequence[StepRecord], max_staleness: int) -> float:
    """Return for how long the prompts of the open step are admitted: since as many steps before opened, less one."""
    if not max_staleness:
        return 0.0
    before = closed[-1:-max_staleness:-1]
    return seconds + sum(record.closed - record.opened for record in before)


def _awaits_rollouts(seen: RunSnapshot, awaited_for_s: float) -> bool:
    """Return True where the open step waits for prompts: they were admitted so long ago, or longer."""
    prompts = seen.streams.get("prompts", StreamDepth())
    return max(prompts.oldest_in_flight_s, prompts.oldest_undelivered_s) > max(awaited_for_s - _CLOCK_SLACK_S, 0.0)


_CLOCK_SLACK_S = 1.0
"""A step opens a moment after its prompts were admitted, or before."""


def _long(seconds: float) -> str:
    """Return a duration as one says it: ``45 s``, ``12 min``, ``3.5 h``, ``4 days``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _of_replies(seen: RunSnapshot, step_s: float | None) -> Facts:
    """Return that Redis is slow, where its replies take a large part of a step of ``step_s``; None: there is no step.

    A step that has been open for long waits for something else, though it is usually short.
    """
    process, reply_s = seen.slowest_reply
    if not replies_are_slow(reply_s, step_s):
        return []
    to = f" to {process}" if process else ""
    return [(REDIS_SLOW, f"Redis takes {reply_s:.2f} s for a reply{to}, and a sample waits for about ten of them")]


def _silence(worker: WorkerRecord, silent_s: float) -> str:
    if worker.role == "trainer":
        work = f", which {worker.doing}," if worker.doing else ", for which scored groups wait,"
    else:
        work = f" with {'1 entry' if worker.busy == 1 else f'{worker.busy} entries'} in work"
    return f"{worker.worker}{work} has sent no heartbeat for {silent_s:.0f} s: it is frozen or lost"


def _of_scorers(seen: RunSnapshot) -> Facts:
    """Return the scorers with calls in flight: those with old attempts first, then those with the most calls."""

    def place(scorer: tuple[str, ScorerWork]) -> tuple[float, int, float]:
        work = scorer[1]
        return -work.oldest_s if work.oldest_s >= _OLD_ATTEMPT_S else 0.0, -work.in_flight, -work.oldest_s

    facts = []
    for name, work in sorted(seen.scorers.items(), key=place):
        calls = f"{_counted(work.in_flight, 'call')} of {name}"
        if work.in_flight and seen.circuits_open.get(name):
            awaited = f"{_plural(work.in_flight, 'wait')} until its endpoint, which failed too often, is asked again"
            facts.append(("endpoint", f"{calls} {awaited}"))
        elif 2 * work.waiting > work.in_flight:
            waiting = f"{work.waiting} of {calls} {_plural(work.waiting, 'wait')}"
            facts.append(("limiter", f"{waiting} for a limit of the scorer"))
        elif work.oldest_s > 0:
            facts.append(("scorer", f"{calls} in flight, the oldest {_long(work.oldest_s)}"))
        elif work.in_flight:
            facts.append(("limiter", f"{calls} waiting for limits or between two attempts"))
    return facts


def _of_reward_queue(seen: RunSnapshot) -> Facts:
    """Return samples and groups that wait for reward workers, and those of which no worker tells more."""
    facts = []
    in_calls = any(work.in_flight for work in seen.scorers.values())
    for name, noun, waits_for in (("samples", "finished sample", "scorer"), ("groups", "group", "group-scorer")):
        depth = seen.streams.get(name, StreamDepth())
        if depth.undelivered:
            workers = "a free reward worker" if _ready(seen, "reward") else "a reward worker, and none is ready"
            waiting = f"{_counted(depth.undelivered, noun)} {_plural(depth.undelivered, 'wait')}"
            facts.append(
                ("reward-queue", f"{waiting} for {workers}, the oldest for {_long(depth.oldest_undelivered_s)}")
            )
        if depth.in_flight and not in_calls:
            held = f"{_counted(depth.in_flight, noun)} {'is' if depth.in_flight == 1 else 'are'} with reward workers"
            facts.append(
                (waits_for, f"{held}{_lost(seen, 'reward')}, the oldest for {_long(depth.oldest_in_flight_s)}")
            )
    return facts


def _of_ready(seen: RunSnapshot, trainer: WorkerRecord | None) -> Facts:
    ready = seen.streams.get("ready", StreamDepth())
    if not ready.undelivered:
        return []
    awaited = "the trainer" if trainer is not None else "a trainer, and none is ready"
    waiting = f"{_counted(ready.undelivered, 'scored group')} {_plural(ready.undelivered, 'wait')}"
    return [("trainer", f"{waiting} for {awaited}, the oldest for {_long(ready.oldest_undelivered_s)}")]


def _of_rollouts(seen: RunSnapshot) -> Facts:
    """Return what rollouts do: load weights, wait for machines, run tools, or generate."""
    prompts = seen.streams.get("prompts", StreamDepth())
    if not (prompts.in_flight or prompts.undelivered):
        return []
    facts = []
    working = sum(each.busy > 0 for each in seen.rollouts)
    # One that loads while it has nothing, and nothing is left for it, holds nobody.
    loading = sum(bool(each.loading) and (each.busy > 0 or prompts.undelivered > 0) for each in seen.rollouts)
    if loading and 2 * loading >= working:
        slow = f"{_counted(loading, 'rollout')} of {len(seen.rollouts)} {_plural(loading, 'load')} new weights"
        facts.append(("weights", slow))
    in_agents, busy = (sum(getattr(each, name) for each in seen.rollouts) for name in ("in_agents", "busy"))
    held = f"{_counted(prompts.in_flight, 'prompt')} {'is' if prompts.in_flight == 1 else 'are'} with rollouts"
    worked = f"{held}{_lost(seen, 'rollout')}, the oldest for {_long(prompts.oldest_in_flight_s)}"
    if in_agents and 2 * in_agents >= busy:
        waiting = f"{_counted(in_agents, 'sample')} of {busy} {_plural(in_agents, 'wait')} for tools"
        facts += _of_sandboxes(seen) or [("tools", f"{waiting}; {worked}")]
    elif prompts.in_flight:
        facts.append(("generation", worked))
    if prompts.undelivered:
        rollouts = "a rollout" if _ready(seen, "rollout") else "a rollout, and none is ready"
        waiting = f"{_counted(prompts.undelivered, 'prompt')} {_plural(prompts.undelivered, 'wait')}"
        facts.append(("generation", f"{waiting} for {rollouts}"))
    return facts


def _of_sandboxes(seen: RunSnapshot) -> Facts:
    """Return that samples wait for machines, where most of those in agents do."""
    work = seen.sandboxes
    if work is None or 2 * (work.waiting + work.starting) < sum(each.in_agents for each in seen.rollouts):
        return []
    facts = []
    if work.waiting:
        waiting = f"{_counted(work.waiting, 'sample')} {_plural(work.waiting, 'wait')} for a machine"
        facts.append(("sandboxes", f"{waiting}, the oldest {_long(work.oldest_wait_s)}"))
    if work.starting:
        facts.append(("sandboxes", f"{_counted(work.starting, 'machine')} {_plural(work.starting, 'start')}"))
    return facts


def _lost(seen: RunSnapshot, role: str) -> str:
    """Return that no process of the role lives, where that is so."""
    return (
        ""
        if any(count for (of, _), count in seen.workers.items() if of == role)
        else ", of which none has sent a heartbeat lately"
    )


def _ready(seen: RunSnapshot, role: str) -> bool:
    return any(count for (of, state), count in seen.workers.items() if of == role and state != "starting")


def _plural(number: int, verb: str) -> str:
    """Return a verb for so many: one waits, two wait."""
    return f"{verb}s" if number == 1 else verb


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
