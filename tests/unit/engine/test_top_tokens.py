"""Several tokens per position over a tensor-parallel vocabulary against a float64 softmax over all of it."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Device
from tests.ranks import RankPool
from tests.unit.engine.comparison import max_difference
from tests.unit.engine.test_vocab_parallel import HIDDEN, ROWS_PER_MULTIPLE, TOKENS, VOCAB_SIZE

TEMPERATURE = 0.7
TOLERANCE = 1e-6  # relative to the norm of a gradient, times the scale of the logits, which round
SMALLER = 150  # the vocabulary of a policy with fewer tokens than its teacher


class Case(NamedTuple):
    k: int
    scale: float = 1.0  # of the logits
    log_prob: float = (
        0.0  # the loss is the sum of the log-probs of targets, entropies and top tokens, weighted
    )
    entropy: float = 0.0


CASES = {
    "some tokens": Case(8),
    "one token": Case(1, log_prob=1.0),
    "more tokens than a rank has": Case(170, log_prob=1.0, entropy=1.0),
    "all tokens": Case(VOCAB_SIZE, log_prob=1.0, entropy=1.0),
    "all of the mass": Case(8, scale=30.0, log_prob=1.0),
}


class Inputs(NamedTuple):
    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (T,)
    ids: Tensor  # (T, k)
    weights: Tensor  # (T, k + 1), of the top log-probs


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) * case.scale
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    ids = torch.rand(TOKENS, VOCAB_SIZE, generator=generator).argsort(1)[:, : case.k]
    weights = torch.randn(TOKENS, case.k + 1, generator=generator)
    if case.scale > 1:
        # The most likely tokens, and the weights of a divergence: a token counts by its probability.
        log_softmax = (hidden.double() @ weight.double().T / TEMPERATURE).log_softmax(1)
        ids = log_softmax.topk(case.k, dim=1).indices
        weights = weights * of_top(log_softmax, ids).exp().float()
    targets = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator)
    return Inputs(hidden, weight, targets, ids.int(), weights)


def of_top(log_softmax: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs of the ids and of all other tokens together."""
    others = log_softmax.scatter(1, ids.long(), float("-inf")).logsumexp(1, keepdim=True)
    return torch.cat([log_softmax.gather(1, ids.long()), others], dim=1)


def reference(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs (T, k + 1), and the gradients of the hidden states and of the weight."""
    hidden = inputs.hidden.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    log_softmax = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    top = of_top(log_softmax, inputs.ids)
    num = min(top.shape[1], VOCAB_SIZE)
    loss = (top[:, :num] * inputs.weights[:, :num]).sum()
    loss = loss + case.log_prob * log_softmax.gather(1, inputs.targets[:, None]).sum()
    loss = loss - case.entropy * (log_softmax.exp() * log_softmax).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return top.detach(), hidden.grad, weight.grad


def run_cases(inputs: dict[str, Inputs]) -> dict[str, tuple[Any, ...]]:
    """Run in a rank of a tensor-parallel group that is the whole world."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import vocab_parallel
    from megarl.engine.top_tokens import TopK

    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = -(-VOCAB_SIZE // (ROWS_PER_MULTIPLE * size)) * ROWS_PER_MULTIPLE  # some ranks have no token
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "temperature": TEMPERATURE,
        "chunk_tokens": 7,
        "group": dist.group.WORLD,
    }
    results = {}

    for name, case in CASES.items():
        given = inputs[name]
        padded = torch.full((rows * size, HIDDEN), 50.0)  # padding that would win every softmax it reached
        padded[:VOCAB_SIZE] = given.weight
        hidden = given.hidden.clone().requires_grad_()
        weight = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        with mock.patch.object(vocab_parallel, "BLOCK_ELEMENTS", 2 * VOCAB_SIZE):
            extras = ("entropy",) if case.entropy else ()
            scores = vocab_parallel.token_scores(
                hidden, weight, given.targets, extras=extras, top=given.ids, **settings
            )
            num = min(case.k + 1, VOCAB_SIZE)
            loss = (scores["top_log_probs"][:, :num] * given.weights[:, :num]).sum()
            if case.log_prob:
                loss = loss + scores["log_probs"].sum()
            if case.entropy:
                loss = loss + scores["entropy"].sum()
            loss.backward()
            # A teacher has the tokens of a smaller vocabulary among its most likely ones.
            with torch.no_grad():
                request = TopK(min(case.k, SMALLER), SMALLER)
                chosen = vocab_parallel.token_scores(
                    hidden, weight, given.targets, extras=(), top=request, **settings
                )
        dist.all_reduce(hidden.grad)
        gradients = [torch.empty_like(weight) for _ in range(size)]
        dist.all_gather(gradients, weight.grad)
        results[name] = (
            scores["top_log_probs"].detach(),
            hidden.grad,
            torch.cat(gradients)[:VOCAB_SIZE],
            chosen["top_ids"],
            chosen["top_log_probs"],
        )
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_log_probs_gradients_and_most_likely_tokens(size: int, rank_pool: RankPool) -> None:
    inputs = {name: make_inputs(case) for name, case in CASES.items()}
    ranks = rank_pool.run(run_cases, world_size=size, inputs=inputs)
    for name, case in CASES.items():
        top, *gradients = reference(inputs[name], case)
        log_softmax = (
            inputs[name].hidden.double() @ inputs[name].weight.double().T / TEMPERATURE
        ).log_softmax(1)
        likeliest = log_softmax[:, :SMALLER].topk(min(case.k, SMALLER), dim=1)
        for found, *found_gradients, ids, of_ids in (rank[name] for rank in ranks):
            torch.testing.assert_close(found.double(), top, rtol=2e-6, atol=5e-6 * case.scale)
            for gradient, want in zip(found_gradients, gradients, strict=True):
                assert float((gradient.double() - want).norm() / want.norm()) <= TOLERANCE * case.scale, name
            assert max_difference(log_softmax.gather(1, ids.long()), likeliest.values) <= 1e-5 * case.scale
            torch.testing.assert_close(
                of_ids.double(), of_top(log_softmax, ids), rtol=2e-6, atol=5e-6 * case.scale
            )
