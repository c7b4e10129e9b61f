"""Feeds a service's view with steps and prints the memory that the process has used at most (MiB), twice."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_wire.records import (
    GenerationRecord,
    GroupRecord,
    SampleRecord,
    ScorerRecord,
    ScoringRecord,
    Stamps,
    StepRecord,
)

REASON = {"112": "a reason of some length"}.get(sys.argv[1], "a long reason " * 50)
"""Long ones, so that few samples fill what a service keeps."""
GENERATION = GenerationRecord("rollout-12345", 2.0, 300, 900, 3, 3, engine_queue_s=0.25, logprob_mismatch=1e-6)
SCORERS = {name: ScorerRecord("scored", 0.5, REASON, call_s=1.0) for name in ("rule", "judge")}
SCORING = ScoringRecord("scored", 0.5, scorers=SCORERS, call_s=1.0, worker="reward-12345")
SAMPLES_OF_GROUP = 16


def feed(view: RunView, step: int, num_samples: int) -> None:
    """One step, in the batches in which the stream is read."""
    opened = 1e9 + 100 * step
    for number in range(num_samples // SAMPLES_OF_GROUP):
        group = f"t-{step * num_samples + number}-1.0"
        samples = [
            SampleRecord(
                group,
                i,
                "train",
                step,
                "digits",
                Stamps(opened, opened + 1, opened + 3, None, opened + 4, opened + 5),
                SCORING,
            )
            for i in range(SAMPLES_OF_GROUP)
        ]
        record = GroupRecord(group, "train", step, "trained", 16, 16, opened, opened + 50, opened + 5, opened + 5)
        # Each through its encoding, so that nothing is shared between samples, as nothing is in a stream.
        view.handle([fresh(msgspec.structs.replace(sample, generation=GENERATION)) for sample in samples], True)
        view.handle([record], True)
    statistics = {f"figure/{number}": float(number) for number in range(200)} | {"step_s": 60.0}
    view.handle([StepRecord(step, 1, opened, opened + 60, num_samples, 1, statistics)], True)


def fresh(sample: SampleRecord) -> SampleRecord:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=SampleRecord)


def peak_mib() -> int:
    """The most memory this program has had; getrusage would tell that of the process which started it, where larger."""
    peak_kib = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert peak_kib is not None
    return int(peak_kib[1]) // 1024


def main() -> None:
    """Arguments: samples a step, steps, and after how many of them to look first."""
    num_samples, steps, first = map(int, sys.argv[1:])
    view = RunView(RunSeries(), KeptSteps())
    for step in range(1, steps + 1):
        feed(view, step, num_samples)
        if step in {first, steps}:
            print(peak_mib(), len(view.kept))


main()
