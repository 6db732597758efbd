"""What norms and activations rely on in Megatron-Core. `test_parity` compares their numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megarl.config.schema import ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.rank_side import start


def fused_gelu(gate_up: torch.Tensor) -> torch.Tensor:
    """Run in a rank: apply the fused activation that Megatron uses for GELU on CUDA."""
    start(ParallelConfig())
    from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl

    return bias_geglu_impl(gate_up, None)


def test_the_fused_gelu_is_the_tanh_approximation(rank_pool: RankPool) -> None:
    """On a CPU it is not fused."""
    gate_up = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(0)) * 3
    gate, up = gate_up.chunk(2, -1)
    (got,) = rank_pool.run(fused_gelu, world_size=1, gate_up=gate_up)
    torch.testing.assert_close(got, F.gelu(gate, approximate="tanh") * up, atol=1e-6, rtol=1e-5)
