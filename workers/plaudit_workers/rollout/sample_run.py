"""Generate one sample and encode it for publication: agent, seeds, timings. Called by ``prompt_work``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Branch, Prompt, SampleBody
from plaudit_wire.records import GenerationRecord, TurnRecord
from plaudit_wire.sample import AgentReward, Sample
from plaudit_workers.rollout.agents.agent import Agent, AgentError, Trajectory
from plaudit_workers.rollout.engines.protocol import Engine, FinishedSample, SampleRequest

logger = get_logger(__name__)

_TURN_STRIDE = 1 << 32
"""Keeps the seeds of one sample's later turns apart from the first turns of other samples."""


class SampleRun:
    """Generate sample ``index`` of a prompt and measure the time it takes.

    Args:
        change_in_agents: called with 1 when the sample leaves the engine for its agent, with -1 when it returns.
    """

    def __init__(self, prompt: Prompt, index: int, engine: Engine, change_in_agents: Callable[[int], None]) -> None:
        self._prompt = prompt
        self._index = index
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
        """Run the agent; a sample that it fails has a trajectory of one token, which is not trained, and the reason."""
        self._started = time.monotonic()
        try:
            trajectory = await self._run(agent)
        except AgentError as error:
            logger.warning("sample failed", group=self._prompt.group, index=self._index, reason=str(error))
            trajectory = await self._failed(AgentReward(error.outcome, reason=str(error)))
        finally:
            self._move(in_agent=False)
        self._tool_s = max(0.0, time.monotonic() - self._started - self._seconds_in_generate)
        return trajectory

    async def _run(self, agent: Agent) -> Trajectory:
        trajectory = await agent.run(self._prompt, self._generate)
        if problem := next(filter(None, (part.problem() for part in (trajectory, *trajectory.branches))), ""):
            raise AgentError(f"{type(agent).__name__}: {problem}")
        return trajectory

    async def _failed(self, failure: AgentReward) -> Trajectory:
        """Let the policy write a token: only a sample with tokens can be published."""
        self._finished.clear()
        self._requested_s.clear()
        trajectory = Trajectory()
        trajectory.add_turn(await self._generate(np.frombuffer(self._prompt.prompt_ids, "<i4").tolist(), 1))
        trajectory.failure = failure
        return trajectory

    async def _generate(
        self, ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> FinishedSample:
        turn, sampling = len(self._requested_s), self._prompt.sampling
        if max_tokens is not None and max_tokens < sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        if stop:
            sampling = msgspec.structs.replace(sampling, stop=[*sampling.stop, *stop])
        started = time.monotonic()
        self._requested_s.append(started - self._started)
        request = SampleRequest(
            prompt_ids=ids,
            sampling=sampling,
            seed=self._prompt.seed + self._index + turn * _TURN_STRIDE,
            turn=turn,
            images=self._prompt.images,
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
            prompt_tokens=len(trajectory.prompt_ids) or len(self._prompt.prompt_ids) // 4,
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
        )

    def _turn_records(self, trajectory: Trajectory) -> list[TurnRecord]:
        """Return the turns of a conversation; a single response, which no agent held, needs no such record."""
        if len(self._finished) == 1 and not trajectory.calls and not trajectory.messages:
            return []
        return [
            TurnRecord(
                first, len(turn.response_ids), self._requested_s[number], turn.generate_s, turn.engine_queue_s, calls
            )
            for first, (number, turn), calls in zip(
                trajectory.turns,
                sorted(self._finished.items()),
                [trajectory.calls.get(number, []) for number in range(len(trajectory.turns))],
                strict=False,  # an agent may discard a response that it asked for
            )
        ]


def sample_body(
    prompt: Prompt, index: int, trajectory: Trajectory, generation: GenerationRecord, decode: Callable[[list[int]], str]
) -> SampleBody:
    """Encode a trajectory as the record that is published."""
    response = decode(trajectory.response_ids) if trajectory.response is None else trajectory.response
    # A prompt with images was not changed, only their tokens are repeated.
    unchanged = prompt.images or not trajectory.prompt_ids
    sample = Sample(
        group=prompt.group,
        index=index,
        data_source=prompt.data_source,
        prompt=prompt.prompt if unchanged else decode(trajectory.prompt_ids),
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
    )
    return SampleBody(
        response_ids=np.asarray(trajectory.response_ids, "<i4").tobytes(),
        logprobs=np.asarray(trajectory.logprobs, "<f4").tobytes(),
        loss_mask=np.asarray(trajectory.loss_mask, "u1").tobytes(),
        version_spans=trajectory.version_spans,
        generation=generation,
        sample=sample,
        prompt_ids=np.asarray(trajectory.prompt_ids, "<i4").tobytes(),
        branches=[_branch(branch) for branch in trajectory.branches],
    )


def _branch(branch: Trajectory) -> Branch:
    return Branch(
        prompt_ids=np.asarray(branch.prompt_ids, "<i4").tobytes(),
        response_ids=np.asarray(branch.response_ids, "<i4").tobytes(),
        logprobs=np.asarray(branch.logprobs, "<f4").tobytes(),
        loss_mask=np.asarray(branch.loss_mask, "u1").tobytes(),
        version_spans=branch.version_spans,
    )
