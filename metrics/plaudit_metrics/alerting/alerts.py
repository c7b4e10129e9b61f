"""Alert rules: expression, severity, summary, and the runbook's section. None uses ``histogram_quantile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plaudit_metrics.alerting import thresholds as t
from plaudit_metrics.alerting.windows import AS_WRITTEN, Windows

RUNBOOK = "metrics/runbook.md"

_SINCE_STEP = "(time() - (plaudit_step_last_closed_timestamp_seconds > 0))"  # 0: no step yet, or a reward service
_BACKLOG = 'plaudit_stream_undelivered{stream=~"samples|groups"}'


@dataclass(frozen=True)
class Alert:
    """One alert rule."""

    name: str
    severity: str
    """``page``: a person must act now; ``ticket``: on the next working day."""
    summary: str
    """One sentence, with Prometheus's template language."""
    expression: str
    held: str = "0m"
    """How long the expression must hold before the alert fires."""
    where: str = "run"
    """``run`` or ``operator``: the file that holds it."""

    def rule(self, windows: Windows) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": windows.expression(self.expression),
            "for": windows.duration(self.held),
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"{RUNBOOK}#{self.name.lower()}"},
        }


def _burn(burn: t.Burn) -> Alert:
    errors, budget = "run:plaudit_reward_latency_errors:ratio_rate", "(1 - plaudit_reward_latency_target)"
    return Alert(
        "RewardLatencyBurn",
        burn.severity,
        f"Rewards are late: over the last {burn.long} the error budget burns {burn.factor:g} times too fast.",
        f"{errors}{burn.long} > {burn.factor:g} * {budget}\n"
        f"and {errors}{burn.short} > {burn.factor:g} * {budget}\n"
        f"and run:plaudit_reward_latency:increase{burn.long} >= {t.BURN_LEAST_SAMPLES}",
    )


ALERTS: tuple[Alert, ...] = (
    *(_burn(burn) for burn in t.BURNS),
    Alert(
        "RewardStarvesTrainer",
        "ticket",
        "The trainer waits for rewards, after generation has ended, {{ $value | humanizePercentage }} of its time.",
        f"(run:plaudit_exposed_reward:ratio_rate30m > {t.EXPOSED_REWARD_SHARE}\n"
        f"  and increase(plaudit_step_seconds_count[30m]) >= {t.EXPOSED_REWARD_STEPS}\n"
        f"  unless plaudit_last_step_seconds >= {t.EXPOSED_LONG_STEP_S})\n"
        f"or (run:plaudit_last_step_exposed_reward:ratio > {t.EXPOSED_REWARD_SHARE}\n"
        f"  and plaudit_last_step_seconds >= {t.EXPOSED_LONG_STEP_S})",
    ),
    Alert(
        "StepStalled",
        "page",
        "No step has closed for {{ $value | humanizeDuration }}.",
        # The mean is NaN after a restart of the metrics service: then the last step alone decides.
        f"({_SINCE_STEP} > {t.STALLED_AFTER_S}\n"
        f"  and {_SINCE_STEP} > {t.STALLED_AFTER_STEPS} * (plaudit_last_step_seconds > 0)\n"
        f"  unless {_SINCE_STEP} <= {t.STALLED_AFTER_STEPS} * plaudit_step_seconds_sum / plaudit_step_seconds_count)\n"
        f"or ({_SINCE_STEP} > {t.STALLED_FOR_CERTAIN_S} unless plaudit_last_step_seconds > 0)",
        held="2m",
    ),
    Alert(
        "SampleQueueOld",
        "ticket",
        "The oldest finished sample has waited {{ $value | humanizeDuration }} for a reward worker.",
        f'plaudit_stream_oldest_undelivered_seconds{{stream="samples"}} > {t.QUEUE_AGE_S}',
        held="5m",
    ),
    Alert(
        "BacklogGrowing",
        "ticket",
        "{{ $value | humanize }} entries of {{ $labels.stream }} wait for a reward worker, and the backlog grows.",
        f"min_over_time({_BACKLOG}[10m]) > max_over_time({_BACKLOG}[10m] offset 20m)\n"
        f"and {_BACKLOG} > {t.BACKLOG_LEAST}",
        held="10m",
    ),
    Alert(
        "ScoresFailing",
        "page",
        "{{ $value | humanizePercentage }} of the samples have no score because scorers fail.",
        f"run:plaudit_scores_failed:ratio_rate10m > {t.FAILED_SHARE}\n"
        f"and sum without (outcome) (increase(plaudit_samples_total[10m])) >= {t.FAILED_LEAST_SAMPLES}",
        held="5m",
    ),
    Alert(
        "JudgeCircuitOpen",
        "page",
        "The judge {{ $labels.judge }} fails repeatedly; its circuit breaker is open and no requests are sent.",
        "plaudit_judge_circuit_open == 1",
        held="5m",
    ),
    Alert(
        "JudgeBudgetExhausted",
        "ticket",
        "Samples wait {{ $value | humanizeDuration }} on average for the limits of {{ $labels.judge }}.",
        "rate(plaudit_limiter_wait_seconds_sum[10m]) / rate(plaudit_limiter_wait_seconds_count[10m])"
        f" > {t.LIMITER_WAIT_S}",
        held="10m",
    ),
    Alert(
        "Redelivering",
        "ticket",
        "Work was taken over from lost workers {{ $value | humanize }} times in 15 minutes.",
        f"sum without (stream) (increase(plaudit_redeliveries_total[15m])) > {t.REDELIVERIES}",
    ),
    Alert(
        "DeadLetters",
        "ticket",
        "A record of {{ $labels.stream }} became a dead letter: three workers were lost with it, or it cannot be read.",
        "increase(plaudit_dead_letters_total[15m]) > 0",
    ),
    Alert(
        "RedisMemoryHigh",
        "page",
        "Redis uses {{ $value | humanizePercentage }} of its memory: no new groups are admitted.",
        f"plaudit_redis_memory_bytes / (plaudit_redis_memory_limit_bytes > 0) > {t.REDIS_MEMORY_SHARE}",
        held="5m",
    ),
    Alert(
        "RedisDown",
        "page",
        "The metrics service cannot reach Redis: the run stands still, and its figures are from before.",
        "plaudit_redis_up == 0",
        held="1m",
    ),
    Alert(
        "RedisPersistenceFailing",
        "page",
        "Redis does not write its append-only file: if it dies, open work is repeated from the last checkpoint.",
        "plaudit_redis_aof_ok == 0",
        held="5m",
    ),
    Alert(
        "RolloutBehind",
        "ticket",
        "A ready rollout is {{ $value }} policy versions behind.",
        f"plaudit_policy_version_lag > {t.VERSIONS_BEHIND}",
        held="5m",
    ),
    Alert(
        "LogprobMismatch",
        "page",
        "{{ $value | humanizePercentage }} of the samples were generated with weights other than announced.",
        "1 - rate(plaudit_logprob_mismatch_bucket"
        f'{{le="{t.LOGPROB_DIFFERENCE}"}}[15m]) / ignoring(le) rate(plaudit_logprob_mismatch_count[15m])'
        f" > {t.LOGPROB_SHARE}",
        held="5m",
    ),
    Alert(
        "OperatorStuck",
        "page",
        "The operator receives no events from the cluster, or cannot keep up with them.",
        f"plaudit_operator_watch_last_event_age_seconds > {t.OPERATOR_EVENT_AGE_S}\n"
        f"or plaudit_operator_queue_depth > {t.OPERATOR_QUEUE_DEPTH}",
        held="10m",
        where="operator",
    ),
    Alert(
        "OperatorDown",
        "page",
        "No operator holds the lease: RLJobs are not reconciled. Running jobs continue.",
        "absent(plaudit_operator_leader == 1)",
        held="5m",
        where="operator",
    ),
)


def alert_rules(where: str, windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """Return the content of the alert file for ``run`` or ``operator``."""
    rules = [alert.rule(windows) for alert in ALERTS if alert.where == where]
    return {"groups": [{"name": f"plaudit.{where}", "rules": rules}]}
