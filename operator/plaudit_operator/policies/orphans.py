"""End the trainer of a deleted job soon: its Redis is gone, so its grace period would only hold GPUs.

A deleted RLJob takes all of its objects with it. Its trainer has ten minutes of grace for an update and a checkpoint,
but cannot finish them without Redis. To keep a checkpoint, suspend a job before deleting it.
"""

from __future__ import annotations

from collections.abc import Iterable

from plaudit_operator import names
from plaudit_operator.actions import Delete
from plaudit_operator.observed import Object, labels

_GRACE_S = 30


def hurry(pods: Iterable[Object]) -> list[Delete]:
    """Return the deletions that shorten the grace period of a deleted job's trainer.

    Args:
        pods: pods of jobs that were deleted.
    """
    return [
        Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s=_GRACE_S)
        for pod in pods
        if labels(pod).get(names.LABEL_ROLE) == "trainer"
        and int(pod["metadata"].get("deletionGracePeriodSeconds") or 0) > _GRACE_S
    ]
