"""A real vLLM serves no classifier under a reward model's class, until the remedy that the check names is applied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_workers.job.checks.reward_classes import class_problem
from plaudit_workers.job.spec.rewards.scorers import RewardModelSpec

pytestmark = pytest.mark.timeout(560)

REWARD_CLASS = "Qwen2ForRewardModeling"
REMEDY = {"hf_overrides": {"architectures": ["Qwen2ForSequenceClassification"]}}


@pytest.fixture(scope="module")
def reward_model(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with one output, whose configuration names the class of a reward model."""
    folder = tmp_path_factory.mktemp("reward_class")
    for file in model_folder("decoder").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [REWARD_CLASS]}))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no module or parameter named 'score' in Qwen2ForEmbedding"),
        ({"convert": "classify"}, "['Qwen2ForRewardModeling'] are not supported for now"),
    ],
)
def test_vllm_cannot_serve_the_class_of_a_reward_model_and_the_check_says_so(
    reward_model: Path, tmp_path: Path, start_server: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    server = start_server(reward_model, tmp_path / "log", engine="vllm", **arguments)
    assert server.process.wait() != 0
    assert words in server.log.read_text()
    assert class_problem("model", RewardModelSpec(source="rm", arguments=arguments), REWARD_CLASS) is not None


def test_the_remedy_gives_the_logits_of_the_classifier(
    reward_model: Path, tmp_path: Path, start_server: Callable[..., Any], plain_logits: Any
) -> None:
    assert class_problem("model", RewardModelSpec(source="rm", arguments=REMEDY), REWARD_CLASS) is None
    server = start_server(reward_model, tmp_path / "log", engine="vllm", **REMEDY)
    server.wait_until_ready()
    body = {"input": "hello", "use_activation": False}
    answer = httpx.post(f"{server.url}/classify", json=body, timeout=120).json()
    assert answer["data"][0]["probs"] == pytest.approx(plain_logits("decoder", ["hello"])[0], abs=1e-4)
