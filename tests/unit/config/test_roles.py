"""The models of a run, and whether its update scores the samples itself."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.roles import model_roles, scores_in_update
from megarl.config.schema import PPOConfig

QUICKSTART = "configs/quickstart.yaml"


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_a_coefficient_of_0_needs_no_reference(where: str) -> None:
    def roles(coefficient: float) -> set[str]:
        config = load_config(
            PPOConfig, QUICKSTART, [f"algorithm.kl.where={where}", f"algorithm.kl.coefficient={coefficient}"]
        )
        return {role.name for role in model_roles(config)}

    assert roles(0.1) - roles(0.0) == {"reference"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["algorithm.kl.where=loss"], True),
        (["algorithm.kl.where=reward"], False),
        (["algorithm.kl.where=reward", "algorithm.kl.coefficient=0"], True),
        (["algorithm.rollout_correction.level=token"], True),
        (["algorithm.rollout_correction.rejection.estimator=k3"], False),
        (["algorithm.rollout_correction.bypass=true"], False),
        (["algorithm.advantage.estimator=optimal_token_baseline"], False),
        (["algorithm.advantage.estimator=distillation", "teacher.path=t"], False),
        (["algorithm.advantage.estimator=distillation", "algorithm.advantage.distillation.top_k=4"], True),
        (["algorithm.policy_loss.kind=clip_cov"], False),
        (["algorithm.policy_loss.kind=kl_cov"], False),
        (["algorithm.entropy_coefficient=0.1"], True),
        (["trainer.updates_per_step=2"], False),
        (["trainer.epochs_per_batch=2"], False),
    ],
)
def test_a_single_update_scores_its_samples_where_nobody_reads_that_before(
    overrides: list[Any], expected: bool
) -> None:
    base = [
        "algorithm=grpo",
        "algorithm.kl.where=none",
        "trainer.updates_per_step=1",
        "trainer.epochs_per_batch=1",
    ]
    config = load_config(PPOConfig, QUICKSTART, [*base, *overrides])
    assert scores_in_update(config.algorithm, one_update=config.trainer.one_update) is expected
