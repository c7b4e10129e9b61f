"""``Plaudit / Job``: bottleneck, scorers, queue age and failures on the first screen; details of each part below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.alerting.thresholds import THRESHOLDS as T
from plaudit_metrics.dashboards import job_rewards, job_rollouts
from plaudit_metrics.dashboards.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    PER_SECOND,
    SECONDS,
    SHARE,
    bars,
    frame,
    lines,
    stat,
    to_page,
    with_page_variable,
    with_run_variables,
)
from plaudit_metrics.dashboards.queries import newest, quantile, rate

_OF_FAILURES = ("Samples without a score", "Failed scores by scorer", "Samples by outcome", "Failed calls by scorer")
_LAST_S = f"sum(plaudit_last_step_seconds{{{OF_RUN}}})"


def dashboard() -> Dashboard:
    """Return the dashboard."""
    board = with_run_variables(frame("plaudit-job", "Plaudit / Job", "What each step of a run waits for, and why"))
    board = with_page_variable(board)
    for panel in _first_screen():
        board = board.with_panel(_linked(panel))
    rows: dict[str, Callable[[], Sequence[Any]]] = {
        "Reward": job_rewards.reward,
        "Scorers": job_rewards.scorers,
        "Steps and stages": _stages,
        "Generation and rollout engines": job_rollouts.generation,
        "Tools": job_rollouts.tools,
        "Judges and limits": job_rewards.judges,
        "Reward models": job_rewards.reward_models,
        "Policy": _policy,
        "Transport": _transport,
    }
    for title, panels in rows.items():
        board = board.with_row(Row(title))
        for panel in panels():
            board = board.with_panel(_linked(panel))
    return board


def _linked(panel: Any) -> Any:
    """Add the link to the run's page; a panel about failures leads to the samples as well."""
    of_failures = panel.build().title in _OF_FAILURES
    return panel.links([to_page(), *([to_page("samples?outcome=failed")] if of_failures else [])])


def _first_screen() -> Sequence[Any]:
    share = T["exposedShare"]
    exposed = f"sum(plaudit_last_step_exposed_reward_seconds{{{OF_RUN}}}) / {_LAST_S}"
    waits = f"sum by (cause) (plaudit_last_step_wait_seconds{{{OF_RUN}}}) / on() group_left () {_LAST_S}"
    trainer = f"1 - sum(plaudit_last_step_wait_seconds{{{OF_RUN}}}) / {_LAST_S}"
    failures = (
        f'sum by (scorer, outcome) (increase(plaudit_score_seconds_count{{{OF_RUN}, outcome!="scored"}}[$__range]))'
    )
    oldest = newest("plaudit_stream_oldest_undelivered_seconds", where=', stream="samples"')
    return (
        stat(
            "Newest step waiting for rewards",
            exposed,
            SHARE,
            warn=share / 2,
            bad=share,
            about="Share of the newest step in which the trainer waited for rewards after generation had ended.",
        ),
        stat(
            "Oldest unscored sample",
            oldest,
            SECONDS,
            warn=T["queueAgeSeconds"] / 4,
            bad=T["queueAgeSeconds"],
            about="Age of the oldest finished sample that no reward worker has taken.",
        ),
        stat(
            "Samples without a score",
            newest("plaudit_last_step_masked_share"),
            SHARE,
            warn=T["failedShare"] / 2,
            bad=T["failedShare"],
            about="Of the newest step.",
        ),
        stat("Newest step", newest("plaudit_step"), COUNT, about="Number of the newest closed step."),
        stat(
            "Since the last step",
            f"time() - {newest('plaudit_step_last_closed_timestamp_seconds')}",
            SECONDS,
            about="Time since the newest step closed.",
        ),
        stat("Mean reward", f"avg(plaudit_reward_mean{{{OF_RUN}}})", COUNT, about="Of the newest step."),
        bars(
            "Bottleneck: where the newest step's time went",
            SHARE,
            (waits, "{{cause}}"),
            (trainer, "trainer"),
            about="Waits of the trainer by cause; the rest is its own work.",
        ),
        bars(
            "Scorers: p50 and p99 of a call in the newest step",
            SECONDS,
            (newest("plaudit_last_step_scorer_seconds", "scorer, statistic"), "{{scorer}}: {{statistic}}"),
            about="Exact quantiles of the last attempts.",
        ),
        bars("Failed scores by scorer", COUNT, (failures, "{{scorer}}: {{outcome}}"), about="In the range of time."),
        lines(
            "Age of the oldest unread entry",
            SECONDS,
            (newest("plaudit_stream_oldest_undelivered_seconds", "stream"), "{{stream}}"),
            about="Long ages of samples: too few reward workers.",
        ),
        lines(
            "Queue depth",
            COUNT,
            (newest("plaudit_stream_undelivered", "stream"), "{{stream}}: waiting"),
            (newest("plaudit_stream_in_flight", "stream"), "{{stream}}: in progress"),
            about="Entries that no consumer has read, and entries in work, by stream.",
        ),
        lines(
            "Samples by outcome",
            PER_SECOND,
            (f"{rate('plaudit_samples_total', 'outcome')} > 0", "{{outcome}}"),
            stacked=True,
            about="Samples per second that ended, by outcome. All but scored have no score.",
        ),
    )


def _stages() -> Sequence[Any]:
    sums, counts = (rate(f"plaudit_stage_seconds_{each}", "stage") for each in ("sum", "count"))
    slow = quantile(0.95, "plaudit_stage_seconds", "stage")
    return (
        lines(
            "Step duration",
            SECONDS,
            (newest("plaudit_last_step_seconds"), "step"),
            (newest("plaudit_last_step_update_seconds"), "update"),
            (newest("plaudit_last_step_exposed_reward_seconds"), "waiting for rewards"),
            about="The newest step: its seconds, those of the update, and those of waiting for rewards.",
        ),
        lines(
            "Time since the last step",
            SECONDS,
            (f"time() - {newest('plaudit_step_opened_timestamp_seconds')}", "open step"),
            (newest("plaudit_recent_steps_max_seconds"), "longest of the newest steps"),
            about="Age of the open step, and the longest of the ten newest. A start of the trainer begins it anew.",
        ),
        lines(
            "Steps per hour",
            COUNT,
            (f"3600 / ({newest('plaudit_last_step_seconds')} > 0)", "by the newest step"),
            about="By the length of the newest step.",
        ),
        lines(
            "Stages of a sample, mean",
            SECONDS,
            (f"{sums} / ({counts} > 0)", "{{stage}}"),
            stacked=True,
            about="Seconds of a sample in each stage, from admission until the trainer takes its group.",
        ),
        lines(
            "Stages of a sample, p95",
            SECONDS,
            (slow, "{{stage}}"),
            about="Estimated from buckets. Points are samples with their traces, where exemplars are stored.",
        ),
        lines(
            "Groups",
            PER_SECOND,
            (rate("plaudit_groups_total", "outcome"), "{{outcome}}"),
            about="Groups per second that closed, by how: trained, evaluated or dropped.",
        ),
    )


def _policy() -> Sequence[Any]:
    return (
        lines(
            "Staleness",
            COUNT,
            (newest("plaudit_sample_staleness", "statistic"), "{{statistic}}"),
            (newest("plaudit_staleness_limit"), "limit"),
            about="Policy versions between a sample's oldest token and its update, and maxStaleness.",
        ),
        lines(
            "Policy version",
            COUNT,
            (newest("plaudit_policy_version"), "announced"),
            (newest("plaudit_policy_version_lag"), "lag of the slowest rollout"),
            about="The announced version, and by how many versions the slowest ready rollout is behind.",
        ),
        lines(
            "Discarded updates",
            COUNT,
            (newest("plaudit_last_step_skipped_updates"), "newest step"),
            about="Updates of the newest step that were discarded because their gradient is not finite.",
        ),
        lines(
            "Difference between rollouts and trainer",
            COUNT,
            (newest("plaudit_last_step_logprob_mismatch"), "newest step"),
            (newest("plaudit_last_step_logprob_mismatch_limit"), "limit of the precision"),
            about="Mean absolute difference of a trained token's log-probability in nats, for the same weights.",
        ),
    )


def _transport() -> Sequence[Any]:
    def happened(name: str) -> str:
        return f"sum by (stream) (increase(plaudit_{name}_total{{{OF_RUN}}}[$__rate_interval]))"

    return (
        lines(
            "Redis",
            BYTES,
            (newest("plaudit_redis_memory_bytes"), "used"),
            (newest("plaudit_redis_memory_limit_bytes"), "limit"),
            about="Memory of Redis and its limit. Above 70 % no groups are admitted.",
        ),
        lines(
            "Redeliveries, duplicates, dead letters",
            COUNT,
            (happened("redeliveries"), "{{stream}}: taken over"),
            (happened("duplicates"), "{{stream}}: duplicate"),
            (happened("dead_letters"), "{{stream}}: dead letter"),
            about="Entries taken over from lost workers, refused as duplicates, and given up, by stream.",
        ),
        lines(
            "Metrics pipeline",
            COUNT,
            (f"sum(increase(plaudit_records_missing_total{{{OF_RUN}}}[$__rate_interval]))", "events lost"),
            (f"sum(increase(plaudit_records_late_total{{{OF_RUN}}}[$__rate_interval]))", "events late"),
            (newest("plaudit_redis_aof_ok"), "Redis writes its file"),
            (newest("plaudit_redis_up"), "Redis responds"),
            about="Events lost or late, and whether Redis responds and writes its file (1: yes).",
        ),
    )
