"""The random number generators of a rank: torch's, the GPU's, Megatron's tracker, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.engine import platform


def random_state() -> dict[str, Any]:
    """Tensors, numbers and containers of them only, so that it can be read without running a pickle's code."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "tracker": {name: generator.clone() for name, generator in get_cuda_rng_tracker().get_states().items()},
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if platform.current().is_cuda else state


def set_random_state(state: dict[str, Any]) -> None:
    """What `random_state` gave, on the same kind of device."""
    torch.set_rng_state(state["torch"])
    if platform.current().is_cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
