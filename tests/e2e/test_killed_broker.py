"""The process that holds a run's machines is killed while they are in use, and the next one goes on with them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from builders import make_prompt
from harbor_tasks import write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_job.tasks import read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_reward.served_machines import ServedProvider
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import free_port
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from waiting import until

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
JOB = """\
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: /models/tiny}
  data: {train: {tasks: /tasks}}
  algorithm: {steps: 1}
  rollout: {agent: {kind: tools, tools: [{sandbox: bash}]}}
  sandboxes: {maxConcurrent: 2, memory: 256Mi, disk: 64Mi}
  reward: {scorers: [{name: tests, kind: verifier}]}
  trainer: {}
"""


@contextmanager
def process(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(
        [sys.executable, "-m", "plaudit_workers.sandboxes"], env={**os.environ, **environment}, start_new_session=True
    )
    try:
        yield running
    finally:
        running.terminate()
        assert running.wait(30) in (0, -signal.SIGKILL)


def page(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


async def test_a_killed_broker_is_replaced(
    address: RedisAddress, transport: Transport, run_name: str, tmp_path: Path
) -> None:
    task = read_task(write_sum_task(tmp_path / "task"))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "token").write_text("a-token-of-this-run")
    (tmp_path / SANDBOXES).mkdir()
    port, health = free_port(), free_port()
    environment = {
        "PLAUDIT_JOB": str(tmp_path / "job.yaml"),
        "PLAUDIT_RUN": run_name,
        "PLAUDIT_RUN_FOLDER": str(tmp_path),
        "PLAUDIT_HEALTH_PORT": str(health),
        "PLAUDIT_SANDBOXES_PORT": str(port),
        "PLAUDIT_SANDBOXES_TOKEN_FILE": str(tmp_path / "token"),
        "PLAUDIT_SANDBOXES_LEASE_S": "1",
        **address.environment(),
    }
    provider = ServedProvider(ProcessProvider(MachineChoice()), f"http://127.0.0.1:{port}", "a-token-of-this-run")
    machines = RunMachines(tmp_path / SANDBOXES, provider)
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    version = PolicyVersion(trainer.incarnation, 0)
    await trainer.admit(make_prompt("g", 3, min_version=version, extra_info=task.row()["extra_info"]))

    with process(environment) as first:
        (_, done), (_, cut) = await asyncio.gather(*(machines.claim("g", index, task) for index in range(2)))
        await done.machine.run(["bash", "-c", "echo 7 > sum"], timeout_s=20.0, directory=done.directory)
        running = asyncio.create_task(
            cut.machine.run(["bash", "-c", "echo x >> ../root/begun; sleep 60"], timeout_s=90.0, directory="/app")
        )
        waiting = asyncio.create_task(machines.claim("g", 2, task))
        await until(lambda: list(tmp_path.glob("machines/*/files/root/begun")))
        os.killpg(first.pid, signal.SIGKILL)
    with process(environment):
        with pytest.raises(InfrastructureError, match="lost while the command ran"):
            await running
        assert (await machines.verify(done, task, timeout_s=30.0, environment={})).reward == 1.0
        await machines.remove(cut.machine.name)
        _, late = await waiting  # for a place of the broker before
        assert (await late.machine.run(["cat", "a"], timeout_s=20.0, directory=late.directory)).output == "3"
        series = await asyncio.to_thread(page, f"http://127.0.0.1:{health}/metrics")
        assert 'plaudit_broker_machines{state="claimed"} 2.0' in series
        await trainer.close("g", "dropped", "test")
        await until(lambda: not list((tmp_path / "machines").iterdir()))
        async with asyncio.timeout(20):  # a place is free after its machine is gone
            while await transport.commands.hgetall(transport.names.sandboxes):
                await asyncio.sleep(0.05)
    await machines.close()
