"""`megarl migrate`: the file is a valid configuration with comments, and what is missing in it is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.load import read_config
from megarl.config.schema import RunConfig
from tests.unit.config.test_foreign import NEMO, NEMO_BASE, SHAPE, SLIME, TRL, VERL

OPEN = {
    "total_steps: ???": "total_steps: 10",
    "train_files: ???": "train_files: [rows.jsonl]",
    "path: '???'": "path: reward.py",
    "pipeline_layout: ???": "pipeline_layout: [3, 5]",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name, text in {
        "verl.sh": VERL,
        "slime.sh": SLIME,
        "models/tiny.sh": SHAPE,
        "trl.sh": TRL,
        "base.yaml": NEMO_BASE,
        "nemo_rl.yaml": NEMO,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["verl.sh", "slime.sh", "trl.sh", "nemo_rl.yaml"])
def test_the_file_is_a_configuration(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", name]) == 0
    text, summary = capsys.readouterr()
    assert re.search(r"\d+ of \d+ settings carried over or answered", summary.splitlines()[-1])
    assert text.startswith("# Converted from ")

    # Only the placeholders are missing, and `megarl check` names each of them.
    problems = read_config(RunConfig, yaml.safe_load(text)).problems
    assert all("'???'" in each or "is required" in each for each in problems), problems
    for placeholder, value in OPEN.items():
        text = text.replace(placeholder, value)
    (folder / "run.yaml").write_text(text)
    loaded = read_config(RunConfig, "run.yaml")
    assert loaded.problems == ()
    assert loaded.config.placement.devices_per_node in (None, 4, 8)


VERL_START = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
SLIME_START = "python train.py --hf-checkpoint m --prompt-data a.jsonl --rollout-batch-size 8 "
TRL_START = "trl grpo --model_name_or_path m --dataset_name d "


@pytest.mark.parametrize(
    ("name", "text", "output_dir", "keep"),
    [
        ("a.sh", f"{VERL_START} trainer.default_local_dir=/ckpt/x trainer.save_freq=5", "/ckpt/x", 0),
        (
            "b.sh",
            f"{VERL_START} trainer.project_name='my math' trainer.experiment_name=7b trainer.save_freq=5 "
            "trainer.max_actor_ckpt_to_keep=3",
            "outputs/my-math/7b",
            3,
        ),
        ("c.sh", f"{VERL_START} trainer.save_freq=5 trainer.max_actor_ckpt_to_keep=null", "outputs/c", 0),
        ("d.sh", f"{VERL_START} trainer.save_freq=-1", "outputs/d", None),
        ("e.sh", f"{SLIME_START} --save /ckpt/y --save-interval 20", "/ckpt/y", 0),
        ("f.sh", f"{SLIME_START} --wandb-group dapo", "outputs/dapo", None),
        ("g.sh", f"{TRL_START} --output_dir out/z --save_steps 10 --save_total_limit 4", "out/z", 4),
        ("h.sh", f"{TRL_START} --save_steps 10", "outputs/h", 0),
    ],
)
def test_each_run_has_a_folder_and_a_number_of_checkpoints(
    name: str,
    text: str,
    output_dir: str,
    keep: int | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / name).write_text(text + "\n")
    assert main(["migrate", name]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["trainer"]["output_dir"] == output_dir
    assert values.get("checkpoint", {}).get("keep") == keep
    assert "dir" not in values.get("checkpoint", {})


def test_the_summary_lists_what_the_user_has_to_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text(f"{VERL_START} trainer.total_epochs=3\n")
    assert main(["migrate", "run.sh"]) == 0
    text, summary = capsys.readouterr()
    said = "settings carried over or answered; 2 values for you to set: "
    listed = summary.splitlines()[-1].partition(said)[2].split(", ")
    assert sorted(listed) == ["reward.functions", "trainer.total_steps"]
    assert said in text.splitlines()[0]
    assert text.count("???") == 3  # one is in the comment at the top


def test_comments_name_the_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "verl.sh", "--output", "run.yaml"]) == 0
    text = (folder / "run.yaml").read_text()
    assert "updates_per_step: 4 # actor_rollout_ref.actor.ppo_mini_batch_size=128" in text
    assert "betas: [0.9, 0.999] # verl's default: actor_rollout_ref.actor.optim.betas=[0.9, 0.999]" in text
    assert "#   trainer.made_up" in text
    output, summary = capsys.readouterr()
    assert output == ""
    assert "run.yaml: written" in summary
    assert "to set: trainer.total_steps" in summary
    assert "not converted: trainer.made_up" in summary
    assert (
        "actor.optim.betas: [0.9, 0.999] is verl's default, which is kept; megarl's is [0.9, 0.95]" in summary
    )


def test_a_file_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text("mine\n")
    assert main(["migrate", "verl.sh", "--output", "run.yaml"]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    assert (folder / "run.yaml").read_text() == "mine\n"
    assert main(["migrate", "verl.sh", "--output", "absent/run.yaml"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_preset_that_fits_exactly(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "trl grpo --model_name_or_path m --dataset_name d --learning_rate 1e-6 --max_steps 4 "
    command += "--importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --num_generations 4"
    (folder / "run.sh").write_text(command)
    assert main(["migrate", "run.sh"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"] == "gspo"

    (folder / "run.sh").write_text(command.replace("4e-4", "5e-4"))
    assert main(["migrate", "run.sh"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)["algorithm"]
    assert found["policy_loss"] == {
        "kind": "gspo",
        "clip_low": 3e-4,
        "clip_high": 5e-4,
        "aggregation": "sequence_mean_token_mean",
    }


def test_values_without_a_counterpart_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key that would be refused becomes a comment with the reason."""
    command = VERL.replace("trainer.made_up=1", "trainer.critic_warmup=3 'trainer.logger=[console,clearml]'")
    command = command.replace(
        "optim.lr=1e-6", "optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_scheduler_type=wsd"
    )
    (folder / "run.sh").write_text(command)
    assert main(["migrate", "run.sh"]) == 0
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert "critic_warmup_steps" not in values["trainer"]
    assert values["tracking"]["loggers"] == ["console"]
    assert "decay" not in values["actor"]["optim"]
    assert "trainer.critic_warmup=3: trainer.critic_warmup_steps" in text
    assert "lr_scheduler_type=wsd: has no counterpart" in text


def test_secrets_of_a_script_are_not_copied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"HF_TOKEN=hf_1 {SLIME_START} --use-wandb --wandb-key abc123 --wandb-team us"
    (folder / "run.sh").write_text(command)
    assert main(["migrate", "run.sh"]) == 0
    text, summary = capsys.readouterr()
    assert "HF_TOKEN" in text
    assert "wandb_key, wandb_team=us: " in text
    assert "hf_1" not in text + summary
    assert "abc123" not in text + summary


def test_a_variable_of_the_environment_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text(VERL.replace("nodes=2", "nodes=$NODES_OF_NOBODY"))
    assert main(["migrate", "run.sh"]) == 0
    text, summary = capsys.readouterr()
    assert "num_nodes: ${oc.env:NODES_OF_NOBODY}" in text
    assert "data_parallel_size: ???" in text
    assert "to set: the environment variable NODES_OF_NOBODY, which placement.num_nodes reads" in summary


def test_an_unknown_framework_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text("echo nothing\n")
    assert main(["migrate", "run.sh"]) == 2
    assert "no setting of verl, slime, TRL or NeMo RL was found" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["migrate", "run.sh", "--from", "other"])
