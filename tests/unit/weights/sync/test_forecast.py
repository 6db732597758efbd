"""Test the forecast of a weight sync before a run starts, against hand-computed numbers and the plan of the
run itself."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from megarl.config.schema import (
    ActorConfig,
    Device,
    EngineDType,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReshardingConfig,
    RolloutConfig,
    RolloutEngineKind,
    Transport,
)
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.models.tensor_table import weights_of
from megarl.plan.placement.plan import plan_placement
from megarl.weights.plan import TensorSlices
from megarl.weights.shard_layout import layouts_of
from megarl.weights.shards import slices_by_rank
from megarl.weights.sync.forecast import WeightForecast, engine_slices, forecast_weights, stage_slices
from tests.unit.weights.transfers import numel_of

HIDDEN = 32
FEED_FORWARD = 64
HEADS = 4
HEAD_DIM = 8
VOCABULARY = 128
LAYERS = 4
QWEN = Architecture(
    model_type="qwen2",
    num_hidden_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=FEED_FORWARD,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
)
NORMS = (2 * LAYERS + 1) * HIDDEN  # elements that every rank of an engine needs


def config(
    strategy: PlacementStrategy,
    parallel: ParallelConfig,
    num_replicas: int,
    engine_size: int,
    bucket_mb: float = 1.0,
) -> PPOConfig:
    return PPOConfig(
        model=ModelConfig(path="model"),
        actor=ActorConfig(parallel=parallel),
        rollout=RolloutConfig(
            engine=RolloutEngineKind.sglang, num_replicas=num_replicas, tensor_parallel_size=engine_size
        ),
        placement=PlacementConfig(strategy=strategy),
        resharding=ReshardingConfig(bucket_mb=bucket_mb),
        device=Device.cuda,
    )


def forecast(of: PPOConfig) -> WeightForecast:
    found = forecast_weights(of, plan_placement(of), QWEN)
    assert found is not None
    return found


def test_engines_on_devices_of_their_own_get_the_model_once_each_from_trainers_that_give_the_same() -> None:
    of = config(
        PlacementStrategy.split_collocate, ParallelConfig(data_parallel_size=4), num_replicas=2, engine_size=1
    )
    found = forecast(of)
    model_bytes = num_parameters(QWEN) * 2
    assert found.received == [model_bytes] * 2
    assert found.sent == [model_bytes // 2] * 4
    assert found.sent_away == found.sent
    assert found.message_bytes == 2**20


def test_engines_beside_trainers_that_hold_everything_get_it_from_there() -> None:
    of = config(PlacementStrategy.hybrid, ParallelConfig(data_parallel_size=2), num_replicas=2, engine_size=1)
    found = forecast(of)
    model_bytes = num_parameters(QWEN) * 2
    assert found.received == found.sent == [model_bytes] * 2
    assert found.sent_away == [0, 0]
    assert found.message_bytes == 2**19  # four slots of two buckets
    assert found.plan.num_rounds == -(-model_bytes // 2**19)


def test_engines_beside_stages_get_the_other_stages_from_other_devices() -> None:
    """Two stages share devices with one engine of one rank each: half of the model crosses over in each
    direction."""
    of = config(
        PlacementStrategy.hybrid, ParallelConfig(pipeline_parallel_size=2), num_replicas=2, engine_size=1
    )
    found = forecast(of)
    first, second = (numel_of(slices) * found.element_bytes for slices in _held(of.actor.parallel))
    assert found.sent == [2 * first, 2 * second]
    assert found.sent_away == [first, second]


def _held(parallel: ParallelConfig) -> list[TensorSlices]:
    return list(slices_by_rank(QWEN, layouts_of(QWEN, parallel)))


def test_several_ranks_of_an_engine_keep_their_part_and_all_norms() -> None:
    kept = [numel_of(slices) for slices in engine_slices(QWEN, 2)]
    assert kept == [(num_parameters(QWEN) - NORMS) // 2 + NORMS] * 2


def test_more_ranks_than_key_value_heads_keep_each_head_on_several() -> None:
    slices = engine_slices(QWEN, 4)
    layer = "model.layers.3.self_attn"
    rows = [
        [
            (tensor_slice.starts[0], tensor_slice.stops[0])
            for tensor_slice in of_rank[f"{layer}.k_proj.weight"]
        ]
        for of_rank in slices
    ]
    assert rows == [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]]
    queries = [
        [
            (tensor_slice.starts[0], tensor_slice.stops[0])
            for tensor_slice in of_rank[f"{layer}.q_proj.weight"]
        ]
        for of_rank in slices
    ]
    assert queries == [[(8 * rank, 8 * rank + 8)] for rank in range(4)]
    assert [
        tensor_slice.starts[1] for of_rank in slices for tensor_slice in of_rank[f"{layer}.o_proj.weight"]
    ] == [0, 8, 16, 24]

    # both heads of keys and of values, with their biases
    key_value = LAYERS * 2 * 2 * HEAD_DIM * (HIDDEN + 1)
    kept = (num_parameters(QWEN) - NORMS - key_value) // 4 + key_value // 2 + NORMS
    assert [numel_of(of_rank) for of_rank in slices] == [kept] * 4
    of = config(
        PlacementStrategy.split_collocate,
        ParallelConfig(tensor_parallel_size=2),
        num_replicas=1,
        engine_size=4,
    )
    assert forecast(of).received == [kept * forecast(of).element_bytes] * 4


def test_every_tensor_is_needed_whole_by_the_ranks_together() -> None:
    shapes = {tensor.name: tensor.shape for weight in weights_of(QWEN, "lm") for tensor in weight.tensors}
    for size in (1, 2, 4):
        needed = {
            name: {tensor_slice for slices in engine_slices(QWEN, size) for tensor_slice in slices[name]}
            for name in shapes
        }
        assert {
            name: sum(tensor_slice.volume for tensor_slice in slices) for name, slices in needed.items()
        } == {n: prod(s) for n, s in shapes.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_of_an_engine_gets_its_layers_and_its_end_of_the_model(tied: bool) -> None:
    """Three stages of two ranks for four layers: the last one has two. The ends have half of the vocabulary."""
    model = replace(QWEN, tie_word_embeddings=tied)
    needed = stage_slices(model, engine_slices(model, 2), 3)
    layers = [{int(name.split(".")[2]) for name in slices if "layers" in name} for slices in needed]
    assert layers == [{0}, {0}, {1}, {1}, {2, 3}, {2, 3}]

    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    ends = [{name for name in slices if "layers" not in name} for slices in needed]
    assert ends[0] == ends[1] == {"model.embed_tokens.weight"}
    assert ends[2] == ends[3] == set()
    assert ends[4] == ends[5] == {head, "model.norm.weight"}
    assert numel_of({head: needed[4][head]}) == VOCABULARY * HIDDEN // 2
    assert needed[4][head] != needed[5][head]


def test_a_sync_with_stages_sends_each_rank_its_part_once() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    of = config(PlacementStrategy.split_collocate, parallel, num_replicas=1, engine_size=1)
    of = replace(of, rollout=replace(of.rollout, pipeline_parallel_size=4))
    found = forecast(of)
    assert sum(found.received) == num_parameters(QWEN) * 2
    layer = (num_parameters(QWEN) - 2 * VOCABULARY * HIDDEN - HIDDEN) // LAYERS
    ends = (VOCABULARY * HIDDEN, 0, 0, VOCABULARY * HIDDEN + HIDDEN)
    assert found.received == [2 * (layer + end) for end in ends]


def test_messages_are_small_on_a_cpu_where_memory_is_shared() -> None:
    of = config(PlacementStrategy.hybrid, ParallelConfig(), num_replicas=1, engine_size=1, bucket_mb=512)
    on_cpu = replace(of, device=Device.cpu)
    assert forecast(of).message_bytes == 2**28
    assert forecast(on_cpu).message_bytes == 4 * 2**20


def test_a_rank_keeps_what_it_sends_to_whole_engines_once() -> None:
    """Each of two trainers sends to a whole engine, then each to two, and then to one and a half."""
    parallel = ParallelConfig(data_parallel_size=2)
    size = 2 * num_parameters(QWEN)
    for num_replicas, kept in ((2, size), (4, size), (3, size + size // 2)):
        found = forecast(config(PlacementStrategy.stand_alone, parallel, num_replicas, 1))
        assert found.acknowledged == [kept, kept]


def test_files_have_no_forecast() -> None:
    of = config(PlacementStrategy.hybrid, ParallelConfig(), num_replicas=1, engine_size=1)
    of = replace(of, resharding=ReshardingConfig(transport=Transport.folder))
    assert forecast_weights(of, plan_placement(of), QWEN) is None


def test_engines_in_fp8_get_one_byte_for_most_elements_and_scales() -> None:
    of = config(
        PlacementStrategy.split_collocate, ParallelConfig(data_parallel_size=4), num_replicas=2, engine_size=1
    )
    found = forecast(replace(of, rollout=replace(of.rollout, dtype=EngineDType.fp8)))
    # Every matrix of a layer is smaller than a block, so that it has one scale of four bytes.
    width = HEADS * HEAD_DIM
    matrices = LAYERS * (2 * width * HIDDEN + width * HIDDEN + 3 * FEED_FORWARD * HIDDEN)
    expected = 2 * num_parameters(QWEN) - matrices + LAYERS * 7 * 4
    assert found.received == [expected] * 2
    assert sum(found.sent) == 2 * expected
    assert found.element_bytes == 1
