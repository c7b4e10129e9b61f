"""Writing a job and reading it again gives the same job, whatever is set in it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plaudit_job.load import dump_job, dump_json, job_data, load_job, parse_job, read_job

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
scorers = st.one_of(
    st.just({"name": "rule", "kind": "rule", "rule": "gsm8k"}),
    st.fixed_dictionaries(
        {
            "name": st.just("python"),
            "kind": st.just("python"),
            "python": st.fixed_dictionaries(
                {"path": st.just("r.py")}, optional={"arguments": st.dictionaries(text, json_like, max_size=3)}
            ),
        },
        optional={
            "weight": st.floats(1e-12, 1e12),
            "isolation": st.sampled_from(["process", "thread", "inline"]),
            "retries": st.integers(0, 100),
            "timeoutSeconds": st.floats(1e-9, 86_400),
            "onFailure": st.sampled_from(["mask", "zero", "dropGroup", "ignore"]),
        },
    ),
)
pods = st.fixed_dictionaries(
    {},
    optional={
        "image": text,
        "resources": st.just({"limits": {"cpu": 2, "memory": "4Gi"}}),
        "env": st.lists(st.fixed_dictionaries({"name": st.just("A"), "value": text}), max_size=2),
        "nodeSelector": st.dictionaries(text, text, max_size=2),
        "template": st.dictionaries(text, json_like, max_size=3),
    },
)
specs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"source": st.just("./m")}, optional={"revision": text}),
        "data": st.fixed_dictionaries(
            {"train": st.fixed_dictionaries({"path": st.just("t.parquet")}, optional={"shuffle": st.booleans()})},
            optional={"validation": st.just({"path": "/v.jsonl", "sampling": {"maxTokens": 3}})},
        ),
        "algorithm": st.fixed_dictionaries(
            {"steps": st.integers(1, 10**7)},
            optional={
                "maxStaleness": st.integers(0, 3),
                "optimizer": st.fixed_dictionaries({"learningRate": st.floats(1e-300, 10)}),
            },
        ),
        "rollout": st.fixed_dictionaries({}, optional={"pod": pods}),
        "reward": st.fixed_dictionaries({"scorers": st.lists(scorers, min_size=1, max_size=1)}),
        "trainer": st.fixed_dictionaries({}, optional={"sinks": st.just(["tensorboard"]), "pod": pods}),
    },
    optional={
        "seed": st.integers(0, 2**31 - 1),
        "lifecycle": st.just({"activeDeadlineSeconds": 5}),
        "suspend": st.booleans(),
    },
)


def a_job(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}


@pytest.mark.long
@given(specs)
def test_a_written_job_reads_as_the_same_job(spec: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(dump_job(parse_job(a_job(spec))))
        resolved = load_job(folder / "job.yaml")
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "job.yaml").write_text(dump_job(resolved))
        assert load_job(folder / "elsewhere" / "job.yaml") == resolved
        assert resolved.spec.algorithm == parse_job(a_job(spec)).spec.algorithm
        assert resolved.spec.rollout == parse_job(a_job(spec)).spec.rollout


@given(specs, st.text(st.characters(exclude_categories=["Cs"])))
def test_json_is_read_like_yaml(spec: dict[str, Any], said: str) -> None:
    job = parse_job(a_job(spec | {"metrics": {"pod": {"template": {"metadata": {"annotations": {"says": said}}}}}}))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(dump_json(job_data(job)), encoding="utf-8")
        assert read_job(Path(folder) / "job.yaml") == job


@given(specs)
def test_no_null_is_written_but_in_opaque_parts_and_other_readers_read_the_same(spec: dict[str, Any]) -> None:
    job = parse_job(a_job(spec))
    data = yaml.safe_load(dump_job(job))
    assert parse_job(data) == job
    assert None not in set(outside_opaque(data))


@pytest.mark.parametrize("text", ["NO", "y", "off", "010", "1:30", "1_000", "2001-01-01", "=", "~"])
def test_readers_of_yaml_1_1_read_a_text_as_that_text(text: str) -> None:
    job = parse_job(
        a_job({"reward": {"scorers": [{"name": "a", "kind": "rule"}], "workers": {"pod": {"image": text}}}})
    )
    assert yaml.safe_load(dump_job(job))["spec"]["reward"]["workers"]["pod"]["image"] == text


def outside_opaque(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in {"arguments", "template"}:
                yield from outside_opaque(value)
    elif isinstance(node, list):
        for item in node:
            yield from outside_opaque(item)
    else:
        yield node


def test_a_job_that_only_scores_stays_one() -> None:
    job = parse_job(a_job({"reward": {"scorers": [{"name": "a", "kind": "rule"}]}}))
    again = parse_job(yaml.safe_load(dump_job(job)))
    assert again == job
    assert not again.spec.trains
