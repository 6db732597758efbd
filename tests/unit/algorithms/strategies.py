"""Random batches for property tests: masks with gaps and rows of any length."""

import torch
from hypothesis import strategies as st


@st.composite
def masks(draw, min_rows=1, max_rows=5, max_tokens=9):
    """Generate masks (B, R) bool; a row may have gaps or be empty."""
    num_rows = draw(st.integers(min_rows, max_rows))
    num_tokens = draw(st.integers(1, max_tokens))
    row = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    return torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))


def normal(mask, seed, dtype=torch.float64):
    """Return standard normal numbers in the shape of the mask."""
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def poison(x, mask, value=float("nan")):
    """Return x with `value` in the masked slots."""
    return torch.where(mask, x, value)
