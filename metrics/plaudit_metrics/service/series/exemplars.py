"""Name a sample behind each bucket of a latency histogram, as an OpenMetrics exemplar.

An exemplar has the sample's ``group`` and ``index``, and its ``trace_id`` where traces are sent. It then names only
samples whose traces are sent, so that every link leads to a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prometheus_client.samples import Exemplar

from plaudit_metrics.statistics.columns import Integers
from plaudit_wire.records import SampleRecord
from plaudit_wire.trace_context import drawn, sample_ids

_MOST_CHARACTERS = 64
"""Of a group's id: Prometheus refuses an exemplar whose labels have over 128 characters."""


@dataclass(frozen=True)
class Naming:
    """Name the samples of a run in exemplars."""

    run: str = ""
    share: float | None = None
    """Share of the samples whose traces are sent; None: no traces are sent."""

    def among(self, samples: Sequence[SampleRecord]) -> NamedSamples:
        """Return the samples for exemplars. Where traces are sent, those that are drawn: validation has none."""
        share = self.share
        if share is None:
            return NamedSamples(self, samples, np.ones(len(samples), dtype=np.bool_))
        traced = [each.split == "train" and drawn(self.run, each.group, each.index, share) for each in samples]
        return NamedSamples(self, samples, np.array(traced, dtype=np.bool_))

    def labels(self, sample: SampleRecord) -> dict[str, str]:
        """Return the labels of an exemplar."""
        labels: dict[str, str] = {}
        if len(sample.group) <= _MOST_CHARACTERS:
            labels |= {"group": sample.group, "index": str(sample.index)}
        if self.share is not None:
            trace_id, _ = sample_ids(self.run, sample.group, sample.index)
            labels["trace_id"] = f"{trace_id:032x}"
        return labels


UNTRACED = Naming()
"""Names samples by group and index alone."""


class NamedSamples:
    """Name the samples behind an array of values, in its order.

    Args:
        eligible: True where an exemplar may name the sample; shape [number of samples].
        at: seconds since the epoch of their exemplars; None: when each became terminal.
    """

    def __init__(
        self, naming: Naming, samples: Sequence[SampleRecord], eligible: NDArray[np.bool_], at: float | None = None
    ) -> None:
        self.eligible = eligible
        self._naming = naming
        self._samples = samples
        self._at = at

    def take(self, places: Integers) -> NamedSamples:
        """Return the samples at these places."""
        samples = [self._samples[place] for place in places.tolist()]
        return NamedSamples(self._naming, samples, self.eligible[places], self._at)

    def exemplar(self, place: int, value: float) -> Exemplar:
        """Return the exemplar of the sample at a place."""
        sample = self._samples[place]
        at = self._at or sample.stamps.committed or sample.stamps.admitted
        return Exemplar(self._naming.labels(sample), value, at)
