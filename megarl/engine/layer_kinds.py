"""The table of what Megatron builds for each kind of layer part: options, modules, rotary embedding.

A row without entries leaves Megatron's modules. The table is in this package because config, planners and
models, which have the other facts about kinds, load no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.config.schema import Layers, ParallelConfig
from megarl.engine import delta_net, latent_attention, mamba, sinks, sparse_attention
from megarl.engine.moe_router import router_class
from megarl.engine.rotary import attention_factor, set_local_rotation
from megarl.models.architecture import Architecture, Experts
from megarl.models.delta_net import DELTA_NET
from megarl.models.experts import EXPERTS
from megarl.models.latent import LATENT_ATTENTION
from megarl.models.layers import VISION, has_dense_layers, routing_layers
from megarl.models.mamba import MAMBA
from megarl.models.mapping import PartKind
from megarl.models.sparse_attention import REUSED_SELECTION, SPARSE_ATTENTION
from megarl.models.trunk import ATTENTION, MLP, SINK_ATTENTION, WINDOWED_ATTENTION


def _nothing(*inputs: Any) -> dict[str, Any]:
    """Change nothing, and return no options."""
    return {}


class KindModules(NamedTuple):
    """The changes that a kind makes to a model of Megatron.

    Attributes:
        config_class: Megatron's class of configurations of models with the kind. None: the usual one.
        options: Returns Megatron's options for a model with the kind, given the layout, the implementation of
            layers, and whether they run on a CPU.
        set_modules: Changes the specification of a layer with the kind. Takes Megatron's provider of
            Transformer Engine's classes, None for local layers.
        set_rotation: Replaces the rotary frequencies of a chunk, (rotary_dim / 2,) float32, and sets the
            factor of cosine and sine. It is called once for a chunk whose kinds share it.
    """

    config_class: type[TransformerConfig] | None = None
    options: Callable[[Architecture, ParallelConfig, Layers, bool], dict[str, Any]] = _nothing
    set_modules: Callable[[ModuleSpec, Architecture, Any], Any] = _nothing
    set_rotation: Callable[[Any, Architecture, Tensor], Any] = _nothing


def _set_rotation(chunk: Any, architecture: Architecture, frequencies: Tensor) -> None:
    """Set the frequencies and the factor of all layers, and those of layers with a window.

    Megatron supports Llama 3's scaling with one set of constants only, and reads YaRN's factor from
    attributes that its configuration does not declare.
    """
    chunk.rotary_pos_emb.inv_freq = frequencies.to(chunk.rotary_pos_emb.inv_freq.device)
    for layer in chunk.decoder.layers:
        layer.self_attention._yarn_concentration_factor = attention_factor(architecture.rope_scaling)
    if architecture.local_rope is not None:
        set_local_rotation(chunk.decoder.layers, architecture, like=chunk.rotary_pos_emb)


def _expert_options(
    architecture: Architecture, parallel: ParallelConfig, layers: Layers, on_cpu: bool
) -> dict[str, Any]:
    """Return Megatron's options for experts.

    The router computes in float32, without Megatron's losses (see moe_router.py). A softmax over the selected
    experts equals selection after a softmax over all experts, divided by the sum. Sigmoid scores of selected
    experts are always divided by their sum. With Transformer Engine, a rank's experts are one grouped
    product; without it, and on a CPU, they are computed one after another.

    Megatron's own selection bias stays off, because it would be a buffer that Megatron changes in every step
    (see moe_router.py).
    """
    experts = architecture.sizes_of(Experts)
    num_groups, num_selected_groups = experts.groups or (None, None)
    sparse_layers = routing_layers(architecture)
    options: dict[str, Any] = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_tok,
        "moe_router_score_function": experts.score.value,
        "moe_router_pre_softmax": not experts.norm_topk_prob,
        "moe_router_num_groups": num_groups,
        "moe_router_group_topk": num_selected_groups,
        "moe_router_topk_scaling_factor": experts.scaling_factor if experts.scaling_factor != 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_shared_expert_intermediate_size": experts.shared_intermediate_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_grouped_gemm": layers is Layers.transformer_engine,
        # A list makes Megatron store each layer separately.
        "moe_layer_freq": [int(layer in sparse_layers) for layer in range(architecture.num_hidden_layers)]
        if has_dense_layers(architecture)
        else 1,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }

    if experts.clamp is not None:
        options |= {
            "activation_func": quick_gelu,
            "activation_func_clamp_value": experts.clamp,
            "glu_linear_offset": 1.0,
            "bias_activation_fusion": not on_cpu,  # the CPU's fused activation is another one
        }
    return options


def _set_experts(layer: ModuleSpec, architecture: Architecture, provider: Any) -> None:
    modules: Any = layer.submodules
    modules.mlp.keywords["submodules"].router = router_class(architecture)  # a functools.partial
    if provider is not None:
        return

    # If Transformer Engine cannot be imported, the name of its product, which Megatron's router compares with
    # None, does not exist.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # Transformer Engine has a separate norm before experts. Megatron's checkpoints must be the same for both.
    modules.sharded_state_dict_keys_map = {
        name: key for name, key in modules.sharded_state_dict_keys_map.items() if name != "pre_mlp_layernorm."
    }


def _attention(set_modules: Callable[[ModuleSpec, Architecture, Any], Any] = _nothing) -> KindModules:
    return KindModules(set_modules=set_modules, set_rotation=_set_rotation)


_SPARSE = KindModules(
    config_class=MLATransformerConfig,
    options=lambda architecture, *build: latent_attention.latent_options(architecture),
    set_modules=sparse_attention.set_modules,
    set_rotation=sparse_attention.set_rotation,
)

# The mixer of a layer sets its modules before the feed-forward does.
MODULES: dict[PartKind, KindModules] = {
    ATTENTION: _attention(),
    SINK_ATTENTION: _attention(sinks.set_modules),
    WINDOWED_ATTENTION: _attention(sinks.set_modules),
    LATENT_ATTENTION: KindModules(
        config_class=MLATransformerConfig,
        options=lambda architecture, *build: latent_attention.latent_options(architecture),
        set_modules=latent_attention.set_modules,
        set_rotation=latent_attention.set_rotation,
    ),
    SPARSE_ATTENTION: _SPARSE,
    REUSED_SELECTION: _SPARSE,
    DELTA_NET: KindModules(
        options=lambda architecture, *build: delta_net.delta_options(architecture),
        set_modules=delta_net.set_modules,
    ),
    MAMBA: KindModules(set_modules=mamba.set_modules),
    MLP: KindModules(),
    EXPERTS: KindModules(options=_expert_options, set_modules=_set_experts),
    VISION: KindModules(),
}
