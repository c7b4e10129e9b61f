"""Call the API server with plain dictionaries, over the connections of the official client.

The client's own models drop fields that their version does not know, and cost several times as much. Errors, by whether
a retry helps:

    KubeError                  any response but success
    ├── NotFoundError          404: the object is missing
    ├── AlreadyExistsError     409 on create: another object has this name
    ├── ConflictError          409 otherwise: the object changed or was replaced
    ├── GoneError              410: the server no longer has the version of the watch; list again
    ├── InvalidError           400, 403, 422: a retry fails in the same way
    └── ApiUnavailableError    429, 5xx, no response: retry later
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3
from kubernetes import client, config

from plaudit_operator.runtime.kinds import Kind, kind_of

Object = dict[str, Any]
ManagedFields = Mapping[str, Any]
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_SILENT_WATCH_S = 120.0
"""A watch that sends nothing for this long, not even a bookmark (one a minute), is broken."""
_PAGE = 200
_CONNECTIONS = 32
"""Connections kept open."""
_TOO_LARGE = "Too large resource version"
"""The 504 of a server that was restored from a backup, for a version newer than its own."""
_STRICT = {"fieldValidation": "Strict"}
"""By default the API server drops unknown fields: a typo in ``pod.template`` would have no effect and no error."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Asked for after a write: the sender knows the rest of the object, so the server need not encode it."""
_CREDENTIALS_FOR_S = 60.0
"""The client renews a token when a fifth of its hour is left."""


class KubeError(Exception):
    """The API server did not report success; ``status`` is 0 without a response."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to wait; 0 if it does not."""


class NotFoundError(KubeError):
    """The object, or its kind, is missing."""


class AlreadyExistsError(KubeError):
    """An object with this name exists."""


class ConflictError(KubeError):
    """A precondition (uid, resourceVersion) did not hold."""


class GoneError(KubeError):
    """The resourceVersion of a watch is too old."""


class InvalidError(KubeError):
    """The server rejects the request for its content or its sender."""


class ApiUnavailableError(KubeError):
    """The API server is overloaded, broken or unreachable."""


def error_of(status: int, message: str, reason: str = "", retry_after_s: float = 0.0) -> KubeError:
    """Return the error for an HTTP status and the ``reason`` of a Status object."""
    kind: type[KubeError] = InvalidError
    if status == 404:
        kind = NotFoundError
    elif status == 409:
        kind = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    elif status == 410 or _TOO_LARGE in message:
        kind = GoneError
    elif status == 429 or status >= 500:
        kind = ApiUnavailableError
    return kind(message, status, retry_after_s)


class _Event(msgspec.Struct):
    """Hold one line of a watch."""

    type: str
    object: Object


_EVENT = msgspec.json.Decoder(_Event)


class ApiServer:
    """Call an API server, by default with the pod's service account, else the kubeconfig.

    Every method raises ``KubeError``. The fields that it writes belong to ``field_manager``, replica counts to
    ``<field_manager>-scale``.
    """

    def __init__(self, field_manager: str, api: client.ApiClient | None = None) -> None:
        if api is None:
            configuration = client.Configuration()
            configuration.connection_pool_maxsize = _CONNECTIONS
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                config.load_kube_config(client_configuration=configuration)
            api = client.ApiClient(configuration)
        self._field_manager = field_manager
        self._api = api
        host, manager = api.configuration.host, api.rest_client.pool_manager
        # All requests go to one host: a pool manager would look it up for each, in as much time as sending it takes.
        self._pool: urllib3.HTTPConnectionPool = manager.connection_from_url(host)
        is_absolute = isinstance(manager, urllib3.ProxyManager) and host.startswith("http:")  # a proxy reads the host
        self._root = host if is_absolute else urlsplit(host).path.rstrip("/")
        self._credentials: dict[str, str] = {}
        self._credentials_asked_at = -_CREDENTIALS_FOR_S

    def list(self, kind: Kind, namespace: str, selector: str, fields: str = "") -> tuple[Iterable[Object], str]:
        """Return the objects of a kind, fetched page by page, and the resourceVersion to watch from.

        An empty namespace, label or field selector (such as ``reason=FailedCreate``) selects all.
        """
        kind, query = self._served(kind), {"limit": str(_PAGE), "labelSelector": selector}
        query |= {"fieldSelector": fields} if fields else {}
        first = self._request("GET", kind.path(namespace), query)
        return self._items(kind, namespace, query, first), first["metadata"]["resourceVersion"]

    def _items(self, kind: Kind, namespace: str, query: dict[str, str], page: Object) -> Iterator[Object]:
        """Yield all items of a list, given its first page; all pages have one resourceVersion."""
        while True:
            yield from page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return
            page = self._request("GET", kind.path(namespace), {**query, "continue": token})

    def watch(self, kind: Kind, namespace: str, selector: str, version: str, timeout_s: int) -> Iterator[Object]:
        """Yield events (``type``, ``object``) after ``version`` until the server ends the watch."""
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
                event = _EVENT.decode(line)
                if event.type == "ERROR":
                    status = event.object
                    raise error_of(status.get("code", 500), status.get("message", ""), status.get("reason", ""))
                yield {"type": event.type, "object": event.object}
        except (urllib3.exceptions.HTTPError, OSError, msgspec.MsgspecError) as error:
            raise ApiUnavailableError(f"the watch of {kind.plural} broke: {error}") from error
        finally:
            response.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return one object."""
        return self._request("GET", self._served(kind).path(namespace, name))

    def create(self, manifest: Object) -> Object:
        """Create an object and return its metadata.

        Raise ``AlreadyExistsError`` if its name is taken, ``InvalidError`` for unknown fields.
        """
        kind, namespace = self._served(kind_of(manifest["kind"])), manifest["metadata"]["namespace"]
        body = {**manifest, "apiVersion": kind.api_version}
        query = {"fieldManager": self._field_manager, **_STRICT}
        made = self._request("POST", kind.path(namespace), query, body, accept=_METADATA_ONLY)
        metadata: Object = made["metadata"]
        return metadata

    def apply(self, manifest: Object) -> Object:
        """Apply a manifest on the server, with force: it takes over its fields, and removes those it no longer has."""
        kind, metadata = self._served(kind_of(manifest["kind"])), manifest["metadata"]
        query = {"fieldManager": self._field_manager, "force": "true", **_STRICT}
        path = kind.path(metadata["namespace"], metadata["name"])
        self._own_created_fields(path)
        body = {**manifest, "apiVersion": kind.api_version}
        return self._request("PATCH", path, query, body, "application/apply-patch+yaml")

    def _own_created_fields(self, path: str) -> None:
        """Move the fields that were set at an object's creation to the ownership of applies, once."""
        metadata = self._request("GET", path)["metadata"]
        entries = applied_fields(metadata.get("managedFields") or [], self._field_manager)
        if entries is not None:
            owned = {"resourceVersion": metadata["resourceVersion"], "managedFields": entries}
            self._merge(path, {"metadata": owned}, {"fieldManager": self._field_manager})

    def patch(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str = "") -> None:
        """Apply a JSON merge patch; a ``metadata.uid`` or ``resourceVersion`` in it is a precondition."""
        path = self._served(kind).path(namespace, name, subresource)
        self._merge(path, body, {"fieldManager": self._field_manager})

    def _merge(self, path: str, body: Object, query: dict[str, str]) -> None:
        self._request("PATCH", path, query, body, "application/merge-patch+json", _METADATA_ONLY)

    def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> None:
        """Set the number of replicas through the scale subresource."""
        query = {"fieldManager": f"{self._field_manager}-scale"}
        self._merge(kind.path(namespace, name, "scale"), {"spec": {"replicas": replicas}}, query)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        """Delete the object with this uid, its dependents in the background; a missing object is a success."""
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._request("DELETE", self._served(kind).path(namespace, name), {}, body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes, such as ``(1, 30)``."""
        found = self._request("GET", "/version")
        major, minor = (int(found[part].rstrip("+")) for part in ("major", "minor"))
        return major, minor

    def review(self, path: str, body: Object) -> Object:
        """Post a review (of a token, of an access), which is answered and not stored."""
        return self._request("POST", path, {}, body)

    def _served(self, kind: Kind) -> Kind:
        """Return the kind in the version that the cluster serves; looked up each time, since clusters are upgraded."""
        if not kind.newer:
            return kind
        group = self._request("GET", f"/apis/{kind.api_version.partition('/')[0]}")
        versions = {version["groupVersion"] for version in group["versions"]}
        return replace(kind, api_version=next((v for v in kind.newer if v in versions), kind.api_version))

    def _authorization(self) -> dict[str, str]:
        """Return the Authorization header, cached: the client takes longer to compute it than to send a request."""
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
        accept: str = "application/json",
    ) -> Object:
        response = self._send(method, path, query or {}, body, content_type, accept)
        try:
            answer: Object = msgspec.json.decode(response.data or b"{}")
        except (ValueError, urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiUnavailableError(f"{method} {path}: the response ended early: {error}") from error
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
        accept: str = "application/json",
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": accept, "Content-Type": content_type, **self._authorization()}
        try:
            response = self._pool.urlopen(
                method,
                f"{self._root}{path}?{urlencode(query)}",
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=read_timeout_s),
                retries=False,
                redirect=False,
                assert_same_host=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiUnavailableError(f"{method} {path}: no response: {error}") from error
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


def applied_fields(entries: Sequence[ManagedFields], manager: str) -> list[ManagedFields] | None:
    """Return ``metadata.managedFields`` with all fields of a manager under the operation Apply; None if they are.

    A POST records its fields for the operation Update, which an apply by the same manager leaves alone: it would not
    remove what it omits. The operator still creates by POST, since only that fails if any object has the name, and its
    first apply moves the fields to its own operation. ``spec.replicas`` is left without an owner: an apply without it
    would set it to 1.
    """
    own = [entry for entry in entries if entry.get("manager") == manager and not entry.get("subresource")]
    if all(entry.get("operation") == "Apply" for entry in own):
        return None
    fields: dict[str, Any] = {}
    for entry in own:
        fields = _union(fields, entry.get("fieldsV1") or {})
    fields.get("f:spec", {}).pop("f:replicas", None)
    applied = {**own[-1], "operation": "Apply", "fieldsV1": fields}
    return [*(entry for entry in entries if entry not in own), applied]


def _union(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    union = copy.deepcopy(dict(left))
    for key, value in right.items():
        union[key] = _union(union.get(key, {}), value)
    return union
