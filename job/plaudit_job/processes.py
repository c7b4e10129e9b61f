"""Derive the environment variables, command lines and labels of processes from a job. Pure.

The metrics service does not read the job; it gets its settings as variables. A served model has the same command under
``plaudit run`` and in a pod.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from plaudit_job.fields import is_hub_id
from plaudit_job.spec.rewards import RewardModelSpec, ServedModelSpec
from plaudit_job.spec.rljob import RLJob

_BY_STALENESS = {0: "on-policy", 1: "one-step-off-policy"}
SERVER_VARIABLE = "PLAUDIT_MODEL_SERVER"
HOST_VARIABLE = "PLAUDIT_MODEL_SERVER_HOST"
PORT_VARIABLE = "PLAUDIT_MODEL_SERVER_PORT"
"""Variables of the process that starts a server: ``scorer/number`` or ``scorer``, its host and its port."""
ENDPOINT_HOST_VARIABLE = "PLAUDIT_ENDPOINT_HOST"
ENDPOINT_PORT_VARIABLE = "PLAUDIT_ENDPOINT_PORT"
"""Variables of a rollout: its address and port for the programs of agents whose machines are pods."""
_UTILIZATION = 0.9
_VLLM_ON_CPU = {
    # GiB. Without a bound vLLM takes most of the machine's memory for a cache that pooling hardly uses.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine's only worker lives in the engine's own process: one import of vLLM less, ten seconds of a core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Compiling costs a small model more time than it saves.
    "TORCHDYNAMO_DISABLE": "1",
}


def metrics_environment(job: RLJob) -> dict[str, str]:
    """Return the variables that ``plaudit_metrics.service.settings`` reads, besides address, port and run."""
    spec = job.spec
    latency, traces = spec.metrics.reward_latency, spec.metrics.traces
    schedule = _BY_STALENESS.get(spec.algorithm.max_staleness, "asynchronous") if spec.trains else "service"
    environment = {
        "PLAUDIT_JOB_NAME": job.metadata.name,
        "PLAUDIT_SCHEDULE": schedule,
        "PLAUDIT_REWARD_LATENCY_THRESHOLD_S": str(latency.threshold_seconds),
        "PLAUDIT_REWARD_LATENCY_TARGET": str(latency.target),
        "PLAUDIT_TRACES_ENDPOINT": traces.endpoint,
        "PLAUDIT_TRACES_SHARE": str(traces.share),
    }
    if not spec.trains:
        return environment
    return environment | {
        "PLAUDIT_MAX_STALENESS": str(spec.algorithm.max_staleness),
        "PLAUDIT_MODEL": spec.model.source,
    }


def machines_run(run_folder: Path) -> str:
    """Return the label ``plaudit.dev/run`` of a run's machines: the folder's name and a digest of its path."""
    digest = hashlib.sha256(os.fsencode(run_folder.absolute())).hexdigest()
    return f"{run_folder.name}-{digest[:12]}"


def server_command(
    model: ServedModelSpec, name: str, host: str, port: int, *, with_gpu: bool, gpu_share: float = 1.0
) -> list[str]:
    """Return the arguments of a Python interpreter that runs the server.

    ``gpu_share`` is below 1 if other processes of the run use the GPU too; vLLM's server takes 90 % of its share.
    """
    if _is_own(model):
        module, own = "plaudit_model_server", {"max_batch_tokens": model.max_batch_tokens}
    else:  # not the command ``vllm``: the distribution for CPUs has none that works
        module, own = "vllm.entrypoints.openai.api_server", _vllm_options(model, with_gpu=with_gpu, gpu_share=gpu_share)
    common: dict[str, Any] = {
        "model": model.source,
        # A chat model also has the name of its source, which verl's functions send.
        "served_model_name": name if isinstance(model, RewardModelSpec) else (name, model.source),
        "dtype": model.dtype,
        "host": host,
        "port": port,
    }
    if is_hub_id(model.source):
        common["revision"] = model.revision
    if model.trust_remote_code:
        common["trust_remote_code"] = True
    if model.max_model_length is not None:
        common["max_model_len"] = model.max_model_length
    return ["-m", module, *_options({**common, **own, **model.arguments})]


def server_environment(model: ServedModelSpec, *, with_gpu: bool) -> dict[str, str]:
    """Return the variables that the server needs besides those it inherits."""
    environment = {"TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    if not is_hub_id(model.source):
        environment["HF_HUB_OFFLINE"] = "1"
    if not _is_own(model) and not with_gpu:
        environment |= _VLLM_ON_CPU
    return environment


def _is_own(model: ServedModelSpec) -> TypeGuard[RewardModelSpec]:
    """Return True for a reward model behind Plaudit's own server."""
    return isinstance(model, RewardModelSpec) and model.engine == "plaudit"


def _vllm_options(model: ServedModelSpec, *, with_gpu: bool, gpu_share: float) -> dict[str, Any]:
    own: dict[str, Any] = {"runner": "generate"}
    if isinstance(model, RewardModelSpec):
        own = {"runner": "pooling", "max_num_batched_tokens": model.max_batch_tokens}
    own["disable_uvicorn_access_log"] = True
    if model.sleep_during_updates:
        own["middleware"] = "plaudit_reward.endpoint.vllm_sleep.SleepRoutes"
        own |= {"enable_sleep_mode": True} if with_gpu else {}  # refused by vLLM's CPU build, which frees no memory
    if not with_gpu:
        own["enforce_eager"] = True
    elif gpu_share < 1:
        own["gpu_memory_utilization"] = round(_UTILIZATION * gpu_share, 3)
    return own


def _options(arguments: Mapping[str, Any]) -> list[str]:
    """Return ``{max_batch_tokens: 5}`` as ``--max-batch-tokens 5``; true is a flag, false its ``--no-``.

    A tuple is an option with several values.
    """
    options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            options += [f"--{option}", *value]
        else:
            options += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return options
