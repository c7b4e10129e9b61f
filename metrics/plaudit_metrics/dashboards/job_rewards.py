"""The rows of ``Plaudit / Job`` about rewards, scorers, judges and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit_metrics.dashboards.panels import COUNT, OF_RUN, PER_SECOND, SECONDS, SHARE, lines
from plaudit_metrics.dashboards.queries import newest, quantile, rate


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
