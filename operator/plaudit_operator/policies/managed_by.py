"""``spec.managedBy``: leave a job to the controller that it names, such as MultiKueue's."""

from __future__ import annotations

from plaudit_operator.names import CONTROLLER
from plaudit_operator.observed import Observed


def is_managed_elsewhere(observed: Observed) -> bool:
    """Return True if another controller manages the job. The field is immutable."""
    return observed.job["spec"].get("managedBy", "") not in ("", CONTROLLER)
