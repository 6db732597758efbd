"""The list of all checks, and the two ways to run it: before a run, and in `megarl doctor`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl import __version__
from megarl.config.finding import (
    CONFIGURATION,
    DATA,
    SERVERS,
    Absence,
    Finding,
    Findings,
    Status,
    doubtful,
    good,
    worst,
    wrong,
)
from megarl.config.load import Loaded, read_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig, RolloutEngineKind, RunConfig
from megarl.config.validate import (
    RULES,
    Check,
    Needs,
    read_architectures,
    run_checks,
    validate,
    validate_here,
)
from megarl.doctor.devices import probe
from megarl.doctor.run_inputs import ROWS, ExaminedRun, find_on_hub, find_planned
from megarl.machine.errors import ConfigError
from megarl.machine.ray_address import cluster_address
from megarl.plan.placement.memory import budget_problems, plan_memory, refuses
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.remedies import memory_remedies
from megarl.plan.placement.transport import choose_transport
from megarl.rollout.engines import SERVER_ARGS_CHECKS

_log = logging.getLogger(__name__)
# Keys that a placement depends on.
_PLACEMENT_KEYS = (
    "placement",
    "actor.parallel",
    "teacher.parallel",
    "teachers",
    "critic.parallel",
    "reward.model.parallel",
    "rollout.num_replicas",
    "rollout.tensor_parallel_size",
    "rollout.pipeline_parallel_size",
)
_CODE_KEYS = ("reward.functions", "reward.judges", "agent", "algorithm", "data.curriculum")


def placement[Run: RunConfig](loaded: Loaded[Run], found: Sequence[Finding]) -> Findings:
    """Check that the roles fit on the devices, and in their memory.

    The first problem of the memory budget contains what the plan assumes.
    """
    config = loaded.config
    keys = [key for each in found for key in each.keys]
    if any(key.startswith(_PLACEMENT_KEYS) for key in keys) or loaded.refuses(_PLACEMENT_KEYS):
        return
    try:
        plan = plan_placement(config)
        if isinstance(config, PPOConfig):
            choose_transport(config, plan)
        # The memory plan is only computed for a configuration without other problems.
        has_budget = refuses(config) and config.placement.device_memory_gb is not None
        if loaded.problems or found or not has_budget:
            return
        architectures, _ = read_architectures(config)
        over = budget_problems(config, plan_memory(config, plan, architectures))
        if over:
            over[-1] = f"{over[-1]}; {memory_remedies(config, architectures)}"
    except ConfigError as error:
        over = list(error.problems)
        assumed = ""
    else:
        assumed = "; ".join(loaded.warnings)

    for number, line in enumerate(over):
        yield Finding((), f"{line} ({assumed})" if assumed and number == 0 else line)


def server_arguments(loaded: Loaded[PPOConfig], found: Sequence[Finding]) -> Findings:
    """Check the arguments of the engine's server."""
    rollout = loaded.config.rollout
    for engine in RolloutEngineKind:
        settings = rollout.settings_of(engine)
        if settings is None or not settings.server_args:
            continue
        try:
            SERVER_ARGS_CHECKS[engine](settings.server_args)
        except ConfigError as error:
            yield from (Finding((), line) for line in error.problems)


def _of_doctor(needs: Needs, functions: Mapping[str, str]) -> list[Check]:
    """Return the rows of checks whose modules are imported one by one: a missing package fails only one."""
    return [Check(needs, f"megarl.doctor.{function}", title=title) for title, function in functions.items()]


# Fast checks come first, and checks that start processes last.
CHECKS = (
    *RULES,
    Check(Needs.plan, placement),
    Check(Needs.plan, server_arguments, kind=PPOConfig),
    *_of_doctor(Needs.machine, {"versions": "software:check"}),
    *_of_doctor(Needs.gpus, {"GPUs": "devices:check"}),
    *_of_doctor(
        Needs.machine,
        {
            "shared memory": "machine:shared_memory",
            "open files": "machine:open_files",
            "memory": "machine:memory",
            "threads": "machine:threads",
            "clock": "machine:clock",
            "environment": "machine:environment",
            "sandbox": "machine:sandbox",
            "ports": "network:ports",
        },
    ),
    *_of_doctor(Needs.machine_of_run, {"layers": "software:layers", "checkpoints": "storage:check"}),
    *_of_doctor(Needs.inputs, {"models, tokenizers, data and rewards": "inputs:check"}),
    *_of_doctor(Needs.resumption, {"checkpoints": "storage:resumption"}),
    *_of_doctor(Needs.processes, {"ranks": "network:loopback", "ray": "ray_cluster:check"}),
)


# ---- before a run


def load_for_run[Run: RunConfig](
    schema: type[Run],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    reads_inputs: bool = True,
) -> Run:
    """Load the configuration of a run that starts on this machine, and run its checks.

    Inputs on a hub are fetched. Only the first row of the data is read, because the run reads all rows
    anyway. With an unknown key, neither is done, so that it is reported at once.

    Args:
        reads_inputs: Whether to check more of the inputs than each model's `config.json`.

    Raises:
        ConfigError: Lists every problem and every missing input.
    """
    read = read_config(schema, source, overrides)
    loaded = find_on_hub(read, fetch=not read.has_unknown_keys)
    found = findings_here(loaded)
    of_inputs = _of_inputs(loaded, found, 1) if reads_inputs and not read.has_unknown_keys else []
    for each in of_inputs:
        # A server may start later, but the run would learn that it did not only at its first scores.
        if each.check == SERVERS and each.status is Status.warning:
            _log.warning("%s", each)
    # Only errors prevent the start of a run, which checks the data itself.
    problems = [each for each in of_inputs if each.status is Status.error and each.check != DATA]
    return loaded.required([*with_planned(loaded, found), *problems])


def load_for_plan[Run: RunConfig](
    schema: type[Run],
    path: str,
    overrides: Sequence[str] = (),
    *,
    starts_elsewhere: bool = False,
    reads_inputs: bool = False,
) -> Loaded[Run]:
    """Load the configuration of a run that may start on another machine, and run its checks.

    Each model's path in the result is a folder with a `config.json` on this machine. The run could start here
    if nothing is absent.

    Args:
        starts_elsewhere: See `divided_findings`.
        reads_inputs: Whether to check the inputs that are on this machine: model folders, tokenizers, the
            first rows of the data, reward functions, tools and environments. This imports torch, and is not
            done with an unknown key, so that it is reported at once.

    Raises:
        ConfigError: Lists every problem.
    """
    loaded = find_planned(schema, path, overrides)
    errors, absent = divided_findings(loaded, starts_elsewhere)
    reads_inputs = reads_inputs and not loaded.has_unknown_keys
    of_inputs = _of_inputs(loaded, [*errors, *absent], ROWS) if reads_inputs else []
    problems = with_planned(loaded, errors)
    problems += [each for each in of_inputs if each.status is Status.error]
    if reads_inputs and not (problems or loaded.problems):
        problems += run_checks(CHECKS, loaded.config, {Needs.resumption: [(loaded.config,)]})
    loaded.required(problems)

    return replace(
        loaded,
        absent=(*loaded.absent, *map(str, absent)),
        warnings=(*loaded.warnings, *(str(each) for each in of_inputs if each.status is Status.warning)),
    )


def findings_here[Run: RunConfig](loaded: Loaded[Run], *, writes: bool = True) -> list[Finding]:
    """Return the findings about values and files on this machine, without those about refused keys.

    Args:
        writes: Whether the run starts on this machine, so that its folders must be writable.
    """
    config = loaded.config
    lines = {line.partition(":")[0] for line in loaded.absent}
    # A model that was not fetched from the hub is already reported in its line.
    explained = {role.path_key for role in model_roles(config) if role.path_key in lines}

    return [
        each
        for each in [*validate(config), *validate_here(config, writes=writes)]
        if not loaded.refuses(each.keys)
        and not (each.absence is Absence.input and explained.issuperset(each.keys))
    ]


def divided_findings[Run: RunConfig](
    loaded: Loaded[Run], starts_elsewhere: bool = False
) -> tuple[list[Finding], list[Finding]]:
    """Divide the findings into errors, and things missing here that the run's machine may have.

    If all files and GPUs of a run are here, the run is expected to start here, and every finding is an
    error.

    Args:
        starts_elsewhere: Whether the run starts on another machine in any case.
    """
    found = findings_here(loaded, writes=False)
    # A machine without the run's files or GPUs is probably not the one that will run it.
    lacks_inputs = any(each.absence in (Absence.input, Absence.gpu) for each in found)
    if not (starts_elsewhere or loaded.absent or lacks_inputs):
        return findings_here(loaded), []

    return [each for each in found if each.absence is None], [
        each for each in found if each.absence is not None
    ]


def with_planned[Run: RunConfig](loaded: Loaded[Run], found: Sequence[Finding]) -> list[Finding]:
    """Return the findings, and those about the placement and the arguments of engines."""
    return [*found, *run_checks(CHECKS, loaded.config, {Needs.plan: [(loaded, found)]})]


def _of_inputs[Run: RunConfig](loaded: Loaded[Run], found: Sequence[Finding], num_rows: int) -> list[Finding]:
    """Check the inputs of a run, except those with a known problem."""
    config = loaded.config

    # Missing files of models and data are skipped individually, missing code with its section.
    skipped = {
        key
        for each in found
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
    subject = ExaminedRun(config=config, architectures=known, skipped=skipped, num_rows=num_rows)

    return list(run_checks(CHECKS, config, {Needs.inputs: [(subject,)]}))


# ---- `megarl doctor`


def examine(config_path: str | None, overrides: Sequence[str], console: Console) -> list[Finding]:
    """Run all checks in sequence."""
    gpus = probe()
    subject, found = read_subject(config_path, overrides, len(gpus.gpus), cluster_address())
    arguments: dict[Needs, tuple[Any, ...]] = {
        Needs.gpus: (subject, gpus),
        Needs.machine: (subject,),
        Needs.processes: (subject,),
    }
    if subject.config is not None:
        arguments |= {Needs.machine_of_run: (subject,), Needs.inputs: (subject,)}

    for check in CHECKS:
        if check.needs in arguments:
            with console.status(f"checking {check.title}"):
                found += check.run(*arguments[check.needs])

    return found


def read_subject(
    path: str | None, overrides: Sequence[str], num_gpus: int, ray_address: str | None
) -> tuple[ExaminedRun, list[Finding]]:
    """Read the run in the file `path`, and return its problems.

    Parts that cannot be read are omitted, so that the rest is checked.
    """
    machine = ExaminedRun(num_gpus=num_gpus, ray_address=ray_address)
    if path is None:
        return machine, []
    try:
        read = read_config(RunConfig, path, overrides)
    except ConfigError as error:
        return machine, list(_to_change(error.source, error.problems))

    loaded = find_on_hub(read, fetch=False)
    config = loaded.config
    problems = [*loaded.problems, *map(str, with_planned(loaded, findings_here(loaded)))]
    found = list(_to_change(path, problems)) or [good(CONFIGURATION, f"{path} has no errors")]
    found += [doubtful(CONFIGURATION, line, "fetch it now with `hf download`") for line in loaded.absent]
    # With schema problems the configuration is incomplete, so nothing further is checked.
    if read.problems:
        return machine, found

    try:
        plan = plan_placement(config)
    except ConfigError:  # already reported in `problems`
        plan = None

    architectures, _ = read_architectures(config)
    unfetched = [line.partition(":")[0] for line in loaded.absent]
    return replace(machine, config=config, plan=plan, architectures=architectures, skipped=unfetched), found


def _to_change(source: str, problems: Sequence[str]) -> Findings:
    hint = f"change it in {source} or on the command line; `megarl check` reports it too"
    for problem in problems:
        yield wrong(CONFIGURATION, problem, hint)


def document(config_path: str | None, results: Sequence[Finding], seconds: float) -> dict[str, object]:
    return {
        "megarl": __version__,
        "config": config_path,
        "status": worst(results).value,
        "counts": counts(results),
        "seconds": round(seconds, 1),
        "findings": [
            {
                "check": finding.check,
                "status": finding.status.value,
                "message": finding.message,
                "remedy": finding.hint,
                "facts": dict(finding.facts),
            }
            for finding in results
        ],
    }


def counts(results: Sequence[Finding]) -> dict[str, int]:
    return {status.value: sum(finding.status is status for finding in results) for status in Status}
