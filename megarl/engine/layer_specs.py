"""Choose the modules of a decoder: Transformer Engine's, or Megatron's with the local layers of `layers`.

Transformer Engine's modules hold some parameters in other places. Only this file and the
modules of kinds (layer_kinds.py) know that: everywhere else a parameter has the name that it has in the local
layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.config.layers import LayerChoice, choose_layers
from megarl.config.schema import DType, Layers
from megarl.engine.layer_kinds import MODULES
from megarl.engine.layers import AttentionCore, DecoderLayer, RMSNorm, sharing_prompts
from megarl.engine.norms import drop_norms_before_blocks, linear_class, set_norms
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.layers import KINDS, LayerPart, layers_of, routes_tokens
from megarl.models.mapping import EXPERT, FEED_FORWARD, MIXER, NORM_BEFORE, PartKind


def layers_for(asked: Layers, dtype: DType, *, on_cuda: bool, has_adapters: bool = False) -> LayerChoice:
    """Choose the layers. `has_adapters` is set if the model trains low-rank adapters.

    Raises:
        ValueError: The requested layers are not available here.
    """
    choice = choose_layers(
        asked,
        dtype,
        on_cuda=on_cuda,
        has_transformer_engine=gpt_layer_specs.HAVE_TE,
        has_adapters=has_adapters,
    )
    if choice.layers is Layers.transformer_engine and not on_cuda:
        raise ValueError(
            "engine.layers=transformer_engine, but this process is on a CPU: use engine.layers=auto or local"
        )

    if choice.layers is Layers.transformer_engine and not gpt_layer_specs.HAVE_TE:
        raise ValueError(
            "engine.layers=transformer_engine, but transformer_engine.pytorch cannot be imported here: "
            "install 'transformer-engine[pytorch]' (docs/install.md), or use engine.layers=local"
        )

    return choice


def block_spec(
    config: TransformerConfig, architecture: Architecture, layers: Layers, chunk: int | None
) -> TransformerBlockSubmodules:
    """Return the modules of this rank's layers and of the norm after the last one.

    Args:
        config: Megatron's configuration of the model.
        chunk: The virtual pipeline stage, None if there is only one.
    """
    if architecture.linear_bias and layers is Layers.transformer_engine:
        raise ValueError(
            f"engine.layers=transformer_engine, but the experts of {architecture.model_type} have biases, "
            "which megarl supports with local layers only: set engine.layers=local"
        )

    norm = _transformer_engine().layer_norm() if layers is Layers.transformer_engine else RMSNorm
    specs = _specs_of_kinds(config, architecture, layers, norm)

    # The layers of this chunk, by their numbers in the whole model.
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    held = range(first, first + get_num_layers_to_build(config, vp_stage=chunk))
    every = layers_of(architecture)

    # The first layers add features of images to their outputs, which the first stage has.
    num_deepstack = architecture.num_image_layers
    if num_deepstack and first == 0 and len(held) < num_deepstack:
        raise ValueError(
            f"the first (virtual) pipeline stage has {counted(len(held), 'layer')}, but features of images "
            f"are added to the first {num_deepstack}: use fewer pipeline stages or virtual stages"
        )

    return TransformerBlockSubmodules(
        layer_specs=[specs[_kinds(every[layer])] for layer in held], layer_norm=norm
    )


def _kinds(layer: tuple[LayerPart, ...]) -> tuple[PartKind, ...]:
    return tuple(part.kind for part in layer)


def _specs_of_kinds(
    config: TransformerConfig, architecture: Architecture, layers: Layers, norm: Any
) -> dict[tuple[PartKind, ...], ModuleSpec]:
    """Return a spec for each combination of kinds that a layer of the model has."""
    is_fused = layers is Layers.transformer_engine
    make = _transformer_engine_layer if is_fused else _local_layer
    provider = _transformer_engine() if is_fused else None
    specs = {}

    for kinds in dict.fromkeys(map(_kinds, layers_of(architecture))):
        spec = make(config, any(kind.routes_tokens for kind in kinds))
        for kind in kinds:
            MODULES[kind].set_modules(spec, architecture, provider)
        set_norms(spec, architecture, norm)
        if not architecture.norms.before:
            column = ColumnParallelLinear if provider is None else provider.column_parallel_linear()
            drop_norms_before_blocks(spec, column)
        drop_missing_parts(spec, {kind.prefix for kind in kinds})
        spec.module = DecoderLayer
        specs[kinds] = spec

    return specs


def drop_missing_parts(layer: ModuleSpec, prefixes: Collection[str]) -> None:
    """Remove the part that a layer does not have, with its norm.

    Args:
        prefixes: How the names of the parameters of its parts begin.
    """
    modules: Any = layer.submodules
    if MIXER not in prefixes:
        modules.input_layernorm = modules.self_attention = IdentityOp
        modules.self_attn_bda = IdentityFuncOp
    if FEED_FORWARD not in prefixes:
        modules.pre_mlp_layernorm = modules.mlp = IdentityOp
        modules.mlp_bda = IdentityFuncOp


def _transformer_engine() -> Any:
    """Return Megatron's provider of Transformer Engine's classes, which must be installed."""
    provider: Any = gpt_layer_specs.TESpecProvider  # None where it is not installed
    return provider()


def ends_with_predictors(architecture: Architecture) -> bool:
    """Return whether the last layer keeps only predictors. Routers count all tokens in each layer."""
    return not routes_tokens(architecture)


def _transformer_engine_layer(config: TransformerConfig, is_sparse: bool) -> ModuleSpec:
    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if is_sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm or config.multi_latent_attention,
        multi_latent_attention=config.multi_latent_attention,
    )
    modules: Any = layer.submodules
    attention = modules.self_attention.submodules
    attention.core_attention = sharing_prompts(attention.core_attention)
    return layer


def _local_layer(config: TransformerConfig, is_sparse: bool) -> ModuleSpec:
    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if is_sparse else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    modules: Any = layer.submodules
    attention = modules.self_attention.submodules
    attention.core_attention = AttentionCore
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm and not config.multi_latent_attention:
        attention.q_layernorm = attention.k_layernorm = RMSNorm

    return layer


_LAYER_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
# Transformer Engine has a norm inside the linear layer that follows it.
_CANONICAL = {kind.stored_norm: NORM_BEFORE[kind.prefix] for kind in KINDS if kind.stored_norm} | {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}


def canonical_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return the name of a parameter in the whole model, independent of the layers' implementation.

    Args:
        first_layer: The number of layers before the chunk.
        first_expert: The number of experts before this rank's.
    """
    match = _LAYER_PARAMETER.fullmatch(name)
    if match is None:
        return name
    rest = _CANONICAL.get(match[2], match[2])

    # Experts are separate modules, or numbered weights of one grouped product.
    if local := _LOCAL_EXPERT.fullmatch(rest):
        rest = f"{EXPERT.format(expert=int(local[1]) + first_expert)}{local[2]}"
    elif grouped := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"{EXPERT.format(expert=int(grouped[2]) + first_expert)}{grouped[1]}.weight"

    return f"decoder.layers.{int(match[1]) + first_layer}.{rest}"


def mark_cut_parameters(model: torch.nn.Module) -> None:
    """Mark the parameters that are sharded over ranks, which Megatron does only while it initializes them.

    An unmarked parameter counts as replicated, and all parts except rank 0's are silently left out of the
    gradient norm. A stride of 2 means that each rank has two parts of the whole: of gate and of up.
    """
    config: Any = model.config
    columns = {ColumnParallelLinear, VocabParallelEmbedding}
    rows = {RowParallelLinear}

    # The same kinds of layers, as classes of Transformer Engine.
    if gpt_layer_specs.HAVE_TE:
        modules = _transformer_engine()
        columns |= {modules.column_parallel_linear(), modules.column_parallel_layer_norm_linear()}
        rows |= {modules.row_parallel_linear()}
        grouped = modules.grouped_mlp_modules(moe_use_grouped_gemm=True).keywords["submodules"]
        columns.add(grouped.linear_fc1)
        rows.add(grouped.linear_fc2)

    for path, module in model.named_modules():
        kind = linear_class(module)
        if kind not in columns | rows:
            continue
        stride = 2 if path.endswith("linear_fc1") and config.gated_linear_unit else 1
        gates_apart = stride == 2 and not config.bias_activation_fusion
        for name, parameter in module.named_parameters(recurse=False):
            # The bias of a row-parallel layer is replicated.
            is_cut = name.startswith("weight") or (name == "bias" and kind in columns)
            if is_cut and not getattr(parameter, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(
                    parameter, is_parallel=True, dim=int(kind in rows), stride=stride
                )
            # pyrefly: ignore[missing-attribute]  # see cpu_adaptations.py
            parameter.gates_apart = gates_apart


def adapt_expert_biases(model: torch.nn.Module) -> None:
    """Mark the biases of a chunk's experts as what they are, and give each layer an output of its own.

    Megatron-Core 0.19 treats them as if every rank had the same experts: it adds up the gradients of
    different experts over the tensor-parallel ranks, leaves those of all ranks but the first out of the
    gradient norm, and adds a bias in place to the output of a layer, of which autograd knows that it is a
    view.
    """
    for name, module in model.named_modules():
        if ".local_experts." not in name or not name.endswith("linear_fc2"):
            continue
        bias: Any = module.bias
        bias.sequence_parallel = False
        bias.tensor_model_parallel = True
        module.register_forward_hook(lambda module, inputs, outputs: (outputs[0].clone(), *outputs[1:]))


# What dispatchers, and the managers of flexible ones, know about the last pass.
_ROUTES = (
    "probs",
    "routing_map",
    "reversed_local_input_permutation_mapping",
    "token_probs",
    "token_indices",
    "dispatched_routing_map",
    "dispatched_probs",
    "reversed_mapping_for_combine",
    "pad_offsets",
)


def adapt_dispatchers(model: torch.nn.Module) -> None:
    """Make Megatron's dispatchers release the routes of a layer's last pass, and convert them on the device.

    Otherwise they keep, until the next pass, the graph of recomputed activations: the input and its gradient
    of each layer.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            dispatcher.combine_postprocess = _and_forget(dispatcher, dispatcher.combine_postprocess)
            manager: Any = getattr(dispatcher, "_comm_manager", None)
            if hasattr(manager, "_indices_to_multihot"):
                manager._indices_to_multihot = partial(_one_column_per_expert, manager.num_local_experts)


def _and_forget(
    dispatcher: Any, combine: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(tokens: torch.Tensor) -> torch.Tensor:
        combined = combine(tokens)
        for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name in _ROUTES:
                if hasattr(holder, name):
                    setattr(holder, name, None)
        return combined

    return run


def _one_column_per_expert(
    num_experts: int, indices: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace DeepEP's conversion of routes in Megatron, which waits for the device three times.

    Args:
        indices: (tokens, routes) the experts of this rank that have a token; -1 stands for another rank's.
        probs: (tokens, routes).

    Returns:
        (tokens, experts) whether an expert has a token, and with which probability, in float32.
    """
    # Routes to other ranks are in a last column, which is left out.
    columns = indices.where(indices >= 0, num_experts).long()
    none = probs.new_zeros((len(indices), num_experts + 1), dtype=torch.float32)
    is_routed = none.bool().scatter(1, columns, True)
    weights = none.scatter(1, columns, probs.float())
    return is_routed[:, :-1].contiguous(), weights[:, :-1].contiguous()


def drop_quantized_weights(models: Iterable[torch.nn.Module]) -> None:
    """Drop the copies of weights in FP8 or FP4 that Transformer Engine keeps between micro-batches.

    The first micro-batch of the next pass makes them again.
    """
    for model in models:
        for module in model.modules():
            kept: Any = getattr(module, "_fp8_workspaces", {})
            kept.clear()


def fuse_gradient_accumulation(model: torch.nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to Megatron's buffer with their own kernels.

    Megatron's flag for this would also require Apex, for Megatron's own layers.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
