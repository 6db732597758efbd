"""Compares the configuration of a checkpoint with the configuration that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.dotted import flat
from megarl.config.load import plain_values
from megarl.config.migration import with_current_keys
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, RunConfig
from megarl.machine.files import parse_yaml

ABSENT = "(no such key)"

# Keys that must not change when a run resumes, with what each determines.
FIXED = {
    "model.dtype": "the numbers that the optimizer continues with",
    "data.shuffle": "the order of the data",
    "data.seed": "the order of the data",
    "trainer.seed": "the samples that are drawn",
    "trainer.prompts_per_step": "which data a step has",
    "trainer.samples_per_step": "which data a step has",
    "trainer.pairs_per_step": "which data a step has",
    "algorithm.advantage.estimator": "which models are trained",
}
# Keys that identify a run that starts from its beginning, in addition to all of `algorithm` and `loss`.
_OF_THE_RUN = ("model.path", "data.train_files", *FIXED)
# The key that selects the checkpoint to resume from does not affect what a run computes.
_RESUME = "checkpoint.resume"


class Difference(NamedTuple):
    key: str
    before: Any
    now: Any


def differences(saved: Path, config: RunConfig) -> list[Difference]:
    """Return the keys whose values differ, sorted. A list counts as one value.

    Args:
        saved: A resolved `config.yaml`.
        config: The configuration to compare it with.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not YAML, or not a mapping.
    """
    return [each for each in _all_differences(saved, config) if each.key != _RESUME]


def other_run(saved: Path, config: RunConfig) -> list[Difference]:
    """Return the differences that make `config` a different run than `saved`.

    There are none for the same run started from its beginning. Arguments and exceptions are those of
    `differences`.
    """
    return [
        each
        for each in _all_differences(saved, config)
        if each.key in _OF_THE_RUN
        or each.key.startswith(("algorithm.", "loss."))
        # Only the path of a checkpoint changes where a run starts; `auto` and `disable` do not.
        or (each.key == _RESUME and not {each.before, each.now} <= {RESUME_AUTO, RESUME_DISABLE})
    ]


def _all_differences(saved: Path, config: RunConfig) -> list[Difference]:
    values = parse_yaml(saved.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(
            f"it is {'empty' if values is None else f'a {type(values).__name__}'}, not a mapping of keys"
        )

    # A key that only one of the two has is a difference too, because versions add keys.
    before = dict(flat(with_current_keys(values)[0]))
    now = dict(flat(plain_values(config)))
    return [
        Difference(key, before.get(key, ABSENT), now.get(key, ABSENT))
        for key in sorted(before.keys() | now.keys(), key=str)
        if before.get(key, ABSENT) != now.get(key, ABSENT)
    ]
