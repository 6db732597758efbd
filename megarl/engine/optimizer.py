"""Megatron's distributed optimizer, with global-norm clipping and a learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.kinds import OptimizerKind
from megarl.config.schema import OnNonFinite, OptimConfig
from megarl.engine import platform
from megarl.engine.megatron_options import NO_OPTIONS, build_config
from megarl.machine.errors import NonFiniteUpdateError, RunError

MOMENTS = tuple(name for kind in OptimizerKind for name in kind.needs.moments)
_DECOUPLED = "decoupled_grad"


class TrainingDivergedError(RunError):
    """The gradient is not finite. The weights are those of the last successful step."""

    hint = (
        "smaller updates: {role.optim.lr, role.optim.warmup_steps, role.optim.clip_grad}; try a tenth of lr",
        "check the last steps in metrics.jsonl: grad_norm, approx_kl, ratio_max and scores grow before a "
        "loss diverges",
        "no update was made: the weights are those of the previous step, and the checkpoints are intact",
    )


class OptimizerSlice(NamedTuple):
    """The elements start..stop of a parameter, in memory order, that this data-parallel rank updates.

    Attributes:
        start: The first element.
        stop: The end of the elements.
        tensors: `param` (the float32 master, or the parameter's own memory) and the moments, such as
            `exp_avg`, each (stop - start,) float32. Moments may be bfloat16 with Transformer Engine's Adam.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]


class StepStatistics(NamedTuple):
    grad_norm: float  # norm over all parameters, before clipping
    lr: float  # the learning rate of this step
    is_skipped: bool = False  # whether the update was dropped, because the norm is not finite


class Optimizer:
    """Steps the parameters of `chunks`. Weights must be loaded before: float32 masters are copied here.

    Update k (from 1) uses lr * k / warmup_steps during warm-up; the decay reaches `min_lr` at update
    `total_steps`. As usual, biases and norms have no weight decay.

    Args:
        chunks: The wrapped models.
        names: The canonical name of every parameter of `chunks`. The global gradient norm is summed in their
            order.
        total_steps: The end of the decay.
        options: Fields of Megatron's configuration in addition to those that megarl sets.
    """

    def __init__(
        self,
        config: OptimConfig,
        chunks: list[DistributedDataParallel],
        names: Mapping[torch.nn.Parameter, str],
        dtype: torch.dtype,
        total_steps: int,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> None:
        own = dict(
            optimizer=config.kind.value,
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            **_settings(config),
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            # Checkpoints store whole float32 masters, not only the bits that bfloat16 weights lack.
            store_param_remainders=False,
            fp8_recipe=chunks[0].config.fp8_recipe if chunks[0].config.fp8 else None,
        )
        megatron_config = build_config(MegatronOptimizerConfig, own, options)
        with _construction():
            self.megatron_optimizer: MegatronOptimizer = get_megatron_optimizer(megatron_config, [*chunks])

        # Moments exist before the first step, so that they can be offloaded, saved and loaded.
        for part in self._parts():
            _make_moments(part)
        self._schedule = OptimizerParamScheduler(
            self.megatron_optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            # Megatron requires that the decay ends after the warm-up.
            lr_decay_steps=max(total_steps, config.warmup_steps + 1),
            lr_decay_style=config.decay.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._chunks = chunks
        self._names = dict(names)
        self._clip_grad = config.clip_grad
        self._on_nonfinite = config.on_nonfinite

    @property
    def megatron_configs(self) -> list[MegatronOptimizerConfig]:
        """The configurations of Megatron's optimizers."""
        return [part.config for part in (self.megatron_optimizer, *self._parts()) if hasattr(part, "config")]

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron_optimizer.zero_grad()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield moments and the tensors that are stepped: float32 masters, or the parameters themselves."""
        for group in self.megatron_optimizer.param_groups:
            yield from group["params"]
        # With several optimizers, the state is Megatron's own type, which has only `items`.
        for _, state in self.megatron_optimizer.state.items():  # noqa: PERF102
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())

    def slices(self) -> list[OptimizerSlice]:
        """Return the slices of this rank. Every element of every parameter is in one slice of one rank."""
        slices = []
        for optimizer in self._parts():
            moments = _moments_of(optimizer)
            for ranges in (
                ranges
                for buffer in optimizer.gbuf_ranges
                for buckets in buffer.values()
                for ranges in buckets
            ):
                for parameter, parameter_ranges in ranges["param_map"].items():
                    # Map Megatron's range of a parameter to the tensors that its optimizer steps.
                    group, number = optimizer.model_param_group_index_map[parameter]
                    stepped = optimizer.optimizer.param_groups[group]["params"][number]
                    state = optimizer.optimizer.state[stepped]
                    held = parameter_ranges["param"]
                    # Transformer Engine's Adam may step bfloat16 weights, with the masters in its state.
                    master = state.get("master_param", stepped)
                    tensors = {"param": master.detach(), **{name: state[name] for name in moments}}
                    slices.append(OptimizerSlice(parameter, held.start, held.end, tensors))

        return slices

    def _parts(self) -> list[Any]:
        """Return the optimizers: one, or one per kind of parameters."""
        return list(getattr(self.megatron_optimizer, "chained_optimizers", [self.megatron_optimizer]))

    def counts(self) -> dict[str, int]:
        """Return the number of updates so far, as checkpoints store it.

        `adam` is the count for Adam's bias correction (0 with an optimizer that does not count), and
        `schedule` the position in the learning-rate schedule.
        """
        counts = set()

        # torch counts steps per parameter; Transformer Engine and Apex count per parameter group.
        for optimizer in (part.optimizer for part in self._parts()):
            counts |= {int(state["step"]) for state in optimizer.state.values() if "step" in state}
            counts |= {int(group["step"]) for group in optimizer.param_groups if "step" in group}

        assert len(counts) <= 1, (
            f"the optimizer has taken {sorted(counts)} steps: the number must be the same for each parameter"
        )
        return {"adam": max(counts, default=0), "schedule": self._schedule.num_steps}

    def set_counts(self, adam: int, schedule: int) -> None:
        """Continue after these counts on this optimizer's own schedule, also on ranks without parameters."""
        for optimizer in (part.optimizer for part in self._parts()):
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(adam)
            # Transformer Engine and Apex count per parameter group.
            if not _counts_by_tensor(optimizer):
                for group in optimizer.param_groups:
                    group["step"] = adam

        # A step of zero sets the learning rate for this position in the schedule.
        self._schedule.num_steps = schedule
        self._schedule.step(0)

    def megatron_state(self, **settings: str) -> dict[Any, Any]:
        """Return settings and counts without tensors, plus `settings`, as Megatron stores them.

        Only for a rank that has a part of the optimizer. If experts have a separate optimizer, each is keyed
        by its number.
        """
        states = [{**part.state_dict(), **settings} for part in self._parts()]
        return states[0] if len(states) == 1 else dict(enumerate(states))

    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the schedule as Megatron stores it."""
        return dict(self._schedule.state_dict())

    def step(self, *, loss_is_finite: bool = True) -> StepStatistics:
        """Clip the gradients by their global norm and update the parameters.

        An update whose gradient is not finite on some rank is not made on any rank.

        Args:
            loss_is_finite: Whether the loss is finite on this rank. If it is not, the norm of every rank is
                NaN.

        Raises:
            TrainingDivergedError: The norm is not finite, and the run is to stop. Nothing has been changed.
            NonFiniteUpdateError: The same in a run that is to recover.
        """
        # Attach the gradients to the float32 masters, from which the norm is computed.
        self.megatron_optimizer.prepare_grads()
        norm = self._gradient_norm(loss_is_finite)

        if not math.isfinite(norm):
            self._refuse(norm)
            return StepStatistics(
                grad_norm=norm, lr=self.megatron_optimizer.param_groups[0]["lr"], is_skipped=True
            )

        # The schedule advances first: update k uses the learning rate of position k, counted from 1.
        self._schedule.step(1)

        # All parts are clipped by the single norm of the whole model.
        if self._clip_grad > 0:
            for part in self._parts():
                clip_grads.clip_grad_by_total_norm_fp32(
                    part.get_parameters(),
                    self._clip_grad,
                    norm,
                    use_decoupled_grad=_gradient_attribute(part) == _DECOUPLED,
                )

        self.megatron_optimizer.step_with_ready_grads()
        return StepStatistics(grad_norm=norm, lr=self.megatron_optimizer.param_groups[0]["lr"])

    def _refuse(self, norm: float) -> None:
        """Raise an error for a norm that is not finite, unless such updates are skipped."""
        if self._on_nonfinite is OnNonFinite.skip:
            return
        message = (
            f"the gradient norm is {norm}: no update was made. Check rewards and advantages for NaN, or "
            f"lower optim.lr"
        )
        if self._on_nonfinite is OnNonFinite.recover:
            raise NonFiniteUpdateError(message, hint=TrainingDivergedError.hint)
        raise TrainingDivergedError(message)

    def _gradient_norm(self, loss_is_finite: bool) -> float:
        """Return the L2 norm of all gradients, over all ranks.

        Floating-point sums depend on their order, and Megatron adds gradients in the order in which layers
        register their parameters, which differs between layer implementations. Sorting by canonical name
        makes the norm, and everything clipped by it, independent of the implementation.
        """
        gradients: dict[Any, list[torch.Tensor]] = defaultdict(list)  # by the process group that sums them
        for part in self._parts():
            by_name = sorted(part.get_grads_for_grad_norm(), key=self._gradient_names(part).__getitem__)
            gradients[part.get_grad_stats_parallel_group()] += by_name
            # The reduction of the norm tells all ranks, without a collective of its own.
            if not loss_is_finite:
                gradients[part.get_grad_stats_parallel_group()].append(
                    torch.full((1,), math.nan, device=platform.current().device)
                )

        # Squared norms add up if parts, such as experts, are summed over different groups.
        norms = [
            float(clip_grads.get_grad_norm_fp32(each, grad_stats_parallel_group=group))
            for group, each in gradients.items()
        ]
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

    def _gradient_names(self, part: Any) -> dict[torch.Tensor, str]:
        """Return the canonical parameter name of each gradient of one of Megatron's optimizers."""
        masters = [group["params"] for group in part.optimizer.param_groups]
        places = part.model_param_group_index_map.items()
        attribute = _gradient_attribute(part)
        return {
            getattr(masters[group][number], attribute): self._names[parameter]
            for parameter, (group, number) in places
        }


def _settings(config: OptimConfig) -> dict[str, Any]:
    """Return the values of Megatron's fields that belong to the kind of the optimizer."""
    settings = {}
    for field, (key, position) in config.kind.needs.settings.items():
        value = getattr(config, key)
        settings[field] = value if position is None else value[position]
    return settings


def _moments_of(part: Any) -> Mapping[str, str]:
    """Return the moments of one of Megatron's optimizers, whose parameters may be those of another kind."""
    return OptimizerKind(part.config.optimizer).needs.moments


def _counts_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state of each tensor has a count, as in torch and unlike in fused optimizers."""
    return type(optimizer).__module__.startswith("torch.optim")


def _gradient_attribute(part: Any) -> str:
    """Return where one of Megatron's optimizers has its gradients.

    Torch allows only gradients of a parameter's own dtype, so Transformer Engine's Adam has another attribute
    for the gradients of bfloat16 weights.
    """
    return _DECOUPLED if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"


def _make_moments(part: Any) -> None:
    """Create the moments of one of Megatron's optimizers, as the first step would.

    The state that can be offloaded or saved is then the same before and after the first step.
    """
    optimizer = part.optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Transformer Engine's Adam knows the dtypes, and also creates the masters.
            if part.config.use_precision_aware_optimizer:
                optimizer.initialize_state(parameter, store_param_remainders=False)
                continue
            state = optimizer.state[parameter]
            if _counts_by_tensor(optimizer):
                # torch keeps the step count on the host unless the whole update runs on the device.
                device = parameter.device if group.get("capturable") or group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state.update({name: torch.zeros_like(parameter) for name in _moments_of(part)})


def _construction() -> contextlib.AbstractContextManager[None]:
    if platform.current().is_cuda:
        return contextlib.nullcontext()
    from megarl.engine.cpu_adaptations import cuda_type_names

    return cuda_type_names()
