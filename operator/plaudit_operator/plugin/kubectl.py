"""Run kubectl: for its output, in place of this process, or in the background to forward a port."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WITHIN = "--request-timeout=20s"
_NO_SUCH_KIND = "the server doesn't have a resource type"


class KubectlError(Exception):
    """kubectl is missing or failed; the message is for the user.

    Attributes:
        not_found: True if the object does not exist.
    """

    def __init__(self, message: str, *, not_found: bool = False) -> None:
        super().__init__(message)
        self.not_found = not_found


class Kubectl:
    """Run kubectl with a namespace and a context. Every method raises ``KubectlError`` if kubectl fails.

    Args:
        argv: program and options that come before every command.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    @classmethod
    def on_path(cls, namespace: str = "", context: str = "", kubeconfig: str = "") -> Kubectl:
        """Return the kubectl on PATH; empty arguments keep its defaults."""
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError("kubectl is not on PATH; install it: https://kubernetes.io/docs/tasks/tools")
        given = {"--namespace": namespace, "--context": context, "--kubeconfig": kubeconfig}
        return cls([program, *(word for name, value in given.items() if value for word in (name, value))])

    def read(self, *arguments: str) -> str:
        """Return the output of a command."""
        done = subprocess.run([*self._argv, *arguments, _WITHIN], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        message = done.stderr.strip() or f"kubectl {arguments[0]} exited with code {done.returncode}"
        if _NO_SUCH_KIND in message:
            raise KubectlError(f"{message}. Is Plaudit installed? helm install plaudit charts/plaudit")
        raise KubectlError(message, not_found="(NotFound)" in message)

    def json(self, *arguments: str) -> Mapping[str, Any]:
        """Return an object."""
        found: dict[str, Any] = json.loads(self.read(*arguments, "--output", "json"))
        return found

    def items(self, kind: str, *arguments: str) -> list[Mapping[str, Any]]:
        """Return the objects of a kind."""
        return list(self.json("get", kind, *arguments)["items"])

    def namespace(self) -> str:
        """Return the namespace in effect."""
        if "--namespace" in self._argv:
            return self._argv[self._argv.index("--namespace") + 1]
        return self.read("config", "view", "--minify", "--output", "jsonpath={..namespace}") or "default"

    def become(self, *arguments: str) -> int:
        """Replace this process by kubectl."""
        os.execv(self._argv[0], [*self._argv, *arguments])  # noqa: S606

    @contextlib.contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[int]:
        """Forward a free local port while the context is open; yield the port."""
        command = [*self._argv, "port-forward", "--address", "127.0.0.1", target, f":{port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            found = re.search(r":(\d+) ->", process.stdout.readline())
            if found is None:
                raise KubectlError(process.stderr.read().strip())
            yield int(found[1])
        finally:
            process.terminate()
            process.communicate()
