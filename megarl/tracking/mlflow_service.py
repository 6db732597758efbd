"""MLflow client.

MLFLOW_TRACKING_URI and its credentials in the environment select the server; if unset, the run is stored in
`mlruns/`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from megarl.tracking.tracked_run import TrackedRun

_NAME = "mlflow"
_STORE = "mlruns"
_BATCH = 100  # parameters per call; for metrics, the limit is 1000
_MAX_VALUE = 6000  # characters of a parameter, MLflow's limit; `config.yaml` has the full values
_EVERY_STEP = "timing_s/step"  # a metric that every step has


class MlflowService:
    """Run in the experiment `tracking.project`. A resumed run continues it after its last logged step."""

    def __init__(self, run: TrackedRun) -> None:
        # Drop a server that does not respond after half a minute; the default is a quarter of an hour.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        uri = os.environ.get("MLFLOW_TRACKING_URI")

        if uri is None:
            uri = (run.output_dir / _STORE).absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # plain files are enough for one run

        self._client = MlflowClient(tracking_uri=uri)
        self._last_step = -1
        run_id = run.run_id(_NAME)

        if run_id is None:
            run_id = self._create(run)
            run.keep_run_id(_NAME, run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
            # A resumed run repeats steps that MLflow already has; they must not be logged twice.
            history = self._client.get_metric_history(run_id, _EVERY_STEP)
            self._last_step = max((metric.step for metric in history), default=-1)

        self._run_id = run_id

    def _create(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id

        for settings in _batches(run.settings(), _BATCH):
            params = [Param(key, _shortened(str(value))) for key, value in settings]
            self._client.log_batch(run_id, params=params)

        return run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step <= self._last_step:
            return
        now_ms = int(time.time() * 1000)
        # MLflow rejects @ in a name.
        batch = [Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        table = {"columns": columns, "data": [[_cell(row[column]) for column in columns] for row in rows]}
        self._client.log_dict(self._run_id, table, f"generations/step_{step:08d}.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def _cell(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 4] + " ..."


def _batches[Item](items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
