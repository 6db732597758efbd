"""A role with a Megatron model: plans micro-batches, calls its workers and restores the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch

from megarl.algorithms.losses import MiniBatchCounts
from megarl.batch.branches import episode_numbers, rows_of_episodes
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, over_updates, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import first_with_prompt, image_places, model_keys
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import MicroBatchConfig, ParallelConfig
from megarl.controller.futures import DerivedFuture, WorkerFuture
from megarl.controller.group import RoleGroup
from megarl.data.packing import MicroBatchPlan, RowPrompt, plan_micro_batches
from megarl.machine.errors import counted
from megarl.roles.megatron_worker import MICRO_BATCHES, Loss
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.reward_model_worker import RewardModelWorker


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlan:
    """How the samples of a step become optimizer steps.

    There are `updates_per_step` mini-batches in each of `epochs_per_batch` passes.
    """

    updates_per_step: int
    epochs_per_batch: int
    seed: int
    critic_warmup_steps: int = 0  # steps without an update of the actor

    @property
    def is_one(self) -> bool:
        """Whether a step makes a single optimizer step.

        The samples then come from exactly the policy being trained.
        """
        return self.updates_per_step * self.epochs_per_batch == 1

    def seed_of(self, step: int, update: int) -> int:
        """Return the random seed of one update of a step. Each update has a different seed."""
        return int(np.random.SeedSequence([self.seed, step, update]).generate_state(1)[0])

    def mini_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """Yield mini-batches with the same number of episodes each, which have one row or several.

        Each pass contains each episode once, in an order that depends on pass and step.

        Raises:
            ValueError: The episodes do not divide evenly, so there would be more updates than the
                learning-rate schedule assumes.
        """
        # Most batches have one row per episode.
        rows = rows_of_episodes(batch)
        size, left_over = divmod(len(rows), self.updates_per_step)
        if left_over:
            raise ValueError(
                f"{counted(len(rows), 'sample')} cannot be divided into "
                f"trainer.updates_per_step={self.updates_per_step} equal mini-batches; {left_over} would be "
                "left over: make trainer.prompts_per_step x rollout.n a multiple of it"
            )

        # With a single mini-batch per pass, shuffling the rows would change nothing.
        seed = self.seed + step if self.updates_per_step > 1 else None
        if len(rows) == len(batch):
            return batch.make_iterator(size, epochs=self.epochs_per_batch, seed=seed)
        episodes = DataProto.from_dict({"episode": torch.arange(len(rows))})
        return (
            batch.select_idxs(np.concatenate([rows[number] for number in part.tensors["episode"]]))
            for part in episodes.make_iterator(size, epochs=self.epochs_per_batch, seed=seed)
        )


class MegatronRole:
    """A group of workers with one model, its layout and its micro-batch limit."""

    def __init__(
        self,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
        rows_together: int = 1,
    ) -> None:
        """Create the role.

        Args:
            share_prompts: Whether the workers' engines share prompts, so that rows of one prompt stay on one
                replica.
            rows_together: The number of consecutive rows that one loss reads.
        """
        self.group = group
        self._share_prompts = share_prompts
        self._rows_together = rows_together
        self._schedule = schedule or OffloadSchedule()
        self._parallel = parallel
        self._micro_batch = micro_batch

    def split(self, batch: DataProto, keys: Iterable[str]) -> tuple[MicroBatchPlan, list[DataProto]]:
        """Split the batch into one part per replica, each with its micro-batch plan.

        A part contains what a model reads, and `keys`. Rows that only pad a micro-batch have no response
        token that a loss reads.

        Raises:
            ValueError: A column is not rows of tokens.
        """
        model_inputs = batch.select(dict.fromkeys([*model_keys(batch.columns), *keys]), uid_column(batch), [])
        if others := model_inputs.columns.keys() - model_inputs.ragged.keys():
            raise ValueError(f"{sorted(others)} are not rows of tokens, and a model's worker reads no others")

        # Plan micro-batches of about equal work for the data-parallel replicas.
        rows = model_inputs.ragged
        lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
        prompts = tuple(_prompts(rows)) if self._share_prompts else None
        plan = _plan(tuple(lengths), self._parallel, self._micro_batch, prompts, self._rows_together)
        parts = []

        # Split the batch into one part per replica. Padding rows repeat real rows and must not count in the
        # loss.
        for rank in plan.ranks:
            part = model_inputs.select_idxs(rank.rows)
            if rank.num_fillers:
                part.ragged["response_mask"] = _without(part.ragged["response_mask"], rank.is_filler)
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
        """Score the batch.

        Args:
            phase: A phase of plan/placement/dataflow.py.
            keys: Batch names of the workers' scores, where they differ.
            reads: Columns that the workers read in addition to the tokens.
        """
        plan, parts = self.split(batch, reads)
        return self._schedule.run(
            phase,
            lambda: [call(parts)],
            lambda results: restored_rows(results[0], plan.restore_order(), keys),
        )

    def update_with(
        self,
        mini_batches: Iterable[DataProto],
        phase: str,
        call: Callable[[list[DataProto], Loss], WorkerFuture[list[dict[str, Metric]]]],
        loss_of: Callable[[MiniBatchCounts], Loss],
        check_first: Callable[[Mapping[str, float]], None] | None = None,
    ) -> DerivedFuture:
        """Queue one optimizer step per mini-batch.

        A mini-batch has only the tensors that the loss reads, and is sent with its loss. Metrics are reduced
        over replicas, then over mini-batches, as each metric specifies (batch/metrics.py).

        Args:
            mini_batches: The rows of each step.
            phase: The phase, before which models are brought into memory.
            call: Calls the workers with the parts of all replicas and the loss.
            loss_of: Returns the loss of a mini-batch, given its counts.
            check_first: Called with the metrics of the first mini-batch.
        """

        # Counts are those of the whole mini-batch: each replica sees only its share of the rows.
        def calls() -> list[WorkerFuture[list[dict[str, Metric]]]]:
            return [
                call(self.split(mini_batch, mini_batch.columns)[1], loss_of(counts_of(mini_batch)))
                for mini_batch in mini_batches
            ]

        def metrics(results: list[list[dict[str, Metric]]]) -> dict[str, float]:
            updates = [merge_metrics(replicas) for replicas in results]

            # Check the first mini-batch before its metrics are averaged with the others'.
            if check_first is not None:
                check_first(values_of(updates[0]))
            return over_updates(updates)

        return self._schedule.run(phase, calls, metrics)


class RewardModel(MegatronRole):
    """Handle of the driver to a reward model, which scores conversations for the reward role."""

    def score(self, batch: DataProto) -> DerivedFuture:
        """Score conversations, in the order of the batch; see RewardModelWorker.score_conversations.

        Reads `prompts`, `responses`, `response_mask` and the arrays `uid`, `messages`.
        """
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

        return self._schedule.run(
            REWARD_MODEL,
            lambda: [self.group.call(RewardModelWorker.score_conversations, parts)],
            lambda results: DataProto.concat(results[0]).select_idxs(plan.restore_order()),
        )


def counts_of(mini_batch: DataProto) -> MiniBatchCounts:
    """Return the denominators of a mini-batch of rows or of episodes of several rows."""
    return MiniBatchCounts.of(mini_batch.columns["response_mask"], episode_numbers(mini_batch))


@lru_cache(maxsize=4)
def _plan(
    lengths: tuple[int, ...],
    parallel: ParallelConfig,
    limit: MicroBatchConfig,
    prompts: tuple[RowPrompt, ...] | None,
    rows_together: int,
) -> MicroBatchPlan:
    """Plan micro-batches.

    The result is cached, since most roles and passes of a step split the same rows in the same way.
    """
    return plan_micro_batches(
        lengths,
        parallel.data_parallel_size,
        sequences=limit.sequences,
        max_tokens=limit.max_tokens,
        multiple_of=parallel.micro_batch_multiple,
        context_parallel_size=parallel.context_parallel_size,
        prompts=prompts,
        rows_together=rows_together,
    )


def _prompts(columns: Mapping[str, RaggedTensor]) -> list[RowPrompt]:
    """Return the prompt of each row.

    Rows that share storage, such as samples of a prompt, are examined once.
    """
    # Rows with the same place in the column have the same prompt; compare the tokens of one of them.
    prompts = columns["prompts"]
    images = image_places(columns) or [None] * len(prompts)
    places = list(zip(prompts.starts.tolist(), prompts.lengths.tolist(), images, strict=True))
    row_at = {place: row for row, place in reversed(list(enumerate(places)))}
    rows = sorted(row_at.values())
    firsts = first_with_prompt(prompts.select(torch.tensor(rows)).each(), [images[row] for row in rows])
    first_at = {places[row]: rows[first] for row, first in zip(rows, firsts, strict=True)}

    return [(first_at[place], place[1]) for place in places]


def restored_rows(
    parts: Sequence[DataProto], order: Sequence[int], names: Mapping[str, str] = MappingProxyType({})
) -> DataProto:
    """Return the scores of all parts, such as replicas, in the order of the batch, renamed by `names`."""
    return DataProto.from_dict(
        {
            names.get(key, key): RaggedTensor.gather([part.ragged[key] for part in parts], order)
            for key in parts[0].ragged
        }
    )


def _without(mask: RaggedTensor, rows: Sequence[bool]) -> RaggedTensor:
    """Return the mask, set to False in those rows."""
    return RaggedTensor.of_rows(
        [
            np.zeros(len(values), dtype=bool) if is_out else values.numpy()
            for values, is_out in zip(mask.each(), rows, strict=True)
        ],
        torch.bool,
    )


def uid_column(batch: DataProto) -> list[str]:
    """Return the uid column. Models do not read it, but errors name rows by it."""
    return ["uid"] if "uid" in batch.non_tensor_batch else []
