"""``spec.rollout``: who generates samples, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plaudit_workers.job.spec.pod import PodSpec
from plaudit_workers.job.spec.section import MUTABLE, PYTHON_NAME, FilePath, Opaque, Section


class EngineSpec(Section):
    """The inference engine of one rollout worker."""

    kind: Literal["vllm", "scripted"] = "vllm"
    """``vllm``: the real one. ``scripted``: writes made-up answers at a given speed, for tests and load generation;
    never chosen unless named. Default vllm."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """GPUs that share one copy of the model. Default 1: as many as the model needs to fit, no more."""
    max_model_length: int = Field(default=4096, ge=2, le=10_000_000)
    """Tokens of prompt and response together; bounds the KV cache of one request. Default 4,096."""
    max_concurrent_samples: int = Field(default=256, ge=1, le=100_000)
    """Samples that one worker generates at a time. Default 256: vLLM's own."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that the engine may take. Default 0.85: room is left for the weights of an update. Means
    nothing on a CPU: bound the cache there with ``arguments: {kv_cache_memory_bytes: …}``."""
    arguments: Opaque = Field(default={})
    """Further arguments of the engine by their own names: vLLM's engine arguments, or the scripted engine's settings.
    Unknown ones are refused when the engine starts."""


class SamplingSpec(Section):
    """The distribution that training samples are drawn from."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits; above 0 for training. Default 1: the policy itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this. Default 1: all tokens; the trainer then needs no mask."""
    top_k: int = Field(default=-1, ge=-1)
    """The k likeliest tokens. Default -1: all tokens."""
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """Most tokens of a response; what is cut ends with ``length``. Default 1,024."""


class ToolSpec(Section):
    """A function that the model may call."""

    path: FilePath = Field(min_length=1)
    """Python file: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute path on the volume
    or in the image."""
    function: str = Field(min_length=1, pattern=PYTHON_NAME)
    """The function's name in it; its docstring and type hints describe it to the model."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds after which a call is ended and the model told so. Default 30."""


class AgentSpec(Section):
    """What happens between the prompt and the finished sample."""

    kind: Literal["singleTurn", "tools", "custom"] = "singleTurn"
    """``singleTurn``: one generation. ``tools``: tool calls are run and their results appended until the model stops.
    ``custom``: a class of yours. Default singleTurn."""
    max_turns: int = Field(default=8, ge=1, le=1000)
    """Most generations of one sample, for ``tools``. Default 8."""
    tools: list[ToolSpec] = Field(default=[])
    """What the model may call, for ``tools``."""
    path: FilePath = ""
    """Python file of the agent, for ``custom``: relative to the job file; on Kubernetes a file of ``spec.files``, or an
    absolute path on the volume or in the image."""
    class_name: str = Field(default="", alias="class")
    """The class in it, with ``async def run(prompt, generate) -> Trajectory``, for ``custom``."""


class RolloutSpec(Section):
    """Rollout workers: they take prompts and publish each sample the moment it is finished."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=1, le=10_000)
    """Rollout workers, each with ``engine.tensorParallelSize`` GPUs. Cannot change under ``scheduling.gang`` or
    ``queueName``. Default 1."""
    in_flight: Literal["continue", "recompute", "drain"] = "continue"
    """What happens to running samples when new weights come: ``continue`` goes on with the KV cache of the old weights
    (each token's version is recorded), ``recompute`` reads what was generated so far with the new weights, ``drain``
    finishes first. Default continue: no token is generated twice and none waits."""
    engine: EngineSpec = EngineSpec()
    """The inference engine."""
    sampling: SamplingSpec = SamplingSpec()
    """How training samples are drawn."""
    agent: AgentSpec = AgentSpec()
    """One generation, tools, or your own loop."""
    pod: PodSpec = PodSpec()
    """Pods of the rollout workers."""
