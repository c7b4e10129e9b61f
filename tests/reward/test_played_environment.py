"""TRL's ``environments``: functions read what an environment held at its end, and learn what they cannot have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest

from plaudit_reward.endpoint.cache import whole_sample_key
from plaudit_reward.functions.forms import PlayedEnvironment, trl_columns
from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.result import Target
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample
from reward_samples import make_sample

# As TRL's documentation writes it.
REWARD = """
def reward_func(completions, environments, **kwargs):
    return [environment.reward for environment in environments]
"""
METHOD = """
def reward_func(environments, completions, **kwargs):
    return [environment.get_reward() for environment in environments]
"""
WITH_DEFAULT = """
def reward_func(completions, environments=None, **kwargs):
    return [0.5 if environments is None else environment.reward for environment in environments or completions]
"""


def call(tmp_path, source: str, samples: list[Sample]) -> Any:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    function = UserFunction(Target(str(path), "reward_func", scope="group"))
    function.prepare()
    return function.call(samples, None)


def test_an_unchanged_function_of_trl_reads_the_environments_attributes(tmp_path) -> None:
    samples = [make_sample("r", index=i, environment={"reward": reward}) for i, reward in enumerate([0.25, 1.0])]
    assert call(tmp_path, REWARD, samples) == [0.25, 1.0]
    assert call(tmp_path, WITH_DEFAULT, samples) == [0.25, 1.0]


def test_a_method_cannot_be_called_and_the_error_says_why(tmp_path) -> None:
    with pytest.raises(AttributeError, match=r"no 'get_reward': its instance has ended, .* It has board, score\."):
        call(tmp_path, METHOD, [make_sample("r", environment={"score": 1, "board": []})])


def test_samples_without_an_environment_are_told_apart_from_one_without_attributes(tmp_path) -> None:
    played, not_played = make_sample("r", environment={}), make_sample("r")
    assert "environments" in trl_columns([played])
    assert "environments" not in trl_columns([played, not_played])
    assert call(tmp_path, WITH_DEFAULT, [not_played]) == [0.5]
    with pytest.raises(DataError, match="environments: a sample has no environment in TRL's form"):
        call(tmp_path, REWARD, [not_played])


def test_a_played_environment_is_copied_and_pickled_as_other_objects() -> None:
    environment = PlayedEnvironment({"score": 1})
    for other in (copy.deepcopy(environment), pickle.loads(pickle.dumps(environment))):
        assert (other.score, repr(other)) == (1, "PlayedEnvironment({'score': 1})")
    assert not hasattr(environment, "board")


def test_equal_responses_of_other_episodes_share_no_cached_score() -> None:
    keys = {whole_sample_key(make_sample("r", environment=held)) for held in ({"score": 1}, {"score": 2}, None)}
    assert len(keys) == 3


def test_attributes_travel_with_the_sample() -> None:
    sample = make_sample("r", environment={"board": [[1, 0], [0, 1]], "moves": {"e4": 0.5}, "done": True})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Sample) == sample
