"""The alerts: what fires, when, and where the runbook tells what to do. No ``histogram_quantile`` anywhere."""

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
    """``page``: somebody has to look now; ``ticket``: on the next working day."""
    summary: str
    """One sentence, with Prometheus's template language."""
    expression: str
    held: str = "0m"
    """For how long the expression must hold."""
    where: str = "run"
    """``run`` or ``operator``: the file it goes to."""

    def rule(self, windows: Windows) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
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
        f"Rewards come too late: over {burn.long} the error budget burns {burn.factor:g} times too fast.",
        f"{errors}{burn.long} > {burn.factor:g} * {budget}\n"
        f"and {errors}{burn.short} > {burn.factor:g} * {budget}\n"
        f"and run:plaudit_reward_latency:increase{burn.long} >= {t.BURN_LEAST_SAMPLES}",
    )


ALERTS: tuple[Alert, ...] = (
    *(_burn(burn) for burn in t.BURNS),
    Alert(
        "RewardStarvesTrainer",
        "ticket",
        "The trainer spends {{ $value | humanizePercentage }} of its steps waiting for rewards alone.",
        f"run:plaudit_exposed_reward:ratio_rate30m > {t.EXPOSED_REWARD_SHARE}\n"
        f"and increase(plaudit_step_seconds_count[30m]) >= {t.EXPOSED_REWARD_STEPS}",
    ),
    Alert(
        "StepStalled",
        "page",
        "No step was closed for {{ $value | humanizeDuration }}.",
        f"({_SINCE_STEP} > {t.STALLED_AFTER_S}\n"
        f"  and {_SINCE_STEP} > {t.STALLED_AFTER_STEPS} * plaudit_step_seconds_sum / plaudit_step_seconds_count)\n"
        f"or {_SINCE_STEP} > {t.STALLED_FOR_CERTAIN_S}",
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
        "{{ $value | humanize }} entries of {{ $labels.stream }} wait for a reward worker, more and more.",
        f"min_over_time({_BACKLOG}[10m]) > max_over_time({_BACKLOG}[10m] offset 20m)\n"
        f"and {_BACKLOG} > {t.BACKLOG_LEAST}",
        held="10m",
    ),
    Alert(
        "ScoresFailing",
        "page",
        "{{ $value | humanizePercentage }} of the samples get no score because what scores them fails.",
        f"run:plaudit_scores_failed:ratio_rate10m > {t.FAILED_SHARE}\n"
        f"and sum without (outcome) (increase(plaudit_samples_total[10m])) >= {t.FAILED_LEAST_SAMPLES}",
        held="5m",
    ),
    Alert(
        "JudgeCircuitOpen",
        "page",
        "The judge {{ $labels.judge }} fails so often that it is not asked any more.",
        "plaudit_judge_circuit_open == 1",
        held="5m",
    ),
    Alert(
        "JudgeBudgetExhausted",
        "ticket",
        "Samples wait {{ $value | humanizeDuration }} each for the limits of {{ $labels.judge }}.",
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
        "A record of {{ $labels.stream }} killed every worker that took it.",
        "increase(plaudit_dead_letters_total[15m]) > 0",
    ),
    Alert(
        "RedisMemoryHigh",
        "page",
        "Redis uses {{ $value | humanizePercentage }} of its memory: nothing is admitted.",
        f"plaudit_redis_memory_bytes / (plaudit_redis_memory_limit_bytes > 0) > {t.REDIS_MEMORY_SHARE}",
        held="5m",
    ),
    Alert(
        "RedisPersistenceFailing",
        "page",
        "Redis does not write its append-only file: if it dies, the run's open work is lost.",
        "plaudit_redis_aof_ok == 0",
        held="5m",
    ),
    Alert(
        "RolloutBehind",
        "ticket",
        "A rollout that takes prompts is {{ $value }} policy versions behind.",
        f"plaudit_policy_version_lag > {t.VERSIONS_BEHIND}",
        held="5m",
    ),
    Alert(
        "LogprobMismatch",
        "page",
        "{{ $value | humanizePercentage }} of the samples were generated by other weights than announced.",
        "1 - rate(plaudit_logprob_mismatch_bucket"
        f'{{le="{t.LOGPROB_DIFFERENCE}"}}[15m]) / ignoring(le) rate(plaudit_logprob_mismatch_count[15m])'
        f" > {t.LOGPROB_SHARE}",
        held="5m",
    ),
    Alert(
        "OperatorStuck",
        "page",
        "The operator sees no events of the cluster, or cannot keep up with them.",
        f"plaudit_operator_watch_last_event_age_seconds > {t.OPERATOR_EVENT_AGE_S}\n"
        f"or plaudit_operator_queue_depth > {t.OPERATOR_QUEUE_DEPTH}",
        held="10m",
        where="operator",
    ),
    Alert(
        "OperatorDown",
        "page",
        "No operator leads: RLJobs are not reconciled; running jobs go on.",
        "absent(plaudit_operator_leader == 1)",
        held="5m",
        where="operator",
    ),
)


def alert_rules(where: str, windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """The alert file's content, for ``run`` or ``operator``."""
    rules = [alert.rule(windows) for alert in ALERTS if alert.where == where]
    return {"groups": [{"name": f"plaudit.{where}", "rules": rules}]}
