"""The table of TRL's arguments: its coverage, its targets, and the hints of `load_config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.migration import trl_names
from megarl.config.review import schema_keys
from megarl.config.schema import DPOConfig, PPOConfig, RewardModelRunConfig, SFTConfig
from tests.unit.config.test_verl_names import problems

# The fields of these classes in TRL 1.16.0, without those of TrainingArguments, names only.
FIELDS = (Path(__file__).parent / "trl_names.txt").read_text().split()
KINDS = {
    "GRPOConfig": PPOConfig,
    "SFTConfig": SFTConfig,
    "DPOConfig": DPOConfig,
    "RewardConfig": RewardModelRunConfig,
}
KNOWN = {name: set(schema_keys(kind)) for name, kind in KINDS.items()}
RUN = "model: {path: m}\ndata: {train_files: [a.parquet]}\n"


def test_what_the_table_points_at_exists_in_that_kind_of_run() -> None:
    wrong = [
        (of_class, name, entry.ours)
        for of_class, entries in trl_names().items()
        for name, entry in entries.items()
        if entry.ours is not None
        and not any(
            entry.ours in keys for kind, keys in KNOWN.items() if kind == of_class or of_class not in KNOWN
        )
    ]
    assert wrong == []


def test_every_field_of_trl_is_in_the_table() -> None:
    assert len(FIELDS) > 150
    of_all = trl_names()["TrainingArguments"]
    names = [field.split(".") for field in FIELDS]
    assert [(kind, name) for kind, name in names if name not in trl_names()[kind] | of_all] == []


def test_an_argument_without_a_counterpart_says_why_and_none_is_a_key_of_ours() -> None:
    for entries in trl_names().values():
        assert [name for name, entry in entries.items() if entry.ours is None and not entry.note] == []
        assert [name for name in entries if any(name in keys for keys in KNOWN.values())] == []


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
