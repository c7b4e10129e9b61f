"""Time a step's statistics against a plain loop over dictionaries, in one run.

The loop does what verl's ``_performance_metrics`` does: for each measure it walks through the samples' dictionaries,
makes an array of it, and takes minimum, maximum, mean and the slowest sample's value. Its dictionaries exist already;
to make them is not counted. Both must give equal numbers, else the benchmark fails. The columns of the table:

- ``loop``: verl's 18 keys by that loop.
- ``verl keys``: the same keys (and the alias ``reward``) from collected columns.
- ``collect``: encoded records to columns, decoding included. It is spread over the step, since each sample is collected
  as it arrives; ``us each`` is its cost a sample.
- ``all figures``: every figure of a step, from collected columns: what is left to do when the step closes.
- ``service``: the metrics service's collector closes the step: finds its samples, keeps them and the slowest.

    python benchmarks/step_statistics.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plaudit_metrics.sources.steps import Collector, KeptSteps
from plaudit_metrics.statistics.columns import ColumnCollector, SampleColumns
from plaudit_metrics.statistics.steps import AgentLoopColumns, agent_loop_statistics, step_statistics
from plaudit_wire.records import (
    GenerationRecord,
    GroupRecord,
    SampleRecord,
    ScoringRecord,
    Stamps,
    StepRecord,
    WaitRecord,
)

SAMPLES_PER_GROUP = 8
MEASURES = ("generate_sequences", "tool_calls", "compute_score", "num_preempted")


def dictionary_loop(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Verl's keys by a list comprehension over dictionaries per measure."""
    arrays = {name: np.array([row[name] for row in rows]) for name in MEASURES}
    timing: dict[str, float] = {}
    for name, values in arrays.items():
        timing[f"timing_s/agent_loop/{name}/min"] = values.min()
        timing[f"timing_s/agent_loop/{name}/max"] = values.max()
        timing[f"timing_s/agent_loop/{name}/mean"] = values.mean()
    slowest = np.argmax(arrays["generate_sequences"] + arrays["tool_calls"] + arrays["compute_score"])
    for name, values in arrays.items():
        timing[f"timing_s/agent_loop/slowest/{name}"] = values[slowest]
    for name in ("prompt_length", "response_length"):
        timing[f"timing_s/agent_loop/slowest/{name}"] = rows[slowest][name]
    return timing


def make_step(num_samples: int) -> tuple[list[SampleRecord], list[GroupRecord]]:
    """A step of random samples in groups of eight."""
    random = np.random.default_rng(7)
    generate, score, queue = (
        random.uniform(low, high, num_samples).tolist() for low, high in ((1, 20), (1, 40), (0, 1))
    )
    preempted = random.integers(0, 3, num_samples).tolist()
    samples = []
    for number in range(num_samples):
        published = 1000.0 + generate[number] + 0.1
        taken = published + queue[number]
        samples.append(
            SampleRecord(
                group=f"t-{number // SAMPLES_PER_GROUP}-1.0",
                index=number % SAMPLES_PER_GROUP,
                split="train",
                step=1,
                data_source="random",
                stamps=Stamps(1000.0, 1000.05, published, None, taken, taken + score[number] + 0.01),
                scoring=ScoringRecord("scored", float(score[number] > 20), call_s=score[number], worker="reward"),
                generation=GenerationRecord(
                    "rollout", generate[number], 100, number % 900, 3, 3, num_preempted=preempted[number]
                ),
            )
        )
    groups = []
    for start in range(0, num_samples, SAMPLES_PER_GROUP):
        terminal = max(sample.stamps.committed or 0.0 for sample in samples[start : start + SAMPLES_PER_GROUP])
        groups.append(
            GroupRecord(
                samples[start].group, "train", 1, "trained", SAMPLES_PER_GROUP, SAMPLES_PER_GROUP, 1000.0, 1100.0,
                terminal=terminal, ready=terminal, taken=terminal + 0.1,
            )
        )  # fmt: skip
    return samples, groups


def as_rows(columns: AgentLoopColumns) -> list[dict[str, Any]]:
    """The same samples as verl holds them: a dictionary each."""
    names = (*MEASURES, "prompt_length", "response_length")
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(getattr(columns, name).tolist() for name in names), strict=True)
    ]


def seconds_of(call: Callable[[], object], repetitions: int) -> float:
    """Median seconds of a call, the collector of garbage held off."""
    call()
    taken = []
    gc.disable()
    for _ in range(repetitions):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    gc.enable()
    return statistics.median(taken)


def measure(num_samples: int, repetitions: int) -> dict[str, float]:
    """Measure one row of the table."""
    samples, groups = make_step(num_samples)
    columns = SampleColumns.from_records(samples)
    rows = as_rows(AgentLoopColumns.from_samples(columns))
    check_equal(dictionary_loop(rows), agent_loop_statistics(AgentLoopColumns.from_samples(columns)))
    waits = [WaitRecord(1000.0, 1060.0, [group.group for group in groups])]
    few = max(repetitions // 3, 1)

    def all_figures() -> dict[str, float]:
        columns.__dict__.pop("stamps", None)  # what the columns remember of an earlier repetition
        return step_statistics(columns, groups=groups, waits=waits, opened=1000.0, closed=1100.0)

    loop_s = seconds_of(lambda: dictionary_loop(rows), repetitions)
    verl_keys_s = seconds_of(lambda: agent_loop_statistics(AgentLoopColumns.from_samples(columns)), repetitions)
    encoded = [msgspec.msgpack.encode(sample) for sample in samples]
    collect_s = seconds_of(lambda: collect(encoded), few)
    return {
        "samples": num_samples,
        "loop_ms": 1e3 * loop_s,
        "verl_keys_ms": 1e3 * verl_keys_s,
        "ratio": loop_s / verl_keys_s,
        "collect_ms": 1e3 * collect_s,
        "collect_us_each": 1e6 * collect_s / num_samples,
        "all_figures_ms": 1e3 * seconds_of(all_figures, few),
        "service_close_ms": 1e3 * statistics.median(close_seconds(samples, groups) for _ in range(few)),
    }


def collect(encoded: list[bytes]) -> SampleColumns:
    """Turn encoded records into columns, one by one as they would arrive."""
    decoder, collector = msgspec.msgpack.Decoder(SampleRecord), ColumnCollector()
    for each in encoded:
        collector.add(decoder.decode(each))
    return collector.columns()


def close_seconds(samples: list[SampleRecord], groups: list[GroupRecord]) -> float:
    """Return the seconds in which the metrics service's collector closes a step that it has all records of."""
    collector = Collector(KeptSteps())
    for sample in samples:
        collector.add_sample(sample)
    for group in groups:
        collector.add_group(group)
    figures = {"step_s": 100.0}  # the trainer sends the figures
    begun = time.perf_counter()
    collector.add_step(StepRecord(1, 1, 1000.0, 1100.0, len(samples), len(groups), figures))
    return time.perf_counter() - begun


def check_equal(theirs: dict[str, float], ours: dict[str, float]) -> None:
    """Ends the benchmark when the two disagree: a fast wrong answer is no result."""
    wrong = [key for key, value in theirs.items() if not np.isclose(value, ours[key], rtol=1e-12)]
    if wrong:
        raise SystemExit(f"different numbers under {', '.join(wrong)}")


def main(arguments: list[str]) -> int:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, 8,192 samples only")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    sizes = (8_192,) if options.quick else (8_192, 100_000)
    results = [measure(size, 5 if options.quick else 15) for size in sizes]
    headings = ("samples", "loop ms", "verl keys ms", "ratio", "collect ms", "us each", "all figures ms", "service ms")
    print("".join(f"{heading:>16}" for heading in headings))
    for row in results:
        print("".join(f"{value:>16.0f}" if key == "samples" else f"{value:>16.2f}" for key, value in row.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"benchmark": "step_statistics", "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
