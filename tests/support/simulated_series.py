"""Simulate the series that Prometheus scrapes from a run and from two operator pods, scrape by scrape.

A run is healthy, then has a fault for a while, then recovers. The values are what the metrics service would expose: the
gauges of the newest step change when a step closes, the shares of the recent samples when samples end (by the service's
own window), the slow and the failed ones of a step last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from plaudit_metrics.monitoring.rules import LEAST_SAMPLES
from plaudit_metrics.service.series.collectors import RecentLow, RecentMean, RecentWindow

SAMPLES_PER_STEP = 64
LATENCY_THRESHOLD_S = 30.0
_PARTS = 16
"""A step's samples end in so many batches."""
_VALIDATION_MIN = 24
"""Minutes between two steps in which the trainer validates."""
_CLOCK_BEHIND_S = 1200.0
_STANDING = (
    *("hung scorer", "dead redis", "dead trainer", "suspended", "resume", "finished", "no rollout", "not starting"),
    *("no reward worker", "raising function", "first step hangs", "trainer restarts", "suspended often"),
    *("slow validation", "validation hangs", "first step fails", "suspended once then restarts"),
)
"""In these no step closes."""
_FROM_THE_START = ("first step", "first step hangs", "first step fails")
"""These begin in the fault: there is nothing of the run before."""


_MACHINES_AWAITED = ("samples wait for machines", "machines start slowly")
_SLOW_STAGES = {"start": "machines start slowly", "release": "machines end slowly", "exec": "", "verify": ""}
"""Stage of a machine → the scenario in which it is slow."""


@dataclass(frozen=True)
class Cell:
    """One run: the length of a healthy step, and what happens to it."""

    step_s: float
    scenario: str
    coarse: bool = False
    """Fewer scrapes, where promtool computes every series anew for each."""

    @property
    def run(self) -> str:
        return f"{self.scenario}-{self.step_s:g}"

    @property
    def fault_min(self) -> int:
        """The minute in which the fault begins."""
        return max(40, self._minutes(2.2))

    @property
    def recovery_min(self) -> int:
        """The minute in which it ends; a finished run stays so."""
        return self.fault_min + max(60, self._minutes(1.6))

    @property
    def end_min(self) -> int:
        return self.recovery_min + max(60, self._minutes(2.5))

    @property
    def interval_min(self) -> int:
        """Minutes between two scrapes: fewer points of the long runs, so that promtool is quick."""
        return 5 if self.coarse or self.step_s > 3600 else 2

    def _minutes(self, steps: float) -> int:
        """Return so many steps in minutes, as whole scrapes."""
        return math.ceil(steps * self.step_s / 60 / self.interval_min) * self.interval_min


@dataclass
class Run:
    """The state of a simulated run; ``scrapes`` advances it and yields every series."""

    cell: Cell
    now_s: float = 0.0
    opened_s: float = 0.0
    closed: float | None = None
    last_s: float = 0.0
    exposed_s: float = 0.0
    lengths: list[float] = field(default_factory=list)
    window: RecentWindow = field(init=False)
    recent_late: RecentMean = field(init=False)
    recent_failed: RecentMean = field(init=False)
    recent_low: RecentLow = field(init=False)
    rare_low: RecentLow = field(init=False)
    """Of a scorer that is asked for one sample of a step."""
    call_s: float = 5.0
    steps: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    tools_seconds: float = 0.0
    sandboxes_seconds: float = 0.0
    samples_ended: int = 0
    validating_until_s: float = 0.0
    trainer_started_s: float = 1.0
    redelivered: int = 0
    dead: int = 0
    hanging_since: float | None = None
    service_samples: float = 0.0

    def __post_init__(self) -> None:
        """Begin without samples."""
        self.window = RecentWindow(has_steps=not self.cell.scenario.startswith("service"))
        self.recent_late, self.recent_failed = RecentMean(self.window), RecentMean(self.window)
        self.recent_low, self.rare_low = RecentLow(self.window, LEAST_SAMPLES), RecentLow(self.window)

    @property
    def shares(self) -> tuple[int, float, float]:
        """Return the samples of a step and the shares that are late and failed in the fault, by the scenario's name."""
        if self.cell.scenario == "failures come and go":
            return 128, *(0.0 if self.steps % 3 else 0.6,) * 2
        found = re.fullmatch(r"(\d+) samples, (\d+) % (late|failed|at random)", self.cell.scenario)
        if found is None:
            return SAMPLES_PER_STEP, 0.0, 0.0
        count, share = int(found[1]), int(found[2]) / 100
        if found[3] == "at random":
            chance = Random(f"{self.cell.run} {self.steps}")
            share = sum(chance.random() < share for _ in range(count)) / count
        return count, share, share if found[3] != "late" else 0.0

    def scrapes(self) -> Iterator[dict[str, float | None]]:
        """Yield the series of each scrape; None is a scrape without that series."""
        for minute in range(0, self.cell.end_min + 1, self.cell.interval_min):
            fault = self.cell.scenario if self.cell.fault_min <= minute < self.cell.recovery_min else ""
            if self.cell.scenario == "finished" and minute >= self.cell.fault_min:
                fault = "finished"
            self._work(minute * 60.0, fault)
            yield self._series(minute, fault)

    def _work(self, until_s: float, fault: str) -> None:
        standing = fault in _STANDING or not self._has_begun(until_s) or self._catches_up(until_s)
        if not self._has_begun(until_s) or fault == "suspended":  # after a long suspension only the new trainer counts
            self.opened_s = max(self.opened_s, until_s)
        if self.cell.scenario in ("suspended", "resume") and self.now_s < self._recovered_s + 600.0 <= until_s:
            self.opened_s = self.trainer_started_s = until_s  # a new trainer has started
        if self._is_suspended(self.now_s) and not self._is_suspended(until_s):
            self.opened_s = self.trainer_started_s = until_s
        if fault in ("trainer restarts", "suspended once then restarts") and until_s % 720.0 < until_s - self.now_s:
            self.trainer_started_s = until_s
        if fault in ("raising function", "first step fails") and until_s - self.opened_s >= self.cell.step_s / 2:
            self._samples(SAMPLES_PER_STEP, late=1.0, failed=1.0)
        if self.cell.scenario.startswith("service"):
            self._serve(fault)
        elif not standing and not self._resumes(until_s):
            self._close_steps(until_s, fault)
        self.now_s = until_s
        hung = fault in ("hung scorer", "service with a hung scorer", "first step hangs")
        self.hanging_since = (self.hanging_since if self.hanging_since is not None else until_s) if hung else None
        if self.cell.scenario == "first step hangs":
            self.hanging_since = None

    def _is_suspended(self, now_s: float) -> bool:
        """Return True in the first six minutes of the fault, or of each twelve of it."""
        fault_s = now_s - self.cell.fault_min * 60.0
        is_fault = fault_s >= 0 and now_s < self._recovered_s
        often, once = (word in self.cell.scenario for word in ("suspended often", "suspended once"))
        return is_fault and ((often and fault_s % 720 < 360) or (once and fault_s < 360))

    def _catches_up(self, now_s: float) -> bool:
        """Return True while the step that a dead Redis held goes on, for eight minutes."""
        return self.cell.scenario == "dead redis" and self._recovered_s <= now_s < self._recovered_s + 480.0

    def _has_begun(self, now_s: float) -> bool:
        return self.cell.scenario not in _FROM_THE_START or now_s >= self.cell.fault_min * 60.0

    def _resumes(self, now_s: float) -> bool:
        """Return True while a job that was suspended has no trainer yet, for ten minutes."""
        resumed_s = self.cell.recovery_min * 60.0
        return self.cell.scenario == "resume" and resumed_s <= now_s < resumed_s + 600.0

    def _serve(self, fault: str) -> None:
        fails = float("fails" in fault)
        if "quiet" in self.cell.scenario:
            self._samples(1, late=fails, failed=fails)
        elif "idle hour" in self.cell.scenario:
            idle = self._recovered_s <= self.now_s < self._recovered_s + 2400.0
            many = not self.now_s >= self._recovered_s  # after it, few samples
            self._samples((not idle) * (SAMPLES_PER_STEP if many else 1), late=fails, failed=fails)
        elif fault == "service with a throttled judge, then idle":
            self._samples(SAMPLES_PER_STEP, late=1.0, failed=0.0)
        elif fault != "service with a hung scorer" and "idle" not in self.cell.scenario:
            self._samples(SAMPLES_PER_STEP, late=0.0, failed=0.0)

    @property
    def _recovered_s(self) -> float:
        return self.cell.recovery_min * 60.0

    def _length(self, fault: str) -> tuple[float, float]:
        """Return the seconds of the next step, and those in which its trainer waits for rewards."""
        if fault == "slow rewards":
            return self.cell.step_s + 85.0, 85.0
        if self.cell.scenario == "long second steps" and self.steps % 2:
            return self.cell.step_s + 1500.0, 0.0
        if fault == "first step" and self.steps == 0:  # scorers load their models
            return self.cell.step_s + 900.0, 900.0 + 0.5 * self.cell.step_s
        if fault.startswith("alternating") and self.steps % 2:  # every second step waits for two
            share = int(fault.split()[1]) / 100
            waits_s = 2 * share * self.cell.step_s / (1 - share)
            return self.cell.step_s + waits_s, waits_s
        return self.cell.step_s, 0.0 if fault.startswith("alternating") else 0.05 * self.cell.step_s

    def _close_steps(self, until_s: float, fault: str) -> None:
        length_s, exposed_s = self._length(fault)
        while self.opened_s + length_s <= until_s:
            if self.opened_s < self.validating_until_s:
                self.opened_s = self.validating_until_s
                continue
            skipped = max(int((until_s - self.opened_s) / length_s) - 20, 0)  # of many equal steps the newest matter
            skipped *= self.cell.scenario != "long second steps"
            skipped -= skipped % 2
            self._count(skipped, length_s, exposed_s, fault)
            self.opened_s += skipped * length_s
            if self.opened_s + length_s < self.now_s:  # it stood still: the open step ends soon after
                length_s, self.opened_s = until_s - self.opened_s, self.opened_s
            self.closed = self.opened_s + length_s
            self.last_s, self.exposed_s = length_s, exposed_s
            self.lengths = [*self.lengths, length_s][-10:]
            self.call_s = 90.0 if fault == "slow rewards" else 5.0
            self._count(1, length_s, exposed_s, fault)
            count, late, failed = self.shares if fault else (self.shares[0], 0.0, 0.0)
            late = 1.0 if fault in ("slow rewards", "first step") else late
            self._samples(count, late=late, failed=failed)
            self.rare_low.add(float(fault == "rare scorer fails"), 1, self.window.add(0, self.now_s))
            self.window.close_step(count)
            self.opened_s = self.closed
            if fault == "validation" and until_s - self.opened_s < self.cell.step_s:
                self.validating_until_s = until_s + _VALIDATION_MIN * 60.0
            length_s, exposed_s = self._length(fault)

    def _count(self, steps: int, length_s: float, exposed_s: float, fault: str) -> None:
        self.steps += steps
        self.seconds += steps * length_s
        self.exposed_seconds += steps * exposed_s
        self.tools_seconds += steps * length_s * (0.5 if fault == "slow tool" else 0.05)
        self.sandboxes_seconds += steps * length_s * (0.5 if fault in _MACHINES_AWAITED else 0.05)

    def _samples(self, count: int, *, late: float, failed: float) -> None:
        """End so many samples, the late and the failed ones last."""
        self.samples_ended += count
        for part in range(_PARTS):
            begin, end = (count * (part + each) // _PARTS for each in (0, 1))
            place = self.window.add(end - begin, self.now_s)
            for means, share in (((self.recent_late,), max(late, failed)), (self._failures, failed)):
                good = count - round(share * count)
                for mean in means:
                    mean.add(float(max(end - max(good, begin), 0)), end - begin, place)

    @property
    def _failures(self) -> tuple[RecentMean, RecentLow]:
        return self.recent_failed, self.recent_low

    def _series(self, minute: int, fault: str) -> dict[str, float | None]:
        service = self.cell.scenario.startswith("service")
        series: dict[str, float | None] = {}
        dead_pod = (
            fault == "dead metrics pod"
            or (fault == "restart" and minute == self.cell.fault_min)
            or (fault == "dead letter in a gap" and minute < self.cell.fault_min + 24)
        )
        if not dead_pod and self._has_begun(minute * 60.0):
            self.window.show_time(self.now_s)
            series |= self._of_samples(fault)
            series |= self._of_process(minute, fault, service=service)
            if not service:
                series |= self._of_steps(fault)
            if fault != "dead redis":
                series |= self._of_redis(minute, fault, service=service)
        return series | self._of_operator(minute, fault)

    def _of_samples(self, fault: str) -> dict[str, float | None]:
        late, failed = self.recent_late.mean, self.recent_failed.mean
        throttled = fault == "budget" or self.cell.scenario == "service with a throttled judge, then idle"
        return {
            "plaudit_recent_late_ratio": late,
            "plaudit_recent_failed_ratio": failed,
            "plaudit_recent_failed_low_ratio": self.recent_low.share,
            'plaudit_scorer_recent_failed_ratio{scorer="judge"}': failed,
            'plaudit_scorer_recent_failed_low_ratio{scorer="judge"}': self.recent_low.share,
            'plaudit_scorer_recent_failed_low_ratio{scorer="rare"}': self.rare_low.share,
            'plaudit_limiter_recent_wait_seconds{judge="judge"}': None if late is None else 30.0 if throttled else 1.0,
            'plaudit_tool_recent_failed_ratio{tool="search"}': 0.6 if fault == "broken tool" else 0.02,
            "plaudit_sandbox_recent_failed_low_ratio": 0.2
            if fault == "machines fail"
            else 0.01,  # a judge that differs each time
            'plaudit_samples_total{outcome="scored"}': self.samples_ended + self._samples_of_open_step(),
        }

    def _samples_of_open_step(self) -> float:
        """Return how many samples of the open step have ended."""
        if self.cell.scenario == "validation hangs" and self.now_s >= self.cell.fault_min * 60.0:
            return 0.0
        if self.cell.scenario == "first step hangs" and not self.steps:
            return 0.0
        if self.cell.scenario == "slow validation":  # one of its samples ends every twenty minutes, no whole group
            return float(int(self.now_s / 1200.0))
        return float(int(self.shares[0] * min((self.now_s - self.opened_s) / self.cell.step_s, 0.9)))

    def _of_process(self, minute: int, fault: str, *, service: bool) -> dict[str, float | None]:
        return {
            "plaudit_reward_latency_target": 0.99,
            "plaudit_reward_latency_threshold_seconds": LATENCY_THRESHOLD_S,
            **({} if service else {"plaudit_staleness_limit": 1.0}),
            "plaudit_redis_up": 0.0 if fault == "dead redis" else 1.0,
            'plaudit_redeliveries_total{stream="samples"}': self._redeliveries(minute, fault),
            'plaudit_dead_letters_total{stream="samples"}': 7.0
            + (
                fault == "dead letter"
                or (self.cell.scenario == "dead letter in a gap" and minute > self.cell.fault_min)
            ),
            "plaudit_redis_last_seen_timestamp_seconds": None if fault == "dead redis" else self._stamp(self.now_s),
        }

    def _stamp(self, at_s: float) -> float:
        """Return a stamp of Redis's clock."""
        return at_s - (_CLOCK_BEHIND_S if self.cell.scenario == "clock of redis behind" else 0.0)

    def _redeliveries(self, minute: int, fault: str) -> float:
        if fault == "eviction":
            self.redelivered = 64  # one worker is lost with 64 samples in flight
        if fault == "flapping workers" and minute % 10 < self.cell.interval_min:
            self.redelivered += 3
        if fault == "restart":
            return 99.0  # Redis came back with an older state while the service was down
        return 100.0 + self.redelivered

    def _of_steps(self, fault: str) -> dict[str, float | None]:
        opened = max(self.opened_s, self.trainer_started_s, min(self.validating_until_s, self.now_s))
        series: dict[str, float | None] = {
            "plaudit_step_opened_timestamp_seconds": self._stamp(opened),
            "plaudit_trainer_validating": float("validation" in fault),
            "plaudit_trainer_started_timestamp_seconds": self._stamp(self.trainer_started_s),
            "plaudit_step_seconds_sum": self.seconds,
            "plaudit_step_seconds_count": float(self.steps),
            "plaudit_step_exposed_reward_seconds_sum": self.exposed_seconds,
            'plaudit_step_wait_seconds_sum{cause="tools"}': self.tools_seconds,
            'plaudit_step_wait_seconds_sum{cause="sandboxes"}': self.sandboxes_seconds,
        }
        if self.closed is None:
            return series
        zero = fault == "first step"  # it starts without a reward
        return series | {
            "plaudit_step": float(self.steps),
            "plaudit_last_step_seconds": self.last_s,
            "plaudit_recent_steps_max_seconds": max(self.lengths),
            "plaudit_last_step_exposed_reward_seconds": self.exposed_s,
            'plaudit_last_step_scorer_seconds{scorer="judge",statistic="p99"}': self.call_s,
            "plaudit_reward_mean": 0.0 if zero else 0.1 if fault == "collapse" else 0.8,
            "plaudit_reward_std": 0.0
            if zero
            else 0.001
            if fault in ("equal rewards", "equal and truncated", "equal and failed")
            else 0.4,
            "plaudit_last_step_zero_variance_share": 1.0 if zero or fault in ("uniform", "equal rewards") else 0.3,
            "plaudit_last_step_truncated_share": 0.6 if fault in ("truncation", "equal and truncated") else 0.05,
            'plaudit_scorer_drift{scorer="judge",statistic="mean"}': 0.2 if fault == "drift" else 0.1,
            'plaudit_scorer_drift{scorer="judge",statistic="low"}': 0.12
            if fault == "drift"
            else 0.01,  # a judge that differs each time
            'plaudit_scorer_drift{scorer="judge",statistic="high"}': 0.28 if fault == "drift" else 0.19,
            'plaudit_audit_divergence_probability{scorer="honest"}': 0.002 if fault == "divergence" else 0.2,
            "plaudit_length_pays_share": 1.0 if fault == "length pays" or "long right" in self.cell.scenario else 0.1,
            "plaudit_last_step_response_tokens": 700.0 if fault == "length pays" else 400.0,
            "plaudit_last_step_masked_longest_share": 0.2 if fault == "long responses escape" else 0.06,
            "plaudit_length_escapes_probability": 1e-5 if fault == "long responses escape" else 0.3,
            "plaudit_last_step_masked_share": 0.5 if fault == "equal and failed" else 0.02,
            "plaudit_last_step_logprob_mismatch": 0.45 if fault == "mismatch" else 0.15,
            "plaudit_last_step_skipped_updates": 1.0 if fault == "no gradient" else 0.0,
            "plaudit_last_step_logprob_mismatch_limit": 0.3,
            "plaudit_last_step_events_lost_share": 0.5 if fault == "events lost" else 0.0,
            'plaudit_last_step_tool_seconds{tool="search",statistic="p99"}': 90.0 if fault == "slow tool" else 2.0,
            'plaudit_last_step_wait_seconds{cause="tools"}': self.last_s * (0.5 if fault == "slow tool" else 0.05),
            **{
                f'plaudit_last_step_sandbox_seconds{{stage="{stage}",statistic="p99"}}': 75.0
                if fault == _SLOW_STAGES[stage]
                else 3.0
                for stage in _SLOW_STAGES
            },
            'plaudit_last_step_wait_seconds{cause="sandboxes"}': self.last_s
            * (0.5 if fault in _MACHINES_AWAITED else 0.05),
            'plaudit_sample_staleness{statistic="max"}': 3.0 if fault == "stale" else 1.0,
        }

    def _of_redis(self, minute: int, fault: str, *, service: bool) -> dict[str, float | None]:
        gone = fault in ("suspended", "finished", "not starting") or self._resumes(self.now_s)
        gone = gone or self._is_suspended(self.now_s)
        gone = gone or (self.cell.scenario == "resume" and fault == "resume")
        workers = {
            "trainer": 0.0 if gone or fault == "dead trainer" else 1.0,
            "rollout": 0.0 if gone or fault == "no rollout" else 4.0,
            "reward": 0.0 if gone or fault == "no reward worker" else 2.0,
        }
        roles = ["reward"] if service else list(workers)
        hanging = 0.0 if self.hanging_since is None else self.now_s - self.hanging_since
        since_fault = 60.0 * (minute - self.cell.fault_min)
        waits = fault in ("no reward worker", "few reward workers") or (self.cell.scenario == "resume" and gone)
        unread = max(since_fault, 0.0) if waits else 0.0
        grows = fault in ("service with too much work", "first step")
        backlog = since_fault if grows else 8.0 * (unread > 0)
        return {
            **{f'plaudit_workers{{role="{role}",state="busy"}}': workers[role] for role in roles},
            **{f'plaudit_workers{{role="{role}",state="starting"}}': 0.0 for role in roles},
            'plaudit_scorer_oldest_in_flight_seconds{scorer="judge"}': hanging or self.call_s,
            'plaudit_stream_oldest_undelivered_seconds{stream="samples"}': unread,
            'plaudit_stream_undelivered{stream="samples"}': backlog,
            'plaudit_stream_in_flight{stream="samples"}': 16.0,
            'plaudit_stream_undelivered{stream="prompts"}': 16.0 * (fault == "no rollout"),
            'plaudit_stream_in_flight{stream="prompts"}': 0.0,
            'plaudit_judge_recent_failed_ratio{judge="judge"}': 0.6 if fault == "judge errors" else 0.0,
            'plaudit_judge_circuit_open{judge="judge"}': float(
                fault == "open circuit" or (fault == "circuit opens again and again" and minute % 4 == 0)
            ),
            "plaudit_sandbox_oldest_wait_seconds": 200.0 if "wait for machines" in fault else 5.0,
            "plaudit_policy_version_lag": 3.0 if fault == "slow weights" else 1.0,
            "plaudit_redis_memory_bytes": 900.0 if fault == "full redis" else 200.0,
            "plaudit_redis_memory_limit_bytes": 1000.0,
            "plaudit_redis_aof_ok": float(fault != "unwritten redis"),
        }

    def _of_operator(self, minute: int, fault: str) -> dict[str, float | None]:
        phase = {
            "suspended": "Suspended",
            "resume": "Suspended",
            "finished": "Complete",
            "failed": "Failed",
            "degraded": "Degraded",
            "not starting": "Starting",
        }.get(fault, "Running")
        if self._is_suspended(minute * 60.0):
            phase = "Suspended"
        if not self._has_begun(minute * 60.0):
            return {}
        series: dict[str, float | None] = {}
        for replica in ("a", "b"):  # both report every job
            of_job = f'instance="{replica}",pod="{replica}",namespace="team",name="{self.cell.run}"'
            for each in ("Running", "Suspended", "Complete", "Failed", "Degraded", "Starting"):
                key = f'plaudit_rljob_info{{{of_job},run="{self.cell.run}",phase="{each}"}}'
                series[key] = 1.0 if each == phase else None
            holds = "True" if fault == "degraded" else "False"
            for status in ("True", "False"):
                key = f'plaudit_rljob_condition{{{of_job},type="Degraded",status="{status}"}}'
                series[key] = 1.0 if status == holds else None
        return series


def input_series(cell: Cell) -> list[dict[str, str]]:
    """Return the cell's series in promtool's notation, with the labels that the scrape adds."""
    columns: dict[str, list[float | None]] = {}
    for number, series in enumerate(Run(cell).scrapes()):
        for name, value in series.items():
            columns.setdefault(name, [None] * number).append(value)
        for values in columns.values():
            values += [None] * (number + 1 - len(values))
    return [
        {"series": _labelled(name, cell.run), "values": notation(values)}
        for name, values in columns.items()
        if any(value is not None for value in values)
    ]


def _labelled(name: str, run: str) -> str:
    if name.startswith("plaudit_rljob"):
        return name
    family, _, labels = name.partition("{")
    return f'{family}{{run="{run}"{"," + labels if labels else "}"}'


def notation(values: list[float | None]) -> str:
    """Return values as promtool reads them, runs of equal ones shortened.

    A series that a scrape no longer has ends at once, as in Prometheus: the first value that is missing is ``stale``.
    """
    parts: list[str] = []
    start = 0
    for place in range(1, len(values) + 1):
        if place == len(values) or values[place] != values[start]:
            length = place - start
            if values[start] is not None:
                text = f"{values[start]:.10g}"
                parts.append(text if length == 1 else f"{text}x{length - 1}")
            else:
                parts += ["stale"] * bool(parts) + [f"_x{length - bool(parts)}"] * (length > bool(parts))
            start = place
    return " ".join(parts)
