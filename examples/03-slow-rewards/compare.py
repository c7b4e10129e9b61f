"""Runs the job under four strategies, one after another, and prints what each made of the slow rewards.

``python compare.py --steps 10``; every argument but ``--steps`` goes to ``plaudit run``. Needs what prepare.py writes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from plaudit_job.load import dump_job, load_job
from plaudit_metrics.sources.steps import read_steps

HERE = Path(__file__).parent
STRATEGIES = {
    "barrier": {"max_staleness": 0, "mini_batches_per_step": 1},
    "mini-batches": {"max_staleness": 0, "mini_batches_per_step": 4},
    "one-step-off": {"max_staleness": 1, "mini_batches_per_step": 1},
    "both": {"max_staleness": 1, "mini_batches_per_step": 4},
}


def write_jobs(folder: Path) -> dict[str, Path]:
    """Writes the job of each strategy; it differs from job.yaml in two fields."""
    job = load_job(HERE / "job.yaml")
    files = {}
    for name, fields in STRATEGIES.items():
        algorithm = job.spec.algorithm.model_copy(update=fields)
        changed = job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": algorithm})})
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(dump_job(changed))
    return files


def main() -> None:
    """Runs the four jobs and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run, at least 2 (default: 10)")
    arguments, others = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        for strategy, job in write_jobs(runs).items():
            command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(job), "--runs-folder", str(runs)]
            subprocess.run([*command, "--run", strategy, "--steps", str(arguments.steps), *others], check=True)
            steps = read_steps(runs / strategy / "steps.jsonl")
            # The first step is also waiting for the engine to start.
            wall_s = (steps[-1].closed - steps[0].closed) / (len(steps) - 1)
            exposed_s = sum(step.statistics["exposed_reward_s"] for step in steps[1:]) / (len(steps) - 1)
            rows.append((strategy, wall_s, exposed_s))
    print(f"\n{'strategy':14} {'s a step':>9} {'exposed reward s':>17}")
    for strategy, wall_s, exposed_s in rows:
        print(f"{strategy:14} {wall_s:9.2f} {exposed_s:17.2f}")


if __name__ == "__main__":
    main()
