"""The resident memory of a rank over 500 steps."""

import subprocess
import sys

from tests.docs.pages import ROOT


def test_it_stays_flat() -> None:
    ended = subprocess.run([sys.executable, "-m", "tests.soak.rss"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
