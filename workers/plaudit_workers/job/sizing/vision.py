"""Parameters of a vision tower from a model's ``config.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MERGED = 2
"""Default side of the square of patches that become one token of the language model."""


def vision_parameters(config: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of a model's vision tower with its projection into the language model.

    Returns:
        0 for a model without a tower; None for one of another form than Qwen2-VL's and Qwen2.5-VL's.
    """
    tower = config.get("vision_config")
    if not tower:
        return 0
    counts = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl}.get(str(config.get("model_type")))
    return None if counts is None else counts(tower)


def _qwen2_5_vl(tower: Mapping[str, Any]) -> int:
    width, inner = int(tower["hidden_size"]), int(tower["intermediate_size"])
    attention = 4 * (width * width + width)
    mlp = 3 * width * inner + 2 * inner + width
    return (
        _edges(tower, width, int(tower["out_hidden_size"]))
        + width
        + int(tower["depth"]) * (2 * width + attention + mlp)
    )


def _qwen2_vl(tower: Mapping[str, Any]) -> int:
    width = int(tower["embed_dim"])
    inner = int(width * float(tower.get("mlp_ratio", 4)))
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    return (
        _edges(tower, width, int(tower["hidden_size"]))
        + 2 * width
        + int(tower["depth"]) * (4 * width + attention + mlp)
    )


def _edges(tower: Mapping[str, Any], width: int, out: int) -> int:
    """Return the parameters of the patches' embedding and of the projection, without its norm."""
    channels = int(tower.get("in_channels") or tower.get("in_chans") or 3)
    patch = channels * int(tower.get("temporal_patch_size") or 2) * int(tower["patch_size"]) ** 2
    merged = width * int(tower.get("spatial_merge_size") or _MERGED) ** 2
    return patch * width + merged * merged + merged + merged * out + out
