"""Describe the kinds of objects that the operator reads and writes, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Describe a kind of namespaced object."""

    api_version: str
    kind: str
    plural: str
    newer: tuple[str, ...] = ()
    """Later versions with the same fields, the latest first. ``ApiServer`` uses the first that its cluster serves."""
    optional: bool = False
    """Not every cluster serves it: KEDA's kinds, and the alpha of gang scheduling."""

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, an object or a subresource; without ``namespace`` of all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


RLJOB = Kind("plaudit.dev/v1alpha1", "RLJob", "rljobs")
REWARD_SERVICE = Kind("plaudit.dev/v1alpha1", "RewardService", "rewardservices", optional=True)
"""Optional: an operator that was upgraded before the definitions goes on with the RLJobs."""
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
JOB = Kind("batch/v1", "Job", "jobs")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
PDB = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD_GROUP = Kind(
    "scheduling.k8s.io/v1alpha2",  # Kubernetes 1.36; the others are of 1.37
    "PodGroup",
    "podgroups",
    newer=("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha3"),
    optional=True,
)
HPA = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", optional=True)
TRIGGER_AUTHENTICATION = Kind("keda.sh/v1alpha1", "TriggerAuthentication", "triggerauthentications", optional=True)
CHILDREN = (
    CONFIG_MAP,
    SERVICE,
    SERVICE_ACCOUNT,
    DEPLOYMENT,
    STATEFUL_SET,
    JOB,
    PDB,
    NETWORK_POLICY,
    HPA,
    SCALED_OBJECT,
    TRIGGER_AUTHENTICATION,
    POD_GROUP,
)
"""Kinds of children that the operator watches and deletes. Secrets and RoleBindings it may only create."""
OWNERS = (RLJOB, REWARD_SERVICE)
"""Kinds that users create; all others are made for them."""
WATCHED = (*OWNERS, POD, *CHILDREN)
_BY_KIND = {kind.kind: kind for kind in (*WATCHED, SECRET, ROLE_BINDING, EVENT, LEASE)}


def kind_of(kind: str) -> Kind:
    """Return the kind of this name."""
    return _BY_KIND[kind]
