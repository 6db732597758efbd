"""Every engine from every layout by every carrier, and thirty-two engines that die or hang in a push."""

from __future__ import annotations

import os
import subprocess
import sys

FILES = (
    "tests/integration/test_weights_hf.py",
    "tests/integration/test_weights_sglang.py",
    "tests/unit/weights/test_carrier_failures.py",
)


def test_the_whole_product_and_many_deaths() -> None:
    """The tests of `make test` with more of their cases, in a session of their own."""
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", *FILES], env={**os.environ, "MEGARL_SOAK": "4"})
    assert ended.returncode == 0
