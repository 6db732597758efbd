"""The reward role: the user's functions and a reward model; a sample's score is their weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.scores import place_scores
from megarl.batch.data_proto import DataProto
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import ParallelConfig, RewardConfig
from megarl.controller.futures import DerivedFuture
from megarl.controller.group import RoleGroup
from megarl.data.packing import plan_micro_batches
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.workers.reward import RewardWorker
from megarl.workers.reward_model import RewardModelWorker


def score_weights(config: RewardConfig) -> list[float]:
    """Of the K `score_parts`."""
    of_model = [] if config.model.path is None else [config.model.weight]
    return [*(function.weight for function in config.functions), *of_model]


class Reward:
    def __init__(self, group: RoleGroup, model: RewardModel | None = None, model_weight: float = 1.0) -> None:
        self.group = group
        self.model = model
        self._model_weight = model_weight

    def score(self, batch: DataProto) -> DerivedFuture:
        """See RewardWorker.score. With a model, the scores are those of the functions plus `model_weight` times the model's, and there are
        `reward_function_scores` (B,) and what RewardModelWorker.score_conversations gives beside them; the model's are the last of
        `score_parts`."""
        needed = batch.select(["responses", "response_mask"], ["uid", "data_source", "reward_model", "extra_info"])
        functions = self.group.call(RewardWorker.score, needed)
        if self.model is None:
            return DerivedFuture([functions], lambda results: results[0])
        mask = batch.tensors["response_mask"]
        return DerivedFuture([functions, self.model.score(batch)], lambda results: self._sum(results, mask))

    def _sum(self, results: list[Any], mask: torch.Tensor) -> DataProto:
        functions, model = results
        of_functions = torch.tensor(functions.non_tensor_batch["score"].tolist(), dtype=torch.float32)
        scores = of_functions + self._model_weight * model.tensors["reward_model_scores"]
        return DataProto.from_dict(
            {
                "token_level_scores": place_scores(scores, mask),
                "score_parts": torch.cat([functions.tensors["score_parts"], model.tensors["reward_model_scores"][:, None]], dim=1),
                "reward_function_scores": of_functions,
                **model.tensors,
            },
            {**functions.non_tensor_batch, "score": scores.tolist()},
            functions.meta_info,
        )


class RewardModel:
    """The handle on a reward model's ranks."""

    def __init__(self, group: RoleGroup, parallel: ParallelConfig, schedule: OffloadSchedule | None = None) -> None:
        self.group = group
        self._parallel = parallel
        self._schedule = schedule or OffloadSchedule()

    def score(self, batch: DataProto) -> DerivedFuture:
        """See RewardModelWorker.score_conversations; the rows in the order of the batch. Reads `responses`, `response_mask`,
        `attention_mask` and the arrays `uid`, `messages`."""
        moves = self._schedule.before(REWARD_MODEL)
        replicas = self._parallel.data_parallel_size
        # One share for each replica, about equal in tokens of the policy: the model's own are not known here.
        lengths = batch.tensors["attention_mask"].sum(1).tolist()
        plan = plan_micro_batches(lengths, replicas, sequences=-(-len(batch) // replicas))
        needed = batch.select(["responses", "response_mask"], ["uid", "messages"], [])
        parts = [needed.select_idxs(rank.rows) for rank in plan.ranks]

        def restore(results: list[Any]) -> DataProto:
            return DataProto.concat(results[0]).select_idxs(plan.restore_order())

        future = DerivedFuture([self.group.call(RewardModelWorker.score_conversations, parts), *moves], restore)
        self._schedule.runs(REWARD_MODEL, future)
        return future
