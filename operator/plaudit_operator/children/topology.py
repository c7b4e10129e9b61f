"""Place the pods of a role in one domain of the network: by Kueue in a queue, else by affinity among the pods."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_workers.job.spec.kubernetes.pod import TopologySpec

_WEIGHT = 100


def in_one_domain(context: JobContext, role: str, topology: TopologySpec) -> Manifest:
    """Return the fields of a pod template that keep the pods of a role together; empty if none is asked for."""
    asked = {"required": topology.required, "preferred": topology.preferred}
    given = {kind: label for kind, label in asked.items() if label}
    if not given:
        return {}
    if context.spec.scheduling.queue_name:
        return {"metadata": {"annotations": {f"{names.KUEUE_TOPOLOGY}-{kind}-topology": given[kind] for kind in given}}}
    pods = {"labelSelector": {"matchLabels": {**context.labels(role), names.LABEL_RUN: context.run}}}
    affinity: Manifest = {}
    if topology.required:
        term = {**pods, "topologyKey": topology.required}
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = [term]
    if topology.preferred:
        wish = {"weight": _WEIGHT, "podAffinityTerm": {**pods, "topologyKey": topology.preferred}}
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [wish]
    return {"spec": {"affinity": {"podAffinity": affinity}}}
