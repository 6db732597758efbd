"""The loggers there are, and what each needs; `megarl/tracking/loggers.py` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.kinds.kind import Kind


@dataclass(frozen=True, kw_only=True)
class LoggerNeeds:
    package: str | None  # that a user installs for a module of the logger's name; None: nothing that megarl does not need anyway


class LoggerKind(Kind):
    needs: LoggerNeeds

    console = "console", LoggerNeeds(package=None)  # a line a step
    jsonl = "jsonl", LoggerNeeds(package=None)  # a file with every metric of every step
    tensorboard = "tensorboard", LoggerNeeds(package=None)  # its files of events
    wandb = "wandb", LoggerNeeds(package="wandb")  # Weights & Biases
    mlflow = "mlflow", LoggerNeeds(package="mlflow-skinny")  # an MLflow server or folder
    swanlab = "swanlab", LoggerNeeds(package="swanlab")  # SwanLab
