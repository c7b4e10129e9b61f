"""``spec.metrics``: the latency objective, traces and stored samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plaudit_workers.job.spec.kubernetes.pod import PodSpec
from plaudit_workers.job.spec.section import MUTABLE, Section


class RewardLatencySpec(Section):
    """The job's own objective for the time from a finished sample to its score; alerts burn against it."""

    threshold_seconds: float = Field(default=30.0, gt=0)
    """Seconds from a finished sample to its score. Default 30."""
    target: float = Field(default=0.99, gt=0, lt=1)
    """Target share of samples within the threshold. Default 0.99."""


class TracesSpec(Section):
    """OpenTelemetry spans of single samples, sent by the metrics process."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a collector for OTLP over HTTP, such as ``http://collector:4318``. Default empty: no spans."""
    share: float = Field(default=0.01, ge=0, le=1)
    """Share of samples that are sent; the slowest of each step are always sent. Default 0.01."""


class MetricsSpec(Section):
    """The metrics process."""

    reward_latency: Annotated[RewardLatencySpec, MUTABLE] = RewardLatencySpec()
    """The objective for reward latency."""
    traces: TracesSpec = TracesSpec()
    """Spans of single samples."""
    keep_samples: bool = True
    """Write every closed group with texts, scores and timings to ``samples/``. Default true: ``rescore`` and the
    samples view need them."""
    pod: PodSpec = PodSpec()
    """Its pod."""
