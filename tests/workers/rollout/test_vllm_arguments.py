"""How vLLM is configured for the device that it is built for."""

import dataclasses
import os

import pytest
from transformers import Qwen3MoeConfig

from plaudit_wire.errors import RefusedError
from plaudit_workers.process import GPU_SHARE
from plaudit_workers.rollout.vllm_arguments import (
    ReplicaMember,
    VllmSettings,
    engine_arguments,
    is_cpu_build,
    is_untied,
    prepare_environment,
    refuse_hidden_gpus,
    replica_arguments,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),  # importing vLLM takes 10 s, and much more beside other work
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning"),
]


def test_the_build_decides_the_device_as_in_vllm() -> None:
    from vllm.platforms import current_platform

    assert is_cpu_build({}) is current_platform.is_cpu()
    assert is_cpu_build({"VLLM_TARGET_DEVICE": "cpu"})


def test_the_cpu_build_unties_the_head_also_beside_a_gpus_driver(tied_models, monkeypatch) -> None:
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    arguments = engine_arguments(VllmSettings(str(tied_models[0])))
    assert is_untied(arguments)
    assert arguments.enforce_eager


def test_workers_of_a_tensor_parallel_engine_are_spawned() -> None:
    environment: dict[str, str] = {}
    prepare_environment("model", environment)
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_a_model_with_experts_is_refused_on_a_cpu(tmp_path, monkeypatch) -> None:
    environment: dict[str, str] = {}
    prepare_environment(str(tmp_path), environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], hidden_size=32, num_hidden_layers=1, num_experts=4, vocab_size=16
    ).save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="has 4 experts: vLLM's CPU backend packs their weights"):
        engine_arguments(VllmSettings(str(tmp_path), tokenizer=str(tmp_path)))


def test_a_pipeline_is_refused_on_a_cpu(tiny_models) -> None:
    with pytest.raises(RefusedError, match=r"pipelineParallelSize: 2: vLLM's CPU build cannot"):
        engine_arguments(VllmSettings(str(tiny_models[0]), pipeline_parallel_size=2))


def test_memory_and_tokenizer_follow_the_share_of_a_gpu_and_their_own_revision(make_training_job) -> None:
    job = make_training_job(
        model={"source": "org/model", "revision": "abc", "tokenizer": "org/tokenizer", "tokenizerRevision": "v2"}
    )
    settings = VllmSettings.from_job(job, environment={GPU_SHARE: "0.5"})
    assert settings.gpu_memory_utilization == pytest.approx(0.425)
    assert (settings.revision, settings.tokenizer_revision) == ("abc", "v2")


def test_an_engine_sleeps_only_where_the_job_says_so(make_training_job) -> None:
    sleeping = make_training_job(rollout={"sleepDuringUpdates": True})
    assert [VllmSettings.from_job(job).sleeps for job in (make_training_job(), sleeping)] == [False, True]


@pytest.mark.parametrize(
    "argument",
    [
        "enable_sleep_mode",
        "enable_lora",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "distributed_executor_backend",
    ],
)
def test_arguments_that_the_rollout_derives_from_the_job_are_refused(make_training_job, argument) -> None:
    job = make_training_job(rollout={"engine": {"arguments": {argument: 1}}})
    with pytest.raises(RefusedError, match=rf"spec\.rollout\.engine\.arguments: {argument} cannot be set"):
        VllmSettings.from_job(job)


@pytest.mark.parametrize(
    ("speculative", "load_format"), [({"method": "ngram"}, "dummy"), ({"method": "draft_model"}, "auto")]
)
def test_weights_are_read_at_the_start_only_where_a_draft_model_needs_its_own(
    tiny_models, speculative, load_format
) -> None:
    speculative = {"model": str(tiny_models[1]), "num_speculative_tokens": 2, **speculative}
    settings = VllmSettings(str(tiny_models[0]), arguments={"speculative_config": speculative})
    assert engine_arguments(settings).load_format == load_format


def test_a_draft_model_is_refused_for_an_engine_that_sleeps(tiny_models) -> None:
    def asleep(**speculative):
        arguments = {"speculative_config": {"num_speculative_tokens": 2, **speculative}}
        return engine_arguments(VllmSettings(str(tiny_models[0]), sleeps=True, arguments=arguments))

    assert asleep(method="ngram")
    with pytest.raises(RefusedError, match=r"draft model, whose weights are lost .* method ngram"):
        asleep(model=str(tiny_models[1]))


def test_a_gpu_build_without_a_visible_gpu_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("plaudit_workers.rollout.vllm_arguments.version", lambda name: "0.32.0")
    with pytest.raises(RefusedError, match="cannot compute on a CPU"):
        refuse_hidden_gpus({"CUDA_VISIBLE_DEVICES": ""})
    refuse_hidden_gpus({"CUDA_VISIBLE_DEVICES": "0"})


def pods_of_a_replica(make_training_job, **environment: str) -> dict[str, object]:
    """Return the arguments by which vLLM finds the other pods, for one pod of a replica of two."""
    rollout = {"podsPerReplica": 2, "engine": {"tensorParallelSize": 8, "pipelineParallelSize": 2}}
    job = make_training_job(rollout=rollout)
    settings = VllmSettings.from_job(job, ReplicaMember.from_environment(job, environment))
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size, settings.num_gpus) == (8, 2, 16)
    return replica_arguments(settings.member)


def test_pods_of_a_replica_meet_at_their_leader(make_training_job) -> None:
    found = pods_of_a_replica(
        make_training_job, PLAUDIT_REPLICA_RANK="1", PLAUDIT_REPLICA_LEADER="job-rollout-0-0-0.job-rollout.team.svc"
    )
    assert found == {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "job-rollout-0-0-0.job-rollout.team.svc",
        "master_port": 29501,
    }
    assert found.keys() <= {field.name for field in dataclasses.fields(engine_args())}
    assert pods_of_a_replica(make_training_job) == {}  # without a rank one process has all GPUs of a replica


def engine_args() -> type:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PLAUDIT_REPLICA_RANK": "2"}, "has the ranks 0 to 1"),
        ({"PLAUDIT_REPLICA_RANK": "x"}, "is 'x'"),
        ({"PLAUDIT_REPLICA_RANK": "1"}, "PLAUDIT_REPLICA_LEADER is missing"),
    ],
)
def test_a_pod_that_is_none_of_its_replica_is_refused(make_training_job, environment, message) -> None:
    with pytest.raises(RefusedError, match=message):
        pods_of_a_replica(make_training_job, **environment)
