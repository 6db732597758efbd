"""Test the roles in each kind of layout on real Ray: their results do not depend on the layout, and the
rollout follows the weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import ParallelConfig, SamplingConfig
from megarl.controller.errors import WorkerError
from megarl.controller.worker import RayClassWithInitArgs
from megarl.machine.errors import CheckpointError
from megarl.roles.megatron_worker import ActorWorker, PolicyWorker
from megarl.roles.models import Actor
from megarl.roles.saved_models import SavedModels
from megarl.rollout.driver.rollout import Rollout
from megarl.weights.sync.sync import WeightSync
from tests.rollout_replicas import StartedRollout
from tests.unit.engine.comparison import max_difference
from tests.unit.engine.models import (
    VOCAB_SIZE,
    load_critic,
    load_lm,
    make_batch,
    reference_logits,
    reference_values,
    scores_of,
)
from tests.unit.roles.groups import (
    COOL,
    END_TOKEN_ID,
    MAX_RESPONSE_LENGTH,
    Folders,
    Models,
    model_spec,
    save_folders,
    started,
    started_models,
    started_policy_rollout,
    weight_source,
)

LAYOUTS = {
    "DP1": ParallelConfig(),
    "DP2": ParallelConfig(data_parallel_size=2),
    "TP2": ParallelConfig(tensor_parallel_size=2),
    "PP2xVPP2": ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2),
}
SCORES_TOLERANCE = 1e-5
WEIGHTS_TOLERANCE = 1e-5  # the updates change weights by up to a thousand times as much
PROMPTS = [[7, 8, 9], [11], [150, 3], [42, 42, 42, 17], [VOCAB_SIZE - 1]]


def uneven_batch() -> DataProto:
    return DataProto.from_dict(make_batch(num_rows=7))


def training_batch() -> DataProto:
    """Return three rows, fewer than the one-row micro-batches of two replicas. Row 0 has tokens that the
    model did not write."""
    tensors = make_batch(num_rows=3, seed=2)
    shape = tensors["response_mask"].shape
    tensors["response_mask"][0, 3:5] = False
    generator = torch.Generator().manual_seed(3)
    made = {key: torch.randn(shape, generator=generator) for key in ("advantages", "values", "returns")}
    made |= {key: -2 - torch.rand(shape, generator=generator) for key in ("old_log_probs", "ref_log_prob")}

    return DataProto.from_dict({**tensors, **made})


def prompts() -> DataProto:
    rows = RaggedTensor.of_rows(PROMPTS, torch.int32, on_left=True)
    return DataProto.from_dict({"prompts": rows}, {"uid": [str(row) for row in range(len(PROMPTS))]})


class Generated(NamedTuple):
    greedy: list[list[int]]
    version: int
    log_prob_gap: dict[float, float]  # temperature -> max |rollout's - trainer's|


class OnePass(NamedTuple):
    """An update of a batch without old log-probs.

    Attributes:
        again: Metrics when the future is read twice.
        scores: Scores of a separate pass before the update.
        tensors: Columns of the batch after the update.
    """

    metrics: dict[str, float]
    again: dict[str, float]
    scores: dict[str, Tensor]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Results of one layout's models, in this order."""

    scores: dict[str, Tensor]
    single_row: Tensor
    generated: Generated
    metrics: dict[str, float]  # of two updates on the training batch
    one_pass: OnePass
    folder: Path  # the policy after the updates
    critic_values: Tensor
    reference_after: Tensor
    generated_after: Generated
    sft_metrics: dict[str, float]


def stored(folder: Path) -> dict[str, Tensor]:
    """Return the saved tensors; there is one file per pipeline stage."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def response_rows(batch: DataProto) -> list[list[int]]:
    return [
        ids[mask].tolist()
        for ids, mask in zip(batch.tensors["responses"], batch.tensors["response_mask"], strict=True)
    ]


def push(sync: WeightSync, rollout: StartedRollout) -> None:
    version = rollout.weights.version + 1
    rollout.update_weights(lambda replicas: sync.push(replicas, version)[1], version)


def generate(models: Models, rollout: StartedRollout) -> Generated:
    """Return greedy samples of the actor's weights, and the log-prob gap of both actors, each against samples
    of its own weights."""
    gaps: dict[float, float] = {}
    push(models.syncs[0], rollout)
    greedy = rollout.generate(prompts(), SamplingConfig(temperature=0), step=0)
    gaps[1.0] = log_prob_gap(models.actor, rollout, 1.0)
    models.syncs[0].close()  # engines have one trainer at a time
    push(models.syncs[1], rollout)
    gaps[COOL] = log_prob_gap(models.cool_actor, rollout, COOL)
    models.syncs[1].close()

    return Generated(response_rows(greedy), greedy.non_tensor_batch["weight_version"][0], gaps)


def log_prob_gap(actor: Actor, rollout: Rollout, temperature: float) -> float:
    batch = rollout.generate(prompts(), SamplingConfig(n=3, temperature=temperature), step=1)
    tensors = batch.union(actor.log_probs(batch)).tensors
    mask = tensors["response_mask"]
    assert mask.sum() > 30
    return max_difference(tensors["rollout_log_probs"][mask], tensors["old_log_probs"][mask])


def observe(models: Models, rollout: Rollout, folder: Path, source: Path) -> Observed:
    batch = uneven_batch()
    rows = training_batch()
    scored = batch.union(
        models.actor.log_probs(batch), models.reference.log_probs(batch), models.critic.values(batch)
    )
    cool = models.cool_actor.log_probs(batch).get().tensors["old_log_probs"]
    single_row = models.actor.log_probs(batch[:1]).get().tensors["old_log_probs"]
    generated = generate(models, rollout)
    critic_update = models.critic.update(rows, step=1)
    metrics = {**models.actor.update(rows, step=1).get(), **critic_update.get()}
    scored_before = models.cool_actor.log_probs(rows).get().tensors
    in_one_pass = rows.select([key for key in rows.tensors if key != "old_log_probs"])
    update = models.cool_actor.update(in_one_pass, step=1)
    one_pass = OnePass(update.get(), update.get(), scored_before, in_one_pass.tensors)
    models.actor.save_hf(folder, str(source))

    return Observed(
        scores={**scored.tensors, "cool_log_probs": cool},
        single_row=single_row,
        generated=generated,
        metrics=metrics,
        one_pass=one_pass,
        folder=folder,
        critic_values=models.critic.values(batch).get().tensors["values"],
        reference_after=models.reference.log_probs(batch).get().tensors["ref_log_prob"],
        generated_after=generate(models, rollout),
        sft_metrics=models.actor.update_sft(rows).get(),
    )


class Live(NamedTuple):
    name: str
    models: Models
    observed: Observed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rollout(ray_cluster: None, folders: Folders) -> Iterator[Rollout]:
    with started_policy_rollout(folders, num_replicas=2) as handle:
        yield handle


@pytest.fixture(scope="module")
def single(rollout: Rollout, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    with started_models(folders, LAYOUTS["DP1"]) as models:
        return observe(models, rollout, tmp_path_factory.mktemp("DP1") / "policy", folders.policy)


@pytest.fixture(scope="module", params=["DP2", "TP2", "PP2xVPP2"])
def live(
    request: pytest.FixtureRequest,
    rollout: Rollout,
    folders: Folders,
    single: Observed,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Live]:
    """Start a layout. `single` comes first: its processes have ended when the others start."""
    with started_models(folders, LAYOUTS[request.param]) as models:
        yield Live(
            request.param,
            models,
            observe(models, rollout, tmp_path_factory.mktemp(request.param) / "policy", folders.policy),
        )


def test_a_single_rank_scores_as_hugging_face_does(single: Observed, folders: Folders) -> None:
    batch = make_batch(num_rows=7)
    with torch.no_grad():
        logits = reference_logits(load_lm(folders.policy), batch)
        values = reference_values(load_critic(folders.critic), batch)

    expected = scores_of(logits, batch)
    assert max_difference(single.scores["old_log_probs"], expected["log_probs"]) < SCORES_TOLERANCE
    assert max_difference(single.scores["entropys"], expected["entropy"]) < SCORES_TOLERANCE
    assert max_difference(single.scores["ref_log_prob"], expected["log_probs"]) < SCORES_TOLERANCE
    assert (
        max_difference(single.scores["cool_log_probs"], scores_of(logits / COOL, batch)["log_probs"])
        < SCORES_TOLERANCE
    )
    assert max_difference(single.scores["values"], values) < SCORES_TOLERANCE


def test_scores_come_back_in_the_order_of_the_batch(live: Live, single: Observed) -> None:
    assert live.observed.scores.keys() == single.scores.keys()
    for key, expected in single.scores.items():
        assert max_difference(live.observed.scores[key], expected) < SCORES_TOLERANCE, key
    # With DP2 the second replica has only padding.
    assert max_difference(live.observed.single_row, single.scores["old_log_probs"][:1]) < SCORES_TOLERANCE


def test_updates_do_not_depend_on_the_layout_nor_on_fillers(
    live: Live, single: Observed, folders: Folders
) -> None:
    start, expected, got = (
        stored(folder) for folder in (folders.policy, single.folder, live.observed.folder)
    )
    assert got.keys() == expected.keys()
    assert max(max_difference(expected[name], start[name]) for name in expected) > 1e-2
    for name, weight in expected.items():
        assert max_difference(got[name], weight) < WEIGHTS_TOLERANCE, name
    assert max_difference(single.critic_values, single.scores["values"]) > 1e-2
    assert max_difference(live.observed.critic_values, single.critic_values) < 10 * WEIGHTS_TOLERANCE

    # it stays where it was
    assert torch.equal(live.observed.reference_after, live.observed.scores["ref_log_prob"])


def test_metrics_add_up_over_replicas(live: Live, single: Observed) -> None:
    assert {
        "actor/pg_loss",
        "actor/entropy",
        "actor/kl_loss",
        "actor/grad_norm",
        "critic/vf_loss",
        "critic/grad_norm",
    } <= single.metrics.keys()
    assert untimed(live.observed.metrics) == pytest.approx(untimed(single.metrics), rel=1e-4, abs=1e-6)
    assert untimed(live.observed.sft_metrics) == pytest.approx(
        untimed(single.sft_metrics), rel=1e-4, abs=1e-6
    )


def test_an_update_scores_its_batch_in_its_own_pass(live: Live, single: Observed) -> None:
    metrics, again, scores, tensors = live.observed.one_pass
    assert metrics == again
    assert untimed(metrics) == pytest.approx(untimed(single.one_pass.metrics), rel=1e-4, abs=1e-6)
    assert (metrics["actor/ratio_min"], metrics["actor/ratio_max"], metrics["actor/approx_kl"]) == (
        1.0,
        1.0,
        0.0,
    )
    assert scores.keys() == {"old_log_probs", "entropys"}

    for key, values in scores.items():
        assert values.abs().max() > 1
        assert max_difference(tensors[key], values) < SCORES_TOLERANCE, key


def test_several_updates_want_old_log_probs(live: Live) -> None:
    batch = uneven_batch()
    with pytest.raises(ValueError, match="has no old_log_probs, .*several updates"):
        live.models.actor.update(batch, step=1)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_the_sft_loss_is_that_of_the_response_tokens(single: Observed) -> None:
    batch = training_batch().tensors
    with torch.no_grad():
        log_probs = scores_of(reference_logits(load_lm(single.folder), batch), batch)["log_probs"]
    assert single.sft_metrics["sft/loss"] == pytest.approx(
        float(-log_probs[batch["response_mask"]].mean()), rel=1e-5
    )


def greedy_by_transformers(folder: Path) -> list[list[int]]:
    model = load_lm(folder)
    responses = []

    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_RESPONSE_LENGTH,
            eos_token_id=END_TOKEN_ID,
            pad_token_id=0,
        )
        responses.append(whole[0, len(prompt) :].tolist())

    return responses


def test_rollout_generates_with_the_weights_that_are_trained(live: Live, folders: Folders) -> None:
    before = live.observed.generated
    after = live.observed.generated_after
    assert before.greedy == greedy_by_transformers(folders.policy)
    assert after.greedy == greedy_by_transformers(live.observed.folder)
    assert before.greedy != after.greedy
    assert after.version == before.version + 2  # the other actor's were synced in between


def test_the_trainer_and_the_rollout_agree_on_log_probs(live: Live) -> None:
    for generated in (live.observed.generated, live.observed.generated_after):
        assert set(generated.log_prob_gap) == {1.0, COOL}
        assert max(generated.log_prob_gap.values()) < 1e-4


def test_small_buckets_carry_the_same_weights(live: Live, folders: Folders, tmp_path: Path) -> None:
    parallel = LAYOUTS[live.name]
    group = live.models.cool_actor.group
    for name, bucket_bytes in (("small", 4_000), ("large", 10**7)):
        weight_source(group, folders, parallel, bucket_bytes).save_hf(tmp_path / name, str(folders.policy))
    small, large = (stored(tmp_path / name) for name in ("small", "large"))
    assert small.keys() == large.keys()
    assert all(torch.equal(small[name], large[name]) for name in large)


@pytest.mark.parametrize("live", ["TP2"], indirect=True)
def test_a_rank_that_cannot_write_its_file_says_which_and_why(
    live: Live, folders: Folders, tmp_path: Path
) -> None:
    group = live.models.actor.group
    source = weight_source(group, folders, LAYOUTS["TP2"], bucket_bytes=4_000)
    models = SavedModels([], lambda folder: source.save_hf(folder, str(folders.policy)), 60.0)
    writer = psutil.Process(group.pids[0])
    before = writer.rlimit(psutil.RLIMIT_FSIZE)
    writer.rlimit(psutil.RLIMIT_FSIZE, (100_000, before[1]))

    with pytest.raises(
        CheckpointError, match=r"^\S*/new/model\.safetensors: cannot be written: File too large$"
    ):
        models.save_policy(tmp_path / "policy")

    writer.rlimit(psutil.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    models.save_policy(tmp_path / "policy")
    assert stored(tmp_path / "policy")


@pytest.mark.parametrize("live", ["TP2"], indirect=True)
def test_a_rank_that_dies_in_a_weight_export_is_named(live: Live, folders: Folders, tmp_path: Path) -> None:
    """Rank 1 only sends to rank 0, which has the bucket and loses its connection. Nothing of the folder is
    left."""
    group = live.models.actor.group
    source = weight_source(group, folders, LAYOUTS["TP2"], bucket_bytes=4_000)
    source.save_hf(tmp_path / "whole", str(folders.policy))
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        source.save_hf(tmp_path / "partial", str(folders.policy))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert (caught.value.role, caught.value.rank) == ("actor", 1)


def test_fused_roles_with_different_layouts_are_refused(ray_cluster: None, folders: Folders) -> None:
    workers = {
        "actor": RayClassWithInitArgs(ActorWorker, model_spec(folders.policy, LAYOUTS["DP2"])),
        "reference": RayClassWithInitArgs(
            PolicyWorker, model_spec(folders.policy, LAYOUTS["TP2"], optim=None)
        ),
    }
    with (
        started("models", 2, workers) as groups,
        pytest.raises(
            WorkerError,
            match=r"share a layout, but one has .*tensor_parallel_size=1.* and another "
            r".*tensor_parallel_size=2",
        ),
    ):
        groups["actor"].ready.get()
