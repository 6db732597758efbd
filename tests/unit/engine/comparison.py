"""The differences between two sets of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def relative_differences(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, float]:
    """Return |got - want| / max(|want|, floor) by name, as Euclidean norms in float64. The names must match."""
    assert got.keys() == want.keys(), (
        f"missing {sorted(want.keys() - got.keys())}, extra {sorted(got.keys() - want.keys())}"
    )
    differences = {}

    for name, expected in want.items():
        assert got[name].shape == expected.shape, name
        distance = float((got[name].double() - expected.double()).norm())
        scale = max(float(expected.double().norm()), floor)
        differences[name] = distance / scale if scale else (0.0 if distance == 0.0 else float("inf"))

    return differences


def assert_same(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, floor: float = 0.0
) -> None:
    """Check every tensor against `tolerance`, measured by `relative_differences`."""
    differences = relative_differences(got, want, floor)

    # `not <=`, so that NaN counts as a difference.
    wrong = {name: difference for name, difference in differences.items() if not difference <= tolerance}
    worst = sorted(wrong, key=lambda name: -wrong[name])[:5]
    assert not wrong, f"{len(wrong)} of {len(differences)} tensors differ: " + ", ".join(
        f"{name} by {wrong[name]:.2e}" for name in worst
    )


def max_difference(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference of any element, infinite for NaN."""
    difference = (got.double() - want.double()).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")
