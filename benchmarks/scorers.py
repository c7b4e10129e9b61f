"""Measure the samples per second that each rule scores, in one process and in two.

A rule that computes runs in child processes of its scorer: one or two of them. A rule that is plain string work runs
where the pipeline runs: in this process, or in two such processes at a time. Everything is warm; half of the responses
are right, each has about 1,000 characters; transport excluded.

- *samples/s*: median of ``REPEATS`` bursts, all samples at once.
- *2 / 1*: what the second process gives.

Usage: ``python benchmarks/scorers.py [--json FILE] [--quick] [--rules RULE …]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit_reward.attempts import Stage
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rules.scorer import RuleScorer
from plaudit_wire.records import Sample

REPEATS = 3
PROCESSES = (1, 2)
FULL_PLAIN, FULL_COMPUTING = 5_000, 400
WARM_UP_S = 5.0
THOUGHT = "Let me think about this step by step, with care, and check the result. " * 14
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One rule and what it is given."""

    rule: str
    response: Callable[[int], str]
    """The response that answers with this number."""
    truth: Callable[[int], Any] = str
    arguments: dict[str, Any] = field(default_factory=dict)
    computes: bool = False
    """It runs in child processes of its scorer."""


CASES = (
    Case("gsm8k", lambda n: f"#### {n}"),
    Case("gsm8k_flexible", lambda n: f"The answer is {n}"),
    Case("math_reward", lambda n: rf"So it is $\boxed{{\frac{{{n}}}{{7}}}}$.", lambda n: rf"\dfrac{{{n}}}7"),
    Case("math_dapo", lambda n: f"Answer: ${n}$"),
    Case("search_r1_like_qa_em", lambda n: f"<answer>The {n}.</answer>", lambda n: {"target": [str(n), "none"]}),
    Case("overlong", lambda n: "", arguments={"bufferTokens": 100, "maxTokens": 1000}),
    Case(
        "format",
        lambda n: f"<think>a</think>{n}",
        arguments={"pattern": ".*<think>.*</think>.*"},
        computes=True,
    ),
    Case("prime_math", lambda n: rf"The answer is ${n} + x$", lambda n: f"x+{n}", computes=True),
    Case("geo3k", lambda n: rf"<think>a</think>\boxed{{{n}\sqrt{{2}}}}", lambda n: rf"\sqrt{{2}}*{n}", computes=True),
    Case("math", lambda n: rf"\boxed{{\frac{{{n}}}{{7}}}}", lambda n: f"{n}/7", computes=True),
    Case("math_verify", lambda n: rf"\boxed{{\frac{{{n}}}{{7}}}}", lambda n: f"{n}/7", computes=True),
)


def samples_of(case: Case, numbers: range) -> list[Sample]:
    """The case's samples: every second one is answered with another number."""
    return [
        Sample(
            group=f"t-{number}-1.0",
            index=0,
            data_source="",
            prompt="?",
            response=THOUGHT + case.response(number + number % 2),
            ground_truth=case.truth(number),
            response_tokens=850 + number % 200,
        )
        for number in numbers
    ]


async def bursts(case: Case, processes: int, count: int) -> list[float]:
    """Seconds of each burst through one pipeline."""
    scorer = RuleScorer("rule", case.rule, case.arguments, processes=processes)
    pipeline = Pipeline([Stage(scorer)])
    try:
        await scorer.open()
        await warm_up(case, pipeline, count)
        seconds = []
        for burst in range(1, REPEATS + 1):
            samples = samples_of(case, range(burst * count, (burst + 1) * count))  # new ones: SymPy has a cache
            began_s = time.perf_counter()
            scorings = await asyncio.gather(*(pipeline.score(sample) for sample in samples))
            seconds.append(time.perf_counter() - began_s)
            failed = [scoring for scoring in scorings if scoring.value is None]
            assert not failed, failed[0].reason
    finally:
        await pipeline.close()
    return seconds


async def warm_up(case: Case, pipeline: Pipeline, count: int) -> None:
    """Small bursts, for as long as child processes may take to import and warm SymPy."""
    until_s = time.monotonic() + (WARM_UP_S * count / FULL_COMPUTING if case.computes else 0.0)
    while True:
        await asyncio.gather(*(pipeline.score(sample) for sample in samples_of(case, range(count // 10))))
        if time.monotonic() > until_s:
            return
        await asyncio.sleep(0.1)


def keep(start: Any) -> None:
    """The barrier of the processes that run a plain rule together."""
    global together
    together = start


def worker(case_number: int, count: int) -> float:
    """One of those processes: its median burst, begun together with the others."""
    together.wait()
    return statistics.median(asyncio.run(bursts(CASES[case_number], 1, count)))


def samples_per_s(case: Case, processes: int, count: int) -> float:
    """The rate of one rule."""
    if case.computes or processes == 1:
        return count / statistics.median(asyncio.run(bursts(case, processes, count)))
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, keep, (context.Barrier(processes),)) as pool:
        seconds = pool.starmap(worker, [(CASES.index(case), count)] * processes, chunksize=1)
    return sum(count / one for one in seconds)


def run(case: Case, quick: bool) -> Result:
    """One line of the table."""
    count = (FULL_COMPUTING if case.computes else FULL_PLAIN) // (20 if quick else 1)
    rates = {str(processes): samples_per_s(case, processes, count) for processes in PROCESSES}
    return {"rule": case.rule, "computes": case.computes, "samples": count, "samples_per_s": rates}


def print_table(results: list[Result]) -> None:
    """One line a rule."""
    print(f"{'rule':<22} {'samples':>7} {'1 process':>12} {'2 processes':>12} {'2 / 1':>6}")
    for result in results:
        one, two = result["samples_per_s"]["1"], result["samples_per_s"]["2"]
        print(f"{result['rule']:<22} {result['samples']:>7} {one:>10,.0f}/s {two:>10,.0f}/s {two / one:>6.2f}")


def main() -> None:
    """Runs all rules and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the samples")
    parser.add_argument("--rules", nargs="+", choices=[case.rule for case in CASES], metavar="RULE", help="only these")
    arguments = parser.parse_args()
    wanted = [case for case in CASES if not arguments.rules or case.rule in arguments.rules]
    results = [run(case, arguments.quick) for case in wanted]
    print_table(results)
    if arguments.json:
        about = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        arguments.json.write_text(json.dumps({**about, "rules": results}, indent=1))


if __name__ == "__main__":
    main()
