"""Megatron's data parallelism around the models of a rank: gradients are reduced and parameters gathered,
bucket by bucket beside the computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from megarl.config.schema import ParallelConfig
from megarl.engine import platform
from megarl.engine.model import ModelChunk


def wrap_models(models: Sequence[ModelChunk], parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Wrap the models that train. Megatron moves their parameters into its own contiguous buffers.

    Args:
        models: One for each virtual pipeline stage of this rank.
    """
    overlap = overlaps(parallel, platform.current().is_cuda)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        # The optimizer's step starts to gather all buckets; no layer starts with those of the next one.
        align_param_gather=overlap,
    )

    # The models of later virtual stages wait for nobody, so they have one bucket.
    chunks = [
        DistributedDataParallel(model.config, config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_gradients
        # The gradients of all micro-batches but the last are only added up.
        if overlap:
            chunk.config.no_sync_func = (
                chunks[0].no_sync if len(chunks) == 1 else [each.no_sync for each in chunks]
            )

    return chunks


def await_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait for parameters that other replicas have updated. To be called before anybody reads or moves
    them."""
    for group in _bucket_groups(chunks):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def expect_no_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell Megatron that the parameters are whole until the next step. It would gather them in the next
    forward pass, of which some replicas may have none."""
    for group in _bucket_groups(chunks):
        group.param_gather_dispatched = True


def start_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Start to gather the updated parameters, so that it overlaps with what follows."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


def _bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


def overlaps(parallel: ParallelConfig, on_cuda: bool) -> bool:
    """Return whether replicas communicate beside the computation. With gloo the processors that compute would
    do both."""
    return on_cuda and parallel.num_copies > 1


def finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **keywords: Any) -> None:
    """Reduce the gradients as Megatron does (data parallel, sequence parallel, tied embeddings), without its
    division by a number of tokens."""
    finalize_model_grads(chunks, None, **keywords)
