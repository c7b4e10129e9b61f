"""Render all children that a job should have: freeze the pod templates first, then build the objects around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plaudit_operator import names
from plaudit_operator.admission.admission import digest
from plaudit_operator.children import autoscaling, gang, job_config, network_policies
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import disruption_budget
from plaudit_operator.children.roles import (
    environments,
    gateway,
    metrics,
    reward,
    reward_model,
    rollout,
    trainer,
    transport,
)

Templates = Mapping[str, Any]


def frozen_templates(context: JobContext) -> Templates:
    """Return the pod template of each role, with a digest of the part of the user's spec that it is rendered from.

    An existing template is kept while that part is unchanged, even if this version of the operator would render it
    differently: an upgrade restarts nothing.
    """
    before = context.admitted.templates
    templates = {}
    for child, inputs, render in _templates(context):
        kept = before.get(child)
        templates[child] = kept if kept and kept["inputs"] == inputs else {"inputs": inputs, "template": render()}
    return templates


def _templates(context: JobContext) -> Iterator[tuple[str, str, Callable[[], Manifest]]]:
    spec = context.admitted.current  # as the user wrote it: a default of another version is no change
    workers = {k: v for k, v in (spec["reward"].get("workers") or {}).items() if k not in ("replicas", "autoscaling")}
    reward_inputs = {k: v for k, v in spec["reward"].items() if k != "gateway"} | {"workers": workers}
    yield "reward", context.revision or digest(reward_inputs), lambda: reward.template(context)
    yield "metrics", digest(spec.get("metrics")), lambda: metrics.template(context)
    if transport.managed(context):
        yield "redis", digest(spec.get("transport")), lambda: transport.template(context)
    for scorer in context.spec.reward.model_scorers:
        inputs = reward_model.generation(context, scorer) or digest(reward_model.written(context, scorer))
        yield f"model/{scorer.name}", inputs, lambda scorer=scorer: reward_model.template(context, scorer)  # type: ignore[misc]
    for server in context.spec.environments:
        written = next(each for each in spec["environments"] if each["name"] == server.name)
        inputs = digest({k: v for k, v in written.items() if k != "replicas"})
        yield f"environment/{server.name}", inputs, lambda server=server: environments.template(context, server)  # type: ignore[misc]
    if gateway.is_served(context):
        own = gateway.settings(context)
        inputs = digest([own, context.revision] if context.revision else own)
        yield "gateway", inputs, lambda: gateway.template(context)
    if context.spec.trains:
        shared = {k: v for k, v in (spec.get("rollout") or {}).items() if k not in ("replicas", "groups")}
        for group in rollout.groups(context):
            inputs = digest(shared | _own_inputs(spec, group.name))
            yield group.child, inputs, lambda group=group: rollout.template(context, group)  # type: ignore[misc]
        yield "trainer", digest(spec.get("trainer")), lambda: trainer.template(context)


def _own_inputs(spec: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return what the user wrote for a rollout group; empty for a job without groups."""
    groups: Sequence[Mapping[str, Any]] = (spec.get("rollout") or {}).get("groups") or []
    written: Mapping[str, Any] = next((each for each in groups if each["name"] == group), {})
    own = {k: v for k, v in written.items() if k != "replicas"}
    return {"group": own} if own else {}


def manifests(context: JobContext, templates: Templates, *, suspended: bool, waits: bool) -> list[Manifest]:
    """Return all children except Jobs and the Secret, which are created once and never changed.

    Args:
        templates: frozen pod templates by child.
        waits: True while the gang is not scheduled; roles outside it then have no pods.
    """

    def frozen(child: str) -> tuple[Manifest, str]:
        return templates[child]["template"], templates[child]["inputs"]

    children = [
        job_config.config_map(context, templates),
        job_config.service_account(context),
        *metrics.manifests(context, *frozen("metrics")),
        *reward.manifests(context, *frozen("reward")),
        *gang.pod_groups(context, templates),
        *autoscaling.manifests(context, suspended=suspended or waits),
        *network_policies.manifests(context),
    ]
    if context.revision:
        children.append(job_config.revision_config(context))
    if transport.managed(context):
        children += transport.manifests(context, *frozen("redis"), rests=suspended and context.spec.scheduling.whole)
    for scorer in context.spec.reward.model_scorers:
        children += reward_model.manifests(context, scorer, *frozen(f"model/{scorer.name}"))
    for server in context.spec.environments:
        children += environments.manifests(context, server, *frozen(f"environment/{server.name}"))
    if gateway.is_served(context):
        children += gateway.manifests(context, *frozen("gateway"))
    if context.spec.trains:
        for group in rollout.groups(context):
            children += rollout.manifests(context, group, *frozen(group.child))
        children += [*rollout.service(context), trainer.service(context)]
    children += [disruption_budget(context, role) for role, count in _budgeted(context).items() if count >= 2]
    return children


def _budgeted(context: JobContext) -> dict[str, int]:
    workers = context.spec.reward.workers
    counts = {"reward": workers.autoscaling.min_replicas if workers.autoscaling else workers.replicas}
    if gateway.is_served(context):
        counts["gateway"] = context.spec.reward.gateway.replicas
    # A budget with maxUnavailable does not apply to Jobs.
    single = [group for group in rollout.groups(context) if not group.spans_pods] if context.spec.trains else []
    return counts | {"rollout": sum(group.spec.replicas for group in single)}


def gang_deployments(context: JobContext, templates: Templates) -> frozenset[str]:
    """Return the names of the Deployments whose pods belong to the job's gang."""
    objects = {group.child: names.rollout_object(context.name, group.name) for group in rollout.groups(context)}
    objects |= {f"model/{s.name}": reward_model.object_name(context, s) for s in context.spec.reward.model_scorers}
    members = (child for child in objects if child in templates and gang.is_member(templates[child]["template"]))
    return frozenset(objects[child] for child in members)


def fixed_replicas(context: JobContext) -> dict[str, int | None]:
    """Return the replicas of each Deployment of a running job by name; None if an autoscaler sets them."""
    workers = context.spec.reward.workers
    counts: dict[str, int | None] = {
        names.role_object(context.name, "reward"): None if workers.autoscaling else workers.replicas,
        names.role_object(context.name, "metrics"): 1,
    }
    for scorer in context.spec.reward.model_scorers:
        assert scorer.served is not None
        counts[reward_model.object_name(context, scorer)] = scorer.served.replicas
    for server in context.spec.environments:
        counts[environments.object_name(context, server)] = server.replicas
    if gateway.is_served(context):
        counts[names.role_object(context.name, "gateway")] = context.spec.reward.gateway.replicas
    if context.spec.trains:
        single = (group for group in rollout.groups(context) if not group.spans_pods)
        counts |= {names.rollout_object(context.name, group.name): group.spec.replicas for group in single}
    return counts
