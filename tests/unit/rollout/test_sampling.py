import pytest
import torch

from megarl.rollout.hf.decoding import row_keys, sample_tokens
from megarl.rollout.interface import SamplingParameters

CPU = torch.device("cpu")
NONE_FORBIDDEN = torch.tensor([], dtype=torch.int64)
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def draw(count: int, **sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = SamplingParameters(max_new_tokens=1, seed=0, **sampling)
    return sample_tokens(LOGITS.expand(count, 5), parameters, row_keys(range(count), CPU), 0, NONE_FORBIDDEN)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Pearson's chi-square with 4 degrees of freedom: above 18.47 once in a thousand seeds; this seed is
    fixed."""
    count = 20_000
    expected = (LOGITS / temperature).softmax(0) * count
    observed = torch.bincount(draw(count, temperature=temperature)[0], minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 18.47
    assert ((observed - torch.full((5,), count / 5)) ** 2 / (count / 5)).sum() > 1000  # the test can fail


def test_truncation_changes_what_is_drawn_and_not_the_log_probs() -> None:
    """Softmax of LOGITS is 0.636, 0.234, 0.086, 0.032, 0.012: the first two reach 0.87, the third is needed
    for 0.9."""
    full = torch.log_softmax(LOGITS, 0)
    cases = [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.86}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
    ]

    # The first of the two best alone has 0.731: with top-k first, 0.7 is reached by one token.
    cases += [({"top_k": 2, "top_p": 0.7}, {0}), ({"top_k": 99}, {0, 1, 2, 3, 4})]
    for sampling, allowed in cases:
        token_ids, log_probs = draw(5000, **sampling)
        assert set(token_ids.tolist()) == allowed, sampling
        assert torch.allclose(log_probs, full[token_ids], atol=1e-6)


def test_greedy_takes_the_largest_and_reports_raw_log_probs() -> None:
    token_ids, log_probs = draw(3, temperature=0.0)
    assert token_ids.tolist() == [0, 0, 0]
    assert torch.allclose(log_probs, torch.log_softmax(LOGITS, 0)[0].expand(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_not_drawn_and_stay_in_the_log_probs(temperature: float) -> None:
    parameters = SamplingParameters(max_new_tokens=1, seed=0, temperature=temperature, top_k=2)
    token_ids, log_probs = sample_tokens(
        LOGITS.expand(1000, 5), parameters, row_keys(range(1000), CPU), 0, torch.tensor([0, 2])
    )
    assert set(token_ids.tolist()) == ({1, 3} if temperature else {1})
    assert torch.allclose(log_probs, torch.log_softmax(LOGITS, 0)[token_ids], atol=1e-6)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    parameters = SamplingParameters(max_new_tokens=1, seed=0, temperature=0.7)
    _, log_probs = sample_tokens(
        LOGITS.to(torch.bfloat16)[None], parameters, row_keys([0], CPU), 0, NONE_FORBIDDEN
    )
    assert log_probs.dtype == torch.float32
    assert torch.isclose(torch.log_softmax(LOGITS / 0.7, 0), log_probs, atol=1e-6).any()
