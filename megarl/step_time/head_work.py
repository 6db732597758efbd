"""Forward and backward passes of the embedding and of the output layer on one rank. Pure."""

from __future__ import annotations

from megarl.config.memory_sizes import logit_chunk_tokens
from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.models.adapters import OUTPUT_MODULE
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.step_time.collectives import call
from megarl.step_time.counts import NOTHING, Counts, product, total
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.work import Edge, PassCounts, joined, linear


def embedding_work(edge: Edge, *, trains: bool) -> PassCounts:
    """Return the calls of an embedding, each rank of which has a part of the vocabulary."""
    return edge.left() if trains else PassCounts(edge.left().forward)


def head_work(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    edge: Edge,
    batch: PackedBatch,
    num_scores: int,
) -> PassCounts:
    """Return the work of the output layer.

    Args:
        edge: The hidden states of the last layer.
        num_scores: The number of outputs per response token of a language model.
    """
    if role.with_value_head:
        # Every rank computes the whole head, from gathered hidden states.
        gathered = edge.call("all_gather") if edge.parallel.sequence_parallel else NOTHING
        return joined(
            (PassCounts(gathered), linear(batch.scored, edge.width, 1), _scores(role, batch.responses))
        )

    entered = edge.entered(trains=False)
    chunk = logit_chunk_tokens(config.engine, architecture)
    return joined(
        (
            entered,
            _logits(architecture, edge, batch.scored, chunk),
            _scores(role, num_scores * batch.responses),
        )
    )


def _scores(role: ModelRole, elements: int) -> PassCounts:
    """Return the sum of scores over the context-parallel ranks, each of which has those of its own tokens."""
    return PassCounts(call(role.parallel, "all_reduce", "context", elements, "float32"))


def _logits(architecture: Architecture, edge: Edge, tokens: int, chunk: int) -> PassCounts:
    """Return the logits and their gradients, a chunk of tokens at a time.

    The ranks exchange the maximum of each token's logits, and then four sums. The backward pass computes the
    logits again, except for those of the last chunk. A frozen output layer has no weight gradient.
    """
    shards = edge.parallel.tensor_parallel_size
    columns = min(padded_vocab_size(architecture.vocab_size, shards) // shards, architecture.vocab_size)
    whole_chunks, rest = divmod(tokens, chunk)
    sizes = {chunk: whole_chunks, rest: 1} if rest else {chunk: whole_chunks}
    last = rest or chunk
    trains = architecture.trains_fully(OUTPUT_MODULE)
    forward: list[Counts] = []
    backward: list[Counts] = []

    for size, number in sizes.items():
        if not number:
            continue
        forward += [
            product(size, edge.width, columns, number),
            call(edge.parallel, "all_reduce", "tensor", size, "float32", number),
            call(edge.parallel, "all_reduce", "tensor", 4 * size, "float32", number),
        ]
        again = number - (size == last)
        backward += [
            product(size, edge.width, columns, again),
            product(size, columns, edge.width, number),
            product(columns, size, edge.width, number * trains),
        ]

    return PassCounts(total(forward), total(backward))
