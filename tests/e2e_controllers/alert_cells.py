"""The cells of ``test_alert_cells``: reward services, a fault for each, and the alerts that it must raise."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from real_cluster import Cluster
from scoring_job import JUDGED, NAMESPACE, PORT, ScoringJob, judged

from plaudit_workers.service.client import RewardClient

FILES = "alert-cells"
_REWARDS = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise KeyError("answer")
"""
_RAISES = {"name": "mine", "kind": "python", "python": {"path": "reward.py"}}
_ONE_AT_A_TIME = JUDGED | {"limits": {"concurrency": 1}}
_WITHOUT_ENDPOINT = JUDGED | {"judge": JUDGED["judge"] | {"baseUrl": f"http://missing.{NAMESPACE}.svc:{PORT}/v1"}}
_FILLED_SHARE = 0.85
_MIB = 1 << 20
_FILLER_BYTES = _MIB - 64  # with Redis's own header it takes 1 MiB of memory, not the allocator's next size


class Feed(threading.Thread):
    """Submits samples to a job, the next batch when the results of the last one have arrived, until ``end``.

    Args:
        job: the job.
        seconds: how long the judge takes for a sample.
        size: samples of a batch.
    """

    def __init__(self, job: ScoringJob, seconds: float, size: int) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._seconds = seconds
        self._size = size
        self._ended = threading.Event()

    def run(self) -> None:
        """Submit and receive."""
        asyncio.run(self._feed())

    async def _feed(self) -> None:
        async with RewardClient(self._job.address_as("client"), run=self._job.run, wait_s=30) as service:
            feeding = asyncio.create_task(self._submit(service))
            while not self._ended.is_set() and not feeding.done():
                await asyncio.wait([feeding], timeout=0.5)
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _submit(self, service: RewardClient) -> None:
        for number in itertools.count():
            await service.submit(judged(f"{self._job.name}-{number}", self._size, self._seconds))
            async for _ in service.results():
                pass
            await asyncio.sleep(0.2)

    def end(self) -> None:
        """Stop submitting."""
        self._ended.set()
        if self.is_alive():
            self.join(30)


Act = Callable[[ScoringJob], None]


def nothing(_job: ScoringJob) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Cell:
    """One job, its fault and its alerts.

    Attributes:
        must: alerts that the fault raises; any other is a failure of the test.
        spec: sections of the job's spec.
        fault: injects the fault. All nodes are cordoned then, so a deleted pod does not come back.
        repair: ends it; pods are scheduled again without it.
        ends: the alerts must end after the repair.
        fed_s: how long the judge takes for each of the job's samples; None: the fault submits them, if any.
        batch: samples submitted at a time.
    """

    must: frozenset[str] = frozenset()
    spec: Mapping[str, Any] = field(default_factory=dict)
    fault: Act = nothing
    repair: Act = nothing
    ends: bool = False
    fed_s: float | None = 0.5
    batch: int = 4


def create_files(cluster: Cluster) -> None:
    """Create the ConfigMap with the judge's prompt and the reward function that raises."""
    metadata = {"name": FILES, "namespace": NAMESPACE}
    data = {"judge.j2": "{{ response }}", "reward.py": _REWARDS}
    done = cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    assert done.returncode == 0, done.stderr


def _delete_pods(role: str) -> Act:
    def fault(job: ScoringJob) -> None:
        labels = f"plaudit.dev/job={job.name},plaudit.dev/role={role}"
        job.cluster.kubectl("--namespace", NAMESPACE, "delete", "pods", "-l", labels, "--wait=false")

    return fault


def _redis(job: ScoringJob, *command: str) -> str:
    """Run a command in the job's Redis as its administrator."""
    program = 'REDISCLI_AUTH="$(cat /run/plaudit/redis/admin)" exec redis-cli -e --user admin "$@"'
    pod = (f"{job.name}-redis-0", "--container", "redis", "--", "sh", "-c", program, "sh")
    return job.cluster.kubectl("--namespace", NAMESPACE, "exec", *pod, *command).stdout


def _fill_redis(job: ScoringJob) -> None:
    limit = int(_redis(job, "CONFIG", "GET", "maxmemory").split()[-1])
    fill = f"redis.call('SET', 'filler' .. redis.call('INCR', 'fillers'), string.rep('x', {_FILLER_BYTES}))"
    _redis(job, "-r", str(int(limit * _FILLED_SHARE) // _MIB), "EVAL", fill, "0")


def _empty_redis(job: ScoringJob) -> None:
    _redis(job, "EVAL", "for _, key in ipairs(redis.call('KEYS', 'filler*')) do redis.call('UNLINK', key) end", "0")


def _fail(job: ScoringJob) -> None:
    job.patch(lifecycle={"activeDeadlineSeconds": 1})


def _delete(job: ScoringJob) -> None:
    job.cluster.kubectl("--namespace", NAMESPACE, "delete", "rlj", job.name, "--wait=false")


def _suspend(job: ScoringJob) -> None:
    job.patch(suspend=True)


def _scorers(*scorers: Mapping[str, Any], threshold_s: float = 10.0, **reward: Any) -> dict[str, Any]:
    objective = {"rewardLatency": {"thresholdSeconds": threshold_s, "target": 0.99}}
    reward = {"scorers": list(scorers), "timeoutSeconds": 600, "gateway": {"replicas": 0}, **reward}
    return {"reward": reward, "metrics": objective}


HEALTHY = _scorers(JUDGED)
_ALL = {
    "healthy": Cell(spec=HEALTHY),
    "suspended": Cell(spec=HEALTHY, fault=_suspend, fed_s=20.0, batch=40),
    "redis-dead": Cell(
        frozenset({"RedisDown", "RLJobDegraded"}),
        HEALTHY,
        _delete_pods("redis"),
        ends=True,
        fed_s=None,
    ),
    "redis-full": Cell(
        frozenset({"RedisMemoryHigh", "RLJobDegraded"}), HEALTHY, _fill_redis, _empty_redis, ends=True, fed_s=None
    ),
    "failed": Cell(frozenset({"RLJobFailed"}), HEALTHY, _fail, _delete, ends=True, fed_s=None),
    "no-metrics": Cell(frozenset({"RunWithoutMetrics", "RLJobDegraded"}), HEALTHY, _delete_pods("metrics"), ends=True),
    "no-workers": Cell(
        frozenset({"NoRewardWorkers", "RLJobDegraded", "SampleQueueOld"}), HEALTHY, _delete_pods("reward"), ends=True
    ),
    "raising": Cell(frozenset({"ScoresFailing", "ScorerFailing", "RewardLatencyBurn"}), _scorers(_RAISES)),
    "hung": Cell(frozenset({"ScorerHanging"}), _scorers(JUDGED | {"timeoutSeconds": 600}), ends=True, fed_s=270.0),
    "late": Cell(frozenset({"RewardLatencyBurn"}), _scorers(JUDGED, threshold_s=0.2)),
    "budget": Cell(
        frozenset({"JudgeBudgetExhausted"}), _scorers(_ONE_AT_A_TIME, threshold_s=100.0), fed_s=3.0, batch=8
    ),
    "judge-down": Cell(
        frozenset(
            {
                "RLJobDegraded",
                "JudgeErrors",
                "JudgeCircuitOpen",
                "ScoresFailing",
                "ScorerFailing",
                "RewardLatencyBurn",
            }
        ),
        _scorers(_WITHOUT_ENDPOINT, retries=1),
    ),
}
FAULTY_FROM_THE_START = frozenset({"raising", "hung", "late", "budget", "judge-down"})
"""Their fault is what they are fed with: their feed begins when the other faults are injected."""

_CHOSEN = os.environ.get("PLAUDIT_ALERT_CELLS", "1")
CELLS = _ALL if _CHOSEN == "1" else {name: _ALL[name] for name in _CHOSEN.split(",")}
"""All cells, or those that ``PLAUDIT_ALERT_CELLS`` names, for a machine on which the pods of all are too many."""
