"""The environment for NeMo-RL in a real Ray actor, before a real gateway.

NeMo-RL is on no package index and needs GPUs: the five names that the adapter imports from it are stand-ins of their
shape (nemo_rl/environments/interfaces.py and utils.py, nemo_rl/distributed).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit_client import NoScoreError

CLIENT = Path(__file__).parents[3] / "client"
STAND_INS = {
    "environments/interfaces": """
import abc
from typing import Any, Generic, NamedTuple, TypeVar

Metadata = TypeVar("Metadata")

class EnvironmentReturn(NamedTuple):
    observations: list
    metadata: list
    next_stop_strings: list
    rewards: Any
    terminateds: Any
    answers: Any

class EnvironmentInterface(abc.ABC, Generic[Metadata]):
    @abc.abstractmethod
    def step(self, message_log_batch, metadata): ...

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch): ...
""",
    "environments/utils": """
registered = {}

def register_env(env_name, actor_class_fqn):
    assert env_name not in registered
    registered[env_name] = actor_class_fqn
""",
    "distributed/ray_actor_environment_registry": "ACTOR_ENVIRONMENT_REGISTRY = {}\n",
    "distributed/virtual_cluster": """
import sys

class PY_EXECUTABLES:
    SYSTEM = sys.executable
""",
}


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the stand-ins, importable here."""
    folder = tmp_path / "stand_ins"
    for name, text in STAND_INS.items():
        path = folder / "nemo_rl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl" or name.endswith(".nemo_rl")]:
        del sys.modules[name]


def create_env(folder: Path, config: dict[str, Any], **variables: str) -> Any:
    """Create the registered environment as NeMo-RL does: by its name, an actor with the script's variables."""
    module = importlib.import_module("plaudit_client.adapters.nemo_rl")
    module.register()
    path = importlib.import_module("nemo_rl.environments.utils").registered["plaudit"]
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
    assert {path: sys.executable} == registry.ACTOR_ENVIRONMENT_REGISTRY
    owner, _, name = path.rpartition(".")
    actor = getattr(importlib.import_module(owner), name)
    paths = os.pathsep.join([str(folder), str(CLIENT)])
    return actor.options(runtime_env={"env_vars": {"PYTHONPATH": paths, **variables}}).remote(config)


def log(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


async def test_a_batch_is_scored_and_its_episodes_end(
    start_service: Any, start_gateway: Any, nemo_rl: Path, ray_cluster: str
) -> None:
    async with start_service() as service, start_gateway(service) as gateway:
        variables = {"PLAUDIT_URL": gateway.url, "PLAUDIT_TOKEN": "token-of-one-caller"}
        environment = create_env(nemo_rl, {"on_failure": -1.0}, **variables)
        logs = [log("2+2?", "4"), log("2+2?", "5"), log("2+2?", "broken"), log("2+2?", "5", "sure?", "4")]
        returned = await environment.step.remote(logs, [{"ground_truth": "4", "level": 3}] * 4)
        assert returned.rewards.tolist() == [1.0, 0.0, -1.0, 1.0]
        assert returned.terminateds.tolist() == [True] * 4
        assert [o["content"] for o in returned.observations] == [
            f"Environment: {outcome}" for outcome in ("scored", "scored", "data_error", "scored")
        ]
        assert returned.metadata == [{"ground_truth": "4", "level": 3}] * 4
        assert returned.answers == returned.next_stop_strings == [None] * 4
        assert await environment.global_post_process_and_metrics.remote({"rewards": 1}) == ({"rewards": 1}, {})


async def test_a_sample_without_a_score_raises_by_default(
    start_service: Any, start_gateway: Any, nemo_rl: Path, ray_cluster: str
) -> None:
    async with start_service() as service, start_gateway(service) as gateway:
        environment = create_env(nemo_rl, {"url": gateway.url, "token": "token-of-one-caller"})
        with pytest.raises(NoScoreError, match="on purpose"):
            await environment.step.remote([log("2+2?", "broken")], [{"ground_truth": "4"}])


async def test_the_scorers_get_prompt_source_and_columns(nemo_rl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("plaudit_client.adapters.nemo_rl")
    actor = module.PlauditEnvironment.__ray_metadata__.modified_class
    environment = actor({"url": "http://127.0.0.1:1", "data_source": "maths"})
    sample = environment._sample(log("a", "b", "c", "d"), {"answer": "4", "level": 3, "extra_info": {"split": "train"}})
    assert sample == {
        "data_source": "maths",
        "prompt": log("a", "b", "c"),
        "response": "d",
        "ground_truth": "4",
        "extra_info": {"answer": "4", "level": 3, "split": "train"},
    }
    assert environment._sample(log("<user>a", "d"), {})["prompt"] == "<user>a"
    assert environment._sample(log("<user>a", "d"), {"prompt": log("a")})["prompt"] == log("a")
