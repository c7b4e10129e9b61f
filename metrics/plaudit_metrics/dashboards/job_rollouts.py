"""The rows of ``Plaudit / Job`` about generation, rollout engines and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit_metrics.dashboards.panels import COUNT, PER_SECOND, SECONDS, SHARE, lines
from plaudit_metrics.dashboards.queries import newest, quantile, rate


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
