"""Loads a configuration and checks all inputs of the run.

The inputs are models, tokenizers, data and reward functions. This imports torch and takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.load import Loaded, read_config
from megarl.config.roles import model_roles
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, RunConfig
from megarl.config.validate import read_architectures
from megarl.config.violation import Absence, Violation
from megarl.doctor.check_result import DATA, CheckResult, Status
from megarl.doctor.checked_config import (
    divided_violations,
    find_on_hub,
    find_planned,
    problems_of,
    refuse,
    violations_here,
)
from megarl.doctor.inputs import ROWS, findings
from megarl.machine.errors import CheckpointError, ConfigError
from megarl.trainers.resume import find_resume

_CODE_KEYS = ("reward.functions", "reward.judges", "agent", "algorithm", "data.curriculum")


def load_for_run[Run: RunConfig](
    schema: type[Run], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Run:
    """Load the configuration of a run that starts on this machine, and check all inputs.

    Inputs on a hub are fetched. Only the first row of the data is read, because the run reads all rows
    anyway.

    Raises:
        ConfigError: Lists every problem and every missing input.
    """
    loaded = find_on_hub(read_config(schema, source, overrides), fetch=True)
    violations = violations_here(loaded)
    # Only errors prevent the start of a run, which checks the data itself.
    found = [
        each for each in _examine(loaded, violations, 1) if each.status is Status.error and each.check != DATA
    ]
    refuse(loaded.source, [*problems_of(loaded, violations), *map(str, found)])

    return loaded.config


def load_examined_anywhere[Run: RunConfig](
    schema: type[Run], path: str, overrides: Sequence[str] = ()
) -> Loaded[Run]:
    """Load a configuration like `load_checked_anywhere`, and check the inputs that are on this machine.

    These are model folders, tokenizers, the first rows of the data, reward functions, tools and environments.

    Raises:
        ConfigError: Lists every problem.
    """
    loaded = find_planned(schema, path, overrides)
    errors, absent = divided_violations(loaded)
    found = _examine(loaded, [*errors, *absent], ROWS)
    problems = [
        *problems_of(loaded, errors),
        *(str(each) for each in found if each.status is Status.error),
    ]
    refuse(path, problems or _resume_problems(loaded.config))

    return replace(
        loaded,
        absent=(*loaded.absent, *map(str, absent)),
        warnings=(*loaded.warnings, *(str(each) for each in found if each.status is Status.warning)),
    )


def _examine[Run: RunConfig](
    loaded: Loaded[Run], violations: Sequence[Violation], num_rows: int
) -> list[CheckResult]:
    """Check the inputs of a run, except those with a known problem. For `num_rows` see `findings`."""
    config = loaded.config

    # Missing files of models and data are skipped individually, missing code with its section.
    skipped = {
        key
        for each in violations
        for key in each.keys
        if each.absence is not Absence.input or key.startswith(_CODE_KEYS)
    }
    skipped |= {key for key in ("data.train_files", "data.val_files") if loaded.refuses(["data"])}
    skipped |= {key for key in _CODE_KEYS if loaded.refuses([key])}
    architectures, _ = read_architectures(config)
    # Check the models whose path and architecture have no problem.
    known = {
        role.name: architectures[role.name]
        for role in model_roles(config)
        if role.path_key not in skipped and not loaded.refuses([role.path_key]) and role.name in architectures
    }

    return list(findings(config, known, skipped, num_rows))


def _resume_problems(config: RunConfig) -> list[str]:
    """Return why the run cannot resume from the folder `checkpoint.resume`, if it is on this machine."""
    resume = config.checkpoint.resume
    if resume in (RESUME_AUTO, RESUME_DISABLE) or not os.path.isdir(resume):
        return []
    try:
        find_resume(config)
    except ConfigError as error:
        return list(error.problems)
    except CheckpointError as error:
        return [f"checkpoint.resume: {error}"]
    return []
