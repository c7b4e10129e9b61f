"""A real run whose parts a test slows, one at a time: ``faulty_roles.py <role> <settings as JSON>`` is one process.

The file ``faults.json`` in the run's folder holds the seconds that each part takes longer, and every part reads it
again for each piece of work. Engine and policy are scripted; the environment, its tool, the scorers, the streams and
the heartbeats are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.agents.messages import EnvironmentClass, FinishedSample
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.engine import SampleRequest, WeightSwitch
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine
from simulated_run import Simulation, make_plan

FAULTS = "faults.json"
_WITHOUT_TORCH = {"USE_TORCH": "0"}
"""For transformers, of which the tokenizer alone is used: torch takes seconds to import."""
_READ_FAULT = """
import asyncio, json, pathlib, time

def fault(name):
    return json.loads(pathlib.Path({path!r}).read_text()).get(name, 0.0)
"""
_SCORER = (
    _READ_FAULT
    + """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(fault("scorer"))
    return 1.0
"""
)
_ENVIRONMENT = (
    _READ_FAULT
    + '''
class Lamp:
    def reset(self, **about):
        time.sleep(fault("environment"))
        return " Press."

    def press(self, button: int) -> str:
        """Press a button.

        Args:
            button: its number
        """
        time.sleep(fault("tool"))
        return "on"
'''
)
_TURNS = ['<tool_call>\n{"name": "press", "arguments": {"button": 1}}\n</tool_call>', "It is on."]


class FaultyEngine(ScriptedEngine):
    """Generate and load weights later by what the faults say."""

    faults = Path()

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Generate late."""
        await asyncio.sleep(_fault(self.faults, "engine"))
        return await super().generate(request)

    async def load_weights(self, path: Path, version: PolicyVersion, switch: WeightSwitch = "continue") -> None:
        """Load late."""
        await asyncio.sleep(_fault(self.faults, "weights"))
        await super().load_weights(path, version, switch)


def _fault(faults: Path, name: str) -> float:
    return float(json.loads(faults.read_text()).get(name, 0.0))


class FaultyRun:
    """A run of two rollouts, two reward workers and a trainer, each a process; ``break_`` and ``mend`` its parts.

    Args:
        port: of the network between the processes and Redis; None: they connect directly.
        judge_url: address of the judge that scores beside the function.
    """

    def __init__(
        self, server: Any, name: str, folder: Path, *, port: int | None, judge_url: str, staleness: int
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "scorer.py").write_text(_SCORER.format(path=str(folder / FAULTS)))
        (folder / "judge.j2").write_text("How good is {{ response }}?")
        self.mend()
        about = {"url": server.url, "password": server.password, "port": port, "run": name, "judge_url": judge_url}
        self._settings = {**about, "folder": str(folder), "staleness": staleness}
        self._processes: list[asyncio.subprocess.Process] = []

    def break_(self, **seconds: float) -> None:
        """Let parts take longer, and all others as long as ever."""
        whole = self.folder / "faults.new"
        whole.write_text(json.dumps(seconds))
        whole.rename(self.folder / FAULTS)

    def mend(self) -> None:
        """Let every part be fast again."""
        self.break_()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the processes; they are killed when the context ends."""
        try:
            await self.start()
            yield
        finally:
            await self.kill()

    async def start(self) -> None:
        """Start the processes; the trainer continues from the newest checkpoint."""
        for role in ("rollouts", "reward-0", "reward-1", "trainer"):
            command = [sys.executable, __file__, role, json.dumps(self._settings)]
            with (self.folder / f"{role}.log").open("ab") as log:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, stdout=log, stderr=log, env=os.environ | _WITHOUT_TORCH
                    )
                )

    async def kill(self) -> None:
        """Kill the processes where they are."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._processes.clear()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(self._pid("rollout-1"), signal.SIGKILL)

    def _pid(self, role: str) -> int:
        return int((self.folder / f"{role}.pid").read_text())

    def freeze(self, role: str) -> None:
        """Stop a process where it is."""
        os.kill(self._pid(role), signal.SIGSTOP)

    def thaw(self, role: str) -> None:
        """Let it continue."""
        os.kill(self._pid(role), signal.SIGCONT)


async def _rollout(simulation: Simulation, name: str, stack: AsyncExitStack) -> None:
    import episodes
    from chat_tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer()
    path = simulation.folder / f"{name}.py"
    path.write_text(_ENVIRONMENT.format(path=str(simulation.folder / FAULTS)))
    processes = AgentProcesses([EnvironmentClass(str(path), "Lamp")])
    stack.push_async_callback(processes.close)
    agent = await episodes.open_agent(processes, tokenizer, limit_s=60.0)
    script = Script(Constant(0.01), turns=_TURNS)
    simulation.engine_class = lambda _: FaultyEngine(script, tokenizer=tokenizer)  # type: ignore[assignment]
    simulation.agent_class = lambda: agent
    await simulation.serve(name, asyncio.Event())


async def main(role: str, settings: dict[str, Any]) -> None:
    """Run one process until it is killed."""
    folder = Path(settings["folder"])
    FaultyEngine.faults = folder / FAULTS
    server = SimpleNamespace(url=settings["url"], password=settings["password"])
    simulation = Simulation(server, settings["run"], folder)
    simulation.port = settings["port"]
    scorer = {"name": "exact", "kind": "python", "python": {"path": str(folder / "scorer.py")}}
    judge = {"baseUrl": settings["judge_url"], "model": "big", "promptTemplate": {"path": str(folder / "judge.j2")}}
    judge |= {"parse": {"regex": "score: ([0-9.]+)"}}
    simulation.scorers = [scorer, {"name": "judge", "kind": "judge", "judge": judge, "limits": {"concurrency": 2}}]
    async with AsyncExitStack() as stack:
        if role == "trainer":
            simulation.update_s = lambda groups: 0.05 + _fault(folder / FAULTS, "trainer")
            await simulation.train(make_plan(steps=100_000, staleness=settings["staleness"], max_tokens=400))
        elif role.startswith("rollout"):
            await _rollout(simulation, role, stack)
        else:
            await simulation.serve(role, asyncio.Event())


def of_fork(role: str) -> str:
    """Return the role of this process; the two rollouts are one until what takes long is imported."""
    if role != "rollouts":
        return role
    import chat_tokenizer
    import episodes

    del chat_tokenizer, episodes
    return "rollout-0" if os.fork() else "rollout-1"


if __name__ == "__main__":
    about = json.loads(sys.argv[2])
    own_role = of_fork(sys.argv[1])
    (Path(about["folder"]) / f"{own_role}.pid").write_text(str(os.getpid()))
    asyncio.run(main(own_role, about))
