"""The arguments of the functions that make scorers, besides the scorer's own section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plaudit_reward.scorer import GroupScorer, Scorer
from plaudit_reward.served.gate import CallGate
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.stream.connection import RedisAddress


@dataclass(frozen=True)
class BuildContext:
    """Describe the environment in which scorers run."""

    reward: RewardSpec
    """The job's section, paths absolute."""
    worker: str
    """Name of this process."""
    run: str = ""
    """Id of the run; empty outside of one (``plaudit score``)."""
    redis: RedisAddress | None = None
    """The run's Redis; None outside of a run, where this process shares limits with no other."""
    model_servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Places of the servers of each scorer whose model the job serves, by the scorer's name."""
    gate: CallGate = field(default_factory=CallGate)
    """Holds the calls to those of them that sleep during updates."""
    version: str = ""
    """Of the job's scoring (``scoring.version``); empty outside of a run."""
    traced_share: float | None = None
    """Share of the samples whose spans are kept (``metrics.traces``); None: nothing is traced."""


AnyScorer = Scorer | GroupScorer

Maker = Callable[[ScorerSpec, BuildContext], AnyScorer]
"""Make a scorer without starting anything; ``open`` starts it. Raise ``ConfigurationError`` or ``RefusedError``."""
