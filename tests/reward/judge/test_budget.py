"""A budget over several workers: exact in every window, fair, and whole again after a worker was killed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from plaudit_reward.endpoint.budget import (
    NEVER_SENT,
    BudgetReport,
    Limiter,
    LocalBudget,
    Passed,
    RateLimits,
    RedisBudget,
    ReservedRequest,
    Settled,
)
from plaudit_wire.errors import InfrastructureError
from plaudit_workers.launch.redis import RedisServer

Make = Callable[..., RedisBudget]


def wanted(*ids: str, tokens: int = 0) -> list[ReservedRequest]:
    return [ReservedRequest(id_, tokens) for id_ in ids]


def asking(*ids: str, in_flight: int = 0, tokens: int = 0, settled: list[Settled] | None = None) -> BudgetReport:
    return BudgetReport(in_flight, settled or [], wanted(*ids, tokens=tokens), len(ids))


@pytest.fixture
async def hungry(redis_server: RedisServer, run_name: str) -> Any:
    """Starts processes that want ten times what there is."""
    running: list[asyncio.subprocess.Process] = []

    async def start(worker: str, **changes: Any) -> asyncio.subprocess.Process:
        given = {
            "url": redis_server.url,
            "password": redis_server.password,
            "key": f"plaudit:{{{run_name}}}:limits:test",
            "worker": worker,
            "requests": None,
            "tokens": None,
            "concurrency": None,
            "window_s": 1.0,
            "lease_s": 1.5,
            "seconds": 3.0,
            "takes_s": 0.02,
            "clock_off_s": 0.0,
            **changes,
        }
        program = str(Path(__file__).parent / "hungry_worker.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            program,
            json.dumps(given),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Witness:
    """Looks at a budget's log in Redis all the time, by Redis's clock."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis, self._key = redis, key
        self.passed: dict[bytes, float] = {}
        self.most_tokens = 0

    async def watch(self) -> None:
        while True:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.zrange(f"{self._key}:log", 0, -1, withscores=True)
                pipeline.hgetall(f"{self._key}:tokens")
                log, tokens = await pipeline.execute()
            self.passed.update((id_, score / 1e6) for id_, score in log)
            amounts = {id_: int(value) for id_, value in tokens.items()}
            total = amounts.pop(b"sum", 0)
            assert total == sum(amounts.values()), "the sum is not that of the parts"
            self.most_tokens = max(self.most_tokens, total)
            await asyncio.sleep(0.05)

    def most_in_a_window(self, window_s: float) -> int:
        times = sorted(self.passed.values())
        return max(sum(begin <= other < begin + window_s for other in times) for begin in times)


@pytest.mark.long
@pytest.mark.parametrize("limits", [{"requests": 40}, {"requests": 50, "tokens": 300, "concurrency": 6}])
async def test_no_window_of_several_processes_holds_more_than_the_budget(
    hungry: Any, redis: Redis, run_name: str, limits: dict[str, int]
) -> None:
    """Three processes, one of whose clocks is an hour off; each wants ten times its share."""
    witness = Witness(redis, f"plaudit:{{{run_name}}}:limits:test")
    watching = asyncio.create_task(witness.watch())
    processes = [
        await hungry(f"reward-{i}", clock_off_s=3600.0 if i == 0 else 0.0, seconds=6.0, **limits) for i in range(3)
    ]
    for process in processes:
        assert await process.stdout.readline() == b"ready\n"
    endings = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    counts = [int(output.split()[-1]) for output, _ in endings]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert watching.cancelled()
    assert 6 * 30 <= sum(counts) <= len(witness.passed)  # what was given up at the end is in the log
    if "requests" in limits:
        assert witness.most_in_a_window(1.0) <= limits["requests"]
    if "tokens" in limits:
        assert witness.most_tokens <= limits["tokens"]
    assert min(counts) >= 0.5 * max(counts), counts


async def test_the_share_of_a_killed_worker_is_returned(hungry: Any, make_budget: Make) -> None:
    process = await hungry("killed", concurrency=3, takes_s=60.0, seconds=60.0, lease_s=2.0, window_s=0.2)
    process.stdin.write(b"go\n")
    assert [await process.stdout.readline() for _ in range(2)] == [b"ready\n", b"first\n"]
    other = make_budget(RateLimits(concurrency=3, window_s=0.2), "reward-1", lease_s=2.0)
    while (await other.exchange(asking("a"))).number:  # the first of the three is told before the others passed
        await asyncio.sleep(0.01)
    for _ in range(15):  # as long as it lives its leases are renewed
        assert (await other.exchange(asking("a"))).number == 0
        await asyncio.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    died = time.monotonic()
    while (await other.exchange(asking("a", "b", "c"))).number != 3:
        assert time.monotonic() - died < 20
        await asyncio.sleep(0.05)


async def test_a_report_that_is_sent_twice_lets_nothing_through_twice(make_budget: Make) -> None:
    first, other = (make_budget(RateLimits(requests=3, tokens=100, window_s=60), name) for name in ("a", "b"))
    report = asking("1", "2", tokens=10)
    assert (await first.exchange(report)).number == 2
    assert (await first.exchange(report)).number == 2
    assert (await other.exchange(asking("1", "2", tokens=10))).number == 1


async def test_tokens_are_corrected_and_unsent_requests_are_refunded(make_budget: Make) -> None:
    budget = make_budget(RateLimits(tokens=100, window_s=60))
    assert (await budget.exchange(asking("1", "2", tokens=50))).number == 2
    assert (await budget.exchange(asking("3", tokens=50, in_flight=2))).number == 0
    spent_less = [Settled("1", 20)]
    assert (await budget.exchange(asking("3", tokens=50, in_flight=1, settled=spent_less))).number == 0
    never_sent = [Settled("2", NEVER_SENT)]
    assert (await budget.exchange(asking("3", tokens=50, settled=never_sent))).number == 1
    assert (await budget.exchange(asking("4", tokens=40, in_flight=1))).number == 0
    assert (await budget.exchange(asking("4", tokens=30, in_flight=1))).number == 1


async def test_the_window_of_a_request_that_was_sent_late_begins_late(make_budget: Make) -> None:
    limits = RateLimits(requests=1, window_s=3.0)

    async def look(budget: Any) -> None:
        assert (await budget.exchange(asking("1"))).number == 1
        await asyncio.sleep(2.0)
        assert (await budget.exchange(BudgetReport(1, [Settled("1", sent_ago_s=0.25)]))).number == 0
        await asyncio.sleep(1.25)  # 3.25 s after it was let through, 1.5 s after it was sent
        assert (await budget.exchange(asking("2"))).number == 0
        await asyncio.sleep(2.0)
        assert (await budget.exchange(asking("2"))).number == 1

    await asyncio.gather(look(make_budget(limits)), look(LocalBudget(limits)))


async def test_a_request_larger_than_the_budget_passes_when_it_is_alone(make_budget: Make) -> None:
    budget = make_budget(RateLimits(tokens=100, window_s=2.0))
    assert (await budget.exchange(asking("small", tokens=1))).number == 1
    assert (await budget.exchange(asking("large", tokens=1000, in_flight=1))).number == 0
    await asyncio.sleep(2.2)
    assert (await budget.exchange(asking("large", tokens=1000))).number == 1


async def test_whoever_waits_and_had_less_goes_first(make_budget: Make) -> None:
    limits = RateLimits(requests=4, window_s=1.2)
    greedy, late = make_budget(limits, "greedy"), make_budget(limits, "late")
    assert (await greedy.exchange(asking("1", "2", "3", "4", "5", "6"))).number == 4
    assert (await late.exchange(asking("1", "2", "3"))).number == 0
    await asyncio.sleep(1.3)  # all four are free again
    assert (await greedy.exchange(asking("5", "6", "7", "8"))).number == 2  # half is kept for the other
    assert (await late.exchange(asking("1", "2", "3"))).number == 2


@pytest.mark.parametrize("limits", [{"requests": 12}, {"requests": 15, "tokens": 120}])
async def test_workers_that_always_want_more_get_the_same_however_often_they_ask(
    make_budget: Make, limits: dict[str, int]
) -> None:
    budgets = [make_budget(RateLimits(window_s=1.5, **limits), f"reward-{i}") for i in range(3)]

    async def ask(worker: int, turn: int) -> int:
        report = asking(*(f"{turn}-{i}" for i in range(20)), tokens=10)
        return (await budgets[worker].exchange(report)).number

    assert [await ask(worker, -1) for worker in range(3)] == [12, 0, 0]  # who comes first finds nobody waiting
    often, counts, turn = [0] * 8 + [1] * 2 + [2], [0, 0, 0], 0
    while sum(counts) < 3 * 12:
        for worker in random.Random(turn).sample(often, len(often)):  # all within a window, however busy the machine is
            counts[worker] += await ask(worker, turn) if sum(counts) < 3 * 12 else 0
            turn += 1
            await asyncio.sleep(0.005)
    assert max(counts) - min(counts) <= 1, counts


async def test_a_budget_that_is_one_budget_for_two_jobs_counts_both(make_budget: Make) -> None:
    one, two = (make_budget(RateLimits(concurrency=2), name) for name in ("job-a", "job-b"))
    assert (await one.exchange(asking("1"))).number == 1
    assert (await two.exchange(asking("1", "2"))).number == 1
    assert (await one.exchange(BudgetReport(0))).number == 0
    assert (await two.exchange(asking("2", in_flight=1))).number == 1


async def test_a_budget_leaves_nothing_in_redis(make_budget: Make, redis: Redis, run_name: str) -> None:
    budget = make_budget(RateLimits(requests=3, tokens=9, concurrency=3, window_s=0.5), lease_s=0.5)
    await budget.exchange(asking("1", "2", tokens=1))
    keys = [key async for key in redis.scan_iter(f"plaudit:{{{run_name}}}:*")]
    assert len(keys) == 3
    await asyncio.sleep(1.5)
    assert await redis.exists(*keys) == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=st.builds(
        RateLimits,
        st.none() | st.integers(1, 6),
        st.none() | st.integers(1, 60),
        st.none() | st.integers(1, 4),
        st.just(1000.0),
    ),
    moves=st.lists(
        st.tuples(st.lists(st.integers(0, 20), max_size=4), st.integers(0, 3), st.integers(-1, 30)), max_size=6
    ),
)
async def test_the_budget_of_one_process_decides_as_the_one_in_redis(
    redis_server: RedisServer, limits: RateLimits, moves: list[tuple[list[int], int, int]]
) -> None:
    """``moves``: tokens of those that come, how many end, and what the first of these cost (-1: never sent)."""
    from plaudit_wire.redis import redis_client

    client = redis_client(redis_server.url, password=redis_server.password)
    shared = RedisBudget(client, f"plaudit:{{test-{time.monotonic_ns()}}}", "w", limits, lease_s=0.1)
    own = LocalBudget(limits)
    waiting: list[ReservedRequest] = []
    in_flight: list[ReservedRequest] = []
    number = 0
    for coming, num_ending, cost in moves:
        for tokens in coming:
            number += 1
            waiting.append(ReservedRequest(str(number), tokens))
        settled = [Settled(in_flight[0].id, cost)] if num_ending and in_flight else []
        in_flight = in_flight[num_ending:]
        report = BudgetReport(len(in_flight), settled, list(waiting), len(waiting))
        passed = await shared.exchange(report)
        assert passed.number == (await own.exchange(report)).number
        assert (passed.again_s == 0) == (passed.number == len(waiting))
        in_flight += waiting[: passed.number]
        del waiting[: passed.number]
    await shared.close()


# The queue before a budget.


class Away(LocalBudget):
    """A budget that cannot be asked for a while, as when its Redis restarts."""

    failures: list[Exception]

    async def exchange(self, report: BudgetReport) -> Passed:
        if self.failures:
            raise self.failures.pop(0)
        return await super().exchange(report)


async def started(budget: Any) -> Limiter:
    limiter = Limiter(budget, "big")
    limiter.start()
    return limiter


async def test_requests_wait_while_the_budget_is_away_and_fail_when_it_refuses() -> None:
    budget = Away(RateLimits(requests=2))
    budget.failures = [ConnectionError("gone"), ConnectionError("gone")]
    limiter = await started(budget)
    limiter.leave(await limiter.enter(0))
    budget.failures = [InfrastructureError("wrong password")]
    with pytest.raises(InfrastructureError, match="wrong password"):
        await limiter.enter(0)
    await limiter.stop()


async def test_a_request_cancelled_while_waiting_uses_no_budget() -> None:
    limiter = await started(LocalBudget(RateLimits(concurrency=1)))
    first = await limiter.enter(0)
    given_up = asyncio.create_task(limiter.enter(0))
    third = asyncio.create_task(limiter.enter(0))
    await asyncio.sleep(0.05)
    given_up.cancel()
    limiter.leave(first)
    limiter.leave(await third)
    limiter.leave(await limiter.enter(0))
    await limiter.stop()


async def test_a_worker_takes_no_more_than_its_limits_let_through_soon() -> None:
    limiter = await started(LocalBudget(RateLimits(requests=5, window_s=600)))
    room = limiter.room()
    waiting = [asyncio.create_task(limiter.enter(0)) for _ in range(5 + room)]
    while sum(task.done() for task in waiting) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert sum(task.done() for task in waiting) == 5
    assert 0 <= limiter.room() <= 5  # what has just passed is what may pass soon
    waiting += [asyncio.create_task(limiter.enter(0)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert limiter.room() == 0
    for task in waiting:
        task.cancel()
    await limiter.stop()
    assert (await started(LocalBudget(RateLimits()))).room() > 1000
