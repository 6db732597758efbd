"""Test the noise against the Gumbel distribution, and for independence: other seeds, steps and tokens have
other numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.rollout.hf.decoding import gumbel_noise, row_keys

CPU = torch.device("cpu")


def splitmix64(state: int) -> int:
    """Return one output of the published generator, computed with Python integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


@pytest.mark.parametrize(
    ("seed", "step", "token"), [(0, 0, 0), (1, 0, 16), (2**32 - 1, 7, 3), (2**70 + 5, 1000, 150_000)]
)
def test_the_hash_is_splitmix64(seed: int, step: int, token: int) -> None:
    increment = 0x9E3779B97F4A7C15
    key = splitmix64((splitmix64((seed % 2**63 + increment) % 2**64) + step) % 2**64)
    bits = splitmix64((key + (token + 1) * increment) % 2**64) >> 11
    expected = -np.log(-np.log1p(-(bits + 0.5) / 2**53))
    assert float(gumbel_noise(row_keys([seed], CPU), step, token + 1)[0, token]) == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )


def test_it_is_uniform_over_rows_over_steps_and_over_tokens() -> None:
    """Pearson's chi-square over 64 equal cells, 63 degrees of freedom: above 103.4 once in a thousand."""
    many_rows = gumbel_noise(row_keys(range(65_536), CPU), 0, 1)
    many_steps = torch.cat([gumbel_noise(row_keys([3], CPU), step, 1) for step in range(8192)])
    many_tokens = gumbel_noise(row_keys([3], CPU), 0, 65_536)

    for noise in (many_rows, many_steps, many_tokens):
        uniform = torch.exp(-torch.exp(-noise.double().flatten()))
        counts = torch.histc(uniform, 64, 0, 1)
        expected = len(uniform) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 103.4


def test_neighbours_are_not_correlated() -> None:
    noise = gumbel_noise(row_keys(range(512), CPU), 0, 512)
    beside = gumbel_noise(row_keys(range(512), CPU), 1, 512)

    for other in (noise.roll(1, 0), noise.roll(1, 1), noise.flip(0).T, beside, beside.roll(1, 1)):
        pairs = torch.stack([noise.flatten(), other.flatten()])
        # four standard deviations of 512 x 512 pairs
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / 512

    assert len(noise.unique()) > 0.98 * noise.numel()  # float32 has few numbers near the middle


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    together = gumbel_noise(row_keys([5, 6, 7], CPU), 2, 40)
    assert torch.equal(together[1:2], gumbel_noise(row_keys([6], CPU), 2, 40))
    assert torch.equal(together[:, :11], gumbel_noise(row_keys([5, 6, 7], CPU), 2, 11))
    assert torch.isfinite(together).all()
