"""Does the demo learn under every schedule? Runs copy-digits once per row and shows first and last mean reward.

Each value of ``maxStaleness`` (0, 1, 2), ``miniBatchesPerStep`` (1, 4), ``order`` (step, ready), trainer ranks (1, 2)
and rollouts (1, 2) stands in one row at least.

    python benchmarks/schedules.py [--steps 150] [--row NAME] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from plaudit_metrics.sources.steps import read_steps

EXAMPLE = Path(__file__).parent.parent / "examples" / "01-copy-digits"
LEARNT = 0.75

ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "on-policy": {"algorithm": {"maxStaleness": 0, "miniBatchesPerStep": 1}},
    "mini-batch pipeline": {"algorithm": {"maxStaleness": 0, "miniBatchesPerStep": 4}},
    "one-step off-policy": {"algorithm": {"maxStaleness": 1, "miniBatchesPerStep": 1}, "rollout": {"replicas": 2}},
    "one-step off-policy, 4 mini-batches": {"algorithm": {"maxStaleness": 1, "miniBatchesPerStep": 4}},
    "asynchronous, ready first": {"algorithm": {"maxStaleness": 2, "order": "ready"}},
    "two trainer ranks": {"algorithm": {"maxStaleness": 1}, "trainer": {"ranks": 2, "strategy": "fsdp2"}},
}


def run_row(changes: dict[str, dict[str, Any]], steps: int, runs: Path) -> dict[str, Any]:
    """Runs the example with some fields changed; returns what it learned and its ledger."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    for section, fields in changes.items():
        job["spec"].setdefault(section, {}).update(fields)
    file = EXAMPLE / ".schedule.yaml"
    file.write_text(yaml.safe_dump(job))
    began = time.monotonic()
    try:
        command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(file), "--steps", str(steps)]
        done = subprocess.run(
            [*command, "--runs-folder", str(runs), "--run", "run"], capture_output=True, text=True, check=False
        )
    finally:
        file.unlink()
    if done.returncode:
        return {"exit_code": done.returncode, "error": done.stderr[-500:]}
    trained = [record.statistics for record in read_steps(runs / "run" / "steps.jsonl") if record.num_samples]
    rewards = [statistics["reward/mean"] for statistics in trained]
    staleness = [statistics["reward_pipeline/staleness/max"] for statistics in trained]
    ledger = json.loads((runs / "run" / "ledger.json").read_text())
    return {
        "exit_code": 0,
        "first": round(rewards[0], 3),
        "last_10": round(sum(rewards[-10:]) / 10, 3),
        "max_staleness_seen": max(staleness),
        "seconds": round(time.monotonic() - began, 1),
        "ledger_adds_up": ledger["admitted"] == ledger["trained"] + ledger["evaluated"] + ledger["dropped"],
    }


def main() -> int:
    """Prints a row a schedule; exit code 1 when one of them did not learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="default: as many as the demo")
    parser.add_argument("--row", choices=list(ROWS), help="only this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the first row for a few steps: shows that it runs")
    arguments = parser.parse_args()
    rows = {arguments.row: ROWS[arguments.row]} if arguments.row else ROWS
    steps = arguments.steps
    if arguments.quick:
        rows, steps = dict([next(iter(ROWS.items()))]), 10
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    results = {}
    for name, changes in rows.items():
        with tempfile.TemporaryDirectory() as runs:
            results[name] = run_row(changes, steps, Path(runs))
        print(f"{name:38} {results[name]}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    learnt = all(result.get("last_10", 0) >= LEARNT for result in results.values())
    return 0 if learnt or arguments.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
