"""Render all children that a job should have: freeze the pod templates first, then build the objects around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.children import autoscaling, job_config, network_policies, pod, roles, transport
from plaudit_operator.children.context import Frozen, JobContext, Manifest, Templates

_RENEWED = ("metrics", "redis")
"""Children of a RewardService that take new images with a revision; its models would load anew, and keep theirs."""
_RENEWS = "renews"
"""Mark of a template that waits for the revision to serve."""


def frozen_templates(context: JobContext) -> Templates:
    """Return the pod template of each role, with a digest of the part of the user's spec that it is rendered from.

    An existing template is kept while that part is unchanged, even if this version of the operator would render it
    differently: an upgrade restarts nothing.
    """
    before = context.admitted.templates
    revised = "reward" in before and bool(context.revision) and before["reward"]["inputs"] != context.revision
    templates: dict[str, Frozen] = {}
    for child, inputs, render in _templates(context):
        kept = before.get(child)
        if kept is None or kept["inputs"] != inputs or _is_outdated(context, child, kept):
            templates[child] = {"inputs": inputs, "template": render()}
        elif revised and child in _RENEWED and pod.images_of(kept["template"]) != pod.images_of(render()):
            templates[child] = {**kept, _RENEWS: True}
        else:
            templates[child] = kept
    return templates


def _is_outdated(context: JobContext, child: str, kept: Frozen) -> bool:
    """Return True if a template has to change although the user's part of the spec did not.

    The images of a revision that serves are good, also for the children that every revision shares. A service that a
    job calls was created again and has another Secret.
    """
    if _RENEWS in kept:
        return context.served_revision == context.revision
    if child not in job_config.REVISED_ROLES:
        return False
    tokens = set(context.admitted.services.values()) & roles.token_secrets(context, child)
    volumes = kept["template"]["spec"]["volumes"]
    return not tokens <= {(volume.get("secret") or {}).get("secretName") for volume in volumes}


def _templates(context: JobContext) -> Iterator[tuple[str, str, Callable[[], Manifest]]]:
    spec = context.admitted.current  # as the user wrote it: a default of another version is no change
    workers = {k: v for k, v in (spec["reward"].get("workers") or {}).items() if k not in ("replicas", "autoscaling")}
    reward_inputs = {k: v for k, v in spec["reward"].items() if k != "gateway"} | {"workers": workers}
    yield "reward", context.revision or digest(reward_inputs), partial(roles.reward_template, context)
    yield "metrics", digest(spec.get("metrics")), partial(roles.metrics_template, context)
    if transport.managed(context):
        yield "redis", digest(spec.get("transport")), partial(transport.template, context)
    for scorer in context.spec.reward.model_scorers:
        inputs = roles.model_generation(context, scorer) or digest(roles.written_model(context, scorer))
        yield f"model/{scorer.name}", inputs, partial(roles.model_template, context, scorer)
    for server in context.spec.environments:
        inputs = digest(_fixed(spec["environments"], server.name))
        yield f"environment/{server.name}", inputs, partial(roles.environment_template, context, server)
    if roles.has_gateway(context):
        own = roles.gateway_settings(context)
        inputs = digest([own, context.revision] if context.revision else own)
        yield "gateway", inputs, partial(roles.gateway_template, context)
    if context.spec.trains:
        shared = {k: v for k, v in (spec.get("rollout") or {}).items() if k not in ("replicas", "groups")}
        for group in roles.rollout_groups(context):
            own = _fixed((spec.get("rollout") or {}).get("groups") or [], group.name)
            yield (
                group.child,
                digest(shared | ({"group": own} if own else {})),
                partial(roles.rollout_template, context, group),
            )
        if context.spec.has_broker:
            yield "sandboxes", digest(spec.get("sandboxes")), partial(roles.sandboxes_template, context)
        yield "trainer", digest(spec.get("trainer")), partial(roles.trainer_template, context)


def _fixed(written: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the section of this name without its number of replicas; empty if there is none."""
    section = next((each for each in written if each["name"] == name), {})
    return {k: v for k, v in section.items() if k != "replicas"}


def manifests(context: JobContext, templates: Templates, *, suspended: bool, waits: bool) -> list[Manifest]:
    """Return all children except Jobs and the Secret, which are created once and never changed.

    While the gang is not scheduled (``waits``), roles outside it have no pods.
    """
    children = [
        job_config.config_map(context, templates),
        job_config.service_account(context),
        *roles.metrics_manifests(context, templates["metrics"]),
        *roles.reward_manifests(context, templates["reward"]),
        *pod.pod_groups(context, templates),
        *autoscaling.manifests(context, suspended=suspended or waits),
        *network_policies.manifests(context),
    ]
    if context.revision:
        children.append(job_config.revision_config(context))
    if transport.managed(context):
        children += transport.manifests(context, templates["redis"])
    for scorer in context.spec.reward.model_scorers:
        children += roles.model_manifests(context, scorer, templates[f"model/{scorer.name}"])
    for server in context.spec.environments:
        children += roles.environment_manifests(context, server, templates[f"environment/{server.name}"])
    if roles.has_gateway(context):
        children += roles.gateway_manifests(context, templates["gateway"])
    for group in roles.rollout_groups(context):
        children += roles.rollout_manifests(context, group, templates[group.child])
    if context.spec.has_broker:
        children += roles.sandboxes_manifests(context, templates["sandboxes"], rests=suspended or waits)
    if context.spec.trains:
        children += [*roles.rollout_service(context), *roles.trainer_service(context)]
    children += [pod.disruption_budget(context, role) for role, count in _budgeted(context).items() if count >= 2]
    return children


def _budgeted(context: JobContext) -> dict[str, int]:
    workers = context.spec.reward.workers
    counts = {"reward": workers.autoscaling.min_replicas if workers.autoscaling else workers.replicas}
    if roles.has_gateway(context):
        counts["gateway"] = context.spec.reward.gateway.replicas
    # A budget with maxUnavailable does not apply to Jobs.
    single = [group for group in roles.rollout_groups(context) if not group.spans_pods]
    return counts | {"rollout": sum(group.spec.replicas for group in single)}


def gang_deployments(context: JobContext, templates: Templates) -> frozenset[str]:
    """Return the names of the Deployments whose pods belong to the job's gang."""
    objects = {group.child: names.rollout_object(context.name, group.name) for group in roles.rollout_groups(context)}
    objects |= {f"model/{s.name}": roles.model_object(context, s) for s in context.spec.reward.model_scorers}
    members = (child for child in objects if child in templates and pod.is_member(templates[child]["template"]))
    return frozenset(objects[child] for child in members)


def fixed_replicas(context: JobContext) -> dict[str, int | None]:
    """Return the replicas of each Deployment of a running job by name; None if an autoscaler sets them."""
    workers = context.spec.reward.workers
    counts: dict[str, int | None] = {
        context.role_object("reward"): None if workers.autoscaling else workers.replicas,
        context.role_object("metrics"): 1,
    }
    for scorer in context.spec.reward.model_scorers:
        assert scorer.served is not None
        counts[roles.model_object(context, scorer)] = scorer.served.replicas
    for server in context.spec.environments:
        counts[roles.environment_object(context, server)] = server.replicas
    if roles.has_gateway(context):
        counts[context.role_object("gateway")] = context.spec.reward.gateway.replicas
    if context.spec.has_broker:
        counts[context.role_object("sandboxes")] = 1
    single = (group for group in roles.rollout_groups(context) if not group.spans_pods)
    return counts | {names.rollout_object(context.name, group.name): group.spec.replicas for group in single}
