"""The condition ``RolledOut`` of a RewardService: all reward workers and gateways are of the present revision."""

from __future__ import annotations

from collections.abc import Mapping

from plaudit_operator import names
from plaudit_operator.children.context import JobContext
from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import Object, Observed, labels
from plaudit_operator.status.conditions import Condition
from plaudit_operator.status.roles import RoleState

ROLES = ("reward", "gateway")


def rolled_out(context: JobContext, observed: Observed, roles: Mapping[str, RoleState]) -> Condition:
    """Return the condition of a service."""
    deployments = {role: observed.child("Deployment", names.role_object(context.name, role)) for role in ROLES}
    behind = {role: found for role, found in deployments.items() if not _is_current(found, context.revision)}
    if not behind:
        message = f"all pods are of revision {context.revision}"
        return Condition.of(ConditionType.ROLLED_OUT, True, Reason.ROLLED_OUT, message)
    stuck = any(_is_stuck(found) for found in behind.values())
    reason = Reason.ROLL_OUT_STUCK if stuck else Reason.ROLLING_OUT
    parts = [_part(role, found, roles, context.revision) for role, found in behind.items()]
    return Condition.of(ConditionType.ROLLED_OUT, False, reason, "; ".join(parts))


def _is_current(deployment: Object | None, revision: str) -> bool:
    if deployment is None or _revision(deployment) != revision:
        return False
    metadata, status = deployment["metadata"], deployment.get("status") or {}
    if int(status.get("observedGeneration", 0)) < int(metadata.get("generation", 0)):
        return False
    desired = int(deployment["spec"].get("replicas", 1))
    return int(status.get("updatedReplicas", 0)) >= desired and int(status.get("replicas", 0)) <= desired


def _revision(deployment: Object) -> str:
    return labels(deployment["spec"]["template"]).get(names.LABEL_REVISION, "")


def _is_stuck(deployment: Object | None) -> bool:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return any(condition.get("reason") == "ProgressDeadlineExceeded" for condition in conditions)


def _part(role: str, deployment: Object | None, roles: Mapping[str, RoleState], revision: str) -> str:
    status = (deployment or {}).get("status") or {}
    updated = int(status.get("updatedReplicas", 0)) if deployment and _revision(deployment) == revision else 0
    state = roles[role]
    parts = [f"{role}: {updated} of {state.desired} pods are of revision {revision}", state.problem, state.remedy]
    return ". ".join(part for part in parts if part)
