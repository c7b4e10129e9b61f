"""Serve published LoRA adapters: each request keeps the adapter with which it began. Called by ``vllm_loop``.

A switch adds the new adapter beside the old ones; the engine computes requests of several versions in one step. An
adapter that no running request uses any more is the first that vLLM drops.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from plaudit_wire.messages import PolicyVersion


class EngineAdapters:
    """Serve the newest adapter of an engine.

    Args:
        engine: built with ``enable_lora``; its own weights are those of ``model.source``.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self.newest: LoRARequest | None = None
        """For new requests; None before the first load."""

    def load(self, folder: Path, version: PolicyVersion) -> None:
        """Load an adapter for the requests from now on.

        Raises:
            Exception: it is of another model.
        """
        # A repeated load of the same version is a new adapter to vLLM: the files may have changed.
        number = next(self._ids)
        adapter = LoRARequest(lora_name=f"{version}-{number}", lora_int_id=number, lora_path=str(folder))
        self._engine.add_lora(adapter)
        self.newest = adapter
