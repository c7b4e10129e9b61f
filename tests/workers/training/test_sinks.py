"""Sinks: steps.jsonl always, TensorBoard by name, others refused in words."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plaudit_metrics.history import read_steps
from plaudit_metrics.records import StepRecord
from plaudit_workers.process import RefusedError
from plaudit_workers.training.sinks import Sinks


def record(step, incarnation=1, **statistics):
    return StepRecord(step, incarnation, 10.0, 12.5, 16, 4, statistics, verdict="balanced")


def test_steps_jsonl_is_always_written(tmp_path):
    sinks = Sinks(tmp_path)
    sinks.write(record(1, **{"reward/mean": 0.5}))
    sinks.write(record(2, **{"reward/mean": 0.75}))
    sinks.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/mean"], line["verdict"]) for line in lines] == [
        (1, 0.5, "balanced"),
        (2, 0.75, "balanced"),
    ]


def test_a_step_done_again_after_a_resume_wins_for_the_reader(tmp_path):
    for incarnation, reward in ((1, 0.5), (2, 0.6)):
        sinks = Sinks(tmp_path)
        sinks.write(record(1, incarnation, **{"reward/mean": reward}))
        sinks.close()
    assert [step.statistics["reward/mean"] for step in read_steps(tmp_path / "steps.jsonl")] == [0.6]


def test_tensorboard_gets_every_figure(tmp_path):
    sinks = Sinks(tmp_path, ["tensorboard"])
    sinks.write(record(3, **{"reward/mean": 0.5, "actor/lr": 0.001}))
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    point = events.Scalars("reward/mean")[0]
    assert (point.step, point.value, point.wall_time) == (3, 0.5, 12.5)
    assert set(events.Tags()["scalars"]) == {"reward/mean", "actor/lr"}


def test_a_sink_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"names wandb, mlflow, .*it knows tensorboard"):
        Sinks(tmp_path, ["wandb", "tensorboard", "mlflow"])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(tmp_path, small_files_only):
    sinks = Sinks(tmp_path)
    with small_files_only(100), pytest.raises(RefusedError, match=r"no room to append to .*steps\.jsonl"):
        sinks.write(record(1, **{f"figure/{number}": 0.5 for number in range(100)}))
