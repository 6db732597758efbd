"""How a p2p group calls a backend outside any process group.

NCCL's backend cannot be created on a CPU, but all backends have the same signatures.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.weights.p2p import BACKENDS, P2PGroup
from megarl.weights.tensors import WeightTransferError


class Bare:
    """A backend of another class than gloo's, so that it is used like NCCL's."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_its_messages_are_coalesced_by_the_signatures_of_a_backend(tmp_path: Path) -> None:
    """gloo refuses to coalesce with an error of its own, but Python would complain about wrong arguments first."""
    backend = BACKENDS["gloo"](
        dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=10), "127.0.0.1", 1
    )
    p2p = P2PGroup(Bare(backend), torch.device("cpu"), "bare")
    with pytest.raises(WeightTransferError, match="gloo does not implement startCoalescing"):
        p2p.start([], [], 0)
