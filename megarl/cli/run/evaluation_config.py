"""The configuration of `megarl eval`: that of a run without training, with the command's options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.cli.run.named_model import NamedModel
from megarl.config.load import Loaded, load_config
from megarl.config.schema import (
    ActorConfig,
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    EngineDType,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ProfileConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutConfig,
    RoutingReplay,
    TeacherConfig,
    TrainerConfig,
    Transport,
)
from megarl.config.sources import Layer
from megarl.doctor.checks import findings_here, with_planned
from megarl.doctor.run_inputs import find_on_hub
from megarl.machine.errors import ConfigError

_EVALUATIONS = "evaluations"  # subfolder of a run's folder and of `outputs`
_ROLLOUT = RolloutConfig()  # the defaults


def evaluation_config(model: NamedModel, options: argparse.Namespace) -> PPOConfig:
    """Return the configuration of an evaluation, without training.

    It comes from `--config`, otherwise from the run that produced the model, otherwise from the defaults.

    Raises:
        ConfigError: Lists all problems.
    """
    path = options.config
    overrides = options.overrides

    # A fine-tuning run has no rollout section, so only its dtype applies.
    if path is None and isinstance(model.run, PPOConfig):
        path = model.run_file
    elif path is None and model.run is not None:
        overrides = [f"model.dtype={model.run.model.dtype.value}", *overrides]

    config = load_config(PPOConfig, path or {}, overrides, Layer("options", _values(model, options)))
    # The function of the option replaces all that scores, not only the other functions.
    if options.reward is not None:
        config = config.with_sections(reward=replace(config.reward, judges=[], model=RewardModelConfig()))
    source = str(path or "megarl eval")
    if not config.data.val_files:
        raise ConfigError(source, ["data.val_files: is empty; give the evaluation data with --data FILE"])
    if config.rollout.dtype is EngineDType.fp8:
        raise ConfigError(
            source,
            [
                "rollout.dtype: is fp8, but an evaluation's engine reads a folder in the dtype of the "
                "model; use rollout.dtype=model"
            ],
        )
    output = _output(model, config, options)  # named by the data files as given
    loaded = find_on_hub(Loaded(source, _without_training(config, str(output))), fetch=True)

    # The weights may come from a checkpoint, and an evaluation logs nothing.
    violations = [
        each
        for each in findings_here(loaded)
        if each.absence is None or each.keys[0] not in ("model.path", "tracking.loggers")
    ]
    return loaded.required(with_planned(loaded, violations))


def _values(model: NamedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options by configuration key."""
    given = {
        "data": {"train_files": [], "val_files": options.data, "max_response_length": options.max_tokens},
        "rollout": {"validation": {"n": options.n, "temperature": options.temperature}},
        "model": {"path": str(model.source.companions)},
    }
    if options.reward is not None:
        path, _, name = options.reward.rpartition(":")
        given["reward"] = {"functions": [{"path": path, "name": name} if path else {"path": name}]}

    return _said(given)


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that are None."""
    kept = {key: _said(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None}


def _without_training(config: PPOConfig, output: str) -> PPOConfig:
    """Return the configuration without training.

    The engines use all devices, in the placement `hybrid` with an actor that is never started.
    """
    rollout = config.rollout
    placement = config.placement
    trainer = config.trainer
    # The rules require an actor that fits the engines' devices.
    num_devices = rollout.num_replicas * rollout.devices_per_engine

    return replace(
        config,
        data=replace(config.data, train_files=config.data.val_files, train_weights=[]),
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.reinforce_plus_plus),
            kl=KLConfig(where=KLWhere.none),
        ),
        actor=ActorConfig(
            parallel=ParallelConfig(data_parallel_size=num_devices),
            micro_batch=MicroBatchConfig(sequences=1, max_tokens=None),
        ),
        rollout=replace(
            rollout,
            n=num_devices,
            temperature=1.0,
            max_staleness=0,
            on_update=_ROLLOUT.on_update,
            late=_ROLLOUT.late,
        ),
        placement=PlacementConfig(
            strategy=PlacementStrategy.hybrid,
            num_nodes=placement.num_nodes,
            devices_per_node=placement.devices_per_node,
        ),
        critic=CriticConfig(),
        reference=ReferenceConfig(),
        teacher=TeacherConfig(),
        teachers=[],
        # The engines read a folder once, and nothing is scored by the actor.
        resharding=replace(config.resharding, transport=Transport.auto, delta=False),
        engine=replace(config.engine, routing_replay=RoutingReplay.off),
        profile=ProfileConfig(),
        checkpoint=CheckpointConfig(),
        trainer=TrainerConfig(
            prompts_per_step=trainer.prompts_per_step,
            phase_time_limit_s=trainer.phase_time_limit_s,
            seed=trainer.seed,
            output_dir=output,
        ),
    )


def _output(model: NamedModel, config: PPOConfig, options: argparse.Namespace) -> Path:
    """Return the folder of the results.

    It is in the run's folder, named by step and data. For a model without a run, it is in `outputs`.
    """
    if options.output is not None:
        return Path(options.output)
    data = "-".join(Path(file).stem for file in config.data.val_files)
    if model.run_dir is None:
        return Path("outputs") / _EVALUATIONS / f"{model.source.folder.name}-{data}"
    step = "model" if model.source.step is None else f"step-{model.source.step}"

    return model.run_dir / _EVALUATIONS / f"{step}-{data}"
