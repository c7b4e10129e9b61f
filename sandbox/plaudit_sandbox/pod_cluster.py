"""Call the API server for machines: pods as plain data, and processes in their containers over websockets.

It uses the connections and credentials of the official client (the extra ``pods`` of this distribution). The client's
own reader of websockets keeps reading while more arrives, and keeps all of it: a program that prints for ever would
hold it for ever. So the channels are read here, one frame at a time.
"""

from __future__ import annotations

import calendar
import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client, config
from kubernetes.stream.ws_client import create_websocket, get_websocket_url
from websocket import ABNF, WebSocketBadStatusException, WebSocketException, WebSocketTimeoutException

from plaudit_sandbox.pod_manifests import (
    AGENT_SANDBOX,
    LABEL,
    NETWORK_LABEL,
    ROLE_LABEL,
    Network,
    Object,
    claim_problem,
    claimed,
    network_policy,
)
from plaudit_wire.errors import ConfigurationError, InfrastructureError

_CONNECT_S, _READ_S = 5.0, 30.0
_ATTEMPTS = 6
_FIRST_WAIT_S = 0.3
_PASSING = (0, 429, 500, 502, 503, 504)
_CONNECTIONS = 64
_CREDENTIALS_FOR_S = 60.0
_SEND_S = 60.0
_PING_S = 20.0
_AFTER_END_S = 2.0
"""For which output is taken in after the exit code, where nobody closes the connection."""
_CHUNK_BYTES = 1 << 16
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_V5: Final = "v5.channel.k8s.io"
_NAMESPACE_OF_THIS_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SHOWN_CHARACTERS = 500
_POD_S, _GONE_S = 120.0, 60.0
"""How long to wait until the pod of a claim exists, and until it is gone."""


class ClusterError(InfrastructureError):
    """A call of the API server that failed; ``status`` is 0 without an answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PodCluster:
    """One namespace of a cluster, in which machines may be made."""

    def __init__(self, namespace: str = "") -> None:
        """Read the service account of this pod, or else the kubeconfig. Raises ``ConfigurationError``.

        Args:
            namespace: Empty: that of this pod, or of the kubeconfig's context.
        """
        configuration = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and _NAMESPACE_OF_THIS_POD.exists():
                config.load_incluster_config(configuration)
                found = _NAMESPACE_OF_THIS_POD.read_text().strip()
            else:
                # The package itself reads the variable once, when it is imported.
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
                _, context = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
                found = context["context"].get("namespace") or "default"
        except (config.ConfigException, OSError) as error:
            raise ConfigurationError(f"no cluster is configured: {error}. Set KUBECONFIG") from error
        configuration.connection_pool_maxsize = _CONNECTIONS
        self.namespace = namespace or found
        self._configuration = configuration
        self._api = client.ApiClient(configuration)
        self._pool: urllib3.PoolManager = self._api.rest_client.pool_manager
        self._pods = f"/api/v1/namespaces/{self.namespace}/pods"
        self._credentials: dict[str, str] = {}
        self._credentials_asked_at = -_CREDENTIALS_FOR_S

    def require(self, networks: Iterable[Network]) -> None:
        """Create the network policies of these modes where they are missing, and look for pods.

        Raises ``ConfigurationError`` with the API server's words where this is not allowed.
        """
        path = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        try:
            for network in networks:
                policy = network_policy(network)
                if not self._exists(f"{path}/{policy['metadata']['name']}"):
                    self._create(path, policy)
            self._request("GET", self._pods, {"limit": "1", "labelSelector": LABEL})
        except ClusterError as error:
            raise self._refused(error) from error

    def _refused(self, error: ClusterError) -> ConfigurationError | ClusterError:
        if error.status in (401, 403, 404):
            return ConfigurationError(f"machines cannot be made in namespace {self.namespace}: {error}")
        return error

    def controller(self, name: str) -> dict[str, str] | None:
        """Return the reference to what made a pod, such as its ReplicaSet; None if nothing did.

        Raises ``ClusterError``.
        """
        owners = self.read(name)["metadata"].get("ownerReferences") or []
        made = next((owner for owner in owners if owner.get("controller")), None)
        return made and {key: made[key] for key in ("apiVersion", "kind", "name", "uid")}

    def create(self, pod: Object) -> dict[str, Any]:
        """Create a pod and return it. Raises ``ClusterError`` with the API server's words."""
        return self._create(self._pods, pod)

    def _create(self, path: str, manifest: Object) -> dict[str, Any]:
        try:
            return self._request("POST", path, {"fieldValidation": "Strict"}, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            return self._request("GET", f"{path}/{manifest['metadata']['name']}")  # a try without an answer made it

    def read(self, name: str) -> dict[str, Any]:
        """Return a pod. Raises ``ClusterError``, with status 404 if it is gone."""
        return self._request("GET", f"{self._pods}/{name}")

    def label(self, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        """Add labels to a pod and return it. Raises ``ClusterError``."""
        return self._request("PATCH", f"{self._pods}/{name}", {}, {"metadata": {"labels": dict(labels)}})

    def find(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the machines' pods with these labels. Raises ``ClusterError``."""
        found: list[dict[str, Any]] = self._request("GET", self._pods, _selecting(labels))["items"]
        return found

    def remove(self, labels: Mapping[str, str]) -> None:
        """Delete the machines' pods with these labels at once, whatever runs in them. Raises ``ClusterError``."""
        self._request("DELETE", self._pods, _selecting(labels), {"gracePeriodSeconds": 0})

    def reap(self, labels: Mapping[str, str], held: Callable[[str], bool], older_than_s: float = 60.0) -> list[str]:
        """Delete the machines with these labels that nobody holds, and return their names.

        Args:
            held: Tells for the name of a machine whether somebody holds it.
            older_than_s: Younger ones stay: whoever makes one may not have written down yet that it does.
        """
        names = {each["metadata"]["labels"][LABEL] for each in self._made(labels) if _age_s(each) >= older_than_s}
        gone = sorted(name for name in names if not held(name))
        for name in gone:
            self.remove({LABEL: name})
        return gone

    def _made(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the objects with these labels that were made for machines."""
        return self.find(labels)

    def execute(self, name: str, container: str, script: str) -> PodProcess:
        """Start a process of ``sh`` in a container. Raises ``ClusterError``."""
        query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
        words = [("command", word) for word in ("sh", "-c", script)]
        url = get_websocket_url(f"{self._configuration.host}{self._pods}/{name}/exec", [*query, *words])
        for attempt in range(_ATTEMPTS):
            try:
                socket = create_websocket(self._configuration, url, self._authorization())
                return PodProcess(socket, f"{name}/{container}")
            except WebSocketBadStatusException as error:
                status, words_of_server = error.status_code, _message(error.resp_body or b"") or str(error)
            except (WebSocketException, OSError) as error:
                status, words_of_server = 0, str(error)
            if status not in _PASSING[:2] or attempt == _ATTEMPTS - 1:
                break
            time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise ClusterError(f"no process can be started in {name}/{container}: {words_of_server}", status)

    def _request(
        self, method: str, path: str, query: Mapping[str, str] = {}, body: Object | None = None
    ) -> dict[str, Any]:
        url = f"{self._configuration.host}{quote(path)}" + (f"?{urlencode(query)}" if query else "")
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        for attempt in range(_ATTEMPTS):
            try:
                answer = self._pool.request(
                    method,
                    url,
                    headers={**self._authorization(), "content-type": kind},
                    body=None if body is None else json.dumps(body),
                    timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
                    retries=False,
                )
                if answer.status < 300:
                    decoded: dict[str, Any] = answer.json()
                    return decoded
                status, message = answer.status, _message(answer.data) or f"status {answer.status}"
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                status, message = 0, str(error)
            if status not in _PASSING or attempt == _ATTEMPTS - 1:
                break
            time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise ClusterError(f"{method} {path}: {message[:_SHOWN_CHARACTERS]}", status)

    def _exists(self, path: str, query: Mapping[str, str] = {}) -> bool:
        try:
            self._request("GET", path, query)
        except ClusterError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _authorization(self) -> dict[str, str]:
        now = time.monotonic()
        if now - self._credentials_asked_at >= _CREDENTIALS_FOR_S:
            headers: dict[str, str] = {}
            self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
            self._credentials, self._credentials_asked_at = headers, now
        return self._credentials


class ClaimCluster(PodCluster):
    """One namespace, in which Agent Sandbox makes the pods of agents for claims. Those of tests are made as ever."""

    def __init__(self, namespace: str = "") -> None:
        """Read what ``PodCluster`` reads. Raises ``ConfigurationError``."""
        super().__init__(namespace)
        self._claims, self._pools, self._templates = (
            f"/apis/{AGENT_SANDBOX}/namespaces/{self.namespace}/{plural}"
            for plural in ("sandboxclaims", "sandboxwarmpools", "sandboxtemplates")
        )
        self._known: set[str] = set()
        """Templates that exist, with their pools."""

    def require(self, networks: Iterable[Network]) -> None:
        """Look for the kinds of Agent Sandbox as well. Raises as ``PodCluster.require`` does."""
        super().require(networks)
        try:
            if self._exists(self._claims, {"limit": "1"}):
                return
        except ClusterError as error:
            raise self._refused(error) from error
        raise ConfigurationError(
            f"this cluster serves no SandboxClaim of {AGENT_SANDBOX}: install Agent Sandbox with its extensions, or "
            "set sandboxes.provider: pods"
        )

    def create(self, pod: Object) -> dict[str, Any]:
        """Claim an agent's pod, wait until it exists, and return it; create any other."""
        metadata = pod["metadata"]
        if metadata["labels"][ROLE_LABEL] != "agent":
            return super().create(pod)
        template, pool, claim = claimed(pod)
        named = template["metadata"]["name"]
        if named not in self._known:
            self._create(self._templates, template)
            self._create(self._pools, pool)
            self._known.add(named)
        try:
            self._create(self._claims, claim)
            self._wait_for_pod(metadata["name"])
        except ClusterError:
            self._known.discard(named)  # somebody may have deleted it
            raise
        # Agent Sandbox lets claims give a pod no labels of other domains.
        return self.label(metadata["name"], {LABEL: metadata["name"]})

    def _wait_for_pod(self, name: str) -> None:
        until_s, wait_s = time.monotonic() + _POD_S, 0.05
        while not self._exists(f"{self._pods}/{name}"):
            problem, is_over = claim_problem(self._request("GET", f"{self._claims}/{name}"))
            if is_over or time.monotonic() > until_s:
                raise ClusterError(f"the SandboxClaim {name} gets no pod: {problem}", 0)
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.3, 1.0)

    def remove(self, labels: Mapping[str, str]) -> None:
        """Delete claims, and wait until their pods are gone; of a whole run, its templates and pools as well."""
        super().remove({**labels, ROLE_LABEL: "tests"})
        if labels.get(ROLE_LABEL) == "tests":
            return
        kinds = [self._claims]
        if LABEL not in labels:
            kinds += [self._pools, self._templates]
            self._known.clear()
        for path in kinds:
            self._request("DELETE", path, _selecting(labels), {"propagationPolicy": "Foreground"})
        until_s = time.monotonic() + _GONE_S
        while left := self.find(labels):
            if time.monotonic() > until_s:
                raise ClusterError(f"the pod {left[0]['metadata']['name']} outlives its SandboxClaim", 0)
            time.sleep(0.2)

    def _made(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return claims: a killed process may have labelled no pod."""
        found: list[dict[str, Any]] = self._request("GET", self._claims, _selecting(labels))["items"]
        return found


class PodProcess:
    """One process in a container. All methods block, and raise ``ClusterError`` where the connection breaks."""

    def __init__(self, socket: Any, where: str) -> None:
        self.exit_code: int | None = None
        """Its exit code, once it has ended; None as well if nobody reported one."""
        self.is_over = False
        self.problem = ""
        """Why no exit code was reported, in the words of API server or kubelet."""
        self.is_refused = False
        """Its node reported that it could not be started or followed."""
        self.errors = bytearray()
        """The beginning of its standard error."""
        self._socket = socket
        self.where = where
        self._heard_at = time.monotonic()
        self._takes_input = True
        self._until_s = float("inf")

    def write(self, data: bytes) -> int:
        """Give it more standard input."""
        self._socket.settimeout(_SEND_S)
        for start in range(0, len(data), _CHUNK_BYTES):
            self._send(bytes([_STDIN]) + data[start : start + _CHUNK_BYTES])
        return len(data)

    def end_input(self) -> None:
        """Close its standard input, where the API server can (1.30 and newer); BusyBox's tar waits for it."""
        if self._takes_input and self._socket.getsubprotocol() == _V5:
            self._send(bytes([_CLOSE, _STDIN]))
        self._takes_input = False

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, opcode=ABNF.OPCODE_BINARY)
        except (WebSocketException, OSError) as error:
            self._collect()
            raise ClusterError(f"{self.where}: {self.problem or error}", 0) from error

    def _collect(self) -> None:
        """Read what the other end said before it went."""
        for _ in range(8):
            if not self.is_over:
                self.receive(0.2)

    def receive(self, wait_s: float) -> bytes:
        """Return more of its standard output; empty when nothing came for a while, or at its end."""
        if time.monotonic() >= self._until_s:
            self.is_over = True
        if self.is_over:
            return b""
        self._socket.settimeout(max(min(wait_s, self._until_s - time.monotonic()), 0.001))
        try:
            code, frame = self._socket.recv_data_frame(True)
        except (WebSocketTimeoutException, ssl.SSLWantReadError):
            return self._ping()
        except (WebSocketException, OSError, ValueError) as error:
            self._close(f"the connection broke: {error}")
            return b""
        self._heard_at = time.monotonic()
        if code == ABNF.OPCODE_CLOSE:
            self._close("the connection was closed")
        data: bytes = frame.data
        if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or len(data) < 2:
            return b""
        if data[0] == _STDERR:
            self.errors += data[1 : 1 + max(0, _SHOWN_CHARACTERS - len(self.errors))]
        elif data[0] == _STATUS:
            self._end(data[1:])
        return data[1:] if data[0] == _STDOUT else b""

    def _ping(self) -> bytes:
        """Keep what lies between from closing a silent connection."""
        if time.monotonic() - self._heard_at > _PING_S:
            self._heard_at = time.monotonic()
            try:
                self._socket.settimeout(_SEND_S)
                self._socket.ping()
            except (WebSocketException, OSError) as error:
                self.is_over, self.problem = True, f"the connection broke: {error}"
        return b""

    def _close(self, problem: str) -> None:
        self.is_over = True
        if self._until_s == float("inf"):  # it had not ended
            self.problem = self.problem or problem

    def _end(self, status: bytes) -> None:
        """Take in how it ended. What it wrote before may arrive after this, until the connection is closed."""
        self._until_s = time.monotonic() + _AFTER_END_S
        try:
            reported = json.loads(status)
            causes = (reported.get("details") or {}).get("causes") or ()
            codes = [int(each["message"]) for each in causes if each.get("reason") == "ExitCode"]
        except (ValueError, AttributeError, KeyError):
            self.problem = status.decode(errors="replace")[:_SHOWN_CHARACTERS]
            return
        if reported.get("status") == "Success":
            self.exit_code = 0
        elif codes:
            self.exit_code = codes[0]
        else:
            self.problem, self.is_refused = str(reported.get("message"))[:_SHOWN_CHARACTERS], True

    def close(self) -> None:
        """Close the connection, which does not end the process."""
        self._socket.settimeout(1.0)
        try:
            self._socket.shutdown()
        except (WebSocketException, OSError):
            return


class ProcessOutput:
    """The standard output of a process as a file; leaving it early is fine."""

    def __init__(self, process: PodProcess, until_s: float) -> None:
        """Read until ``time.monotonic()`` is ``until_s``."""
        self._process = process
        self._until_s = until_s
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        """Return at most so many further bytes; empty at the end. Raises ``ClusterError``."""
        while not self._left and not self._process.is_over:
            if time.monotonic() > self._until_s:
                raise ClusterError("the files of a machine could not be read in time", 0)
            self._left = self._process.receive(1.0)
        if not self._left and self._process.exit_code is None:
            raise ClusterError(f"the files of a machine cannot be read: {self._process.problem}", 0)
        size = len(self._left) if size < 0 else size
        data, self._left = self._left[:size], self._left[size:]
        return data


def _selecting(labels: Mapping[str, str]) -> dict[str, str]:
    """Select machines alone, whatever the labels are."""
    return {"labelSelector": ",".join([LABEL, NETWORK_LABEL, *(f"{name}={value}" for name, value in labels.items())])}


def _age_s(pod: Object) -> float:
    created = time.strptime(pod["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ")
    return time.time() - calendar.timegm(created)


def _message(body: bytes | str) -> str:
    """Return the message of a ``Status``, or the body itself where it is none."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN_CHARACTERS]
