"""User functions that replace an advantage estimator or a policy loss, loaded by reference.

`algorithm.advantage.estimator` and `algorithm.policy_loss.kind` determine the inputs of the function: the
same as those of the built-in estimator or loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Advantages, Estimator
from megarl.algorithms.masked import masked
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, TokenLosses
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import AdvantageConfig, AlgorithmConfig, PolicyLossConfig
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_function

_ESTIMATOR = Expected(
    "advantage estimator",
    "algorithm.advantage.function",
    "def my_estimator(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:",
    positional=2,
)
_LOSS = Expected(
    "policy loss",
    "algorithm.policy_loss.function",
    "def my_loss(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:",
    positional=2,
)


def estimator_of(config: AdvantageConfig) -> Estimator:
    """Return the configured advantage estimator.

    Raises:
        UserFunctionError: The user's function cannot be loaded.
    """
    if config.function is None:
        return ADVANTAGE_ESTIMATORS[config.estimator]

    # Load it again, because the file may have changed between two runs of a process.
    function = _load(config.function, _ESTIMATOR)

    def estimate(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
        # User functions receive padded tensors, whatever the form of the batch.
        padded = inputs.padded()
        mask = inputs.response_mask
        assert isinstance(padded.response_mask, Tensor)
        given: Advantages = function(padded, config)
        _refuse_others(
            given,
            Advantages,
            padded.response_mask,
            f"{config.function} must return Advantages(advantages, returns)",
        )
        # A user function may leave any value in masked slots.
        own = (masked(values, padded.response_mask) for values in given if isinstance(values, Tensor))

        return Advantages(
            *(RaggedTensor.from_padded(x, mask.lengths) if isinstance(mask, RaggedTensor) else x for x in own)
        )

    return estimate


def policy_loss_of(config: PolicyLossConfig) -> PolicyLoss:
    """Return the configured policy loss.

    Raises:
        UserFunctionError: The user's function cannot be loaded.
    """
    kind = POLICY_LOSSES[config.kind]
    if config.function is None:
        return kind
    function = _load_once(config.function, _LOSS)

    def per_token(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
        given: TokenLosses = function(inputs, config)
        _refuse_others(
            given, TokenLosses, inputs.mask, f"{config.function} must return TokenLosses(loss, bounded)"
        )
        return given

    return PolicyLoss(per_token, kind.prepare)


def try_functions(config: AlgorithmConfig) -> None:
    """Call the configured user functions with two samples of one prompt.

    Raises:
        UserFunctionError: A function fails, as it would in a run.
    """
    # The samples differ in length, so that the functions see masked slots.
    mask = torch.tensor([[True, True, True], [True, False, False]])
    zeros = torch.zeros(mask.shape)
    needs = config.advantage.estimator.needs

    if config.advantage.function is not None:
        inputs = AdvantageInputs(
            token_level_rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
            response_mask=mask,
            uid=np.array(["prompt", "prompt"], dtype=object),
            values=zeros if needs.critic else None,
            baseline_scores=zeros[:, 0] if needs.greedy_baseline else None,
            score_parts=zeros[:, :2],
            old_log_probs=zeros if needs.old_log_probs else None,
            sum_pi_squared=zeros if needs.sum_pi_squared else None,
            teacher_log_prob=zeros if needs.teacher else None,
        )
        _try(config.advantage.function, lambda: estimator_of(config.advantage)(inputs, config.advantage))

    if config.policy_loss.function is not None:
        log_probs = torch.full(mask.shape, -1.0, requires_grad=True)
        given = PolicyInputs.of(
            log_probs, zeros - 1.1, torch.tensor([[1.0], [-1.0]]).expand(mask.shape), mask
        )
        losses = _try(
            config.policy_loss.function,
            lambda: policy_loss_of(config.policy_loss).per_token(given, config.policy_loss),
        )
        if not losses.loss.requires_grad:
            raise UserFunctionError(
                f"{config.policy_loss.function}: the loss has no gradient; compute it from inputs.log_probs "
                f"or inputs.ratio"
            )


def _try(reference: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UserFunctionError:
        raise
    except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
        raise UserFunctionError(
            f"{reference} fails for two samples of 3 and 1 tokens: {last_line(error)}"
        ) from error


def _load(reference: str, expected: Expected) -> Callable[..., Any]:
    path, _, name = reference.rpartition(":")
    return load_function(path, name, expected)


# The loss is loaded once per process, because it is used for every micro-batch and the file may change during
# the run.
_load_once = cache(_load)


def _refuse_others(given: Any, expected: type, mask: Tensor, must: str) -> None:
    if not isinstance(given, expected):
        raise UserFunctionError(f"{must}, not a {type(given).__name__}")
    for name, values in given._asdict().items():
        if values is None:
            continue
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserFunctionError(f"{must}, of {tuple(mask.shape)} like the mask, but {name} is {shape}")
