"""Define the protocol between a rollout worker and its inference engine, and check weights before a load.

An engine runs many samples at once: every agent awaits ``generate``. Weights are switched while samples run, and each
finished sample names the policy version that sampled each of its tokens.

| struct | written by | read by |
| --- | --- | --- |
| ``SampleRequest`` | an agent's call of ``generate`` | engine |
| ``FinishedSample`` | engine | agent |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open

from plaudit_wire.messages import PolicyVersion, Sampling
from plaudit_wire.records import EngineStatus
from plaudit_workers.agents.messages import FinishedSample
from plaudit_workers.weights.published import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

WeightSwitch = Literal["continue", "recompute", "drain"]
"""How running samples are treated when the weights change (``rollout.inFlight``).

``continue``: they keep the key-value cache of the old weights. ``recompute``: their cache is computed again under the
new weights. ``drain``: they finish under the old weights first; new samples wait for that.
"""


class EngineFailedError(Exception):
    """Report that the engine broke; the process has to be restarted."""


class WeightsUnreadableError(Exception):
    """Report that files could not be read. The engine loaded nothing, and generates nothing until a load succeeds."""


class RequestRefusedError(Exception):
    """Report that the engine can never generate this request, for example a prompt that exceeds the model's length.

    Args:
        too_long: the conversation has no room for a turn; else its contents are refused.
    """

    def __init__(self, message: str, *, too_long: bool = True) -> None:
        super().__init__(message)
        self.too_long = too_long


@dataclass(frozen=True, slots=True)
class Chat:
    """Hold what a request's tokens were rendered from, for a policy that reads messages (``plaudit try --url``)."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    """In OpenAI's format."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Describe one response to generate."""

    prompt_ids: Sequence[int]
    """[num_prompt_tokens] token ids."""
    sampling: Sampling
    seed: int
    """The same seed under the same weights gives the same response."""
    turn: int = 0
    """Number of earlier requests of the same sample."""
    images: Sequence[str] = ()
    """Digests of the run's images that the prompt has, in its order; ``prompt_ids`` has a single token for each."""
    chat: Chat | None = None
    """None: the agent keeps no messages."""


class Policy(Protocol):
    """Write the turns of samples. All methods are called on one event loop, and none blocks it."""

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Generate one response. An engine waits for its first weights; cancelling the call cancels the request.

        Raises:
            RequestRefusedError: the policy can never generate this request.
            EngineFailedError: the policy broke.
        """

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """Return the text of [T] token ids: a response's without special tokens, a prompt's (``whole``) with them."""


@runtime_checkable
class Engine(Policy, Protocol):
    """Generate samples with weights that change."""

    async def start(self) -> None:
        """Prepare the engine to load weights.

        Raises:
            RefusedError: the model or the engine's arguments cannot work.
        """

    async def load_weights(self, path: Path, version: PolicyVersion, switch: WeightSwitch = "continue") -> None:
        """Switch to the weights in folder ``path``, which are ``version``; return when they are loaded.

        Running samples are treated as ``switch`` says; samples that have not begun get the new weights.

        Raises:
            WeightsUnreadableError: the files vanished or are torn.
            EngineFailedError: the engine broke, or failed to load weights of which it may hold a part.
        """

    async def sleep(self, switch: WeightSwitch = "continue") -> None:
        """Discard weights and cache, free the GPUs' memory and generate nothing until the next ``load_weights``.

        Running samples are finished first under ``drain``; else they continue after that load, their cache computed
        again under its weights.

        Raises:
            EngineFailedError: the engine broke.
        """

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Compute the log-probability of each of L tokens after the first under the loaded weights at temperature 1.

        Returns:
            [L - 1] natural log-probabilities, or None if the engine has no model.
        """

    def status(self) -> EngineStatus | None:
        """Return the engine's requests and cache at this moment; None before it has started."""

    async def close(self) -> None:
        """Stop the engine and free its resources. Calls of ``generate`` have to be cancelled before."""


def check_readable(engine: LLMEngine, folder: Path, *, adapter: bool) -> None:
    """Let each process of the engine read the headers of a folder's ``*.safetensors``.

    vLLM replaces weights layer by layer. A load that fails in its middle leaves layers half filled, and the next loads
    of good weights then fail as well. So everything that can be wrong with the files alone is found before.

    Args:
        adapter: it holds an adapter, which needs its configuration.

    Raises:
        WeightsUnreadableError: a process cannot open them, or they are shorter than their headers say.
    """
    problems = engine.collective_rpc(_problem_of, args=(str(folder), adapter))
    if problem := next(filter(None, problems), ""):
        raise WeightsUnreadableError(problem)


def _problem_of(worker: object, folder: str, adapter: bool) -> str:
    """Return why this process cannot read the weights; empty if it can. vLLM calls it in each worker process.

    It returns the problem because vLLM stops reading the answers of its processes at the first exception: those of the
    others would be taken for answers to the next call.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        return f"no safetensors in {folder}"
    if adapter and not (Path(folder) / ADAPTER_CONFIG_FILE).is_file():
        return f"no {ADAPTER_CONFIG_FILE} in {folder}"
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file}: {error!r}"
    return ""
