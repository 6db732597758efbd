"""Vocab-parallel log-probs and entropy against a float64 softmax over the whole vocabulary."""

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

VOCAB_SIZE = 199
HIDDEN = 5
TOKENS = 23
ROWS_PER_MULTIPLE = 128  # with 4 ranks, ranks 2 and 3 hold only padding
TOLERANCE = 1e-5


class Inputs(NamedTuple):
    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (T,)
    log_prob_weight: Tensor  # (T,): the loss is the sum of both outputs times these
    entropy_weight: Tensor


class Case(NamedTuple):
    chunk_tokens: int = TOKENS
    temperature: float = 1.0
    block_tokens: int = TOKENS  # tokens over the whole vocabulary, processed at a time


class Scored(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor  # (V, H)


CASES = {
    "one chunk": Case(),
    "chunks of one token": Case(chunk_tokens=1),
    "an uneven last chunk": Case(chunk_tokens=7),
    "a temperature": Case(chunk_tokens=7, temperature=0.7),
    "blocks of two tokens": Case(chunk_tokens=7, block_tokens=2),
}


def make_inputs(
    scale: float = 1.0, tokens: int = TOKENS, log_prob: float = 1.0, entropy: float = 1.0
) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    targets = torch.randint(0, VOCAB_SIZE, (tokens,), generator=generator)

    return Inputs(
        draw(tokens, HIDDEN) * scale,
        draw(VOCAB_SIZE, HIDDEN),
        targets,
        draw(tokens) * log_prob,
        draw(tokens) * entropy,
    )


def reference(inputs: Inputs, case: Case) -> Scored:
    hidden = inputs.hidden.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    log_softmax = (hidden @ weight.T / case.temperature).log_softmax(-1)
    log_probs = log_softmax.gather(1, inputs.targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (log_probs * inputs.log_prob_weight + entropy * inputs.entropy_weight).sum().backward()

    return Scored(log_probs.detach(), entropy.detach(), hidden.grad, weight.grad)


def run_scores(
    inputs: Inputs, cases: dict[str, Case], dtype: torch.dtype = torch.float32, in_float32: bool = False
) -> dict[str, Scored]:
    """Run in a rank of a tensor-parallel group that is the whole world."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import vocab_parallel
    from megarl.engine.vocab_parallel import token_scores

    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = -(-VOCAB_SIZE // (ROWS_PER_MULTIPLE * size)) * ROWS_PER_MULTIPLE
    padded = torch.full((rows * size, HIDDEN), 50.0)  # padding that would win every softmax it reached
    padded[:VOCAB_SIZE] = inputs.weight
    results = {}

    for name, case in cases.items():
        hidden = inputs.hidden.clone().to(dtype).requires_grad_()
        weight = padded[rank * rows : (rank + 1) * rows].clone().to(dtype).requires_grad_()
        with mock.patch.object(vocab_parallel, "BLOCK_ELEMENTS", case.block_tokens * min(rows, VOCAB_SIZE)):
            scores = token_scores(
                hidden,
                weight,
                inputs.targets,
                vocab_size=VOCAB_SIZE,
                temperature=case.temperature,
                chunk_tokens=case.chunk_tokens,
                group=dist.group.WORLD,
                in_float32=in_float32,
            )
            assert scores["log_probs"].dtype == scores["entropy"].dtype == torch.float32
            loss = (scores["log_probs"] * inputs.log_prob_weight).sum()
            # Otherwise the entropy gets no gradient at all, as if no loss used it.
            if inputs.entropy_weight.any():
                loss = loss + (scores["entropy"] * inputs.entropy_weight).sum()
            loss.backward()
        dist.all_reduce(hidden.grad)
        gradients = [torch.empty_like(weight) for _ in range(size)]
        dist.all_gather(gradients, weight.grad if weight.grad is not None else torch.zeros_like(weight))
        whole = torch.cat(gradients)
        assert not whole[VOCAB_SIZE:].any(), "padding has a gradient"
        results[name] = Scored(
            scores["log_probs"].detach(), scores["entropy"].detach(), hidden.grad, whole[:VOCAB_SIZE]
        )

    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_and_gradients(size: int, rank_pool: RankPool) -> None:
    for log_prob, entropy in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        inputs = make_inputs(log_prob=log_prob, entropy=entropy)
        for results in rank_pool.run(run_scores, world_size=size, inputs=inputs, cases=CASES):
            for name, case in CASES.items():
                for key, value in reference(inputs, case)._asdict().items():
                    assert max_difference(getattr(results[name], key), value) <= TOLERANCE, (name, key)


def run_extras(inputs: Inputs) -> dict[tuple[str, ...], Any]:
    """Run in a rank: return, by extras, all scores and the log-probs' gradient with respect to the hidden states."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.vocab_parallel import token_scores

    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = -(-VOCAB_SIZE // size)
    weight = torch.nn.functional.pad(inputs.weight, (0, 0, 0, rows * size - VOCAB_SIZE))[
        rank * rows : (rank + 1) * rows
    ]
    found = {}

    for extras in ((), ("entropy",), ("sum_pi_squared",), ("entropy", "sum_pi_squared")):
        hidden = inputs.hidden.clone().requires_grad_()
        scores = token_scores(
            hidden,
            weight,
            inputs.targets,
            vocab_size=VOCAB_SIZE,
            temperature=0.7,
            chunk_tokens=7,
            group=dist.group.WORLD,
            extras=extras,
        )
        (scores["log_probs"] * inputs.log_prob_weight).sum().backward()
        dist.all_reduce(hidden.grad)
        made = (scores.get(name) for name in ("log_probs", "entropy", "sum_pi_squared"))
        found[extras] = (*(None if score is None else score.detach() for score in made), hidden.grad)

    return found


@pytest.mark.parametrize("size", [1, 2])
def test_extras_are_made_where_they_are_asked_for(size: int, rank_pool: RankPool) -> None:
    """The log-probs and their gradient are the same with any of them."""
    inputs = make_inputs(entropy=0.0)
    want = reference(inputs, Case(temperature=0.7))
    probabilities = (inputs.hidden.double() @ inputs.weight.double().T / 0.7).softmax(-1)

    for found in rank_pool.run(run_extras, world_size=size, inputs=inputs):
        for extras, (log_probs, entropy, sum_pi_squared, gradient) in found.items():
            assert max_difference(log_probs, want.log_probs) <= TOLERANCE
            assert max_difference(gradient, want.hidden_grad) <= TOLERANCE
            assert (entropy is None, sum_pi_squared is None) == (
                "entropy" not in extras,
                "sum_pi_squared" not in extras,
            )
            assert entropy is None or max_difference(entropy, want.entropy) <= TOLERANCE
            assert (
                sum_pi_squared is None
                or max_difference(sum_pi_squared, probabilities.square().sum(1)) <= TOLERANCE
            )


def test_logits_in_the_thousands(rank_pool: RankPool) -> None:
    """Probabilities that underflow keep everything finite."""
    inputs = make_inputs(scale=1000.0)
    cases = {"large": Case()}
    want = reference(inputs, Case())
    assert float(want.log_probs.min()) < -1000

    for results in rank_pool.run(run_scores, world_size=2, inputs=inputs, cases=cases):
        got = results["large"]
        torch.testing.assert_close(got.log_probs.double(), want.log_probs, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got.hidden_grad.double(), want.hidden_grad, rtol=1e-2, atol=1e-2)
        assert bool(torch.isfinite(got.weight_grad).all())


def test_no_token(rank_pool: RankPool) -> None:
    (results,) = rank_pool.run(
        run_scores, world_size=1, inputs=make_inputs(tokens=0), cases={"empty": Case(chunk_tokens=4)}
    )
    assert results["empty"].log_probs.shape == (0,)
    assert not results["empty"].weight_grad.any()


def test_bfloat16_weights_give_float32_scores(rank_pool: RankPool) -> None:
    """Products are rounded to bfloat16 (8 bits); everything after them is float32."""
    inputs = make_inputs()
    want = reference(inputs, Case())
    (results,) = rank_pool.run(
        run_scores, world_size=1, inputs=inputs, cases={"bf16": Case(chunk_tokens=7)}, dtype=torch.bfloat16
    )
    assert max_difference(results["bf16"].log_probs, want.log_probs) < 0.1
    assert results["bf16"].weight_grad.dtype == torch.bfloat16
    assert (
        float((results["bf16"].weight_grad.double() - want.weight_grad).norm() / want.weight_grad.norm())
        < 0.02
    )


@pytest.mark.parametrize("size", [1, 2])
def test_logits_in_float32_are_not_rounded(size: int, rank_pool: RankPool) -> None:
    """The inputs are exact in bfloat16, so only the product could round."""
    inputs = make_inputs(scale=4.0, entropy=0.0)
    inputs = inputs._replace(hidden=inputs.hidden.bfloat16().float(), weight=inputs.weight.bfloat16().float())
    want = reference(inputs, Case())

    for in_float32 in (True, False):
        for results in rank_pool.run(
            run_scores,
            world_size=size,
            inputs=inputs,
            cases={"bf16": Case(chunk_tokens=7)},
            dtype=torch.bfloat16,
            in_float32=in_float32,
        ):
            distance = max_difference(results["bf16"].log_probs, want.log_probs)
            assert distance < 5 * TOLERANCE if in_float32 else distance > 1000 * TOLERANCE


def largest_saved_tensor(inputs: Inputs, chunk_tokens: int) -> int:
    """Run in a rank: return the number of elements of the largest tensor saved for backward."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.vocab_parallel import token_scores

    sizes = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_scores(
            hidden,
            weight,
            inputs.targets,
            vocab_size=VOCAB_SIZE,
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            group=dist.group.WORLD,
        )

    return max(sizes)


def test_logits_of_one_chunk_at_most_are_kept_for_the_backward_pass(rank_pool: RankPool) -> None:
    tokens = 256
    chunk = 16
    (largest,) = rank_pool.run(
        largest_saved_tensor, world_size=1, inputs=make_inputs(tokens=tokens), chunk_tokens=chunk
    )
    assert largest <= chunk * VOCAB_SIZE
