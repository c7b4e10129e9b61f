"""Every alert fires where it must and is silent where it must be: promtool runs the committed rules on made series."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from plaudit_metrics.monitoring.alerts import ALERTS
from plaudit_metrics.monitoring.rules import RUNBOOK, THRESHOLDS, Windows

REPOSITORY = Path(__file__).parents[3]
METRICS = REPOSITORY / "metrics"
"""Its files are the generated ones: ``make check`` compares them."""
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


@pytest.mark.long
@pytest.mark.parametrize("where", ["operator", "run"])
def test_every_case_ends_as_it_must(promtool: str, tmp_path: Path, where: str) -> None:
    """Each file of alerts beside the recorded series; promtool evaluates all rules that it is given in every case."""
    names = {alert.name for alert in ALERTS if alert.where == where}
    rules = ["rules/plaudit.yaml"] if where == "run" else []
    tests = tmp_path / "cases.yaml"
    tests.write_text(
        json.dumps(  # which is YAML too
            {
                "rule_files": [str(METRICS / name) for name in (*rules, f"alerts/{where}.yaml")],
                "evaluation_interval": "1m",
                "tests": [_promtool_test(case) for case in CASES if case.alert in names],
            }
        )
    )
    ended = subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _promtool_test(case: Case) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    return {
        "name": f"{case.alert}: {case.about}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": case.at, "exp_samples": expected}],
    }


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS if alert.name.startswith("Operator")])
def test_each_alert_of_the_operator_has_a_case_where_it_fires_and_one_where_it_does_not(name: str) -> None:
    assert {case.fires > 0 for case in CASES if case.alert == name} == {True, False}


@pytest.mark.parametrize("name", sorted({alert.name for alert in ALERTS}))
def test_each_alert_has_a_section_in_the_runbook(name: str) -> None:
    runbook = (REPOSITORY / RUNBOOK).read_text()
    section = runbook.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Causes**", "**Look**", "**Do**"):
        assert part in section


def test_promtool_accepts_the_rules(promtool: str) -> None:
    paths = [str(METRICS / name) for name in PROMETHEUS_FILES]
    checked = subprocess.run([promtool, "check", "rules", *paths], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_alert_uses_histogram_quantile() -> None:
    assert not any("histogram_quantile" in path.read_text() for path in METRICS.glob("alerts/*"))


def test_recorded_series_that_alerts_use_exist() -> None:
    recorded = set(re.findall(r"record: (\S+)", (METRICS / "rules/plaudit.yaml").read_text()))
    used = {name for alert in ALERTS for name in re.findall(r"run:[\w:]+", alert.expression)}
    assert used <= recorded


def test_every_threshold_is_used_and_every_one_used_exists() -> None:
    texts = [text for alert in ALERTS for text in (alert.expression, alert.summary, alert.description)]
    assert {name for text in texts for name in re.findall(r"<(\w+)>", text)} == set(THRESHOLDS)


def test_windows_shrink_together() -> None:
    windows = Windows(scale=1 / 60)
    assert windows.expression("rate(a[1h]) > 5 and b[5m] offset 20m") == "rate(a[60s]) > 5 and b[5s] offset 20s"
    assert windows.expression("a[30m:5m]") == "a[30s:5s]"
    assert windows.duration("0m") == "0m"
    assert Windows().expression("rate(a[1h])") == "rate(a[1h])"
