"""Tests on a real cluster: ``make e2e``. ``make test`` does without them (they need PLAUDIT_E2E to be set).

``PLAUDIT_E2E_KUBECONFIG`` names a cluster that is there; else the one of tests/cluster is started and ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("PLAUDIT_E2E") else ["test_*.py"]

HERE = Path(__file__).parent
# Modules beside the tests, and the jobs and bad specifications of the fast ones.
sys.path[:0] = [str(HERE), str(HERE.parent / "operator")]

from real_cluster import HARNESS, ROOT, Cluster  # noqa: E402


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster."""
    given = os.environ.get("PLAUDIT_E2E_KUBECONFIG")
    if given:
        yield Cluster(given, own=False)
        return
    up = subprocess.run(
        [HARNESS, "up", "--nodes", "2", "--gpus-per-node", "4"], capture_output=True, text=True, check=False
    )
    assert up.returncode == 0, up.stderr
    yield Cluster(up.stdout.split()[-1], own=True)
    if not os.environ.get("PLAUDIT_E2E_KEEP"):
        subprocess.run([HARNESS, "down"], check=True)


@pytest.fixture(scope="session")
def definition(cluster: Cluster) -> Cluster:
    """A cluster that knows RLJobs."""
    chart = cluster.run("helm", "template", "plaudit", str(ROOT / "charts" / "plaudit"), "-s", "templates/crd.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=chart.stdout)
    cluster.kubectl("wait", "--for=condition=Established", "crd/rljobs.plaudit.dev")
    cluster.until("discovery", lambda: cluster.kubectl("get", "rlj", check=False).returncode == 0, 30)
    return cluster
