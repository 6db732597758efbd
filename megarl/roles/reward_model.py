"""Handle of the driver to a reward model, which scores conversations for the reward role."""

from __future__ import annotations

from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import ParallelConfig
from megarl.controller.futures import DerivedFuture
from megarl.controller.group import RoleGroup
from megarl.data.packing import plan_micro_batches
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.reward_model_worker import RewardModelWorker


class RewardModel:
    """Handle to a reward model's ranks."""

    def __init__(
        self, group: RoleGroup, parallel: ParallelConfig, schedule: OffloadSchedule | None = None
    ) -> None:
        self.group = group
        self._parallel = parallel
        self._schedule = schedule or OffloadSchedule()

    def score(self, batch: DataProto) -> DerivedFuture:
        """Score conversations, in the order of the batch; see RewardModelWorker.score_conversations.

        Reads `prompts`, `responses`, `response_mask` and the arrays `uid`, `messages`.
        """
        moves = self._schedule.before(REWARD_MODEL)
        replicas = self._parallel.data_parallel_size

        # One share per replica, balanced by the policy's token counts: the reward model's counts are not
        # known here.
        rows = batch.ragged
        lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
        plan = plan_micro_batches(lengths, replicas, sequences=-(-len(batch) // replicas))
        named = batch.select([], ["uid", "messages"])
        needed = DataProto.from_dict(
            {key: rows[key] for key in ("responses", "response_mask")}, named.non_tensor_batch
        )
        parts = [needed.select_idxs(rank.rows) for rank in plan.ranks]

        def restore(results: list[Any]) -> DataProto:
            return DataProto.concat(results[0]).select_idxs(plan.restore_order())

        future = DerivedFuture(
            [self.group.call(RewardModelWorker.score_conversations, parts), *moves], restore
        )
        self._schedule.runs(REWARD_MODEL, future)

        return future
