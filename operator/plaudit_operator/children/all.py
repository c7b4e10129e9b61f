"""Render all children that a job should have: freeze the pod templates first, then build the objects around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.children import autoscaling, job_config, network_policies, pod, transport
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.pod import disruption_budget
from plaudit_operator.children.roles import (
    environment_manifests,
    environment_object,
    environment_template,
    gateway_manifests,
    gateway_settings,
    gateway_template,
    is_served,
    metrics_manifests,
    metrics_template,
    model_generation,
    model_manifests,
    model_object,
    model_template,
    reward_manifests,
    reward_template,
    rollout_groups,
    rollout_manifests,
    rollout_service,
    rollout_template,
    trainer_service,
    trainer_template,
    written_model,
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
    yield "reward", context.revision or digest(reward_inputs), lambda: reward_template(context)
    yield "metrics", digest(spec.get("metrics")), lambda: metrics_template(context)
    if transport.managed(context):
        yield "redis", digest(spec.get("transport")), lambda: transport.template(context)
    for scorer in context.spec.reward.model_scorers:
        inputs = model_generation(context, scorer) or digest(written_model(context, scorer))
        yield f"model/{scorer.name}", inputs, lambda scorer=scorer: model_template(context, scorer)  # type: ignore[misc]
    for server in context.spec.environments:
        written = next(each for each in spec["environments"] if each["name"] == server.name)
        inputs = digest({k: v for k, v in written.items() if k != "replicas"})
        yield f"environment/{server.name}", inputs, lambda server=server: environment_template(context, server)  # type: ignore[misc]
    if is_served(context):
        own = gateway_settings(context)
        inputs = digest([own, context.revision] if context.revision else own)
        yield "gateway", inputs, lambda: gateway_template(context)
    if context.spec.trains:
        shared = {k: v for k, v in (spec.get("rollout") or {}).items() if k not in ("replicas", "groups")}
        for group in rollout_groups(context):
            inputs = digest(shared | _own_inputs(spec, group.name))
            yield group.child, inputs, lambda group=group: rollout_template(context, group)  # type: ignore[misc]
        yield "trainer", digest(spec.get("trainer")), lambda: trainer_template(context)


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
        *metrics_manifests(context, *frozen("metrics")),
        *reward_manifests(context, *frozen("reward")),
        *pod.pod_groups(context, templates),
        *autoscaling.manifests(context, suspended=suspended or waits),
        *network_policies.manifests(context),
    ]
    if context.revision:
        children.append(job_config.revision_config(context))
    if transport.managed(context):
        children += transport.manifests(context, *frozen("redis"), rests=suspended and context.spec.scheduling.whole)
    for scorer in context.spec.reward.model_scorers:
        children += model_manifests(context, scorer, *frozen(f"model/{scorer.name}"))
    for server in context.spec.environments:
        children += environment_manifests(context, server, *frozen(f"environment/{server.name}"))
    if is_served(context):
        children += gateway_manifests(context, *frozen("gateway"))
    if context.spec.trains:
        for group in rollout_groups(context):
            children += rollout_manifests(context, group, *frozen(group.child))
        children += [*rollout_service(context), trainer_service(context)]
    children += [disruption_budget(context, role) for role, count in _budgeted(context).items() if count >= 2]
    return children


def _budgeted(context: JobContext) -> dict[str, int]:
    workers = context.spec.reward.workers
    counts = {"reward": workers.autoscaling.min_replicas if workers.autoscaling else workers.replicas}
    if is_served(context):
        counts["gateway"] = context.spec.reward.gateway.replicas
    # A budget with maxUnavailable does not apply to Jobs.
    single = [group for group in rollout_groups(context) if not group.spans_pods] if context.spec.trains else []
    return counts | {"rollout": sum(group.spec.replicas for group in single)}


def gang_deployments(context: JobContext, templates: Templates) -> frozenset[str]:
    """Return the names of the Deployments whose pods belong to the job's gang."""
    objects = {group.child: names.rollout_object(context.name, group.name) for group in rollout_groups(context)}
    objects |= {f"model/{s.name}": model_object(context, s) for s in context.spec.reward.model_scorers}
    members = (child for child in objects if child in templates and pod.is_member(templates[child]["template"]))
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
        counts[model_object(context, scorer)] = scorer.served.replicas
    for server in context.spec.environments:
        counts[environment_object(context, server)] = server.replicas
    if is_served(context):
        counts[names.role_object(context.name, "gateway")] = context.spec.reward.gateway.replicas
    if context.spec.trains:
        single = (group for group in rollout_groups(context) if not group.spans_pods)
        counts |= {names.rollout_object(context.name, group.name): group.spec.replicas for group in single}
    return counts
