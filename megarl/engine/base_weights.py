"""The original weights of modules that train in full next to adapters, for passes of the base model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class BaseChecksum(NamedTuple):
    """Checksums of a base, which do not depend on the layout.

    Attributes:
        frozen: All frozen weights.
        originals: The original weights of modules that train in full next to adapters. None if the model does
            not keep them, because no pass uses them.
    """

    frozen: int
    originals: int | None


class BaseWeights:
    """Copies of weights as they were before training. They are in memory, or offloaded, with the parameters.

    A pass of the model without its adapters uses the copies; the other frozen weights need none.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.nn.Parameter, Tensor]] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [copy for _, copy in self._copies]

    def keep(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the present values of parameters."""
        self._copies = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Run the model with the copies within the block. Gradients and the optimizer are not affected."""
        trained = [parameter.data for parameter, _ in self._copies]
        for parameter, copy in self._copies:
            parameter.data = copy
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._copies, trained, strict=True):
                parameter.data = data
