from dataclasses import replace
from itertools import chain

import pytest

from megarl.config.schema import ParallelConfig
from megarl.config.schema.models import balanced_layout
from megarl.models.families import FAMILIES
from megarl.models.tensor_table import weights_of
from megarl.roles.megatron_worker import megatron_mesh
from megarl.weights.shard_layout import (
    ShardLayout,
    check_coverage,
    layouts_of,
    model_layouts,
    padding,
    pieces,
    rank_pieces,
    shard_shapes,
)
from megarl.weights.tensors import TensorSlice, WeightTransferError
from tests.unit.weights.models import PADDED_VOCAB, architecture_of

LAYOUTS = [
    (1, 1, None),
    (2, 1, None),
    (4, 1, None),
    (1, 2, None),
    (2, 2, None),
    (4, 2, None),
    (1, 2, 2),
    (2, 2, 2),
]


def whole_model(architecture, tensor_parallel_size=1, pipeline=1, virtual=None) -> tuple[ShardLayout, ...]:
    return model_layouts(
        architecture,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline,
        virtual_pipeline_parallel_size=virtual,
        padded_vocab_size=PADDED_VOCAB,
    )


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_holds_every_tensor_exactly_once(family: str, tied: bool, head: str) -> None:
    architecture = architecture_of(family, tied=tied)
    for sizes in LAYOUTS:
        check_coverage(
            architecture,
            [rank_pieces(architecture, layout, head) for layout in whole_model(architecture, *sizes)],
            head,
        )


def test_planted_faults_are_named() -> None:
    architecture = architecture_of("qwen2", tied=True)
    layouts = whole_model(architecture, 2, 2)
    good = [rank_pieces(architecture, layout) for layout in layouts]

    with pytest.raises(
        WeightTransferError,
        match=r"model\.layers\.0\.self_attn\.q_proj\.weight: 512 of 1024 elements are missing",
    ):
        check_coverage(
            architecture,
            [
                [piece for piece in good[0] if "layers.0.self_attn.q_proj.weight" not in piece.hf_name],
                *good[1:],
            ],
        )

    with pytest.raises(WeightTransferError, match=r"covered twice"):
        check_coverage(architecture, [good[0], good[0], *good[2:]])
    shifted = replace(layouts[1], tensor_parallel_rank=0)  # a rank that reads another's part
    with pytest.raises(WeightTransferError, match=r"q_proj\.weight: \[0:2, 0:8, 0:32\] is covered twice"):
        check_coverage(architecture, [good[0], rank_pieces(architecture, shifted), *good[2:]])
    layer_twice = replace(layouts[2], layers=(1, 2, 3))
    with pytest.raises(WeightTransferError, match=r"model\.layers\.1\..*covered twice"):
        check_coverage(architecture, [*good[:2], rank_pieces(architecture, layer_twice), good[3]])
    with pytest.raises(WeightTransferError, match=r"not a tensor of the model"):
        check_coverage(architecture_of("qwen2", tied=True, num_layers=3), good)


def test_query_groups_by_hand() -> None:
    """8 query heads of 4 rows in 4 groups: rank 1 of 2 has groups 2 and 3.

    A group has 8 query rows, 4 key rows and 4 value rows.
    """
    architecture = architecture_of("llama")
    qkv = next(
        weight
        for weight in weights_of(architecture, "lm")
        if weight.megatron_name.endswith("linear_qkv.weight")
    )
    layout = whole_model(architecture, 2)[1]
    q, k, v = pieces(qkv, layout)
    assert (q.hf_view, q.hf, q.shard_view) == ((4, 8, 32), TensorSlice((2, 0, 0), (4, 8, 32)), (2, 16, 32))
    assert q.shard == TensorSlice((0, 0, 0), (2, 8, 32))
    assert k.hf == TensorSlice((2, 0, 0), (4, 4, 32))
    assert k.shard == TensorSlice((0, 8, 0), (2, 12, 32))
    assert v.shard == TensorSlice((0, 12, 0), (2, 16, 32))


def test_interleaved_stages() -> None:
    layouts = whole_model(architecture_of("qwen2"), 1, 2, 2)
    assert [layout.layers for layout in layouts] == [(0, 2), (1, 3)]
    assert [(layout.holds_embedding, layout.holds_output) for layout in layouts] == [
        (True, False),
        (False, True),
    ]


def test_experts_are_distributed_over_all_ranks_of_a_stage_by_hand() -> None:
    """TP 2 x DP 2 x PP 2, experts over EP 2 x ETP 2.

    The four ranks of a stage, in two replicas, hold each half of each expert once.
    """
    architecture = architecture_of("qwen3_moe")
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=2,
        pipeline_parallel_size=2,
        expert_parallel_size=2,
        expert_tensor_parallel_size=2,
    )
    layouts = layouts_of(architecture, parallel)
    held = [
        (layout.layers, layout.tensor_parallel_rank, list(layout.experts), layout.expert_tensor_parallel_rank)
        for layout in layouts
    ]
    first = [((0, 1), 0, [0, 1], 0), ((0, 1), 1, [0, 1], 1), ((0, 1), 0, [2, 3], 0), ((0, 1), 1, [2, 3], 1)]
    assert held == first + [((2, 3), *rest) for _, *rest in first]
    assert parallel.expert_data_parallel_size == 1
    shapes = shard_shapes(architecture, layouts[2])

    # half of gate, half of up
    assert shapes["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"] == (8, 32)
    assert shapes["decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"] == (32, 4)
    assert shapes["decoder.layers.1.mlp.router.weight"] == (4, 32)
    assert not any("local_experts.0" in name for name in shapes)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
        ParallelConfig(pipeline_parallel_size=2, data_parallel_size=3),
        ParallelConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            virtual_pipeline_parallel_size=2,
            data_parallel_size=2,
        ),
    ],
)
def test_ranks_are_counted_as_workers_count_them(parallel: ParallelConfig) -> None:
    architecture = architecture_of("qwen2")
    size = parallel.tensor_parallel_size
    of_replica = layouts_of(architecture, replace(parallel, data_parallel_size=1))
    assert list(layouts_of(architecture, parallel)) == [
        of_replica[place.pp * size + place.tp] for place in megatron_mesh(parallel)
    ]


def test_shapes_of_tied_and_value_heads() -> None:
    architecture = architecture_of("qwen2", tied=True)
    alone = shard_shapes(architecture, whole_model(architecture)[0])
    assert "output_layer.weight" not in alone
    assert alone["embedding.word_embeddings.weight"] == (208, 32)
    assert alone["decoder.layers.3.self_attention.linear_qkv.bias"] == (64,)
    first, _, last, _ = whole_model(architecture, 2, 2)
    assert "output_layer.weight" not in shard_shapes(architecture, first)
    assert shard_shapes(architecture, last)["output_layer.weight"] == (104, 32)
    assert shard_shapes(architecture, last, "value")["output_layer.weight"] == (1, 32)


def test_padding_may_fill_a_whole_rank() -> None:
    architecture = replace(architecture_of("llama"), vocab_size=5)
    layouts = model_layouts(architecture, tensor_parallel_size=4, padded_vocab_size=8)
    assert [layout.padded_vocab_size for layout in layouts] == [8] * 4
    embedding = weights_of(architecture, "lm")[0]
    assert [len(pieces(embedding, layout)) for layout in layouts] == [1, 1, 1, 0]
    check_coverage(architecture, [rank_pieces(architecture, layout) for layout in layouts])
    assert padding(embedding, layouts[0]) is None
    assert padding(embedding, layouts[3]) == TensorSlice((0, 0), (2, 32))


def test_pieces_of_a_gated_mlp_and_a_tied_embedding() -> None:
    architecture = architecture_of("qwen2", tied=True)
    found = {piece.hf_name: piece for piece in rank_pieces(architecture, whole_model(architecture, 2, 2)[2])}
    up = found["model.layers.2.mlp.up_proj.weight"]
    assert (up.hf_view, up.hf) == ((1, 20, 32), TensorSlice((0, 0, 0), (1, 10, 32)))
    assert (up.shard_view, up.shard) == ((2, 10, 32), TensorSlice((1, 0, 0), (2, 10, 32)))
    embedding = found["model.embed_tokens.weight"]
    assert (embedding.hf_view, embedding.hf) == ((199, 32), TensorSlice((0, 0), (104, 32)))
    assert (embedding.shard_view, embedding.shard) == ((104, 32), TensorSlice((0, 0), (104, 32)))
    assert not embedding.is_source


def test_what_cannot_be_cut_is_an_error_with_both_numbers() -> None:
    odd = architecture_of("llama", num_key_value_heads=1)
    with pytest.raises(
        ValueError, match=r"linear_qkv\.weight: 1 key-value heads cannot be sharded by tensor_parallel_size 2"
    ):
        shard_shapes(odd, whole_model(odd, 2)[0])

    with pytest.raises(
        ValueError, match=r"num_hidden_layers 4 is not a multiple of pipeline_parallel_size 3"
    ):
        whole_model(odd, 1, 3)

    with pytest.raises(
        ValueError, match=r"padded_vocab_size 199 is not a multiple of tensor_parallel_size 2"
    ):
        model_layouts(odd, tensor_parallel_size=2, padded_vocab_size=199)

    with pytest.raises(ValueError, match=r"padded_vocab_size 104 is smaller than the vocabulary of 199"):
        shard_shapes(odd, model_layouts(odd, tensor_parallel_size=1, padded_vocab_size=104)[0])
    with pytest.raises(
        ValueError,
        match=r"model_type 'gpt2' has no tensor table; supported: " + ", ".join(sorted(FAMILIES)),
    ):
        weights_of(replace(odd, model_type="gpt2"), "lm")


def test_virtual_stages_have_the_layers_of_the_layout() -> None:
    even = ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    assert [list(chain(*even.chunks_of_stage(8, stage))) for stage in range(2)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    uneven = replace(even, pipeline_layout=[1, 3, 2, 2])
    assert uneven.chunks_of_stage(8, 0) == (range(1), range(4, 6))
    assert uneven.chunks_of_stage(8, 1) == (range(1, 4), range(6, 8))
    assert hash(uneven) == hash(replace(uneven))
    assert uneven != replace(uneven, pipeline_layout=[2, 2, 2, 2])


def test_each_stage_is_represented_by_one_with_as_many_layers() -> None:
    even = ParallelConfig(pipeline_parallel_size=5)
    assert even.representatives() == (0, 1, 1, 1, 4)
    assert replace(even, pipeline_layout=[2, 2, 3, 3, 2]).representatives() == (0, 1, 2, 2, 4)


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [
        (61, 8, [7, 8, 8, 8, 8, 8, 7, 7]),
        (94, 4, [23, 24, 24, 23]),
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [1, 2, 1, 1]),
        (47, 4, [12, 12, 12, 11]),
    ],
)
def test_a_balanced_layout_has_fewer_layers_at_its_ends(
    num_layers: int, stages: int, expected: list[int]
) -> None:
    assert balanced_layout(num_layers, stages) == expected


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_uneven_stages_hold_each_tensor_once(family: str) -> None:
    architecture = architecture_of(family, tied=False)
    num_layers = architecture.num_hidden_layers
    uneven = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline_layout=[1, num_layers - 1],
        expert_tensor_parallel_size=2 if architecture.experts else 1,
    )
    layouts = layouts_of(architecture, uneven)
    assert [layout.layers for layout in layouts[::2]] == [(0,), tuple(range(1, num_layers))]
    check_coverage(architecture, [rank_pieces(architecture, layout) for layout in layouts])
