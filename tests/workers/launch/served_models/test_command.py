"""The command lines of reward model servers."""

from typing import Any

import pytest

from plaudit_job.processes import server_command, server_environment
from plaudit_job.spec.rewards import RewardModelSpec, ServedChatModelSpec


def command(*, with_gpu: bool = False, **fields: Any) -> str:
    model = RewardModelSpec.model_validate({"source": "/models/rm", **fields}, by_alias=True, by_name=False)
    return " ".join(server_command(model, "helpful", "0.0.0.0", 8000, with_gpu=with_gpu))


COMMON = "--model /models/rm --served-model-name helpful --dtype bfloat16 --host 0.0.0.0 --port 8000"
VLLM = "--runner pooling --max-num-batched-tokens 16384 --disable-uvicorn-access-log"

CASES: list[tuple[dict[str, Any], str]] = [
    ({"engine": "plaudit"}, f"-m plaudit_model_server {COMMON} --max-batch-tokens 16384"),
    ({}, f"-m vllm.entrypoints.openai.api_server {COMMON} {VLLM} --enforce-eager"),
    ({"with_gpu": True}, f"-m vllm.entrypoints.openai.api_server {COMMON} {VLLM}"),
    (
        {"with_gpu": True, "arguments": {"tensor_parallel_size": 2, "enable_chunked_prefill": False}},
        f"-m vllm.entrypoints.openai.api_server {COMMON} {VLLM} --tensor-parallel-size 2 --no-enable-chunked-prefill",
    ),
]


SLEEPS = "--middleware plaudit_reward.endpoint.vllm_sleep.SleepRoutes"
CASES += [
    ({"sleepDuringUpdates": True}, f"-m vllm.entrypoints.openai.api_server {COMMON} {VLLM} {SLEEPS} --enforce-eager"),
    (
        {"sleepDuringUpdates": True, "with_gpu": True},
        f"-m vllm.entrypoints.openai.api_server {COMMON} {VLLM} {SLEEPS} --enable-sleep-mode",
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CASES)
def test_a_section_becomes_a_command_line(fields: dict[str, Any], expected: str) -> None:
    assert command(**fields) == expected


def test_a_server_on_a_shared_gpu_takes_its_share_of_the_memory_unless_the_job_says_how_much() -> None:
    given = RewardModelSpec(source="/models/rm", arguments={"gpu_memory_utilization": 0.2})
    for model, expected in ((RewardModelSpec(source="/models/rm"), "0.225"), (given, "0.2")):
        line = server_command(model, "helpful", "0.0.0.0", 8000, with_gpu=True, gpu_share=0.25)
        assert line[line.index("--gpu-memory-utilization") + 1] == expected
    own = RewardModelSpec(source="/models/rm", engine="plaudit")
    assert "--gpu-memory-utilization" not in server_command(own, "rm", "h", 1, with_gpu=True, gpu_share=0.25)


def test_a_chat_model_is_served_under_the_names_that_judges_and_verls_functions_send() -> None:
    model = ServedChatModelSpec(source="some/judge", arguments={"max_num_seqs": 8})
    line = " ".join(server_command(model, "grades", "0.0.0.0", 8000, with_gpu=True))
    assert line.startswith("-m vllm.entrypoints.openai.api_server --model some/judge --served-model-name grades some/")
    assert line.endswith("--revision main --runner generate --disable-uvicorn-access-log --max-num-seqs 8")
    assert server_environment(model, with_gpu=False)["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_settings_are_passed_on_and_own_arguments_win() -> None:
    line = command(
        source="some/rm", revision="abc", maxModelLength=512, trustRemoteCode=True, arguments={"hf_overrides": {"a": 1}}
    )
    assert "--revision abc --trust-remote-code --max-model-len 512" in line
    assert line.endswith('--hf-overrides {"a": 1}')


def test_on_a_cpu_vllms_cache_is_bounded() -> None:
    model = RewardModelSpec(source="/models/rm")
    assert server_environment(model, with_gpu=False)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(model, with_gpu=True)
