"""Samples arrive at a real OTLP receiver as traces: the slowest of each step, and a share of all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson

from otlp_receiver import Receiver
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_metrics.service.traces import SpanSender, choose
from plaudit_metrics.sources.steps import EncodedStep, StepSamples, encode_sample, encoded_step
from plaudit_wire.logs import sample_ids, traceparent
from plaudit_wire.records import CallRecord, ScorerRecord, StepRecord, TurnRecord
from plaudit_wire.redis import RedisAddress
from stage_records import build_group, build_sample

STEP = StepRecord(7, 1, 0.0, 60.0, 4, 2, {})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def samples() -> StepSamples:
    """Two groups of two; the last sample is the slowest."""
    made = [
        build_sample(f"t-{number}-1.0", index, generation=2.0, limiter=0.5, score=1.0 + number + index)
        for number in range(2)
        for index in range(2)
    ]
    return StepSamples(made, [build_group(made[:2]), build_group(made[2:], ready_queue=0.25)])


def encoded(samples: StepSamples) -> EncodedStep:
    return encoded_step([encode_sample(sample) for sample in samples.samples], samples.groups)


def sent(receiver: Receiver, samples: StepSamples, share: float) -> dict[str, Any]:
    """Root spans by traceparent."""
    sender = SpanSender("demo-1", receiver.address, share)
    sender.send(STEP, encoded(samples))
    sender.close()
    assert sender.counts["sent"] > 0
    roots = [span for span in receiver.spans if not span.parent_span_id]
    return {f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01": root for root in roots}


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_the_slowest_sample_of_a_step_arrives_with_its_stages(receiver: Receiver, samples: StepSamples) -> None:
    ((parent, root),) = sent(receiver, samples, 0.0).items()
    assert parent == traceparent("demo-1", "t-1-1.0", 1)
    assert receiver.resource["service.name"] == "plaudit"
    assert receiver.resource["plaudit.run"] == "demo-1"
    about = attributes(root)
    assert (about["plaudit.step"], about["plaudit.group"], about["plaudit.outcome"]) == (7, "t-1-1.0", "scored")
    stages = [span for span in receiver.spans if span.parent_span_id == root.span_id]
    seconds = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in stages}
    expected = {"generation": 2.0, "limiter": 0.5, "score": 3.0, "ready_queue": 0.25}
    assert seconds == pytest.approx(expected, abs=1e-3)
    assert attributes(next(span for span in stages if span.name == "score"))["plaudit.worker"] == "reward-1"
    assert root.start_time_unix_nano == min(span.start_time_unix_nano for span in stages)
    assert root.end_time_unix_nano == max(span.end_time_unix_nano for span in stages)


def test_spans_follow_the_conventions_for_generative_ai(receiver: Receiver) -> None:
    judge = ScorerRecord(
        "scored", 0.5, limiter_s=0.5, call_s=1.0, extra={"prompt_tokens": 90.0, "completion_tokens": 3.0}
    )
    broken = ScorerRecord("infra_error", reason="http://judge responded 500", call_s=0.1)
    made = [
        build_sample("t-0-1.0", 0, generation=2.0, score=1.5, scorers={"judge": judge}),
        build_sample("t-0-1.0", 1, generation=2.0, score=3.0, scorers={"other": broken}, outcome="infra_error"),
    ]
    sent(receiver, StepSamples(made, [build_group(made, group_scorer=1.0)]), 1.0)
    named: dict[str, list[Any]] = {}
    for span in receiver.spans:
        named.setdefault(span.name, []).append(span)
    scored = attributes(named["scorer judge"][0])
    assert (scored["gen_ai.usage.input_tokens"], scored["gen_ai.usage.output_tokens"]) == (90, 3)
    (event,) = named["scorer judge"][0].events
    assert event.name == "gen_ai.evaluation.result"
    assert attributes(event) == {"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": 0.5}
    failed = named["scorer other"][0]
    assert (failed.status.code, failed.status.message) == (2, "http://judge responded 500")
    assert attributes(failed)["error.type"] == "infra_error"
    assert sorted(span.status.code for span in named["sample"]) == [0, 2]
    written = attributes(named["generation"][0])
    assert (written["gen_ai.usage.input_tokens"], written["gen_ai.usage.output_tokens"]) == (10, 20)
    assert [value.string_value for value in written["gen_ai.response.finish_reasons"].values] == ["stop"]
    trace_id, span_id = sample_ids("demo-1", "t-0-1.0", 0)
    for span in named["group_scorer"]:
        (link,) = span.links
        assert (int.from_bytes(link.trace_id), int.from_bytes(link.span_id)) == (trace_id, span_id)


def test_a_step_of_a_real_run_opens_as_json_with_status_attributes_and_scorers(observed_run: Any) -> None:
    def spans_of(step: int) -> list[dict[str, Any]]:
        spans = [json.loads(MessageToJson(span)) for span in observed_run.spans]
        traces = {span["traceId"] for span in spans if known(span).get("plaudit.step") == {"intValue": str(step)}}
        return [span for span in spans if span["traceId"] in traces]

    for _ in range(100):  # sent after the step has closed
        if spans := spans_of(1):
            break
        time.sleep(0.1)
    samples = [span for span in spans if span["name"] == "sample"]
    failed = [span for span in samples if span["status"].get("code") == "STATUS_CODE_ERROR"]
    assert 0 < len(failed) < len(samples)
    assert all(known(span)["error.type"] == {"stringValue": "data_error"} for span in failed)
    for sample in samples:
        below = {span["name"]: span for span in spans if span.get("parentSpanId") == sample["spanId"]}
        assert {"generation", "scorer mine", "scorer big", "score"} <= below.keys()
        written = known(below["generation"])
        assert written["gen_ai.request.model"] == {"stringValue": "tiny"}
        assert {"gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"} <= written.keys()
        (event,) = below["scorer big"]["events"]
        assert event["name"] == "gen_ai.evaluation.result"


def known(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span in OTLP's JSON."""
    return {each["key"]: each["value"] for each in span.get("attributes", [])}


def test_a_conversation_arrives_with_its_turns_and_tool_calls(receiver: Receiver) -> None:
    calls = [CallRecord("search", "ok", 1.0, 2.0), CallRecord("run", "timeout", 1.0, 4.0)]
    turns = [TurnRecord(0, 8, 0.0, 1.0, calls=calls), TurnRecord(8, 4, 5.0, 2.0)]
    made = [build_sample("t-0-1.0", 0, generation=3.0, tools=4.0, score=1.0, turns=turns)]
    sent(receiver, StepSamples(made, [build_group(made)]), 1.0)
    named = {span.name: span for span in receiver.spans}
    first, second, run = named["turn 1"], named["turn 2"], named["execute_tool run"]
    assert first.parent_span_id == second.parent_span_id == named["sample"].span_id
    assert run.parent_span_id == named["execute_tool search"].parent_span_id == first.span_id
    assert (run.end_time_unix_nano - run.start_time_unix_nano) / 1e9 == pytest.approx(4.0, abs=1e-3)
    assert second.end_time_unix_nano / 1e9 == pytest.approx(made[0].stamps.published, abs=1e-3)
    about = attributes(run)
    assert (about["gen_ai.operation.name"], about["gen_ai.tool.name"], about["error.type"]) == (
        "execute_tool",
        "run",
        "timeout",
    )
    assert (run.status.code, named["execute_tool search"].status.code) == (2, 0)
    assert attributes(second)["gen_ai.usage.output_tokens"] == 4


def test_steps_that_too_many_wait_before_are_dropped_and_counted(receiver: Receiver, samples: StepSamples) -> None:
    sender = SpanSender("demo-1", receiver.address, 1.0)
    for _ in range(50):
        sender.send(STEP, encoded(samples))
    sender.close()
    assert sender.counts["dropped"] > 0
    assert sender.counts["sent"] == (50 - sender.counts["dropped"]) * len(samples.samples)


def test_every_sample_arrives_once_when_all_are_asked_for(receiver: Receiver, samples: StepSamples) -> None:
    assert set(sent(receiver, samples, 1.0)) == {
        traceparent("demo-1", sample.group, sample.index) for sample in samples.samples
    }


def test_a_share_is_the_same_samples_every_time() -> None:
    many = [build_sample(f"t-{number}-1.0", 0) for number in range(2000)]
    first, again, more = (choose(many, "demo-1", share).samples for share in (0.1, 0.1, 0.2))
    assert again == first
    assert 120 < len(first) < 280
    assert {each.group for each in first} <= {each.group for each in more}


def test_a_collector_that_is_away_costs_nothing_but_its_spans(receiver: Receiver, samples: StepSamples) -> None:
    sender = SpanSender("demo-1", "http://127.0.0.1:1", 1.0)
    sender.send(STEP, encoded(samples))
    sender.close()
    assert sender.counts == {"failed": len(samples.samples)}
    assert sent(receiver, samples, 0.0)


def test_the_service_is_configured_by_its_environment() -> None:
    given = {
        "PLAUDIT_RUN": "demo-1",
        "PLAUDIT_REDIS_URL": "redis://r:1/0",
        "PLAUDIT_TRACES_ENDPOINT": "http://collector:4318",
        "PLAUDIT_TRACES_SHARE": "0.25",
    }
    expected = ServiceSettings("demo-1", RedisAddress("redis://r:1/0"))
    assert ServiceSettings.from_environment(given) == replace(
        expected, traces_endpoint="http://collector:4318", traces_share=0.25
    )
