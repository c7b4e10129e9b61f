"""A step's timeline is a well-formed Chrome trace that shows what happened."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from plaudit_metrics.records import StepRecord, WaitRecord
from plaudit_metrics.trace import chrome_trace

Build = Callable[..., Any]
OPENED = 1_000_000.0


@pytest.fixture
def trace(sample: Build, group: Build) -> dict[str, Any]:
    """Two groups of three samples, in two reward workers, one wait."""
    samples, groups = [], []
    for number in range(2):
        of_group = [
            sample(
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
        groups.append(group(of_group, group_scorer=0.5, ready_queue=0.25))
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


def test_no_two_slices_of_a_track_overlap_unless_one_contains_the_other(trace: dict[str, Any]) -> None:
    tracks = defaultdict(list)
    for event in slices(trace):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        for (_, first_end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= first_end - 1e-3
    assert len(tracks) >= 8


def test_each_worker_is_a_process_with_a_name_and_a_track_a_slot(trace: dict[str, Any]) -> None:
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"trainer", "groups", "queues", "rollout-1", "reward-0", "reward-1"}
    pid = next(event["pid"] for event in trace["traceEvents"] if event.get("args", {}).get("name") == "reward-1")
    assert {event["tid"] for event in slices(trace) if event["pid"] == pid} == {1, 2, 3}


def test_arrows_lead_from_each_sample_to_its_group_and_on_to_the_trainer(trace: dict[str, Any]) -> None:
    flows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "flow":
            flows[event["id"]].append(event["ph"])
    assert dict(flows) == {0: ["s", "s", "s", "t", "f"], 1: ["s", "s", "s", "t", "f"]}


def test_every_arrow_touches_a_slice(trace: dict[str, Any]) -> None:
    for event in trace["traceEvents"]:
        if event.get("cat") == "flow":
            touched = [
                each
                for each in slices(trace)
                if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
                and each["ts"] - 1e-3 <= event["ts"] <= each["ts"] + each["dur"] + 1e-3
            ]
            assert touched


def test_times_are_told_from_the_first_of_it_in_rising_order(trace: dict[str, Any]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0


def test_a_sample_admitted_before_the_step_was_opened_makes_no_negative_times(sample: Build, group: Build) -> None:
    early = [sample(admitted=OPENED - 5, generation=3.0, score=4.0)]
    record = StepRecord(3, 1, OPENED, OPENED + 4, 1, 1, {})
    times = [event["ts"] for event in chrome_trace(record, early, [group(early)])["traceEvents"]]
    assert min(times) == 0
    assert max(times) == pytest.approx(7e6)
