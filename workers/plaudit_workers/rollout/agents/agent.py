"""Agents turn a prompt into a trajectory by calling ``generate`` any number of times.

Called by ``prompt_work``; implemented by ``single_turn`` and (``kind: custom``) by users' own classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plaudit_wire.messages import Prompt
from plaudit_workers.rollout.engines.protocol import FinishedSample, VersionSpan

Generate = Callable[[Sequence[int]], Awaitable[FinishedSample]]
"""``await generate(ids)`` continues ``ids`` ([L] token ids, prompt included) with the prompt's sampling parameters.

The n-th call of a sample has its own seed, so a repeated run gives the same trajectory. Time spent in ``generate``
counts as generation; the rest of ``run`` counts as tools.
"""


@dataclass(slots=True)
class Trajectory:
    """One finished sample: ``T`` tokens after the prompt, tool output included."""

    response_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T]; 0 where ``loss_mask`` is 0."""
    loss_mask: list[int] = field(default_factory=list)
    """[T]: 1 where the policy chose the token, 0 where a tool or the agent inserted it."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """(first token, incarnation, number); begins with token 0 when ``T`` > 0."""
    finish_reason: str = "stop"
    response: str | None = None
    """The text for the scorers; None: the decoded ``response_ids``."""

    def add_turn(self, sample: FinishedSample) -> None:
        """Append a response of the policy."""
        offset = len(self.response_ids)
        self.response_ids += sample.response_ids
        self.logprobs += sample.logprobs
        self.loss_mask += [1] * len(sample.response_ids)
        for first, incarnation, number in sample.version_spans:
            if not self.version_spans or self.version_spans[-1][1:] != (incarnation, number):
                self.version_spans.append((offset + first if self.version_spans else 0, incarnation, number))
        self.finish_reason = sample.finish_reason

    def add_observation(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not choose: they carry no loss."""
        self.response_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)

    def problem(self) -> str:
        """Return why the trajectory cannot be published; empty if it can."""
        lengths = {len(self.response_ids), len(self.logprobs), len(self.loss_mask)}
        if len(lengths) > 1:
            return "response_ids, logprobs and loss_mask differ in length"
        if not self.response_ids:
            return "no tokens"
        if not self.version_spans or self.version_spans[0][0] != 0:
            return "version_spans do not begin with token 0"
        return ""


class Agent(Protocol):
    """Generates one sample of a prompt. One instance serves all samples of a process, many at a time."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Return the trajectory; an exception fails this sample only."""
        ...
