"""Generate and publish the missing samples of one prompt: prompt → sample runs → encoded bodies → published samples.

``PromptWork`` runs each delivery that the worker takes, ``SampleRun`` one of its samples, and ``Slots`` count the
samples in work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Branch, EncodedBody, Prompt, SampleBody, encode_body
from plaudit_wire.plain import PlainDataError, plain_text
from plaudit_wire.records import AgentReward, GenerationRecord, Sample, TurnRecord
from plaudit_workers.agents.messages import FinishedSample, Trajectory, prompt_tokens
from plaudit_workers.agents.processes import sample_seed
from plaudit_workers.process import unless_stopped
from plaudit_workers.rollout.agents.agent import Agent, AgentError, MachineLostError
from plaudit_workers.rollout.engine import Chat, Engine, EngineFailedError, Policy, RequestRefusedError, SampleRequest
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.calls import Delivery, Publication
from plaudit_workers.stream.consumer import dead_letter, discard, publish, unpublished
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_MOST_REASON_CHARACTERS = 4000
_AHEAD_S = 0.1
"""Longer than Redis and a busy process take to hand over prompts; short beside the work of another rollout."""
_TURN_STRIDE = 1 << 32
"""Keeps the seeds of one sample's later turns apart from the first turns of other samples."""


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

        A sample whose agent fails is published with the reason. If some cannot be generated at all (the prompt exceeds
        the model's length), the entry is dead-lettered once all others are published; the group's completion rule
        decides on them.
        """
        try:
            if not await unless_stopped(delivery.lost, self._publish_missing(delivery, claim)):
                logger.warning("lease lost", group=delivery.group)
        finally:
            claim.shrink_to(0)

    async def _publish_missing(self, delivery: Delivery[Prompt], claim: Claim) -> None:
        prompt = delivery.payload
        await self.weights.hold(prompt.min_version)
        indices = list(range(prompt.n))
        if not delivery.new:
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
                samples += [group.create_task(self._publish_sample(delivery, index, claim)) for index in indices]
        except* _GroupClosedError:
            logger.info("group closed", group=delivery.group)
            samples.clear()
        return [failure for sample in samples if (failure := sample.result())]

    async def _publish_sample(self, delivery: Delivery[Prompt], index: int, claim: Claim) -> str:
        """Generate and publish one sample; return why there is nothing to publish, or ""."""
        run = SampleRun(delivery.payload, index, self.engine, claim.slots.change_in_agents)
        try:
            try:
                trajectory = await run.run(self.agent)
            finally:
                claim.release_one()
            body = await self._body(run, trajectory)
        except RequestRefusedError as error:  # not even the prompt can be generated
            return str(error)
        if await publish(self.transport, delivery, index, body) is Publication.refused:
            raise _GroupClosedError
        return ""

    async def _body(self, run: SampleRun, trajectory: Trajectory) -> EncodedBody:
        """Return the encoded sample, once the weights that sampled it are known to be right."""
        await self.weights.compared(trajectory.versions)
        try:
            return self._encoded(run, trajectory)
        except Exception as error:  # a value that cannot be encoded costs its sample only
            failed = await run.failed(AgentReward("data_error", reason=shown_error(error)))
        await self.weights.compared(failed.versions)
        return self._encoded(run, failed)

    def _encoded(self, run: SampleRun, trajectory: Trajectory) -> EncodedBody:
        record = run.record(self.worker, trajectory, self.weights.logprob_mismatch)
        return encode_body(sample_body(run.prompt, run.index, trajectory, record, self.engine))


class SampleRun:
    """Generate sample ``index`` of a prompt and measure the time it takes.

    Args:
        change_in_agents: called with 1 when the sample leaves the engine for its agent, with -1 when it returns.
    """

    def __init__(self, prompt: Prompt, index: int, engine: Policy, change_in_agents: Callable[[int], None]) -> None:
        self.prompt = prompt
        self.index = index
        self._engine = engine
        self._change_in_agents = change_in_agents
        self._finished: dict[int, FinishedSample] = {}
        """Number of a turn → its response; turns may finish in another order than they were requested in."""
        self._requested_s: list[float] = []
        """When each turn was requested, seconds after the start."""
        self._started = time.monotonic()
        self._num_in_engine = 0
        self._in_agent = False
        self._seconds_in_generate = 0.0
        self._tool_s = 0.0

    async def run(self, agent: Agent) -> Trajectory:
        """Run the agent; a sample that it fails has a trajectory of one token, which is not trained, and the reason.

        Raises:
            RequestRefusedError: the engine can never generate this prompt.
            EngineFailedError: the engine broke.
        """
        self._started = time.monotonic()
        sample_seed.set(self.prompt.seed + self.index)
        self._move(in_agent=True)  # an environment may take long before the first turn
        try:
            trajectory = await self._run(agent)
        except EngineFailedError:
            raise
        except AgentError as error:
            failure = AgentReward(error.outcome, reason=plain_text(str(error)[:_MOST_REASON_CHARACTERS]))
            trajectory = error.trajectory or await self.failed(failure)
            trajectory.sandbox = error.sandbox
        except RequestRefusedError as error:  # of what an agent or an environment wrote; of the row's, the next is too
            trajectory = await self.failed(AgentReward("data_error", reason=plain_text(str(error))))
        except Exception as error:  # agents, templates and parsers run on what users and the policy wrote
            trajectory = await self.failed(AgentReward("data_error", reason=shown_error(error)))
        finally:
            self._move(in_agent=False)
        self._tool_s = max(0.0, time.monotonic() - self._started - self._seconds_in_generate)
        return trajectory

    async def _run(self, agent: Agent) -> Trajectory:
        trajectory = await self._begun(agent)
        if problem := next(filter(None, (part.problem() for part in (trajectory, *trajectory.branches))), ""):
            raise AgentError(f"{type(agent).__name__}: {problem}")
        trajectory.make_plain()
        return trajectory

    async def _begun(self, agent: Agent) -> Trajectory:
        """Run the agent, and once more if its machine is lost: a broker or node that dies takes whole groups along."""
        try:
            return await agent.run(self.prompt, self._generate)
        except MachineLostError as error:
            about = {"group": self.prompt.group, "index": self.index}
            logger.warning("sample begins again in another machine", **about, error=str(error))
        self._forget_turns()
        trajectory = await agent.run(self.prompt, self._generate)
        if trajectory.sandbox is not None:
            trajectory.sandbox = msgspec.structs.replace(trajectory.sandbox, failed=True)
        return trajectory

    def _forget_turns(self) -> None:
        self._finished.clear()
        self._requested_s.clear()

    async def failed(self, failure: AgentReward) -> Trajectory:
        """Let the policy write a token: only a sample with tokens can be published."""
        logger.warning("sample failed", group=self.prompt.group, index=self.index, reason=failure.reason)
        self._forget_turns()
        trajectory = Trajectory()
        trajectory.add_turn(await self._generate(prompt_tokens(self.prompt), 1))
        trajectory.failure = failure
        return trajectory

    async def _generate(
        self, ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = (), chat: Chat | None = None
    ) -> FinishedSample:
        turn, sampling = len(self._requested_s), self.prompt.sampling
        if max_tokens is not None and max_tokens < sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        if stop:
            sampling = msgspec.structs.replace(sampling, stop=[*sampling.stop, *stop])
        started = time.monotonic()
        self._requested_s.append(started - self._started)
        request = SampleRequest(
            prompt_ids=ids,
            sampling=sampling,
            seed=self.prompt.seed + self.index + turn * _TURN_STRIDE,
            turn=turn,
            images=self.prompt.images,
            chat=chat,
        )
        self._move(in_agent=False)
        self._num_in_engine += 1
        try:
            sample = await self._engine.generate(request)
            self._finished[turn] = sample
            return sample
        finally:
            self._num_in_engine -= 1
            self._move(in_agent=not self._num_in_engine)
            self._seconds_in_generate += time.monotonic() - started

    def _move(self, *, in_agent: bool) -> None:
        if in_agent != self._in_agent:
            self._in_agent = in_agent
            self._change_in_agents(1 if in_agent else -1)

    def record(self, worker: str, trajectory: Trajectory, logprob_mismatch: float | None) -> GenerationRecord:
        """Return how the sample was generated; call this after ``run``."""
        versions = trajectory.versions
        turns = self._finished.values()
        preemptions = [turn.num_preempted for turn in turns if turn.num_preempted >= 0]
        return GenerationRecord(
            worker=worker,
            generate_s=sum(turn.generate_s for turn in turns),
            prompt_tokens=len(trajectory.prompt_ids) or len(self.prompt.prompt_ids) // 4,
            response_tokens=len(trajectory.response_ids),
            version_min=min(versions).number,
            version_max=max(versions).number,
            tool_s=self._tool_s,
            engine_queue_s=sum(turn.engine_queue_s for turn in turns),
            num_preempted=sum(preemptions) if preemptions else -1,
            finish_reason=trajectory.finish_reason,
            logprob_mismatch=logprob_mismatch,
            turns=self._turn_records(trajectory),
            replaced_parameters=trajectory.replaced_parameters,
            sandbox=trajectory.sandbox,
        )

    def _turn_records(self, trajectory: Trajectory) -> list[TurnRecord]:
        """Return the turns of a conversation; a single response, which no agent held, needs no such record."""
        if len(self._finished) == 1 and not trajectory.calls and not trajectory.messages:
            return []
        # An agent may discard a response that it asked for.
        turns = zip(trajectory.turns, sorted(self._finished.items()), strict=False)
        return [
            TurnRecord(
                first,
                len(turn.response_ids),
                self._requested_s[number],
                turn.generate_s,
                turn.engine_queue_s,
                trajectory.calls.get(place, []),
            )
            for place, (first, (number, turn)) in enumerate(turns)
        ]


def shown_error(error: Exception) -> str:
    """Return an exception as the reason of a sample; data that cannot travel tells its place and the remedy."""
    text = str(error) if isinstance(error, PlainDataError) else f"{type(error).__name__}: {error}"
    return plain_text(text[:_MOST_REASON_CHARACTERS])


def sample_body(
    prompt: Prompt, index: int, trajectory: Trajectory, generation: GenerationRecord, policy: Policy
) -> SampleBody:
    """Encode a trajectory as the record that is published."""
    response = policy.decode(trajectory.response_ids) if trajectory.response is None else trajectory.response
    # A prompt with images was not changed, only their tokens are repeated.
    unchanged = prompt.images or not trajectory.prompt_ids
    sample = Sample(
        group=prompt.group,
        index=index,
        data_source=prompt.data_source,
        prompt=prompt.prompt if unchanged else policy.decode(trajectory.prompt_ids, whole=True),
        response=response,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=trajectory.prompt_messages or prompt.messages,
        response_tokens=len(trajectory.response_ids),
        max_tokens=prompt.sampling.max_tokens,
        finish_reason=trajectory.finish_reason,
        split=prompt.split,
        completion=trajectory.messages,
        tool_rewards=trajectory.tool_rewards,
        turn_rewards=trajectory.turn_rewards,
        agent_reward=trajectory.reward,
        environment=trajectory.environment,
        failure=trajectory.failure,
        machine=trajectory.machine,
    )
    branches = [Branch(**_arrays(branch)) for branch in trajectory.branches]
    return SampleBody(**_arrays(trajectory), generation=generation, sample=sample, branches=branches)


def _arrays(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields that a sample's body and its branches share."""
    return {
        "prompt_ids": np.asarray(trajectory.prompt_ids, "<i4").tobytes(),
        "response_ids": np.asarray(trajectory.response_ids, "<i4").tobytes(),
        "logprobs": np.asarray(trajectory.logprobs, "<f4").tobytes(),
        "loss_mask": np.asarray(trajectory.loss_mask, "u1").tobytes(),
        "version_spans": trajectory.version_spans,
    }


class Claim:
    """Hold places for ``count`` samples of one prompt."""

    def __init__(self, slots: Slots, count: int) -> None:
        self.slots = slots
        self._count = count
        slots.change_busy(count)

    def shrink_to(self, count: int) -> None:
        """Release places until ``count`` are left; never grow."""
        if count < self._count:
            self.slots.change_busy(count - self._count)
            self._count = count

    def release_one(self) -> None:
        """Release the place of a finished sample."""
        self.shrink_to(self._count - 1)


class Slots:
    """Count samples in work. A single prompt may exceed the places; then nothing is taken until some are free.

    A sample is in the engine or in its agent (waiting for tools). A worker takes further prompts while the engine has
    free places and fewer samples than ``agents_limit`` are in agents, so the engine stays busy while tools run. Some
    samples more wait in the engine, so that a freed place is refilled in the next engine step: those of a prompt, or
    as many as end while prompts are on their way (``_AHEAD_S``), at the rate of the last second.

    Args:
        places: samples in the engine at a time.
        ahead: samples of a prompt.
        agents_limit: samples that wait for their agents at a time.
    """

    def __init__(self, places: int, ahead: int, agents_limit: int = 0) -> None:
        self.places = places
        self.ahead = ahead
        self.agents_limit = agents_limit
        self.busy = 0
        """Samples in the engine and in agents."""
        self.in_agents = 0
        """The part of ``busy`` that waits for agents."""
        self._freed = asyncio.Event()
        self._ended = 0.0  # samples that ended; each counts less with every second
        self._ended_at = time.monotonic()

    @property
    def free(self) -> int:
        """Return the number of samples that may be started now; 0 while one prompt exceeds the places."""
        ahead = max(self.ahead, min(self.places, int(self._ended_lately() * _AHEAD_S)))
        return max(0, self.places + ahead + min(self.in_agents, self.agents_limit) - self.busy)

    def _ended_lately(self) -> float:
        return self._ended * math.exp(self._ended_at - time.monotonic())

    def change_busy(self, count: int) -> None:
        """Add ``count`` to the busy places; called by claims."""
        self.busy += count
        if count < 0:
            self._ended, self._ended_at = self._ended_lately() - count, time.monotonic()
            self._freed.set()

    def change_in_agents(self, count: int) -> None:
        """Add ``count`` to the samples that wait for their agents instead of the engine."""
        self.in_agents += count
        if count > 0 and self.agents_limit:
            self._freed.set()

    async def wait_free(self) -> None:
        """Wait until at least one place is free."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
