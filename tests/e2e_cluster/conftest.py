"""Tests on a real cluster: ``make e2e``. ``make test`` skips them (they need PLAUDIT_E2E to be set).

They start and stop a cluster of tests/cluster, one for each process of pytest-xdist. ``PLAUDIT_E2E_STATE`` is its
folder, so that several can run side by side; ``PLAUDIT_E2E_KEEP=1`` keeps it running for the next time.
``PLAUDIT_E2E_KUBECONFIG`` names another cluster: ``PLAUDIT_E2E_VALUES`` is then a file of the chart's values with
images that it can pull, ``images.gpu`` with torch and vLLM, and ``PLAUDIT_E2E_STORAGE_CLASS`` a class of volumes that
many pods can write to (default: the cluster's).
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

import chart  # noqa: E402
import machine_pods  # noqa: E402
import training  # noqa: E402
from real_cluster import Cluster, harness  # noqa: E402

from plaudit_reward.pod_provider import NAMESPACE_VARIABLE  # noqa: E402
from plaudit_sandbox.pod_cluster import PodCluster  # noqa: E402
from plaudit_sandbox.pods import PodMachine  # noqa: E402

RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


LONGEST = (
    "test_lost_machines",
    "test_machines",
    "test_kept_machines",
    "test_gang",
    "test_operator",
    "test_faults",
    "test_sandboxes",
    "test_upgrade",
    "test_learning",
    "test_reward_service",
    "test_describe",
    "test_environment",
)
"""Files that begin first, so that the processes that share the tests end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The chart's operator looks after every namespace: tests with one of their own come before, its end comes last."""

    def turn(item: pytest.Item) -> tuple[int, int]:
        stem = item.path.stem
        part = (stem == "test_uninstall") + ("installed" in getattr(item, "fixturenames", ()))
        return part, LONGEST.index(stem) if stem in LONGEST else len(LONGEST)

    items.sort(key=turn)
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def archives(request: pytest.FixtureRequest) -> list[str]:
    """Return archives of the images, built where they are missing; none for tests that need none."""
    wanted = any("with_images" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not wanted or os.environ.get("PLAUDIT_E2E_KUBECONFIG"):
        return []
    command = [sys.executable, str(HERE / "images.py")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout.split()


@pytest.fixture(scope="session")
def cluster(archives: list[str]) -> Iterator[Cluster]:
    """A running cluster."""
    given = os.environ.get("PLAUDIT_E2E_KUBECONFIG")
    if given:
        yield Cluster(given, own=False)
        return
    images = ["--images", *archives] if archives else []
    up = subprocess.run(
        harness("up", "--nodes", "2", "--gpus-per-node", "4", *images), capture_output=True, text=True, check=False
    )
    assert up.returncode == 0, up.stderr
    cluster = Cluster(up.stdout.split()[-1], own=True)
    yield cluster
    if _ends(cluster):
        subprocess.run(harness("down"), check=True)


@pytest.fixture(scope="session")
def with_images(cluster: Cluster, archives: list[str]) -> Cluster:
    """Yield a cluster with the images, which one that was kept may lack."""
    if archives:
        subprocess.run(harness("load", *archives), check=True)
    return cluster


@pytest.fixture(scope="session")
def definition(cluster: Cluster) -> Cluster:
    """Yield a cluster with the CRDs."""
    apply = ["apply", "--server-side", "--force-conflicts", "--field-manager=helm"]  # which installs it later
    cluster.kubectl(*apply, "-f", "-", text=chart.template(cluster, "crd", "crd-rewardservice"))
    names = ("crd/rljobs.plaudit.dev", "crd/rewardservices.plaudit.dev")
    established = ("wait", "--for=condition=Established", *names)  # fails while there is no status
    cluster.until("definition", lambda: cluster.kubectl(*established, check=False).returncode == 0)
    cluster.until("discovery", lambda: cluster.kubectl("get", "rlj,rws", check=False).returncode == 0)
    return cluster


@pytest.fixture(scope="session")
def installed(definition: Cluster, with_images: Cluster) -> Iterator[Cluster]:
    """The chart, installed with images built from the repository's Dockerfiles."""
    cluster = definition
    for namespace in ("plaudit", training.NAMESPACE):
        cluster.kubectl("create", "namespace", namespace, check=False)
        cluster.kubectl("label", "namespace", namespace, RESTRICTED, "--overwrite")
    chart.install(cluster)
    yield cluster
    if not _ends(cluster):
        cluster.kubectl("--namespace", training.NAMESPACE, "delete", "rlj", "--all", check=False)
        cluster.run("helm", "uninstall", "plaudit", "--namespace", "plaudit", check=False)


def _ends(cluster: Cluster) -> bool:
    """Return True if a cluster ends with the tests, and all that is in it."""
    return cluster.own and not os.environ.get("PLAUDIT_E2E_KEEP")


@pytest.fixture(scope="session")
def shared(installed: Cluster) -> Cluster:
    """The installed cluster with what ``training.copy_digits`` needs."""
    training.prepare(installed, chart.values()["images"]["gpu"])
    return installed


@pytest.fixture(scope="module")
def pods(with_images: Cluster) -> Iterator[PodCluster]:
    """Yield the namespace in which tests make machines, which commands of this process find as well."""
    if not with_images.own:
        pytest.skip("images can be loaded into a cluster of the harness alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", with_images.kubeconfig)
        patch.setenv(NAMESPACE_VARIABLE, machine_pods.NAMESPACE)
        (made,) = machine_pods.namespaces(with_images, machine_pods.NAMESPACE)
        yield made


@pytest.fixture
def machine(pods: PodCluster) -> Iterator[PodMachine]:
    """Yield a new machine."""
    with machine_pods.new_machine(pods) as made:
        yield made
