"""What differs between the configuration that a checkpoint was written with and the one that continues from
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.config.load import plain_values
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, RunConfig

ABSENT = "(no such key)"

# With another value the steps to come would not be those of the run that was begun. Key -> what it decides.
FIXED = {
    "model.dtype": "the numbers that the optimizer continues with",
    "data.shuffle": "the order of the data",
    "data.seed": "the order of the data",
    "trainer.seed": "the samples that are drawn",
    "trainer.prompts_per_step": "which data a step has",
    "trainer.samples_per_step": "which data a step has",
    "algorithm.advantage.estimator": "which models are trained",
}
# Beside those, and all of `algorithm`: with another one it is not the same run that starts over.
_OF_THE_RUN = ("model.path", "data.train_files", *FIXED)
# What says where and when a run saves and resumes is no part of what it computes.
_RESUME = "checkpoint.resume"


class Difference(NamedTuple):
    key: str
    before: Any
    now: Any

    @property
    def is_fixed(self) -> bool:
        return self.key in FIXED


def differences(saved: Path, config: RunConfig) -> list[Difference]:
    """By dotted key, sorted; lists count as one value. `saved`: a resolved `config.yaml`.

    Raises OSError, yaml.YAMLError, and ValueError where it is no mapping of keys.
    """
    return [each for each in _all_differences(saved, config) if each.key != _RESUME]


def other_run(saved: Path, config: RunConfig) -> list[Difference]:
    """What makes `config` another run than that of `saved`; nothing where it is the same, from its beginning.
    As `differences`."""
    return [
        each
        for each in _all_differences(saved, config)
        if each.key in _OF_THE_RUN
        or each.key.startswith("algorithm.")
        # Only the path of a checkpoint makes a run begin elsewhere; `auto` and `disable` do not.
        or (each.key == _RESUME and not {each.before, each.now} <= {RESUME_AUTO, RESUME_DISABLE})
    ]


def _all_differences(saved: Path, config: RunConfig) -> list[Difference]:
    values = yaml.safe_load(saved.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(
            f"it is {'empty' if values is None else f'a {type(values).__name__}'}, not a mapping of keys"
        )

    # A key that only one side has is a difference too: versions add and remove keys.
    before = dict(flat(values))
    now = dict(flat(plain_values(config)))
    return [
        Difference(key, before.get(key, ABSENT), now.get(key, ABSENT))
        for key in sorted(before.keys() | now.keys(), key=str)
        if before.get(key, ABSENT) != now.get(key, ABSENT)
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of sections in sections by their dotted keys; an empty section is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
