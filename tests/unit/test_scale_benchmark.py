"""benchmarks/scale.py makes the step that training makes: one prompt of it."""

from __future__ import annotations

import pytest

from benchmarks.scale import MOST_SENT, NUM_PROMPTS, measure


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [("grpo", {"reward", "reference", "actor"}), ("ppo", {"reward", "reference", "actor", "critic"})],
)
def test_each_role_is_sent_what_it_needs(algorithm: str, roles: set[str]) -> None:
    found = measure(algorithm, NUM_PROMPTS // 2)
    assert found["sent"].keys() == roles
    assert max(found["sent"].values()) < 2 * MOST_SENT  # of so few rows their lengths and names count
    assert found["tokens"] > 0
