"""Forward and backward passes of the matrices of a layer on one rank, with their calls and adapters. Pure."""

from __future__ import annotations

from megarl.models.layers import Matrix
from megarl.models.mapping import Cut
from megarl.step_time.collectives import call
from megarl.step_time.work import IDLE, Edge, PassCounts, joined, linear

_ROUTER = "mlp.router."


def matrix_work(matrix: Matrix, edge: Edge) -> PassCounts:
    """Return the work of a matrix. A convolution counts as an element-wise operation.

    Args:
        edge: The hidden states that the part of the layer receives and returns.
    """
    parallel = edge.parallel
    held = matrix.on_rank(parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size)
    if matrix.is_depthwise:
        return IDLE
    if matrix.num_experts:
        return _of_experts(held, edge)

    # Every rank multiplies all tokens by a sharded matrix, and only its own ones by any other. The low-rank
    # side of an adapter is sharded like tokens: it is gathered after A, or summed before B.
    low = edge._replace(width=matrix.rank * len(matrix.adapters))
    own = edge.own_tokens
    if matrix.cut is Cut.replicated:
        # Megatron's router has both gradients always.
        trains = matrix.trains or matrix.name.startswith(_ROUTER)
        return joined(
            (linear(own, held.inputs, held.outputs, trains=trains), _adapters(held, own, own, IDLE))
        )

    whole = linear(edge.tokens, held.inputs, held.outputs, trains=matrix.trains)
    if matrix.cut is Cut.row:
        left = edge._replace(width=held.outputs).left()
        return joined((whole, left, _adapters(held, edge.tokens, own, low.left())))
    entered = edge._replace(width=held.inputs).entered(trains=matrix.trains)
    return joined((entered, whole, _adapters(held, own, edge.tokens, low.entered(trains=False))))


def _adapters(
    held: Matrix, rows_of_a: float, rows_of_b: float, moved: PassCounts, times: float = 1
) -> PassCounts:
    """Return the work of the adapters of a matrix.

    Args:
        held: The rank's part of the matrix.
        rows_of_a: The tokens that A multiplies.
        rows_of_b: The tokens that B multiplies.
        moved: The calls between the two.
        times: The number of such matrices.
    """
    if not held.adapters:
        return IDLE
    low = held.rank * len(held.adapters)
    products = (linear(rows_of_b, held.rank, outputs, times=times) for outputs in held.adapters)
    return joined((linear(rows_of_a, held.inputs, low, times=times), moved, *products))


def _of_experts(held: Matrix, edge: Edge) -> PassCounts:
    """Return the products of this rank's experts. All ranks that have a part of an expert get its tokens.

    The gradients of the matrices of adapters that these ranks share are summed: A of the layer with sharded
    outputs, and B of the one with sharded inputs.
    """
    parallel = edge.parallel
    times = held.num_experts // parallel.expert_parallel_size
    rows = edge.own_tokens * held.num_met * parallel.expert_tensor_parallel_size / times
    whole = linear(rows, held.inputs, held.outputs, trains=held.trains, times=times)
    if not held.adapters:
        return whole

    shared = held.rank * (1 if held.cut is Cut.row else len(held.adapters)) * edge.width
    summed = call(parallel, "all_reduce", "expert_tensor", shared, edge.dtype, times)
    return joined((whole, _adapters(held, rows, rows, PassCounts(backward=summed), times)))
