"""Which models a run has, and what each of them is configured by. The one place that knows when a role is needed."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import (
    AdvantageEstimator,
    AlgorithmConfig,
    KLWhere,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    SFTConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """One model of a run. `*_key`: the dotted configuration keys that a message should name. `optim` is None where nothing is trained."""

    name: str
    path: str
    path_key: str
    parallel: ParallelConfig
    parallel_key: str
    micro_batch: MicroBatchConfig
    optim: OptimConfig | None


def needs_reference(config: PPOConfig) -> bool:
    return config.algorithm.kl.where is not KLWhere.none


def needs_critic(config: PPOConfig) -> bool:
    return config.algorithm.advantage.estimator is AdvantageEstimator.gae


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether scoring gives the sum of the squared probabilities at each token."""
    return algorithm.advantage.estimator.name == "optimal_token_baseline"


def model_roles(config: PPOConfig | SFTConfig) -> tuple[ModelRole, ...]:
    """The Megatron roles in the order actor, reference, critic, without those that the run does not need."""
    actor = ModelRole(
        name="actor",
        path=config.model.path,
        path_key="model.path",
        parallel=config.actor.parallel,
        parallel_key="actor.parallel",
        micro_batch=config.actor.micro_batch,
        optim=config.actor.optim,
    )
    roles = [actor]
    if isinstance(config, PPOConfig) and needs_reference(config):
        reference = ModelRole(
            name="reference",
            path=config.reference.path or config.model.path,
            path_key="reference.path" if config.reference.path else "model.path",
            parallel=config.actor.parallel,  # it lives in the actor's processes
            parallel_key="actor.parallel",
            micro_batch=config.reference.micro_batch,
            optim=None,
        )
        roles.append(reference)
    if isinstance(config, PPOConfig) and needs_critic(config):
        critic = ModelRole(
            name="critic",
            path=config.critic.model.path or config.model.path,
            path_key="critic.model.path" if config.critic.model.path else "model.path",
            parallel=config.critic.parallel,
            parallel_key="critic.parallel",
            micro_batch=config.critic.micro_batch,
            optim=config.critic.optim,
        )
        roles.append(critic)
    return tuple(roles)
