"""The enums of `transformer_engine_torch` 2.20, by its own names and values."""

# ruff: noqa: N801, N815

from __future__ import annotations

from enum import IntEnum


class TEDType(IntEnum):  # DType; megarl has another class of that name
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Bias_Type(IntEnum):
    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_QKV_Format(IntEnum):
    NVTE_BSHD = 1
    NVTE_SBHD = 0
    NVTE_THD = 2
    NVTE_SBHD_2BSHD = 4
    NVTE_BSHD_2SBHD = 3
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


class NVTE_QKV_Layout(IntEnum):
    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24
    NVTE_BHSD_BHSD_BHSD = 25
    NVTE_QKV_Layout_NOT_SET = 26


class NVTE_Fused_Attn_Backend(IntEnum):
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2
    NVTE_No_Backend = -1


# Enums of which Transformer Engine's modules only read members, by their names and values.
_ONLY_READ = {
    "NVTEScalingMode": {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
    "Float8BlockScaleTensorFormat": {"GEMM_READY": 0, "COMPACT": 1, "INVALID": 2},
    "CommOverlapType": {"RS": 0, "AG": 1},
    "CommOverlapAlgo": {
        "BULK_OVERLAP_AG": 0,
        "BULK_OVERLAP_RS": 1,
        "SPLIT_PIPELINED_AG_P2P": 2,
        "SPLIT_PIPELINED_RS": 3,
        "SPLIT_PIPELINED_RS_P2P": 4,
        "ATOMIC_GEMM_RS": 5,
        "ATOMIC_GEMM_AG_P2P": 6,
        "ATOMIC_GEMM_RS_P2P": 7,
        "EXTERNAL_BULK_OVERLAP_AG": 8,
    },
    "FP8FwdTensors": {
        "GEMM1_INPUT": 0,
        "GEMM1_WEIGHT": 1,
        "GEMM1_OUTPUT": 2,
        "GEMM2_INPUT": 3,
        "GEMM2_WEIGHT": 4,
        "GEMM2_OUTPUT": 5,
        "GEMM3_INPUT": 6,
        "GEMM3_WEIGHT": 7,
        "GEMM3_OUTPUT": 8,
    },
    "FP8BwdTensors": {
        "GRAD_OUTPUT1": 0,
        "GRAD_INPUT1": 1,
        "GRAD_OUTPUT2": 2,
        "GRAD_INPUT2": 3,
        "GRAD_OUTPUT3": 4,
        "GRAD_INPUT3": 5,
    },
    "NVTERoutingMapFormat": {"BYTEMAP": 0, "BITMAP_U8": 1},
    "NVTEQBHistogramMode": {"TWO_KERNEL": 0, "FUSED_ATOMIC": 1},
}

ENUMS = {
    "DType" if each is TEDType else each.__name__: each
    for each in IntEnum.__subclasses__()
    if each.__module__ == __name__
} | {name: IntEnum(name, members, module=__name__) for name, members in _ONLY_READ.items()}
