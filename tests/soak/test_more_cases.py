"""Test every engine from every layout by every transport, 32 deaths during a weight sync, 2,000 damaged
configurations, the layers of every shipped run, each field of the published models, every command on more
kinds of run, and memory over 500 steps."""

from __future__ import annotations

import os
import subprocess
import sys

FILES = (
    "tests/integration/test_commands_on_runs.py",
    "tests/integration/test_rss.py",
    "tests/integration/test_weights_hf.py",
    "tests/integration/test_weights_sglang.py",
    "tests/unit/config/test_mutations.py",
    "tests/unit/models/test_missing_fields.py",
    "tests/unit/rehearse/dry_run/test_transformer_engine.py",
    "tests/unit/weights/test_transport_failures.py",
)


def test_the_whole_product_many_deaths_and_much_damage() -> None:
    """Run the tests of `make test` with more cases, in a separate session."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *FILES], env={**os.environ, "MEGARL_SOAK": "4"}
    )
    assert ended.returncode == 0
