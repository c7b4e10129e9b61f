"""The runbook's commands can be run: each section has one, and the routes, series and keys that they name exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plaudit_metrics.monitoring.alerts import ALERTS
from plaudit_metrics.service.openapi import document
from plaudit_metrics.service.series.run import RunSeries
from runbook import SECTIONS, TEXT, commands

ROOT = Path(__file__).parents[3]
KEYS = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "training.md").read_text()
QUERIES = sorted(
    set(re.findall(r"^curl .*jq.*?(?=  +#|$)", TEXT, re.MULTILINE))
    | {" ".join(found.split()) for found in re.findall(r"`(curl[^`]*jq[^`]*)`", TEXT)}
)


def test_the_sections_are_those_of_the_alerts_in_their_order() -> None:
    assert list(SECTIONS) == list(dict.fromkeys(alert.name for alert in ALERTS))


@pytest.mark.parametrize("name", SECTIONS)
def test_each_diagnosis_begins_with_a_command(name: str) -> None:
    assert commands(name), SECTIONS[name]


def test_series_that_the_runbook_names_are_exposed() -> None:
    declared = {family.name for family in RunSeries().registry.collect()}
    named = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in re.findall(r"plaudit_[a-z]\w+[a-z]", TEXT)}
    named -= {"plaudit_metrics"}  # the package
    operators = {name for name in named if name.startswith(("plaudit_operator", "plaudit_rljob"))}
    assert [name for name in named - operators if not any(each.startswith(name) for each in declared)] == []


def test_routes_that_the_runbook_names_exist() -> None:
    routes = {re.sub(r"<\w+>", "{step}", route) for route in re.findall(r"\$RUN(/api/v1/[\w/<>]+)", TEXT)}
    assert routes <= set(document("demo")["paths"])


def test_keys_of_steps_that_the_runbook_names_are_documented() -> None:
    for key in re.findall(r'\."([\w/]+)"', TEXT):
        head, _, last = key.rpartition("/")
        assert re.search(rf"`{re.escape(head)}/(\{{[\w,]*\b)?{last}\b", KEYS) or f"`{key}`" in KEYS, key


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_runbook_has_a_response_in_a_real_run(query: str, observed_run: Any) -> None:
    if missing := [program for program in ("curl", "jq") if not shutil.which(program)]:
        pytest.skip(f"{missing[0]} is not installed")
    command = query.replace("$RUN", observed_run.metrics).replace("<n>", str(observed_run.num_steps))
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    null = set(re.findall(r'"(\w+)": null', done.stdout))
    of_training = {"kl", "grad", "mismatch", "limit", "discarded", "least", "most"}
    assert null <= of_training  # this run's trainer is scripted and computes none of them
    assert done.stdout.strip()
