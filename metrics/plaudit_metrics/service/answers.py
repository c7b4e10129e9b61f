"""Build the API's responses about steps, closed and open, as plain data, for the live page and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from plaudit_metrics.service.trace import chrome_trace
from plaudit_metrics.sources.snapshot import RunSnapshot, StreamDepth
from plaudit_metrics.sources.steps import ClosedStep, flat_step
from plaudit_metrics.statistics.stages import stages_of
from plaudit_metrics.statistics.steps import slowest_samples, wall_seconds
from plaudit_metrics.statistics.verdict import explain, reasoning, verdict_over
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord, WorkerRecord

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
    return [_sample(sample, step) for sample in step.slowest[:count]]


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
    newest = recent[-1]
    waits = {key: value for key, value in newest.statistics.items() if key.startswith("wait/")}
    own_s = newest.closed - newest.opened - sum(waits.values())
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


def _sample(sample: SampleRecord, step: ClosedStep) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(sample)
    group = step.groups.get(sample.group)
    return record | {"wall_s": wall_seconds(sample), "stages_s": stages_of(sample, group)}


def _own_figures(record: StepRecord) -> dict[str, float]:
    return {"step_s": record.closed - record.opened} | record.statistics


def open_step(seen: RunSnapshot, closed: int | None, opened: float | None, unheard_s: float) -> dict[str, Any]:
    """Return what the open step waits for now, from the newest snapshot, as a sentence and in one word.

    Args:
        closed: number of the newest closed step; None: none, or a service.
        opened: when the open step began (seconds since the epoch, Redis's clock); None: no trainer has started.
        unheard_s: seconds since Redis responded.
    """
    trainer = next((worker for worker in seen.worker_records if worker.role == "trainer"), None)
    number = None if closed is None and trainer is None else (closed or 0) + 1
    seconds = None if opened is None else max(seen.time - opened, 0.0) + unheard_s
    waits_for, facts = _waits_for(seen, trainer, unheard_s)
    step = "" if number is None or seconds is None else f"step {number}, open for {_long(seconds)}: "
    return {"step": number, "seconds": seconds, "waits_for": waits_for, "text": step + "; ".join(facts)}


REDIS_AWAY = "redis"
"""What the open step waits for while Redis does not respond."""
_REDIS_AWAY_S = 6.0
"""A snapshot is taken every two seconds."""
_MOST_FACTS = 3


def _waits_for(seen: RunSnapshot, trainer: WorkerRecord | None, unheard_s: float) -> tuple[str, list[str]]:
    """Return the first cause that holds, and what is known of all of them."""
    if unheard_s > _REDIS_AWAY_S:
        return REDIS_AWAY, [f"Redis has not responded for {_long(unheard_s)}, and every process of the run waits"]
    facts = [(f"silent-{worker.role}", _silence(worker, silent_s)) for worker, silent_s in seen.silent]
    if trainer is not None and trainer.problem:
        facts.append(("unscored", trainer.problem))
    facts += _of_scorers(seen) + _of_queues(seen)
    if not facts:
        facts = [("trainer", "the trainer is at work") if trainer is not None else ("nothing", "nothing is in work")]
    return facts[0][0], [text for _, text in facts[:_MOST_FACTS]]


def _long(seconds: float) -> str:
    """Return a duration as one says it: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _silence(worker: WorkerRecord, silent_s: float) -> str:
    held = "1 entry" if worker.busy == 1 else f"{worker.busy} entries"
    return f"{worker.worker} with {held} in work has sent no heartbeat for {silent_s:.0f} s: it is frozen or lost"


def _of_scorers(seen: RunSnapshot) -> list[tuple[str, str]]:
    """Return the scorers with calls in flight, that of the oldest attempt first."""
    working = sorted(seen.scorers.items(), key=lambda scorer: -scorer[1].oldest_s)
    facts = []
    for name, work in working:
        calls = f"{work.in_flight} call{'s' if work.in_flight != 1 else ''} of {name}"
        if work.oldest_s > 0:
            facts.append(("scorer", f"{calls} in flight, the oldest {_long(work.oldest_s)}"))
        elif work.in_flight:
            facts.append(("limiter", f"{calls} waiting for limits or between two attempts"))
    return facts


def _of_queues(seen: RunSnapshot) -> list[tuple[str, str]]:
    samples, prompts = (seen.streams.get(stream, StreamDepth()) for stream in ("samples", "prompts"))
    facts = []
    if samples.undelivered:
        ready = sum(count for (role, state), count in seen.workers.items() if role == "reward" and state != "starting")
        workers = "a free reward worker" if ready else "a reward worker, and none is ready"
        waited = f"the oldest for {_long(samples.oldest_undelivered_s)}"
        facts.append(("reward-queue", f"{samples.undelivered} finished samples wait for {workers}, {waited}"))
    if prompts.in_flight:
        worked = f"the oldest for {_long(prompts.oldest_in_flight_s)}"
        facts.append(("generation", f"{prompts.in_flight} prompts are with rollouts, {worked}"))
    if prompts.undelivered:
        facts.append(("generation", f"{prompts.undelivered} prompts wait for a rollout"))
    return facts
