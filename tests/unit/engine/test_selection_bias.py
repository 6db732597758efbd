"""The selection bias of sigmoid routers: float32 in a bfloat16 model, frozen, and updated only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.schema import ExpertsConfig, OptimConfig, ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.models import load_lm, make_batch, record_routers, reference_logits, save_model
from tests.unit.engine.rank_side import build, deal, replica_rows, start, take, weighted_sum

RATE = 0.01
BIAS = "mlp.router.expert_bias"
PARALLEL = ParallelConfig(
    tensor_parallel_size=2, expert_parallel_size=2, data_parallel_size=2, sequence_parallel=True
)


def weighted_batch() -> dict[str, Tensor]:
    batch = make_batch()
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(batch["response_mask"].shape, generator=generator)
    return {**batch, "weight/log_probs": weights * batch["response_mask"]}


def biases_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.parameters().items() if name.endswith(BIAS)}


def train(folder: str, batch: dict[str, Tensor], rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run in a rank: return the biases before and after one update of a bfloat16 model."""
    groups = start(PARALLEL)
    rows = replica_rows(groups, len(batch["input_ids"]))
    engine = build(
        groups,
        folder,
        dtype=torch.bfloat16,
        optim=OptimConfig(lr=0.1),
        routers=ExpertsConfig(bias_update_rate=rate),
    )
    before = biases_of(engine)
    engine.forward_backward(take(batch, rows), deal(len(rows), 2), weighted_sum(("log_probs",)))
    assert not any(name.endswith(BIAS) for name in engine.gradients())
    engine.step()
    return before, biases_of(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_model("glm4_moe", made := tmp_path_factory.mktemp("glm4_moe"))
    return made


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_a_bias_is_float32_and_moves_only_by_its_rate(folder: Path, rate: float, rank_pool: RankPool) -> None:
    """The expected change is that of an even load, by Hugging Face's routes of the whole batch."""
    batch = weighted_batch()
    model = load_lm(folder, torch.bfloat16)
    recorded = record_routers(model)
    reference_logits(model, batch)
    ranks = rank_pool.run(train, world_size=PARALLEL.world_size, folder=str(folder), batch=batch, rate=rate)

    for name, passes in recorded.items():
        layer = name.split(".")[2]
        router = model.get_submodule(name)
        tokens = torch.cat([each.experts for each in passes]).flatten().bincount(minlength=8).double()
        steps = rate * (tokens.mean() - tokens).sign().float()
        for before, after in ranks:
            mine = f"decoder.layers.{layer}.{BIAS}"
            assert before[mine].dtype == torch.float32
            assert torch.equal(before[mine], router.e_score_correction_bias)
            torch.testing.assert_close(after[mine], before[mine] + steps, rtol=0, atol=1e-7 * bool(rate))


def test_the_bias_matters(folder: Path) -> None:
    """Rounded to bfloat16 or left out, it would send tokens to other experts."""
    batch = weighted_batch()
    chosen = []
    for change in (lambda bias: bias, lambda bias: torch.zeros_like(bias)):
        model = load_lm(folder)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(change(buffer))
        recorded = record_routers(model)
        reference_logits(model, batch)
        chosen.append(torch.cat([each.experts for each in recorded["model.layers.1.mlp.gate"]]))
    assert not torch.equal(*chosen)
