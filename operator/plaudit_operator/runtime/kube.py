"""The API server as the operator speaks to it: plain dictionaries in and out, over the official client's connections.

The client's own models would drop fields that this version of them does not know, and cost several times as much.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
import urllib3
from kubernetes import client, config

from plaudit_operator.names import FIELD_MANAGER, SCALE_MANAGER
from plaudit_operator.runtime.errors import KubeError, UnavailableError, error_of
from plaudit_operator.runtime.kinds import EVENT, Kind, kind_of

Object = dict[str, Any]

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_SILENT_WATCH_S = 120.0
"""A watch that says nothing, not even a bookmark (one a minute), for so long is broken."""
_PAGE = 200
_CREDENTIALS_FOR_S = 60.0
"""Tokens live for an hour, and are renewed when a fifth of it is left."""


class Kube(Protocol):
    """What the operator asks of an API server. Every method raises ``KubeError``."""

    def list(self, kind: Kind, namespace: str, selector: str) -> tuple[Iterable[Object], str]:
        """All objects of a kind, fetched while they are gone through, and the resourceVersion from which to watch."""

    def watch(self, kind: Kind, namespace: str, selector: str, version: str, timeout_s: int) -> Iterator[Object]:
        """Events (``type``, ``object``) after ``version``, until the server ends the watch."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """One object."""

    def create(self, manifest: Object) -> Object:
        """Creates an object; ``AlreadyExistsError`` when the name is taken, by whomever."""

    def apply(self, manifest: Object) -> Object:
        """Server-side apply, with force: the fields in the manifest become the operator's."""

    def patch(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str = "") -> Object:
        """JSON merge patch; a ``metadata.uid`` or ``resourceVersion`` in the body is a precondition."""

    def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> None:
        """Sets the number of replicas through the scale subresource."""

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        """Deletes that very object, its dependents in the background. Already gone is done."""


class ApiServer:
    """A real API server.

    Args:
        connections: connections kept open.
        api: a configured client; by default the pod's service account, else the kubeconfig.
    """

    def __init__(self, connections: int = 32, api: client.ApiClient | None = None) -> None:
        if api is None:
            configuration = client.Configuration()
            configuration.connection_pool_maxsize = connections
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                config.load_kube_config(client_configuration=configuration)
            api = client.ApiClient(configuration)
        self._api = api
        self._host = api.configuration.host
        self._pool: urllib3.PoolManager = api.rest_client.pool_manager
        self._credentials: dict[str, str] = {}
        self._credentials_asked_at = -_CREDENTIALS_FOR_S

    def list(self, kind: Kind, namespace: str, selector: str) -> tuple[Iterable[Object], str]:
        """See ``Kube``."""
        kind, query = self._served(kind), {"limit": str(_PAGE), "labelSelector": selector}
        first = self._request("GET", kind.path(namespace), query)
        return self._items(kind, namespace, query, first), first["metadata"]["resourceVersion"]

    def _items(self, kind: Kind, namespace: str, query: dict[str, str], page: Object) -> Iterator[Object]:
        """All of a list after its first page; the pages are of one resourceVersion."""
        while True:
            yield from page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return
            page = self._request("GET", kind.path(namespace), {**query, "continue": token})

    def watch(self, kind: Kind, namespace: str, selector: str, version: str, timeout_s: int) -> Iterator[Object]:
        """See ``Kube``."""
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        path = self._served(kind).path(namespace)
        response = self._send("GET", path, query, read_timeout_s=_SILENT_WATCH_S)
        try:
            for line in _lines(response):
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise error_of(status.get("code", 500), status.get("message", ""), status.get("reason", ""))
                yield event
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"the watch of {kind.plural} broke: {error}") from error
        finally:
            response.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """See ``Kube``."""
        return self._request("GET", self._served(kind).path(namespace, name))

    def create(self, manifest: Object) -> Object:
        """See ``Kube``."""
        kind, namespace = self._served(kind_of(manifest["kind"])), manifest["metadata"]["namespace"]
        body = {**manifest, "apiVersion": kind.api_version}
        return self._request("POST", kind.path(namespace), {"fieldManager": FIELD_MANAGER}, body)

    def apply(self, manifest: Object) -> Object:
        """See ``Kube``."""
        kind, metadata = self._served(kind_of(manifest["kind"])), manifest["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = kind.path(metadata["namespace"], metadata["name"])
        body = {**manifest, "apiVersion": kind.api_version}
        return self._request("PATCH", path, query, body, "application/apply-patch+yaml")

    def patch(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str = "") -> Object:
        """See ``Kube``."""
        path = self._served(kind).path(namespace, name, subresource)
        return self._request("PATCH", path, {"fieldManager": FIELD_MANAGER}, body, "application/merge-patch+json")

    def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> None:
        """See ``Kube``."""
        path, body = kind.path(namespace, name, "scale"), {"spec": {"replicas": replicas}}
        self._request("PATCH", path, {"fieldManager": SCALE_MANAGER}, body, "application/merge-patch+json")

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        """See ``Kube``."""
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._request("DELETE", self._served(kind).path(namespace, name), {}, body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _served(self, kind: Kind) -> Kind:
        """A kind in the version that this cluster has; asked anew each time, since clusters are upgraded."""
        if not kind.newer:
            return kind
        group = self._request("GET", f"/apis/{kind.api_version.partition('/')[0]}")
        versions = {version["groupVersion"] for version in group["versions"]}
        return replace(kind, api_version=next((v for v in kind.newer if v in versions), kind.api_version))

    def _authorization(self) -> dict[str, str]:
        """The header that says who this is; the client takes longer to tell than to send a request."""
        now = time.monotonic()
        if now - self._credentials_asked_at >= _CREDENTIALS_FOR_S:
            headers: dict[str, str] = {}
            self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
            self._credentials, self._credentials_asked_at = headers, now
        return self._credentials

    def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        response = self._send(method, path, query or {}, body, content_type)
        try:
            answer: Object = msgspec.json.decode(response.data or b"{}")
        except (ValueError, urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"{method} {path}: the answer broke off: {error}") from error
        finally:
            response.release_conn()
        return answer

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        content_type: str = "application/json",
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "Content-Type": content_type, **self._authorization()}
        try:
            response = self._pool.request(
                method,
                f"{self._host}{path}?{urlencode(query)}",
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=read_timeout_s),
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"{method} {path}: no answer: {error}") from error
        if response.status >= 300:
            raise _refusal(method, path, response)
        return response


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for chunk in response.stream(1 << 16, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _refusal(method: str, path: str, response: urllib3.BaseHTTPResponse) -> KubeError:
    try:
        text = response.data
        status = msgspec.json.decode(text) if text else {}
    except (ValueError, urllib3.exceptions.HTTPError, OSError):
        status = {}
    finally:
        response.release_conn()
    wait = response.headers.get("Retry-After", "")
    message = status.get("message") or f"HTTP {response.status}"
    return error_of(
        response.status, f"{method} {path}: {message}", status.get("reason", ""), float(wait) if wait.isdigit() else 0.0
    )


def event_manifest(job: Object, kind: str, reason: str, message: str, now: str) -> Object:
    """An Event about an RLJob, for ``kubectl describe``."""
    metadata = job["metadata"]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
