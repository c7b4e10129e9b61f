"""Send samples as OpenTelemetry spans (OTLP over HTTP): the slowest of each step and a share of all.

Each sample is one trace (``trace_context``): a root span from its admission until the trainer took its group, and a
child span for each stage. The metrics service builds them from events after the step has closed, so no sample waits.

Needs the extra ``traces``. A slow or unreachable collector loses spans, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plaudit_metrics.sources.kept_steps import StepSamples
from plaudit_metrics.statistics.stages import STAGES, stages_of
from plaudit_metrics.statistics.steps import slowest_samples
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord
from plaudit_wire.trace_context import drawn, sample_ids

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXPORT_WITHIN_S = 5.0
_MOST_WAITING = 20_000
"""Spans that may wait to be sent; further ones are dropped."""
_PATH = "/v1/traces"


class MissingPackageError(Exception):
    """The extra is not installed; the message names the remedy."""


def chosen(samples: StepSamples, run: str, share: float) -> list[SampleRecord]:
    """Return the samples of a step to send: the slowest, and those whose trace id falls into the share (0 to 1)."""
    slowest = slowest_samples(samples.samples, 1)
    others = [each for each in samples.samples if drawn(run, each.group, each.index, share)]
    return slowest + [sample for sample in others if sample not in slowest]


class SpanSender:
    """Turns closed steps into spans, and sends them from its own thread.

    Args:
        run: id of the run.
        endpoint: address of the collector, with or without ``/v1/traces``.
        share: share of the samples, besides each step's slowest.

    Raises:
        MissingPackageError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, run: str, endpoint: str, share: float) -> None:
        self._run = run
        self._share = share
        self._ids, self._provider = _provider(run, endpoint)
        self._tracer = self._provider.get_tracer("plaudit")

    def send(self, record: StepRecord, samples: StepSamples) -> None:
        """Queue the spans of the step's chosen samples."""
        groups = {group.group: group for group in samples.groups}
        for sample in chosen(samples, self._run, self._share):
            self._send_sample(record, sample, groups.get(sample.group))

    def close(self) -> None:
        """Send waiting spans, for a few seconds at most."""
        self._provider.force_flush(int(_EXPORT_WITHIN_S * 1000))
        self._provider.shutdown()

    def _send_sample(self, record: StepRecord, sample: SampleRecord, group: GroupRecord | None) -> None:
        from opentelemetry.trace import set_span_in_context

        seconds = stages_of(sample, group)
        at = sample.stamps.admitted
        self._ids.next = sample_ids(self._run, sample.group, sample.index)
        root = self._tracer.start_span("sample", start_time=_ns(at), attributes=_about(record, sample))
        below = set_span_in_context(root)
        for stage in STAGES:
            if stage in seconds:
                child = self._tracer.start_span(stage, below, start_time=_ns(at), attributes=_worker_of(stage, sample))
                at += seconds[stage]
                child.end(_ns(at))
        root.end(_ns(at))


def _about(record: StepRecord, sample: SampleRecord) -> Mapping[str, Any]:
    scoring = sample.scoring
    attributes: dict[str, Any] = {
        "plaudit.step": record.step,
        "plaudit.group": sample.group,
        "plaudit.index": sample.index,
        "plaudit.data_source": sample.data_source,
        "plaudit.outcome": scoring.outcome,
        "plaudit.deliveries": sample.deliveries,
    }
    if scoring.value is not None:
        attributes["plaudit.reward"] = scoring.value
    for name, scorer in scoring.scorers.items():
        attributes[f"plaudit.scorer.{name}.outcome"] = scorer.outcome
        attributes[f"plaudit.scorer.{name}.call_s"] = scorer.call_s
    return attributes


def _worker_of(stage: str, sample: SampleRecord) -> Mapping[str, Any]:
    if stage in {"engine_queue", "generation", "tools"} and sample.generation is not None:
        return {"plaudit.worker": sample.generation.worker}
    if stage in {"limiter", "retry", "score", "commit"}:
        return {"plaudit.worker": sample.scoring.worker}
    return {}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _provider(run: str, endpoint: str) -> tuple[Any, TracerProvider]:
    """Set up the SDK; return it with its id generator, which gets a sample's ids before its root span starts."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError as error:
        raise MissingPackageError(
            "spec.metrics.traces.endpoint is set, but OpenTelemetry is not installed: install plaudit-metrics[traces], "
            "or leave it empty"
        ) from error

    class Ids(RandomIdGenerator):
        next: tuple[int, int] | None = None

        def generate_trace_id(self) -> int:
            return self.next[0] if self.next else super().generate_trace_id()

        def generate_span_id(self) -> int:
            span_id, self.next = (self.next[1], None) if self.next else (super().generate_span_id(), None)
            return span_id

    ids = Ids()
    provider = TracerProvider(
        id_generator=ids,
        resource=Resource.create({"service.name": "plaudit", "plaudit.run": run}),
        shutdown_on_exit=False,
    )
    address = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
    exporter = OTLPSpanExporter(endpoint=address, timeout=_EXPORT_WITHIN_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MOST_WAITING))
    return ids, provider
