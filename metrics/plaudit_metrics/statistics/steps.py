"""Compute a step's statistics: samples in, one dictionary out. Pure; docs/metrics.md lists the keys.

The trainer calls ``step_record`` when it closes a step, with complete records from the groups' hashes. The metrics
service calls ``step_statistics`` with events, for steps whose record has no figures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plaudit_metrics.statistics.columns import Floats, Integers, SampleColumns, failure_labels, spread, turn_statistics
from plaudit_metrics.statistics.integrity import centred, step_integrity
from plaudit_metrics.statistics.stages import group_stage_seconds, sample_stage_seconds
from plaudit_metrics.statistics.verdict import HELD_KEY, LIMITER_KEY, VERIFY_WAIT_KEY, split_waits, verdict
from plaudit_wire.records import OUTCOMES, GroupRecord, SampleRecord, StepRecord, WaitRecord

_PREFIX = "timing_s/agent_loop"


@dataclass(frozen=True)
class AgentLoopColumns:
    """Hold the measures of verl's agent loop for each sample; arrays of shape [number of samples]."""

    generate_sequences: Floats
    """Seconds in the engine, tool calls excluded."""
    tool_calls: Floats
    """Seconds in tools."""
    compute_score: Floats
    """Seconds in the scorers, waits for limits and retries included."""
    num_preempted: Integers
    """Preemptions by the engine; -1 = unknown."""
    prompt_length: Integers
    """Tokens, as ``response_length``."""
    response_length: Integers

    @classmethod
    def from_samples(cls, samples: SampleColumns) -> AgentLoopColumns:
        """Take the samples that were generated; verl knows no others."""
        kept = slice(None) if samples.generated.all() else samples.generated
        return cls(
            generate_sequences=samples.generate_s[kept],
            tool_calls=samples.tool_s[kept],
            compute_score=(samples.limiter_s + samples.retry_s + samples.call_s)[kept],
            num_preempted=samples.num_preempted[kept],
            prompt_length=samples.prompt_tokens[kept],
            response_length=samples.response_tokens[kept],
        )


def agent_loop_statistics(columns: AgentLoopColumns) -> dict[str, float]:
    """Compute verl's ``timing_s/agent_loop/…`` keys, with verl's meaning, so that its dashboards keep working.

    Sources: verl pull requests #5971 (``compute_score`` beside ``generate_sequences`` and ``tool_calls``; the slowest
    sample is the one with the largest sum of the three) and #5896 (the name ``reward`` for the same figure). One
    difference: an unknown number of preemptions (-1) is left out here, while verl counts it as minus one. Of equally
    slow samples the first is under ``slowest/``; without samples there are no keys.
    """
    if len(columns.generate_sequences) == 0:
        return {}
    statistics: dict[str, float] = {}
    slowest = int(np.argmax(columns.generate_sequences + columns.tool_calls + columns.compute_score))
    for name in ("generate_sequences", "tool_calls", "compute_score"):
        values = getattr(columns, name)
        statistics |= spread(f"{_PREFIX}/{name}", values)
        statistics[f"{_PREFIX}/slowest/{name}"] = float(values[slowest])
    statistics |= spread(f"{_PREFIX}/num_preempted", columns.num_preempted[columns.num_preempted >= 0])
    if columns.num_preempted[slowest] >= 0:
        statistics[f"{_PREFIX}/slowest/num_preempted"] = float(columns.num_preempted[slowest])
    for name in ("prompt_length", "response_length"):
        statistics[f"{_PREFIX}/slowest/{name}"] = float(getattr(columns, name)[slowest])
    for measure in ("min", "max", "mean"):
        statistics[f"{_PREFIX}/reward/{measure}"] = statistics[f"{_PREFIX}/compute_score/{measure}"]
    statistics[f"{_PREFIX}/slowest/reward"] = statistics[f"{_PREFIX}/slowest/compute_score"]
    return statistics


def reward_statistics(columns: SampleColumns) -> dict[str, float]:
    """Return the ``reward/…`` figures over the samples that have a score; empty if there are none."""
    scored = ~np.isnan(columns.value)
    if not scored.any():
        return {}
    value, group = columns.value[scored], columns.group[scored]
    return {
        **spread("reward", value),
        "reward/std": float(value.std()),
        **_group_shares(value, group, len(columns.groups)),
        **_length_correlation(value, group, columns.response_tokens[scored].astype(np.float64)),
    }


def _group_shares(value: Floats, group: NDArray[np.int64], num_groups: int) -> dict[str, float]:
    """Return shares of the groups with at least two scores: all equal, all solved (at least 1), none (at most 0)."""
    least, most = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(least, group, value)
    np.maximum.at(most, group, value)
    compared = np.bincount(group, minlength=num_groups) >= 2
    if not compared.any():
        return {}
    return {
        "reward/zero_variance_share": float((least == most)[compared].mean()),
        "reward/solved_all_share": float((least >= 1)[compared].mean()),
        "reward/solved_none_share": float((most <= 0)[compared].mean()),
    }


def _length_correlation(value: Floats, group: NDArray[np.int64], tokens: Floats) -> dict[str, float]:
    """Return Pearson's correlation of reward and response length within groups.

    Each is taken relative to the mean of its group: hard prompts have long responses and low rewards, which says
    nothing about length. Degenerate: without differences within a group there is no figure.
    """
    reward, length = centred(value, group), centred(tokens, group)
    scale = float(np.sqrt((reward**2).sum() * (length**2).sum()))
    return {"reward/length_correlation": float((reward * length).sum()) / scale} if scale > 1e-9 else {}


_PIPELINE = "reward_pipeline"
_SANDBOX = f"{_PIPELINE}/sandbox"
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def step_statistics(
    samples: Sequence[SampleRecord] | SampleColumns,
    *,
    groups: Sequence[GroupRecord] = (),
    waits: Sequence[WaitRecord] = (),
    opened: float,
    closed: float,
    stopped_s: float = 0.0,
    update_s: float = 0.0,
    trainer_version: int | None = None,
    duplicates: int = 0,
) -> dict[str, float]:
    """Compute every figure of one step by the keys of docs/metrics.md; an undefined one (a mean of nothing) is absent.

    Args:
        samples: the terminal samples of the groups that the step closed (training split), or their columns.
        groups: the records of these groups; without them no group figures, and every sample counts as trained.
        opened: seconds since the epoch on the transport's clock, as ``closed``.
        stopped_s: seconds in between in which no trainer ran: the step was interrupted and resumed.
        update_s: seconds in the update of the policy (forward, backward, optimizer).
        trainer_version: number of the policy version that the step's update started from, for the staleness.
        duplicates: publications and commits that were refused as duplicates since the step before closed.
    """
    columns = samples if isinstance(samples, SampleColumns) else SampleColumns.from_records(samples)
    split = split_waits(columns, groups, waits)
    step_s = closed - opened - stopped_s
    with np.errstate(over="ignore", invalid="ignore"):
        figures = {
            **agent_loop_statistics(AgentLoopColumns.from_samples(columns)),
            **reward_statistics(columns),
            **_generation(columns, step_s),
            **_pipeline(columns, groups),
            **_outcomes(columns, duplicates),
            **_scorers(columns),
            **turn_statistics(columns.turns),
            **_tools(columns),
            **_sandboxes(columns, groups),
            **_limiter_totals(columns),
            **_staleness(columns, groups, trainer_version),
            **_integrity(columns),
            "step_s": step_s,
            **({"stopped_s": stopped_s} if stopped_s else {}),
            "update_s": update_s,
            "trainer_wait_s": split.total_s,
            "exposed_reward_s": split.exposed_reward_s,
            "straggler_s": split.straggler_s,
            **{f"wait/{cause}_s": seconds for cause, seconds in split.cause_s.items()},
        }
    # The sum of rewards near the largest float is none.
    return {key: value for key, value in figures.items() if math.isfinite(value)}


def step_record(
    step: int,
    incarnation: int,
    samples: Sequence[SampleRecord],
    *,
    groups: Sequence[GroupRecord] = (),
    waits: Sequence[WaitRecord] = (),
    opened: float,
    closed: float,
    stopped_s: float = 0.0,
    update_s: float = 0.0,
    trainer_version: int | None = None,
    duplicates: int = 0,
    extra: dict[str, float] | None = None,
) -> StepRecord:
    """Build the record of a closed step: figures, verdict, failures, slowest sample. See ``step_statistics``.

    NaN and infinities of ``extra``, further figures such as the loss, are left out.
    """
    columns = SampleColumns.from_records(samples)
    statistics = step_statistics(
        columns,
        groups=groups,
        waits=waits,
        opened=opened,
        closed=closed,
        stopped_s=stopped_s,
        update_s=update_s,
        trainer_version=trainer_version,
        duplicates=duplicates,
    )
    statistics |= {key: float(value) for key, value in (extra or {}).items() if np.isfinite(value)}
    labels: dict[str, str] = {}
    if samples:
        (slowest,) = slowest_samples(samples, 1)
        worker = slowest.scoring.worker or (slowest.generation.worker if slowest.generation else "")
        labels = {f"{_PIPELINE}/slowest/group": slowest.group, f"{_PIPELINE}/slowest/worker": worker}
        statistics[f"{_PIPELINE}/slowest/index"] = float(slowest.index)
    return StepRecord(
        step=step,
        incarnation=incarnation,
        opened=opened,
        closed=closed,
        num_samples=len(samples),
        num_groups=len(groups) or len({sample.group for sample in samples}),
        statistics=statistics,
        verdict=verdict(statistics),
        waits=list(waits),
        labels=labels | failure_labels(columns.failures),
    )


def slowest_samples(samples: Iterable[SampleRecord], count: int) -> list[SampleRecord]:
    """Return the samples that took longest from admission to terminal, slowest first; of equal ones the earlier."""
    return heapq.nlargest(count, samples, key=lambda sample: sample.wall_s)


def _generation(columns: SampleColumns, step_s: float) -> dict[str, float]:
    if not columns.generated.any():
        return {}
    tokens = columns.response_tokens[columns.generated]
    known = columns.num_preempted[columns.generated & (columns.num_preempted >= 0)]
    return {
        "generation/response_tokens/mean": float(tokens.mean()),
        "generation/response_tokens/max": float(tokens.max()),
        **({"generation/response_tokens_per_s": float(tokens.sum()) / step_s} if step_s > 0 else {}),
        "generation/truncated_share": float(columns.truncated[columns.generated].mean()),
        **({"generation/preemptions": float(known.sum())} if len(known) else {}),
    }


def _pipeline(columns: SampleColumns, groups: Sequence[GroupRecord]) -> dict[str, float]:
    if len(columns) == 0:
        return {}
    of_samples = sample_stage_seconds(columns)
    of_groups = group_stage_seconds(columns, {record.group: record for record in groups})
    _, first = np.unique(columns.group, return_index=True)
    for stage in ("group_scorer", "ready_queue"):  # one figure a group, not one a sample
        of_groups[stage] = of_groups[stage][first]
    statistics: dict[str, float] = {}
    for stage, seconds in (of_samples | of_groups).items():
        statistics |= distribution(f"{_PIPELINE}/{stage}_s", seconds)
    return statistics


def distribution(key: str, values: Floats) -> dict[str, float]:
    """Return exact quantiles (linear between neighbours), maximum and mean, without NaN."""
    missing = np.isnan(values)
    known = values[~missing] if missing.any() else values
    if len(known) == 0:
        return {}
    ordered = np.sort(known)  # vectorised: a third of the time of np.quantile
    return {
        **{f"{key}/{name}": _quantile(ordered, quantile) for name, quantile in _QUANTILES.items()},
        f"{key}/max": float(ordered[-1]),
        f"{key}/mean": float(known.mean()),
    }


def _quantile(ordered: Floats, quantile: float) -> float:
    place = quantile * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return float(ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower))


def _outcomes(columns: SampleColumns, duplicates: int) -> dict[str, float]:
    counts = _count_outcomes(columns.outcome)
    statistics = {f"{_PIPELINE}/outcome/{outcome}": count for outcome, count in counts.items()}
    if len(columns) > 0:
        statistics[f"{_PIPELINE}/masked_share"] = float(np.isnan(columns.value).mean())
    statistics[f"{_PIPELINE}/redelivered"] = float((columns.deliveries > 1).sum())
    statistics[f"{_PIPELINE}/duplicates"] = float(duplicates)
    statistics[f"{_PIPELINE}/dead"] = counts["poison"]
    return statistics


def _count_outcomes(outcomes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> dict[str, float]:
    counts = np.bincount(outcomes, minlength=len(OUTCOMES))
    return dict(zip(OUTCOMES, counts.astype(float).tolist(), strict=True))


_MOMENTS = 512
"""In so many steps of time it is looked which scorer is behind the others."""


def _behind(work_s: Mapping[str, Floats]) -> dict[str, float]:
    """Return for how long most unfinished calls were those of each scorer, if all calls had begun at once.

    A step waits for the scorer with the largest figure: its usual calls are the slowest, or a few of them by far. Of
    equally many calls those of the scorer whose slowest takes longest count. Among fewer than two scorers there is no
    figure.
    """
    names = sorted(work_s, key=lambda name: -work_s[name].max())
    longest_s = float(work_s[names[0]].max()) if len(names) > 1 else 0.0
    if longest_s <= 0:
        return {}
    moments = (np.arange(_MOMENTS) + 0.5) * longest_s / _MOMENTS
    unfinished = [len(work_s[name]) - np.searchsorted(np.sort(work_s[name]), moments) for name in names]
    last = np.bincount(np.argmax(unfinished, axis=0), minlength=len(names))
    return {name: count * longest_s / _MOMENTS for name, count in zip(names, last.tolist(), strict=True)}


def _scorers(columns: SampleColumns) -> dict[str, float]:
    statistics: dict[str, float] = {}
    behind_s = _behind({name: scorer.work_s for name, scorer in columns.scorers.items() if not scorer.of_group})
    for name, scorer in sorted(columns.scorers.items()):
        key = f"{_PIPELINE}/scorer/{name}"
        some = [seconds for seconds in ("group_s", "throttled_s") if getattr(scorer, seconds).any()]
        some += [] if scorer.of_group else ["work_s"]
        for seconds in ("call_s", "limiter_s", "retry_s", "wait_s", *some):
            statistics |= distribution(f"{key}/{seconds}", getattr(scorer, seconds))
        if name in behind_s:
            statistics[f"{key}/behind_s"] = behind_s[name]
        for extra, figures in scorer.extras.items():
            statistics |= {f"{key}/extra/{extra}/{figure}": value for figure, value in figures._asdict().items()}
        values = scorer.value[~np.isnan(scorer.value)]
        if len(values) > 0:
            statistics |= {f"{key}/value/mean": float(values.mean()), f"{key}/value/std": float(values.std())}
        counts = _count_outcomes(scorer.outcome)
        statistics |= {f"{key}/outcome/{outcome}": count for outcome, count in counts.items() if count}
    return statistics


def _tools(columns: SampleColumns) -> dict[str, float]:
    statistics: dict[str, float] = {}
    for name, tool in sorted(columns.turns.tools.items()):
        key = f"{_PIPELINE}/tool/{name}"
        statistics |= distribution(f"{key}/call_s", np.array(tool.call_s))
        statistics |= {f"{key}/outcome/{outcome}": float(count) for outcome, count in sorted(tool.outcomes.items())}
    return statistics


def _sandboxes(columns: SampleColumns, groups: Sequence[GroupRecord]) -> dict[str, float]:
    machines = columns.sandboxes
    if len(machines) == 0:
        return {}
    statistics: dict[str, float] = {}
    for stage, seconds in machines.seconds().items():
        statistics |= distribution(f"{_SANDBOX}/{stage}_s", seconds)
    return statistics | {
        f"{_SANDBOX}/machines": float(len(machines)),
        f"{_SANDBOX}/failed": float(machines.failed.sum()),
        f"{_SANDBOX}/cpu_hours": _held_cpu_s(columns, groups) / 3600,
        VERIFY_WAIT_KEY: float(np.nansum(machines.verify_wait_s)),
    }


def _held_cpu_s(columns: SampleColumns, groups: Sequence[GroupRecord]) -> float:
    """Return the CPU seconds that the machines held, from their start until their groups ended.

    Machines that hold no CPU between commands count those of commands and tests, one CPU each.
    """
    machines = columns.sandboxes
    ends = {record.group: record.closed for record in groups}
    closed = np.array([ends.get(group, math.nan) for group in columns.groups])[columns.group]
    _, taken, *_, committed = columns.stamps
    lived_s = (np.fmax(closed, committed) - taken)[machines.sample] - machines.claim_s
    used_s = machines.exec_s + np.nan_to_num(machines.verify_s)
    return float(np.where(machines.cpus > 0, machines.cpus * np.maximum(lived_s, 0.0), used_s).sum())


def _limiter_totals(columns: SampleColumns) -> dict[str, float]:
    """Return all seconds that scorers waited for limits, and the part that their endpoints had asked for."""
    limiter_s = sum(float(scorer.limiter_s.sum()) for scorer in columns.scorers.values())
    held_s = sum(float(scorer.held_s.sum()) for scorer in columns.scorers.values())
    return {HELD_KEY: held_s, LIMITER_KEY: limiter_s} if limiter_s > 0 else {}


def _integrity(columns: SampleColumns) -> dict[str, float]:
    kept = columns.generated
    values = {name: scorer.value for name, scorer in sorted(columns.scorers.items())}
    whole = {name: value[kept] for name, value in values.items() if len(value) == len(kept)}
    tokens = columns.response_tokens[kept].astype(np.float64)
    return step_integrity(columns.value[kept], tokens, whole, columns.group[kept])


def _staleness(columns: SampleColumns, groups: Sequence[GroupRecord], trainer_version: int | None) -> dict[str, float]:
    if trainer_version is None:
        return {}
    trained = {record.group for record in groups if record.end == "trained"}
    of_trained = np.array([not groups or group in trained for group in columns.groups], dtype=np.bool_)
    versions = columns.version_min[columns.generated & of_trained[columns.group]] if len(columns) else np.empty(0)
    return spread(f"{_PIPELINE}/staleness", trainer_version - versions)
