"""Configure vLLM: the environment of the process and the engine's arguments. Called by ``vllm_engine``.

Importing this module imports nothing heavy; ``prepare_environment`` has to run before torch or vLLM are imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import RefusedError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_CPU_CACHE_BYTES = 1 << 30
_CPU_BATCH_TOKENS = 4096
_OWNED = {"model", "load_format", "logprobs_mode", "async_scheduling", "disable_log_stats", "max_num_seqs"}
"""Arguments on which the rollout's correctness depends; a job cannot set them."""


@dataclass(frozen=True)
class VllmSettings:
    """Model and sizes of one engine."""

    source: str
    """Hub id or folder with ``config.json`` and tokenizer; its weights are not read."""
    revision: str = "main"
    tokenizer: str = ""
    """Empty: the one in ``source``."""
    trust_remote_code: bool = False
    dtype: str = "float32"
    max_model_length: int = 4096
    """Tokens of prompt and response together; the model's own limit holds if it is lower."""
    max_concurrent_samples: int = 256
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.85
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further ``vllm.EngineArgs`` by name."""

    @classmethod
    def from_job(cls, job: RLJob) -> VllmSettings:
        """Read ``spec.model`` and ``spec.rollout``.

        Raises:
            RefusedError: ``engine.arguments`` sets an argument that the rollout controls.
        """
        model, rollout = job.spec.model, job.spec.rollout
        engine = rollout.engine
        if owned := sorted(_OWNED & engine.arguments.keys()):
            raise RefusedError(f"spec.rollout.engine.arguments: {', '.join(owned)} cannot be set; remove it")
        return cls(
            source=model.source,
            revision=model.revision,
            tokenizer=model.tokenizer,
            trust_remote_code=model.trust_remote_code,
            dtype=model.dtype,
            max_model_length=engine.max_model_length,
            max_concurrent_samples=engine.max_concurrent_samples,
            tensor_parallel_size=engine.tensor_parallel_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            arguments=engine.arguments,
        )


def has_gpu() -> bool:
    """Return True if this machine has a GPU; works before torch is imported."""
    return any(os.path.exists(device) for device in _GPU_DEVICES)


def prepare_environment(source: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that vLLM and torch read when they are imported.

    Args:
        source: of the model; a folder needs no hub.
        environment: changed; variables that the user set stay, except the one on which the step loop depends.
    """
    # The engine core runs in this process: only then does nothing happen between two of our steps.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if Path(source).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    if not has_gpu():
        # Spinning OpenMP threads cost a small model nine tenths of its speed, compiling costs 9-25 s at the start.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def engine_arguments(settings: VllmSettings) -> EngineArgs:
    """Return the engine's arguments for these settings.

    Raises:
        RefusedError: an unknown argument, or a model that vLLM cannot read.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMClientError

    arguments: dict[str, Any] = {
        "model": settings.source,
        "revision": None if Path(settings.source).is_dir() else settings.revision,
        "tokenizer": settings.tokenizer or None,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_concurrent_samples,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        # The announced weights are loaded before anything is generated: reading the source's would be for nothing.
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        # A step scheduled ahead would return tokens that the old weights sampled after a switch.
        "async_scheduling": False,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        **_device_arguments(settings),
        **settings.arguments,
    }
    try:
        model = EngineArgs(**arguments).create_model_config()
        arguments.setdefault("max_model_len", min(settings.max_model_length, model.max_model_len))
        if not has_gpu():
            _suit_cpu(arguments, tied=model.hf_text_config.tie_word_embeddings)
        return EngineArgs(**arguments)
    except (VLLMClientError, TypeError, ValueError, OSError) as error:
        raise RefusedError(f"spec.model.source {settings.source!r} or spec.rollout.engine: {error}") from error


def is_untied(arguments: EngineArgs) -> bool:
    """Return True if the model is built with its own output head although its configuration may tie it."""
    overrides = arguments.hf_overrides
    return isinstance(overrides, dict) and overrides.get("tie_word_embeddings") is False


def _device_arguments(settings: VllmSettings) -> dict[str, Any]:
    if has_gpu():
        return {"gpu_memory_utilization": settings.gpu_memory_utilization}
    return {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES}


def _suit_cpu(arguments: dict[str, Any], *, tied: bool) -> None:
    # On a CPU vLLM cannot give a seeded request its random number back after a prefill in chunks: the step raises.
    arguments["enable_chunked_prefill"] = False
    arguments.setdefault("max_num_batched_tokens", max(_CPU_BATCH_TOKENS, arguments["max_model_len"]))
    if tied:
        # See ``tied_weights``: by this override the loop knows that it has to load the head separately.
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "tie_word_embeddings": False}
