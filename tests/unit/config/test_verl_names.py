"""The table of verl's keys: its coverage, its targets, and the hints of `load_config`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megarl.config import migration
from megarl.config.load import load_config
from megarl.config.migration import find_verl_key, verl_keys
from megarl.config.review import schema_keys
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.machine.errors import ConfigError

# The leaves of verl's generated ppo_trainer and ppo_megatron_trainer configurations (commit 1dda039b9 of
# August 2026), names only.
VERL_LEAVES = (Path(__file__).parent / "verl_ppo_keys.txt").read_text().split()


def problems(schema: type, folder: Path, text: str, *overrides: str) -> tuple[str, ...]:
    file = folder / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(schema, str(file), overrides)
    return caught.value.problems


def test_what_the_table_points_at_exists() -> None:
    known = set(schema_keys(PPOConfig))
    assert [
        (name, key.ours)
        for name, key in verl_keys().items()
        if key.ours is not None and key.ours not in known
    ] == []


def test_every_key_of_verls_ppo_trainer_is_in_the_table() -> None:
    assert len(VERL_LEAVES) > 1000
    assert [name for name in VERL_LEAVES if find_verl_key(name) is None] == []


def test_a_key_without_a_counterpart_says_why() -> None:
    assert [name for name, key in verl_keys().items() if key.ours is None and not key.note] == []


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
    verl_keys.cache_clear()
    load_config(PPOConfig, str(tmp_path / "run.yaml"))
    assert verl_keys.cache_info().misses == 0
    problems(PPOConfig, tmp_path, "unheard_of: 1")
    assert verl_keys.cache_info().misses == 1


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
            "actor_rollout_ref.model.lora.rank=8",
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
        "actor_rollout_ref.model.lora",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.unheard_of",
    ]
    assert "use trainer.updates_per_step (the number of updates" in found[3]
    assert "unknown key, also in verl" in found[4]


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
