"""Rules of what a run saves, where, and which validation decides on it."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import MetricMode, PPOConfig, SFTConfig
from megarl.config.validation_metrics import RewardKeys, may_be_measured, nearest, source_metrics
from megarl.config.violation import Violation, Violations

RunConfig = PPOConfig | SFTConfig
SFT_METRIC = "val/loss"  # the only one that `megarl sft` measures


def output_folders(config: RunConfig) -> Violations:
    """Folders that the run writes are named, and are not the root of the file system."""
    for key, folder in (("trainer.output_dir", config.trainer.output_dir), ("checkpoint.dir", config.checkpoint.dir)):
        if folder is None:
            continue
        if not folder.strip():
            yield Violation((key,), f"is {folder!r}, which names no folder; give one of the run's own")
        elif (path := Path(folder).absolute()) == Path(path.anchor):
            yield Violation((key,), f"is {folder!r}, the root of the file system; give a folder of the run's own")


def validation_metrics(config: RunConfig) -> Violations:
    """What `checkpoint.keep_best` and `trainer.early_stop` compare is measured during the run."""
    for key, section in (("checkpoint.keep_best", config.checkpoint.keep_best), ("trainer.early_stop", config.trainer.early_stop)):
        metric = section.metric
        if metric is None:
            continue
        if isinstance(config, SFTConfig):
            if metric != SFT_METRIC:
                yield Violation((f"{key}.metric",), f"is {metric!r}, but `megarl sft` measures {SFT_METRIC} alone; use that, or null")
            elif section.mode is MetricMode.max:
                yield Violation((f"{key}.mode",), f"is max, but the smaller {SFT_METRIC} is the better one; use min")
        elif not may_be_measured(config, metric):
            measured = [f"val/{name}" for name in source_metrics(config, RewardKeys(has_answer=True))]
            yield Violation((f"{key}.metric",), f"no validation of this run measures {metric!r}; {nearest(metric, measured)}")
        if config.trainer.validate_every_steps == 0:
            yield Violation(
                ("trainer.validate_every_steps", f"{key}.metric"),
                f"{key} compares validations, but validate_every_steps is 0; use 1 or more, or set {key}.metric to null",
            )
