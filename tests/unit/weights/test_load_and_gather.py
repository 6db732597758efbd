"""Load and gather against shards cut by slow loops, on real gloo ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.weights.boxes import tiling_fault
from megarl.weights.gather import BucketGatherer, BucketSizes, Shards, plan_buckets
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.receipt import WeightReceipt
from megarl.weights.shard_layout import model_layouts, shard_shapes
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save, slow_shards

MODELS = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("llama", True)]
BUCKET_BYTES = (1024, 20_000, 10**7)  # less than a row block of most tensors; some tensors; all


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("folders")
    return {
        # Half of the folders have several files and an index.
        (family, tied): save(random_model(family, tied=tied), root / f"{family}-{tied}", "30KB" if tied else "5GB")
        for family, tied in MODELS
    }


def gathered(gatherer: BucketGatherer) -> tuple[int, list]:
    """How many buckets, and their chunks on tensor-parallel rank 0."""
    chunks = []
    for bucket in gatherer.buckets:
        if gatherer.rank != 0:
            gatherer.gather(bucket, None)
            continue
        flat = torch.full((bucket.volume,), torch.nan, dtype=torch.float32)
        gatherer.gather(bucket, flat)
        data = flat.split([chunk.numel for chunk in bucket.chunks])
        chunks += [(chunk, elements.numpy()) for chunk, elements in zip(bucket.chunks, data, strict=True)]
    return len(gatherer.buckets), chunks


def round_trip(folders: dict, tensor_parallel_size: int, pipeline: int, virtual: int | None) -> dict:
    """Loads every model, compares the shards bit by bit with the slow ones, gathers; returns the chunks that this rank yields."""
    stages = [dist.new_group(range(stage * tensor_parallel_size, (stage + 1) * tensor_parallel_size)) for stage in range(pipeline)]
    rank = dist.get_rank()
    yielded = {}
    for (family, tied), folder in folders.items():
        architecture = architecture_of(family, tied=tied)
        layout = model_layouts(
            architecture,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline,
            virtual_pipeline_parallel_size=virtual,
            padded_vocab_size=PADDED_VOCAB,
        )[rank]
        parameters = {name: torch.full(shape, torch.nan) for name, shape in shard_shapes(architecture, layout).items()}
        load_into_shards(folder, architecture, layout, parameters)
        expected = slow_shards(
            random_model(family, tied=tied).state_dict(),
            architecture,
            tensor_parallel_size=tensor_parallel_size,
            rank=layout.tensor_parallel_rank,
            layers=layout.layers,
            holds_embedding=layout.holds_embedding,
            holds_output=layout.holds_output,
        )
        assert parameters.keys() == expected.keys()
        for name, shard in expected.items():
            assert torch.equal(parameters[name], shard), name
        for bucket_bytes in BUCKET_BYTES:
            group = stages[rank // tensor_parallel_size]
            shards = Shards(parameters=parameters, architecture=architecture, layout=layout, group=group)
            yielded[family, tied, bucket_bytes] = gathered(BucketGatherer(shards, bucket_bytes, torch.float32))
    return yielded


@pytest.mark.parametrize(
    ("tensor_parallel_size", "pipeline", "virtual"), [(1, 1, None), (2, 1, None), (1, 2, 2), (2, 2, None), (4, 1, None)]
)
def test_round_trip_is_bitwise(rank_pool, folders, tensor_parallel_size: int, pipeline: int, virtual: int | None) -> None:
    per_rank = rank_pool.run(
        round_trip,
        world_size=tensor_parallel_size * pipeline,
        folders=folders,
        tensor_parallel_size=tensor_parallel_size,
        pipeline=pipeline,
        virtual=virtual,
    )
    for family, tied in MODELS:
        state = random_model(family, tied=tied).state_dict()
        names = set(state) - ({"lm_head.weight"} if tied else set())
        for bucket_bytes in BUCKET_BYTES:
            counts = [results[family, tied, bucket_bytes][0] for results in per_rank]
            for stage in range(pipeline):  # ranks of a stage stay in step
                assert len(set(counts[stage * tensor_parallel_size : (stage + 1) * tensor_parallel_size])) == 1
            arrived = {name: torch.zeros(state[name].numel()) for name in names}
            seen = {name: torch.zeros(state[name].numel(), dtype=torch.int64) for name in names}
            for _, chunks in (results[family, tied, bucket_bytes] for results in per_rank):
                for (name, offset, _), data in chunks:
                    arrived[name][offset : offset + len(data)] = torch.from_numpy(data)
                    seen[name][offset : offset + len(data)] += 1
            for name in names:
                assert bool((seen[name] == 1).all()), name
                assert torch.equal(arrived[name], state[name].view(-1)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_buckets_and_two_messages_are_at_most_twice_the_bucket(dtype: torch.dtype) -> None:
    for bucket_bytes in [*range(2 * dtype.itemsize, 2000), 10**6, 512 * 2**20]:
        sizes = BucketSizes.of(bucket_bytes, dtype)
        assert 2 * (sizes.bucket + sizes.message) * dtype.itemsize <= 2 * bucket_bytes
        assert 1 <= sizes.block <= sizes.message


def test_buckets_are_filled_and_bounded() -> None:
    architecture = architecture_of("qwen2")
    layout = model_layouts(architecture, tensor_parallel_size=2, padded_vocab_size=PADDED_VOCAB)[0]
    total = sum(torch.Size(meta.shape).numel() for meta in manifest_of(architecture, torch.bfloat16).values())
    buckets = plan_buckets(architecture, layout, BucketSizes.of(4096, torch.bfloat16))
    assert sum(bucket.volume for bucket in buckets) == total
    assert max(bucket.volume for bucket in buckets) <= 1792  # seven eighths of 2048
    assert max(sum(block.volume for block in blocks) for bucket in buckets for blocks in bucket.rounds) <= 256
    assert len(buckets) <= total / 1792 * 8 / 7 + 1  # none is closed with more than an eighth of it empty
    with pytest.raises(ValueError, match=r"bucket of 2 bytes has no room for a torch\.bfloat16 element"):
        BucketSizes.of(2, torch.bfloat16)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_ranks_send_each_element_of_a_bucket_once(tensor_parallel_size: int) -> None:
    """So what rank 0 receives in a round is never more than the round."""
    architecture = architecture_of("qwen3", tied=True)
    for layout in model_layouts(
        architecture, tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=2, padded_vocab_size=PADDED_VOCAB
    ):
        for bucket_bytes in BUCKET_BYTES:
            for bucket in plan_buckets(architecture, layout, BucketSizes.of(bucket_bytes, torch.float32)):
                for block in bucket.blocks:
                    assert tiling_fault(block.shape, [transfer.in_block for transfer in block.transfers]) is None
                    assert {transfer.in_block.shape == transfer.in_shard.shape for transfer in block.transfers} == {True}


def test_bfloat16_parameters_and_float32_folder(folders) -> None:
    """Loading casts to the parameter's dtype, gathering to the one that is asked for; a receipt accepts the result."""
    architecture = architecture_of("qwen3")
    layout = model_layouts(architecture, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)[0]
    shapes = shard_shapes(architecture, layout)
    parameters = {name: torch.full(shape, torch.nan, dtype=torch.bfloat16) for name, shape in shapes.items()}
    load_into_shards(folders["qwen3", False], architecture, layout, parameters)
    receipt = WeightReceipt(manifest_of(architecture, torch.float32))
    state = random_model("qwen3").state_dict()
    shards = Shards(parameters=parameters, architecture=architecture, layout=layout, group=None)
    for chunk, data in gathered(BucketGatherer(shards, 5000, torch.float32))[1]:
        receipt.record(chunk, torch.float32)
        expected = state[chunk.name].view(-1)[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(torch.from_numpy(data), expected.to(torch.bfloat16).float())
    receipt.close()
