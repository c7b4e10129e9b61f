"""List the children of a job in one table, and render them: freeze the pod templates, then build the objects around.

The table (``children``) has what one job has of each role; ``names.ROLES`` has what is true of a role in every job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.children import autoscaling, job_config, network_policies, roles, transport
from plaudit_operator.children.context import Frozen, JobContext, Manifest, Templates
from plaudit_operator.children.pod import Child, disruption_budget, images_of, is_member, rolled
from plaudit_operator.runtime.kinds import DEPLOYMENT, JOB, POD_GROUP, STATEFUL_SET

_RENEWS = "renews"
"""Mark of a template that waits for the revision to serve."""


def children(context: JobContext) -> Iterator[Child]:
    """Yield the children of a job, in the order in which the status reports them."""
    spec, written, child = context.spec, context.admitted.current, partial(Child, context)
    if transport.managed(context):
        yield child(
            transport.ROLE,
            written.get("transport"),
            transport.redis_pod,
            kind=STATEFUL_SET,
            workload=transport.stateful_set(context),
            ports={"redis": names.REDIS_PORT},
            # A probe that times out on a busy node must not cut off every process of the job: there is no other Redis.
            service={"publishNotReadyAddresses": True},
            created_once=transport.created_once,
        )
    if spec.trains:
        yield from _rollouts(context)
        yield child(
            roles.TRAINER_ROLE,
            written.get("trainer"),
            roles.trainer_pod,
            kind=JOB,
            pods_per_replica=spec.trainer.pods,
            ports={"rendezvous": names.RENDEZVOUS_PORT} if spec.trainer.ranks > 1 else {},
            service=roles.OF_RANKS,
        )
    workers = spec.reward.workers
    own = {"workers": _without(written["reward"].get("workers"), "replicas", "autoscaling")}
    yield child(
        roles.REWARD_ROLE,
        _without(written["reward"], "gateway") | own,
        roles.reward_pod,
        generation=context.revision,
        # The workers of a service's last revision score until those of the new one are ready.
        workload=rolled(surge=1, unavailable=0 if context.revision else 1),
        replicas=None if workers.autoscaling else workers.replicas,
    )
    if roles.has_gateway(context):
        settings = roles.gateway_settings(context)
        yield child(
            roles.GATEWAY_ROLE,
            [settings, context.revision] if context.revision else settings,
            roles.gateway_pod,
            workload=rolled(surge=1, unavailable=0),
            replicas=spec.reward.gateway.replicas,
            ports={"http": names.GATEWAY_PORT},
            created_once=roles.gateway_created_once,
        )
    if spec.has_broker:
        yield child(
            roles.SANDBOXES_ROLE,
            written.get("sandboxes"),
            roles.sandboxes_pod,
            ports={"http": names.SANDBOXES_PORT},
            others=(roles.sandboxes_account(context),),
            created_once=roles.sandboxes_created_once,
        )
    for scorer in spec.reward.model_scorers:
        assert scorer.served is not None
        yield child(
            roles.MODEL_ROLE,
            roles.written_model(context, scorer),
            partial(roles.model_pod, scorer=scorer),
            part=scorer.name,
            objects=roles.model_object(context, scorer),
            labels=roles.model_labels(context, scorer),
            generation=roles.model_generation(context, scorer),
            workload=rolled(surge=0, unavailable=1),
            replicas=scorer.served.replicas,
            ports={"model": names.MODEL_PORT},
            service={"clusterIP": "None"},
        )
    for server in spec.environments:
        yield child(
            roles.ENVIRONMENT_ROLE,
            _entry(written["environments"], server.name),
            partial(roles.environment_pod, server=server),
            part=server.name,
            objects=roles.environment_object(context, server),
            labels=roles.environment_labels(server),
            workload=rolled(surge=1, unavailable=1),
            replicas=server.replicas,
            ports={"http": server.port},
            service=roles.environment_service(server),
        )
    yield child(roles.METRICS_ROLE, written.get("metrics"), roles.metrics_pod, ports={"metrics": names.METRICS_PORT})


def _rollouts(context: JobContext) -> Iterator[Child]:
    """Yield the rollouts of each group; replicas of several pods are Jobs, with one Service (``rollout_service``)."""
    written = context.admitted.current.get("rollout") or {}
    for group, spec in context.spec.rollout.by_group.items():
        own = _entry(written.get("groups") or [], group)
        yield Child(
            context,
            roles.ROLLOUT_ROLE,
            _without(written, "replicas", "groups") | ({"group": own} if own else {}),
            partial(roles.rollout_pod, group=group, spec=spec),
            part=group,
            objects=names.rollout_object(context.name, group),
            labels={names.LABEL_ROLLOUT_GROUP: group} if group else {},
            kind=JOB if spec.pods_per_replica > 1 else DEPLOYMENT,
            workload=rolled(surge=0, unavailable=1),  # never more pods than there are GPUs for
            replicas=spec.replicas,
            pods_per_replica=spec.pods_per_replica,
        )


def _without(section: Mapping[str, Any] | None, *fields: str) -> dict[str, Any]:
    return {name: value for name, value in (section or {}).items() if name not in fields}


def _entry(written: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the entry of this name without its number of replicas; empty if there is none."""
    return _without(next((each for each in written if each["name"] == name), {}), "replicas")


def frozen_templates(context: JobContext) -> Templates:
    """Return the pod template of each child, with a digest of the part of the user's spec that it is rendered from.

    An existing template is kept while that part is unchanged, even if this version of the operator would render it
    differently: an upgrade restarts nothing.
    """
    before = context.admitted.templates
    revised = "reward" in before and bool(context.revision) and before["reward"]["inputs"] != context.revision
    templates: dict[str, Frozen] = {}
    for child in children(context):
        kept, inputs = before.get(child.name), child.generation or digest(child.inputs)
        if kept is None or kept["inputs"] != inputs or _is_outdated(context, child.role, kept):
            templates[child.name] = {"inputs": inputs, "template": child.template()}
        elif revised and names.ROLES[child.role].renewed and images_of(kept["template"]) != images_of(child.template()):
            templates[child.name] = {**kept, _RENEWS: True}
        else:
            templates[child.name] = kept
    return templates


def _is_outdated(context: JobContext, role: str, kept: Frozen) -> bool:
    """Return True if a template has to change although the user's part of the spec did not.

    The images of a revision that serves are good, also for the children that every revision shares. A service that a
    job calls was created again and has another Secret.
    """
    if _RENEWS in kept:
        return context.served_revision == context.revision
    if not names.ROLES[role].revised:
        return False
    tokens = set(context.admitted.services.values()) & roles.token_secrets(context, role)
    volumes = kept["template"]["spec"]["volumes"]
    return not tokens <= {(volume.get("secret") or {}).get("secretName") for volume in volumes}


def manifests(context: JobContext, templates: Templates, *, suspended: bool, waits: bool) -> list[Manifest]:
    """Return all children except Jobs and the Secret, which are created once and never changed.

    While the gang is not scheduled (``waits``), roles outside it have no pods.
    """
    found, rests = list(children(context)), suspended or waits
    # The machines belong to the broker's ReplicaSet. So a job that rests has no Deployment of it, not one without pods:
    # its machines go with it at once, whatever became of the broker.
    gone = ("Deployment", context.role_object(roles.SANDBOXES_ROLE)) if rests else ()
    of_children = (each for child in found for each in child.manifests(templates[child.name]))
    return [
        job_config.config_map(context, templates),
        job_config.service_account(context),
        *([job_config.revision_config(context)] if context.revision else []),
        *(each for each in of_children if (each["kind"], each["metadata"]["name"]) != gone),
        *roles.rollout_service(context),
        *_pod_groups(context, found, templates),
        *autoscaling.manifests(context, suspended=rests),
        *network_policies.manifests(context, {child.role for child in found}),
        *_disruption_budgets(context, found),
    ]


def _disruption_budgets(context: JobContext, found: Sequence[Child]) -> list[Manifest]:
    """Return the budgets of roles with two or more pods: with one, it would block a drain. None applies to Jobs."""
    scaling, counts = context.spec.reward.workers.autoscaling, Counter[str]()
    for child in found:
        if names.ROLES[child.role].budgeted and child.kind is DEPLOYMENT:
            counts[child.role] += scaling.min_replicas if scaling and child.replicas is None else child.pods
    return [disruption_budget(context, role) for role, count in counts.items() if count >= 2]


def _gang(found: Iterable[Child], templates: Templates) -> list[Child]:
    """Return the children in the job's group, as frozen: the operator that froze them may have left others outside."""
    grouped = (child for child in found if names.ROLES[child.role].grouped)
    return [child for child in grouped if is_member(templates[child.name]["template"])]


def _pod_groups(context: JobContext, found: Sequence[Child], templates: Templates) -> list[Manifest]:
    """Return the PodGroup of a gang (KEP-4671). Its count is immutable, and so are replicas of rollouts.

    The trainer's next attempt and the replacement of a rollout join it again: running pods count.
    """
    if context.spec.scheduling.gang == "none":
        return []
    count = sum(child.pods for child in _gang(found, templates))
    spec = {"schedulingPolicy": {"gang": {"minCount": count}}}
    return [context.manifest(POD_GROUP, context.metadata(context.run, "gang"), spec)]


def gang_deployments(context: JobContext, templates: Templates) -> frozenset[str]:
    """Return the names of the Deployments whose pods belong to the job's gang."""
    return frozenset(child.owner for child in _gang(children(context), templates) if child.kind is DEPLOYMENT)
