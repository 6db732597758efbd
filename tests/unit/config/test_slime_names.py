"""The table of slime's arguments: its targets, and the hints of `load_config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.migration import slime_names
from megarl.config.review import schema_keys
from megarl.config.schema import PPOConfig, SFTConfig
from tests.unit.config.test_verl_names import problems

RUN = "model: {path: m}\ndata: {train_files: [a.parquet]}\n"


def test_what_the_table_points_at_exists() -> None:
    known = set(schema_keys(PPOConfig))
    table = slime_names()
    assert [name for name, entry in table.items() if entry.ours is not None and entry.ours not in known] == []
    assert [name for name, entry in table.items() if entry.ours is None and not entry.note] == []
    assert [name for name in table if name in known] == []


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (PPOConfig, "n_samples_per_prompt: 8", "is a slime argument; use rollout.n"),
        (PPOConfig, "pipeline_model_parallel_size: 2", "use actor.parallel.pipeline_parallel_size"),
        (PPOConfig, "offload_train: true", "without a counterpart in megarl: megarl derives"),
        (SFTConfig, "rollout_top_k: 4", "the slime argument for rollout.top_k, which this kind"),
    ],
)
def test_an_argument_of_slime_is_answered(kind: type, text: str, said: str, tmp_path: Path) -> None:
    (problem,) = problems(kind, tmp_path, RUN + text)
    assert said in problem
