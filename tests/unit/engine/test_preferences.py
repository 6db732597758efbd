"""Losses and gradients of pairs of answers in every layout, against TRL's formulas on Hugging Face models in float64.

Also of models with adapters, against PEFT's model in float64, and of mixture-of-experts models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.preferences import DPOLoss, PairLoss, RewardModelLoss
from megarl.batch.metrics import merge_metrics, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    DPOLossConfig,
    DPOLossKind,
    ExpertsConfig,
    OptimConfig,
    ParallelConfig,
    RewardModelLossConfig,
)
from megarl.data.packing import plan_micro_batches
from megarl.models.families import read_architecture
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same
from tests.unit.engine.lora_cases import Adapted, adapter_gradients, inject_adapters, save_adapted
from tests.unit.engine.models import (
    gradients_of,
    load_critic,
    load_lm,
    make_batch,
    record_routers,
    router_losses,
    save_critic,
    save_model,
    with_one_prompt,
)
from tests.unit.engine.rank_side import (
    ALL_LAYOUTS,
    EXPERT_LAYOUTS,
    Tensors,
    build,
    hf_gradients,
    merge,
    start,
    take,
)

TOLERANCE = 1e-5  # of losses and metrics, relative; of gradients, relative to the tensor's norm
GRADIENT_FLOOR = 1e-5  # relative to the whole gradient's norm: below it, a tensor is noise
METRIC_FLOOR = 5e-6  # absolute: differences of scores in float32 cancel
FAMILY = "qwen3-tied"
EXPERT_FAMILY = "qwen3_moe"
NUM_PAIRS = 5  # odd, so that one of two replicas has a filler
BETA = 0.3
MARGIN = 0.5  # the default, as TRL's simpo_gamma
CENTER_COEFFICIENT = 0.05
LOSSES: dict[str, PairLoss] = {
    **{
        kind.value: DPOLoss(config=DPOLossConfig(kind=kind, beta=BETA), num_pairs=NUM_PAIRS)
        for kind in DPOLossKind
    },
    "reward model": RewardModelLoss(
        config=RewardModelLossConfig(center_coefficient=CENTER_COEFFICIENT), num_pairs=NUM_PAIRS
    ),
}


# In every layout: each form of a loss with a reference, and one without, which has an SFT term too.
DPO_KINDS = (*(kind.value for kind in DPOLossKind if kind.needs.reference), "orpo")
REWARD = ("reward model",)
ROUTER_LOSSES = ExpertsConfig(aux_loss_coefficient=3.0, z_loss_coefficient=0.5)


class Case(NamedTuple):
    """A model and the losses that are computed with it.

    Attributes:
        folder: Its folder.
        losses: The names of the losses.
        spec: Other fields of its specification.
        adapted: Its adapters, of which `folder` is the base.
    """

    folder: str
    losses: tuple[str, ...]
    spec: dict[str, Any]
    adapted: Adapted | None = None


class Result(NamedTuple):
    """The metrics of a loss, and its gradients by Hugging Face names."""

    metrics: dict[str, float]
    gradients: Tensors


def pair_batch() -> Tensors:
    """Return the rows of five pairs, two of which have the same prompt, with columns of both kinds of loss."""
    batch = with_one_prompt(make_batch(2 * NUM_PAIRS), (0, 1, 6, 7), (2, 3), (4, 5), (8, 9))
    generator = torch.Generator().manual_seed(4)
    mask = batch["response_mask"]
    margins = torch.rand(NUM_PAIRS, generator=generator).repeat_interleave(2)
    return {
        **batch,
        "ref_log_prob": -4 * torch.rand(mask.shape, generator=generator) * mask,
        "margins": margins[:, None] * mask,
    }


def last_only(mask: Tensor) -> Tensor:
    """Return a mask of the last valid token of each row, where a reward model's score is read."""
    return mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))


def run_engine(
    parallel: ParallelConfig, cases: Sequence[Case], batch: Tensors, **options: Any
) -> list[Result]:
    """Run in a rank: return the results of every loss of every case. Gradients are those of the rank's stage."""
    groups = start(parallel)
    prompt_length = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    prompts = [
        ({1: 0, 6: 0, 7: 0, 3: 2, 5: 4, 9: 8}.get(row, row), int(length))
        for row, length in enumerate(batch["attention_mask"][:, :prompt_length].sum(1))
    ]
    plan = plan_micro_batches(
        batch["attention_mask"].sum(1).tolist(),
        parallel.data_parallel_size,
        sequences=2,
        multiple_of=parallel.micro_batch_multiple,
        context_parallel_size=parallel.context_parallel_size,
        prompts=prompts,
        rows_together=2,
    )
    rank = plan.ranks[groups.data_rank]
    is_filler = torch.tensor(rank.is_filler)
    micro_batches = [list(rows) for rows in rank.local_micro_batches]
    results = []

    for case in cases:
        head = "value" if case.losses == REWARD else "lm"
        spec = {"head": head, "optim": OptimConfig(), "share_prompts": True, **case.spec, **options}
        if case.adapted is not None:
            spec |= {"lora": case.adapted.lora, "lora_path": case.adapted.adapter}
        engine = build(groups, case.folder, **spec)
        for loss in map(LOSSES.__getitem__, case.losses):
            rows = take(batch, rank.rows)
            mask = batch["response_mask"] if head == "lm" else last_only(batch["response_mask"])
            rows["response_mask"] = RaggedTensor.from_padded(
                mask[rank.rows] & ~is_filler[:, None], rows["responses"].lengths
            )
            metrics = engine.forward_backward(rows, micro_batches, loss, loss.extras)
            gathered = gather(metrics if groups.tensor_rank == groups.context_rank == 0 else {})
            of_routers = values_of(engine.router_metrics)
            results.append(Result(values_of(merge_metrics(gathered)) | of_routers, hf_gradients(engine)))

    return results


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("models")
    adapted = save_adapted(FAMILY, folder)
    critic = str(folder / "critic")
    save_critic(Path(adapted.base), Path(critic))
    return [
        Case(adapted.base, DPO_KINDS, {}),
        Case(critic, REWARD, {}),
        Case(adapted.base, DPO_KINDS[:1], {}, adapted),
        Case(critic, REWARD, {}, adapted),
    ]


@pytest.fixture(scope="module")
def expert_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("experts")
    save_model(EXPERT_FAMILY, folder / "lm")
    save_critic(folder / "lm", folder / "critic")
    return [
        Case(str(folder / name), losses, {"routers": routers})
        for name, losses in (("lm", DPO_KINDS[:1]), ("critic", REWARD))
        for routers in (ROUTER_LOSSES, ExpertsConfig(freeze_router=True))
    ]


def _ids(batch: Tensors, row: int) -> tuple[Tensor, int]:
    """Return the tokens of a row without padding, and its number of response tokens."""
    valid = batch["attention_mask"][row].bool()
    return batch["input_ids"][row][valid][None], int(batch["response_mask"][row].sum())


def trl_dpo_loss(model: torch.nn.Module, batch: Tensors, kind: str) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of TRL's DPOTrainer with loss_type `kind`, and its rewards and accuracy.

    Those without a reference are of TRL's CPOTrainer and ORPOTrainer. Their SFT term is the mean over the tokens
    of each preferred answer, then over pairs, where TRL's is the mean over all tokens.
    """
    log_probs, references, lengths = [], [], []
    for row in range(2 * NUM_PAIRS):
        ids, count = _ids(batch, row)
        every = F.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        log_probs.append(every[-count:].sum())
        references.append(batch["ref_log_prob"][row].double().sum())
        lengths.append(count)

    ratios = torch.stack(log_probs) - torch.stack(references)
    counts = torch.tensor(lengths)
    means = torch.stack(log_probs) / counts
    compared = {"cpo": torch.stack(log_probs), "simpo": means, "orpo": means}.get(kind, ratios)
    scores = ratios / counts if kind in ("ipo", "sigmoid_norm") else compared
    delta = scores[0::2] - scores[1::2]
    if kind == "ipo":
        losses = (delta - 1 / (2 * BETA)) ** 2
    elif kind == "simpo":
        losses = -F.logsigmoid(BETA * (delta - MARGIN / BETA))
    elif kind == "orpo":
        odds = delta - (torch.log1p(-means[0::2].exp()) - torch.log1p(-means[1::2].exp()))
        losses = -means[0::2] - BETA * F.logsigmoid(odds)
    else:
        losses = -F.logsigmoid(BETA * delta)
    if kind == "cpo":
        losses = losses - means[0::2]

    rewards = BETA * compared.detach()
    metrics = {
        "dpo/accuracy": float((rewards[0::2] > rewards[1::2]).double().mean()),
        "dpo/margin": float((rewards[0::2] - rewards[1::2]).mean()),
        "dpo/chosen_reward": float(rewards[0::2].mean()),
        "dpo/rejected_reward": float(rewards[1::2].mean()),
        "dpo/chosen_log_prob": float(torch.stack(log_probs)[0::2].detach().mean()),
        "dpo/rejected_log_prob": float(torch.stack(log_probs)[1::2].detach().mean()),
    }
    return losses.mean(), {"dpo/loss": float(losses.detach().mean()), **metrics}


def trl_reward_loss(model: Any, batch: Tensors) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of TRL's RewardTrainer, with margins and center_rewards_coefficient."""
    scores = []
    for row in range(2 * NUM_PAIRS):
        ids, _ = _ids(batch, row)
        # The last token of a row only marks the end of the conversation. Routers count it.
        hidden = model.model(ids).last_hidden_state
        scores.append(model.score(hidden[0, -2])[0])

    chosen, rejected = torch.stack(scores)[0::2], torch.stack(scores)[1::2]
    margins = batch["margins"].max(1).values[0::2].double()
    loss = -F.logsigmoid(chosen - rejected - margins).mean()
    loss = loss + CENTER_COEFFICIENT * torch.mean((chosen + rejected) ** 2)
    metrics = {
        "reward_model/loss": float(loss.detach()),
        "reward_model/accuracy": float((chosen > rejected).double().mean()),
        "reward_model/margin": float((chosen - rejected).detach().mean()),
        "reward_model/chosen_score": float(chosen.detach().mean()),
        "reward_model/rejected_score": float(rejected.detach().mean()),
    }
    return loss, metrics


def expected_result(case: Case, name: str) -> Result:
    """Return the result of one loss with Hugging Face's model, or PEFT's with adapters, in float64."""
    is_reward_model = name in REWARD
    load = load_critic if is_reward_model else load_lm
    model: Any = load(Path(case.folder))
    if case.adapted is not None:
        inject_adapters(model, case.adapted)
        if is_reward_model:
            model.score.requires_grad_(True)
    model.double()
    if read_architecture(case.folder).experts is not None:
        # The default has no float64.
        (model.model if is_reward_model else model).set_experts_implementation("eager")
    recorded = record_routers(model)
    loss, metrics = (
        trl_reward_loss(model, pair_batch()) if is_reward_model else trl_dpo_loss(model, pair_batch(), name)
    )

    routers: ExpertsConfig = case.spec.get("routers", ExpertsConfig())
    if recorded:
        losses = router_losses(recorded, read_architecture(case.folder))
        metrics["expert_share/max"] = losses.largest_share
        if routers.aux_loss_coefficient:
            metrics |= {"aux_loss": losses.aux_loss.item(), "z_loss": losses.z_loss.item()}
            added = (
                routers.aux_loss_coefficient * losses.aux_loss + routers.z_loss_coefficient * losses.z_loss
            )
            loss = loss + len(recorded) * added
    loss.backward()
    if routers.freeze_router:
        for key, parameter in model.named_parameters():
            if key.endswith("mlp.gate.weight"):
                parameter.grad.zero_()
    return Result(metrics, gradients_of(model) if case.adapted is None else adapter_gradients(model))


def expected_results(cases: Sequence[Case]) -> list[Result]:
    return [expected_result(case, name) for case in cases for name in case.losses]


@pytest.fixture(scope="module")
def expected(cases: list[Case]) -> list[Result]:
    return expected_results(cases)


def compare(ranks: list[list[Result]], expected: list[Result], tolerance: float) -> None:
    assert {len(results) for results in ranks} == {len(expected)}
    for number, (metrics, gradients) in enumerate(expected):
        assert ranks[0][number].metrics == pytest.approx(metrics, rel=TOLERANCE, abs=METRIC_FLOOR)
        norm = float(torch.stack([value.norm() for value in gradients.values()]).norm())
        got = merge([results[number].gradients for results in ranks])
        # What adapters leave frozen has no gradient.
        assert not any(value.any() for name, value in got.items() if name not in gradients)
        trained = {name: got[name] for name in gradients}
        assert_same(trained, gradients, tolerance, floor=GRADIENT_FLOOR * norm)


@pytest.fixture(scope="module")
def expected_of_experts(expert_cases: list[Case]) -> list[Result]:
    return expected_results(expert_cases)


def test_the_other_losses_and_gradients_are_trls(rank_pool: RankPool, cases: list[Case]) -> None:
    others = tuple(kind.value for kind in DPOLossKind if kind.value not in DPO_KINDS)
    case = cases[0]._replace(losses=others)
    ranks = rank_pool.run(
        run_engine, world_size=2, parallel=ALL_LAYOUTS["DP2"], cases=[case], batch=pair_batch()
    )
    compare(ranks, expected_results([case]), TOLERANCE)


CASES = [(layout, {}) for layout in ALL_LAYOUTS] + [("TP1", {"packing": False}), ("DP2", {"packing": False})]


@pytest.mark.parametrize(("layout", "options"), CASES, ids=str)
def test_losses_and_gradients_are_trls(
    layout: str,
    options: dict[str, Any],
    rank_pool: RankPool,
    cases: list[Case],
    expected: list[Result],
) -> None:
    parallel = ALL_LAYOUTS[layout]
    ranks = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        cases=cases,
        batch=pair_batch(),
        **options,
    )
    compare(ranks, expected, TOLERANCE)


@pytest.mark.parametrize("layout", ["DP2xEP2", "TP2+SPxEP2"])
def test_losses_and_gradients_of_experts_are_trls(
    layout: str, rank_pool: RankPool, expert_cases: list[Case], expected_of_experts: list[Result]
) -> None:
    """The losses include those of the routers; in some cases, routers are frozen."""
    parallel = EXPERT_LAYOUTS[layout]
    ranks = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        cases=expert_cases,
        batch=pair_batch(),
    )
    compare(ranks, expected_of_experts, TOLERANCE)
