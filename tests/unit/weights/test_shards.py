"""Merged adapters, as ranks send them: bitwise those of PEFT's `merge_and_unload`, in any slices and layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ParallelConfig
from megarl.models.tensor_table import hf_tensors
from megarl.weights.checksum import add_checksums, checksum, shard_checksums
from megarl.weights.load import fill_trained, load_into_shards, split_adapters
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import layouts_of, shard_shapes
from megarl.weights.shards import MergedAdapters, Shards, held_slices, merged_shards
from megarl.weights.tensors import Part, TensorSlice
from tests.unit.engine.lora_cases import Adapted, adapters_of, merged_weights, save_adapted
from tests.unit.engine.models import load_lm

Tensors = dict[str, torch.Tensor]
TP2 = ParallelConfig(tensor_parallel_size=2)
EP2 = ParallelConfig(data_parallel_size=2, expert_parallel_size=2)
TP2_PP2 = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Adapted]:
    @cache
    def made(family: str, saved: tuple[str, ...] = ()) -> Adapted:
        return save_adapted(family, tmp_path_factory.mktemp(family), modules_to_save=saved)

    return made


def merged_by_peft(case: Adapted, dtype: torch.dtype) -> Tensors:
    import peft

    model = peft.PeftModel.from_pretrained(load_lm(Path(case.base), dtype), case.adapter)
    # PEFT computes with float32 adapters on models in bfloat16. Round them as the trainer's are.
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype).float()
    state = model.merge_and_unload().state_dict()
    return {tensor.name: state[tensor.name] for tensor in hf_tensors(case.architecture().base, "lm")}


def shards_of(case: Adapted, parallel: ParallelConfig, dtype: torch.dtype) -> list[Shards]:
    """Return the shards of every rank, filled from the folders."""
    architecture = case.architecture()
    made = []
    for layout in layouts_of(architecture, parallel):
        parameters = {
            name: torch.empty(shape, dtype=dtype)
            for name, shape in shard_shapes(architecture, layout, "lm").items()
        }
        base, _ = split_adapters(parameters, architecture, "lm")
        load_into_shards(case.base, architecture.base, layout, base)
        fill_trained(parameters, architecture, layout, "lm", case.adapter, seed=0)
        made.append(merged_shards(parameters, architecture, layout, "lm"))
    return made


@pytest.mark.parametrize(
    ("family", "saved", "parallel", "dtype"),
    [
        ("qwen2", (), ParallelConfig(), torch.float32),
        ("qwen2", (), TP2_PP2, torch.float32),
        ("qwen2", (), TP2, torch.bfloat16),
        ("qwen2", ("embed_tokens", "lm_head"), TP2_PP2, torch.bfloat16),
        ("qwen2_moe", (), EP2, torch.float32),
        ("deepseek_v3", (), EP2, torch.float32),
    ],
)
def test_what_ranks_send_is_what_peft_merges(
    family: str,
    saved: tuple[str, ...],
    parallel: ParallelConfig,
    dtype: torch.dtype,
    case_of: Callable[..., Adapted],
) -> None:
    case = case_of(family, saved)
    expected = merged_weights(case) if case.architecture().experts else merged_by_peft(case, dtype)
    ranks = shards_of(case, parallel, dtype)
    for shards in ranks:
        for name, held in held_slices(shards.architecture, shards.layout).items():
            for whole in held:
                # In two messages, so that the slices begin and end anywhere.
                middle = (whole.starts[0] + whole.stops[0]) // 2
                for part in (whole.along(0, whole.starts[0], middle), whole.along(0, middle, whole.stops[0])):
                    if not part.volume:
                        continue
                    sent = torch.cat([each.reshape(-1) for each in shards.regions(Part(name, part))])
                    assert sent.dtype == dtype
                    assert torch.equal(sent.view(part.shape), expected[name][part.index]), name

    # The sums that engines are compared with are those of the merged weights.
    replicas = ranks if parallel.expert_parallel_size == 1 else [ranks[0], ranks[1]]
    sums = add_checksums(
        shard_checksums(shards, dtype, dense=shards is ranks[0] or parallel.data_parallel_size == 1)
        for shards in replicas
    )
    assert sums == {name: checksum(value) for name, value in expected.items()}


def test_a_slice_does_not_depend_on_the_slice_that_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 24, generator=generator)
    b = torch.randn(600, 16, generator=generator)
    weight = torch.randn(4, 150, 24, generator=generator)
    adapters = MergedAdapters({"x.lora.q_proj.a": a, "x.lora.q_proj.b": b}, 0.5)
    whole = TensorSlice.whole((4, 150, 24))
    piece = Piece("model.q_proj.weight", (4, 150, 24), whole, (4, 150, 24), whole, is_source=True)
    every = adapters.apply("x.weight", piece, whole.index, weight)
    assert torch.allclose(every, weight + 0.5 * (b @ a).view(4, 150, 24), atol=1e-5)

    for region in (slices(1, 2, 3, 7, 0, 24), slices(0, 4, 149, 150, 5, 6), slices(3, 4, 0, 150, 0, 24)):
        part = adapters.apply("x.weight", piece, region, weight[region])
        assert torch.equal(part, every[region])
    other = Piece("model.k_proj.weight", (4, 150, 24), whole, (4, 150, 24), whole, is_source=True)
    assert adapters.apply("x.weight", other, whole.index, weight) is weight


def slices(*ends: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True))


def test_adapters_of_the_case_are_not_zero(case_of: Callable[..., Adapted]) -> None:
    assert all(bool(value.any()) for value in adapters_of(case_of("qwen2")).values())
