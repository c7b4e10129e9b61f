"""Machines that Agent Sandbox makes: what is asked of it, by an API server of the test that plays its controller."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from plaudit_reward.pod_provider import PodProvider
from plaudit_reward.providers import MachineChoice, TaskMachine
from plaudit_sandbox.archives import unpack, write_content
from plaudit_sandbox.machine import MachineLimits
from plaudit_sandbox.pod_cluster import ClaimCluster, ClusterError
from plaudit_sandbox.pod_manifests import AGENT_SANDBOX, FILL, LABEL, PodSettings
from plaudit_sandbox.pods import KeptPod, PodMachine
from plaudit_wire.errors import ConfigurationError, InfrastructureError

LIMITS = MachineLimits(memory_bytes=1 << 27, disk_bytes=1 << 26)
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "broker", "uid": "u"}
RUN = {"plaudit.dev/run": "mine"}
SETTINGS = PodSettings("image:1", labels=RUN, owner=OWNER, shares_template=True)
RUNNING: dict[str, Any] = {"running": {}}


class Api(ThreadingHTTPServer):
    """Objects by their paths; a claim gets its pod at once, unless ``refusal`` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.refusal = ""
        self.image_workdir = ""
        self.num_claims = 0
        self.processes: list[Sequence[bytes]] = []
        """The frames of each process that is started, in their order, until its connection is closed."""
        self.serves_claims = True

    def of(self, plural: str) -> list[dict[str, Any]]:
        return [each for path, each in self.objects.items() if f"/{plural}/" in path]

    def make_pod(self, claim: dict[str, Any]) -> None:
        name = claim["metadata"]["name"]
        if self.refusal:
            condition = {"type": "Ready", "status": "False", "reason": self.refusal, "message": "not so"}
            claim["status"] = {"conditions": [condition]}
            return
        [pool] = [each for each in self.of("sandboxwarmpools") if each["metadata"]["name"] in str(claim["spec"])]
        [template] = [each for each in self.of("sandboxtemplates") if each["metadata"]["name"] in str(pool["spec"])]
        given = template["spec"]["podTemplate"]
        statuses = [{"name": each["name"], "state": RUNNING} for each in given["spec"]["containers"]]
        filled = {"terminated": {"exitCode": 0, "message": f"{self.image_workdir}\n/bin"}}
        self.objects[f"/api/v1/namespaces/n/pods/{name}"] = {
            "metadata": {"name": name, "uid": f"uid of {name}", **given["metadata"]},
            "spec": given["spec"],
            "status": {
                "phase": "Running",
                "containerStatuses": statuses,
                "initContainerStatuses": [{"name": FILL, "state": filled}],
            },
        }


class Handler(BaseHTTPRequestHandler):
    server: Api

    def start_process(self) -> None:
        key = f"{self.headers['Sec-WebSocket-Key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
        self.end_headers()
        for frame in self.server.processes.pop(0):
            self.wfile.write(bytes([0x82, len(frame)]) + frame)

    def answer(self) -> None:
        url, api = urlsplit(self.path), self.server
        path, length = url.path, int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        status, found = 200, api.objects.get(path)
        if "sandboxclaims" in path and not api.serves_claims:
            status, found = 404, {"message": "404 page not found"}
        elif self.command == "POST":
            path = f"{path}/{body['metadata']['name']}"
            status = 409 if path in api.objects else 201
            found = api.objects.setdefault(path, body)
            if "sandboxclaims" in path:
                api.num_claims += 1
                api.make_pod(found)
        elif self.command == "PATCH" and found:
            found["metadata"]["labels"] = {**found["metadata"]["labels"], **body["metadata"]["labels"]}
        elif found is None and re.search("/(pods|sandbox[a-z]+)$", path):
            selected = {each: value for each, value in api.objects.items() if self.selects(each, value, path)}
            if self.command == "DELETE":
                names = {value["metadata"]["name"] for value in selected.values()}
                gone = [each for each in api.objects if each in selected or each.endswith(tuple(names or {"-"}))]
                for each in gone:  # a claim takes its pod along
                    del api.objects[each]
            found = {"items": list(selected.values())}
        elif found is None:
            status, found = 404, {"message": "not found"}
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    def do_GET(self) -> None:
        (self.start_process if urlsplit(self.path).path.endswith("/exec") else self.answer)()

    def selects(self, path: str, value: dict[str, Any], of: str) -> bool:
        wanted = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0].split(",")
        labels = value["metadata"]["labels"]
        pairs = [each.partition("=") for each in wanted if each]
        return path.startswith(f"{of}/") and all(
            labels.get(name) == text if is_equal else name in labels for name, is_equal, text in pairs
        )

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def api(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with Api() as served:
        Thread(target=served.serve_forever, daemon=True).start()
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{served.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(configuration))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield served
        served.shutdown()


def test_machines_of_one_kind_share_a_template_and_have_a_claim_each(api: Api) -> None:
    cluster = ClaimCluster()
    cluster.require(["none"])
    first, second = (PodMachine.new(cluster, SETTINGS, LIMITS) for _ in range(2))
    other = PodMachine.new(cluster, PodSettings("image:2", labels=RUN, shares_template=True), LIMITS)
    templates, pools, claims = (api.of(f"sandbox{kind}") for kind in ("templates", "warmpools", "claims"))
    assert (len(templates), len(pools), len(claims)) == (2, 2, 3)
    assert templates[0]["apiVersion"] == AGENT_SANDBOX
    assert [templates[0]["spec"]["networkPolicyManagement"], pools[0]["spec"]["replicas"]] == ["Unmanaged", 0]
    assert all(each["metadata"]["ownerReferences"] == [OWNER] for each in (templates[0], pools[0], claims[0]))
    assert claims[0]["spec"]["warmPoolRef"] == claims[1]["spec"]["warmPoolRef"] != claims[2]["spec"]["warmPoolRef"]
    assert [each["metadata"]["name"] for each in cluster.find({LABEL: first.name, **RUN})] == [first.name]
    assert (first.uid, first.settings.has_own_user) == (f"uid of {first.name}", False)

    first.remove()
    assert {each["metadata"]["name"] for each in api.of("pods")} == {second.name, other.name}
    assert {each["metadata"]["name"] for each in api.of("sandboxclaims")} == {second.name, other.name}
    cluster.remove(RUN)
    assert [path for path in api.objects if "sandbox" in path or "pods" in path] == []


def test_a_pod_that_was_made_anew_is_not_the_machine_that_was_lost(api: Api) -> None:
    machine = PodMachine.new(ClaimCluster(), SETTINGS, LIMITS)
    assert machine.found()["metadata"]["uid"] == machine.uid
    api.of("pods")[0]["metadata"]["uid"] = "another"
    with pytest.raises(InfrastructureError, match="was lost: another has taken its place"):
        machine.found()


def test_a_claim_that_gets_no_pod_is_reported_in_the_words_of_its_controller(api: Api) -> None:
    api.refusal = "InvalidConfiguration"
    with pytest.raises(ClusterError, match="gets no pod: InvalidConfiguration: not so"):
        PodMachine.new(ClaimCluster(), SETTINGS, LIMITS)
    assert api.of("sandboxclaims") == []


def test_the_first_machine_of_an_image_tells_its_workdir_and_all_others_are_made_once(api: Api, tmp_path: Path) -> None:
    api.image_workdir = "/repo"
    provider = PodProvider(MachineChoice("image:1", run="mine"), claims=True)
    folders = [tmp_path / f"machine-{number}" for number in range(6)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(len(folders)) as threads:
        made = [*threads.map(lambda folder: provider.make(folder, None), folders)]
    assert {each.directory for each in made} == {"/repo"}
    assert api.num_claims == len(folders) + 1


def test_a_cluster_without_agent_sandbox_is_refused_by_name(api: Api) -> None:
    api.serves_claims = False
    with pytest.raises(ConfigurationError, match="install Agent Sandbox with its extensions"):
        ClaimCluster().require(["none"])


REFUSED = bytes([3]) + b'{"status": "Failure", "message": "fork/exec: resource temporarily unavailable"}'
BEGUN, ENDED = bytes([2]) + b"\n", bytes([3]) + b'{"status": "Success"}'


def test_a_first_command_that_does_not_begin_is_an_error_and_a_later_one_its_agent_s_doing(api: Api) -> None:
    cluster = ClaimCluster()
    machine = PodMachine.new(cluster, SETTINGS, LIMITS)
    for problem in (REFUSED,), ():
        api.processes = [problem]
        with pytest.raises(InfrastructureError, match=f"first command of the pod {machine.name} did not start"):
            asyncio.run(machine.run(["true"], timeout_s=5.0))
    api.processes = [(BEGUN, ENDED)]
    assert asyncio.run(machine.run(["true"], timeout_s=5.0)).exit_code == 0
    for known in (machine, PodMachine(cluster, machine.name, SETTINGS, LIMITS)):  # as another process finds it
        api.processes = [(REFUSED,), (BEGUN, ENDED)]
        ended = asyncio.run(known.run(["true"], timeout_s=5.0))
        assert (ended.exit_code, "resource temporarily unavailable" in ended.output) == (126, True), ended


class LocalPod(PodMachine):
    """A pod whose files come from an archive that the test wrote, so that no process has to run in it."""

    archive = b""
    is_full = ends = False

    def disk_bytes(self) -> int:
        return self.limits.disk_bytes + self.is_full

    def end(self) -> bool:
        return self.ends

    @contextlib.contextmanager
    def files(self, places: Sequence[str]) -> Iterator[IO[bytes]]:
        yield io.BytesIO(self.archive)


def test_a_machine_is_kept_whole_or_not_at_all(api: Api, tmp_path: Path) -> None:
    provider = PodProvider(MachineChoice("image:1"), claims=True)
    machine = LocalPod.new(ClaimCluster(), PodSettings("image:1", workdir="/repo"), LIMITS)
    assert isinstance(machine, LocalPod)
    folder, to, left = (tmp_path / name for name in ("machine", "to", "left"))
    for each in (folder, to, left / "app"):
        each.mkdir(parents=True)
    (left / "app" / "answer").write_text("42" * 8192)
    write_content(written := io.BytesIO(), left)
    for machine.archive, machine.ends in ((written.getvalue()[:-9000], True), (written.getvalue(), False)):
        with pytest.raises(InfrastructureError):
            provider.keep(folder, TaskMachine(machine, "/repo"), to)
        assert not [*to.iterdir()]
    machine.ends = True
    provider.keep(folder, TaskMachine(machine, "/repo"), to)
    found = provider.find(to, None)
    assert (found.directory, found.machine.disk_bytes()) == ("/repo", 0)
    assert isinstance(found.machine, KeptPod)
    with found.machine.files(["app"]) as source:
        unpack(source, tmp_path / "again")
    assert (tmp_path / "again" / "app" / "answer").read_text() == "42" * 8192
    machine.is_full = True
    provider.keep(folder, TaskMachine(machine, "/repo"), to)
    full = provider.find(to, None).machine
    assert full.disk_bytes() > full.limits.disk_bytes
