"""The pieces of `make gpu`: each takes a few minutes at most and reports by itself, the largest doubts first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple


class Piece(NamedTuple):
    """Some tests of tests/gpu, or a benchmark.

    Attributes:
        doubt: What the piece finds out.
        minutes: Estimated for an H200, not measured.
        files: Of tests/gpu.
        only: Only the tests whose identifier contains one of these. Empty: all that no other piece has.
        benchmark: A module of benchmarks/gpu, with its options; then there are no files.
        num_gpus: The piece needs so many.
        packages: What it imports that a machine with torch, Megatron-Core and transformers may lack.
        rehearsal: Arguments of pytest that run the piece's code on a CPU.
        unrehearsed: What of it does not run on a CPU, and why.
    """

    doubt: str
    minutes: float
    rehearsal: Sequence[str]
    unrehearsed: str
    files: Sequence[str] = ()
    only: Sequence[str] = ()
    benchmark: Sequence[str] = ()
    num_gpus: int = 1
    packages: Sequence[str] = ()


SGLANG = ("sglang", "sgl_kernel", "torch_memory_saver")
FUSED = ("transformer_engine",)
_ON_ONE_DEVICE = "tests/unit/engine/test_one_device.py"
_DELTA_ON_A_CPU = "tests/unit/engine/test_one_device_delta_nets.py"
_KERNELS_ON_A_CPU = "tests/unit/engine/test_one_device_kernels.py"
_SGLANG_ON_A_CPU = "tests/soak/test_rehearsed_gpu_sglang.py"
_RANKS_ON_A_CPU = "tests/soak/test_rehearsed_gpu_ranks.py"

PIECES: Mapping[str, Piece] = {
    "fused": Piece(
        "do Transformer Engine's layers give Hugging Face's log-probs and gradients (dense models)",
        4,
        ["tests/unit/rehearse/dry_run/test_transformer_engine.py"],
        "the products: its Python modules run on fake devices, and its compiled part is a stub",
        files=["test_engine.py"],
        only=["-transformer_engine-"],
        packages=FUSED,
    ),
    "fp8": Piece(
        "is training in FP8 as exact as its emulation",
        1,
        ["tests/unit/engine/test_fp8_training.py"],
        "the products in FP8, which are emulated",
        files=["test_engine.py"],
        only=["in_fp8"],
        packages=FUSED,
    ),
    "latent": Piece(
        "latent attention (MLA), with local layers and Transformer Engine's",
        2,
        [_ON_ONE_DEVICE, "-k", "deepseek or moonlight or dsa or kimi"],
        "Transformer Engine's layers, which are for CUDA",
        files=["test_engine.py"],
        only=["[deepseek", "[moonlight", "[glm_moe_dsa", "[kimi"],
    ),
    "sinks": Piece(
        "attention sinks and windows (gpt-oss, Gemma 3, Olmo 3)",
        1,
        [_ON_ONE_DEVICE, "-k", "gpt_oss or gemma3 or olmo3"],
        "torch's flash attention, which is for CUDA",
        files=["test_engine.py"],
        only=["[gpt_oss", "[gemma3", "[olmo3"],
    ),
    "delta": Piece(
        "gated delta nets (Qwen3-Next, Qwen3.5) with and without flash-linear-attention: errors and speed",
        3,
        [_ON_ONE_DEVICE, _DELTA_ON_A_CPU, "-k", "qwen3_next or qwen3_5 or delta_nets"],
        "the kernels of flash-linear-attention; tests/unit/rehearse runs their calls on fake devices",
        files=["test_engine.py", "test_delta_nets.py"],
        only=["[qwen3_next", "[qwen3_5", "delta_nets"],
    ),
    "snapshots": Piece(
        "are snapshots through pinned buffers the same bytes as direct copies, also of offloaded state",
        1,
        [_ON_ONE_DEVICE, "-k", "snapshot or offloaded"],
        "pinned memory and streams",
        files=["test_engine.py"],
        only=["snapshot", "offloaded"],
    ),
    "copies": Piece(
        "how fast are copies to the host (pageable, pinned, in turns), and many small copies against one",
        2,
        ["tests/unit/test_gpu_benchmarks.py", "-k", "copies"],
        "the speeds",
        benchmark=["benchmarks.gpu.copies"],
    ),
    "faults": Piece(
        "which exception an illegal access raises, and whether the process lives and can use its GPU",
        1,
        ["tests/unit/test_gpu_faults.py"],
        "the access: a CPU's process raises the exception that torch is expected to raise",
        files=["test_faults.py"],
    ),
    "sglang_models": Piece(
        "do SGLang's models of each kind of layers give transformers' log-probs after weight syncs and sleep",
        4,
        [_SGLANG_ON_A_CPU, "-k", "transformers"],
        "gated delta nets and attention sinks, which SGLang runs on GPUs only; CUDA graphs and its own kernels",
        files=["test_sglang_models.py"],
        only=["log_probs_of_transformers"],
        packages=SGLANG,
    ),
    "sglang_fp8": Piece(
        "the same with the engine's weights in FP8",
        2,
        [_SGLANG_ON_A_CPU, "-k", "fp8"],
        "the products in FP8, which a CPU computes from dequantized weights",
        files=["test_sglang_models.py"],
        only=["fp8"],
        packages=SGLANG,
    ),
    "sglang": Piece(
        "weights by CUDA IPC, memory that is released and restored, drafts",
        3,
        ["tests/unit/rollout/sglang/test_server_engine.py"],
        "the memory saver, CUDA IPC and drafts",
        files=["test_sglang.py"],
        packages=SGLANG,
    ),
    "weights": Piece(
        "weight sync by CUDA IPC between two processes, the death of an engine in it, checksums",
        2,
        ["tests/unit/weights/test_shared_device.py"],
        "CUDA IPC and NCCL: memfds and gloo take their place",
        files=["test_weights.py"],
    ),
    "kernels": Piece(
        "flash attention over shared prompts against explicit products, logits in float32",
        1,
        [_KERNELS_ON_A_CPU],
        "FlashAttention 3 and 4",
        files=["test_kernels.py"],
    ),
    "engine": Piece(
        "the local layers of every family in float32 and bfloat16, training, offloading",
        4,
        [_ON_ONE_DEVICE],
        "nothing",
        files=["test_engine.py"],
    ),
    "sync_speed": Piece(
        "the speed of a weight sync on one GPU against two copies",
        1,
        ["tests/unit/test_gpu_benchmarks.py", "-k", "weights"],
        "the speeds",
        benchmark=["benchmarks.gpu.weights"],
    ),
    "step_speed": Piece(
        "tokens per second of a training step and of log-probs against Hugging Face",
        4,
        ["tests/unit/test_gpu_benchmarks.py", "-k", "engine or peer"],
        "the speeds",
        benchmark=["benchmarks.gpu.engine", "--shapes", "0.5B", "1.5B"],
    ),
    "norms_2": Piece(
        "do two ranks of Qwen3-Next in SGLang give transformers' log-probs, with and without the fused all-reduce",
        4,
        ["tests/unit/rollout/sglang/test_plans_of_models.py"],
        "SGLang's gated delta nets; their weights are pushed and compared without a forward pass",
        files=["test_sglang_models.py"],
        only=["two_ranks"],
        num_gpus=2,
        packages=SGLANG,
    ),
    "nccl_2": Piece(
        "NCCL between a trainer and an engine, and Transformer Engine's ring of context parallelism",
        2,
        ["tests/unit/weights/test_shared_device.py", "-k", "group_carries"],
        "NCCL, whose place gloo takes, and the ring",
        files=["test_weights.py", "test_kernels.py"],
        only=["group_carries", "a_ring_gives"],
        num_gpus=2,
    ),
    "experts_2": Piece(
        "two ranks with half of the experts each, tensor and data parallelism: the numbers of one rank",
        2,
        [_RANKS_ON_A_CPU],
        "NCCL, whose place gloo takes, and NVLink",
        files=["test_ranks.py"],
        only=["-2-"],
        num_gpus=2,
    ),
    "experts_8": Piece(
        "the same on eight GPUs",
        3,
        [_RANKS_ON_A_CPU],
        "eight ranks: two run on a CPU",
        files=["test_ranks.py"],
        only=["-8-"],
        num_gpus=8,
    ),
}


def piece_of(test: str) -> str:
    """Return the piece of a test, by its identifier (tests/gpu/test_engine.py::test_...).

    Of several pieces that name it, the last one has it.
    """
    file = test.partition("::")[0].rpartition("/")[2]
    candidates = {name: piece for name, piece in PIECES.items() if file in piece.files}
    named = [name for name, piece in candidates.items() if any(part in test for part in piece.only)]
    rest = [name for name, piece in candidates.items() if not piece.only]
    if not named and len(rest) != 1:
        raise ValueError(f"{test}: {len(rest)} pieces of tests/gpu/pieces.py have it, instead of one")
    return (named or rest)[-1]


def missing_for(piece: Piece, num_gpus: int) -> str:
    """Return what a machine lacks for a piece; empty if nothing."""
    if num_gpus < piece.num_gpus:
        return f"needs {piece.num_gpus} GPUs, and torch sees {num_gpus}"
    lacking = [name for name in piece.packages if find_spec(name) is None]
    return f"needs {', '.join(lacking)}: not installed" if lacking else ""
