"""Scale all time windows together, so that a test sees in seconds what takes hours."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Windows:
    """Scale Prometheus durations.

    Attributes:
        scale: factor; 1/60 turns hours into minutes.
        least_s: the shortest window (it must hold two scrapes).
    """

    scale: float = 1.0
    least_s: float = 1.0

    def duration(self, text: str) -> str:
        """Scale one duration, such as ``5m``."""
        if self.scale == 1.0 or text == "0m":
            return text
        return f"{max(self.seconds(text), self.least_s):.0f}s"

    def seconds(self, text: str) -> float:
        """Return a duration in scaled seconds."""
        number, unit = text[:-1], text[-1]
        return float(number) * _UNITS_S[unit] * self.scale

    def expression(self, text: str) -> str:
        """Scale every ``[window]``, ``[window:step]`` and ``offset`` of an expression."""
        scaled = re.sub(r"(?<=[\[:])(\d+[smhd])(?=[:\]])", lambda found: self.duration(found[1]), text)
        return re.sub(r"offset (\w+)", lambda found: f"offset {self.duration(found[1])}", scaled)


AS_WRITTEN = Windows()
"""Leaves all windows as they are."""
