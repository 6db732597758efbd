"""PPO: the loop, and what happens between its phases on the driver (KL penalty, advantages, metrics)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algorithms.kl import KL_CONTROLLERS, apply_kl_penalty, kl_per_token, sequence_mean_kl
from megarl.algorithms.masked import masked_mean
from megarl.algorithms.metrics import data_metrics
from megarl.algorithms.reward_metrics import reward_model_metrics
from megarl.config.schema import AlgorithmConfig, KLControllerKind, KLWhere, PPOConfig
from megarl.controller.futures import gather
from megarl.data.loader import BatchLoader
from megarl.protocol.batch import DataProto
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.log_prob_gate import LogProbGate
from megarl.trainers.monitor import Monitor
from megarl.workers.roles import valid_token_count
from megarl.workers.start import PPORoles

Metrics = dict[str, float]


class PPOTrainer:
    """Reads as the algorithm: `train_step` is one step of PPO."""

    def __init__(
        self,
        config: PPOConfig,
        roles: PPORoles,
        prompts: BatchLoader,
        evaluation: Evaluation | None,
        monitor: Monitor,
        checkpoints: Checkpointer,
    ) -> None:
        self.config = config
        self.roles = roles
        self.prompts = prompts
        self.evaluation = evaluation
        self.monitor = monitor
        self.checkpoints = checkpoints
        self._advantages = AdvantageStep(config.algorithm)
        self._check_log_probs = LogProbGate(config.resharding.max_log_prob_difference)

    def fit(self) -> None:
        """Trains up to `trainer.total_steps`; validates before, every so often, and at the end."""
        trainer = self.config.trainer
        self.roles.actor.sync_weights(self.roles.rollout)
        self.roles.drain_metrics()  # of the first push, which has waited for processes to start
        if trainer.validate_before and self.checkpoints.is_at_start:
            self._validate(0)
        for step in self.checkpoints.steps():
            with self.monitor.step(step):
                self.monitor.record(self.train_step(next(self.prompts), step))
                if step == trainer.total_steps or (trainer.validate_every_steps and step % trainer.validate_every_steps == 0):
                    self._validate(step)
                self.checkpoints.save(step, self.state_dict)

    def state_dict(self) -> dict[str, Any]:
        """What the driver knows between two steps, as JSON can hold it; the models' state is theirs."""
        return {
            "trainer": "ppo",
            "data": self.prompts.state_dict(),
            "kl_controller": {"kind": self.config.algorithm.kl.controller.kind.value, **self._advantages.kl_controller.state_dict()},
            "weight_version": self.roles.actor.weight_version,
            "validations": self.monitor.validations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `fit`. Raises ValueError where the data are others."""
        self.prompts.load_state_dict(state["data"])
        controller = self.config.algorithm.kl.controller.kind
        if controller is not KLControllerKind.fixed and state["kl_controller"]["kind"] == controller.value:
            self._advantages.kl_controller.load_state_dict(state["kl_controller"])  # a fixed one is as the configuration says
        self.roles.actor.resume_version(state["weight_version"])
        self.monitor.validations = [(step, score) for step, score in state["validations"]]

    def train_step(self, prompts: DataProto, step: int) -> Metrics:
        """One step: samples, their scores, advantages, updates of both models, and the new weights to the rollout."""
        roles, phase = self.roles, self.monitor.phase
        trains_actor = step > self.config.trainer.critic_warmup_steps

        batch = roles.rollout.generate(prompts, self.config.rollout.training, step)
        scores = [roles.reward.score(batch), roles.actor.log_probs(batch)]
        if roles.reference:
            scores.append(roles.reference.log_probs(batch))
        if roles.critic:
            scores.append(roles.critic.values(batch))
        batch = batch.union(*scores)  # the roles work side by side where their pools differ
        self._check_log_probs(batch)
        with phase("adv"):
            batch, metrics = self._advantages(batch)
        updates = []
        if roles.critic:
            updates.append(roles.critic.update(batch, step))
        if trains_actor:
            updates.append(roles.actor.update(batch, step))
        for result in gather(*updates):
            metrics |= result
        if trains_actor:
            with phase("update_weights"):
                roles.actor.sync_weights(roles.rollout)
        return metrics | self._batch_metrics(batch) | roles.drain_metrics()

    def _batch_metrics(self, batch: DataProto) -> Metrics:
        """`actor/entropy`: of the policy that wrote the samples, in nats, a mean over the response tokens."""
        tensors = batch.tensors
        metrics = data_metrics(tensors, self.config.data.max_response_length)
        metrics["actor/entropy"] = float(masked_mean(tensors["entropys"], tensors["response_mask"]))
        metrics["reward/error_rate"] = batch.meta_info["reward/error_rate"]
        metrics |= reward_model_metrics(batch.tensors)
        metrics["num_tokens"] = float(valid_token_count(batch))
        return metrics

    def _validate(self, step: int) -> None:
        if self.evaluation:
            with self.monitor.testing():
                result = self.evaluation.run(self.roles.rollout, self.roles.reward)
            self.monitor.record_validation(result, step)


class AdvantageStep:
    """From scores to advantages and returns: the KL penalty in the reward, then the estimator. Keeps the KL controller."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.kl_controller = KL_CONTROLLERS[algorithm.kl.controller.kind](algorithm.kl)

    def __call__(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Adds `token_level_rewards`, `advantages`, `returns` (B, R).

        Metrics: `actor/reward_kl_penalty`, the mean KL per token over rows (sequence_mean_kl), and its coefficient before the update.
        """
        tensors, metrics = batch.tensors, {}
        scores, mask = tensors["token_level_scores"], tensors["response_mask"]
        rewards = torch.where(mask, scores, 0.0)
        if "ref_log_prob" in tensors:
            config, beta = self._algorithm.kl, self.kl_controller.coefficient
            old, reference = tensors["old_log_probs"], tensors["ref_log_prob"]
            kl = sequence_mean_kl(kl_per_token(old, reference, mask, config.estimator), mask)
            metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": beta}
            if config.where is KLWhere.reward:
                rewards = apply_kl_penalty(scores, old, reference, mask, beta, config.estimator)
                self.kl_controller.update(kl, len(batch))
        inputs = AdvantageInputs(
            token_level_rewards=rewards, response_mask=mask, uid=batch.non_tensor_batch["uid"], values=tensors.get("values")
        )
        estimate = ADVANTAGE_ESTIMATORS[self._algorithm.advantage.estimator](inputs, self._algorithm.advantage)
        added = {"token_level_rewards": rewards, "advantages": estimate.advantages, "returns": estimate.returns}
        return batch.union(DataProto.from_dict(added)), metrics
