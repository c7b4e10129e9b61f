"""Every alert fires where it must and is silent where it must be: promtool runs the committed rules on made series."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from plaudit_metrics.alerting import thresholds
from plaudit_metrics.alerting.alerts import ALERTS, RUNBOOK
from plaudit_metrics.alerting.windows import Windows
from plaudit_metrics.generate import files
from plaudit_metrics.service.series import Series

REPOSITORY = Path(__file__).parents[3]
PROMETHEUS_FILES = ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")


@dataclass(frozen=True)
class Case:
    """Series by the minute, and how many alerts of that name fire at the end."""

    alert: str
    about: str
    fires: int
    at: str
    series: dict[str, str]


CASES = [Case(**case) for case in yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())]


RECORDED = {alert.name for alert in ALERTS if "run:" in alert.expression}
"""Alerts whose expression is another one in Grafana (test_grafana compares the rest)."""


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return program


@pytest.mark.parametrize("rules", ["Prometheus", "Grafana"])
def test_every_case_ends_as_it_must(promtool: str, tmp_path: Path, rules: str) -> None:
    tests = tmp_path / "cases.yaml"
    tests.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(path) for path in rule_files(rules, tmp_path)],
                "evaluation_interval": "1m",
                "tests": [_promtool_test(case) for case in CASES if rules == "Prometheus" or case.alert in RECORDED],
            }
        )
    )
    ended = subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def rule_files(rules: str, folder: Path) -> list[Path]:
    """The committed files, or those of Grafana's rules that write recorded series out, in Prometheus's form."""
    if rules == "Prometheus":
        return [REPOSITORY / "metrics" / name for name in PROMETHEUS_FILES]
    groups = yaml.safe_load((REPOSITORY / "metrics" / "alerts" / "grafana.yaml").read_text())["groups"]
    file = folder / "grafana.yaml"
    file.write_text(yaml.safe_dump({"groups": [_as_prometheus_has_it(group) for group in groups]}))
    return [file]


def _as_prometheus_has_it(group: dict[str, Any]) -> dict[str, Any]:
    rules = [
        {
            "alert": rule["title"].partition(" (")[0],
            "expr": rule["data"][0]["model"]["expr"],
            "for": rule["for"],
            "labels": rule["labels"],
        }
        for rule in group["rules"]
    ]
    return {"name": group["name"], "rules": [rule for rule in rules if rule["alert"] in RECORDED]}


def _promtool_test(case: Case) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    return {
        "name": f"{case.alert}: {case.about}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": case.at, "exp_samples": expected}],
    }


@pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
def test_each_alert_has_a_case_where_it_fires_and_one_where_it_does_not(name: str) -> None:
    ends = {case.fires > 0 for case in CASES if case.alert == name}
    assert ends == {True, False}


@pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
def test_each_alert_has_a_section_in_the_runbook(name: str) -> None:
    runbook = (REPOSITORY / RUNBOOK).read_text()
    section = runbook.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Causes**", "**Look**", "**Do**"):
        assert part in section


@pytest.mark.parametrize("name", files())
def test_the_committed_files_are_the_generated_ones(name: str) -> None:
    assert (REPOSITORY / "metrics" / name).read_text() == files()[name]


def test_promtool_accepts_the_rules(promtool: str) -> None:
    paths = [str(REPOSITORY / "metrics" / name) for name in PROMETHEUS_FILES]
    checked = subprocess.run([promtool, "check", "rules", *paths], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_alert_uses_histogram_quantile() -> None:
    assert not any("histogram_quantile" in text for name, text in files().items() if name.startswith("alerts/"))


def test_recorded_series_that_alerts_use_exist() -> None:
    recorded = set(re.findall(r"record: (\S+)", files()["rules/plaudit.yaml"]))
    used = {name for alert in ALERTS for name in re.findall(r"run:[\w:]+", alert.expression)}
    assert used <= recorded


def test_the_bucket_that_an_alert_names_exists() -> None:
    series = Series()
    series.logprob_mismatch.observe(np.array([0.2]))
    labels = {"le": thresholds.LOGPROB_DIFFERENCE}
    assert series.registry.get_sample_value("plaudit_logprob_mismatch_bucket", labels) == 0


def test_windows_shrink_together() -> None:
    windows = Windows(scale=1 / 60)
    assert windows.expression("rate(a[1h]) > 5 and b[5m] offset 20m") == "rate(a[60s]) > 5 and b[5s] offset 20s"
    assert windows.duration("0m") == "0m"
    assert Windows().expression("rate(a[1h])") == "rate(a[1h])"
