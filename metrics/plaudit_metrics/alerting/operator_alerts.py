"""Alerts of the operator, and of jobs as the operator reports them: they outlive the pods of a run.

Every operator pod reports every job, so pods are aggregated away.
"""

from __future__ import annotations

from plaudit_metrics.alerting.alert import Alert

POD_LABELS = "instance, pod, container, endpoint"
_JOB = "{{ $labels.namespace }}/{{ $labels.name }}"
_LEADS = f"max without ({POD_LABELS}) (plaudit_operator_leader)"


def _jobs(phases: str) -> str:
    return f'max without ({POD_LABELS}, phase) (plaudit_rljob_info{{phase=~"{phases}"}})'


OPERATOR_ALERTS: tuple[Alert, ...] = (
    Alert(
        "RunWithoutMetrics",
        "critical",
        f"{_JOB}: the job runs, and nothing scrapes its metrics.",
        "No other alert of this run can fire. Its metrics pod is gone, or no monitor selects it.",
        f"{_jobs('Running|Degraded')}\nunless on (run) plaudit_redis_up",
        held="5m",
        where="operator",
    ),
    Alert(
        "RLJobFailed",
        "critical",
        f"{_JOB}: the job has failed.",
        "`kubectl plaudit status` gives the reason and the remedy.",
        _jobs("Failed"),
        kept="0m",
        where="operator",
    ),
    Alert(
        "RLJobDegraded",
        "warning",
        f"{_JOB}: the job has been degraded for ten minutes.",
        "A part of it is not working. `kubectl plaudit status` gives the reason and the remedy.",
        f'max without ({POD_LABELS}) (plaudit_rljob_condition{{type="Degraded", status="True"}})',
        held="10m",
        where="operator",
    ),
    Alert(
        "OperatorDown",
        "critical",
        "{{ $labels.namespace }}: no operator holds the lease.",
        "RLJobs are not reconciled. Running jobs continue.",
        f"max_over_time(({_LEADS})[6h:1m]) unless {_LEADS} == 1",
        held="5m",
        where="operator",
    ),
    Alert(
        "OperatorStuck",
        "critical",
        "{{ $labels.namespace }}: an operator receives no events from the cluster, or cannot keep up with them.",
        "Failures are not repaired and new jobs do not start.",
        # Its liveness probe restarts a silent operator after 300 s, and the age begins anew: hence the window.
        "max_over_time(plaudit_operator_watch_last_event_age_seconds[10m]) > <operatorEventAgeSeconds>\n"
        "or plaudit_operator_queue_depth > <operatorQueueDepth>",
        held="15m",
        where="operator",
    ),
    Alert(
        "OperatorErrors",
        "warning",
        "{{ $labels.namespace }}: {{ $value | humanizePercentage }} of the operator's reconciliations fail.",
        "Its log names the job and the error.",
        'sum without (result) (rate(plaudit_operator_reconcile_seconds_count{result=~"error|crash"}[15m]))\n'
        "/ sum without (result) (rate(plaudit_operator_reconcile_seconds_count[15m])) > <operatorErrorShare>",
        held="10m",
        where="operator",
    ),
)
