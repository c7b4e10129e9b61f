"""The operator as a process of this machine, with the rights that the chart gives it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from real_cluster import ROOT, Cluster

NAMESPACE = "plaudit-test"
ACCOUNT = "outside-operator"


def kubeconfig_of_the_chart(cluster: Cluster, folder: Path) -> Path:
    """A kubeconfig for the service account that the chart makes, with its roles."""
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    chart = ["helm", "template", "outside", str(ROOT / "charts" / "plaudit"), "--namespace", NAMESPACE]
    cluster.kubectl("apply", "-f", "-", text=cluster.run(*chart, "-s", "templates/rbac.yaml").stdout)
    token = cluster.kubectl("--namespace", NAMESPACE, "create", "token", ACCOUNT, "--duration", "2h").stdout.strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json").stdout)
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


class OperatorProcess:
    """One ``python -m plaudit_operator``, started again after the loss of its Lease, as a kubelet does.

    It ends itself when it cannot renew the Lease for ten seconds: while an API server starts again, on a busy machine.
    """

    def __init__(self, kubeconfig: Path, identity: str, namespace: str, log: Path, **settings: str) -> None:
        self.identity = identity
        self.port = _free_port()
        self.log = log
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PLAUDIT_NAMESPACE": NAMESPACE,
            "PLAUDIT_LEASE": ACCOUNT,  # which the chart lets this account use
            "PLAUDIT_WATCH_NAMESPACES": namespace,
            "PLAUDIT_IDENTITY": identity,
            "PLAUDIT_PORT": str(self.port),
            "PLAUDIT_IMAGE_WORKER": "localhost/none:1",
            "PLAUDIT_IMAGE_GPU": "localhost/none:1",
            "PLAUDIT_IMAGE_REDIS": "localhost/none:1",
            **settings,
        }
        self._lock, self._is_over = threading.Lock(), False
        self.process = self._started()
        threading.Thread(target=self._keep, daemon=True).start()

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "plaudit_operator"]
            return subprocess.Popen(command, env=self._environment, stderr=output)

    def _keep(self) -> None:
        while self.process.wait() == 1:
            time.sleep(1.0)
            with self._lock:
                if self._is_over:
                    return
                self.process = self._started()

    def _keep_no_more(self) -> None:
        with self._lock:
            self._is_over = True

    def ask(self, path: str, token: str = "") -> tuple[int, str]:
        """Return status and body of a response from its port; (0, "") if it does not respond."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    @property
    def leads(self) -> bool:
        """Return True if it reports that it is the leader."""
        return "plaudit_operator_leader 1.0" in self.ask("/metrics")[1]

    def figure(self, name: str) -> float:
        """Return one of its series, summed over labels."""
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        """Kill the process, as the loss of its node does."""
        self._keep_no_more()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Terminate the process, as a kubelet does."""
        self._keep_no_more()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
