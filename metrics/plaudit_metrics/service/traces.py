"""Send samples as OpenTelemetry spans (OTLP over HTTP): the slowest of each step and a share of all.

Each sample is one trace: a root span from its admission until the trainer took its group, a child span for each stage,
each scorer, and each turn and tool call of a conversation. Their attributes follow OpenTelemetry's conventions for
generative AI (``gen_ai.*``). A thread of its own builds and sends them after the step has closed, so that neither a
sample nor the metrics service waits.

Needs the extra ``traces``. A slow or unreachable collector loses traces, which are counted, and nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from plaudit_metrics.sources.steps import EncodedStep
from plaudit_metrics.statistics.columns import turns_began
from plaudit_metrics.statistics.stages import STAGES, stages_of
from plaudit_wire.logs import drawn, get_logger, sample_ids
from plaudit_wire.records import (
    CallRecord,
    GenerationRecord,
    GroupRecord,
    SampleRecord,
    ScorerRecord,
    StepRecord,
    TurnRecord,
)

logger = get_logger(__name__)
Attributes = dict[str, Any]
_EXPORT_WITHIN_S = 5.0
_MOST_STEPS = 8
"""Steps that may wait for the thread; the traces of further ones are dropped."""
_TRACES_AT_A_TIME = 100
_PATH = "/v1/traces"
EVALUATION = "gen_ai.evaluation.result"
"""Name of the event that holds a score."""
_NO_FAILURE = ("scored", "skipped", "ok")


class MissingPackageError(Exception):
    """The extra is not installed; the message names the remedy."""


class Chosen(NamedTuple):
    """Hold the samples of a step to send, and the first judged sample of each group."""

    samples: list[SampleRecord]
    judged: dict[str, int]
    """Group id → lowest index with a value: a group's judges get that sample's trace context."""


def choose(samples: Iterable[SampleRecord], run: str, share: float) -> Chosen:
    """Choose the samples of a step to send: the slowest, and those whose trace id falls into the share (0 to 1).

    The share is decided by the ids alone, so a judge knows at a sample's admission that its spans are wanted.
    """
    slowest: SampleRecord | None = None
    others: list[SampleRecord] = []
    judged: dict[str, int] = {}
    for sample in samples:
        if slowest is None or sample.wall_s > slowest.wall_s:
            slowest = sample
        if drawn(run, sample.group, sample.index, share):
            others.append(sample)
        if sample.scoring.is_scored:
            judged[sample.group] = min(sample.index, judged.get(sample.group, sample.index))
    if slowest is None:
        return Chosen([], judged)
    return Chosen([slowest, *(sample for sample in others if sample is not slowest)], judged)


class SpanSender:
    """Turn closed steps into spans and send them to a collector (with or without ``/v1/traces``), in its own thread.

    Sent are each step's slowest sample and a ``share`` of the others. Raises ``MissingPackageError`` without
    OpenTelemetry's SDK.
    """

    def __init__(self, run: str, endpoint: str, share: float, model: str = "") -> None:
        self.counts: Counter[str] = Counter()
        """Traces that were ``sent``, ``failed`` (refused, or no collector) or ``dropped`` (too many steps waited; these
        by step)."""
        self._run = run
        self._share = share
        self._model = model
        self._sdk = _Sdk(run, endpoint)
        self._steps: queue.Queue[tuple[StepRecord, EncodedStep] | None] = queue.Queue(_MOST_STEPS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="spans", daemon=True)
        self._thread.start()

    def send(self, record: StepRecord, encoded: EncodedStep) -> None:
        """Queue the spans of a step's chosen samples. Never waits."""
        try:
            self._steps.put_nowait((record, encoded))
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self) -> None:
        """Send waiting spans, for a few seconds at most."""
        try:
            self._steps.put(None, timeout=_EXPORT_WITHIN_S)
        except queue.Full:
            self._stopping.set()
        self._thread.join(2 * _EXPORT_WITHIN_S)

    def _run_thread(self) -> None:
        while not self._stopping.is_set() and (step := self._steps.get()) is not None:
            record, encoded = step
            groups = {group.group: group for group in encoded.groups}
            wanted = choose(encoded.decode(), self._run, self._share)
            for start in range(0, len(wanted.samples), _TRACES_AT_A_TIME):
                batch = wanted.samples[start : start + _TRACES_AT_A_TIME]
                for sample in batch:
                    judged = wanted.judged.get(sample.group, sample.index)
                    self._build(record, sample, groups.get(sample.group), judged)
                result = "sent" if self._sdk.export() else "failed"
                self.counts[result] += len(batch)
                if result == "failed":
                    logger.warning("cannot send traces", traces=len(batch))

    def _build(self, record: StepRecord, sample: SampleRecord, group: GroupRecord | None, judged: int) -> None:
        """Build the spans of one sample; ``judged`` is the index whose trace the judges of its group got."""
        seconds = stages_of(sample, group)
        at = sample.stamps.admitted
        ids = sample_ids(self._run, sample.group, sample.index)
        root = self._sdk.start("sample", at, _of_sample(record, sample), ids=ids)
        self._sdk.fail(root, sample.scoring.outcome, sample.scoring.reason)
        for stage in STAGES:
            if stage not in seconds:
                continue
            links = [sample_ids(self._run, sample.group, judged)] if stage == "group_scorer" else []
            child = self._sdk.start(stage, at, self._of_stage(stage, sample), parent=root, links=links)
            at += seconds[stage]
            child.end(_ns(at))
        for name, scorer in sample.scoring.scorers.items():
            at_group = group.terminal if group is not None and scorer.of_group else None
            self._build_scorer(name, scorer, sample, root, at_group)
        self._build_turns(sample, root)
        root.end(_ns(at))

    def _build_turns(self, sample: SampleRecord, root: Any) -> None:
        """Build a span for each turn of a conversation, and below it one for each of its tool calls."""
        if sample.generation is None:
            return
        began = turns_began(sample)
        for number, turn in enumerate(sample.generation.turns, 1):
            at = began + turn.started_s
            about = _of_turn(number, turn, self._model)
            span = self._sdk.start(f"turn {number}", at, about, parent=root)
            for call in turn.calls:
                started = began + call.started_s
                child = self._sdk.start(f"execute_tool {call.tool}", started, _of_call(call), parent=span)
                self._sdk.fail(child, call.outcome, None)
                child.end(_ns(started + call.call_s))
            span.end(_ns(at + turn.generate_s))

    def _build_scorer(
        self, name: str, scorer: ScorerRecord, sample: SampleRecord, root: Any, at_group: float | None
    ) -> None:
        """Build a scorer's span; one of group scope begins when the group's samples had scores: ``at_group``."""
        began = at_group or sample.stamps.score_taken or sample.stamps.committed or sample.stamps.admitted
        ended = began + scorer.seconds
        span = self._sdk.start(f"scorer {name}", began, _of_scorer(name, scorer), parent=root)
        span.add_event(EVALUATION, _evaluation(name, scorer), _ns(ended))
        self._sdk.fail(span, scorer.outcome, scorer.reason)
        span.end(_ns(ended))

    def _of_stage(self, stage: str, sample: SampleRecord) -> Attributes:
        if sample.generation is not None and stage == "generation":
            return _of_generation(sample.generation, self._model)
        if sample.generation is not None and stage in {"engine_queue", "tools"}:
            return {"plaudit.worker": sample.generation.worker}
        if stage in {"limiter", "retry", "score", "commit"}:
            return {"plaudit.worker": sample.scoring.worker}
        return {}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Sdk:
    """Wrap OpenTelemetry's SDK, with an exporter called in the current thread and ids that we choose."""

    def __init__(self, run: str, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
            from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            raise MissingPackageError(
                "spec.metrics.traces.endpoint is set, but OpenTelemetry is not installed: install "
                "plaudit-metrics[traces], or leave it empty"
            ) from error

        class Ids(RandomIdGenerator):
            next: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.next[0] if self.next else super().generate_trace_id()

            def generate_span_id(self) -> int:
                span_id, self.next = (self.next[1], None) if self.next else (super().generate_span_id(), None)
                return span_id

        self._ids = Ids()
        self._finished = InMemorySpanExporter()
        address = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        self._exporter = OTLPSpanExporter(endpoint=address, timeout=_EXPORT_WITHIN_S)
        self._success = SpanExportResult.SUCCESS
        provider = TracerProvider(
            id_generator=self._ids,
            resource=Resource.create({"service.name": "plaudit", "plaudit.run": run}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = provider.get_tracer("plaudit")

    def start(
        self,
        name: str,
        at: float,
        attributes: Attributes,
        *,
        parent: Any = None,
        ids: tuple[int, int] | None = None,
        links: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """Start a span; a root has ``ids`` (trace, span) instead of a parent."""
        from opentelemetry.trace import Link, SpanContext, set_span_in_context

        self._ids.next = ids
        return self._tracer.start_span(
            name,
            set_span_in_context(parent) if parent is not None else None,
            start_time=_ns(at),
            attributes=attributes,
            links=[Link(SpanContext(trace_id, span_id, is_remote=True)) for trace_id, span_id in links],
        )

    def fail(self, span: Any, outcome: str, reason: str | None) -> None:
        """Set the status of a span whose outcome is a failure."""
        from opentelemetry.trace import Status, StatusCode

        if _error(outcome):
            span.set_status(Status(StatusCode.ERROR, reason or outcome))

    def export(self) -> bool:
        """Send all spans that have ended; return False if they are lost."""
        spans = self._finished.get_finished_spans()
        self._finished.clear()
        return not spans or self._exporter.export(spans) is self._success


def _of_sample(record: StepRecord, sample: SampleRecord) -> Attributes:
    attributes: Attributes = {
        "plaudit.step": record.step,
        "plaudit.group": sample.group,
        "plaudit.index": sample.index,
        "plaudit.data_source": sample.data_source,
        "plaudit.outcome": sample.scoring.outcome,
        "plaudit.deliveries": sample.deliveries,
    }
    if sample.scoring.value is not None:
        attributes["plaudit.reward"] = sample.scoring.value
    return attributes | _error(sample.scoring.outcome)


def _of_generation(generation: GenerationRecord, model: str) -> Attributes:
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.response_tokens,
        "gen_ai.response.finish_reasons": [generation.finish_reason],
        "plaudit.policy_version.min": generation.version_min,
        "plaudit.policy_version.max": generation.version_max,
        "plaudit.worker": generation.worker,
    }


def _of_turn(number: int, turn: TurnRecord, model: str) -> Attributes:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.usage.output_tokens": turn.tokens,
        "plaudit.turn": number,
        "plaudit.engine_queue_s": turn.engine_queue_s,
    }


def _of_call(call: CallRecord) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.tool,
        "plaudit.outcome": call.outcome,
        "plaudit.wait_s": call.wait_s,
    }
    return attributes | _error(call.outcome)


def _of_scorer(name: str, scorer: ScorerRecord) -> Attributes:
    """Return the attributes of a scorer's span; a judge reports its tokens."""
    attributes: Attributes = {
        "plaudit.scorer": name,
        "plaudit.outcome": scorer.outcome,
        "plaudit.attempts": scorer.attempts,
        "plaudit.limiter_s": scorer.limiter_s,
        "plaudit.retry_s": scorer.retry_s,
        "plaudit.wait_s": scorer.wait_s,
    }
    for extra, attribute in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        if isinstance(count := scorer.extra.get(extra), float | int):
            attributes[f"gen_ai.usage.{attribute}"] = int(count)
    return attributes | _error(scorer.outcome)


def _evaluation(name: str, scorer: ScorerRecord) -> Attributes:
    """Return the attributes of the event with a scorer's result."""
    attributes: Attributes = {"gen_ai.evaluation.name": name, **_error(scorer.outcome)}
    if scorer.value is not None:
        attributes["gen_ai.evaluation.score.value"] = scorer.value
    if scorer.reason:
        attributes["gen_ai.evaluation.explanation"] = scorer.reason
    return attributes


def _error(outcome: str) -> Attributes:
    """Return ``error.type`` for an outcome that is a failure."""
    return {} if outcome in _NO_FAILURE else {"error.type": outcome}
