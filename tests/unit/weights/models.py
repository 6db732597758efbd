"""Tiny Hugging Face models of each family, and their Megatron shards.

The shards are made by slow loops that share no code with the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megarl.models.architecture import Architecture
from megarl.weights.shard_layout import ShardLayout
from tests.families import (
    WITH_TRANSPOSED_EXPERTS,
    example_architecture,
    example_config,
    has_fused_experts,
    new_model,
)

NUM_LAYERS = 4
HIDDEN = 32
HEADS = 8
KV_HEADS = 4
VOCAB = 199
FFN = 20
EXPERTS = 4
EXPERT_FFN = 8
SHARED_FFN = 12
PADDED_VOCAB = 208  # a multiple of 8: divisible by TP 1, 2, 4; with TP 4 the last rank has 9 padded rows
# Changed sizes of the examples: smaller ones, and heads that are not hidden_size / num_attention_heads.
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "head_dim": 6,
    "vocab_size": VOCAB,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": EXPERT_FFN,
    "shared_expert_intermediate_size": SHARED_FFN,
    "mlp_only_layers": [1],
}


def config_of(family: str, *, tied: bool = False, num_layers: int = NUM_LAYERS) -> PretrainedConfig:
    return example_config(
        family, **_SIZES, num_hidden_layers=num_layers, num_key_value_heads=KV_HEADS, tie_word_embeddings=tied
    )


def architecture_of(
    family: str, *, tied: bool = False, num_layers: int = NUM_LAYERS, num_key_value_heads: int = KV_HEADS
) -> Architecture:
    return example_architecture(
        family,
        **_SIZES,
        num_hidden_layers=num_layers,
        num_key_value_heads=num_key_value_heads,
        tie_word_embeddings=tied,
    )


def random_model(
    family: str, *, tied: bool = False, seed: int = 0, num_layers: int = NUM_LAYERS
) -> PreTrainedModel:
    """Create a model. Norms and biases are random too, so that a swapped or forgotten one is noticed."""
    config = config_of(family, tied=tied, num_layers=num_layers)
    model = new_model(config)
    generator = torch.Generator().manual_seed(seed)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)

    return model


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the parameters. Buffers such as selection biases keep float32, as in published folders."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def stored_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's folder."""
    tied = model.config.tie_word_embeddings
    state = {
        name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    return as_stored(state, model)


def as_stored(state: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's tensors as published folders have them.

    transformers keeps the experts of a layer in one tensor, as the folders of some families do.
    """
    is_converted = not has_fused_experts(model.config.model_type)
    stored = dict(revert_weight_conversion(model, dict(state)) if is_converted else state)
    if model.config.model_type in WITH_TRANSPOSED_EXPERTS:
        stored |= {name: value.mT for name, value in stored.items() if ".mlp.experts." in name}
    return {name: value.contiguous() for name, value in stored.items()}


@cache
def random_state(
    family: str, *, tied: bool = False, seed: int = 0, num_layers: int = NUM_LAYERS
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a `random_model`'s folder, which a process creates once and nobody may change."""
    model = random_model(family, tied=tied, seed=seed, num_layers=num_layers)
    return MappingProxyType({name: value.detach() for name, value in stored_state(model).items()})


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def slow_shards(
    state: Mapping[str, torch.Tensor],
    architecture: Architecture,
    *,
    tensor_parallel_size: int,
    rank: int,
    layers: tuple[int, ...],
    holds_embedding: bool,
    holds_output: bool,
    experts: Sequence[int] = (),
    expert_cut: tuple[int, int] = (1, 0),
) -> dict[str, torch.Tensor]:
    """Return the rank's Megatron parameters, row by row, as Megatron-Core arranges them.

    `expert_cut`: the size and rank of the parallelism that shards experts.
    """
    shards: dict[str, torch.Tensor] = {}
    if holds_embedding:
        shards["embedding.word_embeddings.weight"] = _vocabulary(
            state["model.embed_tokens.weight"], tensor_parallel_size, rank
        )

    for layer in layers:
        hf = f"model.layers.{layer}."
        megatron = f"decoder.layers.{layer}."
        shards[megatron + "input_layernorm.weight"] = state[hf + "input_layernorm.weight"]
        shards[megatron + "pre_mlp_layernorm.weight"] = state[hf + "post_attention_layernorm.weight"]
        if architecture.latent is not None:
            shards |= _latent_attention(
                state, hf + "self_attn.", megatron + "self_attention.", tensor_parallel_size, rank
            )
        else:
            for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
                q, k, v = (state[f"{hf}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
                shards[f"{megatron}self_attention.linear_qkv.{kind}"] = _qkv(
                    q, k, v, architecture, tensor_parallel_size, rank
                )
        if architecture.qk_norm:
            shards[megatron + "self_attention.q_layernorm.weight"] = state[hf + "self_attn.q_norm.weight"]
            shards[megatron + "self_attention.k_layernorm.weight"] = state[hf + "self_attn.k_norm.weight"]
        shards[megatron + "self_attention.linear_proj.weight"] = _columns(
            state[hf + "self_attn.o_proj.weight"], tensor_parallel_size, rank
        )
        if f"{hf}mlp.gate_proj.weight" in state:
            shards |= _feed_forward(state, f"{hf}mlp", f"{megatron}mlp", (tensor_parallel_size, rank))
            continue
        is_mixtral = architecture.model_type == "mixtral"
        block = hf + ("block_sparse_moe" if is_mixtral else "mlp")
        shards[f"{megatron}mlp.router.weight"] = state[f"{block}.gate.weight"]
        for expert in experts:
            names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
            shards |= _feed_forward(
                state,
                f"{block}.experts.{expert}",
                f"{megatron}mlp.experts.local_experts.{expert}",
                expert_cut,
                names,
            )
        if (bias := state.get(f"{block}.gate.e_score_correction_bias")) is not None:
            shards[f"{megatron}mlp.router.expert_bias"] = bias
        for name in ("shared_expert", "shared_experts"):
            if f"{block}.{name}.gate_proj.weight" in state:
                shards |= _feed_forward(
                    state, f"{block}.{name}", f"{megatron}mlp.shared_experts", (tensor_parallel_size, rank)
                )
        if f"{block}.shared_expert_gate.weight" in state:
            shards[f"{megatron}mlp.shared_experts.gate_weight"] = state[f"{block}.shared_expert_gate.weight"]

    if holds_output:
        shards["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if not architecture.tie_word_embeddings:
            shards["output_layer.weight"] = _vocabulary(state["lm_head.weight"], tensor_parallel_size, rank)
        elif not holds_embedding:
            shards["output_layer.weight"] = _vocabulary(
                state["model.embed_tokens.weight"], tensor_parallel_size, rank
            )

    return shards


def shards_of(
    state: Mapping[str, torch.Tensor], architecture: Architecture, layout: ShardLayout
) -> dict[str, torch.Tensor]:
    """Return the `slow_shards` of a layout."""
    return slow_shards(
        state,
        architecture,
        tensor_parallel_size=layout.tensor_parallel_size,
        rank=layout.tensor_parallel_rank,
        layers=layout.layers,
        holds_embedding=layout.holds_embedding,
        holds_output=layout.holds_output,
        experts=layout.experts,
        expert_cut=(layout.expert_tensor_parallel_size, layout.expert_tensor_parallel_rank),
    )


def _latent_attention(
    state: Mapping[str, torch.Tensor], hf: str, megatron: str, tensor_parallel_size: int, rank: int
) -> dict[str, torch.Tensor]:
    """Return the projections and norms of latent attention, of which ranks have whole heads."""
    replicated = {
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
    }
    of_heads = {
        "linear_q_proj": "q_proj",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_up_proj": "kv_b_proj",
    }
    shards = {
        f"{megatron}{ours}.weight": state[f"{hf}{theirs}.weight"]
        for ours, theirs in replicated.items()
        if f"{hf}{theirs}.weight" in state
    }

    for ours, theirs in of_heads.items():
        if (matrix := state.get(f"{hf}{theirs}.weight")) is not None:
            count = matrix.shape[0] // tensor_parallel_size
            rows = [matrix[row] for row in range(rank * count, (rank + 1) * count)]
            shards[f"{megatron}{ours}.weight"] = torch.stack(rows)

    return shards


def _feed_forward(
    state: Mapping[str, torch.Tensor],
    hf: str,
    megatron: str,
    cut: tuple[int, int],
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, torch.Tensor]:
    gate, up, down = (state[f"{hf}.{name}.weight"] for name in names)
    (size, rank), each = cut, gate.shape[0] // cut[0]
    rows = [matrix[rank * each + row] for matrix in (gate, up) for row in range(each)]

    return {
        f"{megatron}.linear_fc1.weight": torch.stack(rows),
        f"{megatron}.linear_fc2.weight": _columns(down, size, rank),
    }


def _vocabulary(matrix: torch.Tensor, tensor_parallel_size: int, rank: int) -> torch.Tensor:
    rows = [matrix[row] if row < VOCAB else torch.zeros(HIDDEN) for row in range(PADDED_VOCAB)]
    count = PADDED_VOCAB // tensor_parallel_size
    return torch.stack(rows[rank * count : (rank + 1) * count])


def _qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    architecture: Architecture,
    tensor_parallel_size: int,
    rank: int,
) -> torch.Tensor:
    groups = architecture.num_key_value_heads
    dim = architecture.head_dim
    heads_per_group = architecture.num_attention_heads // groups
    rows = []

    for group in range(groups):
        if group // (groups // tensor_parallel_size) != rank:
            continue
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            rows += [q[head * dim + index] for index in range(dim)]
        rows += [k[group * dim + index] for index in range(dim)]
        rows += [v[group * dim + index] for index in range(dim)]

    return torch.stack(rows)


def _columns(matrix: torch.Tensor, tensor_parallel_size: int, rank: int) -> torch.Tensor:
    count = matrix.shape[1] // tensor_parallel_size
    return torch.stack([matrix[:, column] for column in range(rank * count, (rank + 1) * count)], dim=1)
