"""Which fields an apply owns after an object was created by POST."""

from __future__ import annotations

from typing import Any

from plaudit_operator.runtime.kube import applied_fields


def entry(manager: str, operation: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


def test_the_fields_of_the_creation_and_of_applies_become_those_of_one_apply_without_replicas():
    created = entry("operator", "Update", {"f:spec": {"f:replicas": {}, "f:paused": {}}, "f:data": {"f:a": {}}})
    applied = entry("operator", "Apply", {"f:data": {"f:b": {}}})
    others = [entry("kubelet", "Update", {"f:status": {}}), entry("operator-scale", "Update", {"f:spec": {}})]
    status = entry("operator", "Update", {"f:status": {}}, subresource="status")
    found = applied_fields([created, *others, applied, status], "operator")
    fields = {"f:spec": {"f:paused": {}}, "f:data": {"f:a": {}, "f:b": {}}}
    assert found == [*others, status, {**applied, "fieldsV1": fields}]
    assert applied_fields(found, "operator") is None


def test_an_object_of_other_managers_is_left_alone():
    assert applied_fields([entry("helm", "Update", {"f:data": {}})], "operator") is None
    assert applied_fields([], "operator") is None
