"""Options that are passed on to Megatron-Core, in an engine on a CPU."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megarl.config.megatron_fields import SECTIONS, megatron_fields
from megarl.config.schema import MegatronConfig, OptimConfig, ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.models import make_batch, save_model
from tests.unit.engine.rank_side import build, start, take

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
PRECISE = {"use_precision_aware_optimizer": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("options") / "lm"
    save_model("qwen2", path)
    return str(path)


def negative_log_likelihood(outputs: Any, rows: Any) -> Any:
    return -outputs["log_probs"].sum(), {}


# ---- the fields of Megatron's classes


def fields_of_classes() -> dict[str, list[str]]:
    start(ParallelConfig())
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    return {
        section: [entry.name for entry in dataclasses.fields(each) if not entry.name.startswith("_")]
        for section, each in zip(SECTIONS, classes, strict=True)
    }


def test_the_fields_read_from_the_source_are_those_of_the_classes(rank_pool: RankPool) -> None:
    found = rank_pool.run(fields_of_classes, world_size=1)[0]
    assert {section: set(megatron_fields(section)) for section in SECTIONS} == {
        section: set(names) for section, names in found.items()
    }


# ---- what the engine does with them


def configured(folder: str) -> dict[str, Any]:
    """Train one step in bfloat16 with options of each section, and return what Megatron has."""
    options = MegatronConfig(
        transformer={"clone_scatter_output_in_embedding": False},
        ddp={"grad_reduce_in_fp32": False, "check_for_nan_in_grad": True},
        optimizer={"decoupled_weight_decay": False},
    )
    engine = build(start(ParallelConfig()), folder, dtype=torch.bfloat16, optim=OPTIM, megatron=options)
    engine.forward_backward(take(make_batch(), [1, 2]), [[0, 1]], negative_log_likelihood)
    assert engine.step().grad_norm > 0
    (chunk,) = engine.chunks
    optimizer = engine.optimizer.megatron_optimizer
    (part,) = getattr(optimizer, "chained_optimizers", [optimizer])

    return {
        "clone": chunk.config.clone_scatter_output_in_embedding,
        "gradients": {gradient.dtype for gradient in engine.gradients().values()},
        "checks": chunk.ddp_config.check_for_nan_in_grad,
        "adam": type(part.optimizer),
    }


def test_options_of_every_section_reach_megatron(rank_pool: RankPool, folder: str) -> None:
    assert rank_pool.run(configured, world_size=1, folder=folder)[0] == {
        "clone": False,
        "gradients": {torch.bfloat16},
        "checks": True,
        "adam": torch.optim.Adam,
    }


def refusals(folder: str) -> list[str]:
    groups = start(ParallelConfig())
    messages = []
    for options in (
        MegatronConfig(transformer={"moe_permute_fusion": True}),
        MegatronConfig(transformer={"overlap_p2p_comm_warmup_flush": True}),
        MegatronConfig(ddp={"num_buckets": 0}),
    ):
        with pytest.raises(ValueError, match=r".+") as caught:
            build(groups, folder, optim=OPTIM, megatron=options)
        messages.append(str(caught.value))

    return messages


def test_the_engine_refuses_options_by_name(rank_pool: RankPool, folder: str) -> None:
    """A field that needs CUDA on a CPU, and fields that Megatron refuses with errors of several kinds."""
    on_cpu, of_megatron, asserted = rank_pool.run(refusals, world_size=1, folder=folder)[0]
    assert "moe_permute_fusion=True requires CUDA" in on_cpu
    assert "overlap_p2p_comm_warmup_flush=True" in of_megatron
    assert "num_buckets=0" in asserted


# ---- Transformer Engine's Adam


class FusedAdam(torch.optim.Optimizer):
    """The interface of Transformer Engine's Adam, computed by torch: its dtypes, masters and gradients."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        capturable: bool,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weights: bool,
        master_weight_dtype: torch.dtype,
        use_decoupled_grad: bool,
        store_param_remainders: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        assert not capturable
        assert adam_w_mode
        assert master_weights
        assert master_weight_dtype is torch.float32
        assert use_decoupled_grad
        assert not store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        state = self.state[param]
        state.update({name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()})
        state["master_param"] = param.clone().detach().float()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                assert param.grad is None
                state = self.state[param]
                gradient = param.decoupled_grad.float()
                mean = state["exp_avg"].float().lerp_(gradient, 1 - first)
                square = (
                    state["exp_avg_sq"].float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
                )
                root = (square / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                master = state["master_param"].mul_(1 - group["lr"] * group["weight_decay"])
                master.addcdiv_(mean / (1 - first ** group["step"]), root, value=-group["lr"])
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                param.copy_(master)


def train(folder: str, options: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Train in bfloat16, and return masters, moments, norms and the offloadable bytes of the optimizer."""
    groups = start(ParallelConfig())
    import megatron.core.optimizer as megatron_optimizer

    from megarl.engine import engine as engine_module
    from megarl.engine.offload import StatePart

    package = types.ModuleType("transformer_engine")
    package.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    with (
        patch.dict(sys.modules, dict.fromkeys(names, package)),
        patch.object(engine_module, "require_supported", lambda *arguments, **named: None),
        patch.object(megatron_optimizer, "Adam", FusedAdam),
        patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", not options),
        patch("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda version: True),
        patch("megatron.core.optimizer.is_te_min_version", lambda version: True),
    ):
        engine = build(
            groups, folder, dtype=torch.bfloat16, optim=OPTIM, megatron=MegatronConfig(optimizer=options)
        )
        batch = take(make_batch(), [1, 2])
        norms = []
        for _ in range(num_steps):
            engine.forward_backward(batch, [[0, 1]], negative_log_likelihood)
            norms.append(engine.step().grad_norm)
        optimizer = engine.optimizer
        counts = optimizer.counts()
        optimizer.set_counts(**counts)
        slices = optimizer.slices()
        found = {
            name: torch.cat([each.tensors[name].flatten() for each in slices])
            for name in ("param", "exp_avg", "exp_avg_sq")
        }
        weights = torch.cat([each.parameter.detach().flatten() for each in slices])
        moved = engine.offload(StatePart.optimizer)
        engine.restore(StatePart.optimizer)
        assert torch.equal(slices[0].tensors["param"].flatten(), found["param"][: slices[0].stop])

    return {**found, "weights": weights, "norms": norms, "bytes": moved, "steps": counts["adam"]}


def test_transformer_engines_adam_steps_as_torchs(rank_pool: RankPool, folder: str) -> None:
    """The masters are those of torch's Adam with float32 moments, and the weights are the masters rounded."""
    ours = rank_pool.run(train, world_size=1, folder=folder, options=PRECISE, num_steps=3)[0]
    expected = rank_pool.run(train, world_size=1, folder=folder, options={}, num_steps=3)[0]
    torch.testing.assert_close(ours["param"], expected["param"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["exp_avg"], expected["exp_avg"], rtol=1e-3, atol=1e-4)
    assert torch.equal(ours["weights"], ours["param"].bfloat16())
    assert ours["norms"][0] == expected["norms"][0]
    assert ours["steps"] == expected["steps"] == 3


def test_bfloat16_moments_take_a_third_less(rank_pool: RankPool, folder: str) -> None:
    """Eight bytes of optimizer state per parameter instead of twelve."""
    moments = {**PRECISE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bfloat16"}
    ours = rank_pool.run(train, world_size=1, folder=folder, options=moments, num_steps=2)[0]
    assert ours["param"].dtype == torch.float32
    assert ours["exp_avg"].dtype == ours["exp_avg_sq"].dtype == torch.bfloat16
    assert ours["bytes"] == 8 * ours["param"].numel()
