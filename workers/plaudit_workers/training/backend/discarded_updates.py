"""Report updates that are discarded because a gradient is not finite, and end a run that no longer learns.

Called by ``torch_backend`` after each update. A discarded update changes nothing, so a run in which all are discarded
would end as if it had trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from plaudit_wire.errors import JobFailedError
from plaudit_wire.logs import get_logger
from plaudit_workers.job.spec.algorithm import AlgorithmSpec, LossSpec

MOST_IN_A_ROW = 5
"""So many discarded updates in a row end the run; fewer if the run has fewer."""
_LARGEST = 3.4028235e38
"""Of float32, in which losses are computed."""
_LOWER_RATE = "Lower spec.algorithm.optimizer.learningRate"

logger = get_logger(__name__)


class DiscardedUpdates:
    """Count the discarded updates in a row."""

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        self._loss = algorithm.loss
        self._most = min(MOST_IN_A_ROW, algorithm.steps * algorithm.updates_per_step)
        self._in_a_row = 0

    def note(self, figures: Mapping[str, float]) -> None:
        """Take the figures of an update; log it if it was discarded.

        Raises:
            JobFailedError: too many updates in a row were discarded.
        """
        if "actor/skipped_updates" not in figures:
            return  # nothing in it had a gradient
        self._in_a_row = self._in_a_row + 1 if figures["actor/skipped_updates"] else 0
        if not self._in_a_row:
            return
        cause, remedy = explain(figures, self._loss)
        logger.warning("update discarded", cause=cause, remedy=remedy, in_a_row=self._in_a_row)
        if self._in_a_row >= self._most:
            raise JobFailedError(
                f"{self._in_a_row} updates in a row were discarded, because {cause}. {remedy}, then continue with "
                "--resume"
            )


def explain(figures: Mapping[str, float], loss: LossSpec) -> tuple[str, str]:
    """Return the cause of a discarded update and its remedy, from the first of its figures that is not finite."""
    own = loss.kind == "python"
    mend = f"Mend function {loss.function} in spec.algorithm.loss.path {loss.path}"
    if not _finite(figures, "critic/advantages/min", "critic/advantages/max"):
        least, most = (figures.get(f"critic/score/{name}", math.nan) for name in ("min", "max"))
        return f"an advantage is not finite in float32 (rewards from {least:g} to {most:g})", "Bound the rewards"
    if not _finite(figures, "actor/behaviour_kl"):
        return "a log-probability of the policy or of a rollout is not finite", f"{_LOWER_RATE}, or start anew"
    if not _finite(figures, "actor/pg_loss", "actor/kl_loss"):
        return "the loss is not finite", mend if own else _LOWER_RATE
    return "the loss is finite, but its gradient is not", mend if own else _LOWER_RATE


def _finite(figures: Mapping[str, float], *names: str) -> bool:
    return all(abs(figures.get(name, 0.0)) <= _LARGEST for name in names)
