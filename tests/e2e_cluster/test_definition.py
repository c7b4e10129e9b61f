"""The definition of RLJob on a real API server."""

from __future__ import annotations

from typing import Any

import pytest
from bad_specs import BAD, bad_job
from real_cluster import ROOT, Cluster
from world import rljob

from plaudit_operator.admission import RefusedJob, admit

EXAMPLES = sorted((ROOT / "examples").glob("*/job.yaml"))


def test_the_api_server_finds_it_structural(definition: Cluster):
    conditions = definition.get("crd", "rljobs.plaudit.dev")["status"]["conditions"]
    assert {c["type"]: c["status"] for c in conditions} == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_is_taken(definition: Cluster, path: Any):
    definition.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_bad_specifications_are_refused_by_the_api_server_or_by_the_models(definition: Cluster):
    left_to_the_models = 0
    for changes, words in BAD:
        if said := definition.refusal(bad_job(changes)):
            assert words in said, (changes, said)
        else:
            left_to_the_models += 1
            assert isinstance(admit(bad_job(changes), None, None), RefusedJob), changes
    assert left_to_the_models <= len(BAD) // 4


def test_names_are_bounded(definition: Cluster):
    job = rljob()
    job["metadata"]["name"] = "a" * 41
    assert "at most 40 of a-z, 0-9 and" in definition.apply(job, dry_run=True).stderr
    job["metadata"]["name"] = "7b-job"
    assert "must begin with a-z" in definition.apply(job, dry_run=True).stderr


CHANGES: list[tuple[str, bool]] = [
    ('{"rollout": {"replicas": 5}}', True),
    ('{"reward": {"workers": {"replicas": 3, "autoscaling": {"minReplicas": 2}}}}', True),
    ('{"suspend": true}', True),
    ('{"lifecycle": {"activeDeadlineSeconds": 5}}', True),
    ('{"metrics": {"rewardLatency": {"target": 0.5}}}', True),
    ('{"seed": 3}', False),
    ('{"managedBy": "kueue.x-k8s.io/multikueue"}', False),
    ('{"model": {"source": "/plaudit/other"}}', False),
    ('{"rollout": {"inFlight": "drain"}}', False),
    ('{"rollout": {"engine": {"arguments": {"x": 1}}}}', False),
    ('{"reward": {"workers": {"processes": 5}}}', False),
    ('{"reward": {"scorers": [{"name": "other", "kind": "rule"}]}}', False),
    ('{"scheduling": {"gang": "native"}}', False),
    ('{"storage": {"claimName": "other"}}', False),
    ('{"trainer": {"pod": {"template": {"spec": {"hostNetwork": true}}}}}', False),
]


def test_only_mutable_fields_change(definition: Cluster):
    job = rljob(suspend=True)
    job["metadata"]["name"] = "immutable"
    assert definition.apply(job).returncode == 0
    for spec, allowed in CHANGES:
        patch = ["patch", "rlj", "immutable", "--type=merge", "--dry-run=server", "--patch", f'{{"spec": {spec}}}']
        done = definition.kubectl(*patch, check=False)
        assert (done.returncode == 0) == allowed, (spec, done.stderr)
        assert allowed or "while the job exists" in done.stderr
    definition.kubectl("delete", "rlj", "immutable")


def test_kubectl_explains_fields(definition: Cluster):
    said = definition.kubectl("explain", "rlj.spec.reward.scorers.onFailure").stdout
    assert "How a failure of this scorer counts" in " ".join(said.split())
