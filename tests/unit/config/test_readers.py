"""Keys without effect: every key is read in all runs, or declares what reads it, and one check compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config.dotted import values_at, with_value
from megarl.config.load import load_config, schema_of
from megarl.config.readers import unread_keys
from megarl.config.schema import SCHEMAS, ModelConfig, PPOConfig, RunConfig, RunKind
from megarl.config.schema.keys import OnlyWith, needs_of
from megarl.config.validate import read_architectures, validate
from megarl.config.values import item_section, key_types
from megarl.models.families import read_architecture

ROOT = Path(__file__).parents[3]
DENSE = {
    role: read_architecture(str(ROOT / "configs/models/Qwen3-32B"), False) for role in ("actor", "critic")
}
RUNS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*/*.yaml")])

# Keys and sections that every run which has them reads. A key that is read in some runs only declares it with
# `only_with` instead.
ALWAYS_READ = {
    *("kind", "device", "model", "algorithm.entropy_coefficient"),
    *("data.train_files", "data.train_weights", "data.val_files", "data.system_prompt", "data.overlong"),
    *("data.max_prompt_length", "data.max_response_length", "data.max_length", "data.lossy"),
    *("data.shuffle", "data.seed", "data.curriculum.kind", "data.curriculum.sampler"),
    *(f"data.columns.{name}" for name in ("prompt", "data_source", "ground_truth", "reward_model")),
    *(f"data.columns.{name}" for name in ("extra_info", "messages", "tools", "answer")),
    *(f"data.columns.{name}" for name in ("chosen", "rejected", "margin")),
    *("algorithm.advantage.estimator", "algorithm.advantage.function"),
    *("algorithm.policy_loss.kind", "algorithm.policy_loss.function", "algorithm.policy_loss.aggregation"),
    *("algorithm.policy_loss.off_policy_limit", "algorithm.kl.where"),
    *("algorithm.rollout_correction.level", "algorithm.rollout_correction.bypass"),
    "algorithm.rollout_correction.rejection.estimator",
    *("algorithm.overlong.buffer_share", "algorithm.dynamic_sampling.enabled"),
    *("actor.parallel", "actor.optim", "actor.micro_batch", "actor.recompute", "actor.megatron"),
    *("actor.lora.rank", "loss"),
    *("reward.functions", "reward.judges", "reward.model.path", "reward.pass_score", "reward.max_error_rate"),
    *(
        "agent.tools",
        "agent.environment.path",
        "agent.environment.hub",
        "agent.harness.command",
        "agent.harness.function",
    ),
    "agent.harness.external",
    *(f"rollout.{name}" for name in ("engine", "dtype", "num_replicas", "tensor_parallel_size", "n")),
    *(f"rollout.{name}" for name in ("pipeline_parallel_size", "temperature")),
    *(f"rollout.{name}" for name in ("max_concurrency", "max_staleness", "max_error_rate")),
    *(f"rollout.{name}" for name in ("restart_limit", "health_limit_s")),
    *(f"placement.{name}" for name in ("strategy", "num_nodes", "devices_per_node", "device_memory_gb")),
    *("placement.device_peak_tflops", "placement.device_profile"),
    *(f"engine.{name}" for name in ("layers", "packing", "log_prob_chunk_tokens", "flash_attention")),
    "engine.fp32_lm_head",
    *(f"checkpoint.{name}" for name in ("dir", "every_steps", "every_minutes", "at_end", "keep")),
    *(f"checkpoint.{name}" for name in ("save_hf", "asynchronous", "upload", "resume", "keep_best.metric")),
    *("recovery.enabled", "recovery.check_replicas_every", "recovery.hang_factor"),
    "recovery.straggler_factor",
    *(f"trainer.{name}" for name in ("total_steps", "prompts_per_step", "samples_per_step")),
    *(f"trainer.{name}" for name in ("pairs_per_step", "updates_per_step", "epochs_per_batch")),
    *(f"trainer.{name}" for name in ("phase_time_limit_s", "seed", "output_dir", "early_stop.metric")),
    *("tracking.loggers", "tracking.run_name", "tracking.record_batches", "profile.steps"),
}


def base(kind: RunKind = RunKind.ppo) -> RunConfig:
    config: Any = SCHEMAS[kind]()
    return replace(
        config,
        model=ModelConfig(path="configs/models/Qwen3-32B"),
        data=replace(config.data, train_files=["a.parquet"]),
    )


def declarations(
    section: type, prefix: str = "", outer: tuple[OnlyWith, ...] = ()
) -> Iterator[tuple[str, tuple[OnlyWith, ...]]]:
    """Yield each key of a section, `[]` for the items of lists, with what it and the sections around it need."""
    hints = key_types(section)
    for entry in fields(section):  # type: ignore[arg-type]
        key = f"{prefix}{entry.name}"
        needs = (*outer, *needs_of(entry))
        item = item_section(hints[entry.name])
        if is_dataclass(hints[entry.name]):
            yield from declarations(hints[entry.name], f"{key}.", needs)
            continue
        yield key, needs
        # The keys of an item are read with the list.
        for inner, inner_needs in declarations(item, f"{key}[].", needs) if item else ():
            yield inner, inner_needs or (OnlyWith(()),)


def is_always_read(key: str) -> bool:
    return any(key == always or key.startswith(f"{always}.") for always in ALWAYS_READ)


@pytest.mark.parametrize("kind", list(RunKind))
def test_every_key_is_always_read_or_declares_its_reader(kind: RunKind) -> None:
    undeclared = [key for key, needs in declarations(SCHEMAS[kind]) if not needs and not is_always_read(key)]
    assert undeclared == []


def test_the_list_of_keys_that_are_always_read_has_no_others() -> None:
    needs: dict[str, list[Any]] = {}
    for schema in SCHEMAS.values():
        for key, needed in declarations(schema):
            needs.setdefault(key, []).append(needed)
    sections = {
        key[: key.index(".", start)]
        for key in needs
        for start in range(len(key))
        if key.startswith(".", start)
    }
    assert ALWAYS_READ - set(needs) - sections == set()
    # A key may be in the list for one kind of run and need something in another.
    assert [key for key in ALWAYS_READ if key in needs and all(needs[key])] == []


@pytest.mark.parametrize("kind", list(RunKind))
def test_readers_are_keys_with_values_that_they_can_have(kind: RunKind) -> None:
    for key, needs in declarations(SCHEMAS[kind]):
        for reader in (reader for needed in needs for reader in needed.readers):
            if reader.key.startswith(".") or reader.architecture or not reader.values:
                continue
            found = list(values_at(base(kind), reader.key))
            kinds = {type(value) for value in reader.values}
            assert {type(value) for value in found} == kinds or reader.key == "device", key


def other(value: Any, hint: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, list):
        return [*value, *value, 1, 2]
    if isinstance(value, dict):
        return {"a": 1}
    return "x" if value is None or isinstance(value, str) else None


@pytest.mark.parametrize("kind", list(RunKind))
def test_a_change_of_a_key_without_its_reader_is_reported_once(kind: RunKind) -> None:
    """A run of defaults has no agent, reward, adapters, validation and so on, so most keys have no reader."""
    config = base(kind)
    reported = 0
    for key, needs in declarations(type(config)):
        if not needs or "[]" in key:
            continue
        (value,) = values_at(config, key)
        changed = with_value(config, key, other(value, None))
        problems = [
            violation.keys
            for refused in (True, False)
            for violation in unread_keys(changed, DENSE, refused=refused)
        ]
        assert len(problems) <= 1, key
        reported += len(problems)
        for keys in problems:
            assert keys[0] == key

    assert reported > (90 if kind is RunKind.ppo else 15)
    assert (
        list(unread_keys(config, DENSE, refused=True))
        == list(unread_keys(config, DENSE, refused=False))
        == []
    )


WARNED = {
    "actor.optim.min_lr=1e-7": "actor.optim.decay=constant; set actor.optim.decay=linear or cosine",
    "critic.optim.min_lr=1e-7": "critic.optim.decay=constant",
    "agent.max_turns=3": "without one of agent.tools, agent.environment.path, agent.harness.command",
    "recovery.max_restarts=9": "recovery.enabled=false; set recovery.enabled=true",
    "recovery.wait_for_node_s=1": "recovery.enabled=false",
    "trainer.early_stop.patience=2": "trainer.early_stop.metric=null; set trainer.early_stop.metric=val/",
    "checkpoint.keep_best.mode=min": "checkpoint.keep_best.metric=null",
    "algorithm.kl.controller.target=0.2": "algorithm.kl.controller.kind=fixed",
    "algorithm.policy_loss.sapo.temperature_negative=2": "algorithm.policy_loss.kind=ppo_clip; set",
    "algorithm.policy_loss.covariance.share=0.1": "algorithm.policy_loss.kind=ppo_clip",
    "rollout.on_update=drain": "rollout.max_staleness=0",
    "algorithm.overlong.penalty=2": "algorithm.overlong.buffer_share=0",
    "algorithm.dynamic_sampling.max_generations=9": "algorithm.dynamic_sampling.enabled=false",
    "algorithm.rollout_correction.high=3": "algorithm.rollout_correction.level=none",
    "algorithm.rollout_correction.rejection.high=3": "algorithm.rollout_correction.rejection.estimator=none",
    "rollout.sglang.mode=server": "rollout.engine=hf; set rollout.engine=sglang",
    "profile.ranks=[1]": "profile.steps=[]",
    "tracking.prometheus_port=1234": "tracking.loggers=[console, jsonl, tensorboard]",
    "tracking.project=mine": "tracking.loggers=wandb, swanlab or mlflow",
    "reward.sandbox.memory_mb=99": "reward.functions[].sandbox",
    "engine.cp_comm_type=all_gather": "actor.parallel.context_parallel_size",
    "placement.over_budget=warn": "placement.device_memory_gb=null",
    "agent.harness.time_limit_s=9": "agent.harness.command",
}
GRPO = {
    "algorithm.value_loss.clip=0.3": "algorithm.advantage.estimator=grpo; set algorithm.advantage.estimator=gae",
    "algorithm.advantage.lam=0.9": "algorithm.advantage.estimator=grpo",
}
REFUSED = {
    "teacher.path=abc": "algorithm.advantage.estimator=",
    "teacher.parallel.data_parallel_size=2": "algorithm.advantage.estimator=",
    "algorithm.advantage.distillation.coefficient=128": "algorithm.advantage.estimator=",
    "profile.roles=['128']": "has '128', but the models of the run are actor",
    "tracking.otlp_endpoint=-1": "is '-1', which is not an http or https URL",
    "tracking.otlp_endpoint=collector:4318": "is not an http or https URL",
    "tracking.prometheus_host=2147483648": "is '2147483648', which is not a host name",
    "actor.optim.eps=1e-300": "is 1e-300, which is 0 in float32",
    "algorithm.kl.coefficient=1e-200": "is 1e-200, which is 0 in float32",
    "algorithm.entropy_coefficient=-1e-60": "is -1e-60, which is 0 in float32",
    "actor.optim.weight_decay=1e300": "the largest number allowed",
}


def messages(override: str, refused: bool, *others: str) -> list[str]:
    path = str(ROOT / "configs/quickstart.yaml")
    config = load_config(PPOConfig, path, [*others, override])
    return [str(each) for each in unread_keys(config, {}, refused=refused)]


@pytest.mark.parametrize("override", [*WARNED, *GRPO])
def test_a_key_without_effect_is_a_warning(override: str) -> None:
    others = ["algorithm=grpo"] if override in GRPO else []
    (warning,) = messages(override, False, *others)
    assert warning.startswith(override.partition("=")[0])
    assert (WARNED | GRPO)[override] in warning
    assert messages(override, True, *others) == []


def test_a_key_for_images_is_a_warning_with_a_model_without_them() -> None:
    config = with_value(base(), "data.max_image_pixels", 7)
    (warning,) = unread_keys(config, DENSE, refused=False)
    assert "configs/models/Qwen3-32B (qwen3) has no vision tower; remove it" in str(warning)
    assert list(unread_keys(config, {}, refused=False)) == []  # the model is not on this machine


@pytest.mark.parametrize("override", REFUSED)
def test_nonsense_is_refused(override: str) -> None:
    config = load_config(PPOConfig, str(ROOT / "configs/quickstart.yaml"), [override])
    said = [str(each) for each in validate(config) if each.absence is None]
    assert any(REFUSED[override] in each for each in said), said


def test_keys_without_effect_for_one_reason_are_one_warning() -> None:
    config = with_value(with_value(base(), "recovery.max_restarts", 7), "recovery.wait_for_node_s", 3.0)
    (warning,) = unread_keys(config, DENSE, refused=False)
    assert str(warning) == (
        "recovery.max_restarts, recovery.wait_for_node_s, recovery.enabled: have no effect with "
        "recovery.enabled=false; set recovery.enabled=true, or remove them"
    )


def test_a_custom_function_may_read_every_key_of_its_section() -> None:
    config = with_value(base(), "algorithm.policy_loss.sapo.temperature_positive", 2.0)
    assert len(list(unread_keys(config, DENSE, refused=False))) == 1
    config = with_value(config, "algorithm.policy_loss.function", "a.py:f")
    assert list(unread_keys(config, DENSE, refused=False)) == []


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_the_runs_that_ship_have_no_key_without_effect(file: Path) -> None:
    config = load_config(schema_of(str(file)), str(file))
    architectures, _ = read_architectures(config)
    assert [
        str(each) for refused in (True, False) for each in unread_keys(config, architectures, refused=refused)
    ] == []


def test_the_command_warns_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", "configs/quickstart.yaml", "actor.optim.min_lr=1e-7"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "warning: actor.optim.min_lr, actor.optim.decay: is 1e-07, but has no effect with" in printed
