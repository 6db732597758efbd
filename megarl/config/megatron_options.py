"""The table of Megatron's fields: owned by megarl, passed on, or passed on to CUDA only.

Every field of the tested Megatron-Core is in one of the tables. A field of a newer one that is in none is
passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import NamedTuple

from megarl.config.kinds import OptimizerKind
from megarl.config.megatron_fields import DTYPES
from megarl.config.schema import DType, Layers, MegatronConfig

MOMENT_DTYPES = tuple(option for kind in OptimizerKind for option in kind.needs.moments.values() if option)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Requirement(str, Enum):
    """The requirement of a field, without which Megatron would ignore the field or fail."""

    nothing = "nothing"  # it works on CUDA and on a CPU
    cuda = "cuda"  # CUDA, or a package that needs it
    transformer_engine = "transformer_engine"  # layers or optimizer of Transformer Engine


_NO_FILE = "is a Python object, which no file can contain; megarl sets it if it is needed"
_DTYPE = "use model.dtype"
_NO_EFFECT = "has no effect, because megarl does not call that part of Megatron"
_SHARDS = "would lay weights out in a way that weight sync and checkpoints do not read; use {role}.parallel"
_SUM = "is fixed, because losses are sums with their own denominator; use algorithm.policy_loss.aggregation"
_FP8_WEIGHTS = (
    "stores weights in another dtype than weight sync, checkpoints and offloading read; use model.dtype"
)
_SCHEDULE = (
    "needs Megatron's schedule plans, which megarl's passes do not build; leave it out (no key replaces it)"
)
_COMPUTED = "follows from {role}.parallel, engine.layers and the device; leave it out"

# Fields that cannot be set: why, and their names. `{role}` is the section of the role, such as `actor`.
_OWNED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "transformer": (
        ("use {role}.parallel.tensor_parallel_size", "tensor_model_parallel_size"),
        ("use {role}.parallel.pipeline_parallel_size", "pipeline_model_parallel_size"),
        (
            "use {role}.parallel.virtual_pipeline_parallel_size",
            "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage",
        ),
        ("use {role}.parallel.sequence_parallel", "sequence_parallel"),
        ("use {role}.parallel.context_parallel_size", "context_parallel_size"),
        ("use {role}.parallel.expert_parallel_size", "expert_model_parallel_size"),
        ("use {role}.parallel.expert_tensor_parallel_size", "expert_tensor_parallel_size"),
        (
            _SHARDS,
            """tensor_parallel_num_weight_shards gtp_weight_remat_size expert_gtp_weight_remat_size
            expert_tensor_parallel_num_weight_shards moe_single_grouped_weight moe_single_grouped_bias
            moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size
            hetereogenous_dist_checkpoint mla_down_proj_fusion""",
        ),
        (
            "the ranks of a sequence gather keys and values; use {role}.parallel.context_parallel_size",
            "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel",
        ),
        ("use engine.cp_comm_type", "cp_comm_type"),
        ("use {role}.experts.bias_update_rate", "moe_router_bias_update_rate"),
        (
            "use {role}.parallel.pipeline_layout",
            """num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
            pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
            account_for_loss_in_pipeline_split""",
        ),
        (
            "use {role}.recompute",
            """recompute_granularity num_microbatches_with_partial_activation_checkpoints
            distribute_saved_activations""",
        ),
        ("use {role}.recompute_modules", "recompute_modules moe_layer_recompute"),
        ("use {role}.recompute_num_layers", "recompute_method recompute_num_layers"),
        ("use engine.layers", "transformer_impl"),
        ("use engine.routing_replay", "moe_enable_routing_replay"),
        (
            "use {role}.experts.aux_loss_coefficient",
            "moe_aux_loss_coeff moe_router_load_balancing_type moe_per_layer_logging",
        ),
        ("use {role}.experts.z_loss_coefficient", "moe_z_loss_coeff"),
        ("routers compute in float32, as those of the rollout engine; leave it out", "moe_router_dtype"),
        (_DTYPE, "params_dtype bf16 fp16 pipeline_dtype enable_autocast autocast_dtype"),
        (
            "has no effect, because all weights are loaded; use model.path",
            """perform_initialization use_cpu_initialization init_method_std embedding_init_method_std
            init_model_with_meta_device""",
        ),
        (
            "is fixed at 0: megarl has no dropout, which would change log-probs in each pass; leave it out",
            "hidden_dropout attention_dropout",
        ),
        (_SUM, "calculate_per_token_loss"),
        ("is fixed, because packed micro-batches differ in length; leave it out", "variable_seq_lengths"),
        (
            _COMPUTED,
            """overlap_p2p_comm batch_p2p_comm gradient_accumulation_fusion apply_rope_fusion
            fused_single_qkv_rope bias_activation_fusion bias_dropout_fusion masked_softmax_fusion
            persist_layer_norm moe_grouped_gemm""",
        ),
        (
            "has no effect, because megarl computes log-probs in chunks; use engine.log_prob_chunk_tokens",
            """cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
            wgrad_deferral_limit fp8_output_proj""",
        ),
        (
            "needs micro-batches with equal numbers of tokens, but packed ones differ; leave it out (no key "
            "replaces it)",
            """tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
            tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
            tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
            enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_modules cuda_graph_scope
            cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
            delay_offload_until_cuda_graph moe_ncclep_static_shape moe_paged_stash moe_paged_stash_page_size
            moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
            use_te_rng_tracker""",
        ),
        (
            _SCHEDULE,
            """overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
            overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream""",
        ),
        (_FP8_WEIGHTS, "fp8_param fp4_param"),
        (
            "would drop or change tokens, so that log-probs depend on the micro-batch; leave it out",
            """moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity
            moe_token_drop_policy moe_expert_rank_capacity_factor moe_input_jitter_eps
            moe_router_force_load_balancing moe_router_force_biased""",
        ),
        (
            "is for generation by Megatron, but SGLang generates; use rollout.sglang.server_args",
            """inference_cuda_graph_scope flash_decode inference_rng_tracker inference_sampling_seed
            symmetric_ar_type nccl_all_reduce_for_prefill use_inference_optimized_layers
            inference_fuse_tp_communication inference_disable_triton_nvls_kernels
            inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
            inference_moe_token_dispatcher_type moe_pad_experts_for_cuda_graph_inference
            mlp_chunks_for_prefill cache_mla_latents""",
        ),
        (
            _NO_EFFECT,
            """barrier_with_L1_time qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit test_mode
            memory_efficient_layer_norm attention_softmax_in_fp32 config_logger_dir
            use_fused_weighted_squared_relu batch_invariant_mode use_kitchen use_kitchen_attention
            kitchen_attention_backend use_grouped_gemm_for_dense_mlp pipeline_model_parallel_comm_backend""",
        ),
        ("needs activations that are not fused with their biases; leave it out", "use_te_activation_func"),
        ("needs a PyTorch with ring exchange, which no release has; leave it out", "use_ring_exchange_p2p"),
        (
            _NO_FILE,
            """timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func
            no_sync_func grad_sync_func param_sync_func activation_func init_method output_layer_init_method
            embedding_init_method experimental_attention_variant_loss_scale_func quant_recipe""",
        ),
        (
            "belongs to the architecture, which is defined by the model's config.json; use model.path",
            """num_layers mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
            mtp_hybrid_override_pattern mtp_standalone hidden_size num_attention_heads softmax_scale
            softmax_type num_query_groups ffn_hidden_size kv_channels
            apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma
            add_bias_linear add_qkv_bias gated_linear_unit glu_linear_offset activation_func_clamp_value
            num_moe_experts rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm
            qk_l2_norm attention_output_gate multi_latent_attention no_rope_freq
            experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
            dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff
            dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
            dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
            dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
            linear_value_head_dim linear_num_key_heads linear_num_value_heads use_mup mup_width_mult
            mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
            apply_query_key_layer_scaling moe_shared_expert_intermediate_size moe_shared_expert_gate
            moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_topk_limited_devices
            moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
            moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
            moe_router_quantile_balancing_ema moe_apply_probs_on_input
            moe_latent_size mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
            mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path
            heterogeneous_block_specs q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
            rope_type rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings
            beta_fast beta_slow mscale mscale_all_dim""",
        ),
    ),
    "ddp": (
        (
            _COMPUTED,
            "overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer",
        ),
        (_SUM, "average_in_collective"),
        (_SHARDS, "num_distributed_optimizer_instances"),
        (
            _FP8_WEIGHTS,
            "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
        ),
        (_SCHEDULE, "delay_wgrad_compute"),
        (
            "allocates buffers that cannot be released, but megarl offloads them; leave it out",
            "nccl_ub disable_symmetric_registration",
        ),
        (
            "is for Megatron's FSDP, but megarl always shards the optimizer (ZeRO 1); use {role}.parallel",
            """use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy gradient_reduce_div_fusion
            suggested_communication_unit_size fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
            fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy fsdp_manual_registration
            megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
            megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
            megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer""",
        ),
    ),
    "optimizer": (
        ("use {role}.optim.lr", "lr"),
        ("use {role}.optim.min_lr", "min_lr"),
        ("use {role}.optim.weight_decay", "weight_decay"),
        ("use {role}.optim.clip_grad", "clip_grad grad_norm_skip_threshold"),
        (_DTYPE, "fp16 bf16 params_dtype"),
        ("follows from {role}.megatron.transformer.fp8_recipe; leave it out", "fp8_recipe"),
        ("follows from {role}.megatron.ddp.grad_reduce_in_fp32; leave it out", "main_grads_dtype"),
        (
            "would keep optimizer state on the host, where offloading and checkpoints do not find it; "
            "use {role}.megatron.optimizer.use_precision_aware_optimizer, or more {role}.parallel ranks",
            """optimizer_cpu_offload optimizer_offload_fraction pin_cpu_grads pin_cpu_params
            use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d""",
        ),
        (
            "checkpoints and weight sync read float32 master weights; leave it out",
            "store_param_remainders main_params_dtype",
        ),
        (
            f"the optimizer is {' or '.join(kind.needs.title for kind in OptimizerKind)} with float32 or "
            "bfloat16 weights, which needs no such value; use {role}.optim",
            """optimizer loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
            sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
            muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
            muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency
            soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps""",
        ),
        (
            _COMPUTED,
            """use_distributed_optimizer use_layer_wise_distributed_optimizer overlap_param_gather
            overlap_param_gather_with_optimizer_step""",
        ),
        (_FP8_WEIGHTS, "reuse_grad_buf_for_mxfp8_param_ag"),
        (
            _NO_EFFECT,
            "log_num_zeros_in_grad barrier_with_L1_time config_logger_dir optimizer_cuda_graph",
        ),
        (_NO_FILE, "timers"),
        *(
            (f"use {{role}}.optim.{key}", field)
            for kind in OptimizerKind
            for field, (key, _) in kind.needs.settings.items()
        ),
    ),
}
_PASSED_ON: Mapping[str, Mapping[Requirement, str]] = {
    "transformer": {
        Requirement.nothing: """batch_p2p_sync overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs
            mlp_chunks_for_training clone_scatter_output_in_embedding moe_token_dispatcher_type
            moe_shared_expert_overlap fp32_residual_connection""",
        Requirement.cuda: """deterministic_mode disable_bf16_reduced_precision_matmul
            activation_func_fp8_input_store moe_enable_deepep moe_flex_dispatcher_backend
            moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs
            moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
            moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
            moe_hybridep_num_sms_preprocessing moe_ncclep_zero_copy fine_grained_activation_offloading
            offload_modules min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks
            activation_offload_fraction fine_grained_offloading_max_inflight_offloads""",
        Requirement.transformer_engine: """attention_backend flash_attention_version
            fused_residual_rmsnorm use_transformer_engine_op_fuser disable_parameter_transpose_cache
            moe_permute_fusion moe_router_fusion use_grouped_gemm_for_shared_expert
            moe_router_padding_for_quantization moe_router_padding_for_fp8 cpu_offloading
            cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
            cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers fp8 fp8_recipe
            fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
            fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
            first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4
            fp4_recipe fp4_quantizer_factory""",
    },
    "ddp": {
        Requirement.nothing: """grad_reduce_in_fp32 check_for_nan_in_grad check_for_large_grads bucket_size
            num_buckets pad_buckets_for_high_nccl_busbw param_name_patterns_for_fp32_local_accumulation""",
        Requirement.cuda: "reduce_scatter_with_fp32_accumulation",
    },
    "optimizer": {
        Requirement.nothing: "decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm decoupled_weight_decay",
        Requirement.transformer_engine: "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype",
    },
}


@cache
def owned_fields(section: str) -> Mapping[str, str]:
    """Return the fields that cannot be set, with the reason; `{role}` in it is the section of the role."""
    return {name: reason for reason, names in _OWNED[section] for name in names.split()}


def find_section(name: str) -> str | None:
    """Return the section of a field of Megatron, such as `ddp`; None if there is no such field."""
    return next(
        (section for section in _OWNED if name in owned_fields(section) or name in requirements(section)),
        None,
    )


@cache
def requirements(section: str) -> Mapping[str, Requirement]:
    """Return the fields that are passed on, with what each needs."""
    return {name: requirement for requirement, names in _PASSED_ON[section].items() for name in names.split()}


class Option(NamedTuple):
    """An option of Megatron that a configuration sets.

    Attributes:
        section: `transformer`, `ddp` or `optimizer`.
        name: Megatron's name of the field.
        value: The value as configured.
    """

    section: str
    name: str
    value: object

    @property
    def requirement(self) -> Requirement:
        # The other dispatchers also work on a CPU.
        if self.name == "moe_token_dispatcher_type" and self.value == "flex":
            return Requirement.cuda
        return requirements(self.section).get(self.name, Requirement.nothing)

    def lacks(self, *, on_cuda: bool, layers: Layers) -> str | None:
        """Return what the option needs and does not have; None if it works.

        Args:
            on_cuda: Whether the model is on CUDA.
            layers: The implementation of its layers. Its optimizer may use Transformer Engine with any.
        """
        if self.requirement is not Requirement.nothing and not on_cuda:
            return "CUDA"
        needs_layers = self.requirement is Requirement.transformer_engine and self.section == "transformer"
        return "engine.layers=transformer_engine" if needs_layers and layers is Layers.local else None


def options_of(config: MegatronConfig) -> Iterator[Option]:
    """Yield the options that are set."""
    for section in _OWNED:
        yield from (Option(section, name, value) for name, value in getattr(config, section).items())


# The number of tokens of a micro-batch is a multiple of the block that a recipe scales together, of the tiles
# of its matrix products otherwise.
_MULTIPLES = {"blockwise": 128, "mxfp8": 32}


def token_multiple(config: MegatronConfig) -> int:
    """Return the number that a rank's tokens are padded to a multiple of: more than 1 with FP8 or FP4."""
    options = config.transformer
    if options.get("fp4"):
        return 32
    return _MULTIPLES.get(options.get("fp8_recipe", "delayed"), 16) if options.get("fp8") else 1


class ElementBytes(NamedTuple):
    """Bytes per parameter of a trained model.

    Attributes:
        gradient: In the buffers, which every rank has whole.
        master: The float32 master copy; 0 if the weights are float32.
        moments: All moments of the optimizer.
        stepped: Float32 copies of the gradient and of a moment during the optimizer step, sharded as the
            optimizer state.
    """

    gradient: int
    master: int
    moments: int
    stepped: int


def element_bytes(dtype: DType, config: MegatronConfig, optimizer: OptimizerKind) -> ElementBytes:
    """Return the bytes of a parameter's gradient and optimizer state, under the options of its model."""
    is_float32 = dtype is DType.float32
    options = config.optimizer
    is_precise = bool(options.get("use_precision_aware_optimizer"))
    in_float32 = config.ddp.get("grad_reduce_in_fp32", True) or is_float32

    # With the scaled recipes, Megatron has the masters itself, and copies gradients to float32.
    recipe = config.transformer.get("fp8_recipe", "delayed") if config.transformer.get("fp8") else "delayed"

    moments = [
        DTYPES[options.get(option, "float32")] if is_precise else "float32"
        for option in optimizer.needs.moments.values()
    ]
    copies_gradient = not (in_float32 or (is_precise and recipe == "delayed"))

    return ElementBytes(
        gradient=4 if in_float32 else 2,
        master=0 if is_float32 else 4,
        moments=sum(_DTYPE_BYTES[moment] for moment in moments),
        # Transformer Engine's kernel reads gradients of either dtype, but both moments must have the same.
        stepped=4 * copies_gradient + 4 * (len(set(moments)) > 1),
    )


# Options that change the memory of activations in a way that the plan does not count.
_UNCOUNTED = (
    "fp8",
    "fp4",
    "fp32_residual_connection",
    "activation_func_fp8_input_store",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "mlp_chunks_for_training",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
    "moe_shared_expert_overlap",
    "deallocate_pipeline_outputs",
    "use_transformer_engine_op_fuser",
    "param_name_patterns_for_fp32_local_accumulation",
)


def uncounted_options(config: MegatronConfig) -> list[str]:
    """Return the names of the options that change memory, but that the memory plan does not count."""
    return [option.name for option in options_of(config) if option.name in _UNCOUNTED and option.value]
