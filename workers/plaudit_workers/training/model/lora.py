"""Train LoRA, low-rank adapters beside frozen weights (Hu et al., 2021, arXiv 2106.09685).

A linear layer computes W x + alpha / rank · B A x. A starts at random from the job's seed, B at 0, so the first
published adapter is the starting model. W is frozen and held in the precision of the forward passes; A and B are
float32. There is no dropout: the trainer's log-probabilities would be of another policy than the one that sampled.

Adapters are added before the weights are read: the model may be on the meta device. Adapters then exist whole on the
CPU of every rank, with the same values for any number of ranks, until the model is sharded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from plaudit_job.spec.rljob import LoraSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.weights.published import ADAPTER_CONFIG_FILE

if TYPE_CHECKING:  # half a second of a core, which a trainer without adapters need not spend
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
_PUBLISHED_PREFIX = "base_model.model."


class Adapters:
    """Hold the adapters of a model, added in place.

    Args:
        model: float32, before its parameters are sharded or read; its own parameters are frozen.
        source: which the published configuration names.
        dtype: precision in which the frozen parameters are held.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSpec, source: str, dtype: torch.dtype) -> None:
        from peft import inject_adapter_in_model

        self._config = adapter_config(settings, source)
        try:
            inject_adapter_in_model(self._config, model, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
            self._layers = _adapted(model)
        except (ValueError, NotImplementedError) as error:
            raise RefusedError(
                f"spec.trainer.lora.targetModules {settings.target_modules}: {error}. Name linear layers of the model, "
                "such as q_proj, or remove targetModules"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
        for layer in self._layers:
            _draw(layer)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the frozen weights alone within the context: the starting model."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        # Not peft's enable_adapters: it changes requires_grad as well.
        for layer in self._layers:
            layer._disable_adapters = not enabled

    def files(self) -> dict[str, bytes]:
        """Return the files beside published adapters, by file name."""
        with tempfile.TemporaryDirectory() as folder:
            self._config.save_pretrained(folder)
            return {ADAPTER_CONFIG_FILE: (Path(folder) / ADAPTER_CONFIG_FILE).read_bytes()}


def _adapted(model: PreTrainedModel) -> list[LoraLayer]:
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if others := [name for name, layer in layers.items() if _ADAPTER not in layer.lora_A]:
        raise ValueError(f"{others[0]} is no linear layer")
    return list(layers.values())


def _draw(layer: LoraLayer) -> None:
    """Give a layer's adapter its first values: the random numbers that peft draws when it adds one to real weights."""
    for linear in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
        linear.to_empty(device="cpu")
        linear.reset_parameters()  # type: ignore[operator]
    layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)  # type: ignore[no-untyped-call]


def adapter_config(settings: LoraSpec, source: str) -> LoraConfig:
    """Return the configuration of adapters in peft's form."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft accepts fractions
        target_modules=settings.target_modules or "all-linear",
        bias="none",
        base_model_name_or_path=source,
    )


def published_name(parameter: str) -> str:
    """Return the name of an adapter's parameter in peft's file format, which vLLM reads."""
    return _PUBLISHED_PREFIX + parameter.replace(f".{_ADAPTER}.", ".")


def original_name(parameter: str) -> str:
    """Return the name that a parameter had before adapters were added to the model."""
    return parameter.replace(".base_layer.", ".")
