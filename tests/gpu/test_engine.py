"""The engine on one GPU: the same code as on the CPU, over NCCL. Run with `make gpu` on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.batch.metrics import Metric
from megarl.config.schema import Device, OptimConfig, ParallelConfig
from tests.unit.engine.models import FAMILIES, load_lm, make_batch, reference_logits, save_model, scores_of
from tests.unit.engine.rank_side import build


@pytest.fixture(scope="module")
def groups(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from megarl.engine import platform

    platform.activate(Device.cuda)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    from megarl.engine import groups as engine_groups

    yield engine_groups.initialize(ParallelConfig(), seed=0)
    dist.destroy_process_group()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropy_are_those_of_hugging_face(family: str, packing: bool, groups: Any, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    save_model(family, tmp_path)
    batch = make_batch()
    with torch.no_grad():
        want = scores_of(reference_logits(load_lm(tmp_path), batch), batch)
    got = build(groups, str(tmp_path), packing=packing).forward(batch, [[0, 3, 2], [1, 4], [5], [6]])
    for key in want:
        torch.testing.assert_close(got[key].cpu(), want[key], atol=1e-4, rtol=0)


def test_bfloat16_training_lowers_the_loss(groups: Any, tmp_path: Path) -> None:
    save_model("qwen2-tied", tmp_path)
    batch = make_batch()
    engine = build(groups, str(tmp_path), dtype=torch.bfloat16, optim=OptimConfig(lr=1e-3))

    def loss(outputs: Any, rows: Any) -> Any:
        value = -(outputs["log_probs"] * rows["response_mask"]).sum() / batch["response_mask"].sum()
        return value, {"loss": Metric.sum(value)}

    losses = []
    for _ in range(10):
        losses.append(engine.forward_backward(batch, [[0, 1, 2], [3, 4, 5, 6]], loss)["loss"].value)
        engine.step()
    assert losses[-1] < losses[0] - 0.5


def test_what_is_offloaded_leaves_the_gpu_and_comes_back_the_same(groups: Any, tmp_path: Path) -> None:
    from megarl.engine.offload import StatePart

    save_model("qwen2", tmp_path)
    batch = make_batch()

    def loss(outputs: Any, rows: Any) -> Any:
        value = -outputs["log_probs"].sum()
        return value, {"loss": Metric.sum(value)}

    def trained(away: tuple[StatePart, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = build(groups, str(tmp_path), dtype=torch.bfloat16, optim=OptimConfig(lr=1e-3))
        norms = []
        for _ in range(3):
            engine.forward_backward(batch, [[0, 1, 2], [3, 4, 5, 6]], loss)
            norms.append(engine.step().grad_norm)
            before = torch.cuda.memory_allocated()
            given_back = engine.offload(*away)
            assert before - torch.cuda.memory_allocated() >= 0.9 * given_back
            engine.restore(*away)
        return norms, {name: value.clone() for name, value in engine.parameters().items()}

    torch.use_deterministic_algorithms(True, warn_only=True)
    norms, weights = trained(())
    same_norms, same_weights = trained(tuple(StatePart))
    assert same_norms == pytest.approx(norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight)
