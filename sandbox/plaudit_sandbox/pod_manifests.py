"""Write the objects that machines on Kubernetes are made of, and read what Kubernetes reports of them, as plain data.

A machine is two pods, one after the other, and "restricted" Pod Security admits both:

- the agent's: ``machine``, where its commands run, and ``keeper``, a second container of the same image in which
  nothing of the agent ever runs. The root of both is read only, so no program of the image can be changed.
- the tests': the same two, with a copy of the agent's files.

What the agent may write to is one volume, ``files``, with the folders of ``machine.WRITABLE`` and the workdir. The
keeper mounts it read only. A third container, ``fill``, starts before both and ends before them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from plaudit_sandbox.archives import MOST_ENTRIES, PAGE_BYTES
from plaudit_sandbox.machine import WRITABLE, Ending, MachineLimits
from plaudit_sandbox.verification import READ_BESIDE_BIN

Object = Mapping[str, Any]
Network = Literal["none", "public"]
LABEL: Final = "plaudit.dev/machine"
"""The name of the agent's pod; also on the pods of its tests."""
ROLE_LABEL: Final = "plaudit.dev/machine-role"
WITNESS_LABEL: Final = "plaudit.dev/machine-witness"
"""On ``witness_pod`` alone."""
USED_LABEL: Final = "plaudit.dev/machine-used"
"""On an agent's pod from its first command on; whatever happens in one before is not its agent's doing."""
NETWORK_LABEL: Final = "plaudit.dev/machine-network"
MACHINE: Final = "machine"
KEEPER: Final = "keeper"
FILL: Final = "fill"
FILES: Final = "/plaudit/files"
GIVEN: Final = "/plaudit/given"
LOGS: Final = "/plaudit/logs"
_CONTROL = "/plaudit/control"
END: Final = f": > {_CONTROL}/end"
"""Ends the machine's first process, and the kernel then ends all others. Its container mounts the file read only."""
LOADED: Final = f": > {_CONTROL}/loaded"
_FIRST_PROCESS = f"while [ ! -e {_CONTROL}/end ]; do sleep 0.3 || sleep 1; done"
_UNTIL_LOADED = f"while [ ! -e {_CONTROL}/loaded ]; do sleep 0.1 || sleep 1; done"
_COUNT_EVERY_S = 20
_TOO_MANY = 28
"""The keeper's exit code once it has found more files than a machine may hold."""
_SMALL = "64Mi"
_LOST_AFTER_S = 30
"""After which a pod is deleted whose node Kubernetes finds lost."""
_WITNESS_S = 300
_FIRST_USER, _USERS = 1_000_000_000, 1_000_000_000
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16")
_PRIVATE_V6 = ("fc00::/7", "fe80::/10")
_OWN_FIELDS = (
    *("activeDeadlineSeconds", "automountServiceAccountToken", "containers", "enableServiceLinks"),
    *("ephemeralContainers", "hostIPC", "hostNetwork", "hostPID", "hostname", "initContainers", "restartPolicy"),
    *("shareProcessNamespace", "terminationGracePeriodSeconds"),
)
_OF_PROGRAMS = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "plaudit", "proc", "run", "sbin")
_OF_PROGRAMS_TOO = ("solution", "sys", "tests", "usr")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError")
_HOPELESS_CLAIMS = (
    *("ClaimExpired", "EnvVarsInjectionRejected", "InvalidConfiguration", "InvalidMetadata", "PodFailed"),
    *("PodSucceeded", "SandboxExpired", "VolumeClaimTemplatesError"),
)
"""Those that Agent Sandbox's own client does not wait for either."""
AGENT_SANDBOX: Final = "extensions.agents.x-k8s.io/v1beta1"
_KEPT_BY_ITSELF = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@dataclass(frozen=True)
class PodSettings:
    """What a machine's pods are made of."""

    image: str
    """Its programs; ``sh``, ``cp``, ``head``, ``tar`` and ``du`` must be among them."""
    network: Network = "none"
    cpus: float = 1.0
    workdir: str = "/app"
    """Where the agent works: the folder becomes one that it may write to."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """By which pods can be found and removed, such as ``plaudit.dev/run``."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Of the pods: ``metadata`` and ``spec`` (runtimeClassName, nodeSelector, tolerations, securityContext, …)."""
    owner: Mapping[str, str] | None = None
    """``apiVersion``, ``kind``, ``name`` and ``uid`` of an object of the same namespace, which takes the pods along
    when it is deleted."""
    lifetime_s: int = 86_400
    """Kubernetes ends the pods after this time, whoever has forgotten them."""
    shares_template: bool = False
    """Many machines have one template, and so one user: their processes cannot be counted by it."""

    def places(self) -> tuple[str, ...]:
        """Return the folders that the agent may write to, without a leading slash."""
        workdir = PurePosixPath(self.workdir).relative_to("/")
        if not workdir.parts or workdir.parts[0] in WRITABLE:
            return WRITABLE
        return (*WRITABLE, str(workdir))

    @property
    def has_own_user(self) -> bool:
        """Tell whether a machine runs as a user that no other has."""
        chosen = (self.template.get("spec") or {}).get("securityContext", {})
        return not self.shares_template and "runAsUser" not in chosen


def is_writable(path: str, settings: PodSettings) -> bool:
    """Tell whether a path lies in a folder that the agent may write to."""
    return any(PurePosixPath(path).is_relative_to(f"/{place}") for place in settings.places())


def workdir_problem(workdir: str) -> str:
    """Return why a machine cannot work in a folder; empty if it can."""
    parts = PurePosixPath(workdir).parts[1:]
    if ".." in parts or (parts and parts[0] in (*_OF_PROGRAMS, *_OF_PROGRAMS_TOO) and parts[:2] != ("usr", "src")):
        return f"the workdir {workdir} holds programs or belongs to the machine, which a pod mounts read only: use /app"
    return ""


def template_problem(template: Mapping[str, Any]) -> str:
    """Return which field of a pod template a machine decides itself; empty if there is none."""
    found = [name for name in _OWN_FIELDS if name in (template.get("spec") or {})]
    return f"a machine's pod template must not set spec.{found[0]}: leave it out" if found else ""


def agent_pod(name: str, settings: PodSettings, limits: MachineLimits) -> dict[str, Any]:
    """Return the pod in which an agent works."""
    files = _writable(settings)
    return _pod(
        name,
        settings,
        limits,
        labels={LABEL: name, ROLE_LABEL: "agent"},
        owners=[{**settings.owner}] if settings.owner else [],
        fill=(_fill(settings), [_mount("files", FILES)]),
        machine=[
            *files,
            _mount("scratch", "/run", sub_path="run"),
            _mount("scratch", "/solution", sub_path="solution"),
        ],
        keeper=[_mount("files", FILES, read_only=True)],
    )


def tests_pod(
    name: str, agent: Object, settings: PodSettings, limits: MachineLimits, *, is_separate: bool
) -> dict[str, Any]:
    """Return the pod of the tests, which Kubernetes deletes with the agent's.

    Its ``fill`` waits until the provider has put the agent's files and the tests into the volumes; with
    ``is_separate`` the image's own files are there first.
    """
    metadata = agent["metadata"]
    owners = [{**settings.owner}] if settings.owner else []
    if "uid" in metadata:  # it may be gone
        owners = [{"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}]
    files = [each for each in _writable(settings) if each["mountPath"] != "/logs"]
    return _pod(
        name,
        settings,
        limits,
        labels={LABEL: metadata["name"], ROLE_LABEL: "tests"},
        owners=owners,
        fill=(
            f"{_fill(settings)}\n: > {_CONTROL}/filled\n{_UNTIL_LOADED}" if is_separate else _UNTIL_LOADED,
            [_mount("files", FILES), _mount("given", GIVEN), _mount("logs", LOGS)],
        ),
        machine=[
            *files,
            _mount("scratch", "/run", sub_path="run"),
            _mount("given", "/tests", sub_path="tests", read_only=True),
            _mount("logs", "/logs"),
        ],
        keeper=[_mount("files", FILES, read_only=True), _mount("logs", LOGS, read_only=True)],
    )


def _pod(
    name: str,
    settings: PodSettings,
    limits: MachineLimits,
    *,
    labels: Mapping[str, str],
    owners: list[dict[str, str]],
    fill: tuple[str, list[dict[str, Any]]],
    machine: list[dict[str, Any]],
    keeper: list[dict[str, Any]],
) -> dict[str, Any]:
    given: Mapping[str, Any] = settings.template.get("spec") or {}
    metadata: Mapping[str, Any] = settings.template.get("metadata") or {}
    control = _mount("control", _CONTROL)
    whose = settings.image if settings.shares_template else name
    user = _FIRST_USER + int.from_bytes(hashlib.sha256(whose.encode()).digest()[:8]) % _USERS
    script, filled = fill
    of_machine = {
        "cpu": f"{max(int(settings.cpus * 1000), 1)}m",
        "memory": str(limits.memory_bytes),
        "ephemeral-storage": str(limits.disk_bytes + (64 << 20)),
    }
    of_keeper = {"cpu": "10m", "memory": "16Mi", "ephemeral-storage": "16Mi"}
    environment = [{"name": "HOME", "value": "/root"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**(metadata.get("labels") or {}), **settings.labels, **labels, NETWORK_LABEL: settings.network},
            "annotations": {**_KEPT_BY_ITSELF, **(metadata.get("annotations") or {})},
            "ownerReferences": owners,
        },
        "spec": {
            **given,
            "tolerations": [*(given.get("tolerations") or ()), *_lost_soon(given.get("tolerations") or ())],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": settings.lifetime_s,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": False,
            "hostname": "sandbox",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
                **(given.get("securityContext") or {}),
            },
            "initContainers": [_container(FILL, settings.image, script, of_machine, of_machine, [*filled, control])],
            "containers": [
                {
                    **_container(
                        MACHINE,
                        settings.image,
                        _FIRST_PROCESS,
                        of_machine,
                        of_machine,
                        [*machine, {**control, "readOnly": True}],
                    ),
                    "workingDir": "/",
                    "env": environment,
                },
                _container(
                    KEEPER,
                    settings.image,
                    _keep(limits),
                    of_keeper,
                    {**of_keeper, "cpu": "1", "memory": "128Mi"},
                    [*keeper, control],
                ),
            ],
            "volumes": [
                {"name": "files", "emptyDir": {"sizeLimit": str(limits.disk_bytes)}},
                *({"name": each, "emptyDir": {"sizeLimit": _SMALL}} for each in ("scratch", "control", "logs")),
                {"name": "given", "emptyDir": {}},
                *(given.get("volumes") or ()),
            ],
        },
    }


def _keep(limits: MachineLimits) -> str:
    """Return the keeper's script, which ends the machine where it holds more files than a copy of it may.

    Kubernetes does not count the inodes of a pod. On a node that has none left it evicts pods, whoever used them up.
    """
    most = min(limits.disk_bytes // PAGE_BYTES, MOST_ENTRIES)
    return f"""\
while :; do
  sleep {_COUNT_EVERY_S}
  if [ $(du -a {FILES} 2>/dev/null | head -n {most} | wc -l) -ge {most} ]; then {END}; exit {_TOO_MANY}; fi
done"""


def is_used(pod: Object) -> bool:
    """Tell whether something of its agent may have run in a pod."""
    return USED_LABEL in pod["metadata"]["labels"]


def witnesses(pods: Iterable[Object], pod: Object) -> list[str]:
    """Return the machines' other pods on the node of one, whose keepers run commands if the node does."""
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
    return [
        each["metadata"]["name"]
        for each in pods
        if each["metadata"]["name"] != name
        and each["spec"].get("nodeName") == node
        and is_running(each, KEEPER)
        and not ending_of(each)
    ]


def witness_pod(name: str, pod: Object) -> dict[str, Any]:
    """Return a small pod like another on its node, with a keeper alone. It is removed as a pod of tests is."""
    metadata, spec = pod["metadata"], pod["spec"]
    keeper = next(each for each in spec["containers"] if each["name"] == KEEPER)
    labels = {key: value for key, value in metadata["labels"].items() if key.startswith("plaudit.dev/")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**labels, ROLE_LABEL: "tests", WITNESS_LABEL: "yes"}},
        "spec": {
            **spec,
            "activeDeadlineSeconds": _WITNESS_S,
            "initContainers": [],
            "containers": [{**keeper, "volumeMounts": []}],
            "volumes": [],
        },
    }


def _lost_soon(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tolerations with which a pod of a lost node is given up early, where the template has none of its own.

    Kubernetes's own five minutes are for pods that may come back. A machine does not, and its sample waits for it.
    """
    tolerated = {each.get("key") for each in given if each.get("effect") in (None, "", "NoExecute")}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_AFTER_S}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in tolerated and None not in tolerated
    ]


def _container(
    name: str, image: str, script: str, requests: Object, limits: Object, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "command": ["sh", "-c", script],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": dict(requests), "limits": dict(limits)},
        "volumeMounts": mounts,
    }


def _mount(volume: str, path: str, *, sub_path: str = "", read_only: bool = False) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": volume, "mountPath": path}
    if sub_path:
        mount["subPath"] = sub_path
    return {**mount, "readOnly": True} if read_only else mount


def _writable(settings: PodSettings) -> list[dict[str, Any]]:
    return [_mount("files", f"/{place}", sub_path=place) for place in settings.places()]


def _fill(settings: PodSettings) -> str:
    """Return the script that copies the image's own files into the volume, and reports its workdir and its ``PATH``.

    Files that the machine's user cannot read stay out.
    """
    return f"""\
for place in {shlex.join(settings.places())}; do
  mkdir -p "{FILES}/$place"
  if [ -d "/$place" ]; then cp -a "/$place/." "{FILES}/$place/" 2>/dev/null; fi
  chmod u+rwx "{FILES}/$place"
done
chmod 1777 "{FILES}/"tmp
printf '%s\\n%s' "$(pwd)" "$PATH" > /dev/termination-log"""


STAGED: Final = f"{FILES}/.artifacts"
"""Where artifacts lie before they take their places; no machine sees it."""
UNTIL_FILLED: Final = f"while [ ! -e {_CONTROL}/filled ]; do sleep 0.1 || sleep 1; done"


def placement(artifacts: Iterable[str]) -> str:
    """Return the script that puts each staged artifact in the place of what the image has there."""
    return f"""\
place() {{
  if [ -e "{STAGED}$1" ]; then rm -rf "$2" && mkdir -p "${{2%/*}}" && mv "{STAGED}$1" "$2" || exit 1; fi
}}
for path in {shlex.join(artifacts)}; do
  case "$path" in /logs/*) place "$path" "{LOGS}/${{path#/logs/}}" ;; *) place "$path" "{FILES}$path" ;; esac
done
rm -rf {STAGED}"""


def renewal(programs: Iterable[str], settings: PodSettings) -> str:
    """Return the script that puts the image's own programs in the place of the agent's.

    Args:
        programs: From ``program_folders``. A link of the image on the way to one is put there as well.
    """
    below = "|".join(f"{shlex.quote(f'/{place}')}/*" for place in settings.places())
    calls = "\n".join(f"renew {shlex.quote(path)}" for path in programs)
    return f"""\
renew() {{
  case "$1" in {below}) ;; *) return 0 ;; esac
  path= left="${{1#/}}"
  while [ -n "$left" ]; do
    path="$path/${{left%%/*}}"
    case "$left" in */*) left="${{left#*/}}" ;; *) left= ;; esac
    copy="{FILES}$path"
    if [ -L "$path" ]; then
      rm -rf "$copy" && cp -a "$path" "$copy" && renew "$(readlink -f "$path${{left:+/$left}}")"
      return
    fi
    if [ -z "$left" ]; then
      rm -rf "$copy"
      if [ -e "$path" ]; then cp -a "$path" "$copy" 2>/dev/null || :; fi
    elif [ -L "$copy" ] || [ ! -d "$copy" ]; then
      rm -rf "$copy" && mkdir "$copy"
    fi
  done
}}
{calls}
:"""


def program_folders(path_variable: str, settings: PodSettings) -> list[str]:
    """Return what of the writable folders holds programs of the image: its ``PATH``, and what these read by themselves.

    Programs below the workdir are the agent's work.
    """
    found: dict[str, None] = {}
    for text in path_variable.split(":"):
        path = PurePosixPath(text)
        places = [PurePosixPath("/", place) for place in settings.places()]
        if ".." in path.parts or path.is_relative_to(settings.workdir) or path in places:
            continue
        if any(path.is_relative_to(place) for place in places):
            beside = READ_BESIDE_BIN if path.name == "bin" and path.parent not in places else ()
            found |= dict.fromkeys([str(path), *(str(path.with_name(name)) for name in beside)])
    return list(found)


def reported_by_image(pod: Object) -> tuple[str, str]:
    """Return the workdir and the ``PATH`` of the image, as ``fill`` reported them before the agent's first command."""
    message: str = _terminated(_status(pod, FILL)).get("message") or ""
    workdir, _, path_variable = message.partition("\n")
    return workdir, path_variable


def network_policy(network: Network) -> dict[str, Any]:
    """Return the policy of every machine with this network.

    Nobody reaches a machine. One with ``public`` reaches the internet and the cluster's name server, but no address of
    the private ranges, where the cluster and its neighbours are. A policy knows addresses and no host names.
    """
    internet = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}},
        {"ipBlock": {"cidr": "::/0", "except": list(_PRIVATE_V6)}},
    ]
    names = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"plaudit-machines-{network}", "labels": {NETWORK_LABEL: network}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: network}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [{"to": internet}, names] if network == "public" else [],
        },
    }


def claimed(pod: Object) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the template, the pool and the claim by which Agent Sandbox makes an agent's pod.

    All pods that differ in their names alone have one template and one pool. The pool keeps no pod of its own: whoever
    claims machines knows which ones are needed next.
    """
    metadata = pod["metadata"]
    labels = {name: value for name, value in metadata["labels"].items() if name != LABEL}
    blueprint = {
        "podTemplate": {"metadata": {"labels": labels, "annotations": metadata["annotations"]}, "spec": pod["spec"]},
        "networkPolicyManagement": "Unmanaged",  # ours select pods by a label
    }
    name = f"plaudit-{hashlib.sha256(json.dumps(blueprint, sort_keys=True).encode()).hexdigest()[:16]}"
    until = datetime.now(UTC) + timedelta(seconds=pod["spec"]["activeDeadlineSeconds"])

    def of_kind(kind: str, named: str, labels: Object, spec: Object) -> dict[str, Any]:
        about = {"name": named, "labels": {**labels}, "ownerReferences": metadata["ownerReferences"]}
        return {"apiVersion": AGENT_SANDBOX, "kind": kind, "metadata": about, "spec": spec}

    return (
        of_kind("SandboxTemplate", name, {**labels, LABEL: name}, blueprint),
        of_kind(
            "SandboxWarmPool", name, {**labels, LABEL: name}, {"replicas": 0, "sandboxTemplateRef": {"name": name}}
        ),
        of_kind(
            "SandboxClaim",
            metadata["name"],
            metadata["labels"],
            {
                "warmPoolRef": {"name": name},
                "lifecycle": {"shutdownTime": f"{until:%Y-%m-%dT%H:%M:%SZ}", "shutdownPolicy": "DeleteForeground"},
            },
        ),
    )


def claim_problem(claim: Object) -> tuple[str, bool]:
    """Return why a claim has no pod yet, in the words of Agent Sandbox, and whether it never gets one."""
    conditions = (claim.get("status") or {}).get("conditions") or ()
    ready = next((each for each in conditions if each["type"] == "Ready" and each["status"] != "True"), None)
    if ready is None:
        return "no controller of Agent Sandbox has answered it", False
    return f"{ready['reason']}: {ready.get('message') or ''}".strip(": "), ready["reason"] in _HOPELESS_CLAIMS


def label_value(text: str) -> str:
    """Return a text as the value of a label: itself where it can be one, else a digest of it."""
    return text if _LABEL_VALUE.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:32]


def is_running(pod: Object, container: str) -> bool:
    """Tell whether a container runs, as its node reported last."""
    return "running" in (_status(pod, container).get("state") or {})


def has_ended(pod: Object, container: str) -> bool:
    """Tell whether a container has ended for good: its node reported so."""
    return bool(_terminated(_status(pod, container)))


def ran_out_of_memory(pod: Object, container: str) -> bool:
    """Tell whether a container ended at its limit of memory."""
    return _terminated(_status(pod, container)).get("reason") == "OOMKilled"


def start_problem(pod: Object) -> tuple[str, bool]:
    """Return what keeps a pod from starting, as Kubernetes says it, and whether it is over."""
    status = pod["status"]
    states = _statuses(pod)
    waiting = [each["state"]["waiting"] for each in states if "waiting" in (each.get("state") or {})]
    reasons = [
        f"{each['reason']}: {each.get('message') or ''}".strip(": ")
        for each in waiting
        if each.get("reason", "PodInitializing") != "PodInitializing"
    ]
    unscheduled = [
        each["message"]
        for each in status.get("conditions") or ()
        if each["type"] == "PodScheduled" and each["status"] != "True" and each.get("message")
    ]
    is_over = status.get("phase") in ("Failed", "Succeeded") or any(each.get("reason") in _HOPELESS for each in waiting)
    ended = [_terminated(each) for each in states if is_over and _terminated(each).get("exitCode")]
    failed = [f"{each.get('reason')}: exit code {each['exitCode']}" for each in ended]
    problem = "; ".join([*reasons, *unscheduled]) or _words(status) or "; ".join(failed)
    return problem or f"it is {status.get('phase')}", is_over


def ending_of(pod: Object) -> Ending | str:
    """Return how the machine of a pod ended, or why it was lost; empty while it runs.

    ``memory`` and ``disk`` are its own doing, and ``exited`` is that of its first process. Any other text names what
    happened to its pod or its node.
    """
    status = pod["status"]
    words = _words(status)
    if status.get("reason") == "Evicted" and "exceed" in words and "node was low" not in words:
        return "disk"
    if ran_out_of_memory(pod, KEEPER) or _terminated(_status(pod, KEEPER)).get("exitCode") == _TOO_MANY:
        return "disk"  # it had more files to list than any task needs
    if status.get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
        return words or (f"it is {status.get('phase')}" if status.get("phase") != "Running" else "it is being deleted")
    if any(
        each["type"] == "DisruptionTarget" and each["status"] == "True" for each in status.get("conditions") or ()
    ) or is_unreachable(pod):
        return words or "its node does not answer"
    ended = _terminated(_status(pod, MACHINE))
    if not ended:
        return ""
    if ended.get("reason") == "OOMKilled":
        return "memory"
    return "exited" if ended.get("reason") in ("Completed", "Error") else f"{MACHINE}: {ended.get('reason')}"


def is_unreachable(pod: Object) -> bool:
    """Tell whether its node has not reported for a while: a pod is not ready though its containers run."""
    ready = next((each for each in pod["status"].get("conditions") or () if each["type"] == "Ready"), None)
    running = all(is_running(pod, name) for name in (MACHINE, KEEPER))
    return ready is not None and ready["status"] != "True" and running


def _words(status: Object) -> str:
    return ": ".join(each for each in (status.get("reason"), status.get("message")) if each).strip()


def _status(pod: Object, container: str) -> Mapping[str, Any]:
    return next((each for each in _statuses(pod) if each["name"] == container), {})


def _statuses(pod: Object) -> list[Mapping[str, Any]]:
    return [*(pod["status"].get("initContainerStatuses") or ()), *(pod["status"].get("containerStatuses") or ())]


def _terminated(status: Object) -> Mapping[str, Any]:
    terminated: Mapping[str, Any] = (status.get("state") or {}).get("terminated") or {}
    return terminated
