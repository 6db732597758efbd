"""Dry runs with options of Megatron-Core: memory that the plan counts, and combinations that Megatron refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megarl.config.layers import has_transformer_engine_modules
from megarl.config.roles import model_roles
from megarl.config.schema import Layers, MegatronConfig, ParallelConfig, PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.record import RankRecord, RankRequest, predicted_memory
from tests.unit.rehearse.dry_run.memory_cases import beyond_bounds
from tests.unit.rehearse.dry_run.runs import SMALL, TINY, ppo, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

EXPERTS = {
    **TINY,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
DISTRIBUTED = ParallelConfig(
    tensor_parallel_size=2, data_parallel_size=2, sequence_parallel=True, expert_parallel_size=2
)
# Presets that the stub of Transformer Engine can simulate. FP8 needs more of its kernels, deepep the package.
MIXED = MegatronConfig(optimizer={"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"})
SIMULATED = ("fused_experts", "precise_optimizer", "bf16_gradients")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """A model whose state is larger than its activations."""
    folder: Path = tmp_path_factory.mktemp("options") / "model"
    return ppo(save_config(folder, {**TINY, "vocab_size": 4096}), SMALL)


def with_options(run: PPOConfig, options: MegatronConfig) -> PPOConfig:
    return replace(run, actor=replace(run.actor, megatron=options))


def rehearse(*configs: PPOConfig) -> list[RankRecord]:
    return list(rehearse_ranks([RankRequest(config, "actor", 0, 2) for config in configs], 1))


def problems(config: PPOConfig, record: RankRecord) -> list[str]:
    role = model_roles(config)[0]
    return beyond_bounds(record, predicted_memory(config, role, read_architectures(config)[0]["actor"], 0))


def test_bfloat16_gradients_are_counted(run: PPOConfig) -> None:
    """The gradient buffers shrink by two bytes per parameter."""
    half = with_options(run, MegatronConfig(ddp={"grad_reduce_in_fp32": False}))
    usual, shrunk = rehearse(run, half)
    assert (usual.error, shrunk.error) == (None, None)

    # Megatron pads its buffers.
    built, smaller = (record.phases[0].held for record in (usual, shrunk))
    assert built - smaller == pytest.approx(2 * usual.num_parameters, rel=0.02)


def test_what_megatron_refuses_is_found(run: PPOConfig) -> None:
    """The flush of a warm-up requires interleaved stages, which this layout does not have."""
    (record,) = rehearse(
        with_options(run, MegatronConfig(transformer={"overlap_p2p_comm_warmup_flush": True}))
    )
    assert record.error is not None
    assert "overlap_p2p_comm_warmup_flush=True" in record.error
    assert record.phases == ()


# ---- with Transformer Engine's Python modules


def preset(name: str) -> MegatronConfig:
    return MegatronConfig(**yaml.safe_load((CONFIGS_DIR / "megatron" / f"{name}.yaml").read_text()))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    if not has_transformer_engine_modules():
        pytest.skip("transformer-engine is not installed (see docs/install.md)")
    folder: Path = tmp_path_factory.mktemp("experts") / "model"
    return ppo(save_config(folder, EXPERTS), DISTRIBUTED, layers=Layers.transformer_engine)


@pytest.fixture(scope="module")
def simulated(with_experts: PPOConfig) -> dict[str, RankRecord]:
    """Return the records of the run without options, with each preset, and with a mistake in the moments."""
    options = {"none": MegatronConfig(), **{name: preset(name) for name in SIMULATED}}
    options["mixed"] = MIXED
    records = rehearse(*(with_options(with_experts, each) for each in options.values()))
    return dict(zip(options, records, strict=True))


@pytest.mark.parametrize("name", SIMULATED)
def test_presets_run_with_transformer_engine(
    name: str, with_experts: PPOConfig, simulated: dict[str, RankRecord]
) -> None:
    """Every phase runs, with the collectives of the run without the preset, and within the memory plan."""
    record, usual = simulated[name], simulated["none"]
    assert record.error is None
    assert [phase.name for phase in record.phases] == [phase.name for phase in usual.phases]
    for one, other in zip(record.phases, usual.phases, strict=True):
        assert [call.kind for call in one.collectives] == [call.kind for call in other.collectives]
    # Transformer Engine's Adam copies one parameter at a time while it is built, when there is room.
    found = problems(with_options(with_experts, preset(name)), record)
    assert [each for each in found if not each.startswith("build: peak")] == []


def test_the_plan_of_another_dtype_is_wrong(
    with_experts: PPOConfig, simulated: dict[str, RankRecord]
) -> None:
    for name in ("precise_optimizer", "bf16_gradients"):
        assert [each for each in problems(with_experts, simulated[name]) if "held" in each] != []


def test_moments_of_different_dtypes_are_copied_in_the_step(
    with_experts: PPOConfig, simulated: dict[str, RankRecord]
) -> None:
    found = problems(with_options(with_experts, MIXED), simulated["mixed"])
    assert [each for each in found if not each.startswith("build: peak")] == []


def test_bfloat16_moments_are_counted(simulated: dict[str, RankRecord]) -> None:
    """The state shrinks by four bytes per parameter, which two replicas and the ranks of experts share."""
    usual, precise = (simulated[name] for name in ("none", "precise_optimizer"))
    shrunk = usual.phases[0].held - precise.phases[0].held
    assert shrunk == pytest.approx(4 * usual.num_parameters / 2, rel=0.25)
    assert shrunk > usual.num_parameters
