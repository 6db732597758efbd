"""The layouts that a search considers: those that `megarl check` accepts, and why it leaves out others."""

from __future__ import annotations

from collections import Counter

from megarl.config.roles import model_roles
from megarl.config.schema import ParallelConfig
from megarl.config.validate import read_architectures
from megarl.plan.search.space import Reason, Rejections, Space
from megarl.plan.search.tables import LEVEL, layouts
from tests.unit.plan.search.analytic import space_of


def found(space: Space, num_devices: int, granule: int = 8) -> tuple[list[ParallelConfig], Rejections]:
    architectures, _ = read_architectures(space.config)
    rejections = Rejections()
    roles = [role for role in model_roles(space.config) if role.name in ("actor", "reference")]
    return layouts(space, roles, architectures, num_devices, granule, rejections), rejections


def sizes(parallel: ParallelConfig) -> tuple[int, int, int, int]:
    return (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
        parallel.data_parallel_size,
    )


def test_layouts_of_a_dense_model_by_hand() -> None:
    """Qwen2.5-7B has 28 layers and 4 key-value heads, so every way to write 4 as a product is a layout."""
    space = space_of("qwen2.5_7b_grpo")
    all_of_them, rejections = found(space, 4)
    plain = [each for each in all_of_them if each.virtual_pipeline_parallel_size is None]
    # 4 = the product of four degrees: one is 4 (4 ways), or two are 2 (6 ways)
    assert len({sizes(each) for each in plain}) == len(plain) == 10
    # 14 layers of a stage divide by 2, 7 do not divide by 2
    interleaved = [each for each in all_of_them if each.virtual_pipeline_parallel_size]
    assert {(sizes(each), each.virtual_pipeline_parallel_size) for each in interleaved} == {
        ((1, 2, 1, 2), 2),
        ((1, 2, 2, 1), 2),
        ((2, 2, 1, 1), 2),
    }
    assert all(each.sequence_parallel == (each.tensor_parallel_size > 1) for each in all_of_them)
    assert rejections.rejected == {}
    assert rejections.kept(LEVEL) == 13


def test_rejections_have_reasons_and_add_up() -> None:
    space = space_of("qwen2.5_7b_grpo")
    kept, rejections = found(space, 16, granule=4)
    assert rejections.kept(LEVEL) == len(kept) > 0
    assert rejections.considered[LEVEL] == len(kept) + sum(rejections.rejected.values())
    # TP 8 and 16 do not fit in pools with 4 devices on each node; 8 and 16 stages do not divide 28 layers
    assert {reason for _, reason in rejections.rejected} == {Reason.node, Reason.divisibility}
    assert all(each.tensor_parallel_size <= 4 for each in kept)
    assert "num_hidden_layers 28" in rejections.example(LEVEL, Reason.divisibility)
    assert "groups of tensor_parallel_size 8" in rejections.example(LEVEL, Reason.node)


def test_experts_are_distributed_over_the_ranks_of_a_stage() -> None:
    space = space_of("qwen3_30b_a3b_grpo", pin=("actor.parallel.pipeline_parallel_size",))
    kept, _ = found(space, 8)
    of_experts = Counter(
        (each.expert_parallel_size, each.expert_tensor_parallel_size)
        for each in kept
        if sizes(each) == (4, 1, 1, 2)
    )
    assert of_experts == Counter([(1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 4)])
    assert {each.pipeline_parallel_size for each in kept} == {1}


def test_pinned_sizes_are_kept() -> None:
    space = space_of("qwen2.5_7b_grpo", "actor.parallel.tensor_parallel_size=2")
    kept, _ = found(space, 8)
    assert {each.tensor_parallel_size for each in kept} == {2}
    assert len({each.pipeline_parallel_size for each in kept}) > 1

    # A size that does not divide the devices has no layout.
    assert found(space_of("qwen2.5_7b_grpo", "actor.parallel.tensor_parallel_size=2"), 7)[0] == []
