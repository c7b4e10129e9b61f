"""Every alert × every step length × every scenario: it fires where it must, is silent elsewhere, and does not flap.

promtool runs the committed rules on simulated runs, all of them side by side as in one Prometheus.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit_metrics.monitoring.alerts import ALERTS
from simulated_series import Cell, input_series

REPOSITORY = Path(__file__).parents[3]
RULES = [
    str(REPOSITORY / "metrics" / name) for name in ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")
]

SECOND, MINUTE, ELEVEN, HALF_HOUR, LONG = LENGTHS = (1.0, 60.0, 660.0, 1800.0, 9000.0)
SHORT = (SECOND, MINUTE, ELEVEN)
"""Three times such a step is shorter than the fault."""

SCENARIOS: dict[str, dict[str, tuple[float, ...]]] = {
    "healthy": {},
    "slow rewards": {
        "RewardLatencyBurn warning": LENGTHS,
        "RewardLatencyBurn critical": (SECOND, MINUTE),
        "RewardStarvesTrainer warning": (SECOND, MINUTE),
        "ScorerSlow warning": LENGTHS,
    },
    "hung scorer": {"ScorerHanging critical": LENGTHS, "StepStalled critical": SHORT},
    "raising function": {
        "ScoresFailing critical": LENGTHS,
        "ScorerFailing warning": LENGTHS,
        "RewardLatencyBurn warning": LENGTHS,
        "StepStalled critical": SHORT,
    },
    "dead redis": {"RedisDown critical": LENGTHS, "StepStalled critical": SHORT},
    "dead trainer": {"NoTrainer critical": LENGTHS, "StepStalled critical": SHORT},
    "dead metrics pod": {"RunWithoutMetrics critical": LENGTHS},
    "suspended": {},
    "finished": {},
    "service": {},
    "service with a hung scorer": {"ScorerHanging critical": LENGTHS},
    "service with too much work": {"BacklogGrowing warning": LENGTHS},
    "restart": {},
    "eviction": {},
    "flapping workers": {"Redelivering warning": LENGTHS},
    "no rollout": {"NoReadyRollout critical": LENGTHS, "StepStalled critical": SHORT},
    "no reward worker": {
        "NoRewardWorkers critical": LENGTHS,
        "SampleQueueOld warning": LENGTHS,
        "StepStalled critical": SHORT,
    },
    "few reward workers": {"SampleQueueOld warning": LENGTHS},
    "budget": {"JudgeBudgetExhausted warning": LENGTHS},
    "judge errors": {"JudgeErrors warning": LENGTHS},
    "open circuit": {"JudgeCircuitOpen critical": LENGTHS},
    "broken tool": {"ToolFailing warning": LENGTHS},
    "slow tool": {"ToolSlow warning": LENGTHS, "ToolsStarveTrainer warning": LENGTHS},
    "mismatch": {"LogprobMismatch critical": LENGTHS},
    "no gradient": {"UpdatesDiscarded warning": LENGTHS},
    "collapse": {"RewardCollapsed warning": LENGTHS},
    "uniform": {"RewardsUniform warning": LENGTHS},
    "equal rewards": {"RewardVarianceCollapsed warning": LENGTHS, "RewardsUniform warning": LENGTHS},
    "equal and truncated": {"TruncationHigh warning": LENGTHS},
    "equal and failed": {},
    "truncation": {"TruncationHigh warning": LENGTHS},
    "stale": {"StalenessBeyondBound warning": LENGTHS},
    "slow weights": {"RolloutBehind warning": LENGTHS},
    "events lost": {"EventsLost warning": LENGTHS},
    "dead letter": {"DeadLetters warning": LENGTHS},
    "full redis": {"RedisMemoryHigh critical": LENGTHS},
    "unwritten redis": {"RedisPersistenceFailing critical": LENGTHS},
    "failed": {"RLJobFailed critical": LENGTHS},
    "degraded": {"RLJobDegraded warning": LENGTHS},
}
"""Scenario → the alerts that must fire, with the step lengths at which they must. All others must be silent."""


def firing(offset: str = "") -> str:
    """The alerts that fire, by run; the alerts of jobs call it ``name``."""
    selector = f'ALERTS{{alertstate="firing", alertname!~"Operator.*"}}{offset}'
    return f'count by (run, alertname, severity) (label_replace({selector}, "run", "$1", "name", "(.+)")) > bool 0'


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return program


def expected(cell: Cell) -> set[str]:
    return {alert for alert, lengths in SCENARIOS[cell.scenario].items() if cell.step_s in lengths}


def matrix_test(step_s: float, coarse: bool) -> dict[str, Any]:
    cells = [Cell(step_s, scenario, coarse) for scenario in SCENARIOS]
    interval = f"{cells[0].interval_min}m"
    end, whole = f"{cells[0].end_min}m", f"[{cells[0].end_min}m:{interval}]"
    begins = f"({firing()}) unless ({firing(f' offset {interval}')})"
    return {
        "name": f"steps of {step_s:g} s",
        "interval": interval,
        "input_series": [series for cell in cells for series in input_series(cell)],
        "promql_expr_test": [
            {
                "expr": f"min_over_time(({firing()}){whole})",
                "eval_time": end,
                "exp_samples": [
                    {"labels": f'{{run="{cell.run}", alertname="{name}", severity="{severity}"}}', "value": 1}
                    for cell in cells
                    for name, severity in map(str.split, sorted(expected(cell)))
                ],
            },
            {"expr": f"sum_over_time(({begins}){whole}) > 1", "eval_time": end, "exp_samples": []},
        ],
    }


@pytest.mark.parametrize("step_s", LENGTHS)
def test_alerts_fire_where_they_must_and_only_there_and_once(promtool: str, tmp_path: Path, step_s: float) -> None:
    run_matrix(promtool, tmp_path, RULES, step_s)


def test_grafanas_rules_fire_where_prometheus_rules_do(promtool: str, tmp_path: Path) -> None:
    """Grafana knows no recorded series and does not keep an alert firing; the rest is the same."""
    groups = yaml.safe_load((REPOSITORY / "metrics" / "alerts" / "grafana.yaml").read_text())["groups"]
    file = tmp_path / "grafana.yaml"
    file.write_text(yaml.safe_dump({"groups": [as_prometheus_has_it(group) for group in groups]}))
    run_matrix(promtool, tmp_path, [str(file)], MINUTE, coarse=True)


def as_prometheus_has_it(group: dict[str, Any]) -> dict[str, Any]:
    rules = [
        {
            "alert": rule["title"].partition(" (")[0],
            "expr": rule["data"][0]["model"]["expr"],
            "for": rule["for"],
            "labels": rule["labels"],
        }
        for rule in group["rules"]
    ]
    return {"name": group["name"], "rules": rules}


def run_matrix(promtool: str, tmp_path: Path, rules: list[str], step_s: float, coarse: bool = False) -> None:
    file, test = tmp_path / "matrix.yaml", matrix_test(step_s, coarse)
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": test["interval"], "tests": [test]}))
    ended = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_of_a_run_fires_in_a_scenario() -> None:
    fired = {alert.split()[0] for alerts in SCENARIOS.values() for alert in alerts}
    assert {alert.name for alert in ALERTS if not alert.name.startswith("Operator")} == fired
