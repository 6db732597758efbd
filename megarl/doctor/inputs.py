"""Checks the inputs of a run, by reading them like the run.

The inputs are model folders, tokenizers and chat templates, data files and reward functions.

Modules that import torch are imported only for an input that they read, so that the plan of a run without its
inputs is checked in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from megarl.config.finding import Finding, good, refused, wrong
from megarl.config.roles import ModelRole, model_roles
from megarl.config.rules.machine import has_tokenizer, has_weights
from megarl.config.schema import AlgorithmConfig, PPOConfig, RunConfig
from megarl.doctor.reward_functions import (
    LOAD_LIMIT_S,
    MOST_TRUTHS,
    choose_truths,
    judge_compared_metrics,
    judge_rewards,
)
from megarl.doctor.run_inputs import ROWS, ExaminedRun
from megarl.machine.errors import ConfigError, counted, sized
from megarl.machine.user_functions import UnfinishedError, UserFunctionError, call_in_process
from megarl.models.architecture import Architecture
from megarl.plan.step_time.device import profile_of

Config = RunConfig
MODELS = "models"
FUNCTIONS = "functions of the algorithm"
SAMPLER = "curriculum sampler"
DEVICES = "devices"


def check(subject: ExaminedRun) -> Iterator[Finding]:
    assert subject.config is not None
    yield from findings(subject.config, subject.architectures, subject.skipped, subject.num_rows)


def findings(
    config: Config,
    architectures: Mapping[str, Architecture],
    skipped: Collection[str] = (),
    num_rows: int = ROWS,
) -> Iterator[Finding]:
    """Check all inputs of a run that are on this machine.

    Args:
        architectures: The architectures of the models to check, by role.
        skipped: The keys to skip.
        num_rows: The number of rows of each data file that are rendered.
    """
    # Check each weight folder once, because several roles may share it.
    for role in (each for each in _distinct_models(config, architectures) if has_weights(each.path)):
        yield judge_model(Path(role.path), role.path_key, architectures[role.name], role)
    if any(has_tokenizer(role.path) for role in model_roles(config) if role.name in architectures):
        from megarl.doctor.texts import text_findings

        yield from text_findings(config, architectures, skipped, num_rows)
    if config.placement.device_profile is not None and "placement.device_profile" not in skipped:
        yield judge_device(config)
    if isinstance(config, PPOConfig):
        yield from _scoring_findings(config, skipped, num_rows)


def _scoring_findings(config: PPOConfig, skipped: Collection[str], num_rows: int) -> Iterator[Finding]:
    """Check rewards, judges, the functions of the algorithm, teachers and the curriculum."""
    if config.reward.functions and not any(key.startswith("reward.functions") for key in skipped):
        rows, val_sources = choose_truths(config.data, skipped, MOST_TRUTHS if num_rows > 1 else 1)
        results, keys = judge_rewards(config.reward, rows)
        yield from results
        yield from judge_compared_metrics(config, val_sources, keys)
    if config.reward.judges and not any(key.startswith("reward.judges") for key in skipped):
        from megarl.doctor.agents_and_judges import judge_prompts

        yield from judge_prompts(config, skipped)

    if not any(key.endswith(".function") or key == "algorithm" for key in skipped):
        yield from judge_functions(config.algorithm)
    # The start of a run, which reads one row here, checks all rows when it renders them.
    if config.teachers and num_rows > 1 and "data.train_files" not in skipped:
        from megarl.doctor.agents_and_judges import judge_data_sources

        yield from judge_data_sources(config)
    sampler = config.data.curriculum.sampler
    if sampler is not None and not any(key.startswith("data.curriculum") for key in skipped):
        yield judge_sampler(sampler)


def judge_device(config: Config) -> Finding:
    """Check that the device profile of a run can be loaded."""
    key = "placement.device_profile"
    try:
        profile = profile_of(config)
    except ConfigError as error:
        return refused(
            DEVICES, key, error, "name a device of configs/devices, or a file of `megarl tune --calibrate`"
        )
    assert profile is not None
    return good(DEVICES, f"{key}: {profile.name}")


def _distinct_models(config: Config, architectures: Mapping[str, Architecture]) -> list[ModelRole]:
    """Return one role for each folder.

    The reference usually has the actor's folder, and a critic in it needs no other tensors.
    """
    roles = [role for role in model_roles(config) if role.name in architectures]
    return list({role.path: role for role in reversed(roles)}.values())[::-1]


def judge_model(folder: Path, key: str, architecture: Architecture, role: ModelRole) -> Finding:
    """Check that the weights are complete.

    Each file must have its full size, and each tensor of the index must be in its file with the shape of
    config.json. Only headers are read.
    """
    again = f"download it again (hf download NAME --local-dir {folder}), or set {key} to another folder"
    from megarl.weights.manifest import check_headers
    from megarl.weights.tensors import WeightTransferError

    try:
        index = check_headers(
            folder,
            architecture.base,
            "value" if role.with_value_head else "lm",
            trains=role.optim is not None,
        )
    except WeightTransferError as error:
        return wrong(MODELS, f"{key}: {error}", again, folder=str(folder))

    files = {tensor.file for tensor in index.values()}
    total = sum(file.stat().st_size for file in files)
    return good(
        MODELS,
        f"{folder}: {counted(len(index), 'tensor')} in {counted(len(files), 'file')}, {sized(total)}",
        files=len(files),
        bytes=total,
    )


def judge_functions(algorithm: AlgorithmConfig, limit_s: float = LOAD_LIMIT_S) -> Iterator[Finding]:
    """Test a custom estimator and policy loss on two samples, in a process with a time limit.

    `try_functions` runs in that process.
    """
    references = [
        reference
        for reference in (algorithm.advantage.function, algorithm.policy_loss.function)
        if reference is not None
    ]
    if not references:
        return
    from megarl.algorithms.user_functions import try_functions

    names = " and ".join(references)
    yield _judge_code(
        FUNCTIONS,
        "algorithm",
        names,
        "fix the file, or remove the key; docs/algorithms/custom.md describes the arguments and the result "
        "of such a function",
        partial(try_functions, algorithm),
        "on two samples",
        "loads, and returns values for two samples",
        limit_s,
    )


def judge_sampler(reference: str, limit_s: float = LOAD_LIMIT_S) -> Finding:
    """Load a custom sampler of a curriculum, in a process with a time limit."""
    from megarl.data.curriculum import KEY

    return _judge_code(
        SAMPLER,
        KEY,
        reference,
        "fix the file, or remove the key; docs/data.md describes the methods of such a class",
        partial(_load_sampler, reference),
        "while it is loaded",
        "loads, and has the methods of a sampler",
        limit_s,
    )


def _load_sampler(reference: str) -> None:
    from megarl.data.curriculum import load_sampler

    load_sampler(reference)  # the class itself cannot be returned to another process


def _judge_code(
    check: str,
    key: str,
    names: str,
    hint: str,
    run: Callable[[], None],
    when: str,
    does: str,
    limit_s: float,
) -> Finding:
    """Run user code in a separate process, which is ended after the time limit.

    Args:
        run: Raises UserFunctionError if the code cannot be used.
        when: What `run` does, for the message about a time limit.
        does: What the code does if `run` succeeds.
    """
    try:
        call_in_process(run, limit_s=limit_s)
    except UserFunctionError as error:
        return refused(check, key, error, hint, names=names)
    except UnfinishedError as error:
        return wrong(check, f"{key}: {names}: {error} {when}", hint, names=names)
    return good(check, f"{names} {does}", names=names)
