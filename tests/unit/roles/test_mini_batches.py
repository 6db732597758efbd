"""Test how a step's samples become mini-batches and micro-batches, and how metrics are combined: on the
driver, without processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from megarl.algorithms.losses import MiniBatchCounts, SFTLoss
from megarl.batch.branches import BRANCH, EPISODE_TOKENS
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    CovarianceConfig,
    DType,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    ParallelConfig,
    PolicyLossConfig,
    PolicyLossKind,
    RolloutCorrectionConfig,
)
from megarl.controller.futures import RemoteFuture
from megarl.machine.errors import RunError
from megarl.roles.checks import FirstRatioCheck
from megarl.roles.megatron_role import MegatronRole, MiniBatchPlan, counts_of, restored_rows
from megarl.roles.megatron_worker import MICRO_BATCHES, ActorWorker, Loss
from megarl.roles.models import Actor, actor_rows
from tests.unit.engine.models import make_batch
from tests.unit.roles.test_checks import first_update


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(num_rows)})


def rows_of(plan: MiniBatchPlan, num_rows: int, step: int) -> list[list[int]]:
    return [mini_batch.tensors["row"].tolist() for mini_batch in plan.mini_batches(numbered(num_rows), step)]


def test_every_pass_has_each_row_once_in_an_order_of_its_own() -> None:
    plan = MiniBatchPlan(updates_per_step=3, epochs_per_batch=2, seed=5)
    mini_batches = rows_of(plan, 12, step=1)
    assert [len(rows) for rows in mini_batches] == [4] * 6
    first = sum(mini_batches[:3], [])
    second = sum(mini_batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert mini_batches == rows_of(plan, 12, step=1)
    assert mini_batches != rows_of(plan, 12, step=2)


def test_one_update_keeps_the_order() -> None:
    plan = MiniBatchPlan(updates_per_step=1, epochs_per_batch=2, seed=5)
    assert rows_of(plan, 4, step=1) == [[0, 1, 2, 3]] * 2


def test_the_rows_of_an_episode_are_in_one_mini_batch() -> None:
    """Six episodes, of 1, 3, 1, 2, 1 and 2 rows, in three updates with two episodes each."""
    branches = [0, 0, 1, 2, 0, 0, 1, 0, 0, 1]
    episodes = [0, 1, 1, 1, 2, 3, 3, 4, 5, 5]
    batch = DataProto.from_dict({"row": torch.arange(10)}, {BRANCH: branches})
    plan = MiniBatchPlan(updates_per_step=3, epochs_per_batch=2, seed=5)
    passes = [mini_batch.tensors["row"].tolist() for mini_batch in plan.mini_batches(batch, step=1)]
    assert len(passes) == 6
    for rows in (passes[:3], passes[3:]):
        assert sorted(sum(rows, [])) == list(range(10))
        assert [len({episodes[row] for row in each}) for each in rows] == [2, 2, 2]
    assert passes[:3] != passes[3:]
    # The rows of an episode keep their order.
    (together,) = (rows for rows in passes[:3] if 1 in rows)
    first = together.index(1)
    assert together[first : first + 3] == [1, 2, 3]

    plan = MiniBatchPlan(updates_per_step=5, epochs_per_batch=1, seed=0)
    with pytest.raises(ValueError, match="6 samples cannot be divided into trainer.updates_per_step=5"):
        list(plan.mini_batches(batch, step=1))


@pytest.mark.parametrize(("num_rows", "updates"), [(12, 5), (4, 5)])
def test_rows_that_do_not_divide_are_refused(num_rows: int, updates: int) -> None:
    """12 // 5 = 2 rows would give six updates instead of the configured five."""
    plan = MiniBatchPlan(updates_per_step=updates, epochs_per_batch=1, seed=0)
    with pytest.raises(
        ValueError, match=f"{num_rows} samples cannot be divided into trainer.updates_per_step={updates}"
    ):
        rows_of(plan, num_rows, step=1)


def role(parallel: ParallelConfig, sequences: int, group: Any = None) -> MegatronRole:
    return MegatronRole(group=group, parallel=parallel, micro_batch=MicroBatchConfig(sequences=sequences))


def test_fillers_have_no_token_to_train_on() -> None:
    batch = DataProto.from_dict(make_batch(num_rows=3), {"uid": list("abc")})
    before = batch.tensors["response_mask"].clone()
    plan, parts = role(ParallelConfig(data_parallel_size=2), 1).split(batch, ())
    assert [part.meta_info[MICRO_BATCHES] for part in parts] == [[[0], [1]]] * 2
    assert torch.equal(batch.tensors["response_mask"], before)  # the batch itself is unchanged
    joined = DataProto.concat([part.select(meta_info_keys=[]) for part in parts])
    real = joined.tensors["response_mask"].any(1).numpy()
    assert sorted(joined.non_tensor_batch["uid"][real]) == list("abc")  # of four positions
    restored = joined.select_idxs(plan.restore_order())
    assert restored.non_tensor_batch["uid"].tolist() == list("abc")
    assert torch.equal(restored.tensors["response_mask"], before)


def test_parts_have_what_the_role_reads_without_padding() -> None:
    """`score` is not requested; padding after a row's tokens is not sent; a tensor that is not rows of tokens
    is refused."""
    tensors = make_batch(num_rows=5)
    real = tensors["attention_mask"][:, 6:].bool()
    advantages = torch.where(real, torch.arange(45.0).view(5, 9), torch.nan)
    batch = DataProto.from_dict(
        {**tensors, "advantages": advantages, "score": torch.zeros(5)}, {"uid": list("abcde")}
    )
    plan, parts = role(ParallelConfig(data_parallel_size=2), 2).split(batch, ("advantages",))

    for part, rank in zip(parts, plan.ranks, strict=True):
        assert part.columns.keys() == {"prompts", "responses", "response_mask", "advantages"}
        arrived = pickle.loads(pickle.dumps(part)).ragged
        for place, row in enumerate(rank.rows):
            ids = torch.cat(
                [
                    next(arrived[key].select(slice(place, place + 1)).each())
                    for key in ("prompts", "responses")
                ]
            )
            assert torch.equal(ids.long(), tensors["input_ids"][row][tensors["attention_mask"][row].bool()])
        assert sum(len(column.values) for column in arrived.values()) == sum(
            int(tensors["attention_mask"][row].sum()) + 2 * int(real[row].sum()) for row in rank.rows
        )
        assert torch.equal(arrived["advantages"].flat(), advantages[rank.rows][real[rank.rows]])

    # they accompany their row unchanged
    routes = RaggedTensor.of_rows([[row] * (3 * row) for row in range(5)], torch.uint8)
    _, parts = role(ParallelConfig(data_parallel_size=2), 2).split(
        batch.union(DataProto.from_dict({ROUTED_EXPERTS: routes})), (ROUTED_EXPERTS,)
    )
    for part, rank in zip(parts, plan.ranks, strict=True):
        assert part.ragged[ROUTED_EXPERTS] == routes.select(torch.tensor(rank.rows))
    assert (
        restored_rows([part.select([ROUTED_EXPERTS]) for part in parts], plan.restore_order()).ragged[
            ROUTED_EXPERTS
        ]
        == routes
    )

    with pytest.raises(ValueError, match=r"\['score'\] are not rows of tokens"):
        role(ParallelConfig(), 2).split(batch, ("score",))


def test_virtual_stages_get_a_multiple_of_the_pipeline() -> None:
    batch = DataProto.from_dict(make_batch(num_rows=3))
    interleaved = ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    for parallel, expected in ((interleaved, 4), (ParallelConfig(pipeline_parallel_size=2), 3)):
        (part,) = role(parallel, 1).split(batch, batch.columns)[1]
        assert len(part.meta_info[MICRO_BATCHES]) == expected


class Done(RemoteFuture[Any]):
    """Call that has completed."""

    calls = ()

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> Any:
        return self._result


class UpdatedGroup:
    """Worker group whose replicas report `metrics` for every update.

    Attributes:
        seen: Number of parts of each call, and its loss.
    """

    def __init__(self, *metrics: dict[str, Metric]) -> None:
        self._metrics = list(metrics)
        self.seen: list[tuple[int, Loss]] = []

    def call(self, method: object, parts: list[DataProto], loss: Loss) -> Done:
        assert method is ActorWorker.update
        self.seen.append((len(parts), loss))
        return Done(self._metrics)


def test_updates_get_the_counts_of_their_whole_mini_batch() -> None:
    """The denominator is fixed before the rows are split over replicas: 2 + 1 tokens, then 3 + 0."""
    lengths = torch.tensor([2, 1, 3, 0])
    padded = {**make_batch(num_rows=4), "response_mask": torch.arange(9) < lengths[:, None]}
    batch = DataProto.from_dict(padded)
    group = UpdatedGroup(*({"x/loss": Metric.sum(share), "x/lr": Metric.same(0.5)} for share in (1.0, 2.0)))
    replicas = role(ParallelConfig(data_parallel_size=2), 1, group)
    update = replicas.update_with(
        batch.split(2),
        "update_actor",
        lambda parts, loss: group.call(ActorWorker.update, parts, loss),
        lambda counts: SFTLoss(counts=counts),
    )
    assert update.get() == {"x/loss": 3.0, "x/lr": 0.5}
    assert group.seen == [
        (2, SFTLoss(counts=MiniBatchCounts(num_tokens=3, num_sequences=2))),
        (2, SFTLoss(counts=MiniBatchCounts(num_tokens=3, num_sequences=1))),
    ]


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_updates_count_episodes_of_several_rows_once(aggregation: Aggregation) -> None:
    """Three episodes, of 2, 1 and 1 rows with 2 + 1, 3 and 0 tokens. The last one has no token with a loss."""
    lengths = torch.tensor([4, 1, 5, 1])
    with_loss = torch.arange(5) < torch.tensor([2, 1, 3, 0])[:, None]
    config = PolicyLossConfig(aggregation=aggregation, norm_tokens=4)
    batch = DataProto.from_dict(
        {
            "prompts": RaggedTensor.constant(1, torch.ones_like(lengths), torch.int32),
            "responses": RaggedTensor.constant(1, lengths, torch.int32),
            "response_mask": RaggedTensor.from_padded(with_loss, lengths),
            "advantages": RaggedTensor.constant(0.5, lengths, torch.float32),
        },
        {"uid": list("aabb"), BRANCH: [0, 1, 0, 0]},
    )
    rows = actor_rows(batch, AlgorithmConfig(policy_loss=config), one_update=True, seed=0)
    assert counts_of(rows) == MiniBatchCounts(num_tokens=6, num_sequences=2)

    if aggregation is Aggregation.sequence_mean_token_mean:
        assert [row.tolist() for row in rows.ragged[EPISODE_TOKENS].each()] == [
            [3.0] * 4,
            [3.0],
            [3.0] * 5,
            [0.0],
        ]
    else:
        assert EPISODE_TOKENS not in rows.ragged
    # Episodes of one row each are as before.
    plain = actor_rows(batch[2:], AlgorithmConfig(policy_loss=config), one_update=True, seed=0)
    assert EPISODE_TOKENS not in plain.ragged


def batch_to_update(**extra: torch.Tensor) -> DataProto:
    tensors = make_batch(num_rows=4)
    shape = tensors["response_mask"].shape
    generator = torch.Generator().manual_seed(0)
    made = {
        key: torch.randn(shape, generator=generator)
        for key in ("old_log_probs", "advantages", "ref_log_prob", "entropys")
    }

    return DataProto.from_dict({**tensors, **made, **extra}, {"uid": list("aabb")})


def test_one_update_has_no_old_log_probs() -> None:
    """The ratios compare the log-probs with themselves: exactly 1."""
    model = {"prompts", "responses", "response_mask", "advantages"}
    for one_update, extra in ((True, set()), (False, {"old_log_probs"})):
        plain = actor_rows(batch_to_update(), AlgorithmConfig(), one_update=one_update, seed=0)
        assert plain.tensors.keys() == model | extra
        in_loss = AlgorithmConfig(kl=KLConfig(where=KLWhere.loss))
        assert actor_rows(
            batch_to_update(), in_loss, one_update=one_update, seed=0
        ).tensors.keys() == model | extra | {"ref_log_prob"}


def test_what_a_correction_left_out_is_no_response_to_the_loss() -> None:
    batch = batch_to_update()
    left_out = batch.tensors["response_mask"].clone()
    left_out[0] = False
    rows = actor_rows(
        batch.union(DataProto.from_dict({"loss_mask": left_out})), AlgorithmConfig(), one_update=True, seed=0
    )
    assert torch.equal(rows.tensors["response_mask"], left_out)

    # the model still reads them
    assert torch.equal(rows.tensors["attention_mask"], batch.tensors["attention_mask"])


def test_log_probs_of_an_engine_that_are_no_numbers_are_refused_before_the_update() -> None:
    """Applies if the update itself computes weights from them; it must not wait to inspect them."""
    shape = batch_to_update().tensors["response_mask"].shape
    for algorithm in (
        AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(level=CorrectionLevel.token)),
        AlgorithmConfig(policy_loss=PolicyLossConfig(off_policy_limit=0.1)),
    ):
        batch = batch_to_update(rollout_log_probs=torch.full(shape, -1.0))
        assert "rollout_log_probs" in actor_rows(batch, algorithm, one_update=True, seed=0).tensors
        unusable = torch.full(shape, -1.0)
        unusable[2, 0] = -torch.inf
        batch = batch_to_update(rollout_log_probs=unusable)
        with pytest.raises(ValueError, match=r"rows \[2\] \(of 4\) are not finite"):
            actor_rows(batch, algorithm, one_update=True, seed=0)


def test_tokens_are_chosen_over_the_whole_mini_batch_and_drawn_by_the_seed() -> None:
    loss = PolicyLossConfig(
        kind=PolicyLossKind.clip_cov, covariance=CovarianceConfig(share=0.2, low=-9.0, high=9.0)
    )
    drawn = [
        actor_rows(batch_to_update(), AlgorithmConfig(policy_loss=loss), one_update=True, seed=seed).tensors[
            "selected_tokens"
        ]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert int(drawn[0].sum()) == int(0.2 * batch_to_update().tensors["response_mask"].sum())


@pytest.mark.parametrize(("updates_per_step", "is_refused"), [(1, False), (2, True)])
def test_an_actor_whose_first_ratio_is_wrong(updates_per_step: int, is_refused: bool) -> None:
    updates = MiniBatchPlan(updates_per_step=updates_per_step, epochs_per_batch=1, seed=0)
    actor = Actor(
        UpdatedGroup({name: Metric.sum(value) for name, value in first_update(high=1.5).items()}),  # type: ignore[arg-type]
        ParallelConfig(),
        MicroBatchConfig(sequences=1),
        None,  # type: ignore[arg-type]
        updates,
        algorithm=AlgorithmConfig(),
        check_first_ratio=FirstRatioCheck(DType.float32),
    )
    update = actor.update(batch_to_update(), step=1)

    if is_refused:
        with pytest.raises(RunError, match=r"ratios of new to old probabilities are 1 to 1\.5"):
            update.get()
    else:
        assert update.get() == first_update(high=1.5)
