"""Generate and publish the missing samples of one prompt. Called by ``worker`` for each delivery."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.engines.protocol import Engine, EngineFailedError
from plaudit_workers.rollout.sample_run import SampleRun, sample_body
from plaudit_workers.rollout.slots import Claim
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.worker.dead_letter import dead_letter
from plaudit_workers.stream.worker.lease import Delivery
from plaudit_workers.stream.worker.producer import Publication, discard, publish, unpublished

logger = get_logger(__name__)


class _GroupClosedError(Exception):
    """Report that the group is closed: the remaining samples are not needed either."""


@dataclass(frozen=True)
class PromptWork:
    """Hold everything that the prompts of a worker share."""

    worker: str
    transport: Transport
    engine: Engine
    agent: Agent
    weights: PolicyWeights

    async def run(self, delivery: Delivery[Prompt], claim: Claim) -> None:
        """Generate and publish every sample of the prompt that is not published yet; stop when the lease is lost.

        If some samples cannot be generated (the agent raised, the prompt exceeds the model's length), the entry is
        dead-lettered once all others are published; the group's completion rule decides on them.
        """
        work = asyncio.ensure_future(self._all(delivery, claim))
        lost = asyncio.ensure_future(delivery.lost.wait())
        try:
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                logger.warning("lease lost", group=delivery.group)
        finally:
            lost.cancel()
            work.cancel()
            await asyncio.wait({work, lost})
            claim.shrink_to(0)

    async def _all(self, delivery: Delivery[Prompt], claim: Claim) -> None:
        prompt = delivery.payload
        await self.weights.hold(prompt.min_version)
        indices = await self.transport.retry_through_outage(lambda: unpublished(self.transport, prompt))
        claim.shrink_to(len(indices))
        if not indices:
            await discard(self.transport, delivery)
            return
        failures = await self._generate(delivery, indices, claim)
        if failures:
            await dead_letter(self.transport, delivery, f"{len(failures)} samples failed: {failures[0]}")

    async def _generate(self, delivery: Delivery[Prompt], indices: list[int], claim: Claim) -> list[str]:
        """Return why samples failed; [] if none failed or the group is closed."""
        samples: list[asyncio.Task[str]] = []
        try:
            async with asyncio.TaskGroup() as group:
                samples += [group.create_task(self._one(delivery, index, claim)) for index in indices]
        except* _GroupClosedError:
            logger.info("group closed", group=delivery.group)
            samples.clear()
        return [failure for sample in samples if (failure := sample.result())]

    async def _one(self, delivery: Delivery[Prompt], index: int, claim: Claim) -> str:
        run = SampleRun(delivery.payload, index, self.engine, claim.change_in_agents)
        try:
            trajectory = await run.run(self.agent)
        except EngineFailedError:
            raise
        except Exception as error:
            # An agent runs users' code: whatever it raises fails this sample only.
            logger.exception("sample failed", group=delivery.group, index=index)
            return repr(error)
        finally:
            claim.release_one()
        await self.weights.compared(trajectory.versions)
        record = run.record(self.worker, trajectory, self.weights.logprob_mismatch)
        body = sample_body(delivery.payload, index, trajectory, record, self.engine.decode)
        if await publish(self.transport, delivery, index, body) is Publication.refused:
            raise _GroupClosedError
        return ""
