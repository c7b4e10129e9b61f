"""Every alert × every step length × every scenario: it fires where it must, is silent elsewhere, and does not flap.

promtool runs the committed rules on simulated runs, many of them side by side as in one Prometheus. A real Alertmanager
then shows what a person receives of each fault.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from plaudit_metrics.monitoring.alerts import ALERTS
from plaudit_workers.launch.redis import free_port
from simulated_series import Cell, input_series
from waiting import until_in_thread

REPOSITORY = Path(__file__).parents[3]
RULES = [
    str(REPOSITORY / "metrics" / name) for name in ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")
]

SECOND, MINUTE, ELEVEN, HALF_HOUR, LONG = LENGTHS = (1.0, 60.0, 660.0, 1800.0, 9000.0)
HOUR = 3600.0
SHORT = (SECOND, MINUTE, ELEVEN)
"""Three times such a step is shorter than the fault."""
TURNS = range(len(LENGTHS)) if settings().max_examples >= 40 else range(1)
"""In each turn every scenario has one of the lengths, in the next turn the next one; CI takes all the turns."""

_BOTH_BURNS = {"RewardLatencyBurn warning": LENGTHS}
"""The trainer hardly waits: nothing is critical."""
_SERVICE_FAILS = {
    "ScoresFailing critical": LENGTHS,
    "ScorerFailing warning": LENGTHS,
    "RewardLatencyBurn critical": LENGTHS,
    "RewardLatencyBurn warning": LENGTHS,
}
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
    "dead redis": {"RedisDown critical": LENGTHS},
    "clock of redis behind": {},
    "dead trainer": {"NoTrainer critical": LENGTHS},
    "trainer restarts": {"TrainerRestarting critical": LENGTHS},
    "suspended often": {},
    "suspended once then restarts": {"TrainerRestarting critical": LENGTHS},
    "validation": {},
    "slow validation": {},
    "validation hangs": {"StepStalled critical": SHORT},
    "first step": {"RewardLatencyBurn warning": LENGTHS, "RewardsUniform warning": (LONG,)},
    "first step hangs": {"StepStalled critical": LENGTHS},
    "first step fails": {
        "ScoresFailing critical": LENGTHS,
        "ScorerFailing warning": LENGTHS,
        "RewardLatencyBurn warning": LENGTHS,
        "StepStalled critical": (LONG,),  # samples end, so it may take three hours
    },
    "dead metrics pod": {"RunWithoutMetrics critical": LENGTHS},
    "suspended": {},
    "resume": {},
    "not starting": {"RLJobNotStarting warning": LENGTHS},
    "finished": {},
    "service": {},
    "service with a hung scorer": {"ScorerHanging critical": LENGTHS},
    "service with a throttled judge, then idle": {
        "JudgeBudgetExhausted warning": LENGTHS,
        "RewardLatencyBurn critical": LENGTHS,
        "RewardLatencyBurn warning": LENGTHS,
    },
    "service with too much work": {"BacklogGrowing warning": LENGTHS},
    "service that is quiet fails": _SERVICE_FAILS,
    "service fails before an idle hour": _SERVICE_FAILS,
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
    "circuit opens again and again": {
        "JudgeCircuitOpen critical": (*SHORT, HALF_HOUR)
    },  # of longer steps too few scrapes
    "failures come and go": {
        "ScoresFailing critical": LENGTHS,
        "ScorerFailing warning": (SECOND, ELEVEN, HALF_HOUR, LONG),
        "RewardLatencyBurn warning": LENGTHS,
    },
    "broken tool": {"ToolFailing warning": LENGTHS},
    "slow tool": {"ToolSlow warning": LENGTHS, "ToolsStarveTrainer warning": LENGTHS},
    "machines start slowly": {"SandboxSlow warning": LENGTHS},
    "machines end slowly": {"SandboxSlow warning": LENGTHS},
    "machines fail": {"SandboxFailing warning": LENGTHS},
    "samples wait for machines": {"SandboxesExhausted warning": LENGTHS},
    "others train while samples wait for machines": {},
    "mismatch": {"LogprobMismatch critical": LENGTHS},
    "no gradient": {"UpdatesDiscarded warning": LENGTHS},
    "collapse": {"RewardCollapsed warning": LENGTHS},
    "drift": {"ScorerDrifts warning": LENGTHS},
    "divergence": {"RewardDiverges warning": LENGTHS},
    "length pays": {"LengthPays warning": LENGTHS},
    "long right answers": {},
    "long responses escape": {"LongResponsesUnscored warning": LENGTHS},
    "uniform": {"RewardsUniform warning": LENGTHS},
    "equal rewards": {"RewardVarianceCollapsed warning": LENGTHS, "RewardsUniform warning": LENGTHS},
    "equal and truncated": {"TruncationHigh warning": LENGTHS},
    "equal and failed": {},
    "truncation": {"TruncationHigh warning": LENGTHS},
    "stale": {"StalenessBeyondBound warning": LENGTHS},
    "slow weights": {"RolloutBehind warning": LENGTHS},
    "events lost": {"EventsLost warning": LENGTHS},
    "dead letter": {"DeadLetters warning": LENGTHS},
    "dead letter in a gap": {"DeadLetters warning": LENGTHS, "RunWithoutMetrics critical": LENGTHS},
    "alternating 31": {"RewardStarvesTrainer warning": SHORT},  # of longer steps the fault has a single rhythm
    "alternating 14": {},
    "long second steps": {},
    **{f"{samples} samples, {share} % late": {} for samples in (16, 1024, 4096) for share in (1, 5)},
    **{f"{samples} samples, 4 % failed": {} for samples in (64, 1024, 4096)},
    **{f"{samples} samples, 20 % late": _BOTH_BURNS for samples in (16, 4096)},
    **{
        f"{samples} samples, 16 % failed": {"ScoresFailing critical": LENGTHS, "RewardLatencyBurn warning": LENGTHS}
        for samples in (64, 1024)
    },
    **{f"{samples} samples, 3 % at random": {} for samples in (16, 64)},
    "rare scorer fails": {"ScorerFailing warning": SHORT},  # it is asked for one sample a step
    "16 samples, 16 % failed": {"ScoresFailing critical": SHORT, "RewardLatencyBurn warning": LENGTHS},
    "full redis": {"RedisMemoryHigh critical": LENGTHS},
    "unwritten redis": {"RedisPersistenceFailing critical": LENGTHS},
    "failed": {"RLJobFailed critical": LENGTHS},
    "degraded": {"RLJobDegraded warning": LENGTHS},
}
"""Scenario → the alerts that must fire, with the step lengths at which they must. All others must be silent."""


OF_HOURS = (
    *("healthy", "slow rewards", "hung scorer", "validation", "first step hangs", "resume", "alternating 14"),
    *("long second steps", "16 samples, 5 % late", "4096 samples, 4 % failed", "16 samples, 20 % late"),
)
"""What may depend on the length of a step, tried with steps of an hour too: their alerts are those of ``LONG``."""


def firing(offset: str = "") -> str:
    """The alerts that fire, by run; the alerts of jobs call it ``name``."""
    selector = f'ALERTS{{alertstate="firing", alertname!~"Operator.*"}}{offset}'
    return f'count by (run, alertname, severity) (label_replace({selector}, "run", "$1", "name", "(.+)")) > bool 0'


def expected(cell: Cell) -> set[str]:
    step_s = LONG if cell.step_s == HOUR else cell.step_s
    return {alert for alert, lengths in SCENARIOS[cell.scenario].items() if step_s in lengths}


def in_turn(turn: int, place: int) -> list[str]:
    """Return the scenarios whose steps have the length of this place."""
    return [scenario for number, scenario in enumerate(SCENARIOS) if (number + turn) % len(LENGTHS) == place]


def one_of_each_alert() -> list[str]:
    """Return scenarios in which every alert fires, and the healthy one."""
    firsts = {alert: scenario for scenario in reversed(SCENARIOS) for alert in SCENARIOS[scenario]}
    return ["healthy", *dict.fromkeys(firsts.values())]


def matrix_test(step_s: float, scenarios: list[str], coarse: bool = False) -> dict[str, Any]:
    cells = [Cell(step_s, scenario, coarse) for scenario in scenarios]
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


@pytest.mark.long
@pytest.mark.parametrize("turn", TURNS)
def test_alerts_fire_where_they_must_and_only_there_and_once(promtool: str, tmp_path: Path, turn: int) -> None:
    run_matrix(
        promtool, tmp_path, RULES, [matrix_test(step_s, in_turn(turn, place)) for place, step_s in enumerate(LENGTHS)]
    )


@pytest.mark.long
@pytest.mark.skipif(settings().max_examples < 40, reason="3 s of a core: from 40 examples on, as in CI")
def test_steps_of_an_hour_are_no_exception(promtool: str, tmp_path: Path) -> None:
    run_matrix(promtool, tmp_path, RULES, [matrix_test(HOUR, list(OF_HOURS), coarse=True)])


@pytest.mark.long
@pytest.mark.skipif(settings().max_examples < 40, reason="10 s of a core: from 40 examples on, as in CI")
def test_grafanas_rules_fire_where_prometheus_rules_do(promtool: str, tmp_path: Path) -> None:
    """Grafana knows no recorded series and does not keep an alert firing; the rest is the same."""
    groups = yaml.safe_load((REPOSITORY / "metrics" / "alerts" / "grafana.yaml").read_text())["groups"]
    file = tmp_path / "grafana.yaml"
    file.write_text(yaml.safe_dump({"groups": [as_prometheus_has_it(group) for group in groups]}))
    run_matrix(promtool, tmp_path, [str(file)], [matrix_test(MINUTE, one_of_each_alert(), coarse=True)])


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


def run_matrix(promtool: str, tmp_path: Path, rules: list[str], tests: list[dict[str, Any]]) -> None:
    files = [tmp_path / f"{number}.yaml" for number in range(len(tests))]
    for file, test in zip(files, tests, strict=True):
        evaluated = {"rule_files": rules, "evaluation_interval": test["interval"], "tests": [test]}
        file.write_text(json.dumps(evaluated))  # JSON is YAML that is written at once
    ended = subprocess.run([promtool, "test", "rules", *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_of_a_run_fires_in_a_scenario() -> None:
    fired = {alert.split()[0] for alerts in SCENARIOS.values() for alert in alerts}
    assert {alert.name for alert in ALERTS if not alert.name.startswith("Operator")} == fired


CONFIGURATION = REPOSITORY / "metrics" / "alerts" / "alertmanager.yaml"
PAGES = {
    "slow rewards": "RewardLatencyBurn",
    "hung scorer": "ScorerHanging",
    "raising function": "ScoresFailing",
    "dead redis": "RedisDown",
    "dead trainer": "NoTrainer",
    "trainer restarts": "TrainerRestarting",
    "first step hangs": "StepStalled",
    "validation hangs": "StepStalled",
    "dead metrics pod": "RunWithoutMetrics",
    "service with a hung scorer": "ScorerHanging",
    "service with a throttled judge, then idle": "RewardLatencyBurn",
    "no rollout": "NoReadyRollout",
    "no reward worker": "NoRewardWorkers",
    "open circuit": "JudgeCircuitOpen",
    "circuit opens again and again": "JudgeCircuitOpen",
    "failures come and go": "ScoresFailing",
    "mismatch": "LogprobMismatch",
    "dead letter in a gap": "RunWithoutMetrics",
    "full redis": "RedisMemoryHigh",
    "unwritten redis": "RedisPersistenceFailing",
    "failed": "RLJobFailed",
    **{f"{samples} samples, 16 % failed": "ScoresFailing" for samples in (16, 64, 1024)},
    "suspended once then restarts": "TrainerRestarting",
    "first step fails": "ScoresFailing",
    "service that is quiet fails": "ScoresFailing",
    "service fails before an idle hour": "ScoresFailing",
}
"""Scenario → the only page; the others wake nobody."""
TOGETHER = {
    "redis is down for long": ("RedisDown", "StepStalled", "NoTrainer", "RewardLatencyBurn", "NoReadyRollout"),
    "a judge that is not called": ("JudgeCircuitOpen", "ScoresFailing", "StepStalled", "RewardLatencyBurn"),
    "a trainer that starts and dies": ("TrainerRestarting", "NoTrainer", "StepStalled"),
    "a failed job": ("RLJobFailed", "NoTrainer", "StepStalled", "NoReadyRollout"),
    "reward workers are gone": ("NoRewardWorkers", "StepStalled", "RewardLatencyBurn"),
    "a scorer hangs": ("ScorerHanging", "StepStalled", "RewardLatencyBurn"),
}
"""Critical alerts that one fault of a real run raises together, the page first."""


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
    if program is None:
        pytest.skip("Alertmanager is not installed (Debian: apt-get install prometheus-alertmanager)")
    folder, port = tmp_path_factory.mktemp("alertmanager"), free_port()
    command = [program, f"--config.file={CONFIGURATION}", f"--storage.path={folder}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        yield f"http://127.0.0.1:{port}/api/v2/alerts"
        process.kill()


def sent(scenario: str, alert: str, severity: str) -> dict[str, Any]:
    labels = {"alertname": alert, "severity": severity, "run": scenario, "namespace": "team", "cluster": "one"}
    return {"labels": labels | ({"name": scenario} if alert.startswith(("RLJob", "RunWithout")) else {})}


def on_call(address: str, alerts: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Send the alerts; return what reaches the person on call, by run. Nothing while Alertmanager starts."""
    request = urllib.request.Request(address, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=5).close()
        with urllib.request.urlopen(address, timeout=5) as answer:
            found = json.load(answer)
    except OSError:
        return {}
    pages: dict[str, set[str]] = {}
    for each in found:
        if each["receivers"] == [{"name": "on-call"}] and not each["status"]["inhibitedBy"]:
            pages.setdefault(each["labels"]["run"], set()).add(each["labels"]["alertname"])
    return pages


async def test_one_fault_pages_once(alertmanager: str) -> None:
    severities = {alert.name: alert.severity for alert in ALERTS}
    alerts = [sent(scenario, *each.split()) for scenario, expected in SCENARIOS.items() for each in expected]
    alerts += [sent(run, name, severities[name]) for run, names in TOGETHER.items() for name in names]
    expected = {scenario: {page} for scenario, page in PAGES.items()} | {
        run: {names[0]} for run, names in TOGETHER.items()
    }
    with contextlib.suppress(TimeoutError):  # it takes in what was sent one after the other
        await until_in_thread(lambda: on_call(alertmanager, alerts) == expected, within_s=20)
    assert on_call(alertmanager, alerts) == expected
