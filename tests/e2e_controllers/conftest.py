"""Tests with real controllers: ``make e2e-controllers``. ``make test`` skips them (they need PLAUDIT_E2E).

The cluster and the installed chart are those of tests/e2e_cluster; KEDA, metrics-server and Prometheus come from
tests/cluster/controllers. An existing cluster (``PLAUDIT_E2E_KUBECONFIG``) must already have them installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

collect_ignore_glob = [] if os.environ.get("PLAUDIT_E2E") else ["test_*.py"]

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def _fixtures_of_e2e() -> ModuleType:
    path = HERE.parent / "e2e_cluster" / "conftest.py"
    spec = importlib.util.spec_from_file_location("e2e_cluster_fixtures", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_e2e = _fixtures_of_e2e()
archives, with_images, cluster = _e2e.archives, _e2e.with_images, _e2e.cluster
definition, installed, shared = _e2e.definition, _e2e.installed, _e2e.shared
pytest_collection_modifyitems = _e2e.pytest_collection_modifyitems  # Kueue's tests start an operator of their own

import chart  # noqa: E402
import scoring_job  # noqa: E402
from alert_history import MONITORING  # noqa: E402
from controllers import with_controllers  # noqa: E402
from real_cluster import Cluster  # noqa: E402


@pytest.fixture(scope="session")
def scoring(installed: Cluster) -> Cluster:
    """The installed chart, and a judge."""
    scoring_job.start_judge(installed)
    return installed


@pytest.fixture(scope="session")
def keda(scoring: Cluster) -> Cluster:
    """Install KEDA after the operator, which has to detect it."""
    return with_controllers(scoring, "keda")


@pytest.fixture(scope="session")
def metrics_server(scoring: Cluster) -> Cluster:
    """Install metrics-server, which an HPA by CPU needs."""
    return with_controllers(scoring, "metrics-server")


@pytest.fixture(scope="session")
def monitored(scoring: Cluster) -> Cluster:
    """prometheus-operator and a Prometheus, and the chart with everything for them."""
    with_controllers(scoring, "prometheus-operator", "prometheus")
    chart.install(scoring, monitoring=MONITORING)
    return scoring


_MEASURED: list[str] = []


@pytest.fixture(scope="session")
def measured() -> scoring_job.Measured:
    """Return ``measured(what, seconds)``, which records a duration for the summary of the test run."""
    return lambda what, seconds: _MEASURED.append(f"{what}: {seconds:.0f} s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded durations."""
    for line in _MEASURED:
        terminalreporter.write_line(line)
