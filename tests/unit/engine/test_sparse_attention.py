"""Sparse attention of the engine beside the comparisons of test_parity.py: blocks, padded rows, recomputation, and
the loss of indexers in float64."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from megarl.batch.metrics import values_of
from megarl.config.schema import OptimConfig, ParallelConfig, Recomputation, Recompute, RecomputeModule
from tests.ranks import RankPool
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.models import SELECTED_KEYS, load_lm, make_long_batch, save_model, with_one_prompt
from tests.unit.engine.rank_side import (
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    join_rows,
    merge,
    replica_rows,
    start,
    take,
    weighted_sum,
)

COEFFICIENT = 0.5


def random_heads(length: int, heads: int, dim: int, seed: int) -> Tensor:
    return torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(seed))


def test_blocks_of_queries_give_what_a_whole_mask_gives() -> None:
    """A row of 1,100 tokens is three blocks; another one shares its first 40 tokens with a response."""
    from megarl.engine.sparse_attention import IndexInputs, KeyedPiece, attend_selected, select_keys

    pieces = [
        KeyedPiece(0, 1100, (slice(0, 1100),), 1100),
        KeyedPiece(1100, 60, (slice(0, 40), slice(1100, 1160)), 100),
    ]
    query, key, value = (random_heads(1160, 2, 8, seed).requires_grad_() for seed in range(3))
    inputs = IndexInputs(
        random_heads(1160, 16, 8, 3), random_heads(1160, 1, 8, 4)[:, 0], random_heads(1160, 16, 1, 5)[..., 0]
    )
    selected = select_keys(inputs, pieces, 16)
    mixed = attend_selected(query, key, value, selected, pieces, 0.3)

    # Every pair at once, with the mask written out.
    positions = torch.arange(1160)
    seen = positions[:, None] >= positions
    seen[1100:, 40:1100] = False
    scores = (
        torch.einsum("qhd,kd->qhk", inputs.queries, inputs.keys).relu() * inputs.weights[..., None]
    ).sum(1)
    best = scores.masked_fill(~seen, -torch.inf).topk(16).indices
    chosen = torch.zeros_like(seen).scatter(1, best, True) & seen
    logits = 0.3 * torch.einsum("qhd,khd->hqk", query, key)
    expected = torch.einsum("hqk,khd->qhd", logits.masked_fill(~chosen, -torch.inf).softmax(-1), value)

    assert max_difference(mixed.detach(), expected.detach()) < 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    found, wanted = (
        torch.autograd.grad((each * weights).sum(), (query, key, value)) for each in (mixed, expected)
    )
    assert all(max_difference(*pair) < 1e-4 for pair in zip(found, wanted, strict=True))

    # Rows never see each other.
    places = selected[1100:].where(selected[1100:] >= 0, 0)
    assert int(places.max()) < 100
    assert (selected[:16] == -1).sum() == 16 * 15 // 2


def weighted_batch() -> Tensors:
    batch = with_one_prompt(make_long_batch(), (0, 4, 2), (1, 5))
    weight = torch.randn(batch["response_mask"].shape, generator=torch.Generator().manual_seed(2))
    return batch | {"weight/log_probs": weight * batch["response_mask"]}


def run_rank(
    parallel: ParallelConfig, folder: str, batch: Tensors, **options: Any
) -> tuple[Tensor, Tensors, dict[str, float]]:
    """Run in a rank: return log-probs (B, R), the gradients of its stage, and the metrics of losses."""
    groups = start(parallel)
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)
    part = take(batch, rows)
    micro_batches = deal(len(rows), 2)
    engine = build(groups, folder, optim=OptimConfig(), **options)
    engine.forward_backward(part, micro_batches, weighted_sum(["log_probs"]))
    outputs = join_rows(rows, engine.forward(part, micro_batches), num_rows)
    return outputs["log_probs"], hf_gradients(engine), values_of(engine.router_metrics)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v32", {"packing": False}),
        ("deepseek_v32", {"recomputation": Recomputation(Recompute.full, (), None)}),
        (
            "deepseek_v32",
            {"recomputation": Recomputation(Recompute.selective, (RecomputeModule.core_attn,), None)},
        ),
        ("glm-shared", {"recomputation": Recomputation(Recompute.full, (), None)}),
        ("glm-shared", {"share_prompts": True}),
    ],
)
def test_other_ways_to_compute_the_same(
    tmp_path: Path, rank_pool: RankPool, family: str, options: dict[str, Any]
) -> None:
    save_model(family, tmp_path)
    batch = weighted_batch()
    assert batch["input_ids"].shape[1] == 8 * SELECTED_KEYS
    runs = [
        rank_pool.run(
            run_rank, world_size=1, parallel=ParallelConfig(), folder=str(tmp_path), batch=batch, **each
        )[0]
        for each in ({}, options)
    ]
    (log_probs, gradients, _), (others, other_gradients, _) = runs
    assert max_difference(log_probs, others) < 1e-5
    norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    assert_same(other_gradients, gradients, 1e-4, floor=1e-5 * norm)
    frozen = [name for name in gradients if ".indexer." in name]
    assert frozen
    assert not any(gradients[name].any() for name in frozen)


def divergence(attention: Any, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Return the divergence (S) of a layer's indexer, written out in float64 for one row."""
    indexer = attention.indexer
    cos, sin = cos_sin
    length = hidden.shape[1]
    latent = attention.q_a_layernorm(attention.q_a_proj(hidden))

    def rotated(heads: Tensor, module: Any, size: int, name: str) -> Tensor:
        first, rest = heads.split((size, heads.shape[-1] - size), -1)
        turned, _ = getattr(module, name)(first, first, cos, sin, unsqueeze_dim=2)
        return torch.cat((turned, rest), -1)

    size = indexer.qk_rope_head_dim
    is_glm = isinstance(indexer, glm.GlmMoeDsaIndexer)
    turn = "apply_rotary_pos_emb_interleave" if is_glm else "apply_rotary_pos_emb"
    module = glm if is_glm else deepseek
    queries = indexer.wq_b(latent.detach()).view(1, length, indexer.n_heads, indexer.head_dim)
    keys = indexer.k_norm(indexer.wk(hidden.detach()))[:, :, None]
    queries, keys = (rotated(each, module, size, turn)[0] for each in (queries, keys))
    weights = indexer.weights_proj(hidden.detach())[0] * (indexer.n_heads * indexer.head_dim) ** -0.5
    scores = (torch.einsum("qhd,kd->qhk", queries, keys[:, 0]).relu() * weights[..., None]).sum(1)

    # The attention of all heads over the selected keys.
    best = scores.detach().masked_fill(~mask, -torch.inf).topk(min(SELECTED_KEYS, length)).indices
    chosen = torch.zeros_like(mask).scatter(1, best, True) & mask
    heads = attention.q_b_proj(latent).view(1, length, -1, attention.qk_head_dim)
    plain, turning = heads.split((attention.qk_nope_head_dim, size), -1)
    compressed = attention.kv_a_proj_with_mqa(hidden)
    of_keys, shared = compressed.split((attention.kv_lora_rank, size), -1)
    up = attention.kv_b_proj(attention.kv_a_layernorm(of_keys)).view(1, length, heads.shape[2], -1)
    turned, shared = module.apply_rotary_pos_emb_interleave(
        turning, shared[:, :, None], cos, sin, unsqueeze_dim=2
    )
    query = torch.cat((plain, turned), -1)[0]
    key = torch.cat((up[..., : attention.qk_nope_head_dim], shared.expand(-1, -1, heads.shape[2], -1)), -1)[0]
    logits = attention.scaling * torch.einsum("qhd,khd->hqk", query, key)
    target = logits.masked_fill(~chosen, -torch.inf).softmax(-1).mean(0).detach()

    predicted = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
    return (torch.xlogy(target, target) - target * predicted).sum(-1)


def reference(folder: Path, batch: Tensors) -> tuple[float, Tensors]:
    """Return the loss of the indexers and its gradients, row by row.

    The hidden states of each layer are transformers' in float32, and everything after them is in float64.
    """
    model = load_lm(folder)
    wide = {
        f"model.layers.{number}.self_attn": deepcopy(layer.self_attn).double()
        for number, layer in enumerate(model.model.layers)
        if layer.self_attn.indexer is not None
    }
    losses: list[Tensor] = []

    def compute(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], attention: Any) -> None:
        hidden = options["hidden_states"].double()
        mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        cos, sin = (each.double() for each in options["position_embeddings"])
        with torch.enable_grad():
            losses.append(divergence(attention, hidden, (cos, sin), mask).sum())

    for name, attention in wide.items():
        model.get_submodule(name).register_forward_pre_hook(
            partial(compute, attention=attention), with_kwargs=True
        )
    with torch.no_grad():
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            model(ids[mask][None], use_cache=False)

    loss = torch.stack(losses).sum() / batch["attention_mask"].sum()
    (COEFFICIENT * loss).backward()
    gradients = {
        f"{name}.{inner}": each.grad
        for name, attention in wide.items()
        for inner, each in attention.named_parameters()
        if inner.startswith("indexer.")
    }
    return float(loss) / len(wide), gradients


LAYOUTS = {
    "TP1": ParallelConfig(),
    "TP2+SPxEP2": EXPERT_LAYOUTS["TP2+SPxEP2"],
    "PP2": EXPERT_LAYOUTS["PP2"],
    "CP2xEP2": EXPERT_LAYOUTS["CP2xEP2"],
    "CP2xTP2+SP": CONTEXT_LAYOUTS["CP2xTP2+SP"],
}


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        *(("deepseek_v32", layout, {}) for layout in LAYOUTS),
        ("deepseek_v32", "TP1", {"packing": False}),
        ("deepseek_v32", "TP1", {"share_prompts": True}),
        ("deepseek_v32", "TP1", {"recomputation": Recomputation(Recompute.full, (), None)}),
        # The first stage runs both micro-batches before a backward pass.
        (
            "deepseek_v32",
            "PP2",
            {"recomputation": Recomputation(Recompute.selective, (RecomputeModule.core_attn,), None)},
        ),
        ("glm-shared", "TP1", {}),
        ("glm_moe_dsa", "TP2+SPxEP2", {}),
    ],
)
def test_the_loss_of_indexers_is_that_of_a_plain_computation(
    tmp_path: Path, rank_pool: RankPool, family: str, layout: str, options: dict[str, Any]
) -> None:
    save_model(family, tmp_path)
    batch = weighted_batch()
    loss, expected = reference(tmp_path, batch)
    parallel = LAYOUTS[layout]
    ranks = rank_pool.run(
        run_rank,
        world_size=parallel.world_size,
        parallel=parallel,
        folder=str(tmp_path),
        batch=batch,
        indexer_loss=COEFFICIENT,
        **options,
    )
    gradients = merge([each for _, each, _ in ranks])
    found = {name: value.double() for name, value in gradients.items() if name in expected}
    assert found.keys() == expected.keys()
    assert_same(found, expected, 1e-4)
    for _, _, metrics in ranks:
        assert metrics["indexer_loss"] == pytest.approx(loss, rel=1e-4)

    # No other weight has a gradient of this loss.
    (without,) = rank_pool.run(
        run_rank, world_size=1, parallel=ParallelConfig(), folder=str(tmp_path), batch=batch
    )
    others = {name: value for name, value in without[1].items() if ".indexer." not in name}
    norm = float(torch.stack([each.norm() for each in others.values()]).norm())
    assert_same({name: gradients[name] for name in others}, others, 1e-4, floor=1e-5 * norm)
