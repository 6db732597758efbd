"""Test that each adaptation of SGLang is still needed, and computes the same as the original."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.rollout.sglang import cpu_adaptations
from megarl.rollout.sglang.environment import PREFERRED_STUBS, STUBS
from tests import fork_server

ROOT = Path(__file__).parents[4]
MIB = 2**20


class SGLangEvidence(NamedTuple):
    module: str  # in the package sglang
    attribute: str  # of the module; with a dot, of a class in it
    source: str  # must occur in the attribute's source
    reason: str


_ATTENTION = "srt.layers.attention.torch_native_backend"
_UPDATER = "srt.managers.scheduler_components.weight_updater"
EVIDENCE = (
    SGLangEvidence(
        "kernels.ops.sampling.murmur_hash",
        "murmur_hash32",
        "sgl_kernel.murmur_hash32_cpu",
        "seeds need a compiled kernel",
    ),
    SGLangEvidence(
        "srt.model_executor.model_runner",
        "ModelRunner.maybe_enable_batch_invariant_mode",
        "enable_batch_invariant_mode()",
        "replaces torch's operators by Triton kernels",
    ),
    SGLangEvidence(
        "srt.arg_groups.overrides",
        "_deterministic_attention_backend",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "refuses torch_native",
    ),
    SGLangEvidence(
        _ATTENTION,
        "TorchNativeAttnBackend._run_sdpa_forward_decode",
        "for seq_idx in range",
        "attends to one sequence at a time",
    ),
    SGLangEvidence(
        _UPDATER,
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_WEIGHTS)",
        "frees memory only with torch_memory_saver, which is CUDA",
    ),
    SGLangEvidence(
        _UPDATER,
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        "torch.get_device_module().synchronize()",
        "synchronizes CUDA with a CUDA build of torch, even without a GPU",
    ),
    SGLangEvidence(
        "srt.utils.common",
        "get_available_gpu_memory",
        "total_free_memory = get_free_cpu_memory()",
        "takes memory that other processes allocate during the start for its own weights, and for less "
        "memory of a rank",
    ),
    SGLangEvidence(
        "srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        "cnts.scatter_(1, topk_ids.to(torch.int64), 1)",
        "counts tokens by expert, and does not support -1, which denotes an expert of another rank",
    ),
    SGLangEvidence(
        "srt.models.qwen2_moe",
        "Qwen2MoeSparseMoeBlock.forward",
        "and not use_intel_amx_backend(self.shared_expert_gate)",
        "multiplies shared experts with their gates in a Triton kernel, except on CPUs with AMX",
    ),
    SGLangEvidence(
        "srt.state_capturer.base",
        "BaseHostCache.__init__",
        "pin_memory=True",
        "stores the routes of tokens in memory pinned by CUDA",
    ),
    SGLangEvidence(
        "srt.lora.layers",
        "QKVParallelLinearWithLoRA",
        "pin_memory=True",
        "stores the offsets of adapters in memory pinned by CUDA, and so does its backend torch_native",
    ),
    SGLangEvidence(
        "srt.layers.quantization.fp8",
        "Fp8Config.get_supported_act_dtypes",
        "return [torch.bfloat16, torch.half]",
        "refuses float32, in which models are compared on a CPU",
    ),
    SGLangEvidence(
        "srt.layers.quantization.fp8",
        "Fp8LinearMethod.process_weights_after_loading_block_quant",
        "Fp8LinearMethod on CPU requires that CPU has AMX support",
        "multiplies with FP8 weights only on CPUs with AMX",
    ),
    SGLangEvidence(
        "srt.layers.quantization.fp8",
        "Fp8MoEMethod.process_weights_after_loading_block_quant",
        "Fp8MoEMethod on CPU requires that CPU has AMX support",
        "multiplies with experts in FP8 only on CPUs with AMX",
    ),
    SGLangEvidence(
        "srt.models.deepseek_common.deepseek_weight_loader",
        "DeepseekV2WeightLoaderMixin.post_load_weights",
        "w, scale = block_quant_to_tensor_quant(",
        "quantizes the products of latent attention again, which it dequantizes on CUDA",
    ),
    SGLangEvidence(
        "srt.arg_groups.attention_hook",
        "handle_deterministic_inference",
        "deterministic inference with absorbed-MLA models",
        "refuses torch_native for latent attention, with or without a prefix cache",
    ),
    SGLangEvidence(
        "srt.layers.rotary_embedding.factory",
        "get_rope_cpu",
        "assert rope_scaling is not None",
        "rotates the keys of latent attention only with YaRN",
    ),
    SGLangEvidence(
        "srt.mem_cache.allocation",
        "assign_req_to_token_pool_func",
        "assign_req_to_token_pool_cpu(",
        "records the cache slots of drafted tokens with a compiled kernel",
    ),
    SGLangEvidence(
        "kernels.ops.kvcache.cache_move",
        "copy_all_layer_kv_cache_func",
        "copy_all_layer_kv_cache_cpu(",
        "copies accepted tokens in the cache with a compiled kernel, also once at the start",
    ),
    SGLangEvidence(
        "kernels.ops.speculative.cache_locs",
        "assign_draft_cache_locs_contiguous_func",
        "assign_draft_cache_locs_contiguous_cpu(",
        "looks up the cache slots of drafted tokens with a compiled kernel",
    ),
    SGLangEvidence(
        "kernels.ops.speculative.spec_tree",
        "verify_tree_greedy_func",
        "sgl_verify_tree_greedy_cpu(",
        "accepts drafted tokens with a compiled kernel, and describes their tree with another one",
    ),
    SGLangEvidence(
        "kernels.ops.speculative.eagle",
        "fill_bonus_tokens_func",
        "fill_bonus_tokens_cpu(",
        "looks up the last accepted token with a compiled kernel",
    ),
    SGLangEvidence(
        "srt.speculative.eagle_utils",
        "_verify_uses_greedy",
        "return is_all_greedy or is_cpu",
        "compares drafted tokens with the most likely ones on a CPU, whatever the temperature",
    ),
    SGLangEvidence(
        "srt.speculative.draft_utils",
        "DraftBackendFactory.create_decode_backend",
        '"intel_amx": self._create_intel_amx_decode_backend',
        "drafts with attention for CPUs with AMX only",
    ),
    SGLangEvidence(
        "srt.managers.scheduler",
        "Scheduler.event_loop_overlap",
        "self._record_scheduler_state_for_paused_engine()\n                continue",
        "polls for messages in a busy loop while it is paused, and takes a core from those that send it "
        "weights",
    ),
)


def sglang_source(module: str, attribute: str) -> str:
    """Return the source of `attribute` as shipped, read from its file without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], *module.split(".")).with_suffix(".py")
    text = file.read_text()
    body: list[ast.stmt] = ast.parse(text).body

    for name in attribute.split("."):
        found = [
            node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        assert found, f"{file} no longer defines {attribute}: the adaptation of it replaces nothing"
        body = found[0].body

    return ast.get_source_segment(text, found[0]) or ""


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.attribute)
def test_sglang_still_does_what_is_adapted(evidence: SGLangEvidence) -> None:
    assert evidence.source in sglang_source(evidence.module, evidence.attribute), (
        f"sglang.{evidence.module}.{evidence.attribute} no longer holds {evidence.source!r} "
        f"({evidence.reason}): "
        "see whether its adaptation in cpu_adaptations.py is still needed"
    )


# Packages of which SGLang finds stubs on the CPU because they are not installed.
STUBBED = ("sgl_kernel", "torchvision", "IPython", "soundfile")
# Runs in a separate interpreter that has only the stubs. Prints the name of each check with the expected
# result.
UNADAPTED = """
import sys, types
from importlib.util import find_spec
for package in sys.argv[1:]:
    if find_spec(package) is None:
        print(package)

from megarl.rollout.sglang import environment
environment.prepare("cpu")
import torch

def fails(name, function, *errors):
    try:
        function()
    except errors as error:
        print(name)

import sgl_kernel, soundfile, triton
from torchvision.transforms import functional
fails("kernel", lambda: sgl_kernel.rmsnorm(1), NotImplementedError)
fails("sound", lambda: soundfile.read("x"), NotImplementedError)
fails("image", lambda: functional.resize(1), NotImplementedError)
fails("triton", lambda: triton.jit(lambda: 0)[(1,)](), NotImplementedError)

from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.arg_groups.overrides import _deterministic_attention_backend
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
one = torch.zeros(1, dtype=torch.int64)
fails("murmur", lambda: murmur_hash32(one, one, one), AttributeError, RuntimeError)
arguments = types.SimpleNamespace(attention_backend="torch_native", enable_deterministic_inference=True)
fails("deterministic", lambda: _deterministic_attention_backend(arguments), ValueError)
if type(TorchMemorySaverAdapter.create(enable=False)).__name__ == "_TorchMemorySaverAdapterNoop":
    print("memory")
from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
fails("invariant", enable_batch_invariant_mode, RuntimeError)
if torch.version.cuda is None:
    print("synchronize")
else:
    fails("synchronize", lambda: torch.get_device_module().synchronize(), AssertionError, RuntimeError)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU the originals work")
def test_without_adaptations_sglang_fails_here() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNADAPTED, *STUBBED],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    packages = run.stdout.split()[: len(STUBBED)]
    checks = run.stdout.split()[len(STUBBED) :]
    assert packages == list(STUBBED), "stubs of what is there can go"
    assert checks == [
        "kernel",
        "sound",
        "image",
        "triton",
        "murmur",
        "deterministic",
        "memory",
        "invariant",
        "synchronize",
    ], run.stderr


# Runs in a process of SGLang. Prints one step of decoding, first as SGLang does it, then with its own loop
# broken, so that only the adaptation can have made it.
DECODE = """
from types import SimpleNamespace
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
from megarl.rollout.sglang import cpu_adaptations

generator = torch.Generator().manual_seed(0)
keys, values = (torch.randn(40, 2, 8, generator=generator) for _ in range(2))
query = torch.randn(3, 4 * 8, generator=generator)
table = torch.randint(40, (5, 12), generator=generator)
layer = SimpleNamespace(
    layer_id=0, tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=8, v_head_dim=8, scaling=0.3,
    is_cross_attention=False, sliding_window_size=-1,
)
pool = SimpleNamespace(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
runner = SimpleNamespace(
    device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
)
batch = SimpleNamespace(
    out_cache_loc=None, req_pool_indices=torch.tensor([3, 0, 4]), seq_lens=torch.tensor([1, 9, 4]),
    encoder_lens=None,
)

def decode():
    backend = Backend(runner)
    backend.init_forward_metadata(batch)
    return backend.forward_decode(query, None, None, layer, batch, save_kv_cache=False)

expected = decode()
Backend._run_sdpa_forward_decode = None
cpu_adaptations.install_in_scheduler()
torch.testing.assert_close(decode(), expected)
assert decode().abs().sum() > 0
"""


def test_decoding_uses_the_batched_attention(forked_processes: None) -> None:
    command = [*fork_server.PYTHON, "--sglang", "-c", DECODE]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


# Another process allocates half of what is free between two measurements.
MEMORY = """
from types import SimpleNamespace
import psutil
from sglang.srt.utils.common import get_available_gpu_memory
from megarl.rollout.sglang import cpu_adaptations

free = [2**30]

def virtual_memory():
    free[0] //= 2
    return SimpleNamespace(available=free[0], total=2**32)

psutil.virtual_memory = virtual_memory
assert get_available_gpu_memory("cpu", 0) > get_available_gpu_memory("cpu", 0)
cpu_adaptations.ignore_memory_of_others()
assert get_available_gpu_memory("cpu", 0) == get_available_gpu_memory("cpu", 0) > 0
"""


def test_memory_of_other_processes_changes_nothing(forked_processes: None) -> None:
    command = [*fork_server.PYTHON, "--sglang", "-c", MEMORY]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


def test_stubs_come_last_on_the_path_and_tritons_first() -> None:
    program = (
        "import sys; from megarl.rollout.sglang import environment; environment.prepare(sys.argv[1]); "
        "print(*sys.path, sep=chr(10))"
    )
    path = {
        device: subprocess.run(
            [sys.executable, "-c", program, device], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.splitlines()
        for device in ("cpu", "cuda")
    }
    assert (path["cpu"][0], path["cpu"][-1]) == (str(PREFERRED_STUBS), str(STUBS))
    assert not {str(PREFERRED_STUBS), str(STUBS)} & set(path["cuda"])
    assert [file.name for file in PREFERRED_STUBS.iterdir()] == ["triton"]


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 (Austin Appleby), seed 0, for whole blocks."""
    hashed = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        block = (block << 15 | block >> 17) * 0x1B873593 & 0xFFFFFFFF
        hashed ^= block
        hashed = ((hashed << 13 | hashed >> 19) * 5 + 0xE6546B64) & 0xFFFFFFFF

    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor & 0xFFFFFFFF
    return hashed ^ hashed >> 16


def test_murmur_hash_is_the_published_one() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # a published test vector
    seeds = [0, 2**32 - 1, 2**63 - 5]
    positions = [0, 1, 70000]
    columns = [0, 1, 150000]
    hashed = cpu_adaptations.murmur_hash32(
        torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32

    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for index, column in enumerate(columns):
            block = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert hashed[row, index].item() == murmur3(block)


def test_ranks_with_experts_of_their_own_add_up_to_the_whole() -> None:
    """Compared with a loop over tokens. Rank 1 also counts its experts from 0; -1 are those of the other
    rank."""
    generator = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(shape, generator=generator) for shape in ((5, 8), (4, 12, 8), (4, 8, 6)))
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 1]])  # two, none, one of each rank's
    weights = torch.rand(5, 2, generator=generator)
    expected = torch.zeros(5, 8)

    for token, expert, weight in (
        (t, int(e), w) for t in range(5) for e, w in zip(ids[t], weights[t], strict=True)
    ):
        gate, up = (w13[expert] @ x[token]).chunk(2)
        expected[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))

    parts = []
    for first in (0, 2):
        own = torch.where((ids >= first) & (ids < first + 2), ids - first, -1)
        parts.append(
            cpu_adaptations.own_experts(x, weights, own, w13[first : first + 2], w2[first : first + 2])
        )

    torch.testing.assert_close(sum(parts), expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_batched_decode_attention_equals_one_sequence_at_a_time(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    lengths = [1, 9, 4]
    heads = 4
    width = 8
    slots = 40
    k_cache, v_cache = (torch.randn(slots, kv_heads, width, generator=generator) for _ in range(2))
    table = torch.zeros(5, 12, dtype=torch.int32)
    order = 1 + torch.randperm(slots - 1, generator=generator)
    rows = torch.tensor([3, 0, 4])

    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length] = order[:length]
        order = order[length:]

    query = torch.randn(len(lengths), heads, width, generator=generator)
    k_cache[0] = v_cache[0] = 1e4  # slots to which the table's padding points must not matter
    batch = cpu_adaptations.pad_batch(table, rows, torch.tensor(lengths), query.dtype)
    attended = cpu_adaptations.padded_decode_attention(query, k_cache, v_cache, batch, 0.3)

    for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        where = table[row, :length].long()
        keys = k_cache[where].transpose(0, 1)
        values = v_cache[where].transpose(0, 1)
        alone = scaled_dot_product_attention(query[index, :, None], keys, values, scale=0.3, enable_gqa=True)
        assert torch.allclose(attended[index], alone[:, 0], atol=1e-6)


def test_emptied_storages_give_memory_back_and_views_stay_valid() -> None:
    resident = psutil.Process().memory_info
    small = torch.ones(1000)
    large = torch.ones(64 * MIB)  # 256 MiB
    view = large[5:7]
    before = resident().rss
    sizes = cpu_adaptations.empty_storages([small, large, view])  # each storage once
    assert [nbytes for _, nbytes in sizes] == [4000, 256 * MIB]
    assert before - resident().rss > 250 * MIB
    cpu_adaptations.refill_storages(sizes)
    assert large.sum() == 0
    large[5] = 3
    assert view.tolist() == [3, 0]
