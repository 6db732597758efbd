"""How a step's samples become mini-batches and micro-batches, and how metrics come back together: on the driver, without processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megarl.algorithms.losses import MiniBatchCounts
from megarl.config.schema import MicroBatchConfig, ParallelConfig
from megarl.protocol.batch import DataProto
from megarl.workers.megatron import MICRO_BATCHES
from megarl.workers.roles import MegatronRole, UpdatePlan, _mean, _over_replicas
from tests.unit.engine.models import make_batch


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(num_rows)})


def rows_of(plan: UpdatePlan, num_rows: int, step: int) -> list[list[int]]:
    return [mini_batch.tensors["row"].tolist() for mini_batch in plan.mini_batches(numbered(num_rows), step)]


def test_every_pass_has_each_row_once_in_an_order_of_its_own() -> None:
    plan = UpdatePlan(updates_per_step=3, epochs_per_batch=2, seed=5)
    mini_batches = rows_of(plan, 12, step=1)
    assert [len(rows) for rows in mini_batches] == [4] * 6
    first, second = sum(mini_batches[:3], []), sum(mini_batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert mini_batches == rows_of(plan, 12, step=1)
    assert mini_batches != rows_of(plan, 12, step=2)


def test_one_update_keeps_the_order() -> None:
    plan = UpdatePlan(updates_per_step=1, epochs_per_batch=2, seed=5)
    assert rows_of(plan, 4, step=1) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("num_rows", "updates"), [(12, 5), (4, 5)])
def test_rows_that_do_not_divide_are_refused(num_rows: int, updates: int) -> None:
    """12 // 5 = 2 rows would make six updates of the five that were asked for."""
    plan = UpdatePlan(updates_per_step=updates, epochs_per_batch=1, seed=0)
    with pytest.raises(ValueError, match=f"{num_rows} samples do not divide into trainer.updates_per_step={updates}"):
        rows_of(plan, num_rows, step=1)


def role(parallel: ParallelConfig, sequences: int) -> MegatronRole:
    return MegatronRole(group=None, parallel=parallel, micro_batch=MicroBatchConfig(sequences=sequences))  # type: ignore[arg-type]


def test_fillers_have_no_token_to_train_on() -> None:
    batch = DataProto.from_dict({**make_batch(num_rows=3), "row": torch.arange(3)})
    before = batch.tensors["response_mask"].clone()
    plan, parts = role(ParallelConfig(data_parallel_size=2), 1)._split(batch, ("input_ids", "attention_mask", "response_mask", "row"))
    assert [part.meta_info[MICRO_BATCHES] for part in parts] == [[[0], [1]]] * 2
    assert torch.equal(batch.tensors["response_mask"], before)  # the batch itself stays as it is
    joined = DataProto.concat([part.select(meta_info_keys=[]) for part in parts])
    real = joined.tensors["response_mask"].any(1)
    assert Counter(joined.tensors["row"][real].tolist()) == Counter(range(3))
    assert int(real.sum()) == 3  # of four places
    restored = joined.select_idxs(plan.restore_order()).tensors
    assert restored["row"].tolist() == [0, 1, 2]
    assert torch.equal(restored["response_mask"], before)


def test_virtual_stages_get_a_multiple_of_the_pipeline() -> None:
    batch = DataProto.from_dict(make_batch(num_rows=3))
    interleaved = ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    for parallel, expected in ((interleaved, 4), (ParallelConfig(pipeline_parallel_size=2), 3)):
        (part,) = role(parallel, 1)._split(batch, batch.tensors)[1]
        assert len(part.meta_info[MICRO_BATCHES]) == expected


class Done:
    """A call that has ended."""

    calls = ()

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> Any:
        return self._result


def test_updates_get_the_counts_of_their_whole_mini_batch() -> None:
    """The denominator is fixed before the rows are cut over replicas: 2 + 1 tokens, then 3 + 0."""
    batch = DataProto.from_dict(make_batch(num_rows=4))
    lengths = torch.tensor([2, 1, 3, 0])
    batch.tensors["response_mask"].copy_(torch.arange(9) < lengths[:, None])
    seen: list[tuple[int, MiniBatchCounts]] = []

    def method(parts: list[DataProto], counts: MiniBatchCounts) -> Any:
        seen.append((len(parts), counts))
        return Done([{"x/loss": 1.0, "x/lr": 0.5}, {"x/loss": 2.0, "x/lr": 0.5}])

    replicas = role(ParallelConfig(data_parallel_size=2), 1)
    assert replicas._update(batch.split(2), (), method).get() == {"x/loss": 3.0, "x/lr": 0.5}
    assert seen == [
        (2, MiniBatchCounts(num_tokens=3, num_sequences=2)),
        (2, MiniBatchCounts(num_tokens=3, num_sequences=1)),
    ]


def test_shares_add_up_over_replicas_and_mini_batches_are_averaged() -> None:
    replicas = [
        {"actor/pg_loss": 0.25, "actor/grad_norm": 3.0, "actor/lr": 0.1},
        {"actor/pg_loss": 0.5, "actor/grad_norm": 3.0, "actor/lr": 0.1},
    ]
    update = _over_replicas(replicas)
    assert update == {"actor/pg_loss": 0.75, "actor/grad_norm": 3.0, "actor/lr": 0.1}
    assert _mean([update, {"actor/pg_loss": 0.25, "actor/grad_norm": 1.0, "actor/lr": 0.3}]) == pytest.approx(
        {"actor/pg_loss": 0.5, "actor/grad_norm": 2.0, "actor/lr": 0.2}
    )
