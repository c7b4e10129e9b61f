"""Agents: what a trajectory may be, and users' own classes."""

import pytest

from plaudit_workers.process import RefusedError
from plaudit_workers.rollout.agents.agent import Trajectory
from plaudit_workers.rollout.agents.custom import load_agent
from plaudit_workers.rollout.engines.protocol import FinishedSample

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
def test_what_cannot_be_published_is_named(trajectory, problem) -> None:
    assert problem in trajectory.problem()


async def test_a_custom_agent_runs_several_turns(agent_file, run, start_worker, scripted) -> None:
    await run.announce(0)
    await run.admit("t-0-1.0", n=2)
    async with start_worker(scripted(tokens=5), agent=load_agent(agent_file, "TwoTurns")):
        group = await run.published("t-0-1.0", 2)
    for sample in group.samples:
        assert sample.body.loss_mask == bytes([1] * 5 + [0] * 3 + [1] * 5)
        first, second = sample.body.response_ids[:20], sample.body.response_ids[32:]
        assert first != second
        assert sample.body.generation.response_tokens == 13
        assert sample.body.generation.generate_s >= 0.04


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("Missing", "no class 'Missing'"),
        ("NoRun", "async def run"),
        ("SyncRun", "async def run"),
        ("CannotBeMade", "no key"),
    ],
)
def test_a_class_that_is_no_agent_is_refused(agent_file, class_name, message) -> None:
    with pytest.raises(RefusedError, match=message):
        load_agent(agent_file, class_name)


def test_a_file_that_does_not_import_is_refused(tmp_path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def (")
    with pytest.raises(RefusedError, match="SyntaxError"):
        load_agent(path, "Any")
    with pytest.raises(RefusedError, match="not a Python file"):
        load_agent(tmp_path / "absent.py", "Any")
