"""Share helm between the tests of the chart."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="module")
def helm(path_with_cluster: str) -> str:
    program = shutil.which("helm", path=path_with_cluster)
    if program is None:
        pytest.skip("helm is not installed, nor built for the test cluster (make cluster-up)")
    return program
