"""Pass the environment of a finished sample to reward functions of TRL's form, in ``environments``.

TRL passes the instances themselves. Here the instance ended with the process of its sample; its public attributes of
plain data came along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PlayedEnvironment:
    """Hold the public attributes of an environment's instance at the end of its episode."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        """Explain why an attribute is missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the environment of this sample has no {name!r}: its instance has ended, so methods cannot be called, "
            "and only its public attributes of plain data (what JSON holds, 64 KiB together) travel with the sample. "
            f"It has {', '.join(sorted(self.__dict__)) or 'none'}. Store what the reward needs in such an attribute, "
            "or return the reward from get_reward (scorer of kind environment)"
        )

    def __repr__(self) -> str:
        return f"PlayedEnvironment({self.__dict__!r})"
