"""The presets of configs/megatron in shipped configurations: `megarl check`, and the memory that they plan."""

from __future__ import annotations

import pytest

from megarl.cli.main import main
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError
from megarl.models.counts import num_parameters
from megarl.plan.placement.model_state import model_state
from megarl.plan.placement.plan import plan_placement

DENSE = "configs/qwen2.5_7b_grpo.yaml"
EXPERTS = "configs/qwen3_30b_a3b_grpo.yaml"
RUN_OF = {
    "fused_experts": EXPERTS,
    "deepep": EXPERTS,
    "precise_optimizer": DENSE,
    "bf16_gradients": DENSE,
    "fp8_blockwise": DENSE,
}


def state_bytes(run: str, *overrides: str) -> int:
    config = load_for_plan(PPOConfig, run, overrides).config
    return model_state(
        model_roles(config)[0], read_architectures(config)[0]["actor"], config.model.dtype, 0
    ).total


def test_every_preset_has_a_run() -> None:
    assert sorted(RUN_OF) == sorted(file.stem for file in (CONFIGS_DIR / "megatron").glob("*.yaml"))


@pytest.mark.parametrize("preset", RUN_OF)
def test_presets_fit_a_shipped_run(preset: str) -> None:
    checked = load_for_plan(PPOConfig, RUN_OF[preset], [f"actor.megatron={preset}"])
    assert checked.config.actor.megatron.transformer or preset in ("precise_optimizer", "bf16_gradients")


@pytest.mark.parametrize("num_ranks", [1, 12])
def test_deepep_is_refused_for_ranks_that_it_has_no_buffers_for(num_ranks: int) -> None:
    sizes = [f"{role}.parallel.expert_parallel_size={num_ranks}" for role in ("actor", "reference")]
    with pytest.raises(ConfigError, match="but DeepEP has buffers for 2, 4, 8, 16, 24, 32, 48, 64, 96, 128,"):
        load_for_plan(PPOConfig, EXPERTS, ["actor.megatron=deepep", *sizes])


ATTENTION = "actor.megatron.transformer.attention_backend=flash"
OWN_OPTIONS = "reference.megatron.transformer={}"  # instead of the actor's
PPO = "configs/qwen2.5_7b_ppo.yaml"


@pytest.mark.parametrize(
    ("run", "overrides", "said"),
    [
        (
            DENSE,
            (ATTENTION, OWN_OPTIONS),
            "are flash and auto, but actor and reference share their processes",
        ),
        (
            DENSE,
            ("actor.megatron.transformer.flash_attention_version=3", OWN_OPTIONS),
            "are 3 and null, but actor and reference share",
        ),
        (
            PPO,
            (ATTENTION, "placement.strategy=fully_collocate"),
            "but actor and critic share their processes",
        ),
    ],
)
def test_roles_in_one_process_have_one_kind_of_attention(
    run: str, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_placement(load_for_plan(PPOConfig, run, overrides).config)


@pytest.mark.parametrize(
    ("run", "overrides"),
    [
        (DENSE, (ATTENTION,)),
        (DENSE, ("actor.megatron.transformer.attention_backend=auto", OWN_OPTIONS)),
        (PPO, (ATTENTION,)),
    ],
)
def test_the_reference_has_the_attention_of_the_actor_and_a_critic_its_own(
    run: str, overrides: tuple[str, ...]
) -> None:
    assert plan_placement(load_for_plan(PPOConfig, run, overrides).config).num_devices == 8


def test_the_plan_counts_moments_and_gradients() -> None:
    """Tensor parallelism of 2 and four replicas, which share the moments."""
    config = load_for_plan(PPOConfig, DENSE, []).config
    parallel = config.actor.parallel
    assert (parallel.tensor_parallel_size, parallel.num_copies) == (2, 4)
    usual = state_bytes(DENSE)
    # Norms and the padding of the vocabulary are on both ranks.
    held = num_parameters(read_architectures(config)[0]["actor"]) / 2
    assert usual - state_bytes(DENSE, "actor.megatron=precise_optimizer") == pytest.approx(
        4 * held / 4, rel=1e-3
    )
    assert usual - state_bytes(DENSE, "actor.megatron=bf16_gradients") == pytest.approx(2 * held, rel=1e-3)


def test_check_shows_options_and_what_the_plan_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", "--all", DENSE, "actor.megatron=fp8_blockwise"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # The reference computes with the options of the actor.
    rows = [line.split() for line in lines if "fp8_recipe" in line and "requires" not in line]
    assert [(row[0], *row[2:4]) for row in rows] == [
        (role, "blockwise", "actor.megatron.transformer") for role in ("actor", "reference")
    ]
    (warning,) = [line for line in lines if line.startswith("warning: the memory plan of actor ")]
    assert "fp8" in warning


def test_without_options_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", DENSE]) == 0
    assert "megatron" not in capsys.readouterr().out.lower()
