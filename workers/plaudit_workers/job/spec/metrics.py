"""``spec.metrics``: what counts as slow, and what is kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plaudit_workers.job.spec.pod import PodSpec
from plaudit_workers.job.spec.section import MUTABLE, Section


class RewardLatencySpec(Section):
    """The job's own objective for the time from a finished sample to its score; alerts burn against it."""

    threshold_seconds: float = Field(default=30.0, gt=0)
    """Seconds within which a sample is to be scored. Default 30."""
    target: float = Field(default=0.99, gt=0, lt=1)
    """Share of samples that are to meet it. Default 0.99."""


class TracesSpec(Section):
    """OpenTelemetry spans of single samples, sent by the metrics process."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Address of a collector that takes OTLP over HTTP, such as ``http://collector:4318``. Default empty: no spans."""
    share: float = Field(default=0.01, ge=0, le=1)
    """Share of the samples that are sent, besides the slowest of each step. Default 0.01."""


class MetricsSpec(Section):
    """The metrics process."""

    reward_latency: Annotated[RewardLatencySpec, MUTABLE] = RewardLatencySpec()
    """The objective for reward latency."""
    traces: TracesSpec = TracesSpec()
    """Spans of single samples."""
    keep_samples: bool = True
    """Write every closed group with texts, scores and timings to ``samples/``. Default true: it is what ``rescore`` and
    a look at single samples need."""
    pod: PodSpec = PodSpec()
    """Its pod."""
