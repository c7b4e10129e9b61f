"""Keep what the pods of an earlier revision of a RewardService use, until the last of them has gone."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.observed import Object, Observed, labels


def is_in_use(observed: Observed, child: Object, revision: str) -> bool:
    """Return True if pods of another revision may use a child that the present revision does not have.

    Args:
        revision: the present one; empty for an RLJob, which has only one.
    """
    of_a_revision = names.LABEL_REVISION in labels(child) or names.LABEL_MODEL in labels(child)
    if not revision or not of_a_revision:
        return False
    return any(labels(pod).get(names.LABEL_REVISION, revision) != revision for pod in observed.pods)
