"""``kind: endpoint`` with ``sandbox``: an agent's program in the sample's machine, which reaches the policy alone.

Programs in real pods: ``tests/e2e_cluster/test_sandboxes.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from container_images import IMAGE, why_none
from episodes import play
from harbor_tasks import run_machines, write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_job.load import parse_job
from plaudit_job.tasks import Task, read_task
from plaudit_reward.machines import RunMachines
from plaudit_reward.providers import ContainerProvider, MachineChoice, ProcessProvider, TaskMachine
from plaudit_reward.scorer import Attempt
from plaudit_reward.verifier import VerifierScorer
from plaudit_sandbox.machine import CommandEnd, Machine
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import SampleBody
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.endpoint import EndpointAgent, EndpointServer, MachineProgram
from plaudit_workers.rollout.agents.machine_tools import MachineTools
from plaudit_workers.rollout.agents.session import ChatFormats
from plaudit_workers.rollout.worker import open_agent

CODER = '''
"""Asks the policy for one command after another, and runs them where it is itself."""
import json, os, subprocess, sys, urllib.error, urllib.request

given = json.load(sys.stdin)


def ask(messages, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]


messages = given["messages"]
while (command := ask(messages)) != "Done.":
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    messages += [{"role": "assistant", "content": command}, {"role": "user", "content": done.stdout + done.stderr}]
'''
NEEDS_NAMESPACES = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
PROVIDERS = [
    pytest.param("process", marks=NEEDS_NAMESPACES),
    pytest.param("container", marks=[pytest.mark.containers, pytest.mark.skipif(bool(why_none()), reason=why_none())]),
]


class Samples:
    """Play samples of a task whose agent's program runs in their machines."""

    def __init__(self, folder: Path, machines: RunMachines, server: EndpointServer) -> None:
        self.machines = machines
        self._task = write_sum_task(folder / "task")
        self.server = server
        self._file = folder / "coder.py"

    async def play(
        self, *turns: str, program: str = CODER, limit_s: float = 60.0, command: tuple[str, ...] = ()
    ) -> SampleBody:
        """Return a sample whose policy writes the turns."""
        self._file.write_text(program)
        tokenizer, task = chat_tokenizer(), read_task(self._task)
        tools, path = MachineTools(self.machines, [], 4), "" if command else str(self._file)
        inside = MachineProgram(tools, command or ("python3",), path)
        formats = ChatFormats(tokenizer, {}, "hermes")
        agent = EndpointAgent(AgentProcesses([]), self.server, formats, 8, limit_s, inside=inside)
        row = task.row()
        messages = [{"role": "user", "content": task.instruction}]
        _, body = await play(agent, tokenizer, *turns, messages=messages, extra_info=row["extra_info"])
        return body

    async def reward(self, body: SampleBody) -> float | None:
        """Return what the task's tests say about a sample."""
        return (await VerifierScorer("tests", self.machines, 1).score(body.sample, Attempt(120.0))).value


class NetworkedMachine(Machine):
    """A folder of this host whose commands see the host's network, as those of a pod see that of the cluster."""

    async def run(self, command: Any, *, timeout_s: float, **given: Any) -> CommandEnd:
        assert given.keys() <= {"environment", "directory", "stdin"}
        pipe, folder = asyncio.subprocess.PIPE, self.folder / "files"
        variables = {"PATH": os.environ["PATH"], **given.get("environment", {})}
        words = [str(folder / word[1:]) if word.startswith("/tmp/") else word for word in command]
        started = await asyncio.create_subprocess_exec(
            *words, cwd=folder / "app", env=variables, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(started.communicate(given.get("stdin", b"")), timeout_s)
        return CommandEnd("exited", started.returncode or 0, output.decode(), 0.0)


class NetworkedProvider(ProcessProvider):
    """Makes such machines."""

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        return TaskMachine(NetworkedMachine(folder), "/app")


@asynccontextmanager
async def opened(folder: Path, provider: str) -> AsyncIterator[Samples]:
    machines, of_pods = run_machines(folder), None
    if provider == "container":
        made = ContainerProvider(MachineChoice(image=IMAGE, memory_bytes=256 << 20, run=f"programs-{folder.name}"))
        machines = RunMachines(machines.folder, made)
    if provider == "networked":
        machines, of_pods = RunMachines(machines.folder, NetworkedProvider(MachineChoice())), ("127.0.0.2", 0)
    async with EndpointServer(of_pods) as server:
        yield Samples(folder, machines, server)
    machines.provider.end()


def texts(body: SampleBody) -> list[Any]:
    """Return what the policy's commands printed."""
    return [message["content"] for message in body.sample.completion if message["role"] == "user"]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_program_works_in_the_machine_whose_tests_score_it(tmp_path: Path, provider: str) -> None:
    async with opened(tmp_path, provider) as samples:
        right = await samples.play("cat a b", "echo $((3 + 4)) > sum", "Done.")
        wrong = await samples.play("echo 8 > sum", "Done.")
        assert texts(right) == ["34", ""]
        assert (right.sample.failure, right.sample.agent_reward, len(right.generation.turns)) == (None, None, 3)
        times = right.generation.sandbox
        assert times is not None
        assert (times.num_commands, times.failed) == (1, False)
        assert times.exec_s > 0
        assert [await samples.reward(each) for each in (right, wrong)] == [1.0, 0.0]


async def test_a_program_in_a_pod_asks_at_the_address_of_the_rollouts_pod(tmp_path: Path) -> None:
    async with opened(tmp_path, "networked") as samples:
        body = await samples.play('echo "$OPENAI_BASE_URL $NO_PROXY"', "Done.")
        url = samples.server.url_of_pods
    assert url.startswith("http://127.0.0.2:")
    assert texts(body) == [f"{url} 127.0.0.1,localhost,127.0.0.2\n"]


async def test_a_program_in_a_pod_needs_a_rollout_that_pods_reach() -> None:
    spec = {
        "model": {"source": "/model"},
        "data": {"train": {"tasks": "/tasks"}},
        "algorithm": {"steps": 1},
        "rollout": {"agent": {"kind": "endpoint", "command": ["my-agent"], "sandbox": True}},
        "reward": {"scorers": [{"name": "tests", "kind": "verifier"}]},
        "trainer": {},
        "sandboxes": {"provider": "pods", "image": "debian:12"},
    }
    job = parse_job({"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec})
    with pytest.raises(RefusedError, match="sets PLAUDIT_ENDPOINT_HOST"):
        async with open_agent(job):
            pass


LOOKS = """
import glob, json, os, socket, sys

def reach(host, port):
    with socket.socket() as tried:
        tried.settimeout(2)
        return tried.connect_ex((host, port))

def keys():
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            yield open(path).read().partition("OPENAI_API_KEY=")[2].partition(chr(0))[0]
        except OSError:
            pass

places = [("127.0.0.1", 9339), *json.loads(sys.argv[1])]
print(json.dumps([[reach(*place) for place in places], sorted(set(keys()) - {""}), os.environ["OPENAI_API_KEY"]]))
"""


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_machine_reaches_the_policy_alone_and_sees_its_own_key_alone(tmp_path: Path, provider: str) -> None:
    own = socket.gethostbyname(socket.gethostname())
    with socket.create_server(("0.0.0.0", 0)) as redis:
        port = redis.getsockname()[1]
        places = [("127.0.0.1", port), (own, port), ("1.1.1.1", 80), ("169.254.169.254", 80), ("10.0.0.1", 53)]
        look = f"cat > /tmp/looks.py <<'END'\n{LOOKS}\nEND\npython3 /tmp/looks.py '{json.dumps(places)}'"
        async with opened(tmp_path, provider) as samples:
            places.append(("127.0.0.1", int(samples.server.url.rpartition(":")[2].partition("/")[0])))
            bodies = await asyncio.gather(*(samples.play(look, "Done.") for _ in range(2)))
    seen = [json.loads(texts(body)[0]) for body in bodies]
    for reached, keys, key in seen:
        assert reached[0] == 0
        assert all(reached[1:])
        assert keys == [key]
    assert seen[0][2] != seen[1][2]


FLOODS = """
import socket, time
held = [socket.create_connection(("127.0.0.1", 9339)) for _ in range(300)]
time.sleep(1)
closed = 0
for each in held:
    each.settimeout(0)
    try:
        closed += each.recv(1) == b""
    except ConnectionResetError:
        closed += 1
    except BlockingIOError:
        pass
print(closed)
"""


@NEEDS_NAMESPACES
async def test_a_machine_cannot_use_up_the_connections_of_its_rollout(tmp_path: Path) -> None:
    async with opened(tmp_path, "process") as samples:
        before = len(os.listdir("/proc/self/fd"))
        body = await samples.play(f"python3 -c '{FLOODS}'", "Done.")
        assert int(texts(body)[0]) >= 300 - 2 * 64
        assert len(os.listdir("/proc/self/fd")) <= before + 8


@NEEDS_NAMESPACES
async def test_what_a_program_prints_is_no_reward_and_a_bad_end_no_failure(tmp_path: Path) -> None:
    async with opened(tmp_path, "process") as samples:
        prints = await samples.play("echo 7 > sum", "Done.", program=CODER + 'print(json.dumps({"reward": 5}))')
        fails = await samples.play("echo 7 > sum; kill -9 $PPID")
        for body in (prints, fails):
            assert (body.sample.failure, body.sample.agent_reward) == (None, None)
            assert await samples.reward(body) == 1.0


@NEEDS_NAMESPACES
async def test_a_program_that_ends_without_a_turn_is_a_data_error_with_its_words(tmp_path: Path) -> None:
    async with opened(tmp_path, "process") as samples:
        body = await samples.play("never", command=("sh", "-c", 'echo "no luck: $0"; exit 3', "{instruction}"))
        missing = await samples.play("never", command=("no-such-agent",))
        assert list(samples.machines.folder.glob("*/*")) == []
    failure = body.sample.failure
    assert failure is not None
    assert failure.outcome == "data_error"
    assert "exit code 3 without a turn of the policy: no luck: Write the sum of a and b to sum." in failure.reason
    assert missing.sample.failure is not None
    assert "no-such-agent: No such file or directory" in missing.sample.failure.reason


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_late_program_is_killed_with_all_that_it_started_and_scored(tmp_path: Path, provider: str) -> None:
    async with opened(tmp_path, provider) as samples:
        body = await samples.play("echo $((3 + 4)) > sum; sleep 424242 & sleep 424242", limit_s=10.0)
        assert (body.sample.failure, body.generation.finish_reason) == (None, "timeout")
        assert await samples.reward(body) == 1.0
        assert b"424242" not in b"".join(map(_command_line, Path("/proc").glob("[0-9]*")))


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@NEEDS_NAMESPACES
async def test_a_program_that_ignores_its_limit_of_turns_is_ended_and_scored(tmp_path: Path) -> None:
    insists = """
while True:
    try:
        ask(given["messages"] + [{"role": "user", "content": str(time.monotonic())}])
    except urllib.error.HTTPError:
        pass
"""
    program = CODER[: CODER.rindex("messages = ")].replace("import json", "import json, time") + insists
    async with opened(tmp_path, "process") as samples:
        body = await samples.play(*["Again."] * 8, program=program)
        assert (body.sample.failure, body.sample.finish_reason) == (None, "length")
        assert len(body.branches) == 7
        assert await samples.reward(body) == 0.0


@NEEDS_NAMESPACES
async def test_keys_of_other_samples_and_of_ended_ones_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, "process") as samples:
        ended = await samples.play('echo "$OPENAI_API_KEY"', "Done.")
        stolen = texts(ended)[0].strip()
        tries = CODER.replace('os.environ["OPENAI_API_KEY"]', repr(stolen))
        body = await samples.play("echo 7 > sum", program=tries)
    assert body.sample.failure is not None
    assert "HTTP Error 401" in body.sample.failure.reason
