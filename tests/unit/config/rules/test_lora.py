"""Rules for adapters: what a run refuses, and where the reference is the actor's model without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.layers import simulated_layers
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import Layers, PPOConfig
from megarl.config.validate import read_architectures, validate
from megarl.plan.placement.dataflow import Item, OffloadPlan
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from tests.families import example_fields
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

RANK = "actor.lora.rank=8"
KL = "algorithm.kl.where=loss"
SEPARATE = (RANK, "actor.lora.sync=adapter", "rollout.engine=sglang")


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))


def loaded(path: str, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, path, list(overrides))


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(loaded(path, *overrides))]


def test_adapters_of_actor_and_critic_are_accepted(ppo: str) -> None:
    assert violations(ppo, RANK, "critic.lora.rank=4", "actor.lora.targets=[q_proj,mlp.gate_proj]") == []


def test_engines_can_get_adapters_separately(ppo: str) -> None:
    assert violations(ppo, *SEPARATE) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.lora.alpha=8"], "is 8, but has no effect with actor.lora.rank=null: all weights train"),
        (
            [RANK, "actor.lora.targets=[c_attn]"],
            "'c_attn' is not a projection of qwen2 that can have an adapter",
        ),
        ([RANK, "engine.layers=transformer_engine"], "adds adapters to local layers only; use auto or local"),
        (
            [RANK, "reference.megatron.transformer={}"],
            "with actor.lora, the reference is the model of actor without its adapters",
        ),
        ([RANK, "actor.lora.modules_to_save=[norm]"], "'norm' cannot train in full next to adapters"),
        ([RANK, "actor.lora.modules_to_save=[lm_head,lm_head]"], "name each module once"),
        (
            ["actor.lora.modules_to_save=[lm_head]"],
            "is [lm_head], but has no effect with actor.lora.rank=null",
        ),
        (
            ["critic.lora.rank=4", "critic.lora.modules_to_save=[lm_head]"],
            "has lm_head, but the critic has a value head, which always trains; remove it",
        ),
        (
            ["actor.lora.sync=adapter"],
            "is adapter, but has no effect with actor.lora.rank=null: all weights train",
        ),
        (
            ["critic.lora.rank=4", "critic.lora.sync=adapter"],
            "only the actor of an RL run is sent to engines",
        ),
        ([*SEPARATE, "rollout.engine=hf"], "is adapter, but the engine hf has no adapters; use merged"),
        ([*SEPARATE, "resharding.transport=folder"], "does not load adapters into a running engine"),
        ([*SEPARATE, "resharding.delta=true"], "so only adapters are sent, of which every element changes"),
    ],
)
def test_what_is_refused(ppo: str, overrides: list[str], message: str) -> None:
    assert any(message in violation for violation in violations(ppo, *overrides)), violations(ppo, *overrides)


def test_tied_embeddings_do_not_train_next_to_adapters(tmp_path: Path) -> None:
    """The embedding of a critic is not tied, because it has a value head."""
    values = ppo_values(tmp_path)
    values["model"]["path"] = str(model_folder(tmp_path / "tied", tie_word_embeddings=True))
    path = write_yaml(tmp_path / "run.yaml", values)
    overrides = [RANK, "critic.lora.rank=4", "critic.lora.modules_to_save=[embed_tokens]"]
    assert violations(path, *overrides) == []
    (found,) = violations(path, *overrides, "actor.lora.modules_to_save=[embed_tokens]")
    assert "actor.lora.modules_to_save" in found
    assert "is also its output layer (tie_word_embeddings)" in found


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "qwen2_5_vl"])
def test_families_without_adapters_are_refused_by_name(family: str, tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    folder = model_folder(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(example_fields(family)))
    values["model"]["path"] = str(folder)
    values["critic"]["model"] = {"path": str(tmp_path / "model")}
    found = violations(write_yaml(tmp_path / "run.yaml", values), RANK)
    named = [line for line in found if line.startswith("actor.lora.rank") and family in line]
    assert len(named) == 1, found
    assert "cannot have" in named[0] or "not supported yet" in named[0]


def test_adapters_of_experts_are_not_sent_separately(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    folder = model_folder(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(example_fields("qwen3_moe")))
    values["model"]["path"] = str(folder)
    values["critic"]["model"] = {"path": str(tmp_path / "model")}
    path = write_yaml(tmp_path / "run.yaml", values)

    found = [line for line in violations(path, *SEPARATE) if "actor.lora.sync" in line]
    assert [line.count("of the experts of qwen3_moe") for line in found] == [1, 1, 1], found
    attention = violations(path, *SEPARATE, "actor.lora.targets=[q_proj, k_proj, v_proj, o_proj]")
    assert not [line for line in attention if "lora" in line]


def test_adapters_of_latent_attention_are_sent_merged(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    folder = model_folder(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(example_fields("deepseek_v3")))
    values["model"]["path"] = str(folder)
    values["critic"]["model"] = {"path": str(tmp_path / "model")}
    path = write_yaml(tmp_path / "run.yaml", values)
    assert not [line for line in violations(path, RANK) if "lora" in line]
    (found,) = [line for line in violations(path, *SEPARATE) if "lora" in line]
    assert "which has latent attention, merged only; use merged" in found


@pytest.mark.parametrize("strategy", ["fully_collocate", "stand_alone"])
def test_the_reference_is_the_actors_model_without_adapters(ppo: str, strategy: str) -> None:
    placed = f"placement.strategy={strategy}"
    whole = loaded(ppo, placed)
    config = loaded(ppo, placed, RANK)
    (reference,) = [role for role in model_roles(config) if role.name == "reference"]
    assert reference.base_of == "actor"
    plan = plan_placement(config)
    assert plan.group_of("reference") is plan.group_of("actor")
    assert OffloadPlan(plan).phase("ref").needs == {Item("actor", "parameters")}

    # It has no weights of its own, on any device and in any phase.
    devices = plan_memory(config, plan, read_architectures(config)[0])
    usages = [
        phase["reference"] for device in devices for phase in device.phases.values() if "reference" in phase
    ]
    assert usages
    assert not any(usage.parameters for usage in usages)
    copies = plan_memory(whole, plan_placement(whole), read_architectures(whole)[0])
    assert any(
        phase["reference"].parameters
        for device in copies
        for phase in device.phases.values()
        if "reference" in phase
    )

    # A reference with a folder of its own is a model of its own.
    other = loaded(ppo, placed, RANK, f"reference.path={whole.model.path}")
    assert all(role.base_of is None for role in model_roles(other))


def test_layers_of_models_with_adapters_are_local(ppo: str) -> None:
    assert simulated_layers(loaded(ppo, RANK, "model.dtype=bfloat16")).layers is Layers.local
