"""Generate one sample and encode it for publication: agent, seeds, timings. Called by ``prompt_work``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from plaudit_wire.messages import Body, PolicyVersion, Prompt
from plaudit_wire.records import GenerationRecord
from plaudit_wire.sample import Sample
from plaudit_workers.rollout.agents.agent import Agent, Trajectory
from plaudit_workers.rollout.engines.protocol import Engine, FinishedSample, SampleRequest

_TURN_STRIDE = 1 << 32
"""Keeps the seeds of one sample's later turns apart from the first turns of other samples."""


class TrajectoryError(Exception):
    """An agent returned a trajectory that cannot be published; the message says why."""


class SampleRun:
    """Generates sample ``index`` of a prompt and measures the time it takes.

    Args:
        prompt: the group's prompt.
        index: which of its n samples.
        engine: generates the responses.
    """

    def __init__(self, prompt: Prompt, index: int, engine: Engine) -> None:
        self._prompt = prompt
        self._index = index
        self._engine = engine
        self._turns: list[FinishedSample] = []
        self._seconds_in_generate = 0.0
        self._tool_s = 0.0

    async def run(self, agent: Agent) -> Trajectory:
        """Run the agent.

        Raises:
            TrajectoryError: the agent returned a trajectory that cannot be published.
        """
        started = time.monotonic()
        trajectory = await agent.run(self._prompt, self._generate)
        self._tool_s = max(0.0, time.monotonic() - started - self._seconds_in_generate)
        if problem := trajectory.problem():
            raise TrajectoryError(f"{type(agent).__name__}: {problem}")
        return trajectory

    async def _generate(self, ids: Sequence[int]) -> FinishedSample:
        turn = len(self._turns)
        started = time.monotonic()
        request = SampleRequest(
            prompt_ids=ids,
            sampling=self._prompt.sampling,
            seed=self._prompt.seed + self._index + turn * _TURN_STRIDE,
        )
        sample = await self._engine.generate(request)
        self._turns.append(sample)
        self._seconds_in_generate += time.monotonic() - started
        return sample

    def record(self, worker: str, trajectory: Trajectory, logprob_mismatch: float | None) -> GenerationRecord:
        """Return how the sample was generated; call this after ``run``."""
        versions = [PolicyVersion(incarnation, number) for _, incarnation, number in trajectory.version_spans]
        preemptions = [turn.num_preempted for turn in self._turns if turn.num_preempted >= 0]
        return GenerationRecord(
            worker=worker,
            generate_s=sum(turn.generate_s for turn in self._turns),
            prompt_tokens=len(self._prompt.prompt_ids) // 4,
            response_tokens=len(trajectory.response_ids),
            version_min=min(versions).number,
            version_max=max(versions).number,
            tool_s=self._tool_s,
            engine_queue_s=sum(turn.engine_queue_s for turn in self._turns),
            num_preempted=sum(preemptions) if preemptions else -1,
            finish_reason=trajectory.finish_reason,
            logprob_mismatch=logprob_mismatch,
        )


def sample_body(
    prompt: Prompt, index: int, trajectory: Trajectory, generation: GenerationRecord, decode: Callable[[list[int]], str]
) -> Body:
    """Encode a trajectory as the record that is published."""
    response = decode(trajectory.response_ids) if trajectory.response is None else trajectory.response
    sample = Sample(
        group=prompt.group,
        index=index,
        data_source=prompt.data_source,
        prompt=prompt.prompt,
        response=response,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        messages=prompt.messages,
        response_tokens=len(trajectory.response_ids),
        max_tokens=prompt.sampling.max_tokens,
        finish_reason=trajectory.finish_reason,
        split=prompt.split,
    )
    return Body(
        response_ids=np.asarray(trajectory.response_ids, "<i4").tobytes(),
        logprobs=np.asarray(trajectory.logprobs, "<f4").tobytes(),
        loss_mask=np.asarray(trajectory.loss_mask, "u1").tobytes(),
        version_spans=trajectory.version_spans,
        generation=generation,
        sample=sample,
    )
