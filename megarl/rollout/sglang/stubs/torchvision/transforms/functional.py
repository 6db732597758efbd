"""Every name can be imported, and raises when it is called."""

from collections.abc import Callable
from typing import NoReturn

from . import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"torchvision's {name} was called: megarl generates text, install torchvision for images"
        )

    return function
