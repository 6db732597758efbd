"""Megatron's GPTModel for a Hugging Face architecture, one chunk per virtual pipeline stage.

The model is a policy or a critic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema import CPCommType, Layers, ParallelConfig, Recomputation, Recompute, RecomputeModule
from megarl.engine.groups import ParallelGroups
from megarl.engine.layer_kinds import MODULES
from megarl.engine.layer_specs import (
    adapt_dispatchers,
    adapt_expert_biases,
    block_spec,
    canonical_name,
    fuse_gradient_accumulation,
    mark_cut_parameters,
)
from megarl.engine.lora import AdapterSwitch, add_adapters
from megarl.engine.megatron_options import NO_OPTIONS, build_config
from megarl.engine.moe_router import BiasedExpertRouter
from megarl.engine.packed_rows import PackedRows
from megarl.engine.rotary import attention_factor, inverse_frequencies
from megarl.engine.vision import ImageInputs, build_tower, insert_images, keep_frequencies
from megarl.models.architecture import Activation, Architecture, QKNorm
from megarl.models.counts import padded_vocab_size
from megarl.models.layers import kinds_of, reads_images, routes_tokens
from megarl.models.tensor_table import Head
from megarl.models.vision import Vision
from megarl.weights.shard_layout import layouts_of


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    layers: Layers,
    recomputation: Recomputation,
    cp_comm_type: CPCommType,
    on_cpu: bool,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> TransformerConfig:
    """Return Megatron's configuration of the model, with the `options` of the run.

    Losses are sums over a fixed denominator, so Megatron must not average them again.
    """
    own = dict(
        **_layer_options(architecture, on_cpu),
        **_parallel_options(parallel, cp_comm_type),
        **_fusion_options(architecture, layers, on_cpu),
        **_recompute_options(recomputation, architecture),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,  # every element is loaded from a file
        use_cpu_initialization=on_cpu,
    )

    # What kinds of layers change comes last.
    kinds = [MODULES[kind] for kind in kinds_of(architecture)]
    for kind in kinds:
        own |= kind.options(architecture, parallel, layers, on_cpu)
    config_class = next(filter(None, (kind.config_class for kind in kinds)), TransformerConfig)
    return build_config(config_class, own, options)


def _layer_options(architecture: Architecture, on_cpu: bool) -> dict[str, Any]:
    """Return Megatron's options for what all layers compute, whatever their kinds."""
    spans_heads = architecture.qk_norm_kind is QKNorm.all_heads
    unrotated = [
        int(layer in architecture.layers_without_rope) for layer in range(architecture.num_hidden_layers)
    ]

    return dict(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        gated_linear_unit=architecture.activation.has_gate,
        activation_func=_activation(architecture, on_cpu=on_cpu),
        add_bias_linear=architecture.linear_bias,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm and not spans_heads,
        qk_l2_norm=architecture.qk_norm and spans_heads,
        layernorm_zero_centered_gamma=architecture.norms.zero_centered,
        attention_output_gate=architecture.has_output_gate,
        softmax_scale=architecture.softmax_scale,
        no_rope_freq=unrotated if any(unrotated) else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Layers have different parameters, so Megatron stores each one separately.
        hetereogenous_dist_checkpoint=bool(architecture.layers_without_mixer),
    )


def _parallel_options(parallel: ParallelConfig, cp_comm_type: CPCommType) -> dict[str, Any]:
    """Return Megatron's options for the layout, except for experts."""
    virtual = parallel.virtual_pipeline_parallel_size
    return dict(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=_pipeline_layout(parallel.pipeline_layout),
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type="all_gather" if cp_comm_type is CPCommType.all_gather else "p2p",
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # for dense models too: required by variable_seq_lengths
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
    )


def _pipeline_layout(counts: list[int] | None) -> list[list[str]] | None:
    """Return Megatron's layout of virtual stages with these numbers of layers."""
    if counts is None:
        return None
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _fusion_options(architecture: Architecture, layers: Layers, on_cpu: bool) -> dict[str, Any]:
    """Return Megatron's options for fused kernels.

    Fused kernels are used if they replace several passes over the tokens: the activation of the MLP (by
    torch.compile on CUDA, by cpu_kernels.py on a CPU); on CUDA, Transformer Engine's rotary embedding, and
    Apex's accumulation of weight gradients in Megatron's buffer if it is installed. Without dropout, the
    residual sums have nothing to fuse, and the softmax is inside the attention. Transformer Engine's rotary
    embedding has no factor for cosine and sine, so models that have one use megarl's.
    """
    # The CPU's fused activation is another one, and adapters are added before the activation. Megatron has no
    # fused squared ReLU.
    is_other = architecture.activation is not Activation.silu or architecture.lora is not None
    return dict(
        bias_activation_fusion=architecture.activation.has_gate and not (on_cpu and is_other),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=layers is Layers.transformer_engine
        and not on_cpu
        and attention_factor(architecture.rope_scaling) == 1,
        gradient_accumulation_fusion=not on_cpu and tensor_parallel_layers._grad_accum_fusion_available,
        persist_layer_norm=False,
    )


def _activation(architecture: Architecture, *, on_cpu: bool) -> Callable[[Tensor], Tensor]:
    """Return the activation of a gate, unless a kind of layer replaces it (experts with a clamp).

    Megatron computes the tanh approximation if GELU is fused with the product of gate and up.
    """
    if architecture.activation is Activation.gelu_tanh:
        return partial(F.gelu, approximate="tanh") if on_cpu else F.gelu
    return F.silu if architecture.activation.has_gate else squared_relu


def _recompute_options(recomputation: Recomputation, architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's options for recomputation.

    `uniform` recomputes all layers one at a time; `block` recomputes the first layers of a chunk. For
    Megatron, the MLP of a sparse layer (router and experts) is a separate module.
    """
    how, modules, num_layers = recomputation
    if how is Recompute.none:
        return {}

    if how is Recompute.selective:
        names = [module.value for module in modules]
        if RecomputeModule.mlp in modules and routes_tokens(architecture):
            names.append("moe")
        return {"recompute_granularity": "selective", "recompute_modules": names}

    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if num_layers is None else "block",
        "recompute_num_layers": num_layers or 1,
    }


class ValueHead(torch.nn.Module):
    """The output layer of a critic: one number per token, from replicated hidden states. weight: (1, H)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., H) to values (...) float32."""
        return F.linear(hidden, self.weight)[..., 0].float()


def keep_hidden(*, hidden_states: Tensor, **unused: Any) -> Tensor:
    """Replace Megatron's head and loss: an `output_processor` of a GPTModel's forward pass."""
    return hidden_states


class ModelChunk(GPTModel):
    """A GPTModel with the names of its parameters in the whole model, and the inputs of its head.

    Its forward pass ends with `keep_hidden` on the last stage, because the head runs in chunks of tokens (see
    `vocab_parallel`).
    """

    # Megatron sets modules of several classes, and a critic has another head.
    decoder: Any
    output_layer: Any
    rotary_pos_emb: Any

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        layers: Layers,
        groups: ParallelGroups,
        head: Head,
        chunk: int,
    ) -> None:
        # Megatron's number of a virtual stage is None if each rank has one chunk.
        virtual_stage = chunk if groups.num_chunks > 1 else None
        super().__init__(
            config,
            # pyrefly: ignore[bad-argument-type]  # Megatron also takes the modules of a block
            block_spec(config, architecture, layers, virtual_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, groups.parallel.tensor_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=groups.is_first_stage(chunk),
            post_process=groups.is_last_stage(chunk),
            share_embeddings_and_output_weights=architecture.tie_word_embeddings and head == "lm",
            position_embedding_type="rope",
            rotary_percent=architecture.partial_rotary_factor,
            vp_stage=virtual_stage,
        )
        self.head = head
        self.architecture = architecture
        self._vision: Vision | None = None
        self.visual: Any = None
        if self.pre_process and reads_images(architecture):
            self._vision = architecture.sizes_of(Vision)
            self.visual = build_tower(self._vision)
            if config.recompute_granularity == "full":
                self.visual.gradient_checkpointing_enable()
        self._first_expert = (
            groups.expert_rank * architecture.num_experts // groups.parallel.expert_parallel_size
        )

        frequencies = inverse_frequencies(
            architecture.rotary_dim, architecture.rope_theta, architecture.rope_scaling
        )
        # Kinds of attention share one function, which sets the whole chunk.
        for set_rotation in dict.fromkeys(MODULES[kind].set_rotation for kind in kinds_of(architecture)):
            set_rotation(self, architecture, frequencies)
        if self.pre_process and architecture.embedding_scale != 1:
            scale = torch.tensor(architecture.embedding_scale, dtype=config.params_dtype).item()
            self.embedding.register_forward_hook(lambda module, inputs, output: output * scale)

        # A critic has one output per token instead of one per vocabulary entry.
        if self.post_process and head == "value":
            self.output_layer = ValueHead(config)

        # Megatron marks sharded parameters while it initializes them, which is skipped because all are
        # loaded.
        mark_cut_parameters(self)
        adapt_dispatchers(self)
        if architecture.linear_bias:
            adapt_expert_biases(self)
        if layers is Layers.transformer_engine:
            fuse_gradient_accumulation(self)

    # Only two of Megatron's options are used: `packed_seq_params` and `decoder_input`.
    # pyrefly: ignore[bad-override]
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: None,
        *,
        images: ImageInputs | None = None,
        packed_seq_params: PackedRows | None = None,
        **options: Any,
    ) -> Tensor:
        """Run this chunk, beginning with the embedding and the vision tower on the first stage."""
        if self._vision is not None:
            assert packed_seq_params is not None
            options["decoder_input"] = insert_images(
                self.embedding(tokens, positions),
                self.visual,
                self._vision,
                images,
                packed_seq_params,
                self.pg_collection.tp if self.config.sequence_parallel else None,
            )

        run: Callable[..., Tensor] = super().forward  # Megatron takes None where it declares a tensor
        return run(tokens, positions, mask, packed_seq_params=packed_seq_params, **options)

    def canonical_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters with their names in local layers, numbered over the whole model."""
        for name, parameter in self.named_parameters():
            yield self.canonical(name), parameter

    def canonical(self, name: str) -> str:
        """Return the name of a parameter in local layers, numbered over the whole model."""
        first_layer = self.decoder.layers[0].layer_number - 1 if len(self.decoder.layers) else 0
        return canonical_name(name, first_layer, self._first_expert)

    def output_hidden(self, hidden: Tensor) -> Tensor:
        """Return the last stage's hidden states (S * b, H), complete on each tensor-parallel rank.

        The gradient of a language-model head is summed over the ranks, which have different vocabulary
        shards. That of a value head, which every rank computes equally, is used as is.

        Args:
            hidden: (S / tp or S, b, H).
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=self.head == "lm", group=self.pg_collection.tp
            )
        elif self.head == "lm":
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        return hidden.flatten(0, 1)

    def output_weight(self) -> Tensor:
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )


def keep_float32(chunk: ModelChunk) -> ModelChunk:
    """Give selection biases and the tower's rotary frequencies float32 again after the chunk was converted.

    Biases have no values yet.
    """
    if chunk.visual is not None:
        keep_frequencies(chunk.visual)
    for module in chunk.modules():
        if isinstance(module, BiasedExpertRouter):
            module.expert_bias.data = module.expert_bias.data.float()
    return chunk


def build_chunks(
    architecture: Architecture,
    groups: ParallelGroups,
    *,
    head: Head,
    dtype: torch.dtype,
    layers: Layers,
    recomputation: Recomputation,
    cp_comm_type: CPCommType,
    device: torch.device,
    options: Mapping[str, Any] = NO_OPTIONS,
    switch: AdapterSwitch | None = None,
) -> list[ModelChunk]:
    """Build this rank's part of the model: one chunk per virtual pipeline stage. Weights are not set yet.

    `options` are fields of Megatron's TransformerConfig in addition to those that megarl sets. `switch` turns
    the adapters of a model off that has some.
    """
    if (
        cp_comm_type is CPCommType.p2p
        and layers is Layers.local
        and groups.parallel.context_parallel_size > 1
    ):
        raise ValueError(
            "engine.cp_comm_type=p2p, but the layers are local, which gather keys and values: install "
            "'transformer-engine[pytorch]' (docs/install.md), or use engine.cp_comm_type=auto"
        )

    config = transformer_config(
        architecture,
        groups.parallel,
        dtype,
        layers,
        recomputation,
        cp_comm_type,
        on_cpu=device.type == "cpu",
        options=options,
    )
    chunks = [
        ModelChunk(architecture, config, layers, groups, head, chunk) for chunk in range(groups.num_chunks)
    ]

    if architecture.lora is not None:
        layout = layouts_of(architecture, groups.parallel)[groups.rank]
        for chunk in chunks:
            add_adapters(chunk, architecture, layout, head, switch or AdapterSwitch())

    return [keep_float32(chunk.to(device=device, dtype=dtype)) for chunk in chunks]
