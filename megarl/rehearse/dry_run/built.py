"""Check marks and switches of a built engine. Without them a run is silently wrong, or slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from megarl.machine.errors import counted
from megarl.models.mapping import AXES, Cut
from megarl.rehearse.dry_run.record import RehearsalError
from megarl.weights.shard_layout import held_weights

if TYPE_CHECKING:  # imports Megatron, which requires an active platform
    from megarl.engine.engine import MegatronEngine

_LISTED = 4


def check_engine(engine: MegatronEngine, *, with_transformer_engine: bool) -> None:
    """Check the marks of sharded parameters, the accumulation of weight gradients, and the optimizer.

    Args:
        engine: The engine, whose parameters have the names and shapes of its layout.
        with_transformer_engine: Whether Transformer Engine is installed, whose optimizer Megatron then uses.

    Raises:
        RehearsalError: Something is missing. The message lists it.
    """
    parameters = dict(pair for model in engine.models for pair in model.canonical_parameters())
    faults = list(_wrong_marks(engine, parameters))
    for model in engine.models:
        faults += _separate_gradients(model)
    if with_transformer_engine and engine.spec.optim is not None:
        faults += _other_optimizers(engine)

    if faults:
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise RehearsalError("the built engine is wrong: " + "; ".join(faults[:_LISTED]) + more)


def _wrong_marks(engine: MegatronEngine, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[str]:
    """Yield parameters whose marks differ from the layout, by which Megatron sums the gradient norm."""
    for weight in held_weights(engine.spec.architecture, engine.layout, engine.spec.head):
        shards, _ = engine.layout.cut_of(weight)
        if shards == 1:
            continue
        parameter = parameters[weight.megatron_name]
        # The axes of these views split or stack the first dimension of the parameter.
        expected = 0 if weight.cut in (Cut.qkv, Cut.gated) else AXES[weight.cut].cut
        is_marked = getattr(parameter, "tensor_model_parallel", False)
        marked = getattr(parameter, "partition_dim", None)

        if expected is None and is_marked:
            ranks = counted(shards, "rank")
            yield f"{weight.megatron_name} is replicated, but marked as sharded over {ranks}"
        elif expected is not None and not is_marked:
            yield f"{weight.megatron_name} is sharded over {counted(shards, 'rank')}, but not marked"
        elif expected is not None and marked != expected:
            yield f"{weight.megatron_name} is sharded along dimension {expected}, but marked for {marked}"


def _separate_gradients(model: torch.nn.Module) -> Iterator[str]:
    """Yield layers of Transformer Engine that do not add weight gradients to Megatron's buffer themselves."""
    for name, module in model.named_modules():
        if not getattr(module, "fuse_wgrad_accumulation", True):
            yield f"{name} computes weight gradients separately from the gradient buffer"


def _other_optimizers(engine: MegatronEngine) -> Iterator[str]:
    whole = engine.optimizer.megatron_optimizer
    for part in getattr(whole, "chained_optimizers", [whole]):
        made_by = type(part.optimizer)
        if made_by.__module__.partition(".")[0] != "transformer_engine":
            yield f"the optimizer is {made_by.__module__}.{made_by.__qualname__}, not Transformer Engine's"
