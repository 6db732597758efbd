"""Invalid combinations of algorithm parts are refused with a reason and a hint; valid ones are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.rules.algorithm import policy_loss
from megarl.config.schema import (
    AdvantageEstimator,
    Aggregation,
    AlgorithmConfig,
    PolicyLossConfig,
    PolicyLossKind,
    PPOConfig,
)
from megarl.config.validate import validate
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

GRPO = ("advantage.estimator=grpo",)
CORRECTION = "rollout_correction"


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Four samples per prompt, three updates and two epochs, no critic warm-up.

    Overrides are keys of `algorithm` unless they name another section.
    """
    values = ppo_values(tmp_path)
    values["trainer"]["critic_warmup_steps"] = 0
    path = write_yaml(tmp_path / "run.yaml", values)

    def violations(*overrides: str) -> list[str]:
        sections = ("trainer.", "rollout.", "reward.", "teacher.", "teachers", "data.")
        keys = [
            override if override.startswith(sections) else f"algorithm.{override}" for override in overrides
        ]
        return [str(violation) for violation in validate(load_config(PPOConfig, path, keys))]

    return violations


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_which_estimators_need_several_samples(run: Any, estimator: AdvantageEstimator) -> None:
    """ReMax compares a sample with a greedy one and not with the others.

    It still needs several samples, otherwise half of the work would be for baselines.
    """
    found = [
        message
        for message in run(f"advantage.estimator={estimator.name}", "rollout.n=1")
        if message.startswith("rollout.n")
    ]
    assert len(found) == (estimator.name not in {"gae", "reinforce_plus_plus", "distillation"})
    assert len(found) == (estimator.needs.compares_samples or estimator.name == "remax")

    if estimator.name == "remax":
        assert "with n 1 is half of all responses; use 2 or more" in found[0]
    elif found:
        assert (
            f"{estimator.name} compares the samples of a prompt, but n is 1, so every advantage would be 0; "
            f"use 2 or more" in found[0]
        )


REFUSED = [
    (
        (*GRPO, "trainer.critic_warmup_steps=3"),
        "trainer.critic_warmup_steps, algorithm.advantage.estimator: is 3, but has no effect with "
        "algorithm.advantage.estimator=grpo; set algorithm.advantage.estimator=gae",
    ),
    (
        ("advantage.estimator=gdpo", "kl.where=loss"),
        "reward.functions, algorithm.advantage.estimator: gdpo normalizes several scores separately, but",
    ),
    (
        ("kl.where=reward", "kl.estimator=k3_straight_through"),
        "a penalty in the reward does not have; use k3, or where=loss",
    ),
    (
        ("kl.where=loss", "kl.controller.kind=adaptive"),
        "is adaptive, but has no effect with algorithm.kl.where=loss: it adjusts the penalty in the reward",
    ),
    (
        ("policy_loss.kind=gspo",),
        "algorithm.policy_loss.kind, algorithm.policy_loss.aggregation: gspo requires the aggregation of its "
        "paper, sequence_mean_token_mean or sequence_mean_token_sum, but it is token_mean; use aggregation=sequence_mean_token_mean, or "
        "another kind",
    ),
    (
        ("policy_loss.kind=gpg",),
        "but a step makes 6 updates; use updates_per_step=1 and epochs_per_batch=1, or another kind",
    ),
    (
        ("policy_loss.kind=cispo", "policy_loss.clip_dual=3"),
        "is 3, but has no effect with algorithm.policy_loss.kind=cispo; set algorithm.policy_loss.kind=ppo_clip, "
        "clip_cov",
    ),
    (
        ("policy_loss.aggregation=sequence_mean_token_sum_norm",),
        "divides by the constant norm_tokens, which is null; use data.max_response_length, 8",
    ),
    (
        ("policy_loss.norm_tokens=8",),
        "is 8, but has no effect with algorithm.policy_loss.aggregation=token_mean; set "
        "algorithm.policy_loss.aggregation=sequence_mean_token_sum_norm",
    ),
    (
        ("value_loss.aggregation=sequence_mean_token_sum_norm",),
        "algorithm.value_loss.norm_tokens, algorithm.value_loss.aggregation: sequence_mean_token_sum_norm "
        "divides by the constant",
    ),
    (("policy_loss.covariance.low=5",), "no covariance is above 5 and below 5; use a low below high"),
    ((f"{CORRECTION}.low=3",), "no weight is in [3, 2]; use low <= high"),
    (
        (f"{CORRECTION}.rejection.low=1",),
        "every response would be rejected: none is in [1, 0.01]; use low <= high",
    ),
    (
        (f"{CORRECTION}.rejection.level=batch", f"{CORRECTION}.rejection.estimator=k1"),
        "k1 is negative where the trainer's probability is the larger one; use estimator=k2 or k3",
    ),
    (
        (f"{CORRECTION}.bypass=true", "kl.where=loss", f"{CORRECTION}.level=token"),
        "the ratio of the policy loss already is the importance weight; use level=none and "
        "rejection.estimator=none",
    ),
    (
        (f"{CORRECTION}.bypass=true",),
        "algorithm.rollout_correction.bypass, algorithm.kl.where: the penalty in the reward needs the "
        "trainer's log-probs",
    ),
    (
        (f"{CORRECTION}.bypass=true", "kl.where=loss", "advantage.estimator=optimal_token_baseline"),
        "optimal_token_baseline needs the trainer's probabilities of the samples",
    ),
    (
        ("dynamic_sampling.enabled=true",),
        "but gae does not compare the samples of a prompt and learns from such prompts too; use false, or an "
        "estimator such as grpo",
    ),
    (
        ("dynamic_sampling.enabled=true", "advantage.estimator=remax"),
        "but remax does not compare the samples of a prompt",
    ),
    (
        (*GRPO, "dynamic_sampling.enabled=true", "dynamic_sampling.max_generations=1"),
        "is 1, so the first dropped prompt could not be replaced and would end the run; use 2 or more",
    ),
    (
        ("rollout.validation.n=4", "rollout.validation.temperature=0"),
        "4 greedy samples of a prompt are identical; use n=1",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "expected"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED]
)
def test_a_combination_without_sense(run: Any, overrides: tuple[str, ...], expected: str) -> None:
    (found,) = run(*overrides)
    assert expected in found


@pytest.mark.parametrize("kind", PolicyLossKind)
def test_a_loss_that_its_paper_defines_over_responses_has_no_other_aggregation(kind: PolicyLossKind) -> None:
    mean, total = Aggregation.sequence_mean_token_mean, Aggregation.sequence_mean_token_sum
    own = {"gspo": (mean, total), "gmpo": (mean,), "sapo": (mean,)}.get(kind.name, tuple(Aggregation))
    for aggregation in Aggregation:
        norm_tokens = 8 if aggregation is Aggregation.sequence_mean_token_sum_norm else None
        loss = PolicyLossConfig(kind=kind, aggregation=aggregation, norm_tokens=norm_tokens)
        found = [str(each) for each in policy_loss(PPOConfig(algorithm=AlgorithmConfig(policy_loss=loss)))]
        refused = [f", but it is {aggregation.name}; use aggregation={mean.name}," in each for each in found]
        assert refused == [True] * (aggregation not in own), found


def test_gdpo_reads_no_reward(run: Any, tmp_path: Path) -> None:
    functions = f"reward.functions=[{{path: {tmp_path}/reward.py}}, {{path: {tmp_path}/reward.py:other}}]"
    assert run("advantage.estimator=gdpo", "kl.where=loss", functions) == []
    penalties = run("advantage.estimator=gdpo", "kl.where=reward", "overlong.buffer_share=0.2", functions)
    assert ["has no effect" in message for message in penalties] == [True, True]


ALLOWED = [
    (*GRPO, "dynamic_sampling.enabled=true"),
    ("advantage.estimator=remax", "rollout.n=2", "trainer.prompts_per_step=24"),
    (f"{CORRECTION}.bypass=true", "kl.where=loss"),
    (f"{CORRECTION}.level=sequence", f"{CORRECTION}.kind=mask", f"{CORRECTION}.rejection.estimator=k3"),
    ("policy_loss.kind=gspo", "policy_loss.aggregation=sequence_mean_token_mean"),
    ("policy_loss.kind=gpg", "trainer.updates_per_step=1", "trainer.epochs_per_batch=1"),
    ("policy_loss.kind=dppo_tv", "policy_loss.clip_dual=5"),
    ("policy_loss.aggregation=sequence_mean_token_sum_norm", "policy_loss.norm_tokens=8"),
    ("kl.where=loss", "kl.estimator=k3_straight_through"),
    ("rollout.validation.n=4",),
]


@pytest.mark.parametrize("overrides", ALLOWED, ids=[" ".join(overrides) for overrides in ALLOWED])
def test_a_combination_with_sense(run: Any, overrides: tuple[str, ...]) -> None:
    assert run(*overrides) == []


@pytest.fixture
def distilled(run: Any, tmp_path: Path) -> Any:
    """A run with a teacher. Overrides come after those of the algorithm."""
    folder = model_folder(tmp_path / "teacher", hidden_size=64, vocab_size=128)
    base = ("advantage.estimator=distillation", "kl.where=none", f"teacher.path={folder}")
    return lambda *overrides: run(*base, *overrides)


def test_a_teacher_may_have_another_size_and_a_longer_vocabulary(distilled: Any) -> None:
    assert distilled() == []
    assert distilled("rollout.n=1", "trainer.prompts_per_step=48") == []
    assert distilled("advantage.distillation.reward_weight=0.5", "kl.where=reward") == []
    assert distilled("kl.where=loss") == []
    assert distilled("advantage.distillation.top_k=101", "advantage.distillation.kl=forward") == []
    assert distilled("advantage.distillation.top_k=8", f"{CORRECTION}.bypass=true") == []


DISTILLATION_REFUSED = [
    (("teacher.path=null",), "teacher.path, algorithm.advantage.estimator: distillation needs a teacher"),
    (("kl.where=reward",), "with reward_weight 0 the rewards are not read, so a penalty in them has no"),
    (("overlong.buffer_share=0.5",), "so a penalty in them has no effect; use 0, or a reward_weight above 0"),
    (
        ("advantage.distillation.reward_weight=1", "rollout.n=1", "trainer.prompts_per_step=48"),
        "the rewards of the samples of a prompt are compared, but n is 1, so they have no effect",
    ),
    (
        ("advantage.distillation.top_k=102",),
        "algorithm.advantage.distillation.top_k, model.path: is 102, but the policy has vocab_size 101; use at "
        "most 101, typically 16 to 256",
    ),
    (("advantage.distillation.top_k=0",), "algorithm.advantage.distillation.top_k: is 0, but must be at"),
    (
        ("advantage.distillation.kl=forward",),
        "algorithm.advantage.distillation.kl, algorithm.advantage.distillation.top_k: is forward, but has no "
        "effect with algorithm.advantage.distillation.top_k=null: samples of the policy estimate",
    ),
    (("advantage.distillation.coefficient=0",), "algorithm.advantage.distillation.coefficient: is 0"),
    (("teacher.parallel.tensor_parallel_size=3",), "teacher.parallel.tensor_parallel_size: num_attention"),
    (("teacher.micro_batch.max_tokens=8",), "teacher.micro_batch.max_tokens, data.max_prompt_length"),
    (
        (f"{CORRECTION}.bypass=true",),
        "distillation needs the trainer's probabilities of the samples, which bypass does not compute",
    ),
    (("dynamic_sampling.enabled=true",), "distillation does not compare the samples of a prompt"),
]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    DISTILLATION_REFUSED,
    ids=[" ".join(overrides) for overrides, _ in DISTILLATION_REFUSED],
)
def test_a_distillation_without_sense(distilled: Any, overrides: tuple[str, ...], expected: str) -> None:
    (found,) = distilled(*overrides)
    assert expected in found


def test_teachers_of_data_sources(distilled: Any, tmp_path: Path) -> None:
    """Without `teacher`, they are enough; the training files tell whether they score everything."""
    folder = model_folder(tmp_path / "math", hidden_size=64, vocab_size=128)
    good = f"{{name: math, path: {folder}, data_sources: [gsm8k, aime]}}"
    assert distilled(f"teachers=[{good}]") == []
    assert distilled("teacher.path=null", f"teachers=[{good}]") == []

    smaller = model_folder(tmp_path / "smaller", vocab_size=100)
    unnamed = "{name: a-b, data_sources: [gsm8k]}"
    same = f"{{name: math, path: {folder}, micro_batch: {{max_tokens: 8}}}}"
    found = distilled(f"teachers=[{good}, {unnamed}, {same}]")
    assert found[:5] == [
        "teachers[1].name: is 'a-b', but is part of the role teacher_<name>; use letters, digits and '_'",
        "teachers[1].path: is null; give the folder of a model with the policy's tokenizer",
        "teachers[1].data_sources: contains 'gsm8k', which teachers[0] scores; a sample has one teacher, so "
        "remove it from one of them",
        "teachers[2].name: is 'math', the name of teachers[0]; use another",
        "teachers[2].data_sources: is empty, so the teacher would score nothing; list values of the column "
        "data_source, or use the section `teacher`, which scores all other samples",
    ]
    assert found[5].startswith("teachers[2].micro_batch.max_tokens, data.max_prompt_length")
    other = f"{{name: code, path: {smaller}, data_sources: [apps]}}"
    (vocabulary,) = distilled(f"teachers=[{good}, {other}]")
    assert vocabulary.startswith(
        "teachers[1].path, model.path: the teacher_code has vocab_size 100, the policy"
    )


def test_a_teacher_of_fewer_tokens_than_the_policy(run: Any, distilled: Any, tmp_path: Path) -> None:
    smaller = model_folder(tmp_path / "smaller", vocab_size=100)
    (found,) = distilled(f"teacher.path={smaller}")
    assert found.startswith("teacher.path, model.path: the teacher has vocab_size 100, the policy 101")


def test_distillation_needs_no_reward_unless_it_is_weighted(distilled: Any, tmp_path: Path) -> None:
    """Without rewards, validation has nothing to report."""
    none = "reward.functions=[]"
    assert distilled(none) == []
    (found,) = distilled(none, "advantage.distillation.reward_weight=1")
    assert found.startswith("reward.functions, reward.model.path: there are neither functions nor a model")
    (found,) = distilled(none, f"data.val_files=[{tmp_path}/train.parquet]")
    assert found.startswith("data.val_files, reward.functions: nothing scores the responses")


def test_a_teacher_that_no_estimator_reads_is_refused_and_not_checked_further(run: Any) -> None:
    (problem,) = run("teacher.path=nowhere", "teacher.parallel.tensor_parallel_size=3")
    assert "have no effect with algorithm.advantage.estimator=" in problem
