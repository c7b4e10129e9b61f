"""What is admitted, refused and changed while a job runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_specs import BAD, bad_job
from hypothesis import given
from hypothesis import strategies as st
from world import rljob

from plaudit_operator.admission import Admitted, RefusedJob, admit, frozen_changes, overlaid


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda value: "")
def test_a_bad_specification_is_refused_with_its_remedy(changes: dict[str, Any], words: str):
    refused = admit(bad_job(changes), None, None)
    assert isinstance(refused, RefusedJob)
    assert words in refused.message


def test_the_job_that_the_bad_ones_are_made_of_is_admitted():
    assert isinstance(admit(rljob(), None, None), Admitted)


def test_only_mutable_fields_of_a_change_count():
    before = rljob()["spec"]
    after = json.loads(json.dumps(before))
    after["rollout"] |= {"replicas": 7, "inFlight": "drain"}
    after["reward"]["workers"] |= {"autoscaling": {"maxReplicas": 3}, "processes": 9}
    after["lifecycle"] = {"activeDeadlineSeconds": 5}
    after |= {"suspend": True, "scheduling": {"gang": "native"}}
    after["seed"] = 2
    counts = overlaid(before, after)
    assert counts["rollout"] == {"replicas": 7}
    assert counts["reward"]["workers"] == {"replicas": 2, "autoscaling": {"maxReplicas": 3}}
    assert counts["lifecycle"] == {"activeDeadlineSeconds": 5}
    assert counts["suspend"] is True
    assert "scheduling" not in counts
    assert sorted(frozen_changes(before, after)) == [
        "spec.reward.workers.processes",
        "spec.rollout.inFlight",
        "spec.scheduling",
        "spec.seed",
    ]


def test_limits_of_a_scorer_may_change_and_its_judge_may_not():
    scorer = {"name": "j", "kind": "judge", "judge": {"model": "a"}, "limits": {"concurrency": 1}}
    before = {"reward": {"scorers": [scorer]}}
    after = {"reward": {"scorers": [{**scorer, "judge": {"model": "b"}, "limits": {"concurrency": 2}}]}}
    assert overlaid(before, after) == {"reward": {"scorers": [{**scorer, "limits": {"concurrency": 2}}]}}


@given(st.sampled_from(sorted(rljob()["spec"])), st.one_of(st.none(), st.integers(), st.just({}), st.text(max_size=3)))
def test_whatever_a_section_is_changed_to_the_admitted_one_is_never_lost(section: str, value: Any):
    before = rljob()["spec"]
    after = {**before, section: value} if isinstance(value, dict | None) else before
    counts = overlaid(before, {key: part for key, part in after.items() if part is not None})
    assert set(before) <= set(counts)


def test_the_same_specification_has_no_changes():
    spec = rljob()["spec"]
    assert overlaid(spec, spec) == spec
    assert frozen_changes(spec, spec) == []
