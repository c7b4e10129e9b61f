"""Read the headers of published weights before an engine replaces its own. Called by ``vllm_loop``.

vLLM replaces weights layer by layer. A load that fails in its middle leaves layers half filled, and the next loads of
good weights then fail as well. So everything that can be wrong with the files alone is found before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from plaudit_workers.published_weights import ADAPTER_CONFIG_FILE
from plaudit_workers.rollout.engines.protocol import WeightsUnreadableError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def check_readable(engine: LLMEngine, folder: Path, *, adapter: bool) -> None:
    """Let each process of the engine read the headers of a folder's ``*.safetensors``.

    Args:
        adapter: it holds an adapter, which needs its configuration.

    Raises:
        WeightsUnreadableError: a process cannot open them, or they are shorter than their headers say.
    """
    problems = engine.collective_rpc(problem_of, args=(str(folder), adapter))
    if problem := next(filter(None, problems), ""):
        raise WeightsUnreadableError(problem)


def problem_of(worker: object, folder: str, adapter: bool) -> str:
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
