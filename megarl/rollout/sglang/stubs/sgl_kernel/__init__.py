"""Stub of sgl_kernel, whose wheels need CUDA: every name can be imported, and raises when it is called."""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called: it is a CUDA kernel, and this process runs SGLang on the CPU"
        )

    kernel.__name__ = name
    return kernel
