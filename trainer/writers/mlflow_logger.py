"""Logs runs to MLflow; the only file that imports mlflow."""

import fcntl
import hashlib
import importlib
import os
import posixpath
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

from trainer.writers.locks import flock
from trainer.writers.loggers import Reporter, Row, RunIdentity
from trainer.writers.summary import Summary

EXPERIMENT = "lockstep"  # unless MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names one
ID_TAG, GROUP_TAG = "lockstep.id", "lockstep.group"
# This metric is logged with every row: its newest value is the last step that was logged.
STEP = "step"
_MOST_METRICS, _MOST_PARAMS, _LONGEST_NAME, _LONGEST_VALUE = 1000, 100, 250, 5000
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
# By default MLflow tries for minutes; LoggerWriter tries again by itself.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_SQLITE = "sqlite:///"
_STATUS = {"done": "FINISHED", "stopped": "KILLED"}


class MlflowLogger:
    """Logs a run to the MLflow server or store of MLFLOW_TRACKING_URI, or MLflow's default."""

    # It calls the client with the id of the run, because MLflow has only one active run, and the
    # trials of a wave are computed at the same time. `reporter` is told where the run is found.

    def __init__(self, identity: RunIdentity, reporter: Reporter):
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # MLflow's own use of SQLAlchemy and Alembic raises warnings.
        warnings.filterwarnings("ignore", module=r"(mlflow|sqlalchemy|alembic)(\.|$)")
        self._mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._identity, self._reporter = identity, reporter
        self._client: Any = None
        self._run_id = ""

    def open(self) -> int:
        """Finds the run by its tag, or creates it; returns the last step that was logged."""
        self._client = self._connect()
        identity = self._identity
        experiment = self._experiment()
        wanted = f"tags.`{ID_TAG}` = '{identity.id}'"
        if found := self._client.search_runs([experiment], wanted, max_results=1):
            (run,) = found
            self._run_id = run.info.run_id
            if run.info.status != "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")
            step = int(run.data.metrics.get(STEP, -1))
        else:
            tags = {ID_TAG: identity.id, GROUP_TAG: identity.group}
            tags = {name: value for name, value in tags.items() if value}
            run = self._client.create_run(experiment, run_name=identity.name, tags=tags)
            self._run_id, step = run.info.run_id, -1
        # A changed value of the config becomes a tag, because a param cannot be changed.
        known = run.data.params
        config = {_name(k): str(x)[:_LONGEST_VALUE] for k, x in identity.config.items()}
        new = [self._entities.Param(k, x) for k, x in config.items() if k not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[first : first + _MOST_PARAMS])
        for name, value in config.items():
            if name in known and known[name] != value:
                self._client.set_tag(self._run_id, f"changed.{name}", value)
        if not identity.group:
            place = re.sub(r"//[^/@]*@", "//", self._client.tracking_uri)  # without a password
            self._reporter.log_once(f"mlflow: the run {self._run_id} in {place}")
        return step

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rows, several in a request."""
        batch: list[Any] = []
        for row in rows:
            now, values = int(time.time() * 1000), row.values | {STEP: row.step}
            metric = self._entities.Metric
            metrics = [metric(_name(k), float(x), now, row.step) for k, x in values.items()]
            if len(batch) + len(metrics) > _MOST_METRICS:
                self._log(batch)
                batch = []
            while len(metrics) > _MOST_METRICS:  # STEP is last: it is sent once all others are
                self._log(metrics[:_MOST_METRICS])
                metrics = metrics[_MOST_METRICS:]
            batch += metrics
        self._log(batch)

    def close(self, summary: Summary | None) -> None:
        """Adds the summary, and sets the status of the run."""
        # The newest row of a run that will be resumed is not complete, and is sent later.
        if summary is not None and summary.end in ("done", "diverged"):
            known = self._client.get_run(self._run_id).data.metrics
            flat = summary.flat()
            numbers = {k: x for k, x in flat.items() if not isinstance(x, str)}
            # The metrics of rows were logged with the rows.
            new = {k: x for k, x in numbers.items() if k not in summary.metrics}
            new = {k: x for k, x in new.items() if known.get(_name(k)) != x}
            self.write([Row(summary.step, new)] if new else [])
            for name, value in flat.items():
                if isinstance(value, str):
                    self._client.set_tag(self._run_id, f"lockstep.{name}", value[:_LONGEST_VALUE])
        status = "FAILED" if summary is None else _STATUS.get(summary.end, "FAILED")
        self._client.set_terminated(self._run_id, status)

    def _connect(self) -> Any:
        """Returns a client; two cannot create the tables of a SQLite store at the same time."""
        uri = self._mlflow.get_tracking_uri()
        if not uri.startswith(_SQLITE):
            return self._mlflow.MlflowClient()
        # This also excludes other threads of this process. SQLite's own locks are of another kind.
        with open(uri.removeprefix(_SQLITE).partition("?")[0], "ab") as file:
            flock(file.fileno(), fcntl.LOCK_EX)
            return self._mlflow.MlflowClient()

    def _experiment(self) -> str:
        """Returns the id of the experiment, which is created if it does not exist."""
        if id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name)
            except self._mlflow.MlflowException:  # another process may have created it just now
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return found.experiment_id

    def _log(self, metrics: Sequence[Any]) -> None:
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)


def _name(name: str) -> str:
    """Returns a name that MLflow allows: the same, or a changed one that ends with a hash."""
    cleaned = _NOT_ALLOWED.sub("_", name)
    if posixpath.normpath(cleaned) != cleaned or cleaned.startswith(("/", "..")):
        cleaned = cleaned.replace("/", "_")
    if cleaned == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{cleaned[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
