"""Write the figures of each step: to ``steps.jsonl`` always, elsewhere by ``trainer.sinks``.

All sinks get the same record, with the step as x axis. ``steps.jsonl`` and what reads it belong to
``plaudit_metrics.sources.steps``: a step that is done again after a resume is a second line with a higher incarnation.
W&B and MLflow cannot replace a point, so such a step keeps its first figures there; they also get a table of a few of
its stored samples.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.steps import FILE_NAME, append_step, decode_step
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.logs import get_logger
from plaudit_wire.records import StepRecord
from plaudit_workers.files import is_full

logger = get_logger(__name__)
Configuration = Mapping[str, str | int | float | bool]
_LEFT_OUT = ("pod", "env")
"""Pods say nothing about training, and their variables may hold secrets."""
Cell = str | int | float | None
_COLUMNS = ("step", "group", "index", "data_source", "prompt", "response", "ground_truth_json", "outcome", "score")
_LAST = ("reason", "response_tokens")
_CHARACTERS = 4000
"""Of each text."""
_TAG = "plaudit.run"
_MOST_AT_ONCE = 1000
"""Metrics of one request: the server's limit."""
_MOST_PARAMS = 100
"""Params of one request: the server's limit."""
_LONGEST_VALUE = 500
_TABLES_TAG = "mlflow.loggedArtifacts"
_MOST_TABLES = 50
"""Tables that the tag names: its length is limited. Older ones stay among the artifacts."""
_LAST_SENDING_S = 120.0
"""Seconds that the run's end waits for pending requests."""
_BEGUN_WITHIN_S = 1.0
_MOST_WAITING = 1000
"""Steps that wait for a sink."""


class Sink(Protocol):
    """Receive the figures of closed steps, in a thread of its own. It may raise, and take its time."""

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step.

        Args:
            samples: its stored samples, of which some sinks show a few; None: they are not kept.
        """

    def close(self) -> None:
        """Send what is left and close the sink; called once."""

    def abandon(self) -> None:
        """Let the process end while another call has not returned."""


class Sinks:
    """Hold all sinks of a run. Whatever befalls one of ``trainer.sinks`` costs its figures, never the run.

    Args:
        patience_s: seconds that the run's end waits for what is not sent yet.
    """

    def __init__(
        self,
        run_folder: Path,
        names: Sequence[str] = (),
        settings: Configuration = MappingProxyType({}),
        patience_s: float = _LAST_SENDING_S,
    ) -> None:
        unknown = [name for name in names if name not in SINKS]
        if unknown:
            raise RefusedError(
                f"trainer.sinks names {', '.join(unknown)}, which this version cannot write to; it knows "
                f"{', '.join(SINKS)} (steps.jsonl is always written)"
            )
        self._file = StepsFile(run_folder)
        self._sinks = [_OwnThread(name, SINKS[name](run_folder, settings), patience_s) for name in dict.fromkeys(names)]

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step, and its stored samples if they are kept, to every sink, ``steps.jsonl`` first."""
        self._file.write(record)
        for sink in self._sinks:
            sink.write(record, samples)

    @property
    def notices(self) -> list[str]:
        """Return a sentence on each sink that has lost a step."""
        return [sink.notice for sink in self._sinks if sink.notice]

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


class _OwnThread:
    """Call a sink in a thread of its own, one step after another: one that is slow, or away, holds up no step."""

    def __init__(self, name: str, sink: Sink, patience_s: float) -> None:
        self._name = name
        self._sink = sink
        self._patience_s = patience_s
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self.notice = ""
        """A message for people; empty while no step is lost."""
        # A daemon: a sink that never returns must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, record: StepRecord, samples: Path | None) -> None:
        """Queue one step."""
        try:
            self._calls.put_nowait(partial(self._sink.write, record, samples))
        except queue.Full:
            self._lose("it is behind by so many steps that no more are queued")

    def close(self) -> None:
        """Wait for what is queued, as long as ``patience_s``, and close the sink."""
        deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(queue.Full):
            self._calls.put(self._close, timeout=self._patience_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._lose(f"it did not take what was left within {self._patience_s:g} s")
            self._sink.abandon()
        if self._lost:
            logger.warning("a sink did not receive all steps", sink=self._name, lost=self._lost)

    def _run(self) -> None:
        call: Callable[[], None] | None = None
        while call != self._close:
            call = self._calls.get()
            try:
                call()
            except BaseException as error:  # of the sink's package; wandb exits if its helper process was killed
                self._lose(described(error))

    def _close(self) -> None:
        self._sink.close()

    def _lose(self, reason: str) -> None:
        """Count a step that the sink does not have, and log the first of them."""
        self._lost += 1
        if self._lost == 1:
            self.notice = f"sink {self._name} loses figures; the run goes on without them ({reason})"
            logger.warning("a sink loses figures; the run goes on without them", sink=self._name, error=reason)


class StepsFile:
    """Append steps to ``steps.jsonl``."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / FILE_NAME

    def write(self, record: StepRecord) -> None:
        """Append one step to the file."""
        try:
            append_step(self._path, record)
        except OSError as error:
            if is_full(error):
                raise RefusedError(f"no room to append to {self._path}; make room, then start again") from error
            raise


class TensorBoard:
    """Write scalars to ``<run folder>/tensorboard``.

    After a resume its first step hides what earlier processes wrote from there on. A step that cannot be written, for
    a disk that is full or a folder that was removed, ends the file; the next one begins another.
    """

    def __init__(self, run_folder: Path, _: object = None) -> None:
        package_of("tensorboard", "tensorboard")
        self._writer_of = package_of("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._folder = str(run_folder / "tensorboard")
        self._writer: Any = None

    def write(self, record: StepRecord, _: Path | None = None) -> None:
        """Write the figures of one step."""
        writer, self._writer = self._writer, None
        if writer is None:
            writer = self._writer_of(self._folder, purge_step=record.step)
        for name, value in record.statistics.items():
            writer.add_scalar(name, value, record.step, walltime=record.closed)
        writer.flush()
        self._writer = writer  # the thread of one that raised has ended

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Do nothing: its files are written by threads that end with the process."""


class WeightsAndBiases:
    """Log every step once, with a table of samples, to a run of Weights & Biases with the id of ours.

    Set up by its own variables: ``WANDB_API_KEY``, ``WANDB_PROJECT`` (default ``plaudit``), ``WANDB_ENTITY``,
    ``WANDB_MODE=offline`` (files in the run's folder, for ``wandb sync``). It sends from a process of its own: a server
    that is slow or away holds up no step.
    """

    def __init__(self, run_folder: Path, settings: Configuration) -> None:
        wandb = package_of("wandb", "wandb")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "plaudit"),
                id=run_folder.name,
                name=run_folder.name,
                resume="allow",
                config=dict(settings),
                allow_val_change=True,
                dir=str(run_folder),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.errors.Error as error:
            raise RefusedError(
                f"trainer.sinks names wandb, which refuses: {error}. Set WANDB_API_KEY, or WANDB_MODE=offline, or take "
                "it out of the list"
            ) from error
        self._wandb: Any = wandb
        self._newest = newest_written(run_folder)

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step; its samples are the table ``samples``."""
        if record.step <= self._newest:
            return
        shown: dict[str, Any] = {}
        if table := sample_table(samples):
            shown["samples"] = self._wandb.Table(columns=table.columns, data=table.rows, allow_mixed_types=True)
        self._run.log(record.statistics | shown, step=record.step, commit=True)  # else it waits for the next step

    def close(self) -> None:
        """Wait until everything is sent, and end the helper process."""
        try:
            self._run.finish()
        finally:
            self._wandb.teardown()

    def abandon(self) -> None:
        """Begin to end the helper process: at the end of this one, wandb would wait for it without bound."""

        def teardown() -> None:
            with contextlib.suppress(BaseException):
                self._wandb.teardown()

        thread = threading.Thread(target=teardown, name="wandb teardown", daemon=True)
        thread.start()
        thread.join(_BEGUN_WITHIN_S)


class MLflow:
    """Log every step once, with a table of samples, to a run of MLflow whose tag ``plaudit.run`` is the id of ours.

    A resume finds the run by that tag; the job's configuration is logged when it is created. Set up by MLflow's own
    variables: ``MLFLOW_TRACKING_URI`` (a server; or a folder, with ``MLFLOW_ALLOW_FILE_STORE=true``) and
    ``MLFLOW_EXPERIMENT_NAME`` (default ``plaudit``). MLflow's own queue has ten threads, which lose points of a file
    store that they write at once, and keep no order: the steps are sent without it.
    """

    def __init__(self, run_folder: Path, settings: Configuration) -> None:
        mlflow = package_of("mlflow", "mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise RefusedError(
                "trainer.sinks names mlflow, but MLFLOW_TRACKING_URI is not set; set it to the tracking server, or to "
                "a folder together with MLFLOW_ALLOW_FILE_STORE=true"
            )
        self._metric: Any = mlflow.entities.Metric
        self._param: Any = mlflow.entities.Param
        self._error: Any = mlflow.exceptions.MlflowException
        try:
            self._client = mlflow.MlflowClient()
            self._run_id = self._run_of(run_folder.name, settings)
        except self._error as error:
            raise RefusedError(
                f"trainer.sinks names mlflow, which refuses: {error}. Check MLFLOW_TRACKING_URI, or take it out of the "
                "list"
            ) from error
        self._tables: list[dict[str, str]] = []
        self._newest = newest_written(run_folder)

    def _run_of(self, name: str, settings: Configuration) -> str:
        """Return the run that an earlier process created, or a new one."""
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "plaudit")
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
        found = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{name}'", max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        run_id = str(self._client.create_run(experiment_id, tags={_TAG: name}, run_name=name).info.run_id)
        params = [self._param(path, str(value)[:_LONGEST_VALUE]) for path, value in settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
        return run_id

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step; its samples are the artifact ``samples/step-….json``."""
        if record.step <= self._newest:
            return
        milliseconds = int(record.closed * 1000)
        metrics = [self._metric(name, value, milliseconds, record.step) for name, value in record.statistics.items()]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            batch = metrics[start : start + _MOST_AT_ONCE]
            self._client.log_batch(self._run_id, batch)
        if table := sample_table(samples):
            self._send_table(record.step, table)

    def _send_table(self, step: int, table: SampleTable) -> None:
        """Send a table as MLflow stores its own, and name the newest ones where its pages look for tables."""
        path = f"samples/step-{step:06d}.json"
        self._client.log_dict(self._run_id, {"columns": table.columns, "data": table.rows}, path)
        self._tables = [*self._tables, {"path": path, "type": "table"}][-_MOST_TABLES:]
        self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps(self._tables))

    def close(self) -> None:
        """Report the end of the run."""
        self._client.set_terminated(self._run_id)

    def abandon(self) -> None:
        """Do nothing: no thread or process of MLflow waits."""


SINKS: dict[str, Callable[[Path, Configuration], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""``trainer.sinks`` → constructor of the sink, given the run's folder and configuration."""


def package_of(sink: str, module: str) -> Any:
    """Import a module that a sink needs; refuse the sink if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RefusedError(
            f"trainer.sinks names {sink}, which is not installed; install plaudit-workers[{sink}], or take it out of "
            "the list"
        ) from error


def newest_written(run_folder: Path) -> int:
    """Return the highest step that any incarnation of the run has recorded; -1 if there is none."""
    path = run_folder / FILE_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((record.step for line in lines if (record := decode_step(line)) is not None), default=-1)


class SampleTable(NamedTuple):
    """Hold a few samples of a step."""

    columns: list[str]
    rows: list[list[Cell]]


def sample_table(samples: Path | None) -> SampleTable | None:
    """Return the table of a step's stored samples, with a column for the value of each scorer.

    Return None without stored samples, or if they cannot be read, which is logged.
    """
    if samples is None:
        return None
    from plaudit_metrics.sources.samples import UnreadableFileError  # needs pyarrow, which most sinks do without
    from plaudit_metrics.sources.search import few_samples

    try:
        rows = few_samples(samples)
    except UnreadableFileError as error:
        logger.warning("no table of samples", error=str(error))
        return None
    if not rows:
        return None
    values = [column for column in rows[0] if column.startswith("scorer/") and column.endswith("/value")]
    columns = [*_COLUMNS, *values, *_LAST]
    return SampleTable(columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: Cell) -> Cell:
    return value[:_CHARACTERS] if isinstance(value, str) else value


def configuration(job: RLJob) -> Configuration:
    """Return the settings of a job by path, such as ``algorithm.promptsPerStep``; unset ones are left out."""
    return dict(_flat("", job.model_dump(mode="json", by_alias=True)["spec"]))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            if name not in _LEFT_OUT:
                yield from _flat(f"{path}.{name}" if path else str(name), below)
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from _flat(f"{path}.{place}", below)
    elif value is not None:
        yield path, value
