"""Test the resident memory of a rank over 160 steps; an earlier leak grew by a third in 220; the soak tests
run 500 steps."""

import os
import subprocess
import sys

from tests.docs.pages import ROOT

STEPS = 500 if "MEGARL_SOAK" in os.environ else 160


def test_it_stays_flat() -> None:
    command = [sys.executable, "-m", "tests.soak.rss", "--steps", str(STEPS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
