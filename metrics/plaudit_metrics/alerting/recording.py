"""Recording rules, named ``level:metric:operation``. The level is ``run``, since one service serves one run.

Aggregations use ``without``, so that labels from the scrape (namespace, run, cluster) stay.
"""

from __future__ import annotations

from typing import Any

from plaudit_metrics.alerting.thresholds import BURNS
from plaudit_metrics.alerting.windows import AS_WRITTEN, Windows


def recording_rules(windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """Return the content of the rule file."""
    rules = [
        {"record": name, "expr": windows.expression(expression)}
        for name, expression in (_late() | _failed() | _steps() | _means() | _phases()).items()
    ]
    return {"groups": [{"name": "plaudit.rules", "interval": windows.duration("30s"), "rules": rules}]}


def _late() -> dict[str, str]:
    """Return the share of late training samples over each window of the burn-rate table.

    It is the mean over time of the share among the newest samples, so it neither vanishes between two steps nor depends
    on how many samples slow rewards let through.
    """
    windows = dict.fromkeys(window for burn in BURNS for window in (burn.long, burn.short))
    return {
        f"run:plaudit_late:ratio_{window}": f"avg_over_time(plaudit_recent_late_ratio[{window}])" for window in windows
    }


def _failed() -> dict[str, str]:
    """Return the share of samples without a score because scorers fail, likewise."""
    return {"run:plaudit_failed:ratio_10m": "avg_over_time(plaudit_recent_failed_ratio[10m])"}


def _steps() -> dict[str, str]:
    """Return shares of the newest step; of short steps, over half an hour."""
    seconds = "avg_over_time(plaudit_last_step_seconds[30m])"
    return {
        "run:plaudit_exposed_reward:ratio": (
            f"avg_over_time(plaudit_last_step_exposed_reward_seconds[30m]) / ({seconds} > 0)"
        ),
        "run:plaudit_tools_wait:ratio": (
            f'avg_over_time(plaudit_last_step_wait_seconds{{cause="tools"}}[30m]) / ignoring (cause) ({seconds} > 0)'
        ),
        "run:plaudit_step_wait:ratio": (
            f"avg_over_time(plaudit_last_step_wait_seconds[30m]) / ignoring (cause) group_left () ({seconds} > 0)"
        ),
    }


def _phases() -> dict[str, str]:
    """Return the runs whose job is not running, or was not when an operator reported it last, within an hour.

    Without the hour, suspended jobs would fire while no operator runs.
    """
    jobs = 'plaudit_rljob_info{{run!="", phase{}"Running|Degraded"}}'
    other, running = (jobs.format(matches) for matches in ("!~", "=~"))
    newest = "max by (run) (max_over_time(timestamp({})[1h:1m]))".format
    reported_last = f"({newest(other)} unless {newest(running)} >= {newest(other)})"
    return {"run:plaudit_not_running:last1h": f"max by (run) ({other})\nor {reported_last}"}


def _means() -> dict[str, str]:
    return {
        "run:plaudit_samples:rate5m": "sum without (outcome) (rate(plaudit_samples_total[5m]))",
        "run:plaudit_stage_seconds:mean_rate5m": (
            "rate(plaudit_stage_seconds_sum[5m]) / rate(plaudit_stage_seconds_count[5m])"
        ),
        "run:plaudit_score_seconds:mean_rate5m": (
            "sum without (outcome) (rate(plaudit_score_seconds_sum[5m]))"
            " / sum without (outcome) (rate(plaudit_score_seconds_count[5m]))"
        ),
    }
