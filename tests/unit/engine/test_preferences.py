"""Losses and gradients of pairs of answers in every layout, against TRL's formulas on Hugging Face models in float64."""

from __future__ import annotations

from collections.abc import Mapping
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
    OptimConfig,
    ParallelConfig,
    RewardModelLossConfig,
)
from megarl.data.packing import RowPrompt, plan_micro_batches
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same
from tests.unit.engine.models import (
    gradients_of,
    load_critic,
    load_lm,
    make_batch,
    save_critic,
    save_model,
    with_one_prompt,
)
from tests.unit.engine.rank_side import ALL_LAYOUTS, Tensors, build, hf_gradients, merge, start, take

TOLERANCE = 1e-5  # of losses and metrics, relative; of gradients, relative to the tensor's norm
GRADIENT_FLOOR = 1e-5  # relative to the whole gradient's norm: below it, a tensor is noise
FAMILY = "qwen3-tied"
NUM_PAIRS = 5  # odd, so that one of two replicas has a filler
BETA = 0.3
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
    parallel: ParallelConfig, folders: Mapping[str, str], batch: Tensors, **options: Any
) -> dict[str, Result]:
    """Run in a rank: return the results of every loss. Gradients are those of the rank's stage."""
    groups = start(parallel)
    prompt_length = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    prompts = [
        RowPrompt({1: 0, 6: 0, 7: 0, 3: 2, 5: 4, 9: 8}.get(row, row), int(length))
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
    is_filler = torch.tensor([each.is_filler for each in rank.micro_batches for _ in each.rows])
    micro_batches = [list(rows) for rows in rank.local_micro_batches]
    results = {}

    for head, folder in folders.items():
        engine = build(groups, folder, head=head, optim=OptimConfig(), share_prompts=True, **options)
        for name, loss in LOSSES.items():
            if (head == "value") != isinstance(loss, RewardModelLoss):
                continue
            rows = take(batch, rank.rows)
            mask = batch["response_mask"] if head == "lm" else last_only(batch["response_mask"])
            rows["response_mask"] = RaggedTensor.from_padded(
                mask[rank.rows] & ~is_filler[:, None], rows["responses"].lengths
            )
            metrics = engine.forward_backward(rows, micro_batches, loss, loss.extras)
            gathered = gather(metrics if groups.tensor_rank == groups.context_rank == 0 else {})
            results[name] = Result(values_of(merge_metrics(gathered)), hf_gradients(engine))

    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    save_model(FAMILY, folder / "lm")
    save_critic(folder / "lm", folder / "critic")
    return {"lm": str(folder / "lm"), "value": str(folder / "critic")}


def _ids(batch: Tensors, row: int) -> tuple[Tensor, int]:
    """Return the tokens of a row without padding, and its number of response tokens."""
    valid = batch["attention_mask"][row].bool()
    return batch["input_ids"][row][valid][None], int(batch["response_mask"][row].sum())


def trl_dpo_loss(model: torch.nn.Module, batch: Tensors, kind: str) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of TRL's DPOTrainer with loss_type `kind`, and its rewards and accuracy."""
    log_probs, references, lengths = [], [], []
    for row in range(2 * NUM_PAIRS):
        ids, count = _ids(batch, row)
        every = F.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        log_probs.append(every[-count:].sum())
        references.append(batch["ref_log_prob"][row].double().sum())
        lengths.append(count)

    ratios = torch.stack(log_probs) - torch.stack(references)
    scores = ratios / torch.tensor(lengths) if kind in ("ipo", "sigmoid_norm") else ratios
    delta = scores[0::2] - scores[1::2]
    losses = (delta - 1 / (2 * BETA)) ** 2 if kind == "ipo" else -F.logsigmoid(BETA * delta)

    rewards = BETA * ratios.detach()
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
        # The last token of a row only marks the end of the conversation.
        hidden = model.model(ids[:, :-1]).last_hidden_state
        scores.append(model.score(hidden[0, -1])[0])

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


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, Result]:
    batch = pair_batch()
    results = {}
    for name in LOSSES:
        if name == "reward model":
            model = load_critic(Path(folders["value"])).double()
            loss, metrics = trl_reward_loss(model, batch)
        else:
            model = load_lm(Path(folders["lm"]), torch.float64)
            loss, metrics = trl_dpo_loss(model, batch, name)
        loss.backward()
        results[name] = Result(metrics, gradients_of(model))
    return results


CASES = [(layout, {}) for layout in ALL_LAYOUTS] + [("TP1", {"packing": False}), ("DP2", {"packing": False})]


@pytest.mark.parametrize(("layout", "options"), CASES, ids=str)
def test_losses_and_gradients_are_trls(
    layout: str,
    options: dict[str, Any],
    rank_pool: RankPool,
    folders: dict[str, str],
    expected: dict[str, Result],
) -> None:
    parallel = ALL_LAYOUTS[layout]
    ranks = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        folders=folders,
        batch=pair_batch(),
        **options,
    )
    for name, (metrics, gradients) in expected.items():
        assert ranks[0][name].metrics == pytest.approx(metrics, rel=TOLERANCE, abs=1e-6)
        norm = float(torch.stack([value.norm() for value in gradients.values()]).norm())
        got = merge([rank[name].gradients for rank in ranks])
        assert_same(got, gradients, TOLERANCE, floor=GRADIENT_FLOOR * norm)
