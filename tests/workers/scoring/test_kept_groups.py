"""A reward service stores the groups that its auditors have drawn, and audits each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plaudit_metrics.sources.audits import AuditHistory, run_audits
from plaudit_metrics.sources.sample_schema import FOLDER, surviving_files
from plaudit_wire.redis import RedisAddress
from plaudit_workers.service.auditor import open_auditor
from plaudit_workers.service.build import BuildContext
from plaudit_workers.stream.calls import take_kept
from plaudit_workers.stream.transport import Transport
from scoring_service import Running, StartService, start_service
from waiting import until

__all__ = ["start_service"]

_PYTHON: dict[str, Any] = {"kind": "python", "isolation": "thread"}


def scorers(share: float) -> list[dict[str, Any]]:
    """A scorer, and an auditor whose value is the sample's ground truth."""
    second = {"path": "reward.py", "function": "truth"}
    return [
        {"name": "right", "python": {"path": "reward.py"}, **_PYTHON},
        {"name": "second", "python": second, "audit": {"share": share}, **_PYTHON},
    ]


def samples(first: int, count: int) -> list[dict[str, Any]]:
    """Samples of which each second one is right."""
    return [
        {"id": str(number), "data_source": "a", "response": str(number // 2 * 2), "ground_truth": str(number)}
        for number in range(first, first + count)
    ]


async def submitted(service: Running, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the scores by id."""
    async with service.client() as client:
        await client.submit(rows)
        return {result.id: result.score async for result in client.results()}


@asynccontextmanager
async def auditing(service: Running, folder: Path, worker: str = "auditor") -> AsyncIterator[Transport]:
    """Run the service's auditors, as a reward worker with room does."""
    transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
    reward = service.job.spec.reward
    auditor = await open_auditor(reward, BuildContext(reward, worker), transport, folder, trains=False)
    stop = asyncio.Event()
    running = asyncio.create_task(auditor.run(stop, lambda: True))
    try:
        yield transport
    finally:
        stop.set()
        await running
        await transport.close()


def rows_of(folder: Path) -> dict[int, int]:
    """Return the number of audited groups of each file."""
    audits = run_audits(folder)
    return {file: sum(group.step == file for group in audits) for file in surviving_files(folder / FOLDER)}


@pytest.mark.long
async def test_two_workers_store_and_audit_each_group_of_a_service_once(
    start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(*scorers(1.0)) as service:
        scores = await submitted(service, samples(0, 130))
        assert list(scores.values()).count(1.0) == 65
        async with auditing(service, tmp_path) as transport, auditing(service, tmp_path, "other"):
            await until(lambda: len(run_audits(tmp_path)) == 128)
            assert rows_of(tmp_path) == {1: 64, 2: 64}
            left = [key async for key in transport.commands.scan_iter(transport.names.kept_group("*"))]
            assert len(left) == 2  # they wait for others of their file
    audits = run_audits(tmp_path)
    assert len({group.group for group in audits}) == 128
    for group in audits:
        (sample,) = group.samples
        number = group.group.rpartition(":")[2]
        assert sample.score == scores[number]
        assert sample.audits["second"].value == float(number)
    figures = AuditHistory(tmp_path).figures()
    assert figures["audit/second/groups"] == 128
    assert figures["audit/second/reward"] == pytest.approx(sum(each.samples[0].score or 0 for each in audits) / 128)


async def test_a_file_that_a_killed_worker_began_is_written_by_the_next_one(
    start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(*scorers(1.0)) as service:
        await submitted(service, samples(0, 64))
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        taken = await transport.scripts.run(take_kept(64, 20.0, 1))
        assert taken is not None
        assert (taken[0], len(taken[1])) == (1, 64)
        await submitted(service, samples(64, 64))
        assert await transport.scripts.run(take_kept(64, 20.0, 1)) == taken
        await transport.close()
        async with auditing(service, tmp_path):
            await until(lambda: len(run_audits(tmp_path)) == 128)
    assert rows_of(tmp_path) == {1: 64, 2: 64}


async def test_callers_come_before_auditors_that_do_not_store(start_service: StartService, tmp_path: Path) -> None:
    async with start_service(*scorers(1.0), slots=16) as service:
        scores = await submitted(service, samples(0, 600))
        assert len(scores) == 600
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        waiting = await transport.commands.zcard(transport.names.kept)
        not_kept = int(await transport.commands.hget(transport.names.counters, "kept_not") or 0)
        await transport.close()
    assert 256 <= waiting < 600
    assert waiting + not_kept == 600


async def test_a_share_is_drawn_by_id_and_the_rest_leaves_nothing(start_service: StartService, tmp_path: Path) -> None:
    async with start_service(*scorers(0.25)) as service:
        await submitted(service, samples(0, 200))
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        kept = await transport.commands.zrange(transport.names.kept, 0, -1)
        left = [key async for key in transport.commands.scan_iter(transport.names.group("*"))]
        await transport.close()
    assert 20 <= len(kept) <= 80
    assert not left
