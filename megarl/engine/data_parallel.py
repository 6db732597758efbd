"""Megatron's data parallelism around the models of a rank.

Gradients are reduced and parameters gathered bucket by bucket, overlapping with the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from megarl.config.schema import ParallelConfig
from megarl.engine import platform
from megarl.engine.megatron_options import NO_OPTIONS, build_config
from megarl.engine.model import ModelChunk


def wrap_models(
    models: Sequence[ModelChunk], parallel: ParallelConfig, options: Mapping[str, Any] = NO_OPTIONS
) -> list[DistributedDataParallel]:
    """Wrap the models that train. Megatron moves their parameters into its own contiguous buffers.

    Args:
        models: One for each virtual pipeline stage of this rank.
        options: Fields of Megatron's configuration in addition to those that megarl sets.
    """
    overlap = overlaps(parallel, platform.current().is_cuda)
    own = dict(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        # The optimizer step starts gathering all buckets, so no layer has to start gathering the next one.
        align_param_gather=overlap,
    )
    config = build_config(DistributedDataParallelConfig, own, options)

    # Later virtual stages communicate while the first one still computes, so one bucket each is enough.
    chunks = [
        DistributedDataParallel(model.config, config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_gradients
        # Only the last micro-batch reduces gradients; the others accumulate them.
        if overlap:
            model_config: Any = chunk.config  # declares one function, but takes one per virtual stage
            model_config.no_sync_func = (
                chunks[0].no_sync if len(chunks) == 1 else [each.no_sync for each in chunks]
            )

    return chunks


def await_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait for parameters that other replicas have updated.

    Must be called before parameters are read or moved.
    """
    for group in _bucket_groups(chunks):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def expect_no_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell Megatron that the parameters are complete until the next step.

    Otherwise Megatron would gather them in the next forward pass, which some replicas may not have.
    """
    for group in _bucket_groups(chunks):
        group.param_gather_dispatched = True


def start_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Start to gather the updated parameters, overlapping with what follows."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


def _bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


def overlaps(parallel: ParallelConfig, on_cuda: bool) -> bool:
    """Return whether communication between replicas overlaps with the computation.

    It does not with gloo, which would use the same processors.
    """
    return on_cuda and parallel.num_copies > 1


def finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **keywords: Any) -> None:
    """Reduce the gradients as Megatron does, without its division by a number of tokens.

    This covers data parallelism, sequence parallelism and tied embeddings.
    """
    finalize_model_grads(chunks, None, **keywords)
