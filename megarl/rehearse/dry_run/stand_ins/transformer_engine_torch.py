"""A stub of `transformer_engine_torch`, the compiled module of Transformer Engine, which requires a GPU.

Transformer Engine's Python modules run unchanged on it: the classes of the layers, the choice of kernels,
and the arguments of each kernel are those of the installed version. Attention is simulated here, on fake
tensors; the other kernels are in te_kernels.py, which registers them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from megarl.machine.errors import counted
from megarl.rehearse.dry_run.device import known_value
from megarl.rehearse.dry_run.ledger import place
from megarl.rehearse.dry_run.record import RehearsalError
from megarl.rehearse.dry_run.stand_ins import te_kernels  # noqa: F401  (registers its functions)
from megarl.rehearse.dry_run.stand_ins.te_enums import (
    ENUMS,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    TEDType,
)
from megarl.rehearse.dry_run.stand_ins.te_signature import (
    KERNELS,
    TORCH_DTYPES,
    check,
    converts,
    count_flops,
    kernel,
    kind_of,
    new,
)

_HALF = (torch.bfloat16, torch.float16)


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
_NAME = "transformer_engine_torch"
# All functions of version 2.20. Those without a simulation can be imported, but not called.
_FUNCTIONS = """
bgrad_group_quantize bgrad_quantize bulk_allocate bulk_overlap_ag_with_external_gemm clamped_dswiglu
clamped_swiglu compute_amax convert_bshd_to_thd convert_thd_to_bshd copy_data_ptrs_to_device
copy_to_kv_cache create_empty_quantized_tensor create_nvshmem_tensor cusolvermp_ctx_create
cusolvermp_ctx_destroy dbias_dgelu dbias_dqgelu dbias_drelu dbias_dsilu dbias_dsrelu dequantize
device_supports_multicast dgeglu dgelu dglu dqgeglu dqgelu dreglu drelu dropout_bwd dropout_fwd dsilu
dsituglu dsreglu dsrelu dswiglu fa_prepare_bwd fa_prepare_fwd fp8_block_scaling_compute_partial_amax
fp8_block_scaling_partial_cast fp8_transpose fused_amax_and_scale_update_after_reduction fused_attn_bwd
fused_attn_fwd fused_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_fwd_graph_safe
fused_multi_row_padding fused_multi_row_unpadding fused_qkv_rope_backward fused_qkv_rope_forward
fused_rope_backward fused_rope_forward fused_score_for_moe_aux_loss_bwd fused_score_for_moe_aux_loss_fwd
fused_topk_with_score_function_bwd fused_topk_with_score_function_fwd fused_topk_with_score_function_qb_fwd
geglu gelu generic_gemm get_cublasLt_version get_cudnn_version get_fused_attn_backend
get_grouped_gemm_setup_workspace_size get_num_cublas_streams get_stream_priority_range glu group_dequantize
group_quantize group_requantize_inplace group_scaled_clamped_swiglu group_scaled_swiglu
grouped_swizzle_for_gemm init_nvshmem_backend layernorm_bwd layernorm_fwd moe_permute_bwd moe_permute_fwd
moe_unpermute_bwd moe_unpermute_fwd multi_tensor_adam multi_tensor_adam_capturable
multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_adam_param_remainder
multi_tensor_compute_scale_and_scale_inv multi_tensor_compute_scale_inv_e8m0 multi_tensor_l2norm
multi_tensor_pad_last_dim multi_tensor_quantize multi_tensor_scale multi_tensor_scale_tensor
multi_tensor_sgd multi_tensor_swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_unchecked_
multi_tensor_transpose_to_bhsd multi_tensor_unscale_l2norm mxfp8_scaling_compute_partial_amax
mxfp8_scaling_partial_cast newton_schulz nvfp4_2d_compute_partial_amax nvfp4_2d_multi_tensor_transpose
nvfp4_2d_partial_cast nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_compute_per_block_scale
nvfp4_data_transpose nvfp4_expand_scale_to_fp8 nvfp4_fused_scale nvfp4_group_quantize_with_amax
nvfp4_multi_tensor_2d_partial_cast nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale
nvfp4_quantize_with_amax nvshmem_finalize nvshmem_send_on_current_stream nvshmem_wait_on_current_stream
nvte_built_with_cublasmp qgeglu qgelu quantize reglu relu rmsnorm_bwd rmsnorm_bwd_add rmsnorm_fwd
scaled_aligned_causal_masked_softmax_backward scaled_aligned_causal_masked_softmax_forward
scaled_clamped_dswiglu scaled_clamped_swiglu scaled_dsituglu scaled_dsrelu scaled_dswiglu
scaled_masked_softmax_backward scaled_masked_softmax_forward scaled_situglu scaled_softmax_backward
scaled_softmax_forward scaled_srelu scaled_swiglu scaled_upper_triang_masked_softmax_backward
scaled_upper_triang_masked_softmax_forward silu situglu split_quantize splits_to_offsets
splits_to_offsets_multi sreglu srelu swap_first_dims swiglu swizzle_scales_for_gemm_ te_general_grouped_gemm
te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out
te_general_grouped_gemm_for_grouped_tensor thd_copy_valid_tokens_from_per_split_to_rank_local
thd_cp_rank_order_to_sequence_order thd_get_partitioned_indices thd_grad_correction thd_out_correction
thd_read_half_tensor thd_read_second_half_lse thd_second_half_lse_correction
thd_sequence_order_to_cp_rank_order ubuf_built_with_mpi
"""
_CLASSES = (
    "CommOverlapCore",
    "CommOverlapBase",
    "CommOverlapP2PBase",
    "CommOverlapHelper",
    "CommOverlap",
    "CommOverlapP2P",
)


@kernel
def get_fused_attn_backend(fused_attn_params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Choose cuDNN for 16-bit tensors with heads of up to 256 elements in multiples of 8, as on an H100."""
    for field, kind in _ATTENTION_FIELDS.items():
        check(hasattr(fused_attn_params, field), f"the parameters have no {field}")
        value = getattr(fused_attn_params, field)
        check(converts(value, kind), f"{field} is {kind_of(value)}, not {kind.__name__}")

    is_half = TORCH_DTYPES.get(TEDType(fused_attn_params.qkv_dtype)) in _HALF
    sizes = (fused_attn_params.head_dim_qk, fused_attn_params.head_dim_v)
    if is_half and all(size % 8 == 0 and size <= 256 for size in sizes):
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the simulated device has no kernel for it"


def _attention(
    layout: NVTE_QKV_Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_kv: Tensor,
    max_q: int,
    max_kv: int,
) -> tuple[bool, list[tuple[tuple[int, int, int, int], ...]]]:
    """Check the tensors of an attention call.

    Returns:
        Whether sequences are packed, and the shapes of each sequence's queries, keys and values, (1, heads,
        length, dim) each.
    """
    layout = NVTE_QKV_Layout(layout)
    is_packed = layout is NVTE_QKV_Layout.NVTE_THD_THD_THD
    is_padded = layout in (NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD)
    check(is_packed or is_padded, f"the layout {layout.name} is not simulated")

    for name, tensor in (("Q", query), ("K", key), ("V", value)):
        check(tensor.dtype in _HALF, f"{name} is {tensor.dtype}: only bfloat16 and float16 are supported")
        check(tensor.dim() == (3 if is_packed else 4), f"{name} has shape {tuple(tensor.shape)}")

    heads, groups = query.shape[-2], key.shape[-2]
    check(key.shape[:-1] == value.shape[:-1], f"K has shape {tuple(key.shape)}, V {tuple(value.shape)}")
    check(query.shape[-1] == key.shape[-1], f"Q has shape {tuple(query.shape)}, K {tuple(key.shape)}")
    check(heads % groups == 0, f"{counted(heads, 'query head')} cannot share {counted(groups, 'key head')}")

    for name, bounds in (("cu_seqlens_q", bounds_q), ("cu_seqlens_kv", bounds_kv)):
        check(bounds.dtype == torch.int32, f"{name} is {bounds.dtype}, not torch.int32")
        check(bounds.shape == bounds_q.shape, f"{name} has shape {tuple(bounds.shape)}")

    lengths_q = _lengths(bounds_q, max_q)
    lengths_kv = _lengths(bounds_kv, max_kv)
    if is_packed:
        check(
            sum(lengths_q) <= query.shape[0],
            f"Q has {counted(query.shape[0], 'token')}, {sum(lengths_q)} are used",
        )
        check(
            max(lengths_q) <= max_q,
            f"a sequence has {counted(max(lengths_q), 'token')}, max_seqlen_q is {max_q}",
        )
    else:
        batch = query.shape[0 if layout is NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD else 1]
        check(
            len(lengths_q) == batch, f"the batch has {counted(batch, 'row')}, but bounds of {len(lengths_q)}"
        )

    return (
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


@kernel
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
    is_packed, sequences = _attention(
        qkv_layout, Q, K, V, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    )
    count_flops(sum(sdpa_flop_count(*shapes) for shapes in sequences))

    # The log-sum-exp of each query, and the state of the random numbers.
    heads = Q.shape[-2]
    statistics = (Q.shape[0], heads, 1) if is_packed else (len(sequences), heads, max_seqlen_q, 1)
    output = new((*Q.shape[:-1], V.shape[-1]), fake_dtype)
    state = new((2,), torch.int64)

    return [output, new(statistics, torch.float32), state]


@kernel
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
    _, sequences = _attention(qkv_layout, Q, K, V, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    check(O.shape == dO.shape, f"O has shape {tuple(O.shape)}, but dO {tuple(dO.shape)}")
    check(dqkv_layout == qkv_layout, "gradients in another layout than Q, K and V are not simulated")
    check(len(Aux_CTX_Tensors) == 2, f"the forward pass saved 2 tensors, not {len(Aux_CTX_Tensors)}")
    count_flops(
        sum(
            sdpa_backward_flop_count((*query[:-1], value[-1]), query, key, value)
            for query, key, value in sequences
        )
    )
    return [*(new(each.shape, fake_dtype) for each in (Q, K, V)), None, None]


# Context parallelism: a rank has two chunks of every packed sequence, which are the halves of these tensors.


def _halved(tensor: Tensor, dim: int) -> Tensor:
    check(tensor.shape[dim] % 2 == 0, f"a tensor of shape {tuple(tensor.shape)} has no two halves")
    return new((*tensor.shape[:dim], tensor.shape[dim] // 2, *tensor.shape[dim + 1 :]), tensor.dtype)


@kernel
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int, /) -> Tensor:
    """Return a half of packed queries (T, heads, dim), or of keys and values (2, T, heads, dim)."""
    check(tensor.dim() in (3, 4), f"a packed tensor has shape {tuple(tensor.shape)}")
    check(half_idx in (0, 1), f"there is no half {half_idx}")
    return _halved(tensor, tensor.dim() - 3)


@kernel
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int, /
) -> Tensor:
    check(lse.dtype == torch.float32, f"lse is {lse.dtype}, not torch.float32")
    return new((*lse.shape[:-1], second_half_lse_seqlen), lse.dtype)


@kernel
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool, /
) -> None:
    for name, each in (("lse", lse), ("lse_per_step", lse_per_step)):
        check(each.dtype == torch.float32, f"{name} is {each.dtype}, not torch.float32")


@kernel
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


@kernel
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str, /
) -> None:
    for half in (first_half, second_half):
        check(half in ("add", "copy", "zero", "none"), f"there is no correction {half!r}")
    _check_part(grad, grad_per_step, "none" in (first_half, second_half))


def _check_part(whole: Tensor, part: Tensor, is_half: bool) -> None:
    check(whole.dtype == part.dtype, f"the dtypes differ: {whole.dtype} and {part.dtype}")
    expected = whole.numel() // 2 if is_half else whole.numel()
    check(part.numel() == expected, f"a part has {part.numel()} elements, not {expected}")


class FP8TensorMeta:
    """The scales of a module's FP8 tensors. Without FP8 they are never set."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


def _not_simulated(name: str) -> Callable[..., NoReturn]:
    def call(*arguments: Any, **keywords: Any) -> NoReturn:
        raise RehearsalError(
            f"Transformer Engine's compiled {name} is not simulated, at {place()}; with engine.layers=local "
            f"the dry run uses no Transformer Engine"
        )

    return call


def compiled_module() -> types.ModuleType:
    module = types.ModuleType(_NAME, __doc__)
    module.__spec__ = ModuleSpec(_NAME, None)  # the module is found, although it has no file
    content: dict[str, Any] = {name: _not_simulated(name) for name in _FUNCTIONS.split()}
    content |= {name: type(name, (), {"__init__": _not_simulated(name)}) for name in _CLASSES}
    vars(module).update({**content, **ENUMS, **KERNELS, "FP8TensorMeta": FP8TensorMeta})

    return module
