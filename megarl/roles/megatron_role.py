"""A role with a Megatron model: it plans micro-batches, calls its workers and restores the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.algorithms.losses import MiniBatchCounts
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, over_updates, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MODEL_KEYS, first_with_prompt
from megarl.config.schema import (
    MicroBatchConfig,
    ParallelConfig,
)
from megarl.controller.futures import DerivedFuture, WorkerFuture
from megarl.controller.group import RoleGroup
from megarl.controller.worker import RemoteMethod
from megarl.data.packing import MicroBatchPlan, RowPrompt, plan_micro_batches
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.workers.megatron import MICRO_BATCHES, Loss

if TYPE_CHECKING:
    pass

UpdateMethod = RemoteMethod[
    [DataProto, Loss], dict[str, Metric], [Sequence[DataProto], Loss], WorkerFuture[list[dict[str, Metric]]]
]


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlan:
    """How a step's samples become optimizer steps: `updates_per_step` mini-batches in each of
    `epochs_per_batch` passes."""

    updates_per_step: int
    epochs_per_batch: int
    seed: int
    critic_warmup_steps: int = 0  # in which the actor has none

    @property
    def is_one(self) -> bool:
        """A step makes a single optimizer step, so that the samples are of the very policy that it trains."""
        return self.updates_per_step * self.epochs_per_batch == 1

    def seed_of(self, step: int, update: int) -> int:
        """For what is drawn for one update of a step; another for each."""
        return int(np.random.SeedSequence([self.seed, step, update]).generate_state(1)[0])

    def mini_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """Of equal size, each row once in a pass, in an order of its own for every pass and step.

        Raises ValueError where the rows do not divide: more updates would be made than the learning-rate
        schedule counts on.
        """
        size, left_over = divmod(len(batch), self.updates_per_step)
        if left_over:
            raise ValueError(
                f"{len(batch)} samples do not divide into trainer.updates_per_step={self.updates_per_step} "
                f"equal mini-batches; "
                f"{left_over} would be left over: make trainer.prompts_per_step x rollout.n a multiple of it"
            )

        # With a single mini-batch per pass, a random order of the rows would change nothing.
        return batch.make_iterator(
            size, epochs=self.epochs_per_batch, seed=self.seed + step if self.updates_per_step > 1 else None
        )


class MegatronRole:
    """A group of workers that hold one model, with its layout and the limit of its micro-batches."""

    def __init__(
        self,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """share_prompts: as the workers' engines do, so that rows of one prompt are dealt together."""
        self.group = group
        self._share_prompts = share_prompts
        self._schedule = schedule or OffloadSchedule()
        self._parallel = parallel
        self._micro_batch = micro_batch

    def split(self, batch: DataProto, keys: Iterable[str]) -> tuple[MicroBatchPlan, list[DataProto]]:
        """One part per replica with the plan of its micro-batches: what a model reads, and `keys`. Rows that
        only fill a micro-batch have no response token that a loss reads. Raises ValueError for a column that
        is not rows of tokens."""
        model_inputs = batch.select(dict.fromkeys([*MODEL_KEYS, *keys]), uid_column(batch), [])
        if others := model_inputs.columns.keys() - model_inputs.ragged.keys():
            raise ValueError(f"{sorted(others)} are not rows of tokens, and a model's worker reads no others")

        # Plan micro-batches of about equal work for the data-parallel replicas.
        rows = model_inputs.ragged
        lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
        prompts = tuple(_prompts(rows["prompts"])) if self._share_prompts else None
        plan = _plan(tuple(lengths), self._parallel, self._micro_batch, prompts)
        parts = []

        # Cut the batch into one part per replica. Fillers repeat real rows and must not count in the loss.
        for rank in plan.ranks:
            part = model_inputs.select_idxs(rank.rows)
            fillers = [micro_batch.is_filler for micro_batch in rank.micro_batches for _ in micro_batch.rows]
            if any(fillers):
                part.ragged["response_mask"] = _without(part.ragged["response_mask"], fillers)
            part.meta_info = {MICRO_BATCHES: [list(rows) for rows in rank.local_micro_batches]}
            parts.append(part)

        return plan, parts

    def _score(
        self,
        batch: DataProto,
        phase: str,
        call: Callable[[list[DataProto]], WorkerFuture[list[DataProto]]],
        keys: Mapping[str, str] = MappingProxyType({}),
        reads: Iterable[str] = (),
    ) -> DerivedFuture:
        """`phase`: of placement/dataflow.py. keys: what a score of the workers is called in the batch, where
        it has another name. reads: what the workers read beside the tokens."""
        # The moves are queued before the call, so that the workers restore the parameters first.
        moves = self._schedule.before(phase)
        plan, parts = self.split(batch, reads)

        def restore(results: list[Any]) -> DataProto:
            return restored_rows(results[0], plan, keys)

        future = DerivedFuture([call(parts), *moves], restore)
        self._schedule.runs(phase, future)

        return future

    def update_with(
        self,
        mini_batches: Iterable[DataProto],
        phase: str,
        method: UpdateMethod,
        loss_of: Callable[[MiniBatchCounts], Loss],
        check_first: Callable[[Mapping[str, float]], None] | None = None,
    ) -> DerivedFuture:
        """Queues one optimizer step per mini-batch, which has the tensors that the loss reads and no others;
        with it goes its loss.

        Metrics come together over replicas, then over mini-batches, as they say (batch/metrics.py).
        `check_first`: of those of the first mini-batch.
        """
        moves = self._schedule.before(phase)
        futures = []

        # Token counts are those of the whole mini-batch: each replica sees only its share of the rows.
        for mini_batch in mini_batches:
            loss = loss_of(MiniBatchCounts.of(mini_batch.columns["response_mask"]))
            futures.append(self.group.call(method, self.split(mini_batch, mini_batch.columns)[1], loss))

        def metrics(results: list[list[dict[str, Metric]]]) -> dict[str, float]:
            updates = [merge_metrics(replicas) for replicas in results[: len(futures)]]

            # Check the first mini-batch before its metrics are averaged with the others'.
            if check_first is not None:
                check_first(values_of(updates[0]))
            return over_updates(updates)

        future = DerivedFuture([*futures, *moves], metrics)
        self._schedule.runs(phase, future)
        return future


@lru_cache(maxsize=4)
def _plan(
    lengths: tuple[int, ...],
    parallel: ParallelConfig,
    limit: MicroBatchConfig,
    prompts: tuple[RowPrompt, ...] | None,
) -> MicroBatchPlan:
    """Made once for roles and passes that cut the same rows alike: of a step's batch most do."""
    return plan_micro_batches(
        lengths,
        parallel.data_parallel_size,
        sequences=limit.sequences,
        max_tokens=limit.max_tokens,
        multiple_of=parallel.micro_batch_multiple,
        context_parallel_size=parallel.context_parallel_size,
        prompts=prompts,
    )


def _prompts(prompts: RaggedTensor) -> list[RowPrompt]:
    """Of each row. Where rows are of the same values, as samples of a prompt are, its tokens are looked at
    once."""
    # Rows with the same place in the column are the same prompt; compare the tokens of one of them.
    places = list(zip(prompts.starts.tolist(), prompts.lengths.tolist(), strict=True))
    row_at = {place: row for row, place in reversed(list(enumerate(places)))}
    rows = sorted(row_at.values())
    firsts = first_with_prompt(prompts.select(torch.tensor(rows)).each())
    first_at = {places[row]: rows[first] for row, first in zip(rows, firsts, strict=True)}

    return [RowPrompt(first_at[place], place[1]) for place in places]


def restored_rows(parts: Sequence[DataProto], plan: MicroBatchPlan, names: Mapping[str, str]) -> DataProto:
    """The scores of all replicas in the order of the batch, some under other names."""
    order = plan.restore_order()
    return DataProto.from_dict(
        {
            names.get(key, key): RaggedTensor.gather([part.ragged[key] for part in parts], order)
            for key in parts[0].ragged
        }
    )


def _without(mask: RaggedTensor, rows: Sequence[bool]) -> RaggedTensor:
    """The mask, False in those rows."""
    return RaggedTensor.of_rows(
        [
            np.zeros(len(values), dtype=bool) if is_out else values.numpy()
            for values, is_out in zip(mask.each(), rows, strict=True)
        ],
        torch.bool,
    )


def uid_column(batch: DataProto) -> list[str]:
    """The models do not read it: an error names the rows by it."""
    return ["uid"] if "uid" in batch.non_tensor_batch else []
