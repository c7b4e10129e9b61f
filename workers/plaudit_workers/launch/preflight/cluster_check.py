"""Check that an existing Ray cluster can run a job: every node sees the run's folder and has this version of Plaudit.

Required of a cluster that ``--address`` names: one shared file system for the run's folder, models, data and code;
processes under the user that runs ``plaudit run`` (its files with passwords are readable by that user only); the same
version of Plaudit on every node; and, since whoever reaches Ray can run code in it, Ray's token authentication or a
network of its own.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from plaudit_wire.errors import RefusedError

_ANSWER_WITHIN_S = 60.0
_MARK = "job.yaml"


def check_cluster(folder: Path) -> None:
    """Look at the run's folder from each node of the connected cluster.

    Raises:
        RefusedError: a node does not see the folder, cannot read its private files, or has another version.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = {node["NodeManagerAddress"]: _ask(node["NodeID"], folder) for node in nodes}
    for address, reply in asked.items():
        try:
            problem = ray.get(reply, timeout=_ANSWER_WITHIN_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            problem = f"did not respond: {error}"
        if problem:
            raise RefusedError(
                f"--address: node {address} {problem}. Every node needs plaudit-workers {version('plaudit-workers')}, "
                f"{folder} on a shared file system, and processes under the user of plaudit run"
            )


def _ask(node: str, folder: Path) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = ray.remote(node_problem).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    return options.remote(str(folder), version("plaudit-workers"))


def node_problem(folder: str, expected: str) -> str:
    """Return why this node cannot run processes of a run; empty when it can."""
    found = version("plaudit-workers")
    if found != expected:
        return f"has plaudit-workers {found}"
    if not Path(folder, _MARK).exists():
        return f"does not see {folder}"
    for file in Path(folder, "secrets").glob("*"):
        try:
            file.open("rb").close()
        except OSError as error:
            return f"cannot read {file}: {error.strerror}"
    return ""
