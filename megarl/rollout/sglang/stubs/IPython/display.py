"""Stub of IPython.display: SGLang's processes are not notebooks."""

from typing import NoReturn


def _refuse(*arguments: object, **keywords: object) -> NoReturn:
    raise NotImplementedError("IPython.display was called: it is not installed")


display = HTML = _refuse
