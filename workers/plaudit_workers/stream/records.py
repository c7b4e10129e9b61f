"""What travels through the streams, besides ``plaudit_reward.sample.Sample`` (the entry of ``samples``).

| record | written by | read by |
| --- | --- | --- |
| ``Prompt`` | trainer, at admission (``prompts`` entry and the group's hash) | rollout; trainer after a resume |
| ``Body`` | rollout, at publication (the group's hash) | trainer |
| ``Announcement`` | trainer (``state``) | rollout |
| ``Group``, ``GroupSample`` | nobody: a group's hash, read | trainer; reward worker for group scope |

Arrays are raw little-endian bytes (int32 ids, float32 log-probabilities, uint8 masks), so that encoding costs nothing.
Every encoded record begins with the schema version (``encode``/``decode``).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from plaudit_metrics.records import GenerationRecord, GroupEnd, ScoringRecord, Split, Stamps
from plaudit_reward.sample import Sample

Phase = Literal["open", "group_scoring", "ready", "dropped"]
"""Where a group is; a closed group's hash is gone."""


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A published policy: ``number`` counts steps, ``incarnation`` the trainers that took over the run.

    Orders as a tuple. Text form ``incarnation.number``.
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a prompt's samples are to be drawn (``rollout.sampling``, or the validation's)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One admitted group: a prompt of which ``n`` samples are wanted."""

    group: str
    position: int
    """The data cursor: how many prompts of its split were admitted for the first time before this one."""
    split: Split
    step: int
    """The step it was admitted for."""
    n: int
    min_version: PolicyVersion
    """The least policy version that may generate it."""
    seed: int
    """From (run seed, split, position); sample ``i`` uses ``seed + i``: a redelivered prompt gives the same samples."""
    sampling: Sampling
    data_source: str
    prompt: str
    """Text as the model sees it, chat template applied."""
    prompt_ids: bytes
    """int32[num_prompt_tokens]."""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    attempt: int = 0
    """How often the position was admitted before (re-admissions after drops)."""


class Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of one sample; ``T`` = number of response tokens."""

    response_ids: bytes
    """int32[T]."""
    logprobs: bytes
    """float32[T], under the distribution that was sampled from; 0 where ``loss_mask`` is 0."""
    loss_mask: bytes
    """uint8[T]: 1 where the policy chose the token, 0 for tool output."""
    version_spans: list[tuple[int, int, int]]
    """(first token, incarnation, number): from that token on, that policy version sampled. Begins with token 0."""
    generation: GenerationRecord
    sample: Sample
    """Texts and data columns as scorers saw them; stored samples and group-scope scorers need them."""


class Announcement(msgspec.Struct, frozen=True):
    """The policy that rollouts must hold."""

    version: PolicyVersion
    path: str
    """Folder of the safetensors, on the shared volume."""
    digest: str
    """SHA-256 over the weight files."""


class GroupSample(msgspec.Struct, frozen=True):
    """One index of a group as its hash tells it."""

    index: int
    stamps: Stamps
    body: Body | None = None
    digest: str = ""
    scoring: ScoringRecord | None = None
    """None while the sample is not terminal."""
    deliveries: int = 1


class Group(msgspec.Struct, frozen=True):
    """A group's hash, read. Points in time as in ``plaudit_metrics.records``."""

    id: str
    phase: Phase
    prompt: Prompt
    samples: list[GroupSample]
    incarnation: int
    """Of the trainer that admitted it."""
    admitted: float
    terminal: float | None = None
    ready: float | None = None
    reason: str = ""
    """Why it is to be dropped; empty unless ``phase`` is ``dropped``."""


class GroupDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Entry of ``groups``: all samples of this group are terminal and its group-scope scorers are due."""

    group: str


__all__ = [
    "Announcement",
    "Body",
    "Group",
    "GroupDelivery",
    "GroupEnd",
    "GroupSample",
    "Phase",
    "PolicyVersion",
    "Prompt",
    "Sample",
    "Sampling",
]
