"""Maps the arguments of TRL's trainers to configuration keys, for migration hints of `megarl check`.

TRL's arguments are flat names, which no configuration key is.
"""

from __future__ import annotations

from collections.abc import Container

from megarl.config.verl_names import VerlProblem

# Arguments of GRPOConfig, SFTConfig and TrainingArguments. A value is `<megarl key>; <other differences>`, or
# `none; <reason>` if there is no counterpart.
TRL_NAMES = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.train_files; always a list",
    "torch_dtype": "model.dtype",
    "dtype": "model.dtype",
    "bf16": "model.dtype; true is bfloat16",
    "num_generations": "rollout.n; responses per prompt",
    "num_generations_eval": "rollout.validation.n",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "max_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "system_prompt": "data.system_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p; must be 1: the trainer computes log-probs of the full distribution",
    "top_k": "rollout.top_k",
    "use_vllm": "rollout.engine; sglang or hf",
    "vllm_mode": "placement.strategy; hybrid is colocate, split_collocate is server",
    "vllm_gpu_memory_utilization": "rollout.sglang.server_args; such as {mem_fraction_static: 0.5}",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "beta": "algorithm.kl.coefficient; with algorithm.kl.where=loss",
    "epsilon": "algorithm.policy_loss.clip_low; and clip_high, if epsilon_high is not set",
    "epsilon_high": "algorithm.policy_loss.clip_high",
    "loss_type": "algorithm.policy_loss.aggregation; algorithm=grpo, dr_grpo or dapo selects a whole preset",
    "scale_rewards": "algorithm.advantage.normalize_by_std",
    "num_iterations": "trainer.epochs_per_batch",
    "steps_per_generation": "trainer.updates_per_step",
    "reward_funcs": "reward.functions; such as [{path: reward.py, name: compute_score}]",
    "reward_weights": "reward.functions; each has a weight",
    "learning_rate": "actor.optim.lr",
    "lr_scheduler_type": "actor.optim.decay; constant, linear or cosine",
    "warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_steps; optimizer steps, not a fraction",
    "weight_decay": "actor.optim.weight_decay",
    "max_grad_norm": "actor.optim.clip_grad",
    "adam_beta1": "actor.optim.betas; both in a list",
    "adam_beta2": "actor.optim.betas; both in a list",
    "adam_epsilon": "actor.optim.eps",
    "per_device_train_batch_size":
        "actor.micro_batch.sequences; rows per device at a time (with max_tokens=null); a step has "
        "trainer.prompts_per_step prompts",
    "gradient_accumulation_steps": "trainer.updates_per_step; a step's samples are split into that many "
                                   "optimizer steps",
    "gradient_checkpointing": "actor.recompute; true is full",
    "max_steps": "trainer.total_steps",
    "num_train_epochs": "trainer.total_steps; steps = epochs x rows / trainer.prompts_per_step",
    "eval_steps": "trainer.validate_every_steps",
    "eval_on_start": "trainer.validate_before",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume; auto, disable, or the path of a checkpoint",
    "report_to": "tracking.loggers; always a list",
    "run_name": "tracking.run_name",
    "output_dir": "trainer.output_dir",
    "seed": "trainer.seed",
    "logging_steps": "none; every step is logged",
    "use_peft": "actor.lora.rank; null trains all weights",
    "lora_r": "actor.lora.rank",
    "lora_alpha": "actor.lora.alpha",
    "lora_target_modules": "actor.lora.targets; empty is all-linear",
    "lora_modules_to_save": "actor.lora.modules_to_save; embed_tokens, lm_head, or both",
    "lora_dropout": "actor.lora.dropout; must be 0",
    "deepspeed": "none; Megatron-Core shards models and optimizer state: actor.parallel",
    "fsdp": "none; Megatron-Core shards models and optimizer state: actor.parallel",
}  # fmt: skip


def trl_problem(key: str, known: Container[str]) -> VerlProblem | None:
    """Return the migration hint for an unknown key; None if TRL has no such argument.

    Args:
        key: The unknown key.
        known: The keys of the schema.
    """
    entry = TRL_NAMES.get(key)
    if entry is None:
        return None
    ours, _, note = entry.partition("; ")
    if ours == "none":
        return VerlProblem(f"{key}: is a TRL argument without a counterpart in megarl: {note}")
    if ours not in known:
        return VerlProblem(f"{key}: is the TRL argument for {ours}, which this kind of run does not have")

    return VerlProblem(f"{key}: is a TRL argument; use {ours}{f' ({note})' if note else ''}", ours)
