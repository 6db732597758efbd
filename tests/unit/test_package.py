"""What setup.py puts into a wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """Data files and the stand-ins of SGLang's processes too."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    assert files(tmp_path) == files(ROOT)


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in (folder / "megarl").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
