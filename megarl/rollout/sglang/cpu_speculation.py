"""Replacements in SGLang's speculative decoding that let it run without CUDA; see cpu_adaptations.py.

They support chains, in which each drafted token has one successor (`speculative_eagle_topk: 1`). A token is
sampled at every position that is verified, with the seed of its request and its position, as without drafts.
A drafted token is accepted if it and all drafted tokens before it equal the sampled ones, so samples are
those of an engine without drafts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def install_speculation() -> None:
    """Install the replacements in a scheduler process, before its models are created."""
    _replace_kernels()
    _attend_to_drafts()
    _sample_while_verifying()


# ---- SGLang's compiled kernels, for chains


def copy_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    top_k: int,
    num_columns: int,
) -> None:
    """Write the `top_k * num_columns` cache slots that follow each sequence to `out_cache_loc`."""
    places = seq_lens.long()[:, None] + torch.arange(top_k * num_columns)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], places].flatten())


def copy_slots_between(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's cache slots [start, end) to `out_cache_loc`, one request after the other."""
    slots = [
        req_to_token[row, first:last]
        for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    ]
    joined = torch.cat(slots)
    out_cache_loc[: len(joined)] = joined


def record_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Record new cache slots, one request after the other, as each request's slots [start, end)."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first]
        taken += last - first


def build_chain(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    top_k: int,
    num_steps: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """Describe a tree in which each node is the only child of the previous one."""
    assert top_k == 1
    nodes = torch.arange(num_tokens)
    positions.copy_((seq_lens.long()[:, None] + nodes).flatten())
    retrieve_index.copy_(torch.arange(len(seq_lens) * num_tokens).view(-1, num_tokens))
    retrieve_next_token[:, :-1] = nodes[1:]
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)
    # Each node attends to itself and to those before it.
    tree_mask.view(-1, num_tokens, num_tokens).copy_(nodes[:, None] >= nodes)


def accept_chain(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **tree: torch.Tensor,
) -> None:
    """Accept the drafted tokens that equal the policy's, up to the first that does not.

    Args:
        predicts: (B * N,) the policy's tokens at accepted nodes. Written.
        accept_index: (B, N) indices of the accepted nodes in `predicts`, then -1. Written.
        accept_token_num: (B,) numbers of accepted drafts. Written.
        candidates: (B, N) the last token of each sequence, and its drafts.
        target_predict: (B, N) the policy's token after each candidate.
        tree: The links of the tree, which is a chain.
    """
    batch, num_tokens = candidates.shape
    # The cumulative product is 0 from the first wrong draft.
    is_right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1)
    accept_token_num.copy_(is_right.sum(1))
    nodes = torch.arange(num_tokens)
    indices = torch.arange(batch * num_tokens).view(batch, num_tokens)
    is_accepted = nodes <= accept_token_num[:, None]
    accept_index.copy_(indices.masked_fill(~is_accepted, -1))
    predicts.view(batch, num_tokens)[is_accepted] = target_predict[is_accepted].to(predicts.dtype)


def last_accepted(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """Write the last accepted token of each request to `bonus_tokens`."""
    rows = torch.arange(len(accept_lens))
    bonus_tokens.copy_(accept_tokens.view(-1, stride)[rows, accept_lens.long() - 1])


def _replace_kernels() -> None:
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.mem_cache import allocation

    # The accepted tokens of a chain need not be copied in the cache.
    cache_move.copy_all_layer_kv_cache_cpu = lambda *_: None
    allocation.assign_req_to_token_pool_cpu = record_slots
    cache_locs.assign_draft_cache_locs_contiguous_cpu = copy_slots
    cache_locs.assign_extend_cache_locs_cpu = copy_slots_between
    spec_tree.sgl_build_tree_kernel_efficient_cpu = build_chain
    spec_tree.sgl_verify_tree_greedy_cpu = accept_chain
    eagle.fill_bonus_tokens_cpu = last_accepted


# ---- attention


def _attend_to_drafts() -> None:
    """Let SGLang's own attention for CPUs verify chains, and draft them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory as Factory

    forward_extend = Backend.forward_extend

    def extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            # The lengths do not include the tokens to verify.
            num_tokens = forward_batch.spec_info.draft_token_num
            before = forward_batch.seq_lens
            forward_batch = copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = before
            forward_batch.extend_seq_lens = torch.full_like(before, num_tokens)
            forward_batch.seq_lens = before + num_tokens
        return forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache)

    class StepBackend(Backend):
        """Attention of one step of a draft, to the sequence and the tokens of the steps up to it."""

        def __init__(self, runner: Any, step: int) -> None:
            super().__init__(runner)
            self._step = step

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            drafted = copy.copy(forward_batch)
            drafted.seq_lens = forward_batch.seq_lens + self._step + 1
            return super().forward_decode(q, k, v, layer, drafted, save_kv_cache)

    class ChainBackend:
        """The attention of each step."""

        def __init__(self, runner: Any, num_steps: int) -> None:
            self.attn_backends = [StepBackend(runner, step) for step in range(num_steps - 1)]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    Backend.forward_extend = extend
    Factory.create_decode_backend = lambda self: ChainBackend(
        self.draft_model_runner, self.speculative_num_steps
    )
    Factory.create_draft_extend_backend = lambda self: Backend(self.draft_model_runner)


# ---- sampling


def _sample_while_verifying() -> None:
    """Compare drafts with samples of the policy, and not with the most likely tokens."""
    from sglang.srt.speculative import eagle_utils

    verify = eagle_utils.eagle_sample
    accept = eagle_utils.verify_tree_greedy_func

    # The comparison gets only the most likely tokens. It finds what they were computed from here.
    running: list[tuple[Any, Any, Any]] = []  # the arguments of the verification that is running

    def verify_samples(verify_input: Any, batch: Any, logits_output: Any, *rest: Any, **more: Any) -> Any:
        running.append((verify_input, batch, logits_output))
        try:
            return verify(verify_input, batch, logits_output, *rest, **more)
        finally:
            running.pop()

    def accept_samples(
        predicts: torch.Tensor,
        accept_index: torch.Tensor,
        accept_token_num: torch.Tensor,
        candidates: torch.Tensor,
        retrieve_index: torch.Tensor,
        retrieve_next_token: torch.Tensor,
        retrieve_next_sibling: torch.Tensor,
        target_predict: torch.Tensor,
        topk: int = -1,
    ) -> Any:
        verify_input, batch, logits_output = running[-1]
        if not batch.sampling_info.is_all_greedy:
            target_predict = _sampled(verify_input, batch, logits_output).view(target_predict.shape)
        return accept(
            predicts,
            accept_index,
            accept_token_num,
            candidates,
            retrieve_index,
            retrieve_next_token,
            retrieve_next_sibling,
            target_predict,
            topk,
        )

    eagle_utils.eagle_sample = verify_samples
    eagle_utils.verify_tree_greedy_func = accept_samples


def _sampled(verify_input: Any, batch: Any, logits_output: Any) -> torch.Tensor:
    """Sample a token at each position that is verified, with SGLang's own functions. Shape (B * N,)."""
    from sglang.srt.layers.sampler import (
        sampling_from_probs_torch,
        top_k_top_p_min_p_sampling_from_probs_torch,
    )

    info = batch.sampling_info

    def of_positions(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(verify_input.draft_token_num, 0)

    probabilities = torch.softmax(logits_output.next_token_logits / of_positions(info.temperatures), -1)
    seeds = of_positions(info.sampling_seed)

    if info.need_top_k_sampling or info.need_top_p_sampling:
        tokens = top_k_top_p_min_p_sampling_from_probs_torch(
            probabilities,
            of_positions(info.top_ks),
            of_positions(info.top_ps),
            of_positions(info.min_ps),
            False,
            seeds,
            verify_input.positions,
        )
        assert isinstance(tokens, torch.Tensor)
        return tokens
    return sampling_from_probs_torch(probabilities, seeds, verify_input.positions)
