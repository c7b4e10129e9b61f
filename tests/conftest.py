"""What every part's tests share: one Redis a session, a run name a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from plaudit_workers.launch.redis_server import RedisServer

RUNS = Path(__file__).parent / "e2e"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes share the tests: a file stays whole, and all whole runs stay with the one Ray they share."""
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        whole_run = item.path.is_relative_to(RUNS) or "ray_cluster" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("runs" if whole_run else item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis for the whole session; tests keep apart by their run names."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run_name() -> str:
    """A run of this test's own: all its keys carry it."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A real one-node Ray for the whole session (it takes 6 s to start); gives its address."""
    import ray

    from plaudit_workers.launch import placement

    placement.connect(None, num_cpus=16)
    yield ray.get_runtime_context().gcs_address
    placement.disconnect()
