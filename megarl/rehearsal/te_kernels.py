"""Simulate the compiled functions of Transformer Engine (bf16 and fp32, no FP8) on fake tensors.

Each function has the name, the arguments, the outputs and the checks of its counterpart in
`transformer_engine_torch`, and allocates the outputs without computing them. Arguments after which the
signature has a `/` have no names in the compiled module. `KERNELS` has all functions by name.

Workspaces that a kernel allocates while it runs are not counted: cuBLAS and cuDNN choose their sizes.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import mm_flop, sdpa_backward_flop_count, sdpa_flop_count

from megarl.rehearsal.device import known_value
from megarl.rehearsal.ledger import place
from megarl.rehearsal.record import RehearsalError
from megarl.rehearsal.te_enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    TEDType,
)

KERNELS: dict[str, Callable[..., Any]] = {}

_TORCH_DTYPES = {
    TEDType.kByte: torch.uint8,
    TEDType.kInt32: torch.int32,
    TEDType.kFloat32: torch.float32,
    TEDType.kFloat16: torch.float16,
    TEDType.kBFloat16: torch.bfloat16,
}
_HALF = (torch.bfloat16, torch.float16)
_CUDNN = "nvidia-cudnn-cu13"
_OLDEST_CUDNN = "9.12.0"  # that Transformer Engine supports
_NUM_STREAMS = 4  # on which a grouped product runs, each with a workspace of its own

_receive_flops: Callable[[int], None] | None = None


def count_flops_with(count: Callable[[int], None]) -> None:
    """Set the function that receives the floating-point operations of each kernel."""
    global _receive_flops
    _receive_flops = count


def _count_flops(flops: int) -> None:
    assert _receive_flops is not None
    _receive_flops(flops)


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function, and check its arguments as pybind11 and the device would."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    name = function.__name__

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise RehearsalError(f"Transformer Engine's compiled {name}: {error}, at {place()}") from error

        for parameter, value in bound.arguments.items():
            if not _converts(value, hints[parameter]):
                raise RehearsalError(
                    f"Transformer Engine's compiled {name}: argument {parameter} is {_kind(value)}, but the "
                    f"function accepts {signature.parameters[parameter].annotation}, at {place()}"
                )
        for tensor in tree_iter((arguments, keywords)):
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
                raise RehearsalError(
                    f"Transformer Engine's compiled {name} gets a tensor on {tensor.device}, at {place()}"
                )

        try:
            return function(*arguments, **keywords)
        except _RefusedError as error:
            raise RehearsalError(f"Transformer Engine's compiled {name}: {error}, at {place()}") from error

    KERNELS[name] = checked
    return checked


class _RefusedError(Exception):
    """An argument that the compiled function refuses."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise _RefusedError(message)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _converts(value: Any, hint: Any) -> bool:
    """Return whether pybind11 converts a value to the type of an argument."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is types.UnionType:
        return any(_converts(value, each) for each in typing.get_args(hint))
    if origin is list:
        (element,) = typing.get_args(hint)
        return isinstance(value, list | tuple) and all(_converts(each, element) for each in value)

    # The enums of Transformer Engine's Python modules have the values of the compiled ones.
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return isinstance(value, int) and not isinstance(value, bool) and value in hint
    if hint is int:
        return isinstance(value, int)
    if hint is float:
        return isinstance(value, int | float)
    if hint is bool:
        return value is None or isinstance(value, int)  # whatever has a truth value, and None
    return isinstance(value, hint)


def _two_dims(shape: Sequence[int]) -> tuple[int, int]:
    """Return the size of a matrix: all dimensions but the last are one."""
    return prod(shape[:-1]), shape[-1]


def _product_shape(a: Tensor, transa: bool, b: Tensor, transb: bool) -> tuple[int, ...]:
    """Return the shape of a product of two matrices in cuBLAS's order, and count its operations."""
    a_rows, a_columns = _two_dims(a.shape)
    b_rows, b_columns = _two_dims(b.shape)
    inner = a_columns if transa else a_rows
    _check(
        inner == (b_rows if transb else b_columns),
        f"the product of A {tuple(a.shape)} (transposed: {transa}) and B {tuple(b.shape)} (transposed: "
        f"{transb}) does not exist",
    )
    _check(a.dtype == b.dtype, f"the dtypes of A and B differ: {a.dtype} and {b.dtype}")

    outer = (b_columns,) if transb else tuple(b.shape[:-1])
    width = a_rows if transa else a_columns
    _count_flops(mm_flop((prod(outer), inner), (inner, width)))

    return *outer, width


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")


@_kernel
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
    dtype = A.dtype if output_dtype is None else _TORCH_DTYPES[TEDType(output_dtype)]
    _check(not gelu, "a fused GELU is not simulated")
    _check(accumulate or not beta, f"beta={beta}, but the product is not accumulated")
    _check(workspace.numel() >= workspace_size, f"the workspace has {workspace.numel()} bytes")

    if D is None:
        _check(not accumulate, "a product is accumulated, but there is no D")
        D = _new(shape, dtype)  # noqa: N806
    else:
        _check(tuple(D.shape) == shape, f"D has shape {tuple(D.shape)}, but the product has shape {shape}")
        _check(D.dtype == dtype, f"D is {D.dtype}, but the product is {dtype}")

    bias_gradient = None
    if bias is not None:
        size = B.shape[-1] if grad else shape[-1]
        _check(tuple(bias.shape) == (size,), f"the bias has shape {tuple(bias.shape)}, not ({size},)")
        bias_gradient = _new((size,), dtype) if grad else None

    return [D, bias_gradient, None, None]


@_kernel
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
    _check(D is not None, "products without outputs are not simulated")
    for other, tensors in (("B", B), ("bias", bias), ("pre_gelu_out", pre_gelu_out)):
        _check(len(tensors) == number, f"A has {number} tensors, but {other} has {len(tensors)}")
    _check(all(not each.numel() for each in pre_gelu_out), "a fused GELU is not simulated")
    assert D is not None
    dtype = _TORCH_DTYPES[TEDType(D_type)]
    shapes = [_product_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]

    # One output holds all products, one after another.
    if single_output:
        held, needed = D[0].numel(), sum(map(prod, shapes))
        _check(held >= needed, f"the products have {needed} elements, but D has {held}")
        _check(D[0].dtype == dtype, f"D is {D[0].dtype}, but the products are {dtype}")
        return bias

    _check(len(D) == number, f"there are {number} products, but {len(D)} outputs")
    for output, shape in zip(D, shapes, strict=True):
        _check(tuple(output.shape) == shape, f"D has shape {tuple(output.shape)}, but the product {shape}")
        _check(output.dtype == dtype, f"D is {output.dtype}, but the product is {dtype}")
    return bias


@_kernel
def get_num_cublas_streams() -> int:
    return _NUM_STREAMS


@_kernel
def get_cublasLt_version() -> int:  # noqa: N802
    return 130000


@_kernel
def get_cudnn_version() -> int:
    """Return the version of cuDNN that is installed with torch, as cuDNN encodes it."""
    try:
        installed = version(_CUDNN)
    except PackageNotFoundError:  # torch for CPUs
        installed = _OLDEST_CUDNN
    major, minor, patch = map(int, installed.split(".")[:3])
    return major * 10000 + minor * 100 + patch


@_kernel
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
    rows, width = _two_dims(input.shape)
    _check(
        tuple(weight.shape) == (width,),
        f"the weight has shape {tuple(weight.shape)}, the input {width} columns",
    )
    if ln_out is None:
        ln_out = _new(input.shape, _TORCH_DTYPES[TEDType(otype)])
    _check(ln_out.shape == input.shape, f"the output has shape {tuple(ln_out.shape)}")
    return [ln_out, None, _new((rows,), torch.float32)]


@_kernel
def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    /,
) -> list[Tensor]:
    rows, width = _two_dims(x.shape)
    _check(dz.numel() == x.numel(), f"dz has shape {tuple(dz.shape)}, but x {tuple(x.shape)}")
    _check(tuple(rsigma.shape) == (rows,), f"rsigma has shape {tuple(rsigma.shape)}, not ({rows},)")
    _check(tuple(gamma.shape) == (width,), f"gamma has shape {tuple(gamma.shape)}, not ({width},)")
    return [_new(x.shape, x.dtype), _new(gamma.shape, gamma.dtype)]


def _rotated(
    tensor: Tensor, freqs: Tensor, qkv_format: NVTE_QKV_Format, cu_seqlens: Tensor | None, cp_size: int
) -> Tensor:
    _check(
        freqs.dim() == 4 and freqs.shape[1:3] == (1, 1),
        f"freqs has shape {tuple(freqs.shape)}, not (length, 1, 1, dim)",
    )
    _check(freqs.dtype == torch.float32, f"freqs is {freqs.dtype}, not torch.float32")
    _check(
        tensor.shape[-1] >= freqs.shape[3], f"freqs rotates {freqs.shape[3]} of {tensor.shape[-1]} elements"
    )

    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        _check(tensor.dim() == 3, f"a packed tensor has shape {tuple(tensor.shape)}, not (T, heads, dim)")
        _check(cu_seqlens is not None and cu_seqlens.dim() == 1, "packed rows have no cu_seqlens")
    else:
        _check(tensor.dim() == 4, f"a padded tensor has shape {tuple(tensor.shape)}")
        length = tensor.shape[0 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 1]
        _check(length * cp_size <= freqs.shape[0], f"freqs has {freqs.shape[0]} positions for {length}")

    return _new(tensor.shape, tensor.dtype)


@_kernel
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


@_kernel
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


# The fields of the object that describes an attention call, by the type that each is converted to.
_ATTENTION_FIELDS: dict[str, Any] = {
    **dict.fromkeys(
        ("is_training", "deterministic", "cuda_graph", "return_max_logit", "bottom_right_diagonal"), bool
    ),
    **dict.fromkeys(("dropout", "attn_scale"), float),
    **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), TEDType),
    **dict.fromkeys(("qkv_layout", "dqkv_layout"), NVTE_QKV_Layout),
    **dict.fromkeys(
        ("window_size_left", "window_size_right", "batch_size", "num_attn_heads", "num_gqa_groups"), int
    ),
    **dict.fromkeys(
        ("head_dim_qk", "head_dim_v", "max_seqlen_q", "max_seqlen_kv", "num_tokens_q", "num_tokens_kv"), int
    ),
    "o_format": NVTE_QKV_Format,
    "do_format": NVTE_QKV_Format,
    "attn_mask_type": NVTE_Mask_Type,
    "bias_type": NVTE_Bias_Type,
    "softmax_type": NVTE_Softmax_Type,
}


@_kernel
def get_fused_attn_backend(fused_attn_params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Choose cuDNN for 16-bit tensors with heads of up to 256 elements in multiples of 8, as on an H100."""
    for field, kind in _ATTENTION_FIELDS.items():
        _check(hasattr(fused_attn_params, field), f"the parameters have no {field}")
        value = getattr(fused_attn_params, field)
        _check(_converts(value, kind), f"{field} is {_kind(value)}, not {kind.__name__}")

    is_half = _TORCH_DTYPES.get(TEDType(fused_attn_params.qkv_dtype)) in _HALF
    sizes = (fused_attn_params.head_dim_qk, fused_attn_params.head_dim_v)
    if is_half and all(size % 8 == 0 and size <= 256 for size in sizes):
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the simulated device has no kernel for it"


class _Attention(typing.NamedTuple):
    """An attention call.

    Attributes:
        is_packed: Whether sequences are packed.
        sequences: The shapes of each sequence's queries, keys and values, (1, heads, length, dim) each.
    """

    is_packed: bool
    sequences: list[tuple[tuple[int, int, int, int], ...]]


def _attention(
    layout: NVTE_QKV_Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_kv: Tensor,
    max_q: int,
    max_kv: int,
) -> _Attention:
    """Check the tensors of an attention call."""
    layout = NVTE_QKV_Layout(layout)
    is_packed = layout is NVTE_QKV_Layout.NVTE_THD_THD_THD
    is_padded = layout in (NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD)
    _check(is_packed or is_padded, f"the layout {layout.name} is not simulated")

    for name, tensor in (("Q", query), ("K", key), ("V", value)):
        _check(tensor.dtype in _HALF, f"{name} is {tensor.dtype}: only bfloat16 and float16 are supported")
        _check(tensor.dim() == (3 if is_packed else 4), f"{name} has shape {tuple(tensor.shape)}")
    heads, groups = query.shape[-2], key.shape[-2]
    _check(key.shape[:-1] == value.shape[:-1], f"K has shape {tuple(key.shape)}, V {tuple(value.shape)}")
    _check(query.shape[-1] == key.shape[-1], f"Q has shape {tuple(query.shape)}, K {tuple(key.shape)}")
    _check(heads % groups == 0, f"{heads} query heads cannot share {groups} key heads")
    for name, bounds in (("cu_seqlens_q", bounds_q), ("cu_seqlens_kv", bounds_kv)):
        _check(bounds.dtype == torch.int32, f"{name} is {bounds.dtype}, not torch.int32")
        _check(bounds.shape == bounds_q.shape, f"{name} has shape {tuple(bounds.shape)}")

    lengths_q = _lengths(bounds_q, max_q)
    lengths_kv = _lengths(bounds_kv, max_kv)
    if is_packed:
        _check(sum(lengths_q) <= query.shape[0], f"Q has {query.shape[0]} tokens, {sum(lengths_q)} are used")
        _check(max(lengths_q) <= max_q, f"a sequence has {max(lengths_q)} tokens, max_seqlen_q is {max_q}")
    else:
        batch = query.shape[0 if layout is NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD else 1]
        _check(len(lengths_q) == batch, f"there are {batch} rows, but bounds of {len(lengths_q)}")

    return _Attention(
        is_packed,
        [
            (
                (1, heads, length_q, query.shape[-1]),
                (1, groups, length_kv, key.shape[-1]),
                (1, groups, length_kv, value.shape[-1]),
            )
            for length_q, length_kv in zip(lengths_q, lengths_kv, strict=True)
        ],
    )


def _lengths(bounds: Tensor, longest: int) -> list[int]:
    """Return the lengths of sequences; the longest for each if they are not known."""
    known = known_value(bounds)
    return [longest] * (len(bounds) - 1) if known is None else known.diff().tolist()


@_kernel
def fused_attn_fwd(  # noqa: PLR0913
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    qkv_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: list[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: None,
    page_table_v: None,
    s_quantizer: None,
    o_quantizer: None,
    Bias: None,  # noqa: N803
    SoftmaxOffset: None,  # noqa: N803
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
    /,
) -> list[Tensor]:
    call = _attention(qkv_layout, Q, K, V, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    _count_flops(sum(sdpa_flop_count(*shapes) for shapes in call.sequences))

    # The log-sum-exp of each query, and the state of the random numbers.
    heads = Q.shape[-2]
    statistics = (Q.shape[0], heads, 1) if call.is_packed else (len(call.sequences), heads, max_seqlen_q, 1)
    output = _new((*Q.shape[:-1], V.shape[-1]), fake_dtype)
    state = _new((2,), torch.int64)

    return [output, _new(statistics, torch.float32), state]


@_kernel
def fused_attn_bwd(  # noqa: PLR0913
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    do_format: NVTE_QKV_Format,
    dqkv_layout: NVTE_QKV_Layout,
    qkv_scale_inv_format: NVTE_QKV_Format,
    do_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: list[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    O: Tensor,  # noqa: N803, E741
    dO: Tensor,  # noqa: N803
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: list[Tensor],  # noqa: N803
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: None,
    dp_quantizer: None,
    dqkv_quantizer: None,
    cuda_graph: bool,
    /,
) -> list[Tensor | None]:
    call = _attention(qkv_layout, Q, K, V, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    _check(O.shape == dO.shape, f"O has shape {tuple(O.shape)}, but dO {tuple(dO.shape)}")
    _check(dqkv_layout == qkv_layout, "gradients in another layout than Q, K and V are not simulated")
    _check(len(Aux_CTX_Tensors) == 2, f"the forward pass saved 2 tensors, not {len(Aux_CTX_Tensors)}")
    _count_flops(
        sum(
            sdpa_backward_flop_count((*query[:-1], value[-1]), query, key, value)
            for query, key, value in call.sequences
        )
    )
    return [*(_new(each.shape, fake_dtype) for each in (Q, K, V)), None, None]


# Context parallelism: a rank has two chunks of every packed sequence, which are the halves of these tensors.


def _halved(tensor: Tensor, dim: int) -> Tensor:
    _check(tensor.shape[dim] % 2 == 0, f"a tensor of shape {tuple(tensor.shape)} has no two halves")
    return _new((*tensor.shape[:dim], tensor.shape[dim] // 2, *tensor.shape[dim + 1 :]), tensor.dtype)


@_kernel
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int, /) -> Tensor:
    """Return a half of packed queries (T, heads, dim), or of keys and values (2, T, heads, dim)."""
    _check(tensor.dim() in (3, 4), f"a packed tensor has shape {tuple(tensor.shape)}")
    _check(half_idx in (0, 1), f"there is no half {half_idx}")
    return _halved(tensor, tensor.dim() - 3)


@_kernel
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int, /
) -> Tensor:
    _check(lse.dtype == torch.float32, f"lse is {lse.dtype}, not torch.float32")
    return _new((*lse.shape[:-1], second_half_lse_seqlen), lse.dtype)


@_kernel
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool, /
) -> None:
    for name, each in (("lse", lse), ("lse_per_step", lse_per_step)):
        _check(each.dtype == torch.float32, f"{name} is {each.dtype}, not torch.float32")


@_kernel
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
    /,
) -> None:
    _check_part(out, out_per_step, only_second_half)


@_kernel
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str, /
) -> None:
    for half in (first_half, second_half):
        _check(half in ("add", "copy", "zero", "none"), f"there is no correction {half!r}")
    _check_part(grad, grad_per_step, "none" in (first_half, second_half))


def _check_part(whole: Tensor, part: Tensor, is_half: bool) -> None:
    _check(whole.dtype == part.dtype, f"the dtypes differ: {whole.dtype} and {part.dtype}")
    expected = whole.numel() // 2 if is_half else whole.numel()
    _check(part.numel() == expected, f"a part has {part.numel()} elements, not {expected}")


@_kernel
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
    _check(routing_map_format == 0 and topk_indices is None, "only routing maps of bytes are simulated")
    # The simulated device knows the choices of a top-k, and so the number of tokens of each expert.
    chosen = logits.topk(topk, dim=-1).indices
    routing_map = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    return _new(logits.shape, logits.dtype), routing_map, _new(logits.shape, torch.float32)


@_kernel
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
    _check(len(shapes) == 1, f"the tensors have the shapes {sorted(shapes)}")


def _check_router(values: Tensor, topk: int, score_function: str) -> None:
    _check(values.is_contiguous(), "the values of the experts are not contiguous")
    _check(0 < topk <= values.shape[-1], f"topk is {topk} of {values.shape[-1]} experts")
    _check(score_function in ("softmax", "sigmoid", "sqrtsoftplus"), f"the score is {score_function}")


def _check_lists(tensor_lists: list[list[Tensor]], number: int) -> None:
    _check(len(tensor_lists) == number, f"there are {len(tensor_lists)} lists of tensors, not {number}")
    for tensors in zip(*tensor_lists, strict=True):
        sizes = {each.numel() for each in tensors}
        _check(len(sizes) == 1, f"tensors at the same place have {sorted(sizes)} elements")


@_kernel
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
    _check(noop_flag.dtype == torch.int32, f"the flag is {noop_flag.dtype}, not torch.int32")
    moments = {each.dtype for tensors in tensor_lists[2:4] for each in tensors}
    is_known = moments in (set(), {torch.float32}, {torch.bfloat16})
    _check(is_known, f"the moments are {sorted(map(str, moments))}, not all float32 or all bfloat16")
    for each in tensor_lists[4] if len(tensor_lists) == 5 else ():
        _check(each.dtype == torch.float32, f"a master is {each.dtype}, not torch.float32")


@_kernel
def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
    /,
) -> None:
    _check_lists(tensor_lists, 2)


@_kernel
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool | None,
    /,
) -> tuple[Tensor, Tensor]:
    _check_lists(tensor_lists, 1)
    return _new((1,), torch.float32), _new((len(tensor_lists[0]) if per_tensor else 0,), torch.float32)
