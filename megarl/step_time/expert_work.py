"""Forward and backward passes of a mixture-of-experts layer, with an even load of its experts. Pure.

A rank sends each of its tokens once to each selected expert, as Megatron-Core's all-to-all dispatcher does.
"""

from __future__ import annotations

from megarl.models.architecture import Experts
from megarl.models.mapping import EXPERT
from megarl.step_time.collectives import call
from megarl.step_time.counts import Counts, total
from megarl.step_time.linears import Linears, mlp_work
from megarl.step_time.work import IDLE, Edge, PassCounts, joined, linear


def expert_work(experts: Experts, linears: Linears, edge: Edge) -> PassCounts:
    """Return the work of router, dispatch, experts and the shared expert.

    Args:
        edge: The hidden states.
    """
    tokens = edge.own_tokens
    gate = linear(tokens, edge.width, 1, trains=not linears.is_frozen) if experts.has_shared_gate else IDLE
    return joined(
        (
            linear(tokens, edge.width, experts.num_experts),  # Megatron's router has both gradients always
            _exchanges(experts, edge, tokens),
            _experts(experts, linears, edge, tokens),
            mlp_work(linears, "mlp.shared_experts", edge, experts.shared_intermediate_size),
            gate,
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


def _experts(experts: Experts, linears: Linears, edge: Edge, tokens: int) -> PassCounts:
    """Return the products of this rank's experts. All ranks that have a part of an expert get its tokens."""
    shards = edge.parallel.expert_tensor_parallel_size
    held = experts.num_experts // edge.parallel.expert_parallel_size
    rows = tokens * experts.num_experts_per_tok * shards / held
    size = experts.intermediate_size // shards
    return joined(
        (
            linears.of_experts(f"{EXPERT}linear_fc1", rows, edge.width, 2 * size, shards, held),
            linears.of_experts(f"{EXPERT}linear_fc2", rows, size, edge.width, 1, held),
            linears.replicated_of_experts(edge, held),
        )
    )
