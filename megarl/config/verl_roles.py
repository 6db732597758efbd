"""What verl calls the settings of a model that trains or scores, and what they are called here: tables of relative keys.

`verl_names.py` puts them together with those of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class VerlKey(NamedTuple):
    """`ours`: the dotted key here, None where there is none. `note`: what else differs, or why there is none; may be empty."""

    ours: str | None
    note: str = ""


def absent(note: str) -> VerlKey:
    return VerlKey(None, note)


def under(prefix: str, ours: str, table: Mapping[str, VerlKey]) -> dict[str, VerlKey]:
    """A table of relative keys; one of ours that begins with a dot is relative to `ours`."""
    return {
        f"{prefix}.{name}": key._replace(ours=ours + key.ours) if key.ours is not None and key.ours.startswith(".") else key
        for name, key in table.items()
    }


NO_VISION = absent("models read and write text only")
NO_LORA = absent("all weights are trained; there are no adapters yet")
NO_MTP = absent("no multi-token prediction")
NO_TOOLS = absent("one answer per prompt; no tools and no further turns yet")
_ALWAYS_CHUNKED = absent("log-probs and entropy are always computed in chunks over the cut vocabulary")
MOVED_BY_PLACEMENT = VerlKey("placement.strategy", "what is moved to the host follows from who shares devices, with nothing to set by role")
_ONE_FORMAT = absent("a checkpoint always holds weights, optimizer, schedules, random states and the data's position")
_FROM_CONFIG_JSON = absent("the architecture is what the model's config.json says")
NO_PROFILER = absent("every run writes a timeline of its phases; there is no profiler to attach")
ONE_ENGINE = absent("Megatron-Core is the only training engine")
_DTYPES = absent("gradients and both moments are float32")
_NO_MUON = absent("the optimizer is AdamW")
_PADDING = absent("rows are packed; with engine.packing=false a micro-batch is padded to its longest row")
_MINI_BATCH = VerlKey("trainer.updates_per_step", "a number of updates: data.train_batch_size / ppo_mini_batch_size")

_OPTIM = {
    "lr": VerlKey(".lr"),
    "lr_warmup_steps_ratio": VerlKey(".warmup_steps", "optimizer steps, not a share"),
    "lr_warmup_steps": VerlKey(".warmup_steps", "-1 is 0"),
    "total_training_steps": VerlKey("trainer.total_steps", "a schedule always ends with the run"),
    "weight_decay": VerlKey(".weight_decay"),
    "betas": VerlKey(".betas", "verl's default is [0.9, 0.999], here [0.9, 0.95]"),
    "clip_grad": VerlKey(".clip_grad"),
    "min_lr": VerlKey(".min_lr"),
    "min_lr_ratio": VerlKey(".min_lr", "a rate, not a share of lr"),
    "lr_decay_style": VerlKey(".decay", "constant, linear or cosine"),
    "lr_scheduler_type": VerlKey(".decay", "constant, linear or cosine"),
    "warmup_style": VerlKey(".decay", "constant, linear or cosine"),
    "lr_warmup_init": absent("a warm-up begins at 0"),
    "lr_decay_steps": absent("a schedule ends with the run, after trainer.total_steps"),
    "num_cycles": absent("a cosine goes down once"),
    "lr_wsd_decay_style": absent("schedules are constant, linear and cosine"),
    "lr_wsd_decay_steps": absent("schedules are constant, linear and cosine"),
    "zero_indexed_step": absent("the first step has the first rate of the warm-up, which is above 0"),
    "weight_decay_incr_style": absent("the weight decay is constant"),
    "use_checkpoint_opt_param_scheduler": absent("a resumed run always goes on with its schedule"),
    "use_precision_aware_optimizer": _DTYPES,
    "main_grads_dtype": _DTYPES,
    "exp_avg_dtype": _DTYPES,
    "exp_avg_sq_dtype": _DTYPES,
    "optimizer": _NO_MUON,
    "optimizer_impl": _NO_MUON,
    "override_optimizer_config": _NO_MUON,
    "use_layer_wise_distributed_optimizer": _NO_MUON,
    **{
        f"muon_{name}": _NO_MUON
        for name in (
            *("momentum", "nesterov", "split_qkv", "scale_mode", "coefficient_type", "num_ns_steps", "tp_mode", "fp32_matmul_prec"),
            *("extra_scale_factor", "scalar_optimizer", "match_adamw_update_rms"),
        )
    },
}

_RECOMPUTE = absent("recompute is none, selective (the attention) or full (every layer)")
_ROUTER = absent("no mixture of experts yet")
_CONTEXT = absent("no context parallelism yet")
_DISTRIBUTED = absent("checkpoints are always Megatron's distributed ones; `megarl convert` reads and writes the others")

_MEGATRON = {
    "tensor_model_parallel_size": VerlKey(".parallel.tensor_parallel_size"),
    "pipeline_model_parallel_size": VerlKey(".parallel.pipeline_parallel_size"),
    "virtual_pipeline_model_parallel_size": VerlKey(".parallel.virtual_pipeline_parallel_size"),
    "sequence_parallel": VerlKey(".parallel.sequence_parallel", "true is refused where the tensor-parallel size is 1"),
    "expert_model_parallel_size": _ROUTER,
    "expert_tensor_parallel_size": _ROUTER,
    "context_parallel_size": _CONTEXT,
    "dynamic_context_parallel": _CONTEXT,
    "max_seqlen_per_dp_cp_rank": _CONTEXT,
    "param_offload": MOVED_BY_PLACEMENT,
    "grad_offload": MOVED_BY_PLACEMENT,
    "optimizer_offload": MOVED_BY_PLACEMENT,
    "use_distributed_optimizer": absent("always"),
    "use_dist_checkpointing": _DISTRIBUTED,
    "dist_checkpointing_path": _DISTRIBUTED,
    "dist_checkpointing_prefix": _DISTRIBUTED,
    "dist_ckpt_optim_fully_reshardable": absent("always: a checkpoint can be read in any layout"),
    "distrib_optim_fully_reshardable_mem_efficient": _DISTRIBUTED,
    "entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    "entropy_from_logits_chunk_size": VerlKey("engine.log_prob_chunk_tokens"),
    "seed": VerlKey("trainer.seed", "one seed for all roles"),
    "override_transformer_config.recompute_granularity": VerlKey(".recompute", "none, selective or full"),
    "override_transformer_config.recompute_method": _RECOMPUTE,
    "override_transformer_config.recompute_modules": _RECOMPUTE,
    "override_transformer_config.recompute_num_layers": _RECOMPUTE,
    "override_transformer_config": _FROM_CONFIG_JSON,
    "override_mcore_model_config": _FROM_CONFIG_JSON,
    "override_ddp_config": absent("Megatron's distributed data parallel has no options here"),
    "use_mbridge": absent("weights are converted by megarl's own tables, the same for loading, pushing and saving"),
    "vanilla_mbridge": absent("weights are converted by megarl's own tables, the same for loading, pushing and saving"),
    "use_remove_padding": VerlKey("engine.packing"),
    "pad_bshd_to_minibatch_max": _PADDING,
    "pad_to_length": _PADDING,
    "pad_to_length_bucket": _PADDING,
    "use_megatron_fsdp": ONE_ENGINE,
    "forward_only": absent("reference and reward model never train"),
    "dtype": VerlKey("model.dtype", "one for all roles"),
    "router_replay": _ROUTER,
    "qat": absent("no quantisation"),
}

FSDP = {
    "param_offload": MOVED_BY_PLACEMENT,
    "optimizer_offload": MOVED_BY_PLACEMENT,
    "offload_policy": MOVED_BY_PLACEMENT,
    "model_dtype": VerlKey("model.dtype", "one for all roles"),
    "dtype": VerlKey("model.dtype", "one for all roles"),
    "seed": VerlKey("trainer.seed", "one seed for all roles"),
    "fsdp_size": VerlKey(".parallel.data_parallel_size", "Megatron's optimizer state is cut over these replicas"),
    "ulysses_sequence_parallel_size": _CONTEXT,
    "full_determinism": absent("on CPU a run is the same bit for bit; on CUDA see rollout.sglang.deterministic"),
    "entropy_from_logits_chunk_size": VerlKey("engine.log_prob_chunk_tokens"),
}

MODEL = {
    "trust_remote_code": VerlKey("model.trust_remote_code"),
    "enable_gradient_checkpointing": VerlKey(".recompute", "true is full (or selective), false is none"),
    "use_remove_padding": VerlKey("engine.packing"),
    "hf_config_path": _FROM_CONFIG_JSON,
    "override_config": _FROM_CONFIG_JSON,
    "tokenizer_path": absent("the tokenizer is the one in the model's folder"),
    "custom_chat_template": absent("the chat template is the one in the model's folder (chat_template.jinja)"),
    "use_shm": absent("each rank reads only its own part of the safetensors"),
    "external_lib": absent("nothing is imported to make a model known"),
    "enable_activation_offload": absent("activations are not moved to the host; recompute saves their memory"),
    "use_liger": absent("no Liger kernels"),
    "use_fused_kernels": _ALWAYS_CHUNKED,
    "fused_kernel_options": _ALWAYS_CHUNKED,
    "tiled_mlp": absent("no tiled MLP"),
    **dict.fromkeys(("lora", "lora_rank", "lora_alpha", "lora_adapter_path", "target_modules", "exclude_modules"), NO_LORA),
    "mtp": NO_MTP,
}

_MICRO_BATCH = ".micro_batch.sequences"
_BUDGET = ".micro_batch.max_tokens"
_BY_TOKENS = VerlKey(_BUDGET, "true: give max_tokens; false: give micro_batch.sequences, and max_tokens=null")
_BY_COUNT = VerlKey(_MICRO_BATCH, "of one replica; with micro_batch.max_tokens=null")

# Of actor and critic alike.
TRAINED = {
    "strategy": ONE_ENGINE,
    "rollout_n": VerlKey("rollout.n"),
    "ppo_mini_batch_size": _MINI_BATCH,
    "ppo_micro_batch_size": _BY_COUNT,
    "ppo_micro_batch_size_per_gpu": _BY_COUNT,
    "use_dynamic_bsz": _BY_TOKENS,
    "ppo_max_token_len_per_gpu": VerlKey(_BUDGET),
    "ppo_epochs": VerlKey("trainer.epochs_per_batch"),
    "shuffle": absent("mini-batches are cut in the order of the samples; data.shuffle shuffles the prompts"),
    "data_loader_seed": absent("mini-batches are cut in the order of the samples; data.seed shuffles the prompts"),
    "grad_clip": VerlKey(".optim.clip_grad"),
    "ulysses_sequence_parallel_size": _CONTEXT,
    "checkpoint.save_contents": VerlKey("checkpoint.save_hf", "true where the list has hf_model; all else is always saved"),
    "checkpoint.contents": VerlKey("checkpoint.save_hf", "true where the list has hf_model; all else is always saved"),
    "checkpoint.async_save": VerlKey("checkpoint.asynchronous"),
    "checkpoint": _ONE_FORMAT,
    "profiler": NO_PROFILER,
    **under("optim", ".optim", _OPTIM),
    **under("megatron", "", _MEGATRON),
    "megatron": absent("Megatron's other options are not set by hand"),
}

ACTOR = {
    **TRAINED,
    "clip_ratio": VerlKey("algorithm.policy_loss.clip_low", "and algorithm.policy_loss.clip_high: two keys, always both in force"),
    "clip_ratio_low": VerlKey("algorithm.policy_loss.clip_low"),
    "clip_ratio_high": VerlKey("algorithm.policy_loss.clip_high"),
    "clip_ratio_c": VerlKey("algorithm.policy_loss.clip_dual", "verl's default is 3, here null: no limit"),
    "tau_pos": VerlKey("algorithm.policy_loss.sapo.temperature_positive"),
    "tau_neg": VerlKey("algorithm.policy_loss.sapo.temperature_negative"),
    "policy_loss.loss_mode": VerlKey("algorithm.policy_loss.kind", "vanilla is ppo_clip, geo_mean is gmpo; there is no dro"),
    "policy_loss.clip_cov_ratio": VerlKey("algorithm.policy_loss.covariance.share"),
    "policy_loss.clip_cov_lb": VerlKey("algorithm.policy_loss.covariance.low"),
    "policy_loss.clip_cov_ub": VerlKey("algorithm.policy_loss.covariance.high"),
    "policy_loss.kl_cov_ratio": VerlKey("algorithm.policy_loss.covariance.share"),
    "policy_loss.ppo_kl_coef": VerlKey("algorithm.policy_loss.covariance.kl_coefficient"),
    "policy_loss.dro_beta": absent("there is no dro"),
    "loss_agg_mode": VerlKey("algorithm.policy_loss.aggregation", "token-mean is token_mean, seq-mean-token-sum sequence_mean_token_sum"),
    "loss_scale_factor": VerlKey("algorithm.policy_loss.norm_tokens", "for sequence_mean_token_sum_norm"),
    "entropy_coeff": VerlKey("algorithm.entropy_coefficient"),
    "calculate_entropy": absent("the samples' entropy is a metric of every step"),
    "calculate_sum_pi_squared": absent("computed where algorithm.advantage.estimator=optimal_token_baseline needs it"),
    "use_kl_loss": VerlKey("algorithm.kl.where", "true is loss"),
    "kl_loss_coef": VerlKey("algorithm.kl.coefficient", "with algorithm.kl.where=loss"),
    "kl_loss_type": VerlKey("algorithm.kl.estimator", "kl is k1, mse is k2, low_var_kl is k3, abs is abs_k1; + is _straight_through"),
    "use_prefix_grouper": absent("every row is computed whole"),
    "use_torch_compile": absent("nothing is compiled at run time"),
    "use_fused_kernels": _ALWAYS_CHUNKED,
    "use_remove_padding": VerlKey("engine.packing"),
    "freeze_vision_tower": NO_VISION,
    "router_replay": _ROUTER,
    "qat": absent("no quantisation"),
    "entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    "entropy_from_logits_chunk_size": VerlKey("engine.log_prob_chunk_tokens"),
    "entropy_checkpointing": _ALWAYS_CHUNKED,
    "pad_to_length": _PADDING,
    **under("fsdp_config", "", FSDP),
    "fsdp_config": ONE_ENGINE,
}

_SHARED = "the reference lives in the actor's processes and has their layout"
REFERENCE = {
    "model.path": VerlKey("reference.path", "null: the policy's folder"),
    "log_prob_micro_batch_size": VerlKey("reference.micro_batch.sequences", "with reference.micro_batch.max_tokens=null"),
    "log_prob_micro_batch_size_per_gpu": VerlKey("reference.micro_batch.sequences", "with reference.micro_batch.max_tokens=null"),
    "log_prob_use_dynamic_bsz": VerlKey(
        "reference.micro_batch.max_tokens", "true: give max_tokens; false: give sequences, and max_tokens=null"
    ),
    "log_prob_max_token_len_per_gpu": VerlKey("reference.micro_batch.max_tokens"),
    "rollout_n": VerlKey("rollout.n"),
    "entropy_from_logits_chunk_size": VerlKey("engine.log_prob_chunk_tokens"),
    "megatron.tensor_model_parallel_size": VerlKey("actor.parallel.tensor_parallel_size", _SHARED),
    "megatron.pipeline_model_parallel_size": VerlKey("actor.parallel.pipeline_parallel_size", _SHARED),
    "megatron.virtual_pipeline_model_parallel_size": VerlKey("actor.parallel.virtual_pipeline_parallel_size", _SHARED),
    "megatron.sequence_parallel": VerlKey("actor.parallel.sequence_parallel", _SHARED),
    "megatron.param_offload": MOVED_BY_PLACEMENT,
    "fsdp_config.param_offload": MOVED_BY_PLACEMENT,
    "megatron.dtype": VerlKey("model.dtype", "one for all roles"),
    "fsdp_config.dtype": VerlKey("model.dtype", "one for all roles"),
    "fsdp_config.model_dtype": VerlKey("model.dtype", "one for all roles"),
    "megatron.seed": VerlKey("trainer.seed", "one seed for all roles"),
    "fsdp_config.seed": VerlKey("trainer.seed", "one seed for all roles"),
    "profiler": NO_PROFILER,
}
