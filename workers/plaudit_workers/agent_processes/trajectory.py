"""Hold what agents exchange with a rollout: finished responses in, a trajectory out. No heavy imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import CallRecord
from plaudit_wire.sample import AgentReward

FinishReason = Literal["stop", "length"]
"""``stop``: the policy ended the response itself. ``length``: it was cut at ``max_tokens`` or the model's length."""

VersionSpan = tuple[int, int, int]
"""(first token, incarnation, number), as in ``SampleBody.version_spans``."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """Hold one response, ``T`` tokens long (the end-of-sequence token included)."""

    response_ids: list[int]
    """[T] token ids."""
    logprobs: list[float]
    """[T] natural log-probabilities under the distribution sampled from (temperature, top_p, top_k applied)."""
    version_spans: list[VersionSpan]
    """The policy version that sampled each range of tokens; begins with token 0 when ``T`` > 0."""
    finish_reason: FinishReason
    generate_s: float
    """Seconds from the call of ``generate`` to the last token."""
    engine_queue_s: float = 0.0
    """The part of ``generate_s`` before the engine first scheduled the request."""
    num_preempted: int = -1
    """Preemptions by the engine; -1 if the engine does not report them."""
    prompt_ids: list[int] = field(default_factory=list)
    """[P] of a request with images: the prompt that the engine computed, with the tokens of images repeated."""


@dataclass(slots=True)
class Trajectory:
    """Hold one finished sample: ``T`` tokens after the prompt, tool output included."""

    response_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T]; 0 where ``loss_mask`` is 0."""
    loss_mask: list[int] = field(default_factory=list)
    """[T]: 1 where the policy chose the token, 0 where a tool or the agent inserted it."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """(first token, incarnation, number); begins with token 0 when ``T`` > 0."""
    finish_reason: str = "stop"
    prompt_ids: list[int] = field(default_factory=list)
    """[P] where the agent changed the prompt, or the engine repeated the tokens of images; empty: the prompt's own."""
    prompt_messages: list[dict[str, Any]] = field(default_factory=list)
    """The changed prompt as chat messages, for the scorers; empty: the prompt's own."""
    response: str | None = None
    """The text for the scorers; None: the decoded ``response_ids``."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The chat messages after the prompt, for the scorers; empty where the agent keeps none."""
    turns: list[int] = field(default_factory=list)
    """Index of the first token of each turn of the policy."""
    calls: dict[int, list[CallRecord]] = field(default_factory=dict)
    """Number of a turn → the tool calls that followed it."""
    tool_rewards: list[float] = field(default_factory=list)
    """Rewards that tools returned, in the order of the calls."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards that an environment gave for each turn."""
    reward: AgentReward | None = None
    """The reward of the tools or the environment; None: they give no rewards."""
    environment: dict[str, Any] | None = None
    """Public attributes of the environment's instance at the end; None: there is none."""
    failure: AgentReward | None = None
    """The reason that the conversation broke off; the sample then gets no score."""
    branches: list[Trajectory] = field(default_factory=list)
    """Further token sequences of the sample, each with ``prompt_ids`` of its own; they train with its advantage."""
    replaced_parameters: list[str] = field(default_factory=list)
    """Names of request parameters in whose place the job's own values were used."""

    def add_turn(self, sample: FinishedSample) -> None:
        """Append a response of the policy."""
        offset = len(self.response_ids)
        self.turns.append(offset)
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

    def add_calls(self, calls: Sequence[CallRecord]) -> None:
        """Record tool calls of the last turn."""
        self.calls.setdefault(len(self.turns) - 1, []).extend(calls)

    @property
    def versions(self) -> set[PolicyVersion]:
        """Return the policy versions that sampled its tokens, those of branches included."""
        spans = [span for part in (self, *self.branches) for span in part.version_spans]
        return {PolicyVersion(incarnation, number) for _, incarnation, number in spans}

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
