"""Whether processes of this machine could compute on a GPU, without asking a driver or importing torch."""

from __future__ import annotations

import os
import runpy
from importlib.util import find_spec
from pathlib import Path


def torch_cuda() -> str | None:
    """The CUDA that torch is built for; None without torch, or with one that is built without."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).parent / "version.py")).get("cuda")


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """A device of NVIDIA's driver that this process may see, and a torch that can use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
    return not hidden and any(devices.glob("nvidia[0-9]*")) and torch_cuda() is not None
