"""A configuration with all that a run reads: models, tokenizers, data and reward functions. Imports torch,
and takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.load import read_config
from megarl.config.roles import model_roles
from megarl.config.validate import read_architectures
from megarl.config.violation import Absence, Violation
from megarl.doctor.check_result import DATA, CheckResult, Status
from megarl.doctor.checked_config import Checked, Inputs, Run, find_inputs, find_on_hub, problems_of, refuse
from megarl.doctor.inputs import ROWS, findings

_CODE_KEYS = ("reward.functions", "agent", "algorithm")


def load_for_run(
    schema: type[Run], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Run:
    """Load the configuration of a run that starts on this machine, and check all that it reads. What is on a
    hub is fetched.

    Of the data, which the run reads in full, only the first row is read here.

    Raises:
        ConfigError: It lists every problem, and everything that is absent.
    """
    inputs = find_on_hub(read_config(schema, source, overrides), fetch=True)
    violations = inputs.violations()
    # Only errors stop the start of a run, and the data will be read in full anyway.
    found = [
        each for each in _examine(inputs, violations, 1) if each.status is Status.error and each.check != DATA
    ]
    refuse(inputs.partial.source, [*problems_of(inputs.partial, violations), *map(str, found)])

    return inputs.partial.config


def load_examined_anywhere(schema: type[Run], path: str, overrides: Sequence[str] = ()) -> Checked[Run]:
    """Do what `load_checked_anywhere` does, and examine those of the run's files that are on this machine.

    Model folders, tokenizers, the first rows of the data, reward functions, tools and environments.

    Raises:
        ConfigError: It lists every problem.
    """
    inputs = find_inputs(read_config(schema, path, overrides))
    errors, absent = inputs.divided()
    found = _examine(inputs, [*errors, *absent], ROWS)
    refuse(
        path,
        [*problems_of(inputs.partial, errors), *(str(each) for each in found if each.status is Status.error)],
    )
    warnings = [str(each) for each in found if each.status is Status.warning]

    return Checked(inputs.partial.config, [*inputs.substituted, *map(str, absent)], warnings)


def _examine(inputs: Inputs[Run], violations: Sequence[Violation], num_rows: int) -> list[CheckResult]:
    """Examine the files that a run reads, except those that have a problem already. num_rows: see
    `findings`."""
    config = inputs.partial.config
    partial = inputs.partial

    # Files of models and data that are absent are skipped one by one; code that is absent is skipped with its
    # section.
    skipped = {
        key
        for each in violations
        for key in each.keys
        if each.absence is not Absence.input or key.startswith(_CODE_KEYS)
    }
    skipped |= {key for key in ("data.train_files", "data.val_files") if partial.refuses(["data"])}
    skipped |= {key for key in _CODE_KEYS if partial.refuses([key])}
    architectures, _ = read_architectures(config)
    # Examine the models whose path and architecture are not in question.
    known = {
        role.name: architectures[role.name]
        for role in model_roles(config)
        if role.path_key not in skipped
        and not partial.refuses([role.path_key])
        and role.name in architectures
    }

    return list(findings(config, known, skipped, num_rows))
