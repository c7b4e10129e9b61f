"""A real vLLM serves no classifier under a reward model's class, until the remedy that the check names is applied.

Its engine is built in this process, from the arguments that a job's server has: a server of its own would import vLLM
twice for each case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.processes import server_command, server_environment
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_workers.launch.checks import class_problem

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(560),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]

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


@pytest.fixture
def build_engine(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Builds vLLM's engine for the model under further arguments of the job, as its server does."""
    spec = RewardModelSpec(source=str(reward_model), engine="vllm")
    for name, value in server_environment(spec, with_gpu=False).items():
        monkeypatch.setenv(name, value)
    from vllm.distributed import cleanup_dist_env_and_memory

    yield engine_of
    cleanup_dist_env_and_memory()


def engine_of(folder: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    spec = RewardModelSpec(source=str(folder), engine="vllm", dtype="float32", arguments=arguments)
    _, _, *options = server_command(spec, "tiny", "127.0.0.1", 1, with_gpu=False)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed), enable_multiprocessing=False)


def logits_of(engine: Any, text: str) -> list[float]:
    from vllm import PoolingParams

    engine.add_request("0", text, PoolingParams(task="classify", use_activation=False))
    while not (finished := [output for output in engine.step() if output.finished]):
        pass
    values: list[float] = finished[0].outputs.data.tolist()
    return values


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"no module or parameter named 'score' in Qwen2ForEmbedding"),
        ({"convert": "classify"}, r"\['Qwen2ForRewardModeling'\] are not supported for now"),
    ],
)
def test_vllm_cannot_serve_the_class_of_a_reward_model_and_the_check_says_so(
    reward_model: Path, build_engine: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_engine(reward_model, **arguments)
    assert class_problem("model", RewardModelSpec(source="rm", arguments=arguments), REWARD_CLASS) is not None


def test_the_remedy_gives_the_logits_of_the_classifier(
    reward_model: Path, build_engine: Callable[..., Any], plain_logits: Any
) -> None:
    assert class_problem("model", RewardModelSpec(source="rm", arguments=REMEDY), REWARD_CLASS) is None
    engine = build_engine(reward_model, **REMEDY)
    assert logits_of(engine, "hello") == pytest.approx(plain_logits("decoder", ["hello"])[0], abs=1e-4)
