"""Simulate the compiled functions of Transformer Engine (bf16 and fp32, no FP8) on fake tensors.

Each function has the name, the arguments, the outputs and the checks of its counterpart in
`transformer_engine_torch`, and allocates the outputs without computing them. Arguments after which the
signature has a `/` have no names in the compiled module. Attention is in transformer_engine_torch.py.

Workspaces that a kernel allocates while it runs are not counted: cuBLAS and cuDNN choose their sizes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop

from megarl.machine.errors import counted
from megarl.rehearse.dry_run.stand_ins.te_enums import NVTE_QKV_Format, TEDType
from megarl.rehearse.dry_run.stand_ins.te_signature import (
    TORCH_DTYPES,
    check,
    count_flops,
    kernel,
    matrix_size,
    new,
)

_CUDNN = "nvidia-cudnn-cu13"
_OLDEST_CUDNN = "9.12.0"  # that Transformer Engine supports
_NUM_STREAMS = 4  # on which a grouped product runs, each with a workspace of its own


def _product_shape(a: Tensor, transa: bool, b: Tensor, transb: bool) -> tuple[int, ...]:
    """Return the shape of a product of two matrices in cuBLAS's order, and count its operations."""
    a_rows, a_columns = matrix_size(a.shape)
    b_rows, b_columns = matrix_size(b.shape)
    inner = a_columns if transa else a_rows
    check(
        inner == (b_rows if transb else b_columns),
        f"the product of A {tuple(a.shape)} (transposed: {transa}) and B {tuple(b.shape)} (transposed: "
        f"{transb}) does not exist",
    )
    check(a.dtype == b.dtype, f"the dtypes of A and B differ: {a.dtype} and {b.dtype}")

    outer = (b_columns,) if transb else tuple(b.shape[:-1])
    width = a_rows if transa else a_columns
    count_flops(mm_flop((prod(outer), inner), (inner, width)))

    return *outer, width


@kernel
def generic_gemm(  # noqa: PLR0913
    A: Tensor,  # noqa: N803
    transA: bool,  # noqa: N803
    B: Tensor,  # noqa: N803
    transB: bool,  # noqa: N803
    D: Tensor | None,  # noqa: N803
    quantizer: None,
    output_dtype: TEDType | None,
    bias: Tensor | None,
    bias_type: TEDType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: None = None,
    comm_type: None = None,
    extra_output: None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    shape = _product_shape(A, transA, B, transB)
    dtype = A.dtype if output_dtype is None else TORCH_DTYPES[TEDType(output_dtype)]
    check(not gelu, "a fused GELU is not simulated")
    check(accumulate or not beta, f"beta={beta}, but the product is not accumulated")
    check(workspace.numel() >= workspace_size, f"the workspace has {workspace.numel()} bytes")

    if D is None:
        check(not accumulate, "a product is accumulated, but there is no D")
        D = new(shape, dtype)  # noqa: N806
    else:
        check(tuple(D.shape) == shape, f"D has shape {tuple(D.shape)}, but the product has shape {shape}")
        check(D.dtype == dtype, f"D is {D.dtype}, but the product is {dtype}")

    bias_gradient = None
    if bias is not None:
        size = B.shape[-1] if grad else shape[-1]
        check(tuple(bias.shape) == (size,), f"the bias has shape {tuple(bias.shape)}, not ({size},)")
        bias_gradient = new((size,), dtype) if grad else None

    return [D, bias_gradient, None, None]


@kernel
def te_general_grouped_gemm(
    A: list[Tensor],  # noqa: N803
    transa: bool,
    B: list[Tensor],  # noqa: N803
    transb: bool,
    D: list[Tensor] | None,  # noqa: N803
    D_type: TEDType,  # noqa: N803
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: TEDType,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
    /,
) -> list[Tensor] | None:
    number = len(A)
    check(D is not None, "products without outputs are not simulated")
    for other, tensors in (("B", B), ("bias", bias), ("pre_gelu_out", pre_gelu_out)):
        check(len(tensors) == number, f"A has {counted(number, 'tensor')}, but {other} has {len(tensors)}")
    check(all(not each.numel() for each in pre_gelu_out), "a fused GELU is not simulated")
    assert D is not None
    dtype = TORCH_DTYPES[TEDType(D_type)]
    shapes = [_product_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]

    # One output holds all products, one after another.
    if single_output:
        held, needed = D[0].numel(), sum(map(prod, shapes))
        check(held >= needed, f"the products have {needed} elements, but D has {held}")
        check(D[0].dtype == dtype, f"D is {D[0].dtype}, but the products are {dtype}")
        return bias

    check(len(D) == number, f"there are {number} products, but {len(D)} outputs")
    for output, shape in zip(D, shapes, strict=True):
        check(tuple(output.shape) == shape, f"D has shape {tuple(output.shape)}, but the product {shape}")
        check(output.dtype == dtype, f"D is {output.dtype}, but the product is {dtype}")
    return bias


@kernel
def get_num_cublas_streams() -> int:
    return _NUM_STREAMS


@kernel
def get_cublasLt_version() -> int:  # noqa: N802
    return 130000


@kernel
def get_cudnn_version() -> int:
    """Return the version of cuDNN that is installed with torch, as cuDNN encodes it."""
    try:
        installed = version(_CUDNN)
    except PackageNotFoundError:  # torch for CPUs
        installed = _OLDEST_CUDNN
    major, minor, patch = map(int, installed.split(".")[:3])
    return major * 10000 + minor * 100 + patch


@kernel
def rmsnorm_fwd(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: None,
    otype: TEDType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:
    rows, width = matrix_size(input.shape)
    check(
        tuple(weight.shape) == (width,),
        f"the weight has shape {tuple(weight.shape)}, the input {width} columns",
    )
    if ln_out is None:
        ln_out = new(input.shape, TORCH_DTYPES[TEDType(otype)])
    check(ln_out.shape == input.shape, f"the output has shape {tuple(ln_out.shape)}")
    return [ln_out, None, new((rows,), torch.float32)]


@kernel
def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    /,
) -> list[Tensor]:
    rows, width = matrix_size(x.shape)
    check(dz.numel() == x.numel(), f"dz has shape {tuple(dz.shape)}, but x {tuple(x.shape)}")
    check(tuple(rsigma.shape) == (rows,), f"rsigma has shape {tuple(rsigma.shape)}, not ({rows},)")
    check(tuple(gamma.shape) == (width,), f"gamma has shape {tuple(gamma.shape)}, not ({width},)")
    return [new(x.shape, x.dtype), new(gamma.shape, gamma.dtype)]


def _rotated(
    tensor: Tensor, freqs: Tensor, qkv_format: NVTE_QKV_Format, cu_seqlens: Tensor | None, cp_size: int
) -> Tensor:
    check(
        freqs.dim() == 4 and freqs.shape[1:3] == (1, 1),
        f"freqs has shape {tuple(freqs.shape)}, not (length, 1, 1, dim)",
    )
    check(freqs.dtype == torch.float32, f"freqs is {freqs.dtype}, not torch.float32")
    check(
        tensor.shape[-1] >= freqs.shape[3], f"freqs rotates {freqs.shape[3]} of {tensor.shape[-1]} elements"
    )

    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        check(tensor.dim() == 3, f"a packed tensor has shape {tuple(tensor.shape)}, not (T, heads, dim)")
        check(cu_seqlens is not None and cu_seqlens.dim() == 1, "packed rows have no cu_seqlens")
    else:
        check(tensor.dim() == 4, f"a padded tensor has shape {tuple(tensor.shape)}")
        length = tensor.shape[0 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1]
        check(length * cp_size <= freqs.shape[0], f"freqs has {freqs.shape[0]} positions for {length}")

    return new(tensor.shape, tensor.dtype)


@kernel
def fused_rope_forward(
    input: Tensor,  # noqa: A002
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    /,
) -> Tensor:
    return _rotated(input, freqs, qkv_format, cu_seqlens, cp_size)


@kernel
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    /,
) -> Tensor:
    return _rotated(output_grads, freqs, qkv_format, cu_seqlens, cp_size)


@kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = 0,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities and a routing map like the logits, and float32 scores for the backward pass."""
    _check_router(logits, topk, score_function)
    check(routing_map_format == 0 and topk_indices is None, "only routing maps of bytes are simulated")
    # The simulated device knows the choices of a top-k, and so the number of tokens of each expert.
    chosen = logits.topk(topk, dim=-1).indices
    routing_map = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    return new(logits.shape, logits.dtype), routing_map, new(logits.shape, torch.float32)


@kernel
def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits."""
    _check_router(grad_probs, topk, score_function)
    shapes = {tuple(each.shape) for each in (routing_map, intermediate_output, grad_probs, grad_logits)}
    check(len(shapes) == 1, f"the tensors have the shapes {sorted(shapes)}")


def _check_router(values: Tensor, topk: int, score_function: str) -> None:
    check(values.is_contiguous(), "the values of the experts are not contiguous")
    check(0 < topk <= values.shape[-1], f"topk is {topk} of {values.shape[-1]} experts")
    check(score_function in ("softmax", "sigmoid", "sqrtsoftplus"), f"the score is {score_function}")


def _check_lists(tensor_lists: list[list[Tensor]], number: int) -> None:
    check(len(tensor_lists) == number, f"there are {len(tensor_lists)} lists of tensors, not {number}")
    for tensors in zip(*tensor_lists, strict=True):
        sizes = {each.numel() for each in tensors}
        check(len(sizes) == 1, f"tensors at the same place have {sorted(sizes)} elements")


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    /,
) -> None:
    """Take gradients, parameters and both moments, and masters if parameters have fewer bits."""
    _check_lists(tensor_lists, 5 if len(tensor_lists) == 5 else 4)
    check(noop_flag.dtype == torch.int32, f"the flag is {noop_flag.dtype}, not torch.int32")
    moments = {each.dtype for tensors in tensor_lists[2:4] for each in tensors}
    is_known = moments in (set(), {torch.float32}, {torch.bfloat16})
    check(is_known, f"the moments are {sorted(map(str, moments))}, not all float32 or all bfloat16")
    for each in tensor_lists[4] if len(tensor_lists) == 5 else ():
        check(each.dtype == torch.float32, f"a master is {each.dtype}, not torch.float32")


@kernel
def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
    /,
) -> None:
    _check_lists(tensor_lists, 2)


@kernel
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool | None,
    /,
) -> tuple[Tensor, Tensor]:
    _check_lists(tensor_lists, 1)
    return new((1,), torch.float32), new((len(tensor_lists[0]) if per_tensor else 0,), torch.float32)
