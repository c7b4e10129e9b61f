"""A step's timeline is a well-formed Chrome trace that shows what happened."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.service.trace import chrome_trace
from plaudit_wire.records import CallRecord, StepRecord, TurnRecord, WaitRecord
from stage_records import build_group, build_sample

OPENED = 1_000_000.0


@pytest.fixture
def trace() -> dict[str, Any]:
    """Two groups of three samples, in two reward workers, one wait."""
    samples, groups = [], []
    for number in range(2):
        of_group = [
            build_sample(
                f"t-{number}-1.0",
                index,
                admitted=OPENED,
                rollout_queue=0.5,
                generation=2.0,
                sample_queue=0.25,
                limiter=1.0,
                score=3.0 + index,
            )
            for index in range(3)
        ]
        samples += [
            msgspec.structs.replace(each, scoring=msgspec.structs.replace(each.scoring, worker=f"reward-{number}"))
            for each in of_group
        ]
        groups.append(build_group(of_group, group_scorer=0.5, ready_queue=0.25))
    record = StepRecord(
        3, 1, OPENED, OPENED + 12, 6, 2, {}, verdict="reward", waits=[WaitRecord(OPENED, OPENED + 9, ["t-0-1.0"])]
    )
    made = chrome_trace(record, samples, groups)
    return dict(json.loads(json.dumps(made)))  # plain JSON, as a viewer reads it


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_stage_of_every_sample_is_a_slice_of_its_length(trace: dict[str, Any]) -> None:
    lengths = defaultdict(list)
    for event in slices(trace):
        lengths[event["name"]].append(event["dur"] / 1e6)
    assert lengths["generation"] == pytest.approx([2.0] * 6)
    assert sorted(lengths["score"]) == pytest.approx([3.0, 3.0, 4.0, 4.0, 5.0, 5.0])
    assert lengths["limiter"] == pytest.approx([1.0] * 6)
    assert lengths["group_scorer"] == pytest.approx([0.5] * 2)
    assert lengths["step 3"] == pytest.approx([12.0])
    assert lengths["wait"] == pytest.approx([9.0])


def test_each_worker_is_a_process_with_a_name_and_a_track_a_slot(trace: dict[str, Any]) -> None:
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"trainer", "groups", "queues", "rollout-1", "reward-0", "reward-1"}
    pid = next(event["pid"] for event in trace["traceEvents"] if event.get("args", {}).get("name") == "reward-1")
    assert {event["tid"] for event in slices(trace) if event["pid"] == pid} == {1, 2, 3}


def test_arrows_lead_from_each_sample_to_its_group_and_on_to_the_trainer(trace: dict[str, Any]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "flow":
            arrows[event["id"]].append(names[event["pid"]])
    routes = sorted(arrows.values())
    assert routes == [["groups", "trainer"]] * 2 + [["reward-0", "groups"]] * 3 + [["reward-1", "groups"]] * 3


def test_waits_lie_inside_their_step_on_one_track(trace: dict[str, Any]) -> None:
    wait, step = (next(e for e in slices(trace) if e["name"] == name) for name in ("wait", "step 3"))
    assert (wait["pid"], wait["tid"]) == (step["pid"], step["tid"])
    assert step["ts"] <= wait["ts"] < wait["ts"] + wait["dur"] <= step["ts"] + step["dur"]


def conversation() -> Any:
    """Two turns, the first followed by two calls at the same time, of which one failed."""
    calls = [CallRecord("search", "ok", 1.0, 2.0), CallRecord("run", "timeout", 1.0, 4.0, wait_s=0.5)]
    turns = [TurnRecord(0, 8, 0.0, 1.0, calls=calls), TurnRecord(8, 4, 5.0, 2.0)]
    return build_sample("t-0-1.0", 0, rollout_queue=1.0, generation=3.0, tools=4.0, score=1.0, turns=turns)


def test_turns_lie_inside_their_conversation_and_calls_beside_each_other() -> None:
    made = chrome_trace(StepRecord(1, 1, OPENED, OPENED + 20, 1, 1, {}), [conversation()], [])
    assert problems_of(made) == []
    named = {each["name"]: each for each in slices(made)}
    lengths = {name: named[name]["dur"] / 1e6 for name in ("conversation", "turn 1", "turn 2", "search", "run")}
    assert lengths == pytest.approx({"conversation": 7.0, "turn 1": 1.0, "turn 2": 2.0, "search": 2.0, "run": 4.0})
    whole = named["conversation"]
    assert (whole["args"]["generation_s"], whole["args"]["tools_s"]) == pytest.approx((3.0, 4.0))
    assert named["turn 2"]["ts"] + named["turn 2"]["dur"] == pytest.approx(whole["ts"] + whole["dur"])
    assert (named["run"]["args"]["outcome"], named["run"]["args"]["turn"]) == ("timeout", 1)
    assert named["search"]["pid"] == named["run"]["pid"] != whole["pid"]
    assert named["search"]["tid"] != named["run"]["tid"]


def problems_of(trace: dict[str, Any]) -> list[str]:
    """What the rules of the trace event format, as Perfetto reads it, do not allow."""
    events = trace["traceEvents"]
    found = [f"{e} lacks a field" for e in events if not {"ph", "name", "pid", "tid", "ts"} <= e.keys()]
    found += [f"{e} is before the first" for e in events if e["ts"] < 0 or e.get("dur", 0) < 0]
    named = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    found += [f"{name} twice" for name, times in Counter(named).items() if times > 1]
    tracks = defaultdict(list)
    for event in slices(trace):
        tracks[event["pid"], event["tid"]].append(span_ns(event))
    found += [f"{track} has no name" for track in tracks if ("thread_name", *track) not in named]
    found += [f"{track} does not nest" for track, spans in tracks.items() if not nest(spans)]
    flows = defaultdict(list)
    for event in events:
        if event.get("cat") == "flow":
            flows[event["id"]].append(event)
    for number, ends in flows.items():
        if [e["ph"] for e in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"] or ends[1].get("bp") != "e":
            found.append(f"arrow {number} is {ends}")
        found += [f"{e} touches nothing" for e in ends if not touches(e, tracks[e["pid"], e["tid"]])]
    return found


def span_ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def nest(spans: list[tuple[int, int]]) -> bool:
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            return False
        open_ends.append(end)
    return True


def touches(end: dict[str, Any], spans: list[tuple[int, int]]) -> bool:
    moment = round(end["ts"] * 1000)
    return any(start <= moment <= stop for start, stop in spans)


def test_the_rules_of_the_format_are_kept(trace: dict[str, Any]) -> None:
    assert problems_of(trace) == []


@given(data=st.data())
def test_the_rules_of_the_format_are_kept_whatever_happened(data: st.DataObject) -> None:
    seconds = st.floats(0, 1e4, allow_subnormal=False) | st.just(0.0) | st.floats(0, 1e-8)
    stages = ("rollout_queue", "generation", "sample_queue", "redelivery", "limiter", "score", "commit")
    samples, groups = [], []
    for number in range(data.draw(st.integers(0, 3))):
        of_group = [
            build_sample(
                f"t-{number}-1.0",
                index,
                admitted=OPENED + data.draw(st.floats(-100, 100)),
                **{stage: data.draw(seconds) for stage in stages},
            )
            for index in range(data.draw(st.integers(1, 3)))
        ]
        samples += of_group
        if data.draw(st.booleans()):
            groups.append(build_group(of_group, group_scorer=data.draw(seconds), ready_queue=data.draw(seconds)))
    start = OPENED + data.draw(st.floats(-10, 10))
    waits = [WaitRecord(start, start + data.draw(seconds), []), WaitRecord(start + 1e5, start + 2e5, [])]
    record = StepRecord(3, 1, OPENED, OPENED + data.draw(seconds), len(samples), len(groups), {}, waits=waits)
    assert problems_of(chrome_trace(record, samples, groups)) == []


def test_times_start_at_the_first_event_and_rise(trace: dict[str, Any]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0


def test_a_sample_admitted_before_the_step_was_opened_makes_no_negative_times() -> None:
    early = [build_sample(admitted=OPENED - 5, generation=3.0, score=4.0)]
    record = StepRecord(3, 1, OPENED, OPENED + 4, 1, 1, {})
    times = [event["ts"] for event in chrome_trace(record, early, [build_group(early)])["traceEvents"]]
    assert min(times) == 0
    assert max(times) == pytest.approx(7e6)
