"""Which maker belongs to which kind."""

from __future__ import annotations

from plaudit_workers.job.spec.scorers import ScorerSpec
from plaudit_workers.process import RefusedError
from plaudit_workers.scoring.kinds.context import AnyScorer, BuildContext, Maker
from plaudit_workers.scoring.kinds.judge import judge_scorer
from plaudit_workers.scoring.kinds.model import model_scorer
from plaudit_workers.scoring.kinds.python import python_scorer
from plaudit_workers.scoring.kinds.rule import rule_scorer

MAKERS: dict[str, Maker] = {
    "rule": rule_scorer,
    "python": python_scorer,
    "model": model_scorer,
    "judge": judge_scorer,
}


def make_scorer(scorer: ScorerSpec, context: BuildContext) -> AnyScorer:
    """A scorer as the job describes it, not opened yet.

    Raises:
        RefusedError: this version has none of its kind.
        ConfigurationError: it cannot be built as configured.
    """
    maker = MAKERS.get(scorer.kind)
    if maker is None:
        raise RefusedError(
            f"scorer {scorer.name}: kind {scorer.kind} is not available in this version; use kind "
            + " or ".join(sorted(MAKERS))
        )
    return maker(scorer, context)
