"""What an environment gives: attributes that are plain data, up to a bound on their size, and chat messages."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.errors import DataError
from plaudit_workers.agents.environment import MOST_BYTES, Environment, Messages, Observation, answer, public_attributes
from plaudit_workers.agents.messages import AskEnvironment

TEXTS = st.text(st.characters(codec="utf-8"))
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


class Game:
    limit = 5

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def move(self) -> None: ...

    @staticmethod
    def rules() -> None: ...

    @property
    def share(self) -> float:
        return self.score / self.limit  # type: ignore[attr-defined, no-any-return]


class Hostile:
    kind = "bad"

    @property
    def exits(self) -> None:
        raise SystemExit(3)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoNames:
    def __dir__(self) -> list[str]:
        raise ValueError("no names")


def test_public_attributes_of_plain_data_are_collected() -> None:
    game = Game(score=2, board=((1, 0), (0, 1)), _secret=1, server=object(), name="g", best=None)
    assert public_attributes(game) == {
        "best": None,
        "board": [[1, 0], [0, 1]],
        "limit": 5,
        "name": "g",
        "score": 2,
        "share": 0.4,
    }


@given(JSON)
def test_what_json_holds_arrives_unchanged(value: Any) -> None:
    found = public_attributes(Game(value=value, score=0))["value"]
    assert found == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == value


@pytest.mark.parametrize("value", [math.inf, 1 << 64, b"x", [object()], {"a": {(1,): 1}}, {"a": 1, b"a": 2}])
def test_other_values_are_left_out(value: Any) -> None:
    assert "value" not in public_attributes(Game(value=value, score=0))


def test_endless_structures_are_left_out() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert "value" not in public_attributes(Game(value=circle, score=0))


def test_values_of_other_types_become_plain_data() -> None:
    found = public_attributes(Game(value={1: {2}, "a": math.nan, "b": "\ud800", "c": np.arange(2)}, score=0))
    assert found["value"] == {"1": [2], "a": None, "b": "\ufffd", "c": [0, 1]}


def test_the_largest_attributes_are_left_out_beyond_the_bound() -> None:
    found = public_attributes(Game(history="x" * MOST_BYTES, log="y" * 40_000, text="z" * 30_000, score=1))
    assert set(found) == {"limit", "score", "share", "text"}


def test_hostile_instances_cost_their_own_attributes_only() -> None:
    assert public_attributes(Hostile()) == {"kind": "bad"}
    assert public_attributes(NoNames()) == {}


class Says(Environment):
    def __init__(self, messages: Any) -> None:
        self._messages = messages

    async def reset(self, prompt: Any) -> Messages | None:
        raise NotImplementedError

    async def step(self, action: str) -> Observation:
        return Observation(self._messages)

    async def finish(self, completion: Messages) -> float | None:
        raise NotImplementedError


USER = {"role": "user", "content": "a"}
CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (5, "the environment's observations are 5; give a list of messages"),
        ([USER, "a"], "the environment's observations[1] is 'a'; give {role: …, content: …}"),
        ([{"content": "a"}], "the environment's observations[0].role is None; give a text such as user"),
        ([{"role": 5, "content": "a"}], "observations[0].role is 5; give a text such as user"),
        ([{"role": "user"}], "observations[0].content is None; give a text, or a list of parts"),
        ([{"role": "user", "content": 5}], "observations[0].content is 5; give a text, or a list of parts"),
        ([{"role": "user", "content": ["a"]}], "observations[0].content is ['a']; give a text"),
        ([{"role": "assistant", "content": None, "tool_calls": [5]}], "observations[0].tool_calls are [5]; give"),
    ],
)
async def test_messages_that_no_template_could_render_are_named(messages: Any, problem: str) -> None:
    with pytest.raises(DataError) as refused:
        await answer(Says(messages), AskEnvironment(1, "step"))
    assert problem in str(refused.value)


async def test_messages_of_every_form_pass() -> None:
    messages = [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    assert (await answer(Says(messages), AskEnvironment(1, "step"))).messages == messages
