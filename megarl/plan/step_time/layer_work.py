"""Forward and backward passes of one layer on one rank: the sum over its parts and their matrices. Pure."""

from __future__ import annotations

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import LayerPart, Matrix
from megarl.models.mapping import MIXER, Cut, size_of
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.step_time.counts import IDLE, NOTHING, Counts, Edge, PassCounts, call, joined, linear, total
from megarl.plan.step_time.packed_batch import PackedBatch


def layer_work(
    architecture: Architecture,
    parallel: ParallelConfig,
    layer: tuple[LayerPart, ...],
    batch: PackedBatch,
    dtype: str,
) -> tuple[PassCounts, PassCounts, PassCounts]:
    """Return the work of a layer for a micro-batch, in three parts.

    The first is what mixes the tokens of a row, with its matrices and their calls, except attention itself;
    the second attention without its matrices; the third the MLP or the experts, with their calls.
    """
    edge = Edge(parallel, batch.tokens, architecture.hidden_size, dtype)
    mixers = [part for part in layer if part.kind.prefix == MIXER]
    return (
        joined(_part_work(part, architecture, edge, batch) for part in mixers),
        joined(_core(part, architecture, edge, batch) for part in mixers),
        joined(_part_work(part, architecture, edge, batch) for part in layer if part not in mixers),
    )


def _part_work(part: LayerPart, architecture: Architecture, edge: Edge, batch: PackedBatch) -> PassCounts:
    """Return the work of the matrices of a part, its recurrence, and the calls that its kind needs."""
    if part.has_predictors_only:
        edge = edge._replace(tokens=batch.kept)
    parallel = edge.parallel
    sizes = dimension_sizes(architecture)
    kind = part.kind

    # A recurrence has twice as many products in the backward pass.
    ranks = parallel.tensor_parallel_size * parallel.context_parallel_size
    flops = 2 * batch.tokens_with_prompts * size_of(kind.recurrence, sizes) // ranks
    # Each rank's heads contribute to the gradient of the norm of heads.
    summed = call(parallel, "all_reduce", "tensor", size_of(kind.summed, sizes), edge.dtype)
    gathered = edge._replace(width=size_of(kind.gathered, sizes)).entered(trains=False)
    selects = _selects(part, architecture, batch)
    return joined(
        (
            *(matrix_work(matrix, edge) for matrix in part.matrices if selects or not matrix.selects),
            PassCounts(Counts((), flops, flops), Counts((), 2 * flops, 2 * flops)),
            PassCounts(NOTHING, summed if kind.summed else NOTHING),
            gathered if kind.gathered else IDLE,
            _heads_for_tokens(part, edge, batch),
            _exchanges(part, edge),
        )
    )


def _selects(part: LayerPart, architecture: Architecture, batch: PackedBatch) -> bool:
    """Return whether a micro-batch has rows of which a query sees a selection of the keys only."""
    most = size_of(part.kind.most_keys, dimension_sizes(architecture))
    return 0 < most < max((each.keys for each in batch.attention), default=0)


def _heads_for_tokens(part: LayerPart, edge: Edge, batch: PackedBatch) -> PassCounts:
    """Return the calls by which context-parallel ranks exchange their tokens for heads, and back."""
    if not part.kind.splits_heads:
        return IDLE
    held = (matrix.on_rank(edge.parallel.tensor_parallel_size, 1) for matrix in part.matrices)
    # The outputs of the matrices before the recurrence, and the inputs of the one after it.
    widths = (each.inputs if each.cut is Cut.row else each.outputs for each in held if each.is_linear)
    exchanged = total(
        call(edge.parallel, "all_to_all", "context", batch.tokens * width, edge.dtype) for width in widths
    )
    return PassCounts(exchanged, exchanged)


def _core(part: LayerPart, architecture: Architecture, edge: Edge, batch: PackedBatch) -> PassCounts:
    """Return the attention of all heads of a rank; nothing for a part without pairs of tokens.

    The forward pass has two products per pair of a query and a key: one with the key, one with the value. The
    backward pass has the gradients of both inputs of both, and fused kernels, which do not save the first
    product, repeat it. With latent attention, values are padded to the size of keys.

    Attention over selected keys computes all keys with a mask, and again in the backward pass. An indexer
    scores every pair.
    """
    if not part.kind.of_pair:
        return IDLE
    parallel = edge.parallel
    product = 2 * architecture.num_attention_heads // parallel.tensor_parallel_size * architecture.head_dim
    forward = 2 * product
    backward = (4 if edge.dtype == "float32" else 5) * product
    pairs = batch.share * sum(each.queries * each.keys for each in batch.attention)
    sizes = dimension_sizes(architecture)
    window = 0 if size_of(part.kind.most_keys, sizes) else part.window
    scores = 0
    if _selects(part, architecture, batch):
        backward += forward
        scores = 2 * sum(size_of(each, sizes) for each in part.kind.of_every_pair)
    masked = batch.share * sum(each.pairs(window) for each in batch.attention)

    return joined(
        (
            PassCounts(
                Counts(
                    attention_flops=(forward + scores) * pairs,
                    masked_attention_flops=(forward + scores) * masked,
                ),
                Counts(attention_flops=backward * pairs, masked_attention_flops=backward * masked),
            ),
            _key_exchange(architecture, parallel, batch, edge.dtype),
        )
    )


def _key_exchange(
    architecture: Architecture, parallel: ParallelConfig, batch: PackedBatch, dtype: str
) -> PassCounts:
    """Return the calls by which context-parallel ranks see each other's keys and values.

    In a ring, each rank passes on the keys and values of the others, and in the backward pass their gradients
    with them: the first message has no gradients yet, and the last one has nothing else.
    """
    ranks = parallel.context_parallel_size
    if ranks == 1:
        return IDLE

    heads = architecture.num_key_value_heads // parallel.tensor_parallel_size
    held = heads * 2 * architecture.head_dim * batch.tokens

    if not batch.passes_keys_on:
        gathered, reduced = (
            call(parallel, kind, "context", ranks * held, dtype) for kind in ("all_gather", "reduce_scatter")
        )
        return PassCounts(gathered, reduced)

    def passed(calls: int, messages: int) -> Counts:
        size = held * messages / calls
        return total(call(parallel, kind, "context", size, dtype, calls) for kind in ("send", "recv"))

    return PassCounts(passed(ranks - 1, ranks - 1), passed(ranks, 2 * (ranks - 1)))


def _exchanges(part: LayerPart, edge: Edge) -> PassCounts:
    """Return the calls that bring tokens to their experts and back; nothing for a part without experts.

    The ranks tell each other how many tokens come, which the backward pass knows. Then they send tokens and
    the weights of their experts, and the results. The backward pass sends as much the other way.
    """
    routed = next((matrix for matrix in part.matrices if matrix.num_experts), None)
    if routed is None:
        return IDLE
    parallel = edge.parallel
    sent = edge.own_tokens * routed.num_met
    ranks = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size
    counted = call(parallel, "all_gather", "expert_stage", ranks * routed.num_experts, "int64")
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
    if matrix.selects:
        work = linear(edge.tokens, held.inputs, held.outputs)
        entered = edge._replace(width=held.inputs).entered(trains=False).forward
        return PassCounts(total((work.forward, entered)), work.backward if matrix.trains else NOTHING)
    if matrix.cut is Cut.replicated:
        # Megatron's router has both gradients always.
        trains = matrix.trains or matrix.name.startswith("mlp.router.")
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
