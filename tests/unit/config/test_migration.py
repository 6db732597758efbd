"""Hints about unknown keys: the framework is chosen once, then other kinds of run, then what a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.config.migration import nemo_rl_names, synonyms
from megarl.config.review import schema_keys
from megarl.config.schema import SCHEMAS, DPOConfig, PPOConfig, RewardModelRunConfig, SFTConfig
from tests.unit.config.test_verl_names import problems

RUN = "model: {path: m}\ndata: {train_files: [a.parquet]}\n"
KNOWN = {kind: set(schema_keys(schema)) for kind, schema in SCHEMAS.items()}


def hints(folder: Path, *overrides: str, schema: type = PPOConfig) -> list[str]:
    return [each.removesuffix(" [command line]") for each in problems(schema, folder, RUN, *overrides)]


def test_what_the_tables_point_at_exists() -> None:
    every = set().union(*KNOWN.values())
    assert [
        name for name, (keys, note) in synonyms().items() if not set(keys) <= every or not (keys or note)
    ] == []
    table = nemo_rl_names()
    assert [name for name, entry in table.items() if (entry.ours or "model.path") not in every] == []
    assert [name for name, entry in table.items() if entry.ours is None and not entry.note] == []


@pytest.mark.parametrize(
    ("overrides", "framework"),
    [
        (["rollout_batch_size=3", "weight_decay=0", "entropy_coef=0", "loss_type=x"], "slime argument"),
        (["num_generations=3", "weight_decay=0", "loss_type=grpo", "beta=0.1"], "TRL argument"),
        (["loss_type=dapo"], "TRL argument"),
        (["grpo.num_prompts_per_step=3", "policy.model_name=x", "cluster.num_nodes=3"], "NeMo RL key"),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.grad_clip=1"], "verl key"),
    ],
)
def test_all_keys_are_explained_by_the_framework_that_has_most(
    overrides: list[str], framework: str, tmp_path: Path
) -> None:
    found = hints(tmp_path, *overrides)
    assert len(found) == len(overrides)
    assert all(f"is a {framework}" in each for each in found), found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "eval_max_response_len=9",
            "without a counterpart in megarl: responses of validations have the limit",
        ),
        ("sglang_cuda_graph_bs=[1]", "use rollout.sglang.server_args.cuda_graph_bs"),
        ("optimizer=adam", "is an argument of Megatron-Core; the optimizer is AdamW"),
        ("optimizer_cpu_offload=true", "would keep optimizer state on the host"),
        ("use_precision_aware_optimizer=true", "use actor.megatron.optimizer.use_precision_aware_optimizer"),
        ("attention_backend=flash", "use actor.megatron.transformer.attention_backend"),
        ("num_layers=36", "belongs to the architecture"),
        ("rotary_base=10000", "belongs to the architecture"),
        ("hidden_dropout=0", "megarl has no dropout"),
        ("attention_softmax_in_fp32=true", "always computes the softmax in float32"),
        ("sglang_server_concurrency=9", "use rollout.max_concurrency"),
        ("calculate_per_token_loss=true", "use algorithm.policy_loss.aggregation (true is token_mean)"),
        ("moe_token_dispatcher_type=alltoall", "use actor.megatron.transformer.moe_token_dispatcher_type"),
    ],
)
def test_arguments_of_megatron_and_sglang_in_a_command_of_slime(
    override: str, said: str, tmp_path: Path
) -> None:
    _, found = hints(tmp_path, "rollout_batch_size=32", override)
    assert said in found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable: is a verl key; use "
            "algorithm.overlong.buffer_share (0 is off)",
        ),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1",
            "use algorithm.overlong.penalty",
        ),
        ("+actor_rollout_ref.foo.bar=1", "+actor_rollout_ref.foo.bar: unknown key, also in verl"),
        ("actor_rollout_ref.rollout.name=vllm", "vLLM does not exist here"),
        ("rollout.engine=vllm", "is 'vllm', but vLLM does not exist here; use sglang"),
        ("algorithm.adv_estimator=grpo", "also changes the aggregation to sequence_mean_token_mean"),
    ],
)
def test_keys_of_verl_that_scripts_add(override: str, said: str, tmp_path: Path) -> None:
    (found,) = hints(tmp_path, override)
    assert said in found


@pytest.mark.parametrize(
    ("schema", "override", "said"),
    [
        (
            RewardModelRunConfig,
            "loss.kind=ipo",
            "loss.kind: belongs to kind: dpo; this file has kind: reward_model",
        ),
        (
            RewardModelRunConfig,
            "loss.beta=1",
            "loss.beta: belongs to kind: dpo; this file has kind: reward_model",
        ),
        (
            SFTConfig,
            "trainer.pairs_per_step=1",
            "belongs to kind: dpo and reward_model; this file has kind: sft",
        ),
        (
            PPOConfig,
            "trainer.pairs_per_step=1",
            "belongs to kind: dpo and reward_model; this file has kind: ppo",
        ),
        (PPOConfig, "loss.beta=1", "loss.beta: belongs to kind: dpo; this file has kind: ppo"),
        (SFTConfig, "loss.beta=1", "loss.beta: belongs to kind: dpo; this file has kind: sft"),
        (DPOConfig, "rollout.n=1", "rollout.n: belongs to kind: ppo; this file has kind: dpo"),
        (DPOConfig, "algorithm.kl.where=loss", "algorithm.kl.where: belongs to kind: ppo"),
        (DPOConfig, "loss.center_coefficient=1", "belongs to kind: reward_model; this file has kind: dpo"),
    ],
)
def test_a_key_of_another_kind_of_run_names_it(
    schema: type, override: str, said: str, tmp_path: Path
) -> None:
    (found,) = hints(tmp_path, override, schema=schema)
    assert said in found


# What a newcomer types, and the key that is meant. None: all keys of the section are listed.
MEANT = {
    "trainer.epochs=1": "trainer.total_steps",
    "trainer.num_epochs=1": "trainer.total_steps",
    "epochs=1": "trainer.total_steps",
    "data.batch_size=1": "trainer.prompts_per_step",
    "batch_size=1": "trainer.prompts_per_step",
    "rollout.batch_size=1": "trainer.prompts_per_step",
    "rollout.max_tokens=1": "data.max_response_length",
    "rollout.max_new_tokens=1": "data.max_response_length",
    "rollout.tp=1": "rollout.tensor_parallel_size",
    "critic.optim.learning_rate=1": "critic.optim.lr",
    "critic.optm.lr=1": "critic.optim",
    "critic.parallel.tp=1": "critic.parallel.tensor_parallel_size",
    "actor.tp=1": "actor.parallel.tensor_parallel_size",
    "trainer.save_every=1": "checkpoint.every_steps",
    "trainer.save_freq=1": "checkpoint.every_steps",
    "algorithm.clip_ratio=1": "algorithm.policy_loss.clip_low",
    "algorithm.kl_coef=1": "algorithm.kl.coefficient",
    "optimizer.lr=1": "actor.optim.lr",
    "policy.lr=1": "actor.optim.lr",
    "lr=1": "actor.optim.lr",
    "reward.path=x": "reward.functions",
    "gpus=8": "placement.devices_per_node",
    "wandb.project=x": "tracking.project",
    "trainer.wandb=true": "tracking.loggers",
    "data.dataset=x": "data.train_files",
    "trainer.gradient_checkpointing=true": "actor.recompute",
    "trainer.total_step=1": "trainer.total_steps",
    "actor.optm.lr=1": "actor.optim",
    "trainer.fruit=1": None,
    "data.sky=1": None,
    "rollout.zebra=1": None,
    # A short name is not like another one only because its section is.
    "algorithm.pol=x": None,
    "rollout.nn=1": None,
    "actor.megatron.opt=1": None,
    "algorithm.dynamic_sampling.max=1": None,
    # A typing error of a key of another section.
    "trainer.tensor_parallel_sizes=2": "actor.parallel.tensor_parallel_size",
}


@pytest.mark.parametrize("override", MEANT)
def test_a_hint_names_the_key_that_is_meant_and_no_unrelated_one(override: str, tmp_path: Path) -> None:
    (found,) = hints(tmp_path, override)
    meant = MEANT[override]
    if meant is None:
        assert "; known here: " in found
    else:
        assert f"use {meant}" in found or f"did you mean {meant}?" in found


def test_a_single_file_is_a_list_of_one_and_a_model_is_its_path(tmp_path: Path) -> None:
    source = {"model": "models/m", "data": {"train_files": "a.parquet"}, "teacher": "models/t"}
    config = load_config(PPOConfig, source, ["data.val_files=b.parquet", "critic.model=models/c"])
    assert (config.model.path, config.teacher.path, config.critic.model.path) == (
        *("models/m", "models/t", "models/c"),
    )
    assert (config.data.train_files, config.data.val_files) == (["a.parquet"], ["b.parquet"])
    changed = load_config(PPOConfig, source, ["model=other", "model.dtype=float32"])
    assert (changed.model.path, changed.model.dtype.value) == ("other", "float32")


def test_arguments_of_a_script_may_have_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--rollout-batch-size", "32", "--n-samples-per-prompt=8", "--colocate", "--eps-clip", "0.2"]
    assert main(["check", "configs/quickstart.yaml", "--fast", *given]) == 2
    error = capsys.readouterr().err
    assert "4 problems" in error
    for said in ("trainer.prompts_per_step", "rollout.n", "placement.strategy", "policy_loss.clip_low"):
        assert f"is a slime argument; use {said}" in error or said in error


def test_a_mistyped_option_is_still_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "configs/quickstart.yaml", "--fsat"])
    assert "unrecognized arguments: --fsat" in capsys.readouterr().err
