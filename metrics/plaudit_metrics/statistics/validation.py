"""The mean rewards of a validation among a step's figures: ``val/<data source>/reward``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX, _SUFFIX = "val/", "/reward"


def validation_rewards(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean validation reward by data source; a data source may itself contain slashes.

    Args:
        figures: a step's figures by their keys; others than ``val/<data source>/reward`` are ignored.
    """
    return {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX): value
        for key, value in figures.items()
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX)
    }
