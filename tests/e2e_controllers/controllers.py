"""Install the controllers of tests/cluster/controllers on the tests' cluster."""

from __future__ import annotations

import subprocess

from real_cluster import ROOT, Cluster, state_folder

_COMMAND = str(ROOT / "tests" / "cluster" / "controllers" / "controllers")


def with_controllers(cluster: Cluster, *names: str) -> Cluster:
    """Return the cluster with these controllers; build and install them unless it is an existing cluster."""
    if cluster.own:
        state = state_folder()
        subprocess.run([_COMMAND, "install", *names, *(["--state", state] if state else [])], check=True)
    return cluster
