"""Install the controllers of tests/cluster/controllers on the tests' cluster."""

from __future__ import annotations

import os
import subprocess

from real_cluster import ROOT, Cluster

_COMMAND = str(ROOT / "tests" / "cluster" / "controllers" / "controllers")


def with_controllers(cluster: Cluster, *names: str) -> Cluster:
    """Return the cluster with these controllers; build and install them unless it is an existing cluster."""
    if cluster.own:
        state = os.environ.get("PLAUDIT_E2E_STATE")
        subprocess.run([_COMMAND, "install", *names, *(["--state", state] if state else [])], check=True)
    return cluster


def missing(name: str) -> str:
    """Return why a controller cannot be installed; empty if its programs are built."""
    built = subprocess.run([_COMMAND, "built", name], capture_output=True, text=True, check=False)
    return (
        "" if built.returncode == 0 else f"{built.stderr.strip()} is not built: see tests/cluster/controllers/README.md"
    )
