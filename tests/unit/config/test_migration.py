"""Keys of other frameworks: their tables, and the hints about unknown keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megarl.cli.main import main
from megarl.config import migration
from megarl.config.load import load_config
from megarl.config.migration import find_verl_key, keys_of, synonyms, trl_names
from megarl.config.schema import SCHEMAS, DPOConfig, PPOConfig, RewardModelRunConfig, SFTConfig
from megarl.config.values import schema_keys
from megarl.machine.errors import ConfigError

# The table of verl's keys: its coverage, its targets, and the hints of `load_config`.

# The leaves of verl's generated ppo_trainer and ppo_megatron_trainer configurations (commit 1dda039b9 of
# August 2026), names only.
VERL_LEAVES = (Path(__file__).parent / "verl_ppo_keys.txt").read_text().split()


def problems(schema: type, folder: Path, text: str, *overrides: str) -> tuple[str, ...]:
    file = folder / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(schema, str(file), overrides)
    return caught.value.problems


def test_what_the_table_of_verl_points_at_exists() -> None:
    known = set(schema_keys(PPOConfig))
    assert [
        (name, key.ours)
        for name, key in keys_of("verl").items()
        if key.ours is not None and key.ours not in known
    ] == []


def test_every_key_of_verls_ppo_trainer_is_in_the_table() -> None:
    assert len(VERL_LEAVES) > 1000
    assert [name for name in VERL_LEAVES if find_verl_key(name) is None] == []


def test_a_key_without_a_counterpart_says_why() -> None:
    assert [name for name, key in keys_of("verl").items() if key.ours is None and not key.note] == []


def test_no_name_has_two_entries() -> None:
    tree = yaml.compose(Path(migration.__file__).with_name("verl_names.yaml").read_text())
    assert [names for names in mappings(tree) if len(names) != len(set(names))] == []


def mappings(node: yaml.Node) -> Iterator[list[str]]:
    """Yield the names of every mapping.

    If a file repeats a name, the parser silently keeps the last one.
    """
    if isinstance(node, yaml.MappingNode):
        yield [name for key, _ in node.value for name in key.value.split(", ")]
        for _, value in node.value:
            yield from mappings(value)


def test_the_table_is_read_only_where_a_key_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: here}\ndata: {train_files: [a.parquet]}\n")
    keys_of.cache_clear()
    load_config(PPOConfig, str(tmp_path / "run.yaml"))
    assert keys_of.cache_info().misses == 0
    problems(PPOConfig, tmp_path, "unheard_of: 1")
    assert keys_of.cache_info().misses == 3  # verl, slime and NeMo RL


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.optim.lr: is a verl key; use actor.optim.lr",
        ),
        ("critic.megatron.tensor_model_parallel_size=2", "use critic.parallel.tensor_parallel_size"),
        (
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
            "use actor.parallel.tensor_parallel_size (the reference",
        ),
        ("algorithm.adv_estimator=grpo", "use algorithm.advantage.estimator"),
        ("trainer.n_gpus_per_node=8", "use placement.devices_per_node"),
        ("data.train_batch_size=1024", "use trainer.prompts_per_step"),
        (
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
            "use rollout.sglang.server_args (such as {mem_fraction_static: 0.5})",
        ),
        ("+actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "use algorithm.policy_loss.kind"),
        ("+data.max_prompt_length=8", "write data.max_prompt_length=..., without a sign before it"),
        (
            "actor_rollout_ref.model.lora.dropout=0.1",
            "without a counterpart in megarl: adapters are configured by",
        ),
        (
            "actor_rollout_ref.actor.megatron.context_parallel_size=2",
            "use actor.parallel.context_parallel_size",
        ),
    ],
)
def test_verls_name_on_the_command_line_gets_ours(tmp_path: Path, override: str, expected: str) -> None:
    found = problems(PPOConfig, tmp_path, "model: {path: here}\ndata: {train_files: [a.parquet]}\n", override)
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].endswith("[command line]")


def test_a_file_of_verls_is_translated_leaf_by_leaf(tmp_path: Path) -> None:
    found = problems(
        PPOConfig,
        tmp_path,
        """
data: {train_files: [a.parquet], train_batch_size: 64}
actor_rollout_ref:
  model: {path: folder, lora: {rank: 0, alpha: 32}}
  actor: {ppo_mini_batch_size: 16, unheard_of: 1}
""",
    )

    # model.path is not said to be missing as well: it was given under its old name.
    assert [problem.partition(":")[0] for problem in found] == [
        "data.train_batch_size",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.lora.rank",
        "actor_rollout_ref.model.lora.alpha",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.unheard_of",
    ]
    assert "use trainer.updates_per_step (the number of updates" in found[4]
    assert "unknown key, also in verl" in found[5]


def test_a_run_of_another_kind_is_not_sent_to_keys_that_it_lacks(tmp_path: Path) -> None:
    text = "model: {path: here}\ndata: {train_files: [a.parquet]}\n"
    (found,) = problems(SFTConfig, tmp_path, text, "actor_rollout_ref.rollout.n=4")
    assert "is the verl key for rollout.n, which this kind of run does not have" in found


def test_a_misspelt_key_of_ours_is_still_answered_with_the_nearest(tmp_path: Path) -> None:
    (found,) = problems(
        PPOConfig, tmp_path, "model: {path: here}\ndata: {train_files: [a.parquet]}\n", "trainer.total_step=4"
    )
    assert "did you mean trainer.total_steps?" in found


def test_signs_of_hydra_before_keys_of_ours_are_answered(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata: {train_files: [a.parquet]}"
    (problem,) = problems(PPOConfig, tmp_path, text, "+trainer.total_steps=1")
    assert problem.startswith("+trainer.total_steps: write trainer.total_steps=..., without a sign before it")


# Hints about unknown keys: the framework is chosen once, then other kinds of run, then what a name means.

RUN = "model: {path: m}\ndata: {train_files: [a.parquet]}\n"
KNOWN = {kind: set(schema_keys(schema)) for kind, schema in SCHEMAS.items()}


def hints(folder: Path, *overrides: str, schema: type = PPOConfig) -> list[str]:
    return [each.removesuffix(" [command line]") for each in problems(schema, folder, RUN, *overrides)]


def test_what_the_tables_point_at_exists() -> None:
    every = set().union(*KNOWN.values())
    assert [
        name for name, (keys, note) in synonyms().items() if not set(keys) <= every or not (keys or note)
    ] == []
    table = keys_of("nemo_rl")
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
        (
            "sglang_cuda_graph_bs=[1]",
            "use rollout.sglang.server_args (such as {cuda_graph_bs_decode: [1, 8]})",
        ),
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


# The table of TRL's arguments: its coverage, its targets, and the hints of `load_config`.

# The fields of these classes in TRL 1.16.0, without those of TrainingArguments, names only.
TRL_FIELDS = (Path(__file__).parent / "trl_names.txt").read_text().split()
TRL_KINDS = {
    "GRPOConfig": PPOConfig,
    "SFTConfig": SFTConfig,
    "DPOConfig": DPOConfig,
    "RewardConfig": RewardModelRunConfig,
}
OF_TRL = {name: set(schema_keys(kind)) for name, kind in TRL_KINDS.items()}


def test_what_the_table_points_at_exists_in_that_kind_of_run() -> None:
    wrong = [
        (of_class, name, entry.ours)
        for of_class, entries in trl_names().items()
        for name, entry in entries.items()
        if entry.ours is not None
        and not any(
            entry.ours in keys for kind, keys in OF_TRL.items() if kind == of_class or of_class not in OF_TRL
        )
    ]
    assert wrong == []


def test_every_field_of_trl_is_in_the_table() -> None:
    assert len(TRL_FIELDS) > 150
    of_all = trl_names()["TrainingArguments"]
    names = [field.split(".") for field in TRL_FIELDS]
    assert [(kind, name) for kind, name in names if name not in trl_names()[kind] | of_all] == []


def test_an_argument_without_a_counterpart_says_why_and_none_is_a_key_of_ours() -> None:
    for entries in trl_names().values():
        assert [name for name, entry in entries.items() if entry.ours is None and not entry.note] == []
        assert [name for name in entries if any(name in keys for keys in OF_TRL.values())] == []


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (PPOConfig, "num_generations: 4", "is a TRL argument; use rollout.n (samples per prompt)"),
        (PPOConfig, "beta: 0.1", "use algorithm.kl.coefficient (with algorithm.kl.where=loss"),
        (DPOConfig, "beta: 0.1", "is a TRL argument; use loss.beta"),
        (
            DPOConfig,
            "loss_type: ipo",
            "is a TRL argument; use loss.kind (one of sigmoid, ipo and sigmoid_norm",
        ),
        (SFTConfig, "loss_type: dft", "without a counterpart in megarl: the loss is nll"),
        (
            SFTConfig,
            "epsilon: 0.2",
            "for algorithm.policy_loss.clip_low, which this kind of run does not have",
        ),
        (RewardModelRunConfig, "center_rewards_coefficient: 0.01", "use loss.center_coefficient"),
        (PPOConfig, "use_peft: true", "is a TRL argument; use actor.lora.rank (null trains all weights)"),
    ],
)
def test_names_of_trl_are_answered_for_the_kind_of_run(
    kind: type, text: str, said: str, tmp_path: Path
) -> None:
    of_kind = "" if kind in (PPOConfig, SFTConfig) else f"kind: {kind().kind.value}\n"  # type: ignore[call-arg]
    (problem,) = problems(kind, tmp_path, f"{of_kind}{RUN}{text}")
    assert f"{text.partition(':')[0]}: " in problem
    assert said in problem


# The table of slime's arguments: its targets, and the hints of `load_config`.


def test_what_the_table_of_slime_points_at_exists() -> None:
    known = set(schema_keys(PPOConfig))
    table = keys_of("slime")
    assert [name for name, entry in table.items() if entry.ours is not None and entry.ours not in known] == []
    assert [name for name, entry in table.items() if entry.ours is None and not entry.note] == []
    assert [name for name in table if name in known] == []


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (PPOConfig, "n_samples_per_prompt: 8", "is a slime argument; use rollout.n"),
        (PPOConfig, "pipeline_model_parallel_size: 2", "use actor.parallel.pipeline_parallel_size"),
        (PPOConfig, "offload_train: true", "without a counterpart in megarl: megarl derives"),
        (SFTConfig, "rollout_temperature: 1", "the slime argument for rollout.temperature, which this kind"),
    ],
)
def test_an_argument_of_slime_is_answered(kind: type, text: str, said: str, tmp_path: Path) -> None:
    (problem,) = problems(kind, tmp_path, RUN + text)
    assert said in problem
