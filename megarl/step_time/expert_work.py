"""Forward and backward passes of a mixture-of-experts layer, with an even load of its experts. Pure.

A rank sends each of its tokens once to each selected expert, as Megatron-Core's all-to-all dispatcher does.
"""

from __future__ import annotations

from megarl.models.architecture import Experts
from megarl.step_time.collectives import call
from megarl.step_time.counts import Counts, total
from megarl.step_time.work import IDLE, Edge, PassCounts, joined, linear


def expert_work(experts: Experts, edge: Edge, *, router_trains: bool) -> PassCounts:
    """Return the work of router, dispatch, experts and the shared expert.

    Args:
        experts: The experts of the model.
        edge: The hidden states.
        router_trains: Whether the router has gradients.
    """
    parallel = edge.parallel
    shards = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    tokens = edge.tokens // shards  # which this rank routes
    return joined(
        (
            linear(tokens, edge.width, experts.num_experts, trains=router_trains),
            _exchanges(experts, edge, tokens),
            _experts(experts, edge, tokens),
            _shared_expert(experts, edge, tokens),
        )
    )


def _exchanges(experts: Experts, edge: Edge, tokens: int) -> PassCounts:
    """Return the calls that bring tokens to their experts and back.

    The ranks tell each other how many tokens come, which the backward pass knows. Then they send tokens and
    the weights of their experts, and the results. The backward pass sends as much the other way.
    """
    parallel = edge.parallel
    sent = tokens * experts.num_experts_per_tok
    ranks = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size
    counted = call(parallel, "all_gather", "expert_stage", ranks * experts.num_experts, "int64")
    both_ways = total(
        (
            call(parallel, "all_to_all", "expert", sent * edge.width, edge.dtype, 2),
            call(parallel, "all_to_all", "expert", sent, "float32"),
        )
    )
    return joined((PassCounts(total((counted, both_ways)), both_ways), _shared_inputs(edge, sent)))


def _shared_inputs(edge: Edge, sent: int) -> PassCounts:
    """Return the calls between ranks that have parts of the same experts.

    They gather tokens and weights, and sum their results in float32.
    """
    parallel = edge.parallel
    gathered = sent * parallel.expert_tensor_parallel_size

    def moved(kind: str, width: int, dtype: str) -> Counts:
        return call(parallel, kind, "expert_tensor", gathered * width, dtype)

    inputs, gradients = (
        total((moved(kind, edge.width, edge.dtype), moved(kind, 1, "float32")))
        for kind in ("all_gather", "reduce_scatter")
    )
    return joined(
        (
            PassCounts(inputs, gradients),
            PassCounts(
                moved("reduce_scatter", edge.width, "float32"), moved("all_gather", edge.width, "float32")
            ),
        )
    )


def _experts(experts: Experts, edge: Edge, tokens: int) -> PassCounts:
    """Return the products of this rank's experts. All ranks that have a part of an expert get its tokens."""
    shards = edge.parallel.expert_tensor_parallel_size
    held = experts.num_experts // edge.parallel.expert_parallel_size
    rows = tokens * experts.num_experts_per_tok * shards / held
    size = experts.intermediate_size // shards
    return joined(
        (
            linear(rows, edge.width, 2 * size, times=held),
            linear(rows, size, edge.width, times=held),
        )
    )


def _shared_expert(experts: Experts, edge: Edge, tokens: int) -> PassCounts:
    """Return the work of the expert that sees every token, and of its gate."""
    size = experts.shared_intermediate_size // edge.parallel.tensor_parallel_size
    if not size:
        return IDLE
    return joined(
        (
            edge.entered(),
            linear(edge.tokens, edge.width, 2 * size),
            linear(edge.tokens, size, edge.width),
            edge.left(),
            linear(tokens, edge.width, 1) if experts.has_shared_gate else IDLE,
        )
    )
