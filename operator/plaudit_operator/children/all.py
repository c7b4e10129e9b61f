"""List the children of a job in one table, and render them: freeze the pod templates, then build the objects around.

The table (``children``) has what one job has of each role; ``names.ROLES`` has what is true of a role in every job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from plaudit_job.spec.pod import PodSpec
from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.children import autoscaling, job_config, network_policies, roles, transport
from plaudit_operator.children.context import Frozen, JobContext, Manifest, Templates
from plaudit_operator.children.pod import (
    RolePod,
    deployment,
    disruption_budget,
    images_of,
    is_member,
    pod_template,
    service,
)
from plaudit_operator.runtime.kinds import POD_GROUP

_RENEWS = "renews"
"""Mark of a template that waits for the revision to serve."""


def _nothing(*_: Any) -> list[Manifest]:
    return []


@dataclass(frozen=True)
class Child:
    """Describe the pods of one template, and the objects around them."""

    context: JobContext
    role: str
    """One of ``names.ROLES``."""
    pod: PodSpec
    inputs: Any
    """The part of the spec that its template is rendered from, as the user wrote it, without the number of pods."""
    process: Callable[[JobContext], RolePod]
    part: str = ""
    """Name of the rollout group, scorer or environment; empty if the job has one child of the role."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that separate its pods from others of the role."""
    object: str = ""
    """Name of its objects, if it is not that of the role."""
    generation: str = ""
    """In a RewardService, stands for the digest of ``inputs``."""
    kind: str = "Deployment"
    """Kind of what owns its pods. Jobs follow each other (``attempts.py``)."""
    strategy: Manifest = field(default_factory=lambda: {"type": "Recreate"})
    """Of a Deployment."""
    replicas: int | None = 1
    """While the job runs; None if an autoscaler sets them."""
    pods_per_replica: int = 1
    ports: Mapping[str, int] = field(default_factory=dict)
    """Of its Service; without any it has none."""
    service: Manifest = field(default_factory=dict)
    """Further fields of the Service."""
    others: Callable[[JobContext, Frozen], list[Manifest]] = _nothing
    """Return its objects beside Deployment and Service."""
    created_once: Callable[[JobContext], list[Manifest]] = _nothing
    """Return what is created once, before the owner of its pods."""

    @property
    def name(self) -> str:
        """Return the key of its frozen template."""
        return f"{self.role}/{self.part}" if self.part else self.role

    @property
    def reported(self) -> str:
        """Return the name of its entry in the status, which rollouts of all groups share."""
        reported = names.ROLES[self.role].reported
        return self.name if "/" in reported else reported or self.role

    @property
    def owner(self) -> str:
        """Return the name of what owns its pods; those of Jobs begin with it."""
        return self.object or self.context.role_object(self.role)

    @property
    def pods(self) -> int:
        """Return the number of its pods while the job runs; 0 if an autoscaler sets it."""
        return (self.replicas or 0) * self.pods_per_replica

    def template(self) -> Manifest:
        """Render its pod template anew."""
        return pod_template(self.context, self.process(self.context))

    def manifests(self, frozen: Frozen) -> Iterator[Manifest]:
        """Yield its objects, except for Jobs and what is created once."""
        if self.kind == "Deployment":
            yield deployment(self.context, self.owner, self.role, frozen, self.strategy, **self.labels)
        if self.ports:
            yield service(self.context, self.owner, self.role, self.ports, self.service, **self.labels)
        yield from self.others(self.context, frozen)


def children(context: JobContext) -> Iterator[Child]:
    """Yield the children of a job, in the order in which the status reports them."""
    spec, written = context.spec, context.admitted.current
    if transport.managed(context):
        yield Child(
            context,
            transport.ROLE,
            spec.transport.managed.pod,
            inputs=written.get("transport"),
            process=transport.redis_pod,
            kind="StatefulSet",
            ports={"redis": names.REDIS_PORT},
            # A probe that times out on a busy node must not cut off every process of the job: there is no other Redis.
            service={"publishNotReadyAddresses": True},
            others=transport.stateful_set,
            created_once=transport.created_once,
        )
    if spec.trains:
        yield from _rollouts(context)
        yield Child(
            context,
            roles.TRAINER_ROLE,
            spec.trainer.pod,
            inputs=written.get("trainer"),
            process=roles.trainer_pod,
            kind="Job",
            pods_per_replica=spec.trainer.pods,
            ports={"rendezvous": names.RENDEZVOUS_PORT} if spec.trainer.ranks > 1 else {},
            service=roles.OF_RANKS,
        )
    workers = spec.reward.workers
    own = {"workers": _without(written["reward"].get("workers"), "replicas", "autoscaling")}
    yield Child(
        context,
        roles.REWARD_ROLE,
        workers.pod,
        inputs=_without(written["reward"], "gateway") | own,
        generation=context.revision,
        process=roles.reward_pod,
        # The workers of a service's last revision score until those of the new one are ready.
        strategy=_rolling(surge=1, unavailable=0 if context.revision else 1),
        replicas=None if workers.autoscaling else workers.replicas,
    )
    if roles.has_gateway(context):
        settings = roles.gateway_settings(context)
        yield Child(
            context,
            roles.GATEWAY_ROLE,
            spec.reward.gateway.pod,
            inputs=[settings, context.revision] if context.revision else settings,
            process=roles.gateway_pod,
            strategy=_rolling(surge=1, unavailable=0),
            replicas=spec.reward.gateway.replicas,
            ports={"http": names.GATEWAY_PORT},
            created_once=roles.gateway_created_once,
        )
    if spec.has_broker:
        yield Child(
            context,
            roles.SANDBOXES_ROLE,
            PodSpec(),
            inputs=written.get("sandboxes"),
            process=roles.sandboxes_pod,
            ports={"http": names.SANDBOXES_PORT},
            others=roles.sandboxes_account,
            created_once=roles.sandboxes_created_once,
        )
    for scorer in spec.reward.model_scorers:
        assert scorer.served is not None
        yield Child(
            context,
            roles.MODEL_ROLE,
            scorer.served.pod,
            part=scorer.name,
            object=roles.model_object(context, scorer),
            labels=roles.model_labels(context, scorer),
            inputs=roles.written_model(context, scorer),
            generation=roles.model_generation(context, scorer),
            process=partial(roles.model_pod, scorer=scorer),
            strategy=_rolling(surge=0, unavailable=1),
            replicas=scorer.served.replicas,
            ports={"model": names.MODEL_PORT},
            service={"clusterIP": "None"},
        )
    for server in spec.environments:
        yield Child(
            context,
            roles.ENVIRONMENT_ROLE,
            server.pod,
            part=server.name,
            object=roles.environment_object(context, server),
            labels=roles.environment_labels(server),
            inputs=_entry(written["environments"], server.name),
            process=partial(roles.environment_pod, server=server),
            strategy=_rolling(surge=1, unavailable=1),
            replicas=server.replicas,
            ports={"http": server.port},
            service=roles.environment_service(server),
        )
    yield Child(
        context,
        roles.METRICS_ROLE,
        spec.metrics.pod,
        inputs=written.get("metrics"),
        process=roles.metrics_pod,
        ports={"metrics": names.METRICS_PORT},
    )


def _rollouts(context: JobContext) -> Iterator[Child]:
    """Yield the rollouts of each group; replicas of several pods are Jobs, with one Service (``rollout_service``)."""
    written = context.admitted.current.get("rollout") or {}
    for group in roles.rollout_groups(context):
        own = _entry(written.get("groups") or [], group.name)
        yield Child(
            context,
            roles.ROLLOUT_ROLE,
            group.spec.pod,
            part=group.name,
            object=names.rollout_object(context.name, group.name),
            labels=group.labels,
            inputs=_without(written, "replicas", "groups") | ({"group": own} if own else {}),
            process=partial(roles.rollout_pod, group=group),
            kind="Job" if group.spans_pods else "Deployment",
            strategy=_rolling(surge=0, unavailable=1),  # never more pods than there are GPUs for
            replicas=group.spec.replicas,
            pods_per_replica=group.spec.pods_per_replica,
        )


def _rolling(*, surge: int, unavailable: int) -> Manifest:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


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
        *_pod_groups(context, templates),
        *autoscaling.manifests(context, suspended=rests),
        *network_policies.manifests(context, {child.role for child in found}),
        *_disruption_budgets(context),
    ]


def _disruption_budgets(context: JobContext) -> list[Manifest]:
    """Return the budgets of roles with two or more pods: with one, it would block a drain. None applies to Jobs."""
    scaling, counts = context.spec.reward.workers.autoscaling, dict[str, int]()
    for child in children(context):
        if names.ROLES[child.role].budgeted and child.kind == "Deployment":
            least = scaling.min_replicas if scaling and child.replicas is None else child.pods
            counts[child.role] = counts.get(child.role, 0) + least
    return [disruption_budget(context, role) for role, count in counts.items() if count >= 2]


def _gang(context: JobContext, templates: Templates) -> list[Child]:
    """Return the children in the job's group, as frozen: the operator that froze them may have left others outside."""
    grouped = (child for child in children(context) if names.ROLES[child.role].grouped)
    return [child for child in grouped if is_member(templates[child.name]["template"])]


def _pod_groups(context: JobContext, templates: Templates) -> list[Manifest]:
    """Return the PodGroup of a gang (KEP-4671). Its count is immutable, and so are replicas of rollouts.

    The trainer's next attempt and the replacement of a rollout join it again: running pods count.
    """
    if context.spec.scheduling.gang == "none":
        return []
    count = sum(child.pods for child in _gang(context, templates))
    spec = {"schedulingPolicy": {"gang": {"minCount": count}}}
    return [context.manifest(POD_GROUP, context.metadata(context.run, "gang"), spec)]


def gang_deployments(context: JobContext, templates: Templates) -> frozenset[str]:
    """Return the names of the Deployments whose pods belong to the job's gang."""
    return frozenset(child.owner for child in _gang(context, templates) if child.kind == "Deployment")


def fixed_replicas(context: JobContext) -> dict[str, int | None]:
    """Return the replicas of each Deployment of a running job by name; None if an autoscaler sets them."""
    return {child.owner: child.replicas for child in children(context) if child.kind == "Deployment"}
