"""When a child is said to differ from what was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_operator.planning.plan import differs

SCALARS = st.one_of(st.booleans(), st.integers(), st.text(max_size=5))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=4))
def test_nothing_differs_from_itself(manifest: dict[str, Any]):
    assert not differs(manifest, copy.deepcopy(manifest))


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=4), st.text(min_size=5, max_size=6), TREES)
def test_fields_added_by_the_server_are_not_drift(manifest: dict[str, Any], field: str, value: Any):
    assert not differs(manifest, {**manifest, field: value})


@pytest.mark.parametrize(
    ("wanted", "observed"),
    [
        ({"resources": {"limits": {"cpu": "0.5"}}}, {"resources": {"limits": {"cpu": "500m"}}}),
        ({"resources": {"requests": {"memory": "1024Mi"}}}, {"resources": {"requests": {"memory": "1Gi"}}}),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}),
        ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "x"}]}),
        ({"readOnly": False, "subPath": ""}, {}),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "TCP"}]}),
    ],
)
def test_another_form_of_the_same_is_the_same(wanted: Any, observed: Any):
    assert not differs(wanted, observed)


@pytest.mark.parametrize(
    ("wanted", "observed"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 2}),
        ({"a": {"b": "x"}}, {"a": None}),
        ({"resources": {"limits": {"cpu": "1"}}}, {"resources": {"limits": {"cpu": "2"}}}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "1"}]}),
        ({"args": ["a", "b"]}, {"args": ["a"]}),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": "a"}),
    ],
)
def test_a_real_difference_is_seen(wanted: Any, observed: Any):
    assert differs(wanted, observed)
