"""Fixtures for the tests of all parts: one Redis for the session, one run name for each test."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.transport import Transport

EXAMPLES = int(os.environ.get("PLAUDIT_EXAMPLES", "10"))
"""Examples for each property: 40 in CI, and for an occasional long search ``PLAUDIT_EXAMPLES=1000 make test``."""
ALL_CASES = EXAMPLES >= 40
"""True if a suite runs all cases of a test that is marked ``alike``, False if it runs every third."""
gc.disable()  # until all tests are collected: a sixth of the time to import them
settings.register_profile("plaudit", max_examples=EXAMPLES, deadline=None)
settings.load_profile("plaudit")

UNTIL = float(os.environ.get("PLAUDIT_TESTS_UNTIL", "inf"))
"""Time (seconds since the epoch) after which no further test begins. A machine that is late names what it leaves out,
instead of being stopped in the middle with nothing to show."""

PART = os.environ.get("PLAUDIT_TESTS_PART", "1/1")
"""``2/3``: of every three tests in a row the second. For tests that are too long to run all of them for each commit."""

ROOMS = {
    "tests/e2e/test_copy_digits.py": "runs that learn",
    "tests/e2e/test_hacked_reward.py": "runs that learn",
    "tests/e2e/test_images.py": "runs that learn",
    "tests/e2e/test_terminal.py": "runs that learn",
    "tests/e2e/test_tutorial.py": "runs that learn",
    "tests/e2e/test_chaos.py": "chaos",
    "tests/e2e/test_named_causes.py": "named causes",
    "tests/e2e/test_rollout_overhead_benchmark.py": "rollout benchmark",
    "tests/e2e/test_soak.py": "soak",
    "tests/e2e/": "runs",
    "tests/metrics/alerting/test_walk.py": "broken runs",
    "tests/metrics/alerting/test_lost_roles.py": "lost roles",
    "tests/metrics/alerting/test_prometheus.py": "lost roles",
    "tests/metrics/alerting/test_matrix.py": "simulated runs",
    "tests/workers/training/conducted/test_turns.py": "turns",
    "tests/metrics/alerting/": "observed run",
    "tests/metrics/test_exemplars.py": "observed run",
    "tests/metrics/test_spans.py": "observed run",
    "tests/metrics/test_top.py": "observed run",
    "tests/reward/model_server/test_reward_classes.py": "vLLM",
    "tests/reward/model_server/": "model servers",
    "tests/workers/rollout/test_vllm": "vLLM",
    "tests/workers/rollout/test_tool_parsers.py": "vLLM",
    "tests/workers/training/model/test_rank": "ranks",
    "tests/workers/training/model/test_sequence_parallel.py": "ranks",
    "tests/workers/training/model/test_sharded_start.py": "ranks",
    "tests/workers/training/model/test_compilation.py": "compiler",
    "tests/reward/judge/test_vllm.py": "judge behind vLLM",
    "tests/workers/scoring/test_served.py": "served judge",
    "tests/workers/launch/test_supervisor.py": "Ray",
    "tests/fuzz/": "doors",
    "tests/metrics/page/": "page",
    "tests/workers/training/conducted/test_conductor.py": "conductor",
    "tests/workers/training/conducted/test_resume.py": "resumed runs",
    "tests/workers/rollout/test_environments.py": "environments",
    "tests/workers/rollout/test_endpoint.py": "endpoint",
    "tests/workers/rollout/test_tools.py": "tools",
    "tests/reward/attacks/test_wrong_programs.py": "attacks",
    "tests/reward/code/test_": "programs",
    "tests/workers/stream/test_invariants.py": "search",
    "tests/docs/test_house.py": "product modules",
    "tests/docs/test_modules.py": "product modules",
    "tests/docs/test_names.py": "product modules",
    "tests/operator/test_static_security.py": "product modules",
}
"""Files that share something expensive (a Ray, a Chromium, a run, a vLLM, a server that forks ranks) and so belong into
one process, and files that take long; the longest rooms first. The first prefix that fits is a file's."""
MARKERS = {"ray_cluster": "engines", "chromium": "long"}
"""Of tests that use a fixture."""


@pytest.hookimpl(tryfirst=True)  # before the choice by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the rooms in their order, so that the processes end about the same time; marks what they share."""
    files = {item.path: item.nodeid for item in items}
    for item in items:
        for fixture, marker in MARKERS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if files[item.path].startswith("tests/e2e/"):
            item.add_marker(pytest.mark.whole)
    starts = list(ROOMS)
    places = {
        path: next((number for number, start in enumerate(starts) if nodeid.startswith(start)), len(starts))
        for path, nodeid in files.items()
    }
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")  # of what -m has chosen
def pytest_keep_some(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every third case of those that are alike, in a suite (``-m``); who names a file or a test gets all."""
    if ALL_CASES or not config.getoption("markexpr"):
        return
    numbers: Counter[str] = Counter()
    kept = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not item.get_closest_marker("alike") or numbers[test] % 3 == 0:
            kept.append(item)
        numbers[test] += 1
    _keep(config, items, kept)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")  # of what -m has chosen
def pytest_keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of PART. Those of one file are spread over all parts, and so are its seconds."""
    number, parts = (int(each) for each in PART.split("/"))
    if parts > 1:
        _keep(config, items, items[number - 1 :: parts])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    among = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in among])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempts what is imported by now from garbage collection: tests that collect would take half a second each.

    A collection after every 700 new objects would take a tenth of the tests' CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leaves a test out, before its fixtures begin, once the time for tests is over."""
    if time.time() > UNTIL:
        pytest.skip("left out: the time for tests is over (PLAUDIT_TESTS_UNTIL)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands whole files, and whole rooms, to the processes that share the tests (pytest-xdist)."""
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((room for start, room in ROOMS.items() if file.startswith(start)), file)

        def _reschedule(self, node: Any) -> None:
            # A process gets its next file with its last test, not with the last but one: both may be long.
            busy = self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) > 1
            if not busy:
                super()._reschedule(node)

    return Rooms(config, log)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis for the whole session; tests keep apart by their run names."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        with redis.Redis.from_url(server.url, password=server.password) as client:
            client.config_set("hz", 100)  # by default a read that waits 1 ms for an entry takes up to 100 ms
        yield server


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Take back what commands such as ``plaudit try`` do to the root logger for the rest of their process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run_name() -> str:
    """A run of this test's own: all its keys carry it."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def address(redis_server: RedisServer) -> RedisAddress:
    """Address of the session's Redis."""
    return RedisAddress(redis_server.url, redis_server.password)


@pytest.fixture
async def transport(address: RedisAddress, run_name: str) -> AsyncIterator[Transport]:
    """A connection; afterwards the run's keys are gone."""
    transport = await Transport.open(address, run_name)
    yield transport
    async for key in transport.commands.scan_iter(f"plaudit:{{{run_name}}}:*", count=1000):
        await transport.commands.unlink(key)
    await transport.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer with a chat template."""
    from chat_tokenizer import chat_tokenizer
    from plaudit_workers.rollout.vllm_arguments import prepare_environment

    prepare_environment("")  # as a rollout does before it imports vLLM
    return chat_tokenizer()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """A real one-node Ray; gives its address. A file's, for it takes 6 s to start and, idle, 3 % of a core."""
    import ray

    from plaudit_workers.launch.ray_processes import connect_to_ray, disconnect

    connect_to_ray(None, num_cpus=16)
    yield ray.get_runtime_context().gcs_address
    disconnect()


@pytest.fixture
def quick_benchmark(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the short form of a benchmark with these options, which must exit with 0; print what it prints.

    Returns its figures.
    """

    def run(name: str, *options: str) -> dict[str, Any]:
        figures_file = tmp_path / f"{name}.json"
        program = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
        command = [sys.executable, program, "--quick", "--json", figures_file, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout, end="")
        figures: dict[str, Any] = json.loads(figures_file.read_text())
        return figures

    return run


@pytest.fixture(scope="session")
def path_with_cluster() -> str:
    """``PATH`` with the programs of the test cluster (kubectl, helm) before all others, where they are built."""
    harness = Path(__file__).parent / "cluster" / "cluster"
    built = subprocess.run([harness, "programs"], capture_output=True, text=True, check=True).stdout.strip()
    return os.pathsep.join([built, os.environ["PATH"]])
