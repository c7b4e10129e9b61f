"""An environment's class uses the machine of its sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from episodes import open_agent, play
from harbor_tasks import run_machines, write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_job.tasks import read_task
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import SampleBody
from plaudit_workers.agents.messages import EnvironmentClass
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.machine_tools import MachineTools

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
CLASSES = '''
import asyncio


class Shell:
    def __init__(self, sandbox):
        self.sandbox = sandbox

    def reset(self, how=""):
        code, files = self.sandbox.exec("ls; pwd")
        return f" {code} {files.split()}"

    def write(self, content: str) -> str:
        """Write a file twice.

        Args:
            content: of the file
        """
        self.sandbox.upload("/app/deep/er/file", content)
        self.sandbox.upload("bytes", bytes(range(256)) * 200)
        assert self.sandbox.download("bytes") == bytes(range(256)) * 200
        assert self.sandbox.download("deep/er/file").decode() == content
        return str(tuple(self.sandbox.exec("cat deep/er/file; exit 3")))

    def stop(self) -> str:
        """Run what does not end."""
        return str(tuple(self.sandbox.exec("echo begun; sleep 100", timeout_s=1)))

    def miss(self) -> str:
        """Read a file that there is not."""
        try:
            self.sandbox.download("gone")
        except ValueError as error:
            return str(error)

    async def wait(self) -> str:
        """Use the machine without blocking."""
        try:
            self.sandbox.exec("true")
        except RuntimeError as error:
            return f"{error}; {(await asyncio.to_thread(self.sandbox.exec, 'echo apart')).output}"

    def get_reward(self):
        return float(self.sandbox.exec("cat score").output or 0)


class Without:
    def reset(self):
        pass


class Turns:
    def __init__(self, env_config, sandbox):
        self.sandbox = sandbox

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        code, text = self.sandbox.exec(action)
        observation = {"role": "user", "content": f"{code}: {text}"}
        return {"observations": [observation], "reward": float(code == 0), "done": "done" in text}
'''


async def played(folder: Path, name: str, *turns: str, **changes: Any) -> SampleBody:
    """Play a sample in an environment with a machine; return its body."""
    (folder / "classes.py").write_text(CLASSES)
    processes = AgentProcesses([EnvironmentClass(str(folder / "classes.py"), name, sandbox=True)])
    try:
        tokenizer = chat_tokenizer()
        agent = await open_agent(processes, tokenizer, 60.0)
        agent.machines = MachineTools(run_machines(folder), [], 2)
        return (await play(agent, tokenizer, *turns, max_tokens=8000, **changes))[1]
    finally:
        await processes.close()


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.long
async def test_a_class_runs_commands_and_copies_files_in_its_samples_machine(tmp_path: Path) -> None:
    row = read_task(write_sum_task(tmp_path / "sum", **{"environment/score": "0.5"})).row()
    calls = [call("write", '{"content": "é"}'), call("stop"), call("miss"), call("wait")]
    body = await played(tmp_path, "Shell", *calls, "Done.", extra_info=row["extra_info"])
    assert body.sample.failure is None
    assert body.sample.messages[-1]["content"] == "Play. 0 ['a', 'b', 'score', '/app']"
    written, stopped, missed, apart = [each["content"] for each in body.sample.completion if each["role"] == "tool"]
    assert written == "(3, 'é')"
    assert stopped == "(124, 'begun\\n\\n(stopped: it did not end within 1 s)')"
    assert "download of gone" in missed
    assert apart == "sandbox.exec blocks: in an async method use await asyncio.to_thread(…); apart\n"
    assert body.sample.agent_reward is not None
    assert body.sample.agent_reward.value == 0.5
    times = body.generation.sandbox
    assert times is not None
    assert times.num_commands >= 9
    assert body.sample.machine


async def test_a_class_of_turns_has_it_too(tmp_path: Path) -> None:
    body = await played(tmp_path, "Turns", "echo one > x", "cat x; false", "echo done")
    shown = [each["content"] for each in body.sample.completion if each["role"] == "user"]
    assert shown[:2] == ["0: ", "1: one\n"]
    assert body.sample.turn_rewards == [1.0, 0.0, 1.0]


@pytest.mark.long
async def test_a_machine_that_broke_ends_the_sample_without_a_score(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    (tmp_path / "sandboxes" / "t-0-1.0").write_text("in the place of the group's folder")
    body = await played(tmp_path, "Shell", "Done.")
    assert body.sample.failure is not None
    assert body.sample.failure.outcome == "infra_error"


async def test_a_class_that_takes_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"Without in .* has no parameter sandbox"):
        await played(tmp_path, "Without", "Done.")
