"""Clients of tracking services (W&B, SwanLab and MLflow), and the background thread that each one runs in.

An unresponsive service then delays neither training nor shutdown. The environment selects the destination:

| service | variables |
|---|---|
| W&B | WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE (online, offline) |
| SwanLab | SWANLAB_API_KEY, SWANLAB_MODE (cloud, local, offline) |
| MLflow | MLFLOW_TRACKING_URI and its credentials; if unset, the run is stored in `mlruns/` |

The library of a service is imported only if a run uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.machine.reaper import children_of_all, name_of
from megarl.machine.strict_json import dump_readable
from megarl.tracking.tracked_run import Logger, TrackedRun

_MAX_WAITING = 1_000  # calls, far more than the steps between two responses of a live service
FLUSH_LIMIT_S = 2.0
CLOSE_LIMIT_S = 60.0

_WANDB_PROCESS = "wandb-core"
_WANDB_LIMIT_S = 60  # to open a run
_SWANLAB_ID_LENGTH = 21
_MLFLOW_BATCH = 100  # parameters per call; for metrics, the limit is 1000
_MLFLOW_MAX_VALUE = 6000  # characters of a parameter, MLflow's limit; `config.yaml` has the full values
_EVERY_STEP = "timing_s/step"  # a metric that every step has


class ServiceError(RuntimeError):
    """The service failed, or it cannot keep up."""


class BackgroundLogger(Logger):
    """Logger whose calls return at once. They are made in a thread, where the service may block and raise.

    An error in the thread is raised by the next call. A service that could not be opened is not tried again.
    """

    def __init__(
        self, open_service: Callable[[], Logger], abandon: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread and open the service in it.

        Args:
            abandon: Called if the service has not closed in time; ends whatever would keep this process from
                exiting.
        """
        self._open_service = open_service
        self._abandon = abandon
        self._calls: queue.Queue[Callable[[Logger], None] | None] = queue.Queue(_MAX_WAITING)
        self._error: Exception | None = None
        self._is_late = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="tracking")
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._submit(lambda service: service.log(metrics, step))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._submit(lambda service: service.log_generations(step, rows))

    def flush(self) -> None:
        """Wait briefly for queued calls. If the service did not catch up last time, do not wait."""
        # A slow service must not hold up training: the wait is short, and skipped while the service lags.
        deadline_s = time.monotonic() + FLUSH_LIMIT_S
        while (
            self._calls.unfinished_tasks
            and self._thread.is_alive()
            and not self._is_late
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.01)

        self._is_late = bool(self._calls.unfinished_tasks)
        self._raise()

    def close(self, failed: bool) -> None:
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        try:
            # The queue is ordered, so the service closes after it has received everything logged before.
            self._calls.put(lambda service: service.close(failed), timeout=CLOSE_LIMIT_S)
            self._calls.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass

        if self._thread.is_alive():
            self._abandon()
            raise ServiceError(
                f"the service did not accept all queued data within {CLOSE_LIMIT_S:g} s after the end; the "
                f"rest is lost"
            )

        self._raise()

    def _submit(self, call: Callable[[Logger], None]) -> None:
        if self._thread.is_alive():
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                raise ServiceError(
                    f"{_MAX_WAITING} calls are queued for the service; further calls are dropped"
                ) from None
        self._raise()

    def _raise(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _work(self) -> None:
        service = self._guarded(self._open_service)
        while service is not None:
            call = self._calls.get()
            if call is None:
                break
            self._guarded(lambda call=call: call(service))
            self._calls.task_done()

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (the boundary of a thread: the next call raises it)
            self._error = error
            return None


class WandbService(Logger):
    """W&B run with its files in `wandb/` of the output folder.

    A resumed run continues it. Steps that it already has are not logged again: W&B ignores steps below its
    last one.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        run_id = run.run_id("wandb") or uuid.uuid4().hex[:8]
        settings = wandb.Settings(console="off", silent=True, save_code=False, init_timeout=_WANDB_LIMIT_S)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.output_dir),
            id=run_id,
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )

        run.keep_run_id("wandb", run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(
            columns=[*columns], data=[[_cell(row[column]) for column in columns] for row in rows]
        )
        self._run.log({"generations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def end_wandb_process() -> None:
    """Kill W&B's own process, for which this process would otherwise wait at exit.

    Data that it has not sent is in `wandb/`; upload it with `wandb sync`.
    """
    for child in children_of_all().get(os.getpid(), []):
        if name_of(child) == _WANDB_PROCESS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


class SwanLabService(Logger):
    """SwanLab run with its files in `swanlog/` of the output folder. A resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        run_id = run.run_id("swanlab") or uuid.uuid4().hex[:_SWANLAB_ID_LENGTH]
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            logdir=str(run.output_dir / "swanlog"),
            config=dict(run.config),
            id=run_id,
            resume="allow",
        )
        run.keep_run_id("swanlab", run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [self._swanlab.Text(dump_readable(row, default=str)) for row in rows]
        self._swanlab.log({"generations": texts}, step=step)

    def close(self, failed: bool) -> None:
        self._swanlab.finish()


class MlflowService(Logger):
    """Run in the experiment `tracking.project`. A resumed run continues it after its last logged step."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        # Drop a server that does not respond after half a minute; the default is a quarter of an hour.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        uri = os.environ.get("MLFLOW_TRACKING_URI")

        if uri is None:
            uri = (run.output_dir / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # plain files are enough for one run

        self._client = MlflowClient(tracking_uri=uri)
        self._last_step = -1
        run_id = run.run_id("mlflow")

        if run_id is None:
            run_id = self._create(run)
            run.keep_run_id("mlflow", run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
            # A resumed run repeats steps that MLflow already has; they must not be logged twice.
            history = self._client.get_metric_history(run_id, _EVERY_STEP)
            self._last_step = max((metric.step for metric in history), default=-1)

        self._run_id = run_id

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id

        for settings in itertools.batched(run.settings(), _MLFLOW_BATCH):
            params = [Param(key, _shortened(str(value))) for key, value in settings]
            self._client.log_batch(run_id, params=params)

        return run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

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
    return text if len(text) <= _MLFLOW_MAX_VALUE else text[: _MLFLOW_MAX_VALUE - 4] + " ..."
