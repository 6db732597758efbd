"""What the arguments of TRL's trainers are called here, for `megarl check`: they are flat names, which no key
here is."""

from __future__ import annotations

from collections.abc import Container

from megarl.config.verl_names import VerlProblem

# Its name -> `<key here>; <what else differs>`, or `none; <why there is none>`. Of GRPOConfig, SFTConfig and
# TrainingArguments.
TRL_NAMES = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.train_files; a list, also of one",
    "torch_dtype": "model.dtype",
    "dtype": "model.dtype",
    "bf16": "model.dtype; true is bfloat16",
    "num_generations": "rollout.n; responses to a prompt",
    "num_generations_eval": "rollout.validation.n",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "max_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "system_prompt": "data.system_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p; must be 1: the trainer computes log-probs of the whole distribution",
    "top_k": "rollout.top_k",
    "use_vllm": "rollout.engine; sglang or hf",
    "vllm_mode": "placement.strategy; hybrid is colocate, split_collocate is server",
    "vllm_gpu_memory_utilization": "rollout.sglang.server_args; as {mem_fraction_static: 0.5}",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "beta": "algorithm.kl.coefficient; with algorithm.kl.where=loss",
    "epsilon": "algorithm.policy_loss.clip_low; and clip_high, where epsilon_high is not given",
    "epsilon_high": "algorithm.policy_loss.clip_high",
    "loss_type": "algorithm.policy_loss.aggregation; algorithm=grpo, dr_grpo or dapo chooses a whole preset",
    "scale_rewards": "algorithm.advantage.normalize_by_std",
    "num_iterations": "trainer.epochs_per_batch",
    "steps_per_generation": "trainer.updates_per_step",
    "reward_funcs": "reward.functions; as [{path: reward.py, name: compute_score}]",
    "reward_weights": "reward.functions; each has its weight",
    "learning_rate": "actor.optim.lr",
    "lr_scheduler_type": "actor.optim.decay; constant, linear or cosine",
    "warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_steps; optimizer steps, not a share",
    "weight_decay": "actor.optim.weight_decay",
    "max_grad_norm": "actor.optim.clip_grad",
    "adam_beta1": "actor.optim.betas; both in a list",
    "adam_beta2": "actor.optim.betas; both in a list",
    "adam_epsilon": "actor.optim.eps",
    "per_device_train_batch_size":
        "actor.micro_batch.sequences; what a device computes at a time (with max_tokens=null); a step has "
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
    "report_to": "tracking.loggers; a list",
    "run_name": "tracking.run_name",
    "output_dir": "trainer.output_dir",
    "seed": "trainer.seed",
    "logging_steps": "none; every step is logged",
    "use_peft": "none; all weights are trained",
    "deepspeed": "none; Megatron-Core cuts models and optimizer state: actor.parallel",
    "fsdp": "none; Megatron-Core cuts models and optimizer state: actor.parallel",
}  # fmt: skip


def trl_problem(key: str, known: Container[str]) -> VerlProblem | None:
    """What to say of a key that the schema does not have; None where TRL has none of that name. `known`: the
    keys of the schema."""
    entry = TRL_NAMES.get(key)
    if entry is None:
        return None
    ours, _, note = entry.partition("; ")
    if ours == "none":
        return VerlProblem(f"{key}: is TRL's name, and has no counterpart here: {note}")
    if ours not in known:
        return VerlProblem(f"{key}: is TRL's name for {ours}, which a run of this kind does not have")

    return VerlProblem(f"{key}: is TRL's name; here it is {ours}{f' ({note})' if note else ''}", ours)
