"""``Plaudit / Job``: bottleneck, scorers, queue age and failures on the first screen; details of each part below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.monitoring.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    OLDEST_SAMPLE,
    PER_SECOND,
    SECONDS,
    SHARE,
    Bars,
    Lines,
    Stat,
    frame,
    newest,
    quantile,
    rate,
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
        "Reward": _reward,
        "Scorers": _scorers,
        "Steps and stages": _stages,
        "Generation and rollout engines": _generation,
        "Tools": _tools,
        "Sandboxes": _sandboxes,
        "Judges and limits": _judges,
        "Reward models": _reward_models,
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
    oldest = f"max by () ({OLDEST_SAMPLE})"
    return (
        Stat(
            "Newest step waiting for rewards",
            SHARE,
            "Share of the newest step in which the trainer waited for rewards after generation had ended.",
            warn=share / 2,
            bad=share,
        ).of(exposed),
        Stat(
            "Oldest unscored sample",
            SECONDS,
            "Age of the oldest finished sample without a score, in the queue or in work.",
            warn=T["queueAgeSeconds"] / 4,
            bad=T["queueAgeSeconds"],
        ).of(oldest),
        Stat(
            "Samples without a score", SHARE, "Of the newest step.", warn=T["failedShare"] / 2, bad=T["failedShare"]
        ).of(newest("plaudit_last_step_masked_share")),
        Stat("Newest step", COUNT, "Number of the newest closed step.").of(newest("plaudit_step")),
        Stat("Since the last step", SECONDS, "Time since the newest step closed.").of(
            f"{newest('plaudit_redis_last_seen_timestamp_seconds')}"
            f" - {newest('plaudit_step_last_closed_timestamp_seconds')}"
        ),
        Stat("Mean reward", COUNT, "Of the newest step.").of(f"avg(plaudit_reward_mean{{{OF_RUN}}})"),
        Bars(
            "Bottleneck: where the newest step's time went",
            SHARE,
            "Waits of the trainer by cause; the rest is its own work.",
        ).of((waits, "{{cause}}"), (trainer, "trainer")),
        Bars("Scorers: p50 and p99 of a call in the newest step", SECONDS, "Exact quantiles of the last attempts.").of(
            (newest("plaudit_last_step_scorer_seconds", "scorer, statistic"), "{{scorer}}: {{statistic}}")
        ),
        Bars("Failed scores by scorer", COUNT, "In the range of time.").of((failures, "{{scorer}}: {{outcome}}")),
        Lines("Age of the oldest unread entry", SECONDS, "Long ages of samples: too few reward workers.").of(
            (newest("plaudit_stream_oldest_undelivered_seconds", "stream"), "{{stream}}")
        ),
        Lines("Queue depth", COUNT, "Entries that no consumer has read, and entries in work, by stream.").of(
            (newest("plaudit_stream_undelivered", "stream"), "{{stream}}: waiting"),
            (newest("plaudit_stream_in_flight", "stream"), "{{stream}}: in progress"),
        ),
        Lines(
            "Samples by outcome",
            PER_SECOND,
            "Samples per second that ended, by outcome. All but scored have no score.",
            stacked=True,
        ).of((f"{rate('plaudit_samples_total', 'outcome')} > 0", "{{outcome}}")),
    )


def _reward() -> Sequence[Any]:
    mean, std = newest("plaudit_reward_mean"), newest("plaudit_reward_std")
    return (
        Lines("Reward", COUNT, "Of the newest step; samples without a score are not zeros.", signed=True).of(
            (mean, "mean"),
            (f"{mean} - {std}", "mean - standard deviation"),
            (f"{mean} + {std}", "mean + standard deviation"),
        ),
        Lines("Values of the scorers", COUNT, "Mean of the newest step.", signed=True).of(
            (newest("plaudit_last_step_scorer_value", "scorer"), "{{scorer}}")
        ),
        Lines(
            "Groups that train nothing",
            SHARE,
            "In the newest step: groups whose rewards are all equal, and samples without a score.",
        ).of(
            (newest("plaudit_last_step_zero_variance_share"), "all rewards equal"),
            (newest("plaudit_last_step_masked_share"), "samples without a score"),
        ),
        Lines(
            "Reward and auditors",
            COUNT,
            "Means over the audited samples of 20 steps, with their 95 % intervals.",
            signed=True,
        ).of(
            (newest("plaudit_audit_value", "scorer, statistic"), "{{scorer}}: {{statistic}}"),
            (newest("plaudit_audit_reward", "scorer, statistic"), "reward for {{scorer}}: {{statistic}}"),
        ),
        Lines(
            "What the update reinforces, as auditors see it",
            COUNT,
            "An auditor's mean over samples above their group's mean reward less its mean over the others. Below 0 the "
            "policy is taught what the auditor rejects.",
            signed=True,
        ).of((newest("plaudit_audit_gap", "scorer, statistic"), "{{scorer}}: {{statistic}}")),
        Lines(
            "Agreement of reward and auditors",
            COUNT,
            "Rank correlation within groups, mean over the audited groups of 20 steps.",
            signed=True,
        ).of((newest("plaudit_audit_agreement", "scorer, statistic"), "{{scorer}}: {{statistic}}")),
        Lines(
            "Drift of scorers",
            COUNT,
            "How much more a scorer gave the same samples of the first step when it was asked again; its interval.",
            signed=True,
        ).of((newest("plaudit_scorer_drift", "scorer, statistic"), "{{scorer}}: {{statistic}}")),
        Lines(
            "Reward and length",
            SHARE,
            "How much of the reward follows the length of a response within groups, and who has no score.",
            signed=True,
        ).of(
            (newest("plaudit_last_step_length_correlation"), "correlation of reward and tokens, newest step"),
            (newest("plaudit_length_pays_share"), "steps of the newest 20 in which it is over 0.3"),
            (newest("plaudit_last_step_masked_longest_share"), "without a score: the longest quarter"),
            (newest("plaudit_last_step_masked_others_share"), "without a score: the others"),
        ),
        Lines("Audits", COUNT, "Groups of 20 steps that were audited or wait for it, and samples that failed.").of(
            (newest("plaudit_audit_groups", "scorer"), "{{scorer}}: audited"),
            (newest("plaudit_audit_waiting_groups", "scorer"), "{{scorer}}: waiting"),
            (newest("plaudit_audit_failed_samples", "scorer"), "{{scorer}}: failed samples"),
        ),
    )


def _scorers() -> Sequence[Any]:
    failed = rate("plaudit_score_seconds_count", "scorer, outcome", where=', outcome!="scored"')
    quantiles = [(quantile(q, "plaudit_score_seconds", "scorer"), f"{{{{scorer}}}}: {q}") for q in (0.5, 0.99)]
    return (
        Lines(
            "Duration of a call by scorer, p50 and p99",
            SECONDS,
            "Estimated from buckets. Points are calls with their traces, where exemplars are stored.",
        ).of(*quantiles),
        Lines(
            "Failed calls by scorer", PER_SECOND, "Calls per second that ended without a value, by scorer and outcome."
        ).of((failed, "{{scorer}}: {{outcome}}")),
        Lines("Age of the oldest call by scorer", SECONDS, "Calls that have not ended are in no other figure.").of(
            (newest("plaudit_scorer_oldest_in_flight_seconds", "scorer"), "{{scorer}}")
        ),
        Lines("Calls in flight by scorer", COUNT, "Calls that have not ended, waits and retries included.").of(
            (newest("plaudit_scorer_in_flight", "scorer"), "{{scorer}}")
        ),
        Lines(
            "Samples scored within the threshold",
            SHARE,
            "Within metrics.rewardLatency.thresholdSeconds. A sample that fails fast is not in time.",
        ).of(
            (f"1 - {newest('plaudit_recent_late_ratio')}", "samples of a whole step"),
            (newest("plaudit_reward_latency_target"), "target"),
        ),
        Lines("Workers", COUNT, "Live processes by role and state.").of(
            (newest("plaudit_workers", "role, state"), "{{role}}: {{state}}")
        ),
    )


def _judges() -> Sequence[Any]:
    return (
        Lines("Mean wait for a limit", SECONDS, "Of the calls of a whole step.").of(
            (newest("plaudit_limiter_recent_wait_seconds", "judge"), "{{judge}}")
        ),
        Lines(
            "Requests by status",
            PER_SECOND,
            "Requests per second to each judge by HTTP status. cached: no request was needed.",
        ).of((rate("plaudit_judge_requests_total", "judge, status"), "{{judge}}: {{status}}")),
        Lines(
            "Tokens per second, open circuit breakers",
            COUNT,
            "Tokens that judges read (prompt) and wrote (completion). Open is 1 while a judge gets no requests.",
        ).of(
            (rate("plaudit_judge_tokens_total", "judge, kind"), "{{judge}}: {{kind}}"),
            (newest("plaudit_judge_circuit_open", "judge"), "{{judge}}: open"),
        ),
    )


def _reward_models() -> Sequence[Any]:
    server = "plaudit_model_server"
    passes = rate(f"{server}_inference_seconds_count", "scorer")
    waits = [(quantile(q, f"{server}_queue_wait_seconds", "scorer"), f"{{{{scorer}}}} wait: {q}") for q in (0.5, 0.99)]
    inference = [
        (quantile(q, f"{server}_inference_seconds", "scorer"), f"{{{{scorer}}}} pass: {q}") for q in (0.5, 0.99)
    ]
    return (
        Lines(
            "Sequences that wait for a reward model",
            COUNT,
            "In the queues of all its servers. Of models that vLLM serves see vLLM's own dashboards.",
        ).of((f"sum by (scorer) ({server}_queue_sequences{{{OF_RUN}}})", "{{scorer}}")),
        Lines(
            "Reward model: wait and forward pass, p50 and p99",
            SECONDS,
            "From the arrival of a sequence to its forward pass, and the pass itself. Estimated from buckets.",
        ).of(*waits, *inference),
        Lines(
            "Reward model: sequences of a forward pass",
            COUNT,
            "Mean size of a batch. With 1 the server has too few requests at a time.",
        ).of((f"{rate(f'{server}_batch_sequences_sum', 'scorer')} / ({passes} > 0)", "{{scorer}}")),
        Lines("Reward model: tokens per second", COUNT, "Tokens of the sequences, and tokens computed as padding.").of(
            (rate(f"{server}_batch_tokens_sum", "scorer"), "{{scorer}}"),
            (rate(f"{server}_padding_tokens_total", "scorer"), "{{scorer}}: padding"),
        ),
        Lines(
            "Reward model: time in forward passes",
            SHARE,
            "Seconds of forward passes per second, summed over its servers: near their number they are all busy.",
        ).of((rate(f"{server}_inference_seconds_sum", "scorer"), "{{scorer}}")),
        Lines("Reward model: responses by status", PER_SECOND, "Requests to /classify by HTTP status.").of(
            (rate(f"{server}_requests_total", "scorer, code"), "{{scorer}}: {{code}}")
        ),
    )


def _generation() -> Sequence[Any]:
    lengths = [(quantile(q, "plaudit_response_tokens"), f"p{q * 100:g}") for q in (0.5, 0.99)]
    return (
        Lines(
            "Response tokens per second",
            COUNT,
            "Tokens of the responses: of the newest step by its seconds, and as they arrive now.",
        ).of(
            (newest("plaudit_last_step_tokens_per_second"), "newest step"), (rate("plaudit_response_tokens_sum"), "now")
        ),
        Lines("Response length", COUNT, "Tokens of a response, p50 and p99, estimated from buckets; mean.").of(
            *lengths, (newest("plaudit_last_step_response_tokens"), "mean, newest step")
        ),
        Lines("Truncated responses", SHARE, "Share of the newest step.").of(
            (newest("plaudit_last_step_truncated_share"), "at the token limit")
        ),
        Lines(
            "Preemptions",
            PER_SECOND,
            "Samples per second that the engine preempted because its key-value cache was full.",
        ).of((rate("plaudit_preemptions_total"), "samples")),
        Lines("Requests in the engines", COUNT, "Of all rollouts.").of(
            (newest("plaudit_engine_requests", "state"), "{{state}}")
        ),
        Lines("Key-value cache in use", SHARE, "Near 1 the engine preempts samples.").of(
            (newest("plaudit_engine_kv_cache_ratio", "statistic"), "{{statistic}} of the rollouts")
        ),
        Lines(
            "Time to the first token",
            SECONDS,
            "Mean of each rollout's newest 100 requests, waits in the engine's queue included.",
        ).of((newest("plaudit_engine_first_token_seconds", "statistic"), "{{statistic}} of the rollouts")),
    )


def _tools() -> Sequence[Any]:
    return (
        Lines(
            "Tool calls by outcome",
            PER_SECOND,
            "error: the tool raised. killed: its process ended. refused: it was never run.",
        ).of((rate("plaudit_tool_calls_total", "tool, outcome"), "{{tool}}: {{outcome}}")),
        Lines("Failed share of the newest tool calls", SHARE, "Of the calls of a whole step that were run.").of(
            (newest("plaudit_tool_recent_failed_ratio", "tool"), "{{tool}}")
        ),
        Lines(
            "Duration of a tool call, p50 and p99 in the newest step",
            SECONDS,
            "Exact quantiles, the start of the tool's process included.",
        ).of((newest("plaudit_last_step_tool_seconds", "tool, statistic"), "{{tool}}: {{statistic}}")),
        Lines("Seconds in tools per second, by tool", COUNT, "Calls that run at the same time, on average.").of(
            (rate("plaudit_tool_call_seconds_sum", "tool"), "{{tool}}")
        ),
    )


def _sandboxes() -> Sequence[Any]:
    return (
        Lines(
            "Machines of samples",
            COUNT,
            "waiting: samples without a place for theirs. left: machines that wait for their tests or their group.",
        ).of((newest("plaudit_sandboxes", "state"), "{{state}}")),
        Lines("Longest wait for a machine", SECONDS, "Age of the oldest wait for a place, now.").of(
            (newest("plaudit_sandbox_oldest_wait_seconds"), "oldest")
        ),
        Lines(
            "Stages of a machine, p50 and p99 in the newest step",
            SECONDS,
            "Exact quantiles. claim: wait for a place. wait, verify_wait: those of commands and tests.",
        ).of((newest("plaudit_last_step_sandbox_seconds", "stage, statistic"), "{{stage}}: {{statistic}}")),
        Lines("Seconds of machines per second, by stage", COUNT, "Machines that are in a stage, on average.").of(
            (rate("plaudit_sandbox_seconds_sum", "stage"), "{{stage}}")
        ),
        Lines("Failed share of the newest machines", SHARE, "Of the machines of a whole step: not made, or broken.").of(
            (newest("plaudit_sandbox_recent_failed_ratio"), "failed")
        ),
        Lines("CPUs that machines hold", COUNT, "CPU seconds of the closed steps' machines, per second.").of(
            (rate("plaudit_sandbox_cpu_seconds_total"), "CPUs")
        ),
        Lines("Machines by result", PER_SECOND, "failed: could not be made, or broke.").of(
            (rate("plaudit_sandbox_machines_total", "result"), "{{result}}")
        ),
    )


def _stages() -> Sequence[Any]:
    sums, counts = (rate(f"plaudit_stage_seconds_{each}", "stage") for each in ("sum", "count"))
    slow = quantile(0.95, "plaudit_stage_seconds", "stage")
    return (
        Lines(
            "Step duration",
            SECONDS,
            "The newest step: its seconds, those of the update, and those of waiting for rewards.",
        ).of(
            (newest("plaudit_last_step_seconds"), "step"),
            (newest("plaudit_last_step_update_seconds"), "update"),
            (newest("plaudit_last_step_exposed_reward_seconds"), "waiting for rewards"),
        ),
        Lines(
            "Time since the last step",
            SECONDS,
            "Age of the open step, and the longest of the ten newest. A start of the trainer begins it anew.",
        ).of(
            (
                f"{newest('plaudit_redis_last_seen_timestamp_seconds')}"
                f" - {newest('plaudit_step_opened_timestamp_seconds')}",
                "open step",
            ),
            (newest("plaudit_recent_steps_max_seconds"), "longest of the newest steps"),
        ),
        Lines("Steps per hour", COUNT, "By the length of the newest step.").of(
            (f"3600 / ({newest('plaudit_last_step_seconds')} > 0)", "by the newest step")
        ),
        Lines(
            "Stages of a sample, mean",
            SECONDS,
            "Seconds of a sample in each stage, from admission until the trainer takes its group.",
            stacked=True,
        ).of((f"{sums} / ({counts} > 0)", "{{stage}}")),
        Lines(
            "Stages of a sample, p95",
            SECONDS,
            "Estimated from buckets. Points are samples with their traces, where exemplars are stored.",
        ).of((slow, "{{stage}}")),
        Lines("Groups", PER_SECOND, "Groups per second that closed, by how: trained, evaluated or dropped.").of(
            (rate("plaudit_groups_total", "outcome"), "{{outcome}}")
        ),
    )


def _policy() -> Sequence[Any]:
    return (
        Lines(
            "Staleness", COUNT, "Policy versions between a sample's oldest token and its update, and maxStaleness."
        ).of(
            (newest("plaudit_sample_staleness", "statistic"), "{{statistic}}"),
            (newest("plaudit_staleness_limit"), "limit"),
        ),
        Lines(
            "Policy version",
            COUNT,
            "The announced version, and by how many versions the slowest ready rollout is behind.",
        ).of(
            (newest("plaudit_policy_version"), "announced"),
            (newest("plaudit_policy_version_lag"), "lag of the slowest rollout"),
        ),
        Lines(
            "Discarded updates",
            COUNT,
            "Updates of the newest step that were discarded because their gradient is not finite.",
        ).of((newest("plaudit_last_step_skipped_updates"), "newest step")),
        Lines(
            "Difference between rollouts and trainer",
            COUNT,
            "Mean absolute difference of a trained token's log-probability in nats, for the same weights.",
        ).of(
            (newest("plaudit_last_step_logprob_mismatch"), "newest step"),
            (newest("plaudit_last_step_logprob_mismatch_limit"), "limit of the precision"),
        ),
    )


def _transport() -> Sequence[Any]:
    def happened(name: str) -> str:
        return f"sum by (stream) (increase(plaudit_{name}_total{{{OF_RUN}}}[$__rate_interval]))"

    return (
        Lines("Redis", BYTES, "Memory of Redis and its limit. Above 70 % no groups are admitted.").of(
            (newest("plaudit_redis_memory_bytes"), "used"), (newest("plaudit_redis_memory_limit_bytes"), "limit")
        ),
        Lines(
            "Redeliveries, duplicates, dead letters",
            COUNT,
            "Entries taken over from lost workers, refused as duplicates, and given up, by stream.",
        ).of(
            (happened("redeliveries"), "{{stream}}: taken over"),
            (happened("duplicates"), "{{stream}}: duplicate"),
            (happened("dead_letters"), "{{stream}}: dead letter"),
        ),
        Lines(
            "Metrics pipeline", COUNT, "Events lost or late, and whether Redis responds and writes its file (1: yes)."
        ).of(
            (f"sum(increase(plaudit_records_missing_total{{{OF_RUN}}}[$__rate_interval]))", "events lost"),
            (f"sum(increase(plaudit_records_late_total{{{OF_RUN}}}[$__rate_interval]))", "events late"),
            (newest("plaudit_redis_aof_ok"), "Redis writes its file"),
            (newest("plaudit_redis_up"), "Redis responds"),
        ),
    )
