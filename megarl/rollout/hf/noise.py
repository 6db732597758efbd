"""Random numbers by position instead of by turn: a token's noise follows from (seed, step, token id) and nothing else.

A generator with a state would hand a row other numbers when the batch around it changes. This hash has no state, so that a sample
can be written again, alone or beside others, and comes out the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# SplitMix64 (Steele, Lea, Flood 2014): the increment and the two multipliers, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
_BITS = 53  # of a hash that are used


def row_keys(seeds: Sequence[int], device: torch.device) -> torch.Tensor:
    """(B,) int64, one per row; `seeds` are any integers, of which the lowest 63 bits count."""
    return _mix(torch.tensor([seed % 2**63 for seed in seeds], dtype=torch.int64, device=device) + _INCREMENT)


def gumbel_noise(keys: torch.Tensor, step: int, vocab_size: int) -> torch.Tensor:
    """(B, V) float32, Gumbel(0, 1): the argmax of log-probs plus this noise is a draw from the distribution.

    keys: (B,) int64 of `row_keys`. step: how many tokens of the sample were drawn before.
    """
    keys = _mix(keys + step)
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _INCREMENT
    bits = _mix(keys[:, None] + counters)
    bits = bits.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1)
    # In (0, 1], and exact near 0, where the largest noise comes from; a float32 near 1 has no room for that.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-_BITS)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of `state`, which is overwritten."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # The shift keeps the sign; the mask takes its copies away.
        state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if multiplier != 1:
            state.mul_(multiplier)
    return state
