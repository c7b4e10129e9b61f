"""Agents: what a trajectory may be, and users' own classes."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import uvloop

from builders import make_prompt
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Prompt
from plaudit_workers.agents.messages import AgentClass, FinishedSample, Trajectory
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.agent import AgentError, CustomAgent

TWO_TURNS = """
import numpy as np

from plaudit_workers.rollout.agents.agent import Trajectory


class TwoTurns:
    async def run(self, prompt, generate):
        ids = np.frombuffer(prompt.prompt_ids, "<i4").tolist()
        trajectory = Trajectory()
        trajectory.add_turn(await generate(ids))
        trajectory.add_observation([9, 9, 9])
        trajectory.add_turn(await generate(ids + trajectory.response_ids))
        return trajectory


class NoRun:
    pass


class SyncRun:
    def run(self, prompt, generate):
        return None


class CannotBeMade:
    def __init__(self):
        raise ValueError("no key")

    async def run(self, prompt, generate):
        return None
"""


FAILING = """
import os, signal, time

from plaudit_workers.rollout.agents.agent import Trajectory


def good():
    return Trajectory([1], [0.0], [1], [(0, 1, 0)])


class Base:
    async def run(self, prompt, generate):
        return good() if prompt.position else self.fail()


class Raises(Base):
    def fail(self): raise ValueError("no luck")


class Hangs(Base):
    def fail(self): time.sleep(60)


class Crashes(Base):
    def fail(self): os.kill(os.getpid(), signal.SIGSEGV)


class Leaves(Base):
    def fail(self): os._exit(3)


class ReturnsText(Base):
    def fail(self): return "text"


class WritesABigNumber(Base):
    def fail(self):
        trajectory = good()
        trajectory.messages = [{"role": "tool", "content": {"n": 1 << 67}}]
        return trajectory


class WritesAnObject(Base):
    def fail(self):
        trajectory = good()
        trajectory.environment = {"board": object()}
        return trajectory


class WritesHugeTokens(Base):
    def fail(self): return Trajectory([1 << 70], [0.0], [1], [(0, 1, 0)])


class Counts(Base):
    count = 0

    async def run(self, prompt, generate):
        Counts.count += 1
        return Trajectory([Counts.count], [0.0], [1], [(0, 1, 0)])


class Blocks(Base):
    async def run(self, prompt, generate):
        time.sleep(0.5)
        return good()
"""


def prompt_of(position: int) -> Prompt:
    ids = np.asarray([1], "<i4").tobytes()
    return make_prompt("t", 1, position=position, seed=0, prompt="", prompt_ids=ids)


async def never(ids, max_tokens=None):
    raise AssertionError("the agent asked for tokens")


@pytest.fixture
def agent_file(tmp_path):
    path = tmp_path / "my_agent.py"
    path.write_text(TWO_TURNS)
    return path


def finished(tokens: list[int], *spans: tuple[int, int, int]) -> FinishedSample:
    return FinishedSample(tokens, [-0.5] * len(tokens), list(spans), "stop", 0.1)


def test_turns_join_with_spans_counted_from_the_trajectorys_begin() -> None:
    trajectory = Trajectory()
    trajectory.add_turn(finished([1, 2, 3], (0, 1, 4)))
    trajectory.add_observation([7, 7])
    trajectory.add_turn(finished([4, 5, 6], (0, 1, 4), (2, 1, 5)))
    assert trajectory.response_ids == [1, 2, 3, 7, 7, 4, 5, 6]
    assert trajectory.loss_mask == [1, 1, 1, 0, 0, 1, 1, 1]
    assert trajectory.logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert trajectory.version_spans == [(0, 1, 4), (7, 1, 5)]
    assert trajectory.problem() == ""


def test_a_trajectory_that_begins_with_an_observation_is_covered_from_token_0() -> None:
    trajectory = Trajectory()
    trajectory.add_observation([7, 7])
    trajectory.add_turn(finished([1], (0, 2, 3)))
    assert trajectory.version_spans == [(0, 2, 3)]
    assert trajectory.problem() == ""


@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (Trajectory(), "no tokens"),
        (Trajectory([1], [], [1], [(0, 1, 0)]), "differ in length"),
        (Trajectory([1], [0.0], [1], []), "token 0"),
        (Trajectory([1, 2], [0.0, 0.0], [1, 1], [(1, 1, 0)]), "token 0"),
    ],
)
def test_an_unpublishable_sample_is_named(trajectory, problem) -> None:
    assert problem in trajectory.problem()


@pytest.fixture
def open_class():
    """Opens a user's class as the rollout does; its processes end with the context."""

    @asynccontextmanager
    async def opened(path, class_name, limit_s=20.0):
        processes = AgentProcesses([AgentClass(str(path), class_name)])
        try:
            await processes.open()
            yield CustomAgent(processes, limit_s)
        finally:
            await processes.close()

    return opened


async def test_a_custom_agent_runs_several_turns(agent_file, open_class, run, start_worker, scripted) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=2)
    async with open_class(agent_file, "TwoTurns") as agent, start_worker(scripted(tokens=5), agent=agent):
        group = await run.published("t-0-1.0", 2)
    for sample in group.samples:
        assert sample.body.loss_mask == bytes([1] * 5 + [0] * 3 + [1] * 5)
        first, second = sample.body.response_ids[:20], sample.body.response_ids[32:]
        assert first != second
        generation = sample.body.generation
        assert generation.response_tokens == 13
        assert generation.generate_s >= 0.04
        assert [(turn.first, turn.tokens) for turn in generation.turns] == [(0, 5), (8, 5)]


@pytest.mark.alike
@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("Raises", "ValueError: no luck"),
        ("Hangs", "no trajectory within 0.3 s"),
        ("Crashes", "was killed by SIGSEGV"),
        ("Leaves", "ended with exit code 3"),
        ("ReturnsText", "returned str, not a Trajectory"),
        ("WritesABigNumber", r"^messages\[0\].content.n: is an integer beyond 64 bits"),
        ("WritesAnObject", r"^environment.board: is of type object"),
        ("WritesHugeTokens", "OverflowError"),
    ],
)
async def test_a_custom_agent_that_fails_costs_its_own_sample(tmp_path, open_class, class_name, message) -> None:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    async with open_class(path, class_name, limit_s=0.3 if class_name == "Hangs" else 20.0) as agent:
        bad = prompt_of(0)
        with pytest.raises(AgentError, match=message):
            await agent.run(bad, never)
        assert (await agent.run(prompt_of(1), never)).response_ids == [1]


async def test_samples_of_an_agent_share_no_state(tmp_path, open_class) -> None:
    path = tmp_path / "counting.py"
    path.write_text(FAILING)
    async with open_class(path, "Counts") as agent:
        assert [(await agent.run(prompt_of(1), never)).response_ids for _ in range(3)] == [[1]] * 3


@pytest.mark.long
async def test_a_blocking_agent_does_not_delay_the_rollouts_event_loop(tmp_path, open_class) -> None:
    path = tmp_path / "blocking.py"
    path.write_text(FAILING)
    async with open_class(path, "Blocks") as agent:
        running = [asyncio.ensure_future(agent.run(prompt_of(1), never)) for _ in range(8)]
        turns = 0
        while not all(task.done() for task in running):
            await asyncio.sleep(0.005)
            turns += 1
    # Each blocks its own process for 0.5 s: one after another, or in this loop, they would leave hardly a turn.
    assert turns > 10


def test_agents_run_on_uvloop_as_in_rays_actors(tmp_path, open_class) -> None:
    path = tmp_path / "good.py"
    path.write_text(FAILING)

    async def run() -> list[int]:
        async with open_class(path, "Blocks") as agent:
            return (await agent.run(prompt_of(1), never)).response_ids

    assert uvloop.run(run()) == [1]


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("Missing", "no class 'Missing'"),
        ("NoRun", "async def run"),
        ("SyncRun", "async def run"),
        ("CannotBeMade", "no key"),
    ],
)
async def test_a_class_that_is_no_agent_is_refused(agent_file, open_class, class_name, message) -> None:
    with pytest.raises(RefusedError, match=message):
        async with open_class(agent_file, class_name):
            pass


async def test_a_file_that_does_not_import_is_refused(tmp_path, open_class) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def (")
    for file, message in ((path, "line 1"), (tmp_path / "absent.py", "does not exist")):
        with pytest.raises(RefusedError, match=message):
            async with open_class(file, "Any"):
                pass
