"""Replacements for the few places in SGLang that need a GPU, so that it runs well on a machine without CUDA.

SGLang is used as published: nothing in it is edited on disk. For each replacement, a table in
tests/unit/rollout/sglang/test_cpu_adaptations.py names a piece of SGLang's source that makes it necessary;
the test fails when a new SGLang no longer contains it.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from megarl.machine.usage import trim_heap
from megarl.rollout.sglang.cpu_fp8 import dequantize_in_products, leave_adapters_unpinned

_MASK = 0xFFFFFFFF


def install_in_arguments() -> None:
    """Allow torch_native with per-request seeds. Call this before ServerArgs are created.

    With latent attention SGLang also requires a backend that is deterministic with its prefix cache, which
    megarl turns off.
    """
    from sglang.srt.server_args import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def install_in_scheduler() -> None:
    """Install the replacements in a scheduler process, before its model is created."""
    name_the_cpu_as_device()
    _replace_murmur_hash()
    _disable_batch_invariant_kernels()
    _batch_decode_attention()
    ignore_memory_of_others()
    _release_memory_for_real()
    _sleep_while_paused()
    _skip_experts_of_others()
    gate_shared_experts()
    _leave_memory_unpinned()
    rotate_without_scaling()
    leave_adapters_unpinned()
    dequantize_in_products()


def name_the_cpu_as_device() -> None:
    """Make `torch.get_device_module()` return torch.cpu, as in a CPU build.

    A CUDA build returns torch.cuda, with or without a GPU.
    """
    get_device_module = torch.get_device_module

    # pyrefly: ignore[bad-assignment]
    torch.get_device_module = lambda device=None: torch.cpu if device is None else get_device_module(device)


def _replace_murmur_hash() -> None:
    from sglang.kernels.ops.sampling import murmur_hash
    from sglang.srt.layers import sampler

    murmur_hash.murmur_hash32 = sampler.murmur_hash32 = murmur_hash32  # the sampler imports it by name


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (x86, 32 bits) of the 16 bytes (seed, position, column).

    The result equals that of SGLang's Triton kernel.

    Args:
        seed: Shape (B,), 64-bit.
        positions: Shape (B,), of which 32 bits count.
        col_indices: Shape (V,), of which 32 bits count.

    Returns:
        Shape (B, V) uint32.
    """
    seed = seed.to(torch.int64)
    # Mix in the four blocks of 32 bits: both halves of the seed, the position, the column.
    hashed = _mix(torch.zeros_like(seed), seed & _MASK)
    hashed = _mix(hashed, (seed >> 32) & _MASK)
    hashed = _mix(hashed, positions.to(torch.int64) & _MASK)
    hashed = _mix(hashed[:, None], col_indices.to(torch.int64)[None, :] & _MASK)
    # Finalize: the length in bytes, then MurmurHash3's last mixing steps.
    hashed = hashed ^ 16
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x85EBCA6B) & _MASK
    hashed = hashed ^ (hashed >> 13)
    hashed = (hashed * 0xC2B2AE35) & _MASK

    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # One round of MurmurHash3 for 32-bit hashes.
    block = (_rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(hashed ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _disable_batch_invariant_kernels() -> None:
    """Disable the batch-invariant kernels, which need Triton.

    On a CPU, a row of a product differs with the batch by rounding, which almost never changes a sample.
    """
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda enable_bmm=True: None


def pad_batch(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the keys in a decode step, the same for all layers.

    Returns:
        Rows of the cache, (B * L,), with L the longest sequence; and a bias (B, 1, 1, L), -inf after a
        sequence's end.
    """
    length = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :length].long().flatten()
    # Slots after a sequence's end are arbitrary, so they are masked.
    beyond = torch.arange(length)[None, None, None, :] >= seq_lens[:, None, None, None]

    return slots, torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)


def _batch_decode_attention() -> None:
    """Compute one attention over the padded batch per layer, instead of a Python loop over its sequences."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    init_forward_metadata = Backend.init_forward_metadata
    one_by_one = Backend._run_sdpa_forward_decode

    def init(self: Any, forward_batch: Any) -> None:
        init_forward_metadata(self, forward_batch)
        # Every step has another batch, whose padding all layers share.
        self.megarl_padded = None

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        is_windowed = sliding_window_size is not None and sliding_window_size > -1
        # SGLang's own loop still handles cross-attention and sliding windows.
        if encoder_lens is not None or causal or is_cross_attn or is_windowed:
            return one_by_one(
                self,
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )

        if self.megarl_padded is None:
            self.megarl_padded = pad_batch(req_to_token, req_pool_indices, seq_lens, query.dtype)
        output.copy_(padded_decode_attention(query, k_cache, v_cache, self.megarl_padded, scaling))

        return output

    Backend.init_forward_metadata = init
    Backend._run_sdpa_forward_decode = decode


def padded_decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of a decode step.

    Args:
        query: Shape (B, heads, D), the newest token of each sequence.
        k_cache: Shape (slots, KV heads, D).
        v_cache: Shape (slots, KV heads, D).
        batch: See `pad_batch`.

    Returns:
        Shape (B, heads, D).
    """
    slots, bias = batch
    shape = (query.shape[0], bias.shape[-1], *k_cache.shape[1:])
    keys = k_cache.index_select(0, slots).view(shape).transpose(1, 2).to(query.dtype)
    values = (
        v_cache.index_select(0, slots).view(*shape[:-1], v_cache.shape[-1]).transpose(1, 2).to(query.dtype)
    )
    # The query heads that share a KV head are the rows of its attention, so keys and values are not repeated.
    rows = query.view(query.shape[0], k_cache.shape[1], -1, query.shape[-1])
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scaling)

    return attended.flatten(1, 2)


def ignore_memory_of_others() -> None:
    """Let SGLang plan with the memory of the whole machine. `max_total_tokens` bounds its cache."""
    from sglang.srt.utils import common

    common.get_free_cpu_memory = lambda: psutil.virtual_memory().total


def _release_memory_for_real() -> None:
    """Empty and refill the storages of weights and cache in place.

    All tensors and views of them stay valid.
    """
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )

    release = Manager.release_memory_occupation
    resume = Manager.resume_memory_occupation

    # Tensors by tag; a process has one manager, and the class has slots.
    released: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def release_for_real(self: Any, recv_req: Any) -> Any:
        answer = release(self, recv_req)
        # Without the memory saver, which needs CUDA, SGLang has freed nothing yet.
        for tag, tensors in _resident_tensors(self.tp_worker.model_runner).items():
            if not recv_req.tags or tag in recv_req.tags:
                released[tag] = empty_storages(tensors)
        return answer

    def resume_for_real(self: Any, recv_req: Any) -> Any:
        # The memory must be allocated before SGLang resumes.
        for tag in list(released):
            if not recv_req.tags or tag in recv_req.tags:
                refill_storages(released.pop(tag))
        return resume(self, recv_req)

    Manager.release_memory_occupation = release_for_real
    Manager.resume_memory_occupation = resume_for_real


def _sleep_while_paused() -> None:
    """Sleep until a message arrives, as in the idle state.

    Other ranks wait for the messages of the first one.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def _skip_experts_of_others() -> None:
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def forward_own(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        weights, ids, _ = topk_output
        # SGLang's own implementation works if all experts are on this rank.
        if not bool((ids < 0).any()):
            return forward(layer, x, topk_output, moe_runner_config)
        assert moe_runner_config.activation == "silu"
        assert not moe_runner_config.apply_router_weight_on_input
        return own_experts(x, weights, ids, layer.w13_weight, layer.w2_weight)

    fused_moe_native.moe_forward_native = forward_own


def gate_shared_experts() -> None:
    """Multiply the outputs of shared experts by their gates in torch, in float32 as SGLang's kernel does."""
    from sglang.srt.models import qwen2_moe

    def gate_and_add(
        hidden_states: torch.Tensor,
        gate_weight: torch.Tensor,
        shared_output: torch.Tensor,
        final_hidden_states: torch.Tensor,
    ) -> None:
        gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
        final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())

    qwen2_moe.fused_gate_sigmoid_mul_add = gate_and_add


def _leave_memory_unpinned() -> None:
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None


def rotate_without_scaling() -> None:
    """Create the rotary embedding of latent attention that is not scaled, as on CUDA."""
    from sglang.srt.layers.rotary_embedding import factory

    for_cpu = factory.get_rope_cpu

    def for_any(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        shape = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype)
        if rope_scaling is None:
            return factory.get_rope(*shape, partial_rotary_factor)
        return for_cpu(*shape, partial_rotary_factor, device)

    factory.get_rope_cpu = for_any


def own_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return the contribution of a rank's experts to its tokens. The sums of all ranks are added afterwards.

    Args:
        x: Shape (T, H).
        weights: Shape (T, k).
        ids: Experts of each token, (T, k), as indices into w13 and w2; any other number denotes an expert of
            another rank.
        w13: Gate and up projections, (E, 2M, H).
        w2: Down projection, (E, H, M).

    Returns:
        Shape (T, H).
    """
    added = torch.zeros_like(x)
    for expert, (gate_and_up, down) in enumerate(zip(w13, w2, strict=True)):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], gate_and_up).chunk(2, -1)
        added.index_add_(
            0, tokens, (linear(silu(gate) * up, down) * weights[tokens, places, None]).to(x.dtype)
        )

    return added


def _resident_tensors(model_runner: Any) -> dict[str, list[torch.Tensor]]:
    """Return the parameters and the KV cache by SGLang's tags.

    Buffers (rotary tables) are not weights and stay.
    """
    pool = model_runner.token_to_kv_pool
    parameters = [parameter.data for parameter in model_runner.model.parameters()]
    # With latent attention, keys and values are computed from one buffer.
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
    return {"weights": parameters, "kv_cache": buffers}


def empty_storages(tensors: list[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the memory of tensors. Returns each storage once, with its size in bytes."""
    storages = {
        storage.data_ptr(): storage
        for storage in (tensor.untyped_storage() for tensor in tensors)
        if storage.nbytes()
    }
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in sizes:
        storage.resize_(0)
    trim_heap()

    return sizes


def refill_storages(sizes: list[tuple[torch.UntypedStorage, int]]) -> None:
    """Allocate the memory again, zeroed: padding that is read before it is written must be deterministic."""
    for storage, nbytes in sizes:
        storage.resize_(nbytes)
        storage.fill_(0)  # pyrefly: ignore[missing-attribute]
