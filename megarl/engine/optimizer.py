"""AdamW on Megatron's distributed optimizer, with clipping by global norm and a learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.schema import OptimConfig
from megarl.engine import platform


class TrainingDivergedError(RuntimeError):
    """The gradient is not finite; the weights are still those of the last good step."""


class StepStatistics(NamedTuple):
    grad_norm: float  # of all parameters, before clipping
    lr: float  # that this step used


class Optimizer:
    """Steps the parameters of `chunks`. Weights must be loaded before: float32 masters are copied here.

    Update k (from 1) uses lr * k / warmup_steps while warming up; decay reaches `min_lr` at update `total_steps`.
    As is usual, biases and norms are not decayed.
    """

    def __init__(self, config: OptimConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype, total_steps: int) -> None:
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        with _construction():
            self._optimizer: MegatronOptimizer = get_megatron_optimizer(megatron_config, chunks)
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(total_steps, config.warmup_steps + 1),
            lr_decay_style=config.decay.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._chunks = chunks

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Moments, and what the steps are applied to: float32 masters of bfloat16 parameters, or the parameters themselves."""
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for _, state in self._optimizer.state.items():  # noqa: PERF102  (of several optimizers it is Megatron's own type, with no more)
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())

    def step(self) -> StepStatistics:
        """Raises TrainingDivergedError, before anything is changed, when the gradient is not finite."""
        self._optimizer.prepare_grads()  # without it the norm would be that of no gradients: 0
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise TrainingDivergedError(
                f"the gradient norm is {norm}: no update was made. Look for NaN in rewards or advantages, or lower optim.lr"
            )
        self._schedule.step(1)
        self._optimizer.step()
        return StepStatistics(grad_norm=norm, lr=self._optimizer.param_groups[0]["lr"])


def _construction() -> contextlib.AbstractContextManager[None]:
    if platform.current().is_cuda:
        return contextlib.nullcontext()
    from megarl.engine.cpu_adaptations import cuda_type_names

    return cuda_type_names()
