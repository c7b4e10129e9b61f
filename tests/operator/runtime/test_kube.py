"""Kinds that clusters serve in different versions, and the fields that an apply owns after a POST made the object."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes import client

from plaudit_operator.runtime.kinds import DEPLOYMENT, POD_GROUP
from plaudit_operator.runtime.kube import ApiServer, NotFoundError, applied_fields

GROUP = "scheduling.k8s.io"
ROOT = "/clusters/c-1"
"""Path of the API server on its host, as behind Rancher."""
MANIFEST = {
    "apiVersion": POD_GROUP.api_version,
    "kind": "PodGroup",
    "metadata": {"name": "g", "namespace": "team"},
    "spec": {"schedulingPolicy": {"gang": {"minCount": 3}}},
}


class Served(ThreadingHTTPServer):
    """An API server that has a group in some versions, and remembers what was sent to it."""

    def __init__(self, versions: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.versions = versions
        self.sent: list[tuple[str, str, str]] = []
        self.answers: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    """Discovery, and an echo of objects in the versions that are served."""

    server: Served

    def do_GET(self) -> None:
        if "/podgroups/" in self.path:
            self.answer(MANIFEST)
            return
        versions = [{"groupVersion": f"{GROUP}/{version}"} for version in self.server.versions]
        self.answer({"versions": versions} if versions else None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0].removeprefix(ROOT)
        self.server.sent.append((self.command, path, body["apiVersion"]))
        if "as=PartialObjectMetadata" in self.headers["Accept"]:
            body = {"kind": "PartialObjectMetadata", "metadata": body["metadata"]}
        self.answer(body if path.split("/")[3] in self.server.versions else None)

    def do_PATCH(self) -> None:
        self.do_POST()

    def answer(self, body: Any) -> None:
        body = body if self.path.startswith(ROOT) else None
        self.server.answers.append(body)
        data = json.dumps(body).encode() if body else b"404 page not found"
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served([])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def api_server(served: Served) -> ApiServer:
    host = f"http://127.0.0.1:{served.server_port}{ROOT}"
    return ApiServer("tests", api=client.ApiClient(client.Configuration(host=host)))


def test_of_what_it_creates_or_patches_the_server_sends_the_metadata_alone(served: Served):
    served.versions = ["v1"]
    kube = api_server(served)
    deployment = {**MANIFEST, "apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind}
    assert kube.create(deployment) == MANIFEST["metadata"]
    kube.patch(DEPLOYMENT, "team", "g", deployment)
    assert [set(answer) for answer in served.answers] == [{"kind", "metadata"}] * 2


@pytest.mark.parametrize(
    ("versions", "used"),
    [(["v1", "v1alpha2"], "v1alpha2"), (["v1", "v1beta1", "v1alpha3"], "v1beta1"), (["v1", "v1alpha3"], "v1alpha3")],
)
def test_a_pod_group_is_written_in_the_version_that_the_cluster_has(served: Served, versions: list[str], used: str):
    kube = api_server(served)
    with pytest.raises(NotFoundError):
        kube.create(MANIFEST)
    served.versions = versions  # the cluster was upgraded
    kube.create(MANIFEST)
    assert kube.apply(MANIFEST)["spec"] == MANIFEST["spec"]
    path = f"/apis/{GROUP}/{used}/namespaces/team/podgroups"
    assert served.sent == [("POST", path, f"{GROUP}/{used}"), ("PATCH", f"{path}/g", f"{GROUP}/{used}")]


def entry(manager: str, operation: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


def test_the_fields_of_the_creation_and_of_applies_become_those_of_one_apply_without_replicas():
    created = entry("operator", "Update", {"f:spec": {"f:replicas": {}, "f:paused": {}}, "f:data": {"f:a": {}}})
    applied = entry("operator", "Apply", {"f:data": {"f:b": {}}})
    others = [entry("kubelet", "Update", {"f:status": {}}), entry("operator-scale", "Update", {"f:spec": {}})]
    status = entry("operator", "Update", {"f:status": {}}, subresource="status")
    found = applied_fields([created, *others, applied, status], "operator")
    fields = {"f:spec": {"f:paused": {}}, "f:data": {"f:a": {}, "f:b": {}}}
    assert found == [*others, status, {**applied, "fieldsV1": fields}]
    assert applied_fields(found, "operator") is None


def test_an_object_of_other_managers_is_left_alone():
    assert applied_fields([entry("helm", "Update", {"f:data": {}})], "operator") is None
    assert applied_fields([], "operator") is None
