"""Test that each adaptation of expert biases is still needed. `test_parity` compares the numbers."""

from __future__ import annotations

from megarl.config.schema import ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.rank_side import start
from tests.unit.engine.test_cpu_adaptations import megatron_source


def sources_that_changed() -> list[str]:
    """Run in a rank: return what Megatron no longer does, so that its adaptation can go."""
    start(ParallelConfig())
    from megarl.engine.layer_specs import EVIDENCE

    return [
        each.reason for each in EVIDENCE if each.source not in megatron_source(each.module, each.attribute)
    ]


def test_megatron_still_does_what_is_adapted(rank_pool: RankPool) -> None:
    assert rank_pool.run(sources_that_changed, world_size=1) == [[]]


def test_biases_of_row_parallel_layers_are_not_marked_as_sharded() -> None:
    source = megatron_source("tensor_parallel.layers", "RowParallelLinear")
    assert "set_tensor_model_parallel_attributes(self.bias" not in source
