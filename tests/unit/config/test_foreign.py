"""Files of verl, slime, TRL and NeMo RL become megarl's keys: each conversion against a value computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.conversions import NULL, Migration, migrated
from megarl.config.expressions import evaluate
from megarl.config.foreign import Foreign, parsed, read_foreign
from megarl.config.migration import foreign_defaults, keys_of, trl_names
from megarl.config.shell import ShellScript

VERL = """
set -x
MODEL_PATH=${MODEL_PATH:-$HOME/models/small}
nodes=2
lengths=$((1024 * 2))
# a comment with 'a quote
train_files="['a.parquet', 'b.parquet']"
COMMON=(
    trainer.nnodes=$nodes            # comments inside arrays (and brackets)
    trainer.n_gpus_per_node=${GPUS:-8}
)
if [ "$nodes" = 1 ]; then
    lengths=7
fi
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.train_batch_size=512 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=$lengths \\
    actor_rollout_ref.model.path=$MODEL_PATH \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * lengths)) \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \\
    custom_reward_function.path=score.py custom_reward_function.name=score \\
    trainer.total_epochs=3 trainer.made_up=1 \\
    "${COMMON[@]}" $@
"""
SHAPE = """
LAYERS=4
MODEL_ARGS=(
   --swiglu --num-layers $((LAYERS * 2))
   --rotary-base "${BASE:-10000}"
)
"""
SLIME = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
ROLLOUT_ARGS=(
   --hf-checkpoint /models/tiny
   --prompt-data rows.jsonl --input-key question
   --num-rollout 30 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64
   --rollout-max-response-len 2048
   --eval-prompt-data first one.jsonl second two.jsonl
   --eval-interval 5
)
TRAIN_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.02 --kl-loss-type k2
   --eps-clip 0.2 --eps-clip-high 0.3
   --lr 2e-6 --adam-beta1 0.9 --adam-beta2 0.98 --lr-decay-style constant
   --tensor-model-parallel-size 2 --sequence-parallel
   --use-dynamic-batch-size --max-tokens-per-gpu 4096
   # --unused 1
   --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7
   --sglang-chunked-prefill-size 2048 --no-masked-softmax-fusion
)
ray job submit --runtime-env-json="{\\"a\\": 1}" -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 4 --colocate \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} \\
   ${TRAIN_ARGS[@]} ${NOT_SET_ARGS[@]}
"""
TRL = """
accelerate launch --num_processes 8 grpo.py \\
    --model_name_or_path tiny/model --dataset_name tiny/rows \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 8 --num_generations 8 \\
    --max_completion_length 512 --max_steps 500 --loss_type dr_grpo --beta 0.04 --epsilon 0.1 \\
    --use_peft --lora_r 8 --report_to wandb --no_remove_unused_columns --use_vllm
"""
NEMO_BASE = """
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 4, max_num_steps: 1000000, val_period: 10}
loss_fn: {reference_policy_kl_penalty: 0.0, token_level_loss: true, ratio_clip_min: 0.2, ratio_clip_max: 0.2}
policy:
  model_name: tiny/model
  precision: bfloat16
  max_total_sequence_length: 2048
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, 4}
  train_micro_batch_size: 2
  megatron_cfg:
    enabled: false
    pipeline_model_parallel_size: 4
    optimizer: {lr: 5.0e-6}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, activation_checkpointing: true}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  optimizer: {name: AdamW, kwargs: {lr: 1e-6, betas: [0.9, 0.999]}}
  generation:
    max_new_tokens: 1024
    colocated: {enabled: true}
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.6, precision: "${policy.precision}"}
data: {max_input_seq_length: 1024, train: {dataset_name: rows}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
NEMO = """
defaults: base.yaml
grpo: {max_num_steps: 200, num_generations_per_prompt: 8}
policy: {train_global_batch_size: 64}
cluster: {num_nodes: 2}
"""


def converted(file: Path, text: str) -> Migration:
    file.write_text(text)
    return migrated(read_foreign(file))


def differing(found: Migration, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the keys whose values are not the expected ones."""
    return {key: found.values.get(key) for key, value in expected.items() if found.values.get(key) != value}


def test_a_command_of_verl(tmp_path: Path) -> None:
    found = converted(tmp_path / "run.sh", VERL)
    expected = {
        "model.path": "${oc.env:HOME}/models/small",
        "data.train_files": ["a.parquet", "b.parquet"],
        "data.max_response_length": 2048,
        "trainer.prompts_per_step": 512,
        "trainer.updates_per_step": 4,  # 512 / 128
        "trainer.total_steps": "???",  # the rows are not known
        "actor.micro_batch.max_tokens": 4096,
        "algorithm.advantage.estimator": "grpo",
        "algorithm.policy_loss.clip_low": 0.2,  # verl's default
        "algorithm.policy_loss.clip_high": 0.28,
        "algorithm.policy_loss.clip_dual": 3.0,  # verl's default
        "algorithm.kl.where": "loss",
        "algorithm.kl.estimator": "k3",
        "algorithm.kl.coefficient": 0.01,
        "algorithm.overlong.buffer_share": 0.25,  # 512 / 2048
        "actor.optim.lr": 1e-6,
        "actor.optim.betas": [0.9, 0.999],  # verl's default
        "actor.recompute": "full",
        "actor.parallel.tensor_parallel_size": 2,
        "actor.parallel.sequence_parallel": True,  # on by default in verl
        "actor.parallel.data_parallel_size": 4,  # 16 / (2 x 2)
        "rollout.engine": "sglang",
        "rollout.num_replicas": 4,  # 16 / 4
        "placement.strategy": "hybrid",
        "placement.num_nodes": 2,
        "placement.devices_per_node": 8,
        "reward.functions": [{"path": "score.py:score"}],
    }
    assert differing(found, expected) == {}
    assert found.unknown == ["trainer.made_up"]
    # The number of layers is in the model's folder.
    assert found.values["actor.parallel.pipeline_layout"] == "???"
    assert "num_layers_in_first_pipeline_stage=3" in found.origins["actor.parallel.pipeline_layout"]
    assert found.differing["actor_rollout_ref.rollout.name=vllm"].startswith("SGLang generates")
    assert not any(key.startswith("critic.") for key in found.values)


def test_a_command_of_slime(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SHAPE)
    found = converted(tmp_path / "run.sh", SLIME)
    expected = {
        "model.path": "/models/tiny",
        "data.train_files": ["rows.jsonl"],
        "data.val_files": ["one.jsonl", "two.jsonl"],
        "data.columns.prompt": "question",
        "trainer.total_steps": 30,
        "trainer.prompts_per_step": 32,
        "trainer.updates_per_step": 4,  # 32 x 8 / 64
        "algorithm.policy_loss.aggregation": "sequence_mean_token_mean",  # slime's default
        "algorithm.policy_loss.clip_high": 0.3,
        "algorithm.kl.where": "loss",
        "algorithm.kl.estimator": "k2",
        "algorithm.kl.coefficient": 0.02,
        "actor.optim.betas": [0.9, 0.98],
        "actor.optim.decay": "constant",
        "actor.parallel.sequence_parallel": True,
        "actor.parallel.data_parallel_size": 4,  # 8 / 2
        "rollout.num_replicas": 2,  # 8 / 4
        "rollout.sglang.server_args.mem_fraction_static": 0.7,
        "rollout.sglang.server_args.chunked_prefill_size": 2048,
        "placement.strategy": "hybrid",
        "placement.num_nodes": 2,
    }
    assert differing(found, expected) == {}
    assert found.unknown == []
    assert "config.json" in found.answers["num_layers"]
    assert "config.json" in found.answers["swiglu"]


@pytest.mark.parametrize(
    ("more", "temperature"),
    [
        ("", None),
        (" --rollout-temperature 0.8", 0.8),
        (" --rollout-temperature 0.8 --eval-temperature 0.1", 0.1),
        (" --eval-temperature 0 --rollout-temperature 0.8", 0),
    ],
)
def test_validation_of_slime_samples_as_training_does_unless_told(
    more: str, temperature: float | None, tmp_path: Path
) -> None:
    found = converted(tmp_path / "run.sh", SLIME.replace("--eval-interval 5", f"--eval-interval 5{more}"))
    assert found.values.get("rollout.validation.temperature") == temperature
    assert found.values["data.columns.data_source"] is NULL


def test_devices_of_their_own_for_the_engines(tmp_path: Path) -> None:
    text = SLIME.replace("--colocate", "--rollout-num-gpus 8")
    found = converted(tmp_path / "run.sh", text)
    expected = {
        "placement.strategy": "split_collocate",
        "placement.num_nodes": 4,  # 8 + 8 devices on nodes of 4
        "actor.parallel.data_parallel_size": 4,
        "rollout.num_replicas": 2,
    }
    assert differing(found, expected) == {}


def test_supervised_fine_tuning_of_slime(tmp_path: Path) -> None:
    found = converted(tmp_path / "run.sh", SLIME.replace("--colocate", "--loss-type sft_loss"))
    assert found.values["kind"] == "sft"
    assert found.values["trainer.samples_per_step"] == 32
    assert found.values["data.columns.messages"] == "question"
    assert not any(key.startswith("rollout.") for key in found.values)


def test_a_command_of_trl(tmp_path: Path) -> None:
    found = converted(tmp_path / "run.sh", TRL)
    expected = {
        "model.path": "tiny/model",
        "data.train_files": ["tiny/rows"],
        "rollout.n": 8,
        "trainer.prompts_per_step": 64,  # 8 x 8 x 8 / 8
        "trainer.updates_per_step": 2,  # 8 / 4
        "trainer.total_steps": 250,  # 500 / 2
        "algorithm.policy_loss.aggregation": "sequence_mean_token_sum_norm",
        "algorithm.policy_loss.norm_tokens": 512,
        "algorithm.policy_loss.clip_low": 0.1,
        "algorithm.policy_loss.clip_high": 0.1,
        "algorithm.kl.where": "loss",
        "algorithm.kl.estimator": "k3_unclamped",
        "algorithm.kl.coefficient": 0.04,
        "actor.lora.rank": 8,
        "actor.micro_batch.sequences": 8,
        "actor.micro_batch.max_tokens": NULL,
        "actor.optim.decay": "linear",  # TRL's default
        "actor.recompute": "full",  # TRL's default
        "tracking.loggers": ["console", "jsonl", "wandb"],
        # TRL's default with vLLM
        "algorithm.rollout_correction.level": "sequence",
        "algorithm.rollout_correction.kind": "mask",
        "algorithm.rollout_correction.low": 0,
        "algorithm.rollout_correction.high": 3,
    }
    assert differing(found, expected) == {}
    assert found.unknown == []
    assert "data.columns" in found.answers["remove_unused_columns"]


@pytest.mark.parametrize(
    ("script", "kind", "key", "rows"),
    [
        ("sft.py", "sft", "samples", 64),
        ("dpo.py", "dpo", "pairs", 64),
        ("reward_modeling.py", "reward_model", "pairs", 64),
    ],
)
def test_the_trainer_of_trl_is_that_of_the_script(
    tmp_path: Path, script: str, kind: str, key: str, rows: int
) -> None:
    text = f"accelerate launch --num_processes 4 --config_file=a.yaml {script} --model_name_or_path m --learning_rate 1e-5 "
    text += "--dataset_name d --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_length 99"
    found = converted(tmp_path / "run.sh", text)
    expected = {"kind": kind, f"trainer.{key}_per_step": rows, "data.max_length": 99}
    assert differing(found, expected) == {}


def test_a_yaml_and_a_docstring_of_trl(tmp_path: Path) -> None:
    found = converted(
        tmp_path / "a.yaml", "num_generations: 4\nlearning_rate: 1e-6\nbeta: 0.0\nloss_type: grpo\n"
    )
    assert found.values["rollout.n"] == 4
    assert found.values["actor.optim.lr"] == 1e-6
    text = f'"""Run it.\n\n```sh\n{TRL}```\n"""\nimport torch\n'
    found = converted(tmp_path / "grpo.py", text.replace("\\\n", "\\\\\n"))
    assert found.values["trainer.prompts_per_step"] == 64


PYTHON = """
LENGTH = 512
def main(peft=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=5e-6)
    parser.add_argument("--use-lora", action="store_true")
    parser.add_argument("--group", default=4, dest="num_samples")
    args = parser.parse_args()
    rows = load_dataset("tiny/rows", split="train")
    if args.use_lora:
        peft = LoraConfig(r=16)
    steps = 10
    steps = 20
    configuration = GRPOConfig(
        learning_rate=args.rate,
        num_generations=args.num_samples,
        max_completion_length=LENGTH * 2,
        max_steps=steps,
        lr_scheduler_kwargs={"min_lr": 1e-7},
        output_dir=f"runs/{LENGTH}",
        report_to="none",
    )
    trainer = GRPOTrainer(model="tiny/model", args=configuration, reward_funcs=[scores.right, length])
"""


def test_a_python_script_of_trl(tmp_path: Path) -> None:
    found = converted(tmp_path / "train.py", PYTHON)
    expected = {
        "model.path": "tiny/model",
        "data.train_files": ["tiny/rows"],
        "data.max_response_length": 1024,
        "rollout.n": 4,
        "actor.optim.lr": 5e-6,
        "actor.optim.min_lr": 1e-7,
        "trainer.total_steps": "???",  # assigned twice
        "trainer.output_dir": "runs/512",
        "tracking.loggers": ["console", "jsonl"],
        "reward.functions": [{"path": "???"}, {"path": "???"}],
    }
    assert differing(found, expected) == {}
    assert found.unknown == []
    assert "actor.lora.rank" not in found.values  # its branch is not taken


def test_options_of_a_command_are_arguments_of_the_script(tmp_path: Path) -> None:
    command = "accelerate launch --num_processes 8 train.py --rate 1e-5 --use-lora"
    found = converted(
        tmp_path / "train.py", f'"""Run it.\n\nThe user\'s machine:\n\n{command}\n"""\n{PYTHON}'
    )
    expected = {
        "actor.optim.lr": 1e-5,
        "actor.lora.rank": 16,
        "actor.lora.alpha": 8,  # PEFT's default
        "placement.devices_per_node": 8,
        "trainer.prompts_per_step": 16,  # 8 rows x 8 devices / 4
    }
    assert differing(found, expected) == {}


@pytest.mark.parametrize(
    "line",
    [
        "a = b\nb = a",
        "a = 'x' * 10**9",
        "a0 = 'x' * 9\n"
        + "\n".join(f"a{each} = f'{{a{each - 1}}}{{a{each - 1}}}'" for each in range(1, 60))
        + "\na = a59",
        "a = [open('/etc/passwd').read()]",
        "a = __import__('os').getcwd()",
    ],
)
def test_nothing_of_a_python_script_is_executed(tmp_path: Path, line: str) -> None:
    text = f"{line}\nGRPOConfig(run_name=a, learning_rate=1e-6)\n"
    found = converted(tmp_path / "train.py", text)
    assert found.values["tracking.run_name"] == "???"
    assert found.values["actor.optim.lr"] == 1e-6


def test_files_that_a_command_names(tmp_path: Path) -> None:
    """They are relative to the folder of the script, or to one above it."""
    (tmp_path / "zero3.yaml").write_text("num_machines: 2\nnum_processes: 16\n")
    (tmp_path / "run.yaml").write_text("per_device_train_batch_size: 4\nlearning_rate: 1e-6\nmax_length: 9\n")
    (tmp_path / "scripts").mkdir()
    text = "accelerate launch --config_file zero3.yaml sft.py run.yaml --learning_rate 2e-6"
    found = converted(tmp_path / "scripts" / "run.sh", text)
    expected = {
        "trainer.samples_per_step": 64,  # 4 x 16
        "actor.optim.lr": 2e-6,
        "placement.num_nodes": 2,
        "placement.devices_per_node": 8,
    }
    assert differing(found, expected) == {}


def test_processes_of_torchrun(tmp_path: Path) -> None:
    text = TRL.replace("accelerate launch --num_processes 8", 'torchrun --nnodes=2 --nproc_per_node="4"')
    found = converted(tmp_path / "run.sh", text)
    expected = {"trainer.prompts_per_step": 64, "placement.num_nodes": 2, "placement.devices_per_node": 4}
    assert differing(found, expected) == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"level": "sequence", "kind": "mask", "low": 0, "high": 3}),
        (
            "--vllm_importance_sampling_mode token_truncate",
            {"level": "token", "kind": "truncate", "low": None, "high": 3},
        ),
        ("--vllm_importance_sampling_clip_min 0.5", {"level": "sequence", "low": 0.5}),
        ("--vllm_importance_sampling_clip_max 2", {"high": 2}),
        ("--vllm_importance_sampling_correction false", {"level": "none", "kind": None, "high": None}),
        ("--use_vllm false", {"level": "none", "kind": None, "high": None}),
    ],
)
def test_the_correction_of_trl_is_on_with_vllm(
    tmp_path: Path, options: str, expected: dict[str, Any]
) -> None:
    text = TRL.replace("--use_vllm", "" if "use_vllm" in options else "--use_vllm") + f"    {options}\n"
    found = converted(
        tmp_path / "run.sh",
        text.replace("\n    --use_peft", " --use_peft").replace("wandb --no", "wandb \\\n --no"),
    )
    correction = {name: found.values.get(f"algorithm.rollout_correction.{name}") for name in expected}
    assert correction == expected


def test_defaults_of_trl_without_a_counterpart_are_said(tmp_path: Path) -> None:
    found = converted(tmp_path / "run.sh", TRL)
    always = {"use_vllm=true", "limit of prompts"}
    assert found.differing.keys() == {"lora_dropout=0.05", "use_bias_correction_kl=true"} | always
    # Neither an adapter nor a KL term.
    found = converted(tmp_path / "run.sh", TRL.replace("--use_peft", "").replace("--beta 0.04", ""))
    assert found.differing.keys() == always
    found = converted(tmp_path / "sft.yaml", "max_length: 9\ndataset_text_field: a\npacking: true\n")
    assert found.differing.keys() == {"assistant_only_loss=false"}


def test_cispo_has_no_lower_limit_where_the_source_has_none(tmp_path: Path) -> None:
    text = TRL.replace("--loss_type dr_grpo", "--loss_type cispo --epsilon_high 5.0")
    found = converted(tmp_path / "run.sh", text)
    kind = {"algorithm.policy_loss.kind": "cispo", "algorithm.policy_loss.clip_low": 0.999}
    assert differing(found, {**kind, "algorithm.policy_loss.clip_high": 4}) == {}
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SHAPE)
    text = SLIME.replace("--advantage-estimator grpo", "--advantage-estimator cispo")
    found = converted(tmp_path / "run.sh", text.replace("--eps-clip 0.2", "--eps-clip 1.0"))
    assert differing(found, {**kind, "algorithm.policy_loss.clip_high": 0.3}) == {}


def test_each_reward_function_is_asked_for(tmp_path: Path) -> None:
    text = TRL.replace("--use_peft", "--reward_funcs accuracy lib.format --reward_weights 1.0 0.5 --use_peft")
    found = converted(tmp_path / "run.sh", text)
    assert found.values["reward.functions"] == [
        {"path": "???", "weight": 1.0},
        {"path": "???", "weight": 0.5},
    ]
    assert found.origins["reward.functions"] == "reward_funcs=[accuracy, lib.format]"
    assert found.origins["reward.functions"].startswith("reward_funcs=[accuracy, lib.format]")


def slime(folder: Path, old: str = "", new: str = "") -> Migration:
    """Return the conversion of the script with another part."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "tiny.sh").write_text(SHAPE)
    return converted(folder / "run.sh", SLIME.replace(old, new) if old else SLIME)


def test_the_kl_term_of_slimes_grpo_is_in_the_loss_only(tmp_path: Path) -> None:
    given = "--use-kl-loss --kl-loss-coef 0.02 --kl-loss-type k2"
    found = slime(tmp_path, given, "--kl-coef 0.1 --kl-loss-type k2")
    assert found.values["algorithm.kl.where"] == "none"
    text = SLIME.replace(given, "--kl-coef 0.1 --kl-loss-type k2")
    text = text.replace("--advantage-estimator grpo", "--advantage-estimator reinforce_plus_plus")
    found = converted(tmp_path / "run.sh", text)
    expected = {"where": "reward", "estimator": "k2", "coefficient": 0.1}
    assert differing(found, {f"algorithm.kl.{name}": value for name, value in expected.items()}) == {}


def test_slimes_async_script_trains_on_samples_of_older_weights(tmp_path: Path) -> None:
    found = slime(
        tmp_path, "train.py --actor-num-nodes 2", "train_async.py --rollout-num-gpus 8 --actor-num-nodes 2"
    )
    assert found.values["rollout.max_staleness"] == 1
    assert found.values["algorithm.rollout_correction.level"] == "token"
    assert any("token is set" in why for why in found.differing.values())
    found = slime(tmp_path, "--eps-clip 0.2", "--eps-clip 0.2 --use-tis --tis-clip 5")
    assert "rollout.max_staleness" not in found.values


def test_distillation_of_slime_asks_for_the_teacher(tmp_path: Path) -> None:
    found = slime(tmp_path, "--eps-clip 0.2", "--use-opd --opd-type sglang --opd-kl-coef 0.5")
    expected = {
        "algorithm.advantage.estimator": "distillation",
        "algorithm.advantage.distillation.coefficient": 0.5,
        "teacher.path": "???",
    }
    assert differing(found, expected) == {}
    assert "reward.functions" not in found.values
    found = slime(tmp_path, "--eps-clip 0.2", "--use-opd --opd-type megatron")
    assert found.values["algorithm.advantage.distillation.reward_weight"] == 1
    assert "reward.functions" in found.values


def test_defaults_and_adapters_of_slime_and_miles(tmp_path: Path) -> None:
    found = slime(tmp_path, "--eps-clip 0.2", "--lora-rank 8 --target-modules q_proj,v_proj")
    expected = {
        "data.shuffle": False,  # slime's default
        "actor.lora.rank": 8,
        "actor.lora.alpha": 16,  # miles' default
        "actor.lora.targets": ["q_proj", "v_proj"],
    }
    assert differing(found, expected) == {}


def test_the_functions_that_verl_chooses_by_the_data_set_are_named(tmp_path: Path) -> None:
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5"
    found = converted(tmp_path / "run.sh", command)
    assert "megarl/recipes/math/reward.py" in found.differing["reward functions"]
    found = converted(tmp_path / "own.sh", f"{command} custom_reward_function.path=mine.py")
    assert "reward functions" not in found.differing
    assert found.values["reward.functions"] == [{"path": "mine.py"}]


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ("clip_ratio=0.3", 0.3, 0.3),
        ("clip_ratio_high=0.28", 0.2, 0.28),
        ("clip_ratio_low=0.1 {prefix}clip_ratio_high=0.28 {prefix}clip_ratio=0.3", 0.1, 0.28),
        ("clip_ratio=0.3 {prefix}clip_ratio_low=0.1", 0.1, 0.3),
        ("clip_ratio_low=10 {prefix}clip_ratio_high=0.2", 0.999, 0.2),
    ],
)
def test_verl_prefers_the_two_bounds_of_the_ratio(
    tmp_path: Path, settings: str, low: float, high: float
) -> None:
    prefix = "actor_rollout_ref.actor."
    found = converted(tmp_path / "run.sh", VERL_MINIMUM + prefix + settings.format(prefix=prefix))
    expected = {"algorithm.policy_loss.clip_low": low, "algorithm.policy_loss.clip_high": high}
    assert differing(found, expected) == {}


def test_routes_are_replayed_where_there_is_an_earlier_pass(tmp_path: Path) -> None:
    text = (
        VERL_MINIMUM
        + "actor_rollout_ref.actor.router_replay.mode=R2 actor_rollout_ref.actor.ppo_mini_batch_size="
    )
    assert converted(tmp_path / "run.sh", text + "16").values["engine.routing_replay"] == "trainer"
    assert "engine.routing_replay" not in converted(tmp_path / "run.sh", text + "64").values


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("name: grpo, normalize_rewards: true, use_leave_one_out_baseline: true", "grpo"),
        ("name: grpo, normalize_rewards: false, use_leave_one_out_baseline: true", "rloo"),
        ("name: grpo, normalize_rewards: false, use_leave_one_out_baseline: false", "grpo"),
        ("name: reinforce_plus_plus", "reinforce_plus_plus_baseline"),  # minus_baseline is on by default
        ("name: reinforce_plus_plus, minus_baseline: false", "reinforce_plus_plus"),
        ("", "grpo"),
    ],
)
def test_estimators_of_nemo_rl(tmp_path: Path, estimator: str, expected: str) -> None:
    found = converted(
        tmp_path / "run.yaml", NEMO_BASE.replace("grpo: {", f"grpo: {{adv_estimator: {{{estimator}}}, ")
    )
    assert found.values["algorithm.advantage.estimator"] == expected
    assert found.values.get("algorithm.advantage.normalize_by_std") == (
        None if "normalize" not in estimator else "normalize_rewards: true" in estimator
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"level": "token", "high": 1e9}),  # no truncation
        (
            "truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 5",
            {"kind": "truncate", "high": 5},
        ),
        (
            "truncated_importance_sampling_type: seq-mask-tis, truncated_importance_sampling_ratio: 1.002",
            {"level": "token", "high": 1e9},
        ),
        ("sequence_level_importance_ratios: true", {"level": "sequence"}),
    ],
)
def test_corrections_of_nemo_rl(tmp_path: Path, given: str, expected: dict[str, Any]) -> None:
    text = NEMO_BASE.replace(
        "loss_fn: {", f"loss_fn: {{use_importance_sampling_correction: true, {given or 'a: 1'}, "
    )
    found = converted(tmp_path / "run.yaml", text)
    assert {name: found.values.get(f"algorithm.rollout_correction.{name}") for name in expected} == expected


def test_a_file_of_nemo_rl(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(NEMO_BASE)
    found = converted(tmp_path / "run.yaml", NEMO)
    expected = {
        "trainer.total_steps": 200,
        "trainer.prompts_per_step": 16,
        "trainer.updates_per_step": 2,  # 16 x 8 / 64
        "rollout.n": 8,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 1024,
        "algorithm.kl.where": "none",
        "algorithm.policy_loss.aggregation": "token_mean",
        "actor.optim.lr": 1e-6,
        "actor.optim.betas": [0.9, 0.999],
        "actor.micro_batch.max_tokens": 4096,  # 2048 x 2
        "actor.recompute": "full",
        "actor.parallel.tensor_parallel_size": 2,
        "actor.parallel.data_parallel_size": 8,  # 16 / 2
        "rollout.num_replicas": 8,
        "placement.strategy": "hybrid",
    }
    assert differing(found, expected) == {}
    assert found.unknown == []
    assert "actor.parallel.pipeline_parallel_size" not in found.values
    assert found.answers["policy.megatron_cfg.pipeline_model_parallel_size"].startswith("off in the source")
    assert "trainer.total_steps" in found.own
    assert "trainer.prompts_per_step" not in found.own


def test_a_hydra_file_with_groups(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "small.yaml").write_text(
        "ppo_mini_batch_size: 16\nclip_ratio: ${oc.select:data.x,0.3}\n"
    )
    text = "defaults:\n  - actor@actor_rollout_ref.actor: small\n  - _self_\ndata: {train_batch_size: 64}\n"
    found = converted(tmp_path / "run.yaml", text)
    assert found.values["trainer.updates_per_step"] == 4
    assert found.values["algorithm.policy_loss.clip_low"] == 0.3


# What cannot be read.


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.sh", "echo hello\n", "no setting of verl, slime, TRL or NeMo RL"),
        ("run.yaml", "a: {b: 1}\n", "no setting of verl, slime, TRL or NeMo RL"),
        ("run.yaml", "- 1\n", "must contain a mapping"),
        ("run.yaml", "a: [\n", "is not YAML"),
        ("run.yaml", "policy: {model_name: m, train_global_batch_size: 4}\n", "only settings of GRPO"),
        ("run.sh", "python rloo.py --learning_rate 1 --num_generations 2 --beta 0.1\n", "trainer rloo"),
    ],
)
def test_files_that_no_table_is_about(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_foreign(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        read_foreign(tmp_path / "absent.sh")


def test_the_framework_is_recognized_by_all_settings(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python train.py --rollout-batch-size 4 --weight-decay 0 --loss-type x\n"
    )
    assert read_foreign(tmp_path / "run.sh").framework.name == "slime"
    assert read_foreign(tmp_path / "run.sh", "trl").framework.name == "TRL"


VERL_MINIMUM = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=m "
YAML_MINIMUM = "data: {train_batch_size: 64}\nactor_rollout_ref: {model: {path: m}}\n"
REPEATED = "".join(f"a{each}: &a{each} {{x: *a{each - 1}, y: *a{each - 1}}}\n" for each in range(1, 40))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.sh", "A=12345678\n" + "A=$A$A\n" * 60 + VERL_MINIMUM, "expand to more than"),
        ("run.sh", "A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + VERL_MINIMUM, "expand to more than"),
        ("run.sh", "A=" + "$(" * 3000 + ")" * 3000 + "\n" + VERL_MINIMUM, "nested in each other"),
        ("run.sh", "# " + "x" * 1_000_000 + "\n" + VERL_MINIMUM, "has more than 1,000,000 characters"),
        ("run.yaml", "a0: &a0 {x: 1}\n" + REPEATED + YAML_MINIMUM, "has more than 100,000 values"),
        ("run.yaml", "a: &a {b: *a}\n" + YAML_MINIMUM, "has more than 100,000 values"),
        ("run.yaml", "a: !!python/object/apply:os.getcwd []\n" + YAML_MINIMUM, "is not YAML"),
    ],
)
def test_files_without_an_end_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_foreign(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "A=$((9**9**9**9))\nB=$(('a' * 9999999999))\nC=$(seq 1 9999999999)\n" + VERL_MINIMUM),
        ("run.sh", "A=$((" + "-" * 5000 + "1))\nsource " + "a" * 300 + "\n" + VERL_MINIMUM),
        ("run.sh", "source run.sh\nsource run.sh\n" + VERL_MINIMUM),
        ("run.sh", VERL_MINIMUM + "data.val_files='[2024-13-45]'"),
        ("run.yaml", "defaults: [run, run, {}, null]\n" + YAML_MINIMUM),
    ],
)
def test_parts_without_an_end_are_left_out(tmp_path: Path, name: str, text: str) -> None:
    assert converted(tmp_path / name, text).values["model.path"] == "m"


def test_a_warm_up_counts_optimizer_steps(tmp_path: Path) -> None:
    """The schedule of verl moves once a step, and that of slime at each update."""
    text = VERL_MINIMUM + "actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.total_training_steps=30 "
    ratio = converted(tmp_path / "run.sh", text + "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")
    assert ratio.values["actor.optim.warmup_steps"] == 12  # 0.1 x 30 steps of 4 updates
    steps = converted(tmp_path / "run.sh", text + "actor_rollout_ref.actor.optim.lr_warmup_steps=5")
    assert steps.values["actor.optim.warmup_steps"] == 20
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SHAPE)
    slime = converted(tmp_path / "run.sh", SLIME.replace("--lr 2e-6", "--lr 2e-6 --lr-warmup-fraction 0.1"))
    assert slime.values["actor.optim.warmup_steps"] == 12  # 0.1 x 30 steps of 32 x 8 / 64 updates
    trl = converted(tmp_path / "run.sh", TRL.replace("--use_peft", "--warmup_ratio 0.025 --use_peft"))
    assert trl.values["actor.optim.warmup_steps"] == 13  # 0.025 x 500, rounded up as in transformers


# Shell.


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nrun $A ${A}2 '$A' \"$A b\"", ["1", "12", "$A", "1 b"]),
        ("run ${A:-x} ${A-y} ${B:=z} ${C:+w}", ["x", "y", "z"]),
        ("A=(1 '2 3')\nA+=(4)\nrun \"${A[@]}\" ${#A[@]}", ["1", "2 3", "4", "3"]),
        ("A='1 2'\nrun $A \"$A\"", ["1", "2", "1 2"]),
        ('A=()\nrun "${A[@]}" "" x"${A[@]}"', ["", "x"]),
        ("A=3\nrun $((A * 2 + 10 / 4))", ["8"]),
        ("run $UNSET/x `date` $(date)", ["${oc.env:UNSET}/x", "???", "???"]),
        ("run $(seq 2 2 6)", ["2", "4", "6"]),
        ("A=a/b.tar\nrun ${A##*/} ${A%.tar} ${A/a/c} ${A^^}", ["b.tar", "a/b", "c/b.tar", "A/B.TAR"]),
        ("A=1\nif [[ $A == 2 ]]; then B=x; elif [ $A -eq 1 ]; then B=y; else B=z; fi\nrun $B", ["y"]),
        ('if [ -z "$A" ] || [ "$A" -le 0 ]; then A=8; fi\nrun $A', ["8"]),
        ('[ -n "$A" ] && A=1\nA=${A:-2}\nrun $A', ["2"]),
        ("cat <<EOF > f\nrun no\nEOF\nrun yes 2>&1 > log", ["yes"]),
        ("while true; do run no; done; case $x in a) run no;; esac\nrun yes", ["yes"]),
        ("for A in 5; do B=$A; done\nrun $B", ["5"]),
        ("run a \\\n  b # c\n", ["a", "b"]),
        ("export A=1 B=2\nC=3 run $A$B", ["12"]),
    ],
)
def test_words_of_a_script(tmp_path: Path, script: str, words: list[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(script)
    found = [each for each in ShellScript(file).commands() if each[0] == "run"]
    assert found == [["run", *(word for word in words if word != "log")]] or found[0][1:] == [*words, "log"]


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    script = (
        f'touch {tmp_path}/a\nA=$(touch {tmp_path}/b)\nB=`touch {tmp_path}/c`\npython -c \'open("d", "w")\'\n'
    )
    (tmp_path / "run.sh").write_text(script)
    list(ShellScript(tmp_path / "run.sh").commands())
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.", 1.0),
        ("-1", -1),
        ("True", True),
        ("null", None),
        ("'error'", "error"),
        ("[a,b]", ["a", "b"]),
        ("['${oc.env:HOME}/a', 2]", ["${oc.env:HOME}/a", 2]),
        ("2024_06_01", "2024_06_01"),
    ],
)
def test_values_on_a_command_line(text: str, value: object) -> None:
    assert parsed(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "open('x')", "a()", "[x for x in y]", "1 +"])
def test_an_expression_calls_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="is no arithmetic|invalid syntax"):
        evaluate(text, {"a": 1, "y": [1]}.get)


def test_what_follows_a_decisive_part_is_not_evaluated() -> None:
    values = {"zero": 0, "two": 2}
    assert evaluate("zero and 1 / zero", values.get) == 0
    assert evaluate("two or unset.key[0]", values.get) == 2
    assert evaluate("two and zero or 7", values.get) == 7


def test_every_conversion_of_the_tables_is_an_expression() -> None:
    """A name that is not set is None, so a conversion may fail by its values, and by nothing else."""
    tables = [*map(keys_of, ("verl", "slime", "nemo_rl")), *trl_names().values()]
    hows = {entry.how for table in tables for entry in table.values() if entry.how}
    assert len(hows) > 100
    for how in hows:
        assert how.count("[") == how.count("]"), how
        assert how.count("(") == how.count(")"), how
    for name in ("verl", "slime", "nemo_rl", "trl"):
        assert foreign_defaults(name)


OPTIONS_OF_A_SCRIPT = """
'''
accelerate launch train.py --lr 3e-6 -g 8 --no-shuffle
'''
import argparse
from trl import GRPOConfig, GRPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--lr", dest="learning_rate", default=1e-5)
parser.add_argument("-g", "--group", default=4)
parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
parser.add_argument("--no-mask", dest="mask", action="store_false")
parser.add_argument("--steps", default=7)
args = parser.parse_args()
args.steps = args.steps * 2
config = GRPOConfig(
    learning_rate=args.learning_rate,
    num_generations=args.group,
    shuffle_dataset=args.shuffle,
    mask_truncated_completions=args.mask,
    max_steps=args.steps,
    report_to=["wandb"],
)
config.beta = 0.04
GRPOTrainer(model="m", args=config, reward_funcs=score, train_dataset=rows)
"""


def test_options_of_a_script_are_read_under_the_names_that_they_are_written_with(tmp_path: Path) -> None:
    found = converted(tmp_path / "train.py", OPTIONS_OF_A_SCRIPT)
    expected = {
        "actor.optim.lr": 3e-6,
        "rollout.n": 8,
        "data.shuffle": False,
        "trainer.total_steps": "???",  # changed after it was parsed
        "algorithm.kl.coefficient": 0.04,
        "tracking.loggers": ["console", "jsonl", "wandb"],
    }
    assert differing(found, expected) == {}


def test_only_the_key_that_cannot_be_computed_says_so(tmp_path: Path) -> None:
    found = converted(tmp_path / "run.yaml", "per_device_train_batch_size: 4\nnum_generations: 4\n")
    assert "cannot be computed" in found.origins["trainer.prompts_per_step"]
    assert found.origins["actor.micro_batch.sequences"] == "per_device_train_batch_size=4"


def test_save_hf_of_slime_is_a_key(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(SHAPE)
    text = SLIME.replace("--advantage-estimator grpo", "--advantage-estimator grpo --save-hf out")
    assert converted(tmp_path / "run.sh", text).values["checkpoint.save_hf"] is True


# What a script has besides its own values.


@pytest.mark.parametrize(
    ("formula", "steps"),
    [
        ("$((STEPS * 3 / 100))", 6),
        ('$(echo "$STEPS * 0.05" | bc)', 10),
        ('$(echo "$STEPS * 0.05 / 1" | bc)', 10),
        ('$(bc -l <<< "$STEPS / 8")', 25),
        ('$(echo "scale=1; $STEPS / 3" | bc)', 66.6),
        ('$(python3 -c "print(int($STEPS * 0.035))")', 7),
        ('$(python -c "import math; print(math.ceil(${STEPS} / 30))")', 7),
        ('$(echo "$STEPS / 3 * 2" | bc)', 132),  # each quotient is cut
        ('$(echo "100 * 0.29 / 1" | bc)', 29),
        ('$(echo "1e400 / 1" | bc)', None),
        ("`expr $STEPS / 30`", 6),
        ("$(expr $STEPS \\* 2)", 400),
        ('$(awk "BEGIN {print $STEPS * 0.25}")', 50),
        ("""$(awk -v s=$STEPS 'BEGIN {printf "%d", s * 0.033}')""", 6),
        ("""$(awk -v s="$STEPS" 'BEGIN { printf("%.0f\\n", s * 0.033) }')""", 7),
        ("$(awk 'BEGIN {print 3, 4}')", None),
        ("""$(awk 'BEGIN {printf "%d", "3"}')""", None),
        ('$(python3 -c "import torch; print(torch.cuda.device_count())")', None),
        ('$(echo "$UNSET * 2" | bc)', None),
        ("$(wc -l < rows.jsonl)", None),
    ],
)
def test_formulas_of_a_script(tmp_path: Path, formula: str, steps: float | None) -> None:
    command = f"STEPS=200\nWARMUP={formula}\npython train.py --hf-checkpoint m --prompt-data a.jsonl "
    found = read_foreign_text(tmp_path, f"{command} --rollout-batch-size 8 --lr-warmup-iters $WARMUP\n")
    assert found.settings["lr_warmup_iters"] == ("???" if steps is None else steps)


def read_foreign_text(folder: Path, text: str) -> Foreign:
    (folder / "run.sh").write_text(text)
    return read_foreign(folder / "run.sh")


def test_arguments_and_the_environment_of_a_script_are_said(tmp_path: Path) -> None:
    text = """
    export NCCL_DEBUG=INFO MODEL=m
    export LATER WANDB_API_KEY=abc
    LATER=yes
    OTHER=no
    EXTRA=("${@:2}")
    MORE="--seed 3"
    ray job submit --runtime-env-json='{"env_vars": {"IN_JSON": "1"}}' -- \\
        env BEFORE=2 python train.py --hf-checkpoint $MODEL --prompt-data a.jsonl --rollout-batch-size 8 \\
        --colocate "${EXTRA[@]}" ${MISSING_ARGS[@]} $MORE
    """
    found = read_foreign_text(tmp_path, text)
    assert found.settings["colocate"] is True
    assert found.settings["seed"] == 3
    arguments, array, environment = found.notes
    assert arguments.startswith("$@ stands for the arguments of the script")
    assert array.startswith("${MISSING_ARGS[@]} stands for an array")
    assert environment.endswith(": LATER=yes NCCL_DEBUG=INFO WANDB_API_KEY BEFORE=2 IN_JSON=1")

    # A script without these has no notes, and an empty array is none of them.
    command = "A=()\nexport MODEL=m\npython train.py --hf-checkpoint $MODEL --prompt-data a.jsonl ${A[@]}"
    assert read_foreign_text(tmp_path, f"{command} --rollout-batch-size 8\n").notes == ()


@pytest.mark.parametrize(
    ("first", "last", "layout"),
    [
        (5, 7, [5, 8, 8, 7]),  # (28 - 12) / 2
        (7, None, [7, 7, 7, 7]),  # (28 - 7) / 3
        (None, 1, [9, 9, 9, 1]),
        (6, None, "???"),  # 22 layers on 3 stages
    ],
)
def test_layers_of_the_outer_stages(
    tmp_path: Path, first: int | None, last: int | None, layout: list[int] | str
) -> None:
    text = "python train.py --hf-checkpoint m --prompt-data a.jsonl --rollout-batch-size 8 --num-layers 28 "
    text += "--pipeline-model-parallel-size 4 --num-rollout 9 "
    text += f"--decoder-first-pipeline-num-layers {first} " * (first is not None)
    text += f"--decoder-last-pipeline-num-layers {last} " * (last is not None)
    found = converted(tmp_path / "run.sh", text)
    assert found.values["actor.parallel.pipeline_layout"] == layout
    assert not any("pipeline_num_layers" in name for name in found.answers)


def test_two_settings_of_one_key_are_both_named(tmp_path: Path) -> None:
    text = SLIME.replace('source "${SCRIPT_DIR}/models/tiny.sh"', "").replace(
        "--lr 2e-6", "--num-steps-per-rollout 2 --lr 2e-6"
    )
    found = converted(tmp_path / "run.sh", text)
    assert "adam_beta1=0.9, adam_beta2=0.98" in found.origins["actor.optim.betas"]
    # 32 x 8 / 64 = 4 updates, and not 2.
    assert "trainer.updates_per_step comes from" in str(found.answers)
    named = " ".join([*found.origins.values(), *found.answers])
    assert "num_steps_per_rollout" in named
    assert "global_batch_size" in named


def test_prompts_have_a_limit_in_every_file(tmp_path: Path) -> None:
    key = "data.max_prompt_length"
    found = converted(tmp_path / "run.sh", SLIME.replace('source "${SCRIPT_DIR}/models/tiny.sh"', ""))
    assert found.values[key] == 1024
    assert key in found.own
    assert "data.overlong=filter" in found.differing["limit of prompts"]

    text = SLIME.replace("--eval-interval 5", "--eval-interval 5 --rollout-max-context-len 2560")
    found = converted(tmp_path / "run.sh", text.replace('source "${SCRIPT_DIR}/models/tiny.sh"', ""))
    assert found.values[key] == 512  # 2560 - 2048
    assert "limit of prompts" not in found.differing


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Both are those of the actor unless the reference has its own.
        ("actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=9000", {"max_tokens": 9000}),
        (
            "actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=9000 ref.log_prob_max_token_len_per_gpu=20000",
            {"max_tokens": 20000},
        ),
        (
            "actor.use_dynamic_bsz=True ref.log_prob_use_dynamic_bsz=False ref.log_prob_micro_batch_size_per_gpu=3",
            {"sequences": 3, "max_tokens": NULL},
        ),
        # 64 rows of 2 x 8 devices.
        ("ref.log_prob_micro_batch_size=64", {"sequences": 4, "max_tokens": NULL}),
    ],
)
def test_micro_batches_of_the_reference_in_verl(
    tmp_path: Path, settings: str, expected: dict[str, Any]
) -> None:
    words = [f"actor_rollout_ref.{word}" for word in ["actor.use_kl_loss=True", *settings.split()]]
    text = f"{VERL_MINIMUM} trainer.nnodes=2 trainer.n_gpus_per_node=8 {' '.join(words)}"
    found = converted(tmp_path / "run.sh", text)
    section = "reference.micro_batch."
    of_reference = {
        key.removeprefix(section): value for key, value in found.values.items() if key.startswith(section)
    }
    assert of_reference == expected


@pytest.mark.parametrize(
    ("reward", "path", "differs"),
    [
        ("deepscaler", "megarl/recipes/math/reward.py", False),
        ("boxed_dapo", "megarl/recipes/math/reward.py", True),
        ("ifbench", "???", False),
    ],
)
def test_rewards_of_slime(tmp_path: Path, reward: str, path: str, differs: bool) -> None:
    text = SLIME.replace('source "${SCRIPT_DIR}/models/tiny.sh"', "").replace(
        "--lr 2e-6", f"--rm-type {reward} --lr 2e-6"
    )
    found = converted(tmp_path / "run.sh", text)
    assert found.values["reward.functions"] == [{"path": path}]
    assert (f"rm_type={reward}" in found.differing) is differs
    found = converted(
        tmp_path / "run.sh", text.replace("--lr 2e-6", "--lr 2e-6 --custom-rm-path pack.mod.score")
    )
    assert found.values["reward.functions"] == [{"path": "???"}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--save_steps 12 --eval_steps 6 --max_steps 240", (6, 3)),  # a step has 2 updates
        ("--save_steps 0.1 --eval_steps 0.025 --max_steps 240", (12, 3)),
        ("--save_steps 5 --eval_steps 7 --max_steps 240", (3, 4)),  # rounded up
    ],
)
def test_intervals_of_trl_count_updates(tmp_path: Path, options: str, expected: tuple[int, int]) -> None:
    text = TRL.replace("--max_steps 500", f"{options} --eval_strategy steps")
    values = converted(tmp_path / "run.sh", text).values
    assert (values["checkpoint.every_steps"], values["trainer.validate_every_steps"]) == expected


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("cpo.py", "", {"kind": "cpo", "sft_coefficient": 1.0, "beta": 0.1}),
        ("cpo.py", "--cpo_alpha 0.2 --beta 0.3", {"kind": "cpo", "sft_coefficient": 0.2, "beta": 0.3}),
        (
            "cpo.py",
            "--loss_type simpo --cpo_alpha 0 --beta 2 --simpo_gamma 1.5",
            {"kind": "simpo", "margin": 1.5, "beta": 2, "sft_coefficient": None},
        ),
        ("orpo.py", "--beta 0.25", {"kind": "orpo", "beta": 0.25, "margin": None}),
    ],
)
def test_losses_of_trl_without_a_reference(
    tmp_path: Path, script: str, options: str, expected: dict[str, Any]
) -> None:
    text = f"accelerate launch --num_processes 2 {script} --model_name_or_path m --dataset_name d {options}"
    found = converted(tmp_path / "run.sh", text)
    assert found.values["kind"] == "dpo"
    assert found.values["trainer.pairs_per_step"] == 16  # 8 x 2
    assert {name: found.values.get(f"loss.{name}") for name in expected} == expected
    assert found.unknown == []


def test_a_loss_that_differs_from_that_of_trl_is_said(tmp_path: Path) -> None:
    start = "accelerate launch cpo.py --model_name_or_path m --dataset_name d --loss_type"
    assert "loss_type=simpo" in converted(tmp_path / "run.sh", f"{start} simpo").differing
    assert converted(tmp_path / "run.sh", f"{start} simpo --cpo_alpha 0").differing == {}
    assert "has no counterpart" in converted(tmp_path / "run.sh", f"{start} hinge").answers["loss_type"]


@pytest.mark.parametrize(
    ("more", "differs"),
    [("", False), (" --eval-max-response-len 2048", False), (" --eval-max-response-len 9000", True)],
)
def test_another_length_of_validation_is_said(tmp_path: Path, more: str, differs: bool) -> None:
    text = SLIME.replace('source "${SCRIPT_DIR}/models/tiny.sh"', "").replace(
        "--eval-interval 5", f"--eval-interval 5{more}"
    )
    found = converted(tmp_path / "run.sh", text)
    assert ("eval_max_response_len=9000" in found.differing) is differs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("orpo/full.yaml", "dpo"),
        ("run_orpo.yaml", "dpo"),
        ("sft/a.yaml", "sft"),
        ("reward/a.yaml", "reward_model"),
    ],
)
def test_a_yaml_of_trl_is_for_the_trainer_that_its_path_names(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    found = converted(file, "model_name_or_path: m\nlearning_rate: 1e-6\nbeta: 0.1\nmax_length: 9\n")
    assert found.values["kind"] == kind
    assert found.values.get("loss.kind") == ("orpo" if "orpo" in name else None)
