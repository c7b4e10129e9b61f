"""The ledger: every admitted group ends exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Ledger:
    """Count the admitted groups and their ends; ``evaluated`` are validation groups."""

    admitted: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    open: int = 0

    @classmethod
    def from_counters(cls, counters: Mapping[str, int], num_open: int) -> Self:
        """Read the ledger from ``TrainerStreams.counters`` and the number of open groups."""
        reasons = {name.partition(":")[2]: n for name, n in counters.items() if name.startswith("dropped:")}
        return cls(
            admitted=counters.get("admitted", 0),
            trained=counters.get("trained", 0),
            evaluated=counters.get("evaluated", 0),
            dropped=reasons,
            open=num_open,
        )

    def counters(self) -> dict[str, int]:
        """Return the counters in the form that ``TrainerStreams.restore`` takes."""
        reasons = {f"dropped:{reason}": n for reason, n in self.dropped.items()}
        ends = {"admitted": self.admitted, "trained": self.trained, "evaluated": self.evaluated}
        return {**ends, "dropped": sum(self.dropped.values()), **reasons}

    def problems(self) -> list[str]:
        """Describe each inconsistency in a sentence; [] when every admitted group is accounted for."""
        found = []
        ended = self.trained + self.evaluated + sum(self.dropped.values())
        if self.admitted != ended + self.open:
            found.append(
                f"{self.admitted} groups were admitted, but {self.trained} trained + {self.evaluated} evaluated + "
                f"{sum(self.dropped.values())} dropped + {self.open} open = {ended + self.open}"
            )
        counts = {"admitted": self.admitted, "trained": self.trained, "evaluated": self.evaluated, "open": self.open}
        found += [f"{name} is {count}" for name, count in {**counts, **self.dropped}.items() if count < 0]
        return found
