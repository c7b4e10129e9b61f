"""What a client gets back for one sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plaudit_wire.records import Outcome
from plaudit_workers.scoring.offline.lines import SampleOutput, ScorerOutput
from plaudit_workers.stream.sessions import GroupResult


@dataclass(frozen=True)
class Result:
    """How the scoring of one sample ended.

    Attributes:
        id: as it was submitted, or made up by ``submit``; all samples of a group have the group's.
        index: which sample of its group; 0 for a sample that was submitted by itself.
        score: the reward; None exactly unless ``outcome`` is ``scored``.
        outcome: ``scored`` · ``data_error`` · ``infra_error`` · ``timeout`` · ``skipped`` · ``poison`` · ``given_up``.
        reason: why there is no score.
        scorers: what each scorer output.
        seconds: from its submission until its score was there.
        drop_group: a scorer's ``onFailure: dropGroup`` says that nothing of its group is to be trained on.
    """

    id: str
    index: int
    score: float | None
    outcome: Outcome
    reason: str | None
    scorers: dict[str, ScorerOutput]
    seconds: float
    drop_group: bool = False


def results_of(own_id: str, group: GroupResult) -> Iterator[Result]:
    """The results of one group's samples, in their order."""
    for index, sample in enumerate(group.samples):
        output = SampleOutput.from_record(sample.scoring)
        yield Result(
            own_id,
            index,
            output.score,
            output.outcome,
            output.reason,
            output.scorers,
            sample.seconds,
            sample.scoring.drop_group,
        )
