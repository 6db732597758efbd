"""A small computation that is the same on every rank, so that its duration shows how fast the device is.

The time of a rank's own work would depend on its rows and its part of the model, and include waiting for
other ranks.
"""

from __future__ import annotations

import torch

from megarl.engine import platform

# Edge of the matrices and number of products: about 1 ms on a CPU core, and 3 ms on an H100 at its peak rate.
ON_CPU = (192, 4)
ON_CUDA = (2048, 128)


class SpeedProbe:
    """The computation, with its matrices in the memory of the device."""

    def __init__(self) -> None:
        self._is_cuda = platform.current().is_cuda
        edge, self._repeats = ON_CUDA if self._is_cuda else ON_CPU
        dtype = torch.bfloat16 if self._is_cuda else torch.float32
        # The product of two such matrices is the same matrix, so values neither grow nor vanish when it is
        # repeated.
        self._factor = torch.full((edge, edge), 1 / edge, dtype=dtype, device=platform.current().device)
        self._product = self._factor.clone()

    def settle(self) -> None:
        """Wait until the device has no other work of this process."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def run(self) -> None:
        """Compute the products. The device is done when this returns."""
        for _ in range(self._repeats):
            torch.mm(self._factor, self._factor, out=self._product)
        self.settle()
