"""The chart installed with real images, in a namespace under Pod Security restricted."""

from __future__ import annotations

import pytest
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(1800)  # images may have to be built first


def test_both_operators_are_ready_and_one_leads(installed: Cluster):
    def ready() -> bool:
        operators = installed.get("deployment", "plaudit-operator", "plaudit")
        return bool(operators["status"].get("readyReplicas") == 2)

    installed.until("both", ready)
    lease = installed.get("lease", "plaudit-operator", "plaudit")
    assert lease["spec"]["holderIdentity"].startswith("plaudit-operator-")


def test_helm_test_passes(installed: Cluster):
    installed.run("helm", "test", "plaudit", "--namespace", "plaudit", "--timeout", "5m")
