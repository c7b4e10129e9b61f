"""All alerts and recording rules, and the content of their rule files.

Alerts of a run hold for steps of any length: they compare gauges of the newest step, shares of the samples of a whole
step, ages, and sums over several steps, instead of rates over a window that may contain no step at all. Ages compare
stamps of Redis's clock with each other, never with Prometheus's. None uses ``histogram_quantile``. Alerts of the
operator, and of jobs as the operator reports them, outlive the pods of a run; every operator pod reports every job, so
pods are aggregated away.

Recording rules are named ``level:metric:operation``. The level is ``run``, since one service serves one run.
Aggregations use ``without``, so that labels from the scrape (namespace, run, cluster) stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_metrics.monitoring.rules import AS_WRITTEN, BURNS, THRESHOLDS, Alert, Burn, Windows

_SINCE_STEP = "(plaudit_redis_last_seen_timestamp_seconds - plaudit_step_opened_timestamp_seconds)"
_HAS_TRAINER = "(plaudit_staleness_limit or plaudit_step_opened_timestamp_seconds)"
"""Absent in a service: it has no steps, and nobody whose waiting would hide a late reward."""
_LONGEST_STEP = "(plaudit_recent_steps_max_seconds and plaudit_step > 1 unless plaudit_trainer_validating == 1)"
"""The first step tells nothing about the second where lengths alternate, and no step about a validation."""
_STARTS = "changes(plaudit_trainer_started_timestamp_seconds[1h])"
_TRAINER_LIVES = '(sum without (role, state) (plaudit_workers{role="trainer"}) > 0)'
_REDIS_WAS_AWAY = "max_over_time((max_over_time(plaudit_redis_up[1m]) == bool 0)[15m:1m]) == 1"
"""For a whole minute, a quarter of an hour ago at most: the open step is as old as that made it, and goes on."""
_UNLESS_RESUMED = "unless on (run) run:plaudit_stopped:last30m"
"""As long as a job may start: until its pods have nodes and its processes models, a resumed one has no process."""
_SAMPLES_END = "(sum without (outcome) (increase(plaudit_samples_total[30m])) > 0)"
_BACKLOG = 'plaudit_stream_undelivered{stream=~"samples|groups"}'
_KEPT_OF_SHARES = "1h"
"""A share of several long steps leaves its limit, and comes back, as other steps are in its window."""
_QUEUE_AGE = 'plaudit_stream_oldest_undelivered_seconds{stream="samples"}'
_THRESHOLD = "plaudit_reward_latency_threshold_seconds"
_TRUNCATED = "avg_over_time(plaudit_last_step_truncated_share[30m])"
_REDELIVERED = "plaudit_redeliveries_total - min_over_time(plaudit_redeliveries_total[5m])"


def _without(role: str, stream: str) -> str:
    """Return an expression that holds while a stream has work, read or not, and no process of the role is ready."""
    ready = f'sum without (role, state) (plaudit_workers{{role="{role}", state!="starting"}})'
    work = f'plaudit_stream_undelivered{{stream="{stream}"}} + plaudit_stream_in_flight{{stream="{stream}"}}'
    return f"({ready} == 0\n  and ignoring (stream) {work} > 0)\n{_UNLESS_RESUMED}"


def _burn(burn: Burn) -> Alert:
    late, limit = "run:plaudit_late:ratio_", f"<{burn.factor}> * (1 - plaudit_reward_latency_target)"
    expression = f"{late}{burn.long} > {limit}\nand {late}{burn.short} > {limit}"
    exposed = f"\nand (run:plaudit_exposed_reward:ratio > <exposedShare> or ({late}{burn.long} unless {_HAS_TRAINER}))"
    return Alert(
        "RewardLatencyBurn",
        "critical" if burn.severity == "critical" else "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the rewards are late.",
        f"The error budget of the job's metrics.rewardLatency burns over <{burn.factor}> times too fast. It is "
        "critical only while the trainer waits for rewards, or without a trainer. The runbook names the slow part.",
        expression + (exposed if burn.severity == "critical" else ""),
        held="2m",
        panel="Samples scored within the threshold",
    )


_LATENCY = (
    *(_burn(burn) for burn in BURNS),
    Alert(
        "RewardStarvesTrainer",
        "warning",
        "{{ $labels.run }}: the trainer waits for rewards, after generation has ended, "
        "{{ $value | humanizePercentage }} of its time.",
        "Its GPUs are idle because of rewards. /api/v1/verdict names the part that it waits for.",
        "run:plaudit_exposed_reward:ratio > <exposedShare>",
        kept=_KEPT_OF_SHARES,
        panel="Bottleneck: where the newest step's time went",
    ),
    Alert(
        "ScorerHanging",
        "critical",
        "{{ $labels.run }}: a call of scorer {{ $labels.scorer }} has not ended for {{ $value | humanizeDuration }}.",
        "Calls that do not end are in no latency figure. Waits for limits are not in this one. Look at the scorer's "
        "endpoint or function.",
        "(plaudit_scorer_oldest_in_flight_seconds > <hangingSeconds>)\n"
        f"> ignoring (scorer) group_left () (<hangingFactor> * {_THRESHOLD})",
        held="1m",
        panel="Age of the oldest call by scorer",
    ),
    Alert(
        "ScorerSlow",
        "warning",
        "{{ $labels.run }}: p99 of scorer {{ $labels.scorer }} is {{ $value | humanizeDuration }} in the newest step.",
        "Over <slowFactor> times the job's metrics.rewardLatency.thresholdSeconds.",
        'plaudit_last_step_scorer_seconds{statistic="p99"}\n'
        f"> ignoring (scorer, statistic) group_left () (<slowFactor> * {_THRESHOLD})",
        panel="Scorers: p50 and p99 of a call in the newest step",
    ),
)
_PROGRESS = (
    Alert(
        "StepStalled",
        "critical",
        "{{ $labels.run }}: no step has closed for {{ $value | humanizeDuration }}.",
        "That is over <stalledSteps> times the longest of the newest steps, or far too long for one of the first two "
        "or for a validation. No group of a validation has ended either.",
        f"(({_SINCE_STEP} > <stalledSeconds> and {_SINCE_STEP} > <stalledSteps> * {_LONGEST_STEP})\n"
        f"  or (({_SINCE_STEP} > <firstStepSeconds> unless {_SAMPLES_END} or {_SINCE_STEP} > 4 * <firstStepSeconds>)\n"
        f"    unless {_LONGEST_STEP} unless {_SINCE_STEP} <= <stalledSteps> * plaudit_recent_steps_max_seconds))\n"
        f"and {_TRAINER_LIVES}\nunless {_REDIS_WAS_AWAY}",
        held="2m",
        panel="Time since the last step",
    ),
    Alert(
        "NoTrainer",
        "critical",
        "{{ $labels.run }}: no trainer has sent a heartbeat for five minutes.",
        "Nothing is trained. Other processes finish the open groups and wait.",
        f'(sum without (role, state) (plaudit_workers{{role="trainer"}}) == 0)\n{_UNLESS_RESUMED}',
        panel="Workers",
    ),
    Alert(
        "TrainerRestarting",
        "critical",
        "{{ $labels.run }}: the trainer has started {{ $value }} times within an hour, resumed jobs excluded.",
        "It repeats the work since its checkpoint each time. Its log says why it ends.",
        f"({_STARTS} - on (run) group_left () ceil(run:plaudit_stops:changes1h / 2) >= <trainerStarts>)\n"
        f"or ({_STARTS} unless on (run) run:plaudit_stops:changes1h) >= <trainerStarts>",
        held="0m",
        panel="Workers",
    ),
    Alert(
        "NoReadyRollout",
        "critical",
        "{{ $labels.run }}: prompts wait, and no rollout has been ready for ten minutes.",
        "No samples are generated. Read the log of a rollout.",
        _without("rollout", "prompts"),
        held="10m",
        panel="Workers",
    ),
    Alert(
        "NoRewardWorkers",
        "critical",
        "{{ $labels.run }}: samples wait, and no reward worker has been ready for five minutes.",
        "No samples are scored. Read the log of a reward worker.",
        _without("reward", "samples"),
        panel="Workers",
    ),
    Alert(
        "SampleQueueOld",
        "warning",
        "{{ $labels.run }}: the oldest finished sample has waited {{ $value | humanizeDuration }} for a reward worker.",
        "There are too few reward workers or slots, or they hang.",
        f"({_QUEUE_AGE} > <queueAgeSeconds>)\n"
        f"unless ignoring (stream) (max without (stream) ({_QUEUE_AGE})"
        " <= <queueAgeSteps> * plaudit_last_step_seconds)\n"
        f"unless ignoring (stream) (max without (stream) ({_QUEUE_AGE}) <= <stalledSeconds>\n"
        f"  and {_HAS_TRAINER} unless plaudit_last_step_seconds)\n{_UNLESS_RESUMED}",
        panel="Age of the oldest unread entry",
    ),
    Alert(
        "BacklogGrowing",
        "warning",
        "{{ $labels.run }}: {{ $value | humanize }} entries of {{ $labels.stream }} wait, and the backlog grows.",
        "A reward service receives more than it scores. In a job with a trainer admission bounds the backlog.",
        f"({_BACKLOG} > <backlogEntries>\n"
        f"  and min_over_time({_BACKLOG}[10m]) > max_over_time({_BACKLOG}[10m] offset 20m)\n"
        f"  and deriv({_BACKLOG}[10m]) > 0)\n"
        f"unless ignoring (stream) {_HAS_TRAINER}",
        held="10m",
        panel="Queue depth",
    ),
)
_FAILURES = (
    Alert(
        "ScoresFailing",
        "critical",
        "{{ $labels.run }}: at least {{ $value | humanizePercentage }} of the samples have no score: scorers fail.",
        "That is no chance. They are not trained on. /api/v1/failures lists the reasons by scorer.",
        "plaudit_recent_failed_low_ratio > <failedShare>\n"
        "or (avg_over_time(plaudit_recent_failed_ratio[30m]) > <failedShare>\n"
        "and changes((plaudit_recent_failed_low_ratio > bool <failedShare>)[30m:1m]) > 4)",  # they come and go
        panel="Samples by outcome",
    ),
    Alert(
        "ScorerFailing",
        "warning",
        "{{ $labels.run }}: at least {{ $value | humanizePercentage }} of the calls of scorer {{ $labels.scorer }} "
        "fail.",
        "A judge, a reward model, a sandbox or a function. /api/v1/failures lists the reasons.",
        "plaudit_scorer_recent_failed_low_ratio > <scorerFailedShare>",
        panel="Failed calls by scorer",
    ),
    Alert(
        "JudgeErrors",
        "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the newest requests to judge {{ $labels.judge }} "
        "failed.",
        "They ended with 429, 5xx, a timeout or no connection. Retries hide them until they run out.",
        "avg_over_time(plaudit_judge_recent_failed_ratio[10m]) > <judgeFailedShare>",
        panel="Requests by status",
    ),
    Alert(
        "JudgeCircuitOpen",
        "critical",
        "{{ $labels.run }}: the circuit breaker for judge {{ $labels.judge }} is open; no requests are sent.",
        "The judge failed repeatedly. Its samples end as infra_error.",
        "max_over_time(plaudit_judge_circuit_open[3m]) == 1",  # also one that opens again and again
        panel="Tokens per second, open circuit breakers",
    ),
    Alert(
        "JudgeBudgetExhausted",
        "warning",
        "{{ $labels.run }}: samples wait {{ $value | humanizeDuration }} on average for the limits of "
        "{{ $labels.judge }}.",
        "The job's limits, or those of the endpoint, are lower than what the job asks for.",
        "avg_over_time(plaudit_limiter_recent_wait_seconds[10m]) > <limiterWaitSeconds>",
        held="10m",
        panel="Mean wait for a limit",
    ),
)
_LEARNING = (
    Alert(
        "RewardCollapsed",
        "warning",
        "{{ $labels.run }}: the mean reward is {{ $value | humanize }} below the best of the last day.",
        "Over <rewardDrop> standard deviations of the samples of a step.",
        "max_over_time(plaudit_reward_mean[1d]) - avg_over_time(plaudit_reward_mean[15m])\n"
        "> <rewardDrop> * max_over_time(plaudit_reward_std[1d])",
        held="10m",
        panel="Reward",
    ),
    Alert(
        "RewardVarianceCollapsed",
        "warning",
        "{{ $labels.run }}: the rewards of a step differ by a standard deviation of only {{ $value | humanize }}.",
        "Nearly all samples have the same reward, although they differed earlier, few responses are truncated and few "
        "have no score.",
        "avg_over_time(plaudit_reward_std[30m]) < <rewardSpread>\n"
        "and max_over_time(plaudit_reward_std[1d]) >= <rewardSpread>\n"
        f"unless {_TRUNCATED} > <truncatedShare>\n"
        "unless avg_over_time(plaudit_last_step_masked_share[30m]) > <failedShare>",
        held="10m",
        panel="Reward",
    ),
    Alert(
        "RewardsUniform",
        "warning",
        "{{ $labels.run }}: in {{ $value | humanizePercentage }} of the groups all rewards are equal.",
        "Such groups train nothing: the prompts are too easy, too hard, or a scorer returns a constant.",
        "avg_over_time(plaudit_last_step_zero_variance_share[30m]) > <uniformShare>\n"
        "and (min_over_time(plaudit_last_step_zero_variance_share[1d]) <= <uniformShare>\n"
        "  or plaudit_last_step_zero_variance_share offset 1h)",
        held="10m",
        panel="Groups that train nothing",
    ),
    Alert(
        "RewardDiverges",
        "warning",
        "{{ $labels.run }}: the reward rises while auditor {{ $labels.scorer }} gives less"
        "{{ with $labels.data_source }} in data source {{ . }}{{ end }}.",
        "Chance alone does this with a probability of {{ $value | humanizePercentage }}. The policy has probably found "
        "a hole in the reward. `plaudit audit RUN` names the samples.",
        "min_over_time(plaudit_audit_divergence_probability[10m]) < <divergenceProbability>",
        held="0m",
        panel="Reward and auditors",
    ),
    Alert(
        "ScorerDrifts",
        "warning",
        "{{ $labels.run }}: scorer {{ $labels.scorer }} gives the same samples {{ $value | humanize }} more.",
        "Its judge, endpoint or model has changed behind its name: rewards of different steps cannot be compared.",
        # An interval that ends at 0 would fire once in twenty for a judge that answers differently each time.
        '(plaudit_scorer_drift{statistic="mean"} and ignoring (statistic) (\n'
        '  plaudit_scorer_drift{statistic="low"} > ignoring (statistic) 0.5 * plaudit_scorer_drift{statistic="mean"}\n'
        '  or plaudit_scorer_drift{statistic="high"} < ignoring (statistic) '
        '0.5 * plaudit_scorer_drift{statistic="mean"}))\n'
        'and (abs(plaudit_scorer_drift{statistic="mean"})\n'
        "  > ignoring (scorer, statistic) group_left () (<scorerDrift> * max_over_time(plaudit_reward_std[1d])))",
        held="0m",
        panel="Drift of scorers",
    ),
    Alert(
        "LengthPays",
        "warning",
        "{{ $labels.run }}: longer responses earn more, and responses have grown to {{ $value | humanize }} tokens.",
        "In nearly all of the newest steps the reward follows length within groups. Right answers may need more words; "
        "a reward that can be earned with words alone looks the same. `plaudit audit RUN` and an auditor tell them "
        "apart.",
        # Without the 16 tokens a policy that learns to end its calls would look the same: 3 tokens become 5.
        "(avg_over_time(plaudit_last_step_response_tokens[30m])\n"
        "  > 16 + <lengthGrowth> * min_over_time(avg_over_time(plaudit_last_step_response_tokens[30m])[1d:30m]))\n"
        "and plaudit_length_pays_share >= <lengthPaysShare>",
        panel="Reward and length",
    ),
    Alert(
        "LongResponsesUnscored",
        "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the longest responses have no score.",
        "Others have one more often, step after step. Samples without a score are not trained on, so a policy that "
        "writes on escapes a bad one. Look at the limits of scorers and of length.",
        "avg_over_time(plaudit_last_step_masked_longest_share[30m]) > <failedShare>\n"
        "and plaudit_length_escapes_probability < <escapeProbability>",
        panel="Reward and length",
    ),
    Alert(
        "TruncationHigh",
        "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the responses end at the token limit.",
        "That is over <truncatedFactor> times the share of the last day.",
        f"{_TRUNCATED} > <truncatedShare>\n"
        f"and {_TRUNCATED} > <truncatedFactor> * avg_over_time(plaudit_last_step_truncated_share[1d] offset 1h)",
        held="10m",
        panel="Truncated responses",
    ),
    Alert(
        "StalenessBeyondBound",
        "warning",
        "{{ $labels.run }}: a sample was trained {{ $value }} policy versions after its generation.",
        "maxStaleness of the job allows less.",
        'plaudit_sample_staleness{statistic="max"} > ignoring (statistic) plaudit_staleness_limit',
        panel="Staleness",
    ),
    Alert(
        "RolloutBehind",
        "warning",
        "{{ $labels.run }}: a ready rollout is {{ $value }} policy versions behind.",
        "More than maxStaleness allows. It loads weights too slowly.",
        "plaudit_policy_version_lag > <versionsBehind>\nunless plaudit_policy_version_lag <= plaudit_staleness_limit",
        panel="Policy version",
    ),
    Alert(
        "LogprobMismatch",
        "critical",
        "{{ $labels.run }}: log-probabilities of rollouts and trainer differ by {{ $value | humanize }} nats a token "
        "for the same weights.",
        "That is more than the precision explains, so a rollout samples from other weights or computes something else.",
        "avg_over_time(plaudit_last_step_logprob_mismatch[10m])\n"
        "> <mismatchFactor> * avg_over_time(plaudit_last_step_logprob_mismatch_limit[10m])",
        panel="Difference between rollouts and trainer",
    ),
    Alert(
        "UpdatesDiscarded",
        "warning",
        "{{ $labels.run }}: {{ $value }} updates of a step were discarded because their gradient is not finite.",
        "The weights did not change in them. The trainer's log has the cause. The run ends after five in a row.",
        "max_over_time(plaudit_last_step_skipped_updates[10m]) > <discardedUpdates>",
        held="0m",
        panel="Discarded updates",
    ),
)
_TRANSPORT = (
    Alert(
        "Redelivering",
        "warning",
        "{{ $labels.run }}: work of lost workers was taken over in {{ $value }} of the last six spans of five minutes.",
        "Workers die or freeze again and again.",
        f"sum_over_time((sum without (stream) ({_REDELIVERED}) > bool 0)[30m:5m]) >= <redeliveryPeriods>",
        held="0m",
        panel="Redeliveries, duplicates, dead letters",
    ),
    Alert(
        "DeadLetters",
        "warning",
        "{{ $labels.run }}: a record of {{ $labels.stream }} became a dead letter.",
        "Three workers were lost with it, or it cannot be read. `plaudit dead list` shows it.",
        "plaudit_dead_letters_total - min_over_time(plaudit_dead_letters_total[15m]) > 0\n"
        "or plaudit_dead_letters_total - max_over_time(plaudit_dead_letters_total[6h] offset 15m) > 0",
        held="0m",
        panel="Redeliveries, duplicates, dead letters",
    ),
    Alert(
        "EventsLost",
        "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the events of the newest steps were lost.",
        "Figures of steps are complete. Lists of samples, and counts since the last step, are not.",
        "avg_over_time(plaudit_last_step_events_lost_share[10m]) > <eventsLostShare>",
        held="15m",
        panel="Metrics pipeline",
    ),
    Alert(
        "RedisDown",
        "critical",
        "{{ $labels.run }}: the metrics service cannot reach Redis.",
        "The run stands still. Figures of streams, workers and Redis are absent.",
        "plaudit_redis_up == 0",
        held="1m",
        panel="Metrics pipeline",
    ),
    Alert(
        "RedisMemoryHigh",
        "critical",
        "{{ $labels.run }}: Redis uses {{ $value | humanizePercentage }} of its memory.",
        "No new groups are admitted.",
        "plaudit_redis_memory_bytes / (plaudit_redis_memory_limit_bytes > 0) > <redisMemoryShare>",
        panel="Redis",
    ),
    Alert(
        "RedisPersistenceFailing",
        "critical",
        "{{ $labels.run }}: Redis does not write its append-only file.",
        "If it dies, open work is repeated from the last checkpoint.",
        "plaudit_redis_aof_ok == 0",
        panel="Metrics pipeline",
    ),
)
_TOOLS = (
    Alert(
        "ToolFailing",
        "warning",
        "{{ $labels.run }}: {{ $value | humanizePercentage }} of the calls of tool {{ $labels.tool }} fail.",
        "The tool raised, timed out or lost its process. Depending on onToolFailure the policy reads the error, or the "
        "sample has no score.",
        "avg_over_time(plaudit_tool_recent_failed_ratio[10m]) > <toolFailedShare>",
        panel="Tool calls by outcome",
    ),
    Alert(
        "ToolSlow",
        "warning",
        "{{ $labels.run }}: p99 of tool {{ $labels.tool }} is {{ $value | humanizeDuration }} in the newest step.",
        "Conversations wait for it. Nothing else does while others generate.",
        'plaudit_last_step_tool_seconds{statistic="p99"} > <toolSlowSeconds>',
        panel="Duration of a tool call, p50 and p99 in the newest step",
    ),
    Alert(
        "ToolsStarveTrainer",
        "warning",
        "{{ $labels.run }}: the trainer waits for tools {{ $value | humanizePercentage }} of its time.",
        "Its GPUs are idle because of the tools that agents call.",
        "run:plaudit_tools_wait:ratio > <exposedShare>",
        kept=_KEPT_OF_SHARES,
        panel="Bottleneck: where the newest step's time went",
    ),
)
_SANDBOXES = (
    Alert(
        "SandboxSlow",
        "warning",
        "{{ $labels.run }}: p99 of the stage {{ $labels.stage }} of samples' machines is "
        "{{ $value | humanizeDuration }} in the newest step.",
        "Each machine holds its place for that long. Usual causes are images that are pulled first, and full nodes.",
        'plaudit_last_step_sandbox_seconds{stage=~"start|release",statistic="p99"} > <sandboxSlowSeconds>',
        panel="Stages of a machine, p50 and p99 in the newest step",
    ),
    Alert(
        "SandboxFailing",
        "warning",
        "{{ $labels.run }}: at least {{ $value | humanizePercentage }} of the machines of samples cannot be made, or "
        "break.",
        "Their samples have no score. /api/v1/failures lists the reasons.",
        "plaudit_sandbox_recent_failed_low_ratio > <sandboxFailedShare>",
        panel="Failed share of the newest machines",
    ),
    Alert(
        "SandboxesExhausted",
        "warning",
        "{{ $labels.run }}: a sample has waited {{ $value | humanizeDuration }} for a place for its machine.",
        "And the trainer waits for such samples for over a fifth of its time, or no step has closed yet.",
        "(plaudit_sandbox_oldest_wait_seconds > <sandboxWaitSeconds>)\n"
        "unless (run:plaudit_sandboxes_wait:ratio\n"
        '  or plaudit_last_step_wait_seconds{cause="sandboxes"} / ignoring (cause) plaudit_last_step_seconds)\n'
        "<= <exposedShare>",
        panel="Machines of samples",
    ),
)
RUN_ALERTS: tuple[Alert, ...] = (*_LATENCY, *_PROGRESS, *_FAILURES, *_TOOLS, *_SANDBOXES, *_LEARNING, *_TRANSPORT)
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
        where="operator",
    ),
    Alert(
        "RLJobNotStarting",
        "warning",
        f"{_JOB}: the job has not started for half an hour.",
        "`kubectl plaudit status` says what each part waits for, and the remedy.",
        _jobs("Starting"),
        held="30m",
        where="operator",
    ),
    Alert(
        "RLJobFailed",
        "critical",
        f"{_JOB}: the job has failed.",
        "`kubectl plaudit status` gives the reason and the remedy.",
        _jobs("Failed"),
        held="0m",
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


ALERTS: tuple[Alert, ...] = (*RUN_ALERTS, *OPERATOR_ALERTS)


def alert_rules(
    where: str, windows: Windows = AS_WRITTEN, values: Mapping[str, float] | None = THRESHOLDS
) -> dict[str, Any]:
    """Return the content of the alert file for ``run`` or ``operator``; thresholds stay ``<name>`` without values."""
    rules = [alert.rule(windows, values) for alert in ALERTS if alert.where == where]
    return {"groups": [{"name": f"plaudit.{where}", "rules": rules}]}


def recording_rules(windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """Return the content of the rule file."""
    rules = [
        {"record": name, "expr": windows.expression(expression)}
        for name, expression in (_late() | _steps() | _means() | _phases()).items()
    ]
    return {"groups": [{"name": "plaudit.rules", "interval": windows.duration("30s"), "rules": rules}]}


def _late() -> dict[str, str]:
    """Return the share of late training samples over each window of the burn-rate table.

    It is the mean over time of the share among the samples of a whole step, so it neither vanishes between two steps
    nor depends on how many samples slow rewards let through.
    """
    windows = dict.fromkeys(window for burn in BURNS for window in (burn.long, burn.short))
    return {
        f"run:plaudit_late:ratio_{window}": f"avg_over_time(plaudit_recent_late_ratio[{window}])" for window in windows
    }


_SUM_WINDOWS = (("30m", 4), ("1h", 4), ("3h", 4), ("5h", 2))
"""The shortest window with so many closed steps counts: in an asynchronous schedule waits alternate."""


def _steps() -> dict[str, str]:
    """Return shares of the time of several steps."""
    return {
        "run:plaudit_exposed_reward:ratio": _of_steps("plaudit_step_exposed_reward_seconds_sum"),
        **{
            f"run:plaudit_{cause}_wait:ratio": _of_steps(
                f'plaudit_step_wait_seconds_sum{{cause="{cause}"}}', "ignoring (cause)"
            )
            for cause in ("tools", "sandboxes")
        },
        "run:plaudit_step_wait:ratio": _of_steps("plaudit_step_wait_seconds_sum", "ignoring (cause) group_left ()"),
    }


def _of_steps(sums: str, matching: str = "") -> str:
    """Return a share of the steps' seconds: the sum of the parts by the sum of the whole, over several steps.

    The mean of the newest step's share over time would weigh each step by the length of the next one. The first step
    never counts, since scorers and engines start in it: while a window contains it, all later steps do, four at
    least, or two that are long. Of steps that are too long for any window the newest counts.
    """
    seconds, count = "plaudit_step_seconds_sum", "plaudit_step_seconds_count"
    parts = [
        f"increase({sums}[{window}]) / {matching} (increase({seconds}[{window}])"
        f" and increase({count}[{window}]) > {least - 0.5:g} and plaudit_step offset {window} >= 1)"
        for window, least in _SUM_WINDOWS
    ]

    def later(counter: str, ignoring: str = "") -> str:
        return f"({counter} - min_over_time(({counter} and {ignoring} plaudit_step >= 1)[5h:5m]))"

    enough = f"({later(count)} >= 4 or {later(count)} >= 2 unless increase({count}[1h]) > 1.5)"
    of_later = later(sums, "ignoring (cause)" if matching else "")
    parts.append(f"{of_later} / {matching} ({later(seconds)} and {enough})")
    newest = sums.replace("plaudit_step_", "plaudit_last_step_").replace("_seconds_sum", "_seconds")
    whole = f"(plaudit_last_step_seconds > 0 unless plaudit_step <= 1 unless increase({count}[5h]) > 1.5)"
    return "\nor ".join([*parts, f"{newest} / {matching} {whole}"]).replace("  ", " ")


def _phases() -> dict[str, str]:
    """Return the runs whose job is not running, or was not when an operator reported it last, within an hour.

    Without the hour, suspended jobs would fire while no operator runs. And return how often each was suspended, or
    preempted by its queue, within an hour, and how often it went on; and the runs that were so within half an hour.
    """
    jobs = 'plaudit_rljob_info{{run!="", phase{}"Running|Degraded"}}'
    other, running = (jobs.format(matches) for matches in ("!~", "=~"))
    newest = "max by (run) (max_over_time(timestamp({})[1h:1m]))".format
    reported_last = f"({newest(other)} unless {newest(running)} >= {newest(other)})"
    stopped = 'max by (run) (plaudit_rljob_info{run!="",phase=~"Suspended|Pending"})'
    stops = f'changes(({stopped} or 0 * max by (run) (plaudit_rljob_info{{run!=""}}))[1h:1m])'
    return {
        "run:plaudit_not_running:last1h": f"max by (run) ({other})\nor {reported_last}",
        "run:plaudit_stops:changes1h": stops,
        "run:plaudit_stopped:last30m": f"max_over_time({stopped}[30m:1m])",
    }


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
