"""Recording rules, named ``level:metric:operation``. The level is ``run``, since one service serves one run.

Aggregations use ``without``, so that labels from the scrape (namespace, run, cluster) stay.
"""

from __future__ import annotations

from typing import Any

from plaudit_metrics.alerting.thresholds import BURNS
from plaudit_metrics.alerting.windows import AS_WRITTEN, Windows

LATENCY_WINDOWS = tuple(dict.fromkeys(window for burn in BURNS for window in (burn.short, burn.long)))


def recording_rules(windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """Return the content of the rule file."""
    rules = [*_latency(windows), *_shares(windows)]
    return {"groups": [{"name": "plaudit.rules", "interval": windows.duration("30s"), "rules": rules}]}


def _latency(windows: Windows) -> list[dict[str, str]]:
    """Return the share of samples that missed the job's threshold, over each window of the burn-rate table."""
    rules = []
    for window in LATENCY_WINDOWS:
        ratio = f"1 - rate(plaudit_reward_latency_good_total[{window}]) / rate(plaudit_reward_latency_total[{window}])"
        rules.append(_rule(f"run:plaudit_reward_latency_errors:ratio_rate{window}", windows.expression(ratio)))
        volume = windows.expression(f"increase(plaudit_reward_latency_total[{window}])")
        rules.append(_rule(f"run:plaudit_reward_latency:increase{window}", volume))
    return rules


def _shares(windows: Windows) -> list[dict[str, str]]:
    expressions = {
        "run:plaudit_exposed_reward:ratio_rate30m": (
            "rate(plaudit_step_exposed_reward_seconds_sum[30m]) / rate(plaudit_step_seconds_sum[30m])"
        ),
        "run:plaudit_last_step_exposed_reward:ratio": (
            "plaudit_last_step_exposed_reward_seconds / (plaudit_last_step_seconds > 0)"
        ),
        "run:plaudit_step_wait:ratio_rate30m": (
            "rate(plaudit_step_wait_seconds_sum[30m]) / ignoring(cause) group_left rate(plaudit_step_seconds_sum[30m])"
        ),
        "run:plaudit_scores_failed:ratio_rate10m": (
            'sum without (outcome) (rate(plaudit_samples_total{outcome=~"infra_error|timeout|data_error"}[10m]))'
            " / sum without (outcome) (rate(plaudit_samples_total[10m]))"
        ),
        "run:plaudit_samples:rate5m": "sum without (outcome) (rate(plaudit_samples_total[5m]))",
        "run:plaudit_stage_seconds:mean_rate5m": (
            "rate(plaudit_stage_seconds_sum[5m]) / rate(plaudit_stage_seconds_count[5m])"
        ),
        "run:plaudit_score_seconds:mean_rate5m": (
            "sum without (outcome) (rate(plaudit_score_seconds_sum[5m]))"
            " / sum without (outcome) (rate(plaudit_score_seconds_count[5m]))"
        ),
    }
    return [_rule(name, windows.expression(expression)) for name, expression in expressions.items()]


def _rule(name: str, expression: str) -> dict[str, str]:
    return {"record": name, "expr": expression}
