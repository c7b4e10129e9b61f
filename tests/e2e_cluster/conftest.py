"""Tests on a real cluster: ``make e2e``. ``make test`` does without them (they need PLAUDIT_E2E to be set).

``PLAUDIT_E2E_KUBECONFIG`` names a cluster that is there; else one of tests/cluster is started and ended:
``PLAUDIT_E2E_STATE`` is its folder, so that several can run side by side, and ``PLAUDIT_E2E_KEEP`` leaves it running.
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

import images  # noqa: E402
import training  # noqa: E402
from real_cluster import ROOT, Cluster, harness  # noqa: E402

RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start operators of their own come before the chart's is there, which looks after every namespace."""
    items.sort(key=lambda item: "installed" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster."""
    given = os.environ.get("PLAUDIT_E2E_KUBECONFIG")
    if given:
        yield Cluster(given, own=False)
        return
    up = subprocess.run(
        harness("up", "--nodes", "2", "--gpus-per-node", "4"), capture_output=True, text=True, check=False
    )
    assert up.returncode == 0, up.stderr
    yield Cluster(up.stdout.split()[-1], own=True)
    if not os.environ.get("PLAUDIT_E2E_KEEP"):
        subprocess.run(harness("down"), check=True)


@pytest.fixture(scope="session")
def definition(cluster: Cluster) -> Cluster:
    """A cluster that knows RLJobs."""
    chart = cluster.run("helm", "template", "plaudit", str(ROOT / "charts" / "plaudit"), "-s", "templates/crd.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=chart.stdout)
    cluster.kubectl("wait", "--for=condition=Established", "crd/rljobs.plaudit.dev")
    cluster.until("discovery", lambda: cluster.kubectl("get", "rlj", check=False).returncode == 0, 30)
    return cluster


@pytest.fixture(scope="session")
def installed(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The chart, installed with images built from the repository's Dockerfiles."""
    cluster = definition
    if cluster.own:
        archives = tmp_path_factory.mktemp("images")
        images.main(archives)
        subprocess.run(harness("load", *map(str, sorted(archives.glob("*.tar")))), check=True)
    for namespace in ("plaudit", training.NAMESPACE):
        cluster.kubectl("create", "namespace", namespace, check=False)
        cluster.kubectl("label", "namespace", namespace, RESTRICTED, "--overwrite")
    settings = {"operator": images.OPERATOR, "worker": images.WORKER, "gpu": images.WORKER, "redis": images.REDIS}
    options = [word for name, image in settings.items() for word in ("--set", f"images.{name}={image}")]
    chart = str(ROOT / "charts" / "plaudit")
    command = ["upgrade", "--install", "plaudit", chart, "--namespace", "plaudit", *options, "--wait"]
    cluster.run("helm", *command, "--take-ownership")
    yield cluster
    cluster.kubectl("--namespace", training.NAMESPACE, "delete", "rlj", "--all", check=False)
    cluster.run("helm", "uninstall", "plaudit", "--namespace", "plaudit", check=False)


@pytest.fixture(scope="session")
def shared(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The installed cluster with what ``training.copy_digits`` needs."""
    if not installed.own:
        pytest.skip("needs volumes that this machine can write to")
    training.prepare(installed, tmp_path_factory.mktemp("training"))
    return installed
