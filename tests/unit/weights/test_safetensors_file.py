"""NaN and infinity are found in weights of every type that a folder may have."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.safetensors_file import nonfinite_problem

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nan_is_found_and_large_values_are_not_it(dtype: torch.dtype) -> None:
    large = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert nonfinite_problem(large) is None
    assert nonfinite_problem(torch.tensor([1.0, float("nan")]).to(dtype)) is not None
