"""User estimators and losses, loaded by reference: they get the inputs of the named kind, and mistakes in
them are reported before a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megarl.algorithms.advantages import AdvantageInputs
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.algorithms.policy_losses import SELECTED_TOKENS
from megarl.algorithms.user_functions import estimator_of, policy_loss_of, try_functions
from megarl.config.finding import Finding
from megarl.config.load import load_config
from megarl.config.rules.machine import code_files
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    PolicyLossConfig,
    PolicyLossKind,
    PPOConfig,
)
from megarl.config.validate import validate
from megarl.machine.user_functions import UserFunctionError

GOOD = """
import torch
from megarl.algorithms.advantages import Advantages
from megarl.algorithms.policy_losses import TokenLosses

def ones(inputs, config):
    advantages = torch.full(inputs.response_mask.shape, float("nan"))
    return Advantages(advantages.masked_fill(inputs.response_mask, 1.0), inputs.values)

def of_selected(inputs, config):
    return TokenLosses(-inputs.log_probs * inputs.selected * config.clip_high, inputs.selected)

def missing_argument(inputs):
    return inputs

def a_tensor(inputs, config):
    return torch.zeros(2, 3)

def of_rows(inputs, config):
    return Advantages(inputs.outcomes, inputs.outcomes)

def no_gradient(inputs, config):
    return TokenLosses(inputs.old_log_probs, inputs.mask)

def divides(inputs, config):
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(GOOD)
    return str(tmp_path / "own.py")


def test_an_estimator_gets_what_the_named_one_gets_and_masked_slots_are_0(file: str) -> None:
    config = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.gae, function=f"{file}:ones")
    )
    try_functions(config)
    mask = torch.tensor([[True, False], [True, True]])
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(2, 2), response_mask=mask, uid=["a", "b"], values=values
    )  # type: ignore[arg-type]
    advantages, returns = estimator_of(config.advantage)(inputs, config.advantage)
    assert advantages.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert returns.tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_an_estimator_is_read_anew_for_the_next_run(file: str) -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(1, 1), response_mask=mask, uid=["a"], values=torch.zeros(1, 1)
    )  # type: ignore[arg-type]
    config = AdvantageConfig(estimator=AdvantageEstimator.gae, function=f"{file}:ones")
    before = estimator_of(config)
    Path(file).write_text(GOOD.replace("inputs.response_mask, 1.0", "inputs.response_mask, 25.0"))
    assert [float(estimate(inputs, config).advantages) for estimate in (before, estimator_of(config))] == [
        1.0,
        25.0,
    ]


def test_a_loss_takes_the_kinds_place_in_the_actors_loss(file: str) -> None:
    """The tokens of clip_cov are selected over the whole mini-batch, as for clip_cov itself."""
    policy = PolicyLossConfig(kind=PolicyLossKind.clip_cov, function=f"{file}:of_selected", clip_high=0.5)
    config = AlgorithmConfig(policy_loss=policy)
    try_functions(config)
    assert (
        policy_loss_of(policy).prepare
        is policy_loss_of(PolicyLossConfig(kind=PolicyLossKind.clip_cov)).prepare
    )
    mask = torch.tensor([[True, True, False]])
    rows = {
        "response_mask": mask,
        "old_log_probs": torch.zeros(1, 3),
        "advantages": torch.ones(1, 3),
        SELECTED_TOKENS: torch.tensor([[False, True, True]]),
    }
    loss, metrics = ActorLoss(algorithm=config, counts=MiniBatchCounts.of(mask))(
        {"log_probs": torch.tensor([[-1.0, -3.0, 9.0]])}, rows
    )
    assert float(loss) == pytest.approx(3.0 * 0.5 / 2)
    assert float(metrics["actor/pg_clipfrac"].value) == 0.5


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        (
            "absent",
            "advantage",
            "advantage estimator 'absent' is not in .*own.py.*set algorithm.advantage.function",
        ),
        (
            "missing_argument",
            "policy_loss",
            r"policy loss missing_argument\(inputs\) in .* cannot be called with 2 values",
        ),
        (
            "a_tensor",
            "policy_loss",
            r"own.py:a_tensor must return TokenLosses\(loss, bounded\), not a Tensor",
        ),
        (
            "of_rows",
            "advantage",
            r"must return Advantages\(advantages, returns\), of \(2, 3\) like the mask, but advantages is "
            r"\(2,\)",
        ),
        (
            "no_gradient",
            "policy_loss",
            "own.py:no_gradient: the loss has no gradient; compute it from inputs.log_probs",
        ),
        (
            "divides",
            "advantage",
            r"own.py:divides fails for two samples of 3 and 1 tokens: ZeroDivisionError: .*\(own.py:\d+\)",
        ),
    ],
)
def test_what_would_fail_in_a_run_is_refused_before(file: str, name: str, section: str, message: str) -> None:
    kinds = {"advantage": AdvantageConfig, "policy_loss": PolicyLossConfig}
    with pytest.raises(UserFunctionError, match=message):
        try_functions(AlgorithmConfig(**{section: kinds[section](function=f"{file}:{name}")}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my_loss", "'my_loss' does not name a function or a class in a file; write it as FILE.py:NAME"),
        ("own.py:", "'own.py:' does not name a function or a class in a file"),
        ("absent.py:my_loss", "algorithm.policy_loss.function: there is no file 'absent.py'"),
    ],
)
def test_check_knows_a_reference(reference: str, message: str) -> None:
    config = load_config(
        PPOConfig, "configs/quickstart.yaml", [f"algorithm.policy_loss.function='{reference}'"]
    )
    found = "\n".join(map(str, [*validate(config), *code_files(config)]))
    assert re.search(re.escape(message), found), found


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.functions=[{path: FILE}]", "reward.functions[0].path"),
        ("reward.functions=[{path: FILE:add}]", "reward.functions[0].path"),
        (
            "reward.judges=[{name: a, prompt: a.jinja, parse: {path: FILE:add}}]",
            "reward.judges[0].parse.path",
        ),
        ("agent.tools=[calculator, FILE:add]", "agent.tools[1]"),
        ("agent.environment=FILE:add", "agent.environment.path"),
        ("agent.harness.function=FILE:add", "agent.harness.function"),
    ],
)
def test_a_missing_file_of_a_function_is_named_without_the_name_in_it(override: str, key: str) -> None:
    (found,) = _files(override, "nowhere.py", key)
    assert str(found).startswith(f"{key}: there is no file 'nowhere.py'")
    assert _files(override, __file__, key) == []


def _files(override: str, file: str, key: str) -> list[Finding]:
    config = load_config(PPOConfig, "configs/quickstart.yaml", [override.replace("FILE", file)])
    return [each for each in code_files(config) if each.keys == (key,)]
