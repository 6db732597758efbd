"""One PPO step in plain PyTorch and Hugging Face, token by token in Python, as the reference of the engine's step.

It shares no code with `megarl.algorithms` or torch's optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tests.unit.engine.models import load_critic, load_lm, reference_logits, reference_values, scores_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyperparameters with a large epsilon for Adam.

    Adam's first steps are nearly lr * sign(g), and where g is rounding noise, so is its sign. With an epsilon
    far above that noise, the update is a smooth function of the gradient and can be compared.
    """

    temperature: float = 0.9
    beta: float = 0.05
    gamma: float = 0.97
    lam: float = 0.9
    clip_low: float = 0.2
    clip_high: float = 0.3
    value_clip: float = 0.5
    entropy_coefficient: float = 0.02
    epochs: int = 2
    mini_batches: tuple[tuple[int, ...], ...] = ((0, 2, 4, 6), (1, 3, 5, 7))
    lr: float = 1e-3
    warmup_steps: int = 2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-4
    weight_decay: float = 0.1
    clip_grad: float = 0.3

    @property
    def num_updates(self) -> int:
        return self.epochs * len(self.mini_batches)


class Update(NamedTuple):
    """One optimizer step of one model."""

    loss: float
    grad_norm: float
    clipped: float  # fraction of tokens whose loss is the clipped term


class Outcome(NamedTuple):
    actor: Tensors
    critic: Tensors
    actor_updates: list[Update]
    critic_updates: list[Update]
    log_probs: Tensor  # (B, R), from the new actor
    values: Tensor  # (B, R), from the new critic


class _AdamW:
    """AdamW: decoupled decay (Loshchilov & Hutter 2019) of matrices only, after global-norm clipping."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self._parameters = list(model.parameters())
        self._settings = settings
        self._first = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._count = 0

    @torch.no_grad()
    def step(self, loss: Tensor) -> float:
        """Step down the gradient of `loss` and return its norm before clipping."""
        settings = self._settings
        gradients = torch.autograd.grad(loss, self._parameters)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        self._count += 1
        lr = settings.lr * min(1.0, self._count / settings.warmup_steps)

        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            gradient = gradient * min(1.0, settings.clip_grad / norm)
            for moments, beta, value in zip(
                (self._first, self._second), settings.betas, (gradient, gradient**2), strict=True
            ):
                moments[index] = beta * moments[index] + (1 - beta) * value
            first, second = (
                m[index] / (1 - b**self._count)
                for m, b in zip((self._first, self._second), settings.betas, strict=True)
            )
            if parameter.dim() > 1:
                parameter.mul_(1 - lr * settings.weight_decay)
            parameter.sub_(lr * first / (second.sqrt() + settings.eps))

        return norm


def _valid(mask: Tensor, row: int) -> list[int]:
    return mask[row].nonzero().flatten().tolist()


def _returns_and_advantages(
    scores: Sequence[float], old: Tensor, ref: Tensor, values: Tensor, mask: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return KL-penalized rewards, GAE over the generated tokens, and advantages whitened over the batch."""
    returns = torch.zeros_like(values)
    advantages = torch.zeros_like(values)
    found = []

    for row, score in enumerate(scores):
        advantage = 0.0
        next_value = 0.0
        last = True
        for token in reversed(_valid(mask, row)):
            reward = (score if last else 0.0) - settings.beta * float(old[row, token] - ref[row, token])
            value = float(values[row, token])
            advantage = (
                reward + settings.gamma * next_value - value + settings.gamma * settings.lam * advantage
            )
            returns[row, token] = advantage + value
            advantages[row, token] = advantage
            found.append(advantage)
            next_value = value
            last = False

    mean = sum(found) / len(found)
    variance = sum((advantage - mean) ** 2 for advantage in found) / (len(found) - 1)
    return returns, torch.where(mask, (advantages - mean) / math.sqrt(variance + 1e-8), 0.0)


def _nearest_in(value: Tensor, low: float, high: float) -> float | None:
    """Return the end of the interval that `value` is clipped to, None if it lies inside."""
    return low if value < low else high if value > high else None


def _actor_loss(
    new: Tensors, old: Tensor, advantages: Tensor, mask: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, float]:
    """Return the clipped policy loss without and with the entropy bonus, and the fraction of clipped tokens."""
    policy = torch.zeros(())
    entropy = torch.zeros(())
    clipped = 0
    count = 0

    for row in range(len(mask)):
        for token in _valid(mask, row):
            ratio = (new["log_probs"][row, token] - old[row, token]).exp()
            advantage = advantages[row, token]
            term = ratio * advantage
            limit = _nearest_in(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
            if limit is not None and limit * advantage < term:
                term = limit * advantage
                clipped = clipped + 1
            policy = policy - term
            entropy = entropy + new["entropy"][row, token]
            count = count + 1

    return policy / count, (policy - settings.entropy_coefficient * entropy) / count, clipped / count


def _critic_loss(
    new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, settings: Settings
) -> tuple[Tensor, float]:
    total = torch.zeros(())
    clipped = 0
    count = 0

    for row in range(len(mask)):
        for token in _valid(mask, row):
            value = new[row, token]
            before = float(old[row, token])
            target = returns[row, token]
            error = (value - target) ** 2
            limit = _nearest_in(value, before - settings.value_clip, before + settings.value_clip)
            if limit is not None and (limit - target) ** 2 > error:
                error = (limit - target) ** 2
                clipped = clipped + 1
            total = total + 0.5 * error
            count = count + 1

    return total / count, clipped / count


def run(folders: dict[str, str], batch: Tensors, scores: Sequence[float], settings: Settings) -> Outcome:
    """Run the whole step.

    `folders` has `lm` (the actor), `reference` and `critic`; `scores` are the outcomes of rows.
    """
    actor = load_lm(Path(folders["lm"]))
    frozen = load_lm(Path(folders["reference"]))
    critic = load_critic(Path(folders["critic"]))
    mask = batch["response_mask"]

    def score(model: torch.nn.Module, rows: Tensors) -> Tensors:
        return scores_of(reference_logits(model, rows) / settings.temperature, rows)

    with torch.no_grad():
        old = score(actor, batch)["log_probs"]
        ref = score(frozen, batch)["log_probs"]
        values = reference_values(critic, batch)

    returns, advantages = _returns_and_advantages(scores, old, ref, values, mask, settings)
    actor_optimizer = _AdamW(actor, settings)
    critic_optimizer = _AdamW(critic, settings)
    actor_updates = []
    critic_updates = []

    for _ in range(settings.epochs):
        for rows in map(list, settings.mini_batches):
            part = {key: value[rows] for key, value in batch.items()}
            loss, clipped = _critic_loss(
                reference_values(critic, part), values[rows], returns[rows], mask[rows], settings
            )
            critic_updates.append(Update(float(loss.detach()), critic_optimizer.step(loss), clipped))
            policy, loss, clipped = _actor_loss(
                score(actor, part), old[rows], advantages[rows], mask[rows], settings
            )
            actor_updates.append(Update(float(policy.detach()), actor_optimizer.step(loss), clipped))

    with torch.no_grad():
        new_log_probs = score(actor, batch)["log_probs"]
        new_values = reference_values(critic, batch)

    weights = [
        {name: parameter.detach() for name, parameter in model.named_parameters()}
        for model in (actor, critic)
    ]
    return Outcome(*weights, actor_updates, critic_updates, new_log_probs, new_values)
