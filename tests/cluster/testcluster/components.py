"""The parts of a running cluster: a control plane in a network of its own, the "hub", and nodes around it.

Addresses: the hub is 10.77.0.1; node N is 10.77.N.2 behind the hub's 10.77.N.1, and its pods are 10.244.N.0/24.
The API server has the same port on the hub's 127.0.0.1 as on the machine's, so one kubeconfig serves both.
"""

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from string import Template

from . import images
from .host import FailureError, Host, run, wait
from .programs import HERE, Programs

CONFIG = HERE / "config"
CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "coredns",
    "volumes",
)
FORWARDING = ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")
ON_NODE = ("containerd", "kubelet", "kube-proxy")
API_SERVER_NAMES = (
    "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    "DNS:kubernetes.default.svc.cluster.local,IP:127.0.0.1,IP:10.77.0.1,IP:10.96.0.1"
)


class Cluster:
    """The cluster of one state folder."""

    def __init__(self, host: Host, programs: Programs) -> None:
        self.host, self.programs = host, programs
        self.folder, self.pki, self.kubeconfig = host.folder, host.folder / "pki", host.folder / "kubeconfig"

    def is_up(self) -> bool:
        """Whether the control plane was started and all of it runs."""
        return (self.folder / "up").exists() and all(self.host.pid(f"hub/{it}") for it in ("forward", *CONTROL_PLANE))

    def node_is_up(self, node: int) -> bool:
        """Whether all of a node runs."""
        return all(self.host.pid(f"node{node}/{it}") for it in ON_NODE)

    def running_nodes(self) -> list[int]:
        """The nodes that images can be loaded into."""
        return list(filter(self.node_is_up, range(1, 10)))

    def inside(self, place: str) -> list[str]:
        """What goes before a command that shall run in the hub's network, or in a node's network and mounts."""
        first, namespaces = ("forward", ["--net"]) if place == "hub" else ("containerd", ["--net", "--mount"])
        if pid := self.host.pid(f"{place}/{first}"):
            return ["nsenter", f"--target={pid}", *namespaces]
        raise FailureError(f"{place} is not running")

    def start(self, port: int) -> None:
        """Starts a control plane that knows of nothing yet."""
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        self.pki.mkdir(parents=True)
        self._start_network(port)
        self._make_identities()
        for name in ("Corefile", "resolv.conf"):
            self._write(self.folder / name, name)
        components = [f"hub/{part}" for part in ("forward", *CONTROL_PLANE)]
        for part in CONTROL_PLANE[:2]:
            self._start("hub", part, *self.inside("hub"))
        self._wait("the API server", lambda: self._try_kubectl("get", "--raw=/readyz") == "ok", *components[:3])
        for part in CONTROL_PLANE[2:]:
            self._start("hub", part, *self.inside("hub"), node="node1")
        self._kubectl("apply", "--filename", CONFIG / "storage-class.yaml")
        self._wait("a service account", lambda: "default" in self._try_kubectl("get", "serviceaccounts"), *components)
        (self.folder / "up").touch()

    def _start_network(self, port: int) -> None:
        """Starts the hub's network: its first process carries connections into it from a port outside."""
        with socket.create_server(("127.0.0.1", port)) as listener:
            (self.folder / "port").write_text(str(listener.getsockname()[1]))
            script, inherited = Path(__file__).with_name("forward.py"), listener.fileno()
            command = ("unshare", "--net", sys.executable, script, str(inherited), (self.folder / "port").read_text())
            self.host.start("hub/forward", *command, pass_fds=(inherited,))
        network = Path(f"/proc/{self.host.pid('hub/forward')}/ns/net")
        self._wait("the hub's network", lambda: os.readlink(network) != os.readlink("/proc/self/ns/net"), "hub/forward")
        self._ip("hub", "link set lo up", "address add 10.77.0.1/32 dev lo", "route add default dev lo src 10.77.0.1",
                 "route add blackhole 10.77.0.0/16", "route add blackhole 10.244.0.0/16")  # fmt: skip
        run(*self.inside("hub"), "sysctl", "-qw", *FORWARDING)

    def start_nodes(self, nodes: Iterable[int], gpus: int, archives: Sequence[Path] = ()) -> None:
        """Starts nodes, new or killed, and gives each so many GPUs that only the scheduler believes in.

        New ones have the images of these archives.
        """
        began, nodes = datetime.now(UTC).strftime("%FT%TZ"), list(nodes)
        missing = [node for node in nodes if not self.node_is_up(node)]
        for node in missing:
            self._start_node(node, archives)
        for place in (f"node{node}" for node in missing):
            self._wait(place, partial(self._is_ready, place, began), *(f"{place}/{part}" for part in ON_NODE))
        if not nodes:
            return
        count = f'{{"nvidia.com/gpu": "{gpus}"}}'
        patch = f'{{"status": {{"capacity": {count}, "allocatable": {count}}}}}'
        self._kubectl("patch", "nodes", *(f"node{node}" for node in nodes), "--subresource=status", f"--patch={patch}")

    def kill_node(self, node: int) -> None:
        """As a power cut does: first the network, so that nobody hears goodbye, then every process."""
        with contextlib.suppress(FailureError):
            self._ip("hub", f"link delete node{node}")
        self.host.remove(f"node{node}")

    def restart_api_server(self) -> None:
        """Kill the API server and start it again, on the same etcd."""
        pid = self.host.pid("hub/kube-apiserver")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            # Its port is free when its last thread has ended, which may be after the process counts as dead.
            threads = Path(f"/proc/{pid}/task")
            self._wait("the end of the API server", lambda: len(list(threads.glob("*"))) <= 1)
        self._wait("the end of the API server", lambda: self.host.pid("hub/kube-apiserver") is None)
        self._start("hub", "kube-apiserver", *self.inside("hub"))
        self._wait("the API server", lambda: self._try_kubectl("get", "--raw=/readyz") == "ok", "hub/kube-apiserver")

    def load(self, archives: Iterable[Path], nodes: Iterable[int]) -> None:
        """Imports image archives into nodes, each into all of them at once."""
        places = [f"node{node}" for node in nodes]
        for archive in archives:
            lacking = [place for place in places if images.fingerprint(archive) not in self._loaded(place)]
            command = ["ctr", "--namespace=k8s.io", "images", "import", str(archive.absolute())]
            imports = [
                subprocess.Popen([*self.inside(it), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                for it in lacking
            ]
            said = [process.communicate()[0].decode() for process in imports]
            if failed := [text for text, process in zip(said, imports, strict=True) if process.returncode]:
                raise FailureError(f"{archive}: {failed[0].strip()}")
            for place in lacking:
                self._note_loaded(place, [archive])

    def _loaded(self, place: str) -> str:
        """The fingerprints of the archives that a node has."""
        file = self.folder / place / "loaded"
        return file.read_text() if file.exists() else ""

    def _note_loaded(self, place: str, archives: Sequence[Path]) -> None:
        with (self.folder / place / "loaded").open("a") as file:
            file.writelines(map(images.fingerprint, archives))

    def _start_node(self, node: int, archives: Sequence[Path]) -> None:
        place, address, pods = f"node{node}", f"10.77.{node}.2", f"10.244.{node}.0/24"
        folder = self.folder / place
        self.kill_node(node)
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        if archives and not (content := folder / "var/lib/containerd").exists():
            with images.store_of(archives, self.programs.image_stores) as store:
                images.link(store, content)
            self._note_loaded(place, archives)
        self._certify(place, f"/O=system:nodes/CN=system:node:{place}", f"DNS:{place},IP:{address}")
        self._write_kubeconfig(self.pki / f"{place}.kubeconfig", place, "10.77.0.1")
        for path in ("containerd.toml", "kubelet.yaml", "cni/pods.conflist"):
            self._write(folder / path, Path(path).name, node=place, pods=pods)
        self._start(place, "containerd", "unshare", "--net", "--mount", "sh", CONFIG / "node.sh", folder)
        pid = self.host.pid(f"{place}/containerd")
        self._wait(
            f"{place}/containerd",
            Path(f"/proc/{pid}/root/run/containerd/containerd.sock").is_socket,
            f"{place}/containerd",
        )
        self._ip("hub", f"link add {place} type veth peer name uplink netns {pid}",
                 f"address add 10.77.{node}.1/24 dev {place}",
                 f"link set {place} up", f"route add {pods} via {address}")  # fmt: skip
        self._ip(
            place, f"address add {address}/24 dev uplink", "link set uplink up", f"route add default via 10.77.{node}.1"
        )
        run(*self.inside(place), "sysctl", "-qw", *FORWARDING)
        self.load([self.programs.pause_image], [node])
        for part in ON_NODE[1:]:
            self._start(place, part, *self.inside(place), address=address)

    def _is_ready(self, place: str, since: str) -> bool:
        """Whether a node says that it is ready and has said so after it was started."""
        path = "-ojsonpath={.status.conditions[?(@.type=='Ready')]['status','lastHeartbeatTime']}"
        status, _, heard = self._try_kubectl("get", "node", place, path).partition(" ")
        return status == "True" and heard >= since

    def _make_identities(self) -> None:
        for authority in ("ca", "front-proxy-ca"):
            self._openssl(authority, f"/CN={authority}")
        self._openssl("service-accounts", "/CN=service-accounts")
        self._certify("front-proxy-client", "/CN=front-proxy-client", authority="front-proxy-ca")
        self._certify("kube-apiserver", "/CN=kube-apiserver", API_SERVER_NAMES)
        self._certify("admin", "/O=system:masters/CN=admin")
        self._write_kubeconfig(self.kubeconfig, "admin", "127.0.0.1")
        for name in ("kube-scheduler", "kube-proxy"):
            self._certify(name, f"/CN=system:{name}")
            self._write_kubeconfig(self.pki / f"{name}.kubeconfig", name, "10.77.0.1")

    def _certify(self, name: str, subject: str, names: str = "", authority: str = "ca") -> None:
        extensions = ["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
        extensions += [f"subjectAltName={names}"] if names else []
        signer = ("-CA", self.pki / f"{authority}.crt", "-CAkey", self.pki / f"{authority}.key")
        self._openssl(name, subject, *signer, *(word for it in extensions for word in ("-addext", it)))

    def _openssl(self, name: str, subject: str, *more: str | Path) -> None:
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "365",
            "-subj", subject, "-keyout", self.pki / f"{name}.key", "-out", self.pki / f"{name}.crt", *more)  # fmt: skip

    def _write_kubeconfig(self, path: Path, user: str, server: str) -> None:
        files = {"ca": "ca.crt", "certificate": f"{user}.crt", "key": f"{user}.key"}
        data = {key: base64.b64encode((self.pki / name).read_bytes()).decode() for key, name in files.items()}
        path.touch(mode=0o600)
        self._write(path, "kubeconfig", user=user, server=server, **data)

    def _write(self, path: Path, template: str, **values: str) -> None:
        path.write_text(self._filled(template, **values))

    def _filled(self, template: str, **values: str) -> str:
        """A file of config/ with its $names filled in."""
        known = {"folder": self.folder, "pki": self.pki, "cgroup": self.host.cgroup, **values}
        port = (self.folder / "port").read_text()
        return Template((CONFIG / template).read_text()).substitute(known, port=port)

    def _start(self, place: str, part: str, *enter: str | Path, **values: str) -> None:
        flags = self._filled(f"{part}.flags", **{"node": place, **values}).splitlines()
        built = self.programs.bin / part
        program = built if built.exists() else part
        self.host.start(f"{place}/{part}", *enter, program, *(flag for flag in flags if not flag.startswith("#")))

    def _ip(self, place: str, *commands: str) -> None:
        run(*self.inside(place), "ip", "-batch", "-", text="\n".join(commands))

    def _kubectl(self, *argv: str | Path) -> str:
        return run(self.programs.bin / "kubectl", f"--kubeconfig={self.kubeconfig}", *argv)

    def _try_kubectl(self, *argv: str) -> str:
        with contextlib.suppress(FailureError):
            return self._kubectl(*argv)
        return ""

    def _wait(self, what: str, ready: Callable[[], bool], *components: str) -> None:
        def ready_while_running() -> bool:
            self.host.expect_running(*components)
            return ready()

        wait(what, ready_while_running)
