"""The keys of verl's PPO trainer and what they are called here: one table, for `megarl check`, and for the page that users of verl read.

The names are those of ppo_trainer.yaml and ppo_megatron_trainer.yaml (August 2026), and older ones that many scripts still have. A branch
(`actor_rollout_ref.model.mtp`) stands for all that is below it, but for what has an entry of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from megarl.config.verl_roles import (
    ACTOR,
    FSDP,
    MODEL,
    MOVED_BY_PLACEMENT,
    NO_MTP,
    NO_PROFILER,
    NO_TOOLS,
    NO_VISION,
    ONE_ENGINE,
    REFERENCE,
    TRAINED,
    VerlKey,
    absent,
    under,
)

__all__ = ["VERL_KEYS", "VerlKey", "VerlProblem", "find_verl_key", "verl_problems"]

_ENGINE_OPTIONS = "rollout.sglang.server_args"
_NO_SUCH_ENGINE = absent("engines are SGLang, and transformers for small models")
_MODEL_IS_PUSHED = absent("an engine starts with random weights and gets the trainer's before it answers")
_IN_PLACEMENT = VerlKey("placement.strategy", "the placement says which devices the engines have")
_IDS_ONLY = absent("engines take and give token ids")
_SCORES_AS_ACTOR = "old log-probs are computed with the actor's micro-batches"

_ROLLOUT = {
    "name": VerlKey("rollout.engine", "sglang or hf"),
    "mode": VerlKey("rollout.sglang.mode", "engine (in the worker's process) or server; both answer many prompts at the same time"),
    "nnodes": _IN_PLACEMENT,
    "n_gpus_per_node": _IN_PLACEMENT,
    "temperature": VerlKey("rollout.temperature"),
    "top_k": VerlKey("rollout.top_k"),
    "top_p": VerlKey("rollout.top_p", "must be 1: the trainer computes log-probs of the whole distribution"),
    "do_sample": VerlKey("rollout.temperature", "training always samples"),
    "full_determinism": VerlKey("rollout.sglang.deterministic", "on CPU always"),
    "seed": VerlKey("trainer.seed", "one seed for all roles"),
    "prompt_length": VerlKey("data.max_prompt_length"),
    "response_length": VerlKey("data.max_response_length"),
    "dtype": VerlKey("model.dtype", "one for all roles"),
    "gpu_memory_utilization": VerlKey(_ENGINE_OPTIONS, "as {mem_fraction_static: 0.5}"),
    "enforce_eager": VerlKey(_ENGINE_OPTIONS, "as {disable_cuda_graph: true}"),
    "cudagraph_capture_sizes": VerlKey(_ENGINE_OPTIONS, "as {cuda_graph_bs: [1, 8, 64]}"),
    "max_num_batched_tokens": VerlKey(_ENGINE_OPTIONS, "as {max_prefill_tokens: 8192}"),
    "enable_chunked_prefill": VerlKey(_ENGINE_OPTIONS, "as {chunked_prefill_size: 8192}; -1 switches it off"),
    "enable_prefix_caching": VerlKey(_ENGINE_OPTIONS, "false is {disable_radix_cache: true}"),
    "scheduling_policy": VerlKey(_ENGINE_OPTIONS, "as {schedule_policy: fcfs}"),
    "quantization": VerlKey(_ENGINE_OPTIONS, "as {quantization: fp8}"),
    "engine_kwargs.sglang": VerlKey(_ENGINE_OPTIONS, "the same names"),
    "engine_kwargs": _NO_SUCH_ENGINE,
    "max_model_len": absent("prompt and response as long as data allows, and no longer"),
    "max_num_seqs": VerlKey("rollout.max_concurrency", "of one replica"),
    "free_cache_engine": MOVED_BY_PLACEMENT,
    "enable_sleep_mode": MOVED_BY_PLACEMENT,
    "multi_stage_wake_up": MOVED_BY_PLACEMENT,
    "tensor_model_parallel_size": VerlKey("rollout.tensor_parallel_size"),
    "data_parallel_size": VerlKey("rollout.num_replicas", "of all engines"),
    "expert_parallel_size": absent("no mixture of experts yet"),
    "pipeline_model_parallel_size": absent("an engine is cut by tensor parallelism alone"),
    "n": VerlKey("rollout.n"),
    "val_kwargs.n": VerlKey("rollout.validation.n"),
    "val_kwargs.temperature": VerlKey("rollout.validation.temperature"),
    "val_kwargs.top_p": VerlKey("rollout.validation.top_p"),
    "val_kwargs.top_k": VerlKey("rollout.validation.top_k"),
    "val_kwargs.do_sample": VerlKey("rollout.validation.temperature", "false is 0"),
    "log_prob_micro_batch_size": VerlKey("actor.micro_batch.sequences", _SCORES_AS_ACTOR),
    "log_prob_micro_batch_size_per_gpu": VerlKey("actor.micro_batch.sequences", _SCORES_AS_ACTOR),
    "log_prob_use_dynamic_bsz": VerlKey("actor.micro_batch.max_tokens", _SCORES_AS_ACTOR),
    "log_prob_max_token_len_per_gpu": VerlKey("actor.micro_batch.max_tokens", _SCORES_AS_ACTOR),
    "calculate_log_probs": absent("always; the engine's are compared with the trainer's"),
    "logprobs_mode": absent("of the distribution that is sampled from, in every engine"),
    "checkpoint_engine.backend": VerlKey("resharding.transport", "auto, colocated, broadcast or disk"),
    "checkpoint_engine.update_weights_bucket_megabytes": VerlKey("resharding.bucket_mb"),
    "update_weights_bucket_megabytes": VerlKey("resharding.bucket_mb"),
    "checkpoint_engine": absent("there are three ways for weights, see resharding.transport"),
    "load_format": _MODEL_IS_PUSHED,
    "layered_summon": _MODEL_IS_PUSHED,
    "ignore_eos": absent("an answer ends with the end token"),
    "skip_tokenizer_init": _IDS_ONLY,
    "limit_images": NO_VISION,
    "over_sample_rate": absent("every sample that is begun is finished"),
    "disable_log_stats": absent("engines log errors only; their speed is in the run's metrics"),
    "prometheus": absent("engines serve no metrics; their speed is in the run's metrics"),
    "trace": absent("samples of validations are written to the output folder, see tracking.log_generations"),
    "multi_turn": NO_TOOLS,
    "agent": NO_TOOLS,
    "enable_rollout_routing_replay": absent("no mixture of experts yet"),
    "moe_load_balance_metrics_interval": absent("no mixture of experts yet"),
    "quantization_config_file": absent("give rollout.sglang.server_args the options of SGLang"),
    "mtp": NO_MTP,
    "qat": absent("no quantisation in training"),
    "disaggregation": absent("prefill and decoding are on the same engine"),
    "profiler": NO_PROFILER,
}

_COLUMNS = absent("columns are prompt, data_source, reward_model and, where wanted, extra_info: verl's own names")
_DATA = {
    "train_files": VerlKey("data.train_files", "a list, also of one"),
    "val_files": VerlKey("data.val_files", "a list, also of one"),
    "max_prompt_length": VerlKey("data.max_prompt_length"),
    "max_response_length": VerlKey("data.max_response_length"),
    "train_batch_size": VerlKey("trainer.prompts_per_step"),
    "gen_batch_size": absent("dynamic sampling asks for as many prompts as a step still needs"),
    "val_batch_size": absent("validation takes trainer.prompts_per_step prompts at a time"),
    "shuffle": VerlKey("data.shuffle"),
    "seed": VerlKey("data.seed"),
    "filter_overlong_prompts": VerlKey("data.overlong", "true is filter, false refuse"),
    "truncation": VerlKey("data.overlong", "error is refuse; prompts are never cut"),
    "trust_remote_code": VerlKey("model.trust_remote_code"),
    "prompt_key": _COLUMNS,
    "reward_fn_key": _COLUMNS,
    "train_max_samples": absent("every row of the files is used"),
    "val_max_samples": absent("every row of the files is used"),
    "validation_shuffle": absent("validation keeps the order of the files"),
    "filter_overlong_prompts_workers": absent("rows are read in the driver, once"),
    "dataloader_num_workers": absent("rows are read in the driver, once"),
    "tokenizer": absent("the tokenizer is the one in the model's folder"),
    "use_shm": absent("rows are read in the driver, once"),
    "custom_cls": absent("no data set classes of your own; write parquet files"),
    "apply_chat_template_kwargs": absent("the chat template is the one in the model's folder, without options"),
    "tool_config_path": NO_TOOLS,
    "function_tool_path": NO_TOOLS,
    **dict.fromkeys(("image_key", "video_key", "audio_key", "image_patch_size"), NO_VISION),
    **dict.fromkeys(("return_multi_modal_inputs", "mm_processor_kwargs"), NO_VISION),
    **dict.fromkeys(("return_raw_input_ids", "return_raw_chat", "return_full_prompt"), absent("a batch always has ids and messages")),
}

_CRITIC = {
    **TRAINED,
    "enable": VerlKey("algorithm.advantage.estimator", "gae has a critic, the others have none"),
    "cliprange_value": VerlKey("algorithm.value_loss.clip", "verl's default is 0.5, here 0.2"),
    "forward_micro_batch_size": VerlKey("critic.micro_batch.sequences", "with critic.micro_batch.max_tokens=null"),
    "forward_micro_batch_size_per_gpu": VerlKey("critic.micro_batch.sequences", "with critic.micro_batch.max_tokens=null"),
    "forward_max_token_len_per_gpu": VerlKey("critic.micro_batch.max_tokens"),
    "loss_agg_mode": absent("the value loss is a mean over tokens"),
    "loss_scale_factor": absent("the value loss is a mean over tokens"),
    "nccl_timeout": VerlKey("trainer.phase_time_limit_s", "of a whole phase; then every rank's stack is printed"),
    "model.path": VerlKey("critic.model.path", "null: begins as the policy"),
    **under("model", "critic", MODEL),
    **under("fsdp", "", FSDP),
    "fsdp": ONE_ENGINE,
}

_SANDBOX = absent("reward functions run in processes of their own that can be ended; there is no service for code yet")
_REWARD_RUNS = absent("a reward model is a Megatron model with a head for one number, not an engine that writes")
_MANAGER = absent("every function is called for every sample, in parallel; DAPO's penalty is algorithm.overlong")
_FUNCTIONS = {
    "path": VerlKey("reward.functions", "as [{path: reward.py, name: compute_score}]; the same four arguments"),
    "name": VerlKey("reward.functions", "as [{path: reward.py, name: compute_score}]; the same four arguments"),
    "reward_kwargs": absent("a function has its four arguments; constants belong into its file"),
}
_OVERLONG = {
    "enable": VerlKey("algorithm.overlong.buffer_share", "0 is off"),
    "len": VerlKey("algorithm.overlong.buffer_share", "a share of data.max_response_length: len / max_response_length"),
    "penalty_factor": VerlKey("algorithm.overlong.penalty"),
    "log": absent("the penalty is always a metric"),
}
_REWARD_MODEL = {
    "enable": VerlKey("reward.model.path", "null: no reward model"),
    "model_path": VerlKey("reward.model.path"),
    "enable_resource_pool": VerlKey("placement.strategy", "stand_alone gives it devices of its own; custom says which"),
    "n_gpus_per_node": VerlKey("placement.strategy", "stand_alone gives it devices of its own; custom says which"),
    "nnodes": VerlKey("placement.strategy", "stand_alone gives it devices of its own; custom says which"),
    "rollout.tensor_model_parallel_size": VerlKey("reward.model.parallel.tensor_parallel_size"),
    "rollout.data_parallel_size": VerlKey("reward.model.parallel.data_parallel_size"),
    "rollout.dtype": VerlKey("model.dtype", "one for all roles"),
    "rollout.prompt_length": VerlKey("reward.model.max_length"),
    "rollout.max_model_len": VerlKey("reward.model.max_length"),
    "rollout": _REWARD_RUNS,
    "profiler": NO_PROFILER,
}
_OLD_REWARD_MODEL = {
    **_REWARD_MODEL,
    "model.path": VerlKey("reward.model.path"),
    "model.trust_remote_code": VerlKey("model.trust_remote_code"),
    "model": _REWARD_RUNS,
    "model.input_tokenizer": absent("a reward model reads the conversation by the chat template of its own folder"),
    "num_workers": VerlKey("reward.num_processes", "of the functions"),
    "reward_manager": _MANAGER,
    "reward_loop_source": _MANAGER,
    "reward_loop_module_path": _MANAGER,
    "reward_loop_class_name": _MANAGER,
    "launch_reward_fn_async": absent("rewards are computed while the log-probs are"),
    "max_length": VerlKey("reward.model.max_length"),
    "micro_batch_size_per_gpu": VerlKey("reward.model.micro_batch.sequences", "with reward.model.micro_batch.max_tokens=null"),
    "forward_max_token_len_per_gpu": VerlKey("reward.model.micro_batch.max_tokens"),
    "megatron.tensor_model_parallel_size": VerlKey("reward.model.parallel.tensor_parallel_size"),
    "megatron.pipeline_model_parallel_size": VerlKey("reward.model.parallel.pipeline_parallel_size"),
    "sandbox_fusion": _SANDBOX,
}

_NO_PREFERENCE = absent("samples are not weighed again by their scores")
_ALGORITHM = {
    "gamma": VerlKey("algorithm.advantage.gamma"),
    "lam": VerlKey("algorithm.advantage.lam"),
    "adv_estimator": VerlKey("algorithm.advantage.estimator", "grpo_passk is grpo_pass_k; algorithm=grpo chooses a whole preset"),
    "norm_adv_by_std_in_grpo": VerlKey("algorithm.advantage.normalize_by_std"),
    "filter_groups.enable": VerlKey("algorithm.dynamic_sampling.enabled"),
    "filter_groups.max_num_gen_batches": VerlKey("algorithm.dynamic_sampling.max_generations", "at least 1"),
    "filter_groups.metric": absent("a group is judged by its scores"),
    "filter_groups.max_inflight_gen_batches": absent("one round of generation after the other"),
    "use_kl_in_reward": VerlKey("algorithm.kl.where", "true is reward"),
    "kl_penalty": VerlKey("algorithm.kl.estimator", "kl is k1, mse is k2, low_var_kl is k3, abs is abs_k1; + is _straight_through"),
    "kl_ctrl.type": VerlKey("algorithm.kl.controller.kind"),
    "kl_ctrl.kl_coef": VerlKey("algorithm.kl.coefficient", "with algorithm.kl.where=reward"),
    "kl_ctrl.horizon": VerlKey("algorithm.kl.controller.horizon"),
    "kl_ctrl.target_kl": VerlKey("algorithm.kl.controller.target"),
    "rollout_correction.rollout_is": VerlKey("algorithm.rollout_correction.level", "token or sequence; null is none"),
    "rollout_correction.rollout_is_threshold": VerlKey("algorithm.rollout_correction.high", "0.5_5.0 is low=0.5 high=5.0 kind=mask"),
    "rollout_correction.rollout_rs": VerlKey(
        "algorithm.rollout_correction.rejection.estimator", "seq_mean_k3 is estimator=k3 level=geometric, seq_sum_k3 level=sequence"
    ),
    "rollout_correction.rollout_rs_threshold": VerlKey("algorithm.rollout_correction.rejection.high", "in nats; low for k1"),
    "rollout_correction.bypass_mode": VerlKey("algorithm.rollout_correction.bypass"),
    "rollout_correction.loss_type": VerlKey("algorithm.policy_loss.kind", "any loss can have the weights"),
    "rollout_correction.rollout_is_batch_normalize": absent("weights are not scaled to a mean of 1"),
    "use_pf_ppo": _NO_PREFERENCE,
    "pf_ppo": _NO_PREFERENCE,
}

_SAVES = VerlKey("checkpoint.keep", "of whole checkpoints, actor and critic together; null is 0: all")
_TRAINER = {
    "total_epochs": VerlKey("trainer.total_steps", "steps = epochs x rows / trainer.prompts_per_step"),
    "total_training_steps": VerlKey("trainer.total_steps"),
    "project_name": VerlKey("tracking.project"),
    "experiment_name": VerlKey("tracking.run_name"),
    "logger": VerlKey("tracking.loggers"),
    "log_val_generations": VerlKey("tracking.log_generations"),
    "nnodes": VerlKey("placement.num_nodes"),
    "n_gpus_per_node": VerlKey("placement.devices_per_node"),
    "save_freq": VerlKey("checkpoint.every_steps", "-1 is 0"),
    "test_freq": VerlKey("trainer.validate_every_steps", "-1 is 0"),
    "val_before_train": VerlKey("trainer.validate_before"),
    "critic_warmup": VerlKey("trainer.critic_warmup_steps"),
    "resume_mode": VerlKey("checkpoint.resume", "auto, disable, or the path of a checkpoint"),
    "resume_from_path": VerlKey("checkpoint.resume", "auto, disable, or the path of a checkpoint"),
    "default_local_dir": VerlKey("checkpoint.dir", "null: checkpoints/ in trainer.output_dir"),
    "max_actor_ckpt_to_keep": _SAVES,
    "max_critic_ckpt_to_keep": _SAVES,
    "device": VerlKey("device", "auto, cpu or cuda"),
    "validation_data_dir": VerlKey("trainer.output_dir", "samples of a validation are written there"),
    "rollout_data_dir": absent("samples of training steps are not written"),
    "balance_batch": absent("rows are always dealt to replicas by their tokens"),
    "val_only": absent("no run without training; trainer.validate_before scores the policy first"),
    "esi_redundant_time": absent("SIGTERM saves a checkpoint and ends the run with status 143"),
    "default_hdfs_dir": absent("checkpoints are written to a file system; copy them on"),
    "del_local_ckpt_after_load": absent("a checkpoint is deleted only by checkpoint.keep"),
    "ray_wait_register_center_timeout": absent("workers are given their addresses; nothing is waited for"),
    "use_v1": absent("there is one trainer"),
    "v1": absent("there is one trainer; it generates, then learns"),
}

VERL_KEYS: dict[str, VerlKey] = {
    "actor_rollout_ref.hybrid_engine": VerlKey("placement.strategy", "true is hybrid"),
    "actor_rollout_ref.nccl_timeout": VerlKey("trainer.phase_time_limit_s", "of a whole phase; then every rank's stack is printed"),
    "actor_rollout_ref.model.path": VerlKey("model.path"),
    **under("actor_rollout_ref.model", "actor", MODEL),
    **under("actor_rollout_ref.actor", "actor", ACTOR),
    **under("actor_rollout_ref.ref", "reference", REFERENCE),
    "actor_rollout_ref.ref": absent("the reference lives in the actor's processes and has all else from the actor"),
    **under("actor_rollout_ref.rollout", "", _ROLLOUT),
    **under("critic", "critic", _CRITIC),
    **under("data", "", _DATA),
    **under("algorithm", "", _ALGORITHM),
    **under("custom_reward_function", "", _FUNCTIONS),
    **under("reward.custom_reward_function", "", _FUNCTIONS),
    "reward.num_workers": VerlKey("reward.num_processes"),
    "reward.reward_manager": _MANAGER,
    **under("reward.reward_kwargs.overlong_buffer_cfg", "", _OVERLONG),
    **under("reward_model.overlong_buffer", "", _OVERLONG),
    **under("reward.reward_model", "", _REWARD_MODEL),
    **under("reward_model", "", _OLD_REWARD_MODEL),
    "reward.sandbox_fusion": _SANDBOX,
    "sandbox_fusion": _SANDBOX,
    **under("trainer", "", _TRAINER),
    "ray_kwargs.ray_init.num_cpus": absent("counted from the placement; RAY_ADDRESS joins a cluster that is there"),
    "ray_kwargs.timeline_json_file": absent("every run writes a timeline of its phases into trainer.output_dir"),
    "ray_kwargs": absent("Ray is started as the run needs it; RAY_ADDRESS joins a cluster that is there"),
    "global_profiler": NO_PROFILER,
    "transfer_queue": absent("batches travel through Ray's object store"),
    "distillation": absent("no teacher models"),
    "skip": absent("no step is replayed from a file"),
}


class VerlProblem(NamedTuple):
    """`ours`: the key to use instead, None where there is none."""

    message: str
    ours: str | None = None


def find_verl_key(key: str) -> tuple[str, VerlKey] | None:
    """The entry of `key` or of the nearest branch above it, with its name; None where verl has none. Hydra's + and ~ are ignored."""
    name = key.lstrip("+~")
    while name:
        if name in VERL_KEYS:
            return name, VERL_KEYS[name]
        name = name.rpartition(".")[0]
    return None


def verl_problems(key: str, value: Any, known: Container[str]) -> list[VerlProblem]:
    """What to say of a key that the schema does not have: one for each of verl's names in it, empty where it has none.

    A branch is followed to its leaves. `known`: the keys of the schema, for another kind of run may not have what the table names.
    """
    found = [(name, find_verl_key(name)) for name in _names(key, value)]
    # A name that is the same in both is nothing of verl's where this kind of run does not have it.
    found = [(name, entry if entry is None or entry[1].ours != entry[0] or entry[0] in known else None) for name, entry in found]
    if not any(entry for _, entry in found):
        return []
    return list(dict.fromkeys(_problem(name, *entry, known) if entry else _unknown(name) for name, entry in found))


def _names(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value and any(name.startswith(f"{key.lstrip('+~')}.") for name in VERL_KEYS):
        for name, below in value.items():
            yield from _names(f"{key}.{name}", below)
    else:
        yield key


def _problem(written: str, name: str, entry: VerlKey, known: Container[str]) -> VerlProblem:
    if entry.ours is None:
        return VerlProblem(f"{name}: is verl's name, and has no counterpart here: {entry.note}")
    if entry.ours not in known:
        return VerlProblem(f"{name}: is verl's name for {entry.ours}, which a run of this kind does not have")
    note = f" ({entry.note})" if entry.note else ""
    if entry.ours == name:  # a sign of Hydra's before a name that is the same in both
        return VerlProblem(f"{written}: write {entry.ours}=..., without a sign before it{note}", entry.ours)
    return VerlProblem(f"{name}: is verl's name; here it is {entry.ours}{note}", entry.ours)


def _unknown(name: str) -> VerlProblem:
    return VerlProblem(f"{name}: unknown key, and none of verl's")
