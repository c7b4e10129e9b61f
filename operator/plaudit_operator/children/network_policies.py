"""Restrict egress of reward workers and gateways, and ingress to Redis and to the pods of all roles.

Policies cannot match host names: for an endpoint outside the cluster, its port is open to all public addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from plaudit_job.processes import machines_run
from plaudit_job.spec.rewards import KINDS, EgressRule
from plaudit_job.spec.rljob import EnvironmentServerSpec
from plaudit_operator import names
from plaudit_operator.children import roles, transport
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.runtime.kinds import NETWORK_POLICY
from plaudit_wire.redis_access import users

_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10")
_PRIVATE_6 = ("fc00::/7", "fe80::/10")
_PUBLIC: list[Manifest] = [
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}},
    {"ipBlock": {"cidr": "::/0", "except": list(_PRIVATE_6)}},
]
_RUN_SAMPLES = (roles.ROLLOUT_ROLE, roles.REWARD_ROLE, roles.TRAINER_ROLE)
"""Roles that use environments and machines; the trainer lists their tools."""
_DNS: Manifest = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def manifests(context: JobContext, present: Collection[str]) -> list[Manifest]:
    """Return the policies of a job with these roles.

    If the operator's settings turn policies off, return only those that open a closed pod.
    """
    opened = [_agents(context)] if context.spec.programs_in_pods else []
    if not context.settings.network_policies:
        return opened
    policies = [policy(context) for role, policy in _POLICIES.items() if role in present]
    allowed = _to_rollouts(context)
    return [*opened, *policies, *([_ingress(context, roles.ROLLOUT_ROLE, *allowed)] if allowed else [])]


def _policy(context: JobContext, role: str, spec: Manifest) -> Manifest:
    metadata = context.metadata(context.role_object(role), role)
    return context.manifest(NETWORK_POLICY, metadata, {**_pods(context.labels(role)), **spec})


def _ingress(context: JobContext, role: str, *allowed: Manifest) -> Manifest:
    return _policy(context, role, {"policyTypes": ["Ingress"], "ingress": list(allowed)})


def _agents(context: JobContext) -> Manifest:
    """Return the policy that opens agents' machines to the endpoint of rollouts. Their broker closes them for all else.

    Pods of tests have another role, and stay closed.
    """
    metadata = context.metadata(context.role_object("machines"), roles.SANDBOXES_ROLE)
    egress = [_to_role(context, roles.ROLLOUT_ROLE, names.ENDPOINT_PORT)]
    spec = {**_pods(_agent_labels(context)), "policyTypes": ["Egress"], "egress": egress}
    return context.manifest(NETWORK_POLICY, metadata, spec)


def _agent_labels(context: JobContext) -> dict[str, str]:
    return {names.LABEL_RUN: machines_run(Path(context.run_folder)), names.LABEL_MACHINE_ROLE: "agent"}


def _to_rollouts(context: JobContext) -> list[Manifest]:
    """Return who reaches rollouts, where replicas of several pods or programs in machines do; else empty: everybody."""
    allowed = []
    if roles.rollout_service(context):
        allowed.append({"from": [_pods(context.labels(roles.ROLLOUT_ROLE))]})
    if context.spec.programs_in_pods:
        allowed.append({"from": [_pods(_agent_labels(context))], "ports": [_tcp(names.ENDPOINT_PORT)]})
    return allowed


def _pods(labels: Mapping[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _pods_of_roles(context: JobContext, listed: Sequence[str]) -> Manifest:
    expression = {"key": names.LABEL_ROLE, "operator": "In", "values": list(listed)}
    return {"podSelector": {"matchLabels": {names.LABEL_JOB: context.name}, "matchExpressions": [expression]}}


def _reward(context: JobContext) -> Manifest:
    """Close ingress (policies do not apply to kubelets' probes); open egress to what the job declares."""
    egress = [_DNS, _to_redis(context)]
    if context.spec.reward.model_scorers:
        egress.append(_to_role(context, roles.MODEL_ROLE, names.MODEL_PORT))
    if context.spec.has_broker:
        egress.append(_to_role(context, roles.SANDBOXES_ROLE, names.SANDBOXES_PORT))
    egress += [_to_environment(context, server) for server in context.spec.environments]
    egress += [_to_endpoint(context, url) for url in _endpoints(context)]
    egress += [_declared(rule) for rule in context.spec.reward.network_policy.egress]
    return _policy(context, roles.REWARD_ROLE, {"policyTypes": ["Ingress", "Egress"], "egress": egress})


def _to_environment(context: JobContext, server: EnvironmentServerSpec) -> Manifest:
    pods = _pods({**context.labels(roles.ENVIRONMENT_ROLE), **roles.environment_labels(server)})
    return {"to": [pods], "ports": [_tcp(server.port)]}


def _environments(context: JobContext) -> Manifest:
    """Return the policy of environments: the job's own processes that use them."""
    ports = [_tcp(port) for port in sorted({server.port for server in context.spec.environments})]
    return _ingress(context, roles.ENVIRONMENT_ROLE, {"from": [_pods_of_roles(context, _RUN_SAMPLES)], "ports": ports})


def _to_redis(context: JobContext) -> Manifest:
    if transport.managed(context):
        return _to_role(context, transport.ROLE, names.REDIS_PORT)
    address = urlsplit(context.redis_url)
    if namespace := _service_namespace(address.hostname or "", context.namespace):
        return {"to": [_namespace(namespace)]}
    return {"ports": [_tcp(address.port or names.REDIS_PORT)]}  # the network of an external Redis is unknown


def _to_role(context: JobContext, role: str, port: int) -> Manifest:
    return {"to": [_pods(context.labels(role))], "ports": [_tcp(port)]}


def _endpoints(context: JobContext) -> list[str]:
    """Return the distinct addresses that scorers name, by their kind."""
    scorers = context.spec.reward.scorers
    urls = [scorer.url for kind in KINDS for scorer in scorers if scorer.kind == kind and scorer.url]
    urls += [scorer.limits.shared.url for scorer in scorers if scorer.limits and scorer.limits.shared]
    return list(dict.fromkeys(urls))


def _to_endpoint(context: JobContext, url: str) -> Manifest:
    """Return the egress rule of an address: a Service's namespace, a private address, or all public addresses."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}[parts.scheme]
    namespace = _service_namespace(parts.hostname or "", context.namespace)
    if namespace:
        # The pods' port may be another than the Service's, which policies do not see.
        return {"to": [_namespace(namespace)]}
    if address := _private_address(parts.hostname or ""):
        return {"to": [{"ipBlock": {"cidr": address}}], "ports": [_tcp(port)]}
    return {"to": _PUBLIC, "ports": [_tcp(port)]}


def _private_address(host: str) -> str:
    """Return a literal address outside the public ranges as a CIDR of its own; else empty."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    ranges = (ipaddress.ip_network(cidr) for cidr in (*_PRIVATE, *_PRIVATE_6))
    return f"{address}/{address.max_prefixlen}" if any(address in each for each in ranges) else ""


def _service_namespace(host: str, own: str) -> str:
    """Return the namespace of ``service`` or ``service.namespace.svc…``; else empty."""
    if ":" in host:
        return ""
    labels = host.split(".")
    if len(labels) == 1:
        return own
    return labels[1] if len(labels) > 2 and labels[2] == "svc" else ""


def _declared(rule: EgressRule) -> Manifest:
    peer: Manifest = {"ipBlock": {"cidr": rule.cidr}} if rule.cidr else {}
    if rule.namespace_selector:
        peer["namespaceSelector"] = rule.namespace_selector
    if rule.pod_selector:
        peer["podSelector"] = rule.pod_selector
    allowed: Manifest = {"to": [peer]} if peer else {}
    return allowed | ({"ports": [_tcp(port) for port in rule.ports]} if rule.ports else {})


def _metrics(context: JobContext) -> Manifest:
    namespace = context.settings.monitoring_namespace
    peers = [_namespace(namespace), _namespace(context.settings.namespace)] if namespace else []
    allowed: Manifest = {"ports": [_tcp(names.METRICS_PORT)]} | ({"from": peers} if peers else {})
    return _ingress(context, roles.METRICS_ROLE, allowed)


def _model(context: JobContext) -> Manifest:
    """Return the policy of reward models: reward workers ask them, and Prometheus reads their metrics."""
    peers = [_pods(context.labels(roles.REWARD_ROLE))]
    if namespace := context.settings.monitoring_namespace:
        peers.append(_namespace(namespace))
    return _ingress(context, roles.MODEL_ROLE, {"from": peers, "ports": [_tcp(names.MODEL_PORT)]})


def _trainer(context: JobContext) -> Manifest:
    """Return the policy of the trainer: its own ranks, and rollouts that receive weights from them."""
    # Ranks rendezvous on one port, and then exchange gradients on ports that NCCL and Gloo choose.
    allowed, trainer = [{"from": [_pods(context.labels(roles.TRAINER_ROLE))]}], context.spec.trainer
    if trainer.weights.transfer == "direct":
        last = names.WEIGHTS_PORT + min(trainer.ranks, trainer.ranks_per_pod) - 1
        ports = [{**_tcp(names.WEIGHTS_PORT), "endPort": last}]
        allowed.append({"from": [_pods(context.labels(roles.ROLLOUT_ROLE))], "ports": ports})
    return _ingress(context, roles.TRAINER_ROLE, *allowed)


def _sandboxes(context: JobContext) -> Manifest:
    """Return the policy of the broker of machines: the job's own processes that use them, and Prometheus."""
    allowed: list[Manifest] = [{"from": [_pods_of_roles(context, _RUN_SAMPLES)], "ports": [_tcp(names.SANDBOXES_PORT)]}]
    if namespace := context.settings.monitoring_namespace:
        allowed.append({"from": [_namespace(namespace)], "ports": [_tcp(names.HEALTH_PORT)]})
    return _ingress(context, roles.SANDBOXES_ROLE, *allowed)


def _redis(context: JobContext) -> Manifest:
    # Every run has users for these, and only some have pods that connect.
    some = {roles.MODEL_ROLE: context.spec.reward.sleeping_models, roles.SANDBOXES_ROLE: context.spec.has_broker}
    connecting = [role for role in users(trains=context.spec.trains) if role in names.ROLES and role not in some]
    connecting += [role for role, connects in some.items() if connects]
    peers = [_pods_of_roles(context, connecting)]
    if not context.spec.trains:
        peers += _clients(context)
    if context.spec.reward.workers.autoscaling:
        peers.append(_namespace(context.settings.keda_namespace))
    return _ingress(context, transport.ROLE, {"from": peers, "ports": [_tcp(names.REDIS_PORT)]})


def _gateway(context: JobContext) -> Manifest:
    """Open ingress to clients, to jobs that refer to the service, and to Prometheus; egress to Redis and a canary."""
    peers = _clients(context)
    if context.revision:
        peers.append(_pods({f"{names.LABEL_USES}/{context.name}": "true"}))
    ingress: list[Manifest] = [{"from": peers, "ports": [_tcp(names.GATEWAY_PORT)]}]
    if namespace := context.settings.monitoring_namespace:
        ingress.append({"from": [_namespace(namespace)], "ports": [_tcp(names.HEALTH_PORT)]})
    egress = [_DNS, _to_redis(context)]
    if canary := context.spec.reward.gateway.canary:
        egress.append(_to_endpoint(context, canary.service.url))
    return _policy(
        context, roles.GATEWAY_ROLE, {"policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    )


_POLICIES: Mapping[str, Callable[[JobContext], Manifest]] = {
    roles.REWARD_ROLE: _reward,
    roles.METRICS_ROLE: _metrics,
    transport.ROLE: _redis,
    roles.MODEL_ROLE: _model,
    roles.ENVIRONMENT_ROLE: _environments,
    roles.GATEWAY_ROLE: _gateway,
    roles.TRAINER_ROLE: _trainer,
    roles.SANDBOXES_ROLE: _sandboxes,
}
"""The policy of each role that has one in every job; rollouts are open, unless their pods reach each other."""


def _clients(context: JobContext) -> list[Manifest]:
    """Return the pods that submit samples to a service, of its own namespace and of labelled ones."""
    clients = _pods({names.LABEL_CLIENT: context.name})
    namespaces = {"matchLabels": {names.LABEL_CLIENT_OF: context.namespace}}
    return [clients, {"namespaceSelector": namespaces, **clients}]


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}
