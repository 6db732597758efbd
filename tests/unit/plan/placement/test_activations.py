"""The working memory of a model, by hand. rehearse/dry_run/test_memory.py and engine/test_memory_plan.py measure it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.batch_arithmetic import Row
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import (
    CPCommType,
    Device,
    DType,
    EngineConfig,
    Layers,
    ModelConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
)
from megarl.config.shipped import CONFIGS_DIR
from megarl.models.families import read_architecture
from megarl.models.latent import LATENT_ATTENTION
from megarl.models.sparse_attention import SPARSE_ATTENTION
from megarl.plan.placement.activations import RoleMemory, role_memory
from megarl.plan.placement.model_state import model_state, step_memory
from megarl.plan.placement.part_activations import ACTIVATIONS, LayerSizes
from tests.unit.plan.placement.test_memory import QWEN_7B, PlacementStrategy, config

# Tokens of a micro-batch, which is two rows of 2,048.
TOKENS = 4096
HIDDEN = 3584
# With four tensor-parallel ranks.
QUERY = 28 * 128 // 4
KEY = 4 * 128 // 4
GATE = 18944 // 4
ROWS = 152064 // 4
# Inputs and outputs of the norms; queries, keys and values, the first two RoPE-rotated, values twice;
# attention outputs and a float32 number for each of seven heads; gate, up and their product.
LAYER = 4 * HIDDEN + 3 * QUERY + 4 * KEY + 2 * 7 + 3 * GATE
BATCH = 128 * 2048 * 64  # the bytes of all rows of the step
ANGLES = 2048 * 128 * 4


def of_actor(run: PPOConfig) -> RoleMemory:
    role = model_roles(run)[0]
    return role_memory(run, role, QWEN_7B, 0)


def with_recompute(how: Recompute, **settings: object) -> PPOConfig:
    run = config(PlacementStrategy.stand_alone)
    return replace(run, actor=replace(run.actor, recompute=how, **settings))  # type: ignore[arg-type]


def test_recompute_keeps_one_hidden_state_per_layer_and_token() -> None:
    """The peak is in the head.

    It consists of scored hidden states and their gradient, the gradient of all, the output layer's gradient
    from 1,024 tokens, two chunks of these logits, and a gradient of 2 bytes.
    """
    head = TOKENS * 3 * HIDDEN * 2 + ROWS * HIDDEN * 2 + 1024 * ROWS * (2 * 4 + 2)
    none, full = (of_actor(with_recompute(how)).train for how in (Recompute.none, Recompute.full))
    assert none == TOKENS * (28 * LAYER + HIDDEN) * 2 + head + BATCH + ANGLES
    assert full == TOKENS * (28 * HIDDEN + HIDDEN) * 2 + head + BATCH + ANGLES
    half = of_actor(with_recompute(Recompute.full, recompute_num_layers=14)).train
    assert half - full == TOKENS * 14 * (LAYER - HIDDEN) * 2


@pytest.mark.parametrize(
    ("module", "saved"), [(RecomputeModule.core_attn, 0), (RecomputeModule.mlp, 28 * 3 * GATE)]
)
def test_selective_recomputation_saves_what_its_modules_keep(module: RecomputeModule, saved: int) -> None:
    """Attention by a kernel saves nothing inside itself."""
    none, selective = (
        of_actor(with_recompute(how, recompute_modules=[module])).train
        for how in (Recompute.none, Recompute.selective)
    )
    assert none - selective == TOKENS * saved * 2


def test_attention_of_float32_keeps_a_number_for_each_pair_of_tokens() -> None:
    """Seven heads with 2,048 keys per token; and queries, expanded keys, values and outputs."""
    run = with_recompute(Recompute.none)
    run = replace(run, model=ModelConfig(path="policy", dtype=DType.float32))
    again = replace(run, actor=replace(run.actor, recompute=Recompute.selective))
    kept = 28 * (4 * QUERY + 7 * 2048 - (3 * QUERY + 4 * KEY + 2 * 7))
    assert of_actor(run).train - of_actor(again).train >= TOKENS * kept * 4 - 3 * TOKENS * 7 * 2048 * 4


def test_a_cpu_keeps_more() -> None:
    """Norms are in float32, and the activation of the MLP is saved separately."""
    run = with_recompute(Recompute.none)
    assert of_actor(replace(run, device=Device.cpu)).train > of_actor(run).train + TOKENS * 28 * 2 * GATE * 2


def test_sequence_parallelism_cuts_what_layers_hand_on() -> None:
    """Three quarters of the inputs of 28 layers, of the last output and of the gradient of all are elsewhere.

    The buffer in which ranks gather the tokens stays.
    """
    run = with_recompute(Recompute.full)
    cut = replace(run, actor=replace(run.actor, parallel=replace(run.actor.parallel, sequence_parallel=True)))
    whole = of_actor(run)
    parts = of_actor(cut)
    assert parts.stays - whole.stays == TOKENS * HIDDEN * 2
    assert whole.train - parts.train == TOKENS * 2 * (30 * HIDDEN * 3 // 4 - HIDDEN)


def test_a_step_takes_the_roots_of_all_second_moments() -> None:
    run = with_recompute(Recompute.full)
    replicas = replace(
        run, actor=replace(run.actor, parallel=replace(run.actor.parallel, data_parallel_size=2))
    )
    count = model_state(model_roles(run)[0], QWEN_7B, DType.bfloat16, 0).gradients // 4
    assert of_actor(run).step == 4 * count + ANGLES
    assert of_actor(replicas).step == 2 * count + ANGLES
    assert of_actor(replace(run, device=Device.cpu)).step == ANGLES


@pytest.mark.parametrize(
    ("virtual", "kept", "received"),
    [
        (None, {0: 4 * (7 + 1), 3: 7 + 1}, {0: 0, 3: 2}),  # micro-batches with 7 layers and their output
        (7, {0: (2 * 3 + 6 * 4 + 1) * 2, 3: (6 * 4 + 1) * 2}, {0: 2 * 6, 3: 2 * 7}),  # and with one
    ],
)
def test_a_stage_keeps_the_micro_batches_under_way(
    virtual: int | None, kept: dict[int, int], received: dict[int, int]
) -> None:
    """A layer is recomputed: its output, its gradient, in the first stage the gradient from the next, and four times gate."""
    run = config(PlacementStrategy.stand_alone)
    parallel = ParallelConfig(pipeline_parallel_size=4, virtual_pipeline_parallel_size=virtual)
    run = replace(run, critic=replace(run.critic, parallel=parallel, recompute=Recompute.full))
    critic = next(role for role in model_roles(run) if role.name == "critic")
    layer = 4 * HIDDEN + 3 * 28 * 128 + 4 * 4 * 128 + 2 * 28 + 3 * 18944

    for stage in (0, 3):
        work = role_memory(run, critic, QWEN_7B, stage)
        assert work.stays == TOKENS * received[stage] * HIDDEN * 2 + (virtual or 1) * ANGLES
        moment = layer + (3 if stage == 0 else 2) * HIDDEN + 4 * 18944
        assert work.train - work.stays == TOKENS * (kept[stage] * HIDDEN + moment) * 2 + BATCH


def test_fused_layers_keep_a_workspace_and_a_tensor_of_each_shape() -> None:
    """Queries, keys and values; attention's output; gate and up; down. There are no square roots of moments."""
    run = with_recompute(Recompute.full)
    local = of_actor(run)
    fused = of_actor(replace(run, engine=EngineConfig(layers=Layers.transformer_engine)))
    shapes = HIDDEN * (QUERY + 2 * KEY + QUERY + 2 * GATE + GATE)
    assert fused.stays - local.stays == 32 * 2**20 + 1024 + 2 * shapes
    assert fused.step == fused.stays
    assert local.step > local.stays

    # What the run's machines decide counts as the larger of the two.
    either = of_actor(replace(run, engine=EngineConfig(layers=Layers.auto)))
    assert (either.stays, either.step - either.stays) == (fused.stays, local.step - local.stays)


def test_keys_that_context_parallel_ranks_keep() -> None:
    """Qwen3-8B with rows of 128k tokens on 2 x 8 ranks, 16,384 tokens each.

    In a ring, a rank keeps its own keys; if two rows share a prompt, those of all ranks; and otherwise those
    up to each of its two of 16 chunks, 8.5 for each of its tokens.
    """
    run = load_config(PPOConfig, str(CONFIGS_DIR / "qwen3_8b_grpo_128k.yaml"), ["actor.recompute=none"])
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "Qwen3-8B-128k"))
    actor = model_roles(run)[0]
    tokens, query, key = 16384, 16 * 128, 4 * 128

    def train(kind: Layers, exchange: CPCommType = CPCommType.auto, shares: bool | None = False) -> int:
        engine = replace(run.engine, layers=kind, cp_comm_type=exchange)
        work = role_memory(replace(run, engine=engine), actor, architecture, 0, shares=shares)
        return work.train - work.stays

    ring = train(Layers.transformer_engine)
    for saved, others in (
        (8.5, train(Layers.transformer_engine, CPCommType.all_gather)),
        (8, train(Layers.transformer_engine, shares=True)),
        # As without a shared prompt, because rows of the largest micro-batch may share one.
        (8.5, train(Layers.transformer_engine, CPCommType.all_gather, shares=True)),
    ):
        assert others - ring == 36 * 2 * key * (saved - 1) * tokens * 2

    # By default, the larger peak counts.
    assert train(Layers.transformer_engine, shares=None) == train(Layers.transformer_engine, shares=True)
    gathered = train(Layers.transformer_engine, CPCommType.all_gather)
    assert train(Layers.transformer_engine, CPCommType.all_gather, shares=None) == gathered

    # The norm of the keys keeps a copy of them, or the projection that they are a part of.
    assert train(Layers.local) - gathered == 36 * tokens * (query + key) * 2


def test_gradients_that_tensor_parallel_ranks_sum_are_copied_after_the_last_micro_batch() -> None:
    """DeepSeek-V3: norms and down projections in 61 layers, routers with a bias in 58, and the last norm."""
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "DeepSeek-V3.1-BF16"), True)
    run = load_config(PPOConfig, str(CONFIGS_DIR / "deepseek_v3_671b_grpo.yaml"))
    actor = model_roles(run)[0]
    reduced, _ = step_memory(run, actor, architecture, 0)
    in_each_layer = 7168 * (1536 + 512 + 64) + 1536 + 512 + 2 * 7168
    assert reduced == 4 * (61 * in_each_layer + 58 * 256 * (7168 + 1) + 7168)

    # It replaces the activations, which are free by then.
    work = role_memory(run, actor, architecture, 0)
    assert work.train == work.stays + work.trained_batch + reduced

    # If nothing is recomputed, the activations need more.
    kept = role_memory(run, replace(actor, recomputation=Recomputation()), architecture, 0)
    assert kept.train > kept.stays + kept.trained_batch + reduced

    # Without sequence parallelism, every rank has the gradients of all tokens.
    alone = replace(actor, parallel=replace(actor.parallel, sequence_parallel=False))
    assert step_memory(run, alone, architecture, 0)[0] == 0
    activations = role_memory(run, alone, architecture, 0)
    assert activations.train > activations.stays + activations.trained_batch


@pytest.mark.parametrize(
    ("core_again", "of_core"), [(False, 4 * 16 * 192 + 16 * 128 + 2 * 16), (True, 2 * 16 * (192 + 128))]
)
def test_latent_attention_keeps_padded_values(core_again: bool, of_core: int) -> None:
    """DeepSeek-V3 on eight tensor-parallel ranks with sequence parallelism.

    Saved are both latent vectors with and without their norms, sharded with the tokens; the shared key of all
    tokens; queries, keys, values and outputs of 16 heads of 192 numbers; the outputs' 128 numbers; and a
    float32 number for each head. If the core is computed again: queries, keys, values and outputs, unpadded.
    """
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "DeepSeek-V3.1-BF16"), True)
    run = load_config(PPOConfig, str(CONFIGS_DIR / "deepseek_v3_671b_grpo.yaml"))
    how = Recomputation(Recompute.selective, (RecomputeModule.core_attn,) if core_again else ())
    parallel = ParallelConfig(tensor_parallel_size=8, sequence_parallel=True)
    actor = replace(model_roles(run)[0], parallel=parallel, recomputation=how)
    vectors = 2 * (1536 + 512) // 8 + 64
    layer = LayerSizes(run, actor, architecture, [Row(100, 100, 0)], uneven=False)
    assert ACTIVATIONS[LATENT_ATTENTION](layer).kept == vectors + of_core


@pytest.mark.parametrize("core_again", [False, True])
def test_an_indexer_that_learns_keeps_its_inputs_and_gradients(core_again: bool) -> None:
    """DeepSeek-V3.2 on eight tensor-parallel ranks, all of which have the whole indexer.

    Saved are hidden states in bfloat16 and float32, the latent vectors of queries, and 64 queries of 128 numbers,
    a key and 64 float32 weights, each with a gradient. If the core is computed again, so are they.
    """
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "DeepSeek-V3.2-BF16"))
    run = load_config(PPOConfig, str(CONFIGS_DIR / "deepseek_v3_671b_grpo.yaml"))
    how = Recomputation(Recompute.selective, (RecomputeModule.core_attn,) if core_again else ())
    parallel = ParallelConfig(tensor_parallel_size=8, sequence_parallel=True)
    actor = replace(model_roles(run)[0], parallel=parallel, recomputation=how)

    def kept(indexer_loss: float) -> tuple[int, int]:
        trained = replace(actor, indexer_loss=indexer_loss).trained(architecture)
        layer = LayerSizes(run, actor, trained, [Row(9216, 1024, 0)], uneven=False)
        memory = ACTIVATIONS[SPARSE_ATTENTION](layer)
        return memory.kept, memory.backward

    more, backward = (loss - frozen for loss, frozen in zip(kept(0.1), kept(0), strict=True))
    saved = 3 * 7168 + 1536 + 2 * (64 * 128 + 128) + 2 * 2 * 64
    assert more == saved * (not core_again)
    assert backward > saved * core_again


def test_frozen_indexers_have_no_gradients() -> None:
    """DeepSeek-V3.2 on eight tensor-parallel ranks. Selection biases of 58 layers are not counted either."""
    architecture = read_architecture(str(CONFIGS_DIR / "models" / "DeepSeek-V3.2-BF16"))
    run = load_config(PPOConfig, str(CONFIGS_DIR / "deepseek_v3_671b_grpo.yaml"))
    actor = model_roles(run)[0]

    def state(indexer_loss: float) -> tuple[int, int]:
        trained = replace(actor, indexer_loss=indexer_loss).trained(architecture)
        found = model_state(actor, trained, DType.bfloat16, 0)
        return found.parameters, found.gradients

    (parameters, gradients), (held, of_frozen) = state(0.1), state(0)
    of_layer = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128
    assert parameters == held
    assert gradients - of_frozen == 4 * (61 * of_layer + 58 * 256)
