"""Which models a run has, and what each of them is configured by. The one place that knows when a role is needed."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import (
    AlgorithmConfig,
    ExpertsConfig,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    RejectionEstimator,
    SFTConfig,
)

REWARD_MODEL = "reward_model"
ENVIRONMENT = "environment"  # the processes that answer an agent's turns


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """One model of a run. `*_key`: the dotted configuration keys that a message should name. `optim` is None where nothing is trained.
    `with_value_head`: its output is one number per token. `beside`: the role whose devices it has unless a placement says otherwise."""

    name: str
    path: str
    path_key: str
    parallel: ParallelConfig
    parallel_key: str
    micro_batch: MicroBatchConfig
    micro_batch_key: str
    optim: OptimConfig | None
    recomputation: Recomputation = Recomputation()
    experts: ExpertsConfig = ExpertsConfig()
    with_value_head: bool = False
    beside: str | None = None

    @property
    def reads_policy_tokens(self) -> bool:
        """All but the reward model, which has a tokenizer of its own."""
        return self.name != REWARD_MODEL


def needs_reference(config: PPOConfig) -> bool:
    return config.algorithm.kl.in_reward or config.algorithm.kl.in_loss


def needs_critic(config: PPOConfig) -> bool:
    return config.algorithm.advantage.estimator.needs.critic


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether scoring gives the sum of the squared probabilities at each token."""
    return algorithm.advantage.estimator.needs.sum_pi_squared


def scores_in_update(algorithm: AlgorithmConfig, *, one_update: bool) -> bool:
    """Whether the trainer's log-probs of the samples are those of the update's own pass: a step has no other update, and nothing reads them
    before it."""
    is_read = (
        algorithm.kl.in_reward
        or algorithm.rollout_correction.rejection.estimator is not RejectionEstimator.none  # it changes what the loss is divided by
        or algorithm.advantage.estimator.needs.old_log_probs
        or algorithm.policy_loss.kind.needs.whole_mini_batch
    )
    return one_update and not (is_read or algorithm.rollout_correction.bypass)


def needs_reward_model(config: PPOConfig) -> bool:
    return config.reward.model.path is not None


def model_roles(config: PPOConfig | SFTConfig) -> tuple[ModelRole, ...]:
    """The Megatron roles in the order actor, reference, critic, reward_model, without those that the run does not need."""
    actor = ModelRole(
        name="actor",
        path=config.model.path,
        path_key="model.path",
        parallel=config.actor.parallel,
        parallel_key="actor.parallel",
        micro_batch=config.actor.micro_batch,
        micro_batch_key="actor.micro_batch",
        optim=config.actor.optim,
        recomputation=config.actor.recomputation,
        experts=config.actor.experts,
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
            micro_batch_key="reference.micro_batch",
            optim=None,
            beside="actor",
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
            micro_batch_key="critic.micro_batch",
            optim=config.critic.optim,
            recomputation=config.critic.recomputation,
            experts=config.critic.experts,
            with_value_head=True,
        )
        roles.append(critic)
    if isinstance(config, PPOConfig) and (path := config.reward.model.path) is not None:
        reward_model = ModelRole(
            name=REWARD_MODEL,
            path=path,
            path_key="reward.model.path",
            parallel=config.reward.model.parallel,
            parallel_key="reward.model.parallel",
            micro_batch=config.reward.model.micro_batch,
            micro_batch_key="reward.model.micro_batch",
            optim=None,
            with_value_head=True,
            beside="critic" if needs_critic(config) else "reward",
        )
        roles.append(reward_model)
    return tuple(roles)
