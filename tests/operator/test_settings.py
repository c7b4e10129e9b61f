"""Operators of several namespaces, and settings of the process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from world import rljob

from plaudit_operator.cache import Cache, Key
from plaudit_operator.runtime.kinds import POD, RLJOB
from plaudit_operator.settings import OperatorSettings, OperatorSettingsError

IMAGES = {f"PLAUDIT_IMAGE_{name}": "x" for name in ("WORKER", "GPU", "REDIS")}


def job(namespace: str, name: str) -> dict[str, Any]:
    return {**rljob(), "metadata": {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}"}}


def pod(namespace: str, name: str) -> dict[str, Any]:
    return {"metadata": {"name": f"{name}-0", "namespace": namespace, "labels": {"plaudit.dev/job": name}}}


def test_a_list_of_one_namespace_keeps_the_objects_of_the_others():
    cache = Cache()
    for namespace in ("a", "b"):
        cache.replace(RLJOB, [job(namespace, "one"), job(namespace, "two")], namespace)
        cache.replace(POD, [pod(namespace, "one")], namespace)
    assert cache.replace(RLJOB, [job("a", "one")], "a") == {Key("a", "one"), Key("a", "two")}
    assert cache.replace(POD, [], "b") == {Key("b", "one")}
    assert set(cache.keys()) == {Key("a", "one"), Key("b", "one"), Key("b", "two")}
    assert cache._children[("a", "one")]


def test_namespaces_and_log_level_come_from_the_environment():
    settings = OperatorSettings.from_environment(
        {**IMAGES, "PLAUDIT_WATCH_NAMESPACES": "a, b", "PLAUDIT_LOG_LEVEL": "warning"}
    )
    assert (settings.watch_namespaces, settings.log_level) == (("a", "b"), logging.WARNING)
    assert OperatorSettings.from_environment(IMAGES).watch_namespaces == ()
    with pytest.raises(OperatorSettingsError, match="PLAUDIT_LOG_LEVEL is 'loud'; give debug"):
        OperatorSettings.from_environment({**IMAGES, "PLAUDIT_LOG_LEVEL": "loud"})
