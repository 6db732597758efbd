"""Stub of soundfile, which SGLang imports for speech models: every name raises when it is called."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"soundfile.{name} was called: megarl generates text, install soundfile for speech"
        )

    return function
