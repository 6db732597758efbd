"""The reward role: the user's functions and a reward model; a sample's score is their weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.scores import place_scores
from megarl.batch.data_proto import DataProto
from megarl.batch.token_rows import token_rows
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

    def score(self, batch: DataProto, with_texts: bool = False) -> DerivedFuture:
        """`token_level_scores`, rows of tokens, and what RewardWorker.score gives. With a model, the scores are those of the functions plus
        `model_weight` times the model's, and there are `reward_function_scores` (B,) and what RewardModelWorker.score_conversations gives
        beside them; the model's are the last of `score_parts`."""
        rows = token_rows(batch.columns)
        named = batch.select([], ["uid", "data_source", "reward_model", "extra_info"])
        needed = DataProto.from_dict({key: rows[key] for key in ("responses", "response_mask")}, named.non_tensor_batch)
        functions = self.group.call(RewardWorker.score, needed, with_texts)
        calls = [functions] if self.model is None else [functions, self.model.score(batch)]

        def placed(results: list[Any]) -> DataProto:
            scores = results[0] if self.model is None else self._sum(*results)
            of_rows = place_scores(scores.non_tensor_batch["score"].tolist(), rows["response_mask"])
            return scores.union(DataProto.from_dict({"token_level_scores": of_rows}))

        return DerivedFuture(calls, placed)

    def _sum(self, functions: DataProto, model: DataProto) -> DataProto:
        of_functions = torch.tensor(functions.non_tensor_batch["score"].tolist(), dtype=torch.float32)
        scores = of_functions + self._model_weight * model.tensors["reward_model_scores"]
        return DataProto.from_dict(
            {
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
        """See RewardModelWorker.score_conversations; the rows in the order of the batch. Reads `prompts`, `responses`, `response_mask` and
        the arrays `uid`, `messages`."""
        moves = self._schedule.before(REWARD_MODEL)
        replicas = self._parallel.data_parallel_size
        # One share for each replica, about equal in tokens of the policy: the model's own are not known here.
        rows = token_rows(batch.columns)
        lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
        plan = plan_micro_batches(lengths, replicas, sequences=-(-len(batch) // replicas))
        named = batch.select([], ["uid", "messages"])
        needed = DataProto.from_dict({key: rows[key] for key in ("responses", "response_mask")}, named.non_tensor_batch)
        parts = [needed.select_idxs(rank.rows) for rank in plan.ranks]

        def restore(results: list[Any]) -> DataProto:
            return DataProto.concat(results[0]).select_idxs(plan.restore_order())

        future = DerivedFuture([self.group.call(RewardModelWorker.score_conversations, parts), *moves], restore)
        self._schedule.runs(REWARD_MODEL, future)
        return future
