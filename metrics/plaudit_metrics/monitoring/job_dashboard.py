"""``Plaudit / Job``: bottleneck, scorers, queue age and failures on the first screen; details of each part below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.monitoring.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    PER_SECOND,
    SECONDS,
    SHARE,
    bars,
    frame,
    lines,
    newest,
    quantile,
    rate,
    stat,
    to_page,
    with_page_variable,
    with_panels,
    with_run_variables,
)
from plaudit_metrics.monitoring.rules import THRESHOLDS as T

_OF_FAILURES = ("Samples without a score", "Failed scores by scorer", "Samples by outcome", "Failed calls by scorer")
_LAST_S = f"sum(plaudit_last_step_seconds{{{OF_RUN}}})"


def job_dashboard() -> Dashboard:
    """Return the dashboard."""
    board = with_run_variables(frame("plaudit-job", "Plaudit / Job", "What each step of a run waits for, and why"))
    board = with_page_variable(board)
    board = with_panels(board, map(_linked, _first_screen()))
    rows: dict[str, Callable[[], Sequence[Any]]] = {
        "Reward": reward,
        "Scorers": scorers,
        "Steps and stages": _stages,
        "Generation and rollout engines": generation,
        "Tools": tools,
        "Judges and limits": judges,
        "Reward models": reward_models,
        "Policy": _policy,
        "Transport": _transport,
    }
    for title, panels in rows.items():
        board = with_panels(board.with_row(Row(title)), map(_linked, panels()))
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


def reward() -> Sequence[Any]:
    """Return the panels of rewards."""
    mean, std = newest("plaudit_reward_mean"), newest("plaudit_reward_std")
    return (
        lines(
            "Reward",
            COUNT,
            (mean, "mean"),
            (f"{mean} - {std}", "mean - standard deviation"),
            (f"{mean} + {std}", "mean + standard deviation"),
            signed=True,
            about="Of the newest step; samples without a score are not zeros.",
        ),
        lines(
            "Values of the scorers",
            COUNT,
            (newest("plaudit_last_step_scorer_value", "scorer"), "{{scorer}}"),
            signed=True,
            about="Mean of the newest step.",
        ),
        lines(
            "Groups that train nothing",
            SHARE,
            (newest("plaudit_last_step_zero_variance_share"), "all rewards equal"),
            (newest("plaudit_last_step_masked_share"), "samples without a score"),
            about="In the newest step: groups whose rewards are all equal, and samples without a score.",
        ),
    )


def scorers() -> Sequence[Any]:
    """Return the panels of scorers and workers."""
    failed = rate("plaudit_score_seconds_count", "scorer, outcome", where=', outcome!="scored"')
    quantiles = [(quantile(q, "plaudit_score_seconds", "scorer"), f"{{{{scorer}}}}: {q}") for q in (0.5, 0.99)]
    return (
        lines(
            "Duration of a call by scorer, p50 and p99",
            SECONDS,
            *quantiles,
            about="Estimated from buckets. Points are calls with their traces, where exemplars are stored.",
        ),
        lines(
            "Failed calls by scorer",
            PER_SECOND,
            (failed, "{{scorer}}: {{outcome}}"),
            about="Calls per second that ended without a value, by scorer and outcome.",
        ),
        lines(
            "Age of the oldest call by scorer",
            SECONDS,
            (newest("plaudit_scorer_oldest_in_flight_seconds", "scorer"), "{{scorer}}"),
            about="Calls that have not ended are in no other figure.",
        ),
        lines(
            "Calls in flight by scorer",
            COUNT,
            (newest("plaudit_scorer_in_flight", "scorer"), "{{scorer}}"),
            about="Calls that have not ended, waits and retries included.",
        ),
        lines(
            "Samples scored within the threshold",
            SHARE,
            (f"1 - {newest('plaudit_recent_late_ratio')}", "newest 100 samples"),
            (newest("plaudit_reward_latency_target"), "target"),
            about="Within metrics.rewardLatency.thresholdSeconds. A sample that fails fast is not in time.",
        ),
        lines(
            "Workers",
            COUNT,
            (newest("plaudit_workers", "role, state"), "{{role}}: {{state}}"),
            about="Live processes by role and state.",
        ),
    )


def judges() -> Sequence[Any]:
    """Return the panels of judges and of limits."""
    return (
        lines(
            "Mean wait for a limit",
            SECONDS,
            (newest("plaudit_limiter_recent_wait_seconds", "judge"), "{{judge}}"),
            about="Of the newest 100 calls.",
        ),
        lines(
            "Requests by status",
            PER_SECOND,
            (rate("plaudit_judge_requests_total", "judge, status"), "{{judge}}: {{status}}"),
            about="Requests per second to each judge by HTTP status. cached: no request was needed.",
        ),
        lines(
            "Tokens per second, open circuit breakers",
            COUNT,
            (rate("plaudit_judge_tokens_total", "judge, kind"), "{{judge}}: {{kind}}"),
            (newest("plaudit_judge_circuit_open", "judge"), "{{judge}}: open"),
            about="Tokens that judges read (prompt) and wrote (completion). Open is 1 while a judge gets no requests.",
        ),
    )


def reward_models() -> Sequence[Any]:
    """Return the panels of Plaudit's own servers of reward models."""
    server = "plaudit_model_server"
    passes = rate(f"{server}_inference_seconds_count", "scorer")
    waits = [(quantile(q, f"{server}_queue_wait_seconds", "scorer"), f"{{{{scorer}}}} wait: {q}") for q in (0.5, 0.99)]
    inference = [
        (quantile(q, f"{server}_inference_seconds", "scorer"), f"{{{{scorer}}}} pass: {q}") for q in (0.5, 0.99)
    ]
    return (
        lines(
            "Sequences that wait for a reward model",
            COUNT,
            (f"sum by (scorer) ({server}_queue_sequences{{{OF_RUN}}})", "{{scorer}}"),
            about="In the queues of all its servers. Of models that vLLM serves see vLLM's own dashboards.",
        ),
        lines(
            "Reward model: wait and forward pass, p50 and p99",
            SECONDS,
            *waits,
            *inference,
            about="From the arrival of a sequence to its forward pass, and the pass itself. Estimated from buckets.",
        ),
        lines(
            "Reward model: sequences of a forward pass",
            COUNT,
            (f"{rate(f'{server}_batch_sequences_sum', 'scorer')} / ({passes} > 0)", "{{scorer}}"),
            about="Mean size of a batch. With 1 the server has too few requests at a time.",
        ),
        lines(
            "Reward model: tokens per second",
            COUNT,
            (rate(f"{server}_batch_tokens_sum", "scorer"), "{{scorer}}"),
            (rate(f"{server}_padding_tokens_total", "scorer"), "{{scorer}}: padding"),
            about="Tokens of the sequences, and tokens computed as padding.",
        ),
        lines(
            "Reward model: time in forward passes",
            SHARE,
            (rate(f"{server}_inference_seconds_sum", "scorer"), "{{scorer}}"),
            about="Seconds of forward passes per second, summed over its servers: near their number they are all busy.",
        ),
        lines(
            "Reward model: responses by status",
            PER_SECOND,
            (rate(f"{server}_requests_total", "scorer, code"), "{{scorer}}: {{code}}"),
            about="Requests to /classify by HTTP status.",
        ),
    )


def generation() -> Sequence[Any]:
    """Return the panels of generation and of the rollout engines."""
    lengths = [(quantile(q, "plaudit_response_tokens"), f"p{q * 100:g}") for q in (0.5, 0.99)]
    return (
        lines(
            "Response tokens per second",
            COUNT,
            (newest("plaudit_last_step_tokens_per_second"), "newest step"),
            (rate("plaudit_response_tokens_sum"), "now"),
            about="Tokens of the responses: of the newest step by its seconds, and as they arrive now.",
        ),
        lines("Response length", COUNT, *lengths, about="Tokens of a response, p50 and p99, estimated from buckets."),
        lines(
            "Truncated responses",
            SHARE,
            (newest("plaudit_last_step_truncated_share"), "at the token limit"),
            about="Share of the newest step.",
        ),
        lines(
            "Preemptions",
            PER_SECOND,
            (rate("plaudit_preemptions_total"), "samples"),
            about="Samples per second that the engine preempted because its key-value cache was full.",
        ),
        lines(
            "Requests in the engines",
            COUNT,
            (newest("plaudit_engine_requests", "state"), "{{state}}"),
            about="Of all rollouts.",
        ),
        lines(
            "Key-value cache in use",
            SHARE,
            (newest("plaudit_engine_kv_cache_ratio", "statistic"), "{{statistic}} of the rollouts"),
            about="Near 1 the engine preempts samples.",
        ),
        lines(
            "Time to the first token",
            SECONDS,
            (newest("plaudit_engine_first_token_seconds", "statistic"), "{{statistic}} of the rollouts"),
            about="Mean of each rollout's newest 100 requests, waits in the engine's queue included.",
        ),
    )


def tools() -> Sequence[Any]:
    """Return the panels of tools."""
    return (
        lines(
            "Tool calls by outcome",
            PER_SECOND,
            (rate("plaudit_tool_calls_total", "tool, outcome"), "{{tool}}: {{outcome}}"),
            about="error: the tool raised. killed: its process ended. refused: it was never run.",
        ),
        lines(
            "Failed share of the newest tool calls",
            SHARE,
            (newest("plaudit_tool_recent_failed_ratio", "tool"), "{{tool}}"),
            about="Of the newest 100 calls that were run.",
        ),
        lines(
            "Duration of a tool call, p50 and p99 in the newest step",
            SECONDS,
            (newest("plaudit_last_step_tool_seconds", "tool, statistic"), "{{tool}}: {{statistic}}"),
            about="Exact quantiles, the start of the tool's process included.",
        ),
        lines(
            "Seconds in tools per second, by tool",
            COUNT,
            (rate("plaudit_tool_call_seconds_sum", "tool"), "{{tool}}"),
            about="Calls that run at the same time, on average.",
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
