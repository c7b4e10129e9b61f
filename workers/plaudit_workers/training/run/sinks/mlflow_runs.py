"""``mlflow``: a run of MLflow that carries our run's id as a tag, by which a resume finds it again.

Set up by MLflow's own environment variables: ``MLFLOW_TRACKING_URI`` (a server; or a folder, with
``MLFLOW_ALLOW_FILE_STORE=true``) and ``MLFLOW_EXPERIMENT_NAME`` (default ``plaudit``). A thread sends the steps one
after another: a server that is slow or away holds up no step. (MLflow's own queue has ten threads, which lose points of
a file store that they write at once, and keep no order.) A point that is there cannot be replaced, so a step that is
done again keeps its first figures there.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import StepRecord
from plaudit_workers.training.run.sinks.configuration import Configuration
from plaudit_workers.training.run.sinks.sample_table import SampleTable, sample_table
from plaudit_workers.training.run.sinks.sink import newest_written, package_of

logger = get_logger(__name__)

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


class MLflow:
    """Log every step once with a table of a few of its samples, and the job's configuration when it creates the run.

    Args:
        run_folder: its name is the run's id.

    Raises:
        RefusedError: the extra is not installed, or the tracking server is not set or refuses.
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
        self._sender = ThreadPoolExecutor(1, "mlflow")
        self._sending: set[Future[None]] = set()
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
            self._sending.add(self._sender.submit(self._client.log_batch, self._run_id, batch))
        if table := sample_table(samples):
            self._sending.add(self._sender.submit(self._send_table, record.step, table))
        self._tell_failed()

    def _send_table(self, step: int, table: SampleTable) -> None:
        """Send a table as MLflow stores its own, and name the newest ones where its pages look for tables."""
        path = f"samples/step-{step:06d}.json"
        self._client.log_dict(self._run_id, {"columns": table.columns, "data": table.rows}, path)
        self._tables = [*self._tables, {"path": path, "type": "table"}][-_MOST_TABLES:]
        self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps(self._tables))

    def close(self) -> None:
        """Wait for pending requests, then log and drop them."""
        wait(self._sending, _LAST_SENDING_S)
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._tell_failed()
        if self._sending:
            logger.warning("mlflow did not receive all steps", requests=len(self._sending))
        try:
            self._client.set_terminated(self._run_id)
        except self._error as error:
            logger.warning("cannot report the end of the run to mlflow", error=str(error))

    def _tell_failed(self) -> None:
        for done in [sending for sending in self._sending if sending.done() and not sending.cancelled()]:
            self._sending.remove(done)
            if error := done.exception():
                logger.warning("mlflow did not receive all steps", error=str(error))
