"""Sinks: steps.jsonl always; TensorBoard, Weights & Biases and MLflow by name, each step once, also over a resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from builders import job_document
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.steps import read_steps
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import GroupRecord, StepRecord
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.training.sinks import Sinks, TensorBoard, configuration


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


def test_tensorboard_drops_steps_that_a_resume_rolled_back(tmp_path):
    for steps, incarnation in (((1, 2, 3), 1), ((2, 3), 2)):
        sinks = Sinks(tmp_path, ["tensorboard"])
        for step in steps:
            sinks.write(record(step, incarnation, **{"reward/mean": step + incarnation / 10}))
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("reward/mean")] == [
        (step, pytest.approx(value)) for step, value in ((1, 1.1), (2, 2.2), (3, 3.2))
    ]


@pytest.fixture
def mlflow_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "demo-1").mkdir()
    return tmp_path


@pytest.mark.long
def test_mlflow_gets_every_figure_once_with_the_step_as_its_axis(mlflow_folder):
    from mlflow import MlflowClient

    for steps, incarnation in (((1, 2), 1), ((2, 3), 2)):  # resumed at step 2
        sinks = Sinks(mlflow_folder / "demo-1", ["mlflow"], {"algorithm.steps": 3, "model.source": "m" * 900})
        for step in steps:
            sinks.write(record(step, incarnation, **{"reward/mean": step / 4, "actor/lr": 0.001}))
        sinks.close()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("plaudit")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo-1", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value, point.timestamp) for point in points] == [
        (1, 0.25, 12500),
        (2, 0.5, 12500),
        (3, 0.75, 12500),
    ]
    assert set(run.data.metrics) == {"reward/mean", "actor/lr"}
    assert run.data.params == {"algorithm.steps": "3", "model.source": "m" * 500}


def test_mlflow_without_an_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RefusedError, match="MLFLOW_TRACKING_URI is not set"):
        Sinks(tmp_path, ["mlflow"])


def test_a_refusal_by_mlflow_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(RefusedError, match=r"mlflow, which refuses: .*Check MLFLOW_TRACKING_URI"):
        Sinks(tmp_path, ["mlflow"])


@pytest.mark.long
def test_weights_and_biases_gets_every_figure_once_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "demo-1").mkdir()
    for steps, incarnation in (((1, 2), 1), ((2, 3), 2)):  # resumed at step 2
        sinks = Sinks(tmp_path / "demo-1", ["wandb"], {"algorithm.steps": 3})
        for step in steps:
            sinks.write(record(step, incarnation, **{"reward/mean": step / 4, "actor/lr": 0.001}))
        sinks.close()
    files = sorted((tmp_path / "demo-1" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == ["run-demo-1.wandb"] * 2  # one run of wandb, continued
    for _ in range(100):  # its process may still be writing
        points = [point for file in files for point in logged(file)]
        if len(points) == 3:
            break
        time.sleep(0.1)
    assert {("algorithm.steps", "3")} <= {pair for file in files for pair in configured(file)}
    assert [(point["_step"], point["reward/mean"], point["actor/lr"]) for point in points] == [
        (1, 0.25, 0.001),
        (2, 0.5, 0.001),
        (3, 0.75, 0.001),
    ]


def logged(file):
    """What an offline file of wandb holds, point by point."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for record in map(Record.FromString, log_records(file.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            points.append({"_step": record.history.step.num} | items)
    return points


def configured(file):
    """What an offline file of wandb holds of the run's configuration."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in map(Record.FromString, log_records(file.read_bytes())):
        if record.WhichOneof("record_type") == "run":
            yield from ((item.key, item.value_json) for item in record.run.config.update)


@pytest.fixture
def stored(make_groups, tmp_path):
    """The stored samples of a step: 24 samples in groups of two, the last one without a score."""
    groups = make_groups([[0.25, 0.5]] * 11 + [[1.0, None]])
    records = {
        group.id: GroupRecord(group.id, "train", 1, "trained", 2, 2, 1.0, 1.9, 2.0, 2.1, 2.5) for group in groups
    }
    return store_groups(tmp_path / "samples", 1, 1, groups, records)


def check_table(columns, rows):
    """The first sixteen samples, and the one without a score."""
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    assert len(table) == 17
    assert [(row["step"], row["index"]) for row in table[:2]] == [(1, 0), (1, 1)]
    assert (table[0]["score"], table[0]["scorer/mine/value"], table[0]["outcome"]) == (0.25, 0.25, "scored")
    assert (table[0]["prompt"], table[0]["ground_truth_json"]) == ("12=", '"12"')
    assert table[0]["response"]
    assert (table[-1]["score"], table[-1]["outcome"], table[-1]["reason"]) == (None, "timeout", "too slow")


def test_mlflow_gets_a_table_of_samples_where_its_pages_look_for_it(mlflow_folder, stored):
    from mlflow import MlflowClient

    sinks = Sinks(mlflow_folder / "demo-1", ["mlflow"])
    sinks.write(record(1, **{"reward/mean": 0.25}), stored)
    sinks.write(record(2, **{"reward/mean": 0.5}))  # its samples are not kept
    sinks.close()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("plaudit")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step-000001.json"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step-000001.json")).read_text())
    check_table(table["columns"], table["data"])
    shown = json.loads(run.data.tags["mlflow.loggedArtifacts"])  # where MLflow's pages find tables
    assert shown == [{"path": "samples/step-000001.json", "type": "table"}]


@pytest.mark.long
def test_weights_and_biases_gets_a_table_of_samples(tmp_path, monkeypatch, stored):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "demo-1").mkdir()
    sinks = Sinks(tmp_path / "demo-1", ["wandb"])
    sinks.write(record(1, **{"reward/mean": 0.25}), stored)
    sinks.close()
    (file,) = (tmp_path / "demo-1" / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(file.read_text())
    check_table(table["columns"], table["data"])
    (log,) = (tmp_path / "demo-1" / "wandb").glob("offline-run-*/run-*.wandb")
    for _ in range(100):  # its process may still be writing
        if points := logged(log):
            break
        time.sleep(0.1)
    assert points[0]["reward/mean"] == 0.25
    assert file.name in json.dumps(points[0])


def test_samples_that_cannot_be_read_leave_out_the_table_alone(mlflow_folder, tmp_path, caplog):
    from mlflow import MlflowClient

    (tmp_path / "broken.parquet").write_text("no table")
    sinks = Sinks(mlflow_folder / "demo-1", ["mlflow"])
    sinks.write(record(1, **{"reward/mean": 0.25}), tmp_path / "broken.parquet")
    sinks.close()
    assert "no table of samples" in caplog.text
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("plaudit").experiment_id])
    assert run.data.metrics == {"reward/mean": 0.25}


def test_the_configuration_is_the_specification_without_pods():
    job = RLJob.model_validate(
        job_document(
            model={"source": "m"},
            data={"train": {"path": "t.parquet"}},
            reward={"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]},
            trainer={"pod": {"env": [{"name": "TOKEN", "value": "secret"}]}},
        ),
        by_alias=True,
        by_name=False,
    )
    settings = configuration(job)
    assert (settings["model.source"], settings["reward.scorers.0.name"]) == ("m", "a")
    assert "secret" not in str(settings)


def log_records(content):
    """LevelDB's log format: blocks of 32 KiB, records cut into pieces of type 1 (whole) or 2, 3, 4 (first to last)."""
    at, pieces = 7, b""  # after wandb's own header
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


@pytest.mark.parametrize("sink", ["tensorboard", "wandb", "mlflow"])
def test_a_sink_that_is_not_installed_is_refused_with_its_remedy(sink, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, sink, None)  # how Python marks a module that cannot be imported
    with pytest.raises(RefusedError, match=rf"names {sink}, which is not installed; install plaudit-workers\[{sink}\]"):
        Sinks(tmp_path, [sink])


def test_a_sink_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"names comet, .*it knows tensorboard, wandb, mlflow"):
        Sinks(tmp_path, ["comet", "tensorboard"])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(tmp_path, small_files_only):
    sinks = Sinks(tmp_path)
    with small_files_only(100), pytest.raises(RefusedError, match=r"no room to append to .*steps\.jsonl"):
        sinks.write(record(1, **{f"figure/{number}": 0.5 for number in range(100)}))


HELPER = """
import logging, os, signal, subprocess, sys
from pathlib import Path
from plaudit_wire.records import StepRecord
from plaudit_workers.training.sinks import Sinks

logging.basicConfig(level=logging.WARNING)
sinks = Sinks(Path(sys.argv[1]), ["wandb", "tensorboard"], patience_s=1.0)
listed = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True).stdout
helper = next(int(line.split()[0]) for line in listed.splitlines() if "wandb-core" in line)
os.kill(helper, int(sys.argv[2]))
Path(sys.argv[1], "helper").write_text(str(helper))
for step in (1, 2, 3):
    sinks.write(StepRecord(step, 1, 10.0, 12.5, 16, 4, {"reward/mean": step / 4}, verdict="balanced"))
sinks.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_helper_process_that_dies_or_hangs_costs_its_figures_alone(tmp_path, sent):
    (tmp_path / "demo-1").mkdir()
    program = [sys.executable, "-c", HELPER, str(tmp_path / "demo-1"), str(int(sent))]
    with (tmp_path / "printed").open("w+") as printed:  # a pipe would wait for the helper
        done = subprocess.run(
            program, env={**os.environ, "WANDB_MODE": "offline"}, stdout=printed, stderr=printed, check=False
        )
    log = (tmp_path / "printed").read_text().splitlines()
    if sent == signal.SIGSTOP:
        os.kill(int((tmp_path / "demo-1" / "helper").read_text()), signal.SIGKILL)
    assert done.returncode == 0
    assert "WARNING:plaudit_workers.training.sinks:a sink loses figures; the run goes on without them" in log
    assert "Traceback" not in "".join(log)
    assert [step.step for step in read_steps(tmp_path / "demo-1" / "steps.jsonl")] == [1, 2, 3]
    events = EventAccumulator(str(tmp_path / "demo-1" / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward/mean")) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_its_folder_was_removed(tmp_path):
    sink, before = TensorBoard(tmp_path), set(threading.enumerate())
    sink.write(record(1, **{"reward/mean": 0.25}))
    writers = set(threading.enumerate()) - before
    shutil.rmtree(tmp_path / "tensorboard")
    with pytest.raises(FileNotFoundError):
        sink.write(record(2, **{"reward/mean": 0.5}))
    for writer in writers:
        writer.join()
    sink.write(record(3, **{"reward/mean": 0.75}))
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.75)]


def test_a_sink_whose_folder_is_gone_costs_its_figures_alone(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    sinks = Sinks(tmp_path, ["tensorboard"])
    sinks.write(record(1, **{"reward/mean": 0.5}))
    sinks.close()
    assert [step.step for step in read_steps(tmp_path / "steps.jsonl")] == [1]
    assert "a sink loses figures; the run goes on without them" in caplog.text
    [notice] = sinks.notices
    assert notice.startswith("sink tensorboard loses figures; the run goes on without them (")
