"""Measure the reward loop's cost and robustness: bursts, waiting functions, functions that raise or hang.

Each case is one burst, all samples at once, through a ``Pipeline`` with one scorer, two child processes, everything
warm; transport excluded (that is ``transport.py``). With ``--verl PYTHON`` the same functions on the same samples go
through verl's own per-sample reward path in that interpreter, in the same run, with as many of its reward workers (its
path includes a Ray call and the decoding of the response; ours the way to a child process and back).

- *samples/s*, *CPU-s per 1,000*: median of ``REPEATS`` bursts; every process of the loop is counted.
- *x bound*: seconds ÷ the longest wait of the burst: no reward loop can be faster.
- *ended*: whether the batch ended by itself. *hurt*: samples whose own function was fine and that got no score or
  another one than it returned.

Usage: ``python benchmarks/reward_loop.py [--json FILE] [--quick] [--verl PYTHON]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reward_loop_cases import GIVE_UP_S, Case, cases, rows

from plaudit_reward.attempts import Rules, Stage
from plaudit_reward.functions.result import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.isolation.pool import cpu_s
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rules.scorer import RuleScorer
from plaudit_wire.records import Sample, ScoringRecord

PROCESSES = 2
REPEATS = 5
Result = dict[str, Any]


async def run(case: Case) -> Result:
    """One case: the bursts that can be repeated are, the others run once."""
    pipeline = await open_pipeline(case)
    samples = samples_of(case)
    try:
        if not case.longest_s:
            innocent = [s for s, row in zip(samples, rows(case), strict=True) if not row.guilty][:64]
            await asyncio.gather(*(pipeline.score(sample) for sample in innocent))
        bursts = [await burst(case, pipeline, samples) for _ in range(1 if case.guilty or case.longest_s else REPEATS)]
    finally:
        await pipeline.close()
    middle = {key: statistics.median(b[key] for b in bursts) for key in ("seconds", "cpu_s", "innocents_hurt")}
    return {**bursts[0], **middle}


async def open_pipeline(case: Case) -> Pipeline:
    """The pipeline that a job with this one scorer would have."""
    if not case.function:
        return Pipeline([Stage(RuleScorer("gsm8k"))])
    path = str(Path(__file__).with_name("reward_loop_functions.py"))
    target = Target(path, case.function, isolation="thread" if case.blocking else None)
    scorer = FunctionScorer(case.name, target, processes=PROCESSES, max_concurrent=case.samples)
    await scorer.open()
    return Pipeline([Stage(scorer, Rules(timeout_s=case.limit_s))])


def samples_of(case: Case) -> list[Sample]:
    """The case's rows as samples."""
    return [
        Sample(
            group=f"t-{i}-1.0",
            index=0,
            data_source="openai/gsm8k",
            prompt="How many clips did she sell?",
            response=row.response,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        for i, row in enumerate(rows(case))
    ]


async def burst(case: Case, pipeline: Pipeline, samples: list[Sample]) -> Result:
    """Scores all samples at once and says how it went."""
    cpu_s, began_s = cpu_of_loop(), time.perf_counter()
    tasks = [asyncio.create_task(pipeline.score(sample)) for sample in samples]
    _, stuck = await asyncio.wait(tasks, timeout=GIVE_UP_S)
    seconds = time.perf_counter() - began_s
    cpu_s = cpu_of_loop() - cpu_s
    for task in stuck:
        task.cancel()
    innocent = [task for task, row in zip(tasks, rows(case), strict=True) if not row.guilty]
    hurt = sum(task in stuck or not fine(task.result()) for task in innocent)
    return {
        "case": case.name,
        "samples": case.samples,
        "seconds": seconds,
        "cpu_s": max(cpu_s, 0.0),
        "ended": "no" if stuck else "yes",
        "innocents_hurt": hurt,
        "bound_s": case.longest_s,
    }


def fine(scoring: ScoringRecord) -> bool:
    """Every function here, and every row of GSM8K, gives 1."""
    return scoring.value == 1.0


def cpu_of_loop() -> float:
    """CPU seconds of this process and its children."""
    tasks = Path("/proc/self/task").iterdir()
    children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    return time.process_time() + sum(cpu_s(child) for child in children)


def run_verl(python: str, quick: bool) -> dict[str, Any]:
    """The same cases in an interpreter that has verl."""
    folder = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "verl.json"
        command = [python, "-c", "import reward_loop_verl; reward_loop_verl.main()", "--out", str(out)]
        command += ["--workers", str(PROCESSES), *(["--quick"] if quick else [])]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def print_table(ours: list[Result], verl: dict[str, Any] | None) -> None:
    """One line a case; verl's figures beside ours."""
    others = {result["case"]: result for result in verl["results"]} if verl else {}
    print(f"{'case':<18} {'samples':>7}  {columns()}" + (f"  | verl: {columns()}" if verl else ""))
    for result in ours:
        line = f"{result['case']:<18} {result['samples']:>7}  {figures(result, result)}"
        if result["case"] in others:
            line += f"  |       {figures(others[result['case']], result)}"
        print(line)


def columns() -> str:
    """The heads of ``figures``."""
    return f"{'seconds':>8} {'samples/s':>9} {'CPU-s/1,000':>11} {'x bound':>7} {'ended':>18} {'hurt':>5}"


def figures(result: Result, case: Result) -> str:
    """One side's figures of a case."""
    per_s = case["samples"] / result["seconds"] if result["ended"] == "yes" else 0.0
    bound = f"{result['seconds'] / case['bound_s']:7.2f}" if case["bound_s"] else " " * 7
    cpu_s = 1000 * result["cpu_s"] / case["samples"]
    hurt = f"{result['innocents_hurt']:5.0f}"
    return f"{result['seconds']:8.2f} {per_s:9.0f} {cpu_s:11.3f} {bound} {result['ended']:>18} {hurt}"


def main() -> None:
    """Runs all cases and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, a quarter of the seconds")
    parser.add_argument("--verl", metavar="PYTHON", help="an interpreter of an environment that has verl")
    arguments = parser.parse_args()
    ours = [asyncio.run(run(case)) for case in cases(arguments.quick)]
    verl = run_verl(arguments.verl, arguments.quick) if arguments.verl else None
    print_table(ours, verl)
    if arguments.json:
        about = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        found = {**about, "processes": PROCESSES, "plaudit": ours, **({"verl": verl} if verl else {})}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
