"""Describe models by the sizes in their ``config.json``, and GPUs by name, as their makers state them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_MERGED = 2
"""Default side of the square of patches that become one token of the language model."""
_QUERY_KEY_BIAS = {"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"}
_QUERY_KEY_NORM = {"qwen3", "qwen3_moe"}
_LOGIT_CHANGES = {
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1,
    "logit_scale": 1,
    "output_multiplier": 1,
    "logits_scaling": 1,
}
"""Field of a configuration that changes the logits behind the head (Gemma, Falcon-H1, Cohere, Granite) → the value that
does not."""


@dataclass(frozen=True)
class ModelShape:
    """Describe a decoder of equal layers: attention with grouped heads, gated MLP or experts of such."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    """The output head is the embedding."""
    experts: int = 0
    """0: a dense model."""
    active_experts: int = 0
    """Experts that compute a token."""
    attention_bias: bool = False
    query_key_norm: bool = False
    vision: int | None = 0
    """Parameters of the vision tower; None: it has another form than the known ones, and is not counted."""
    whole_logits: bool = False
    """The model changes the logits behind its head, so the trainer keeps those of a whole row."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a model's ``config.json``. Raise ``KeyError`` if it describes no decoder of this form."""
        text = config.get("text_config") or config
        kind = str(text.get("model_type", ""))
        heads = int(text["num_attention_heads"])
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        return cls(
            layers=int(text["num_hidden_layers"]),
            hidden=int(text["hidden_size"]),
            intermediate=int((experts and text.get("moe_intermediate_size")) or text["intermediate_size"]),
            heads=heads,
            key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_size=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            experts=experts,
            active_experts=int(text.get("num_experts_per_tok") or 0),
            attention_bias=bool(text.get("attention_bias", kind in _QUERY_KEY_BIAS)),
            query_key_norm=kind in _QUERY_KEY_NORM,
            vision=vision_parameters(config),
            whole_logits=any(text.get(name) not in (None, same) for name, same in _LOGIT_CHANGES.items()),
        )

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer."""
        return self._attention + self._expert * max(1, self.experts) + self.hidden * self.experts + 2 * self.hidden

    @property
    def edge_parameters(self) -> int:
        """Return the number of parameters of embedding, last norm and output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.layers * self.layer_parameters + self.edge_parameters + (self.vision or 0)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters of the matrices that compute a token: layers and output head."""
        idle = self._expert * (self.experts - self.active_experts) if self.experts else 0
        return self.layers * (self.layer_parameters - idle) + self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters on every linear layer but the output head."""
        query, key_value = self.heads * self.head_size, self.key_value_heads * self.head_size
        attention = 2 * (self.hidden + query) + 2 * (self.hidden + key_value)
        mlp = 3 * (self.hidden + self.intermediate) * max(1, self.experts)
        return self.layers * rank * (attention + mlp)

    def cache_bytes(self, bytes_per_value: int) -> int:
        """Return the bytes of the key-value cache for each token."""
        return 2 * self.layers * self.key_value_heads * self.head_size * bytes_per_value

    def layer_bytes(self) -> int:
        """Return the bytes that one layer saves for each token in bfloat16, without checkpointing.

        Counted with saved-tensor hooks on models of several widths: 30 a hidden unit, 8 an intermediate one. A fused
        attention kernel is assumed; without one, 4 bytes × heads × length come on top.
        """
        return 30 * self.hidden + 8 * self.intermediate * max(1, self.active_experts)

    @property
    def _attention(self) -> int:
        query, key_value = self.heads * self.head_size, self.key_value_heads * self.head_size
        bias = query + 2 * key_value if self.attention_bias else 0
        norm = 2 * self.head_size if self.query_key_norm else 0
        return 2 * self.hidden * query + 2 * self.hidden * key_value + bias + norm

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.intermediate


def vision_parameters(config: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of a model's vision tower with its projection into the language model.

    A model without a tower has 0; None for a tower of another form than Qwen2-VL's and Qwen2.5-VL's.
    """
    tower = config.get("vision_config")
    if not tower:
        return 0
    if config.get("model_type") == "qwen2_5_vl":
        return _tower_parameters(
            tower, int(tower["hidden_size"]), int(tower["intermediate_size"]), int(tower["out_hidden_size"]), gated=True
        )
    if config.get("model_type") == "qwen2_vl":
        width = int(tower["embed_dim"])
        inner = int(width * float(tower.get("mlp_ratio", 4)))
        return _tower_parameters(tower, width, inner, int(tower["hidden_size"]), gated=False)
    return None


def _tower_parameters(tower: Mapping[str, Any], width: int, inner: int, out: int, *, gated: bool) -> int:
    """Return the parameters of equal layers: gated MLPs come with RMSNorm, others with LayerNorm, which has a bias."""
    matrices, norm = (3, width) if gated else (2, 2 * width)
    attention = 4 * (width * width + width)
    mlp = matrices * width * inner + (matrices - 1) * inner + width
    return _edges(tower, width, out) + norm + int(tower["depth"]) * (2 * norm + attention + mlp)


def _edges(tower: Mapping[str, Any], width: int, out: int) -> int:
    """Return the parameters of the patches' embedding and of the projection, without its norm."""
    channels = int(tower.get("in_channels") or tower.get("in_chans") or 3)
    patch = channels * int(tower.get("temporal_patch_size") or 2) * int(tower["patch_size"]) ** 2
    merged = width * int(tower.get("spatial_merge_size") or _MERGED) ** 2
    return patch * width + merged * merged + merged + merged * out + out


def divides_heads(ranks: int, heads: int, key_value_heads: int) -> bool:
    """Return True if so many ranks can share an attention's heads, each a query head with its key and value."""
    return heads % ranks == 0 and (key_value_heads % ranks == 0 or ranks % key_value_heads == 0)


@dataclass(frozen=True)
class Device:
    """Describe one GPU."""

    name: str
    """Model, variant if it has several, gigabytes; joined by hyphens."""
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations a second."""
    float32_flops: float
    """Float32 operations a second. The trainer does not enable TF32."""
    bandwidth: float
    """Bytes a second that it reads from its memory."""


DEVICES = {
    device.name: device
    for device in (
        Device("l4-24", 24e9, 121e12, 30.3e12, 0.30e12),
        Device("a10-24", 24e9, 125e12, 31.2e12, 0.60e12),
        Device("a10g-24", 24e9, 70e12, 31.5e12, 0.60e12),
        Device("a100-40", 40e9, 312e12, 19.5e12, 1.56e12),
        Device("l40-48", 48e9, 181e12, 90.5e12, 0.86e12),
        Device("l40s-48", 48e9, 362e12, 91.6e12, 0.86e12),
        Device("a100-80", 80e9, 312e12, 19.5e12, 2.0e12),
        Device("h100-80", 80e9, 989e12, 67e12, 3.35e12),
        Device("h100-pcie-80", 80e9, 756e12, 51e12, 2.0e12),
        Device("h100-nvl-94", 94e9, 835e12, 60e12, 3.9e12),
        Device("h800-80", 80e9, 989e12, 67e12, 3.35e12),
        Device("h800-pcie-80", 80e9, 756e12, 51e12, 2.0e12),
        Device("h20-96", 96e9, 148e12, 44e12, 4.0e12),
        Device("gh200-96", 96e9, 989e12, 67e12, 4.0e12),
        Device("gh200-144", 144e9, 989e12, 67e12, 4.9e12),
        Device("h200-141", 141e9, 989e12, 67e12, 4.8e12),
        Device("h200-nvl-141", 141e9, 835e12, 60e12, 4.8e12),
        Device("b200-180", 180e9, 2250e12, 75e12, 8.0e12),
        Device("mi300x-192", 192e9, 1307e12, 163e12, 5.3e12),
    )
}
"""By name. Without a variant: the SXM module of GPUs that have one."""


def find_device(product: str) -> Device | None:
    """Return the GPU of a name or of a node label such as ``NVIDIA-H100-80GB-HBM3``; None if it is unknown.

    Several may have the model's name: first counts the variant, then the memory. A slice of a GPU (MIG) is unknown.
    """
    parts = set(product.lower().replace("_", "-").replace(" ", "-").split("-"))
    if "mig" in parts:
        return None
    known = [device for device in DEVICES.values() if parts.issuperset(device.name.split("-")[:-1])]
    return max(known, key=lambda device: _likeness(device, parts), default=None)


def _likeness(device: Device, parts: set[str]) -> tuple[int, bool]:
    *variant, gigabytes = device.name.split("-")
    return len(variant), not parts.isdisjoint({gigabytes, f"{gigabytes}gb", f"{gigabytes}g"})
