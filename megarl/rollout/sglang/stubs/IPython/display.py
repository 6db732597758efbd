"""Nothing is displayed: SGLang's processes are no notebook."""

from typing import NoReturn


def _refuse(*arguments: object, **keywords: object) -> NoReturn:
    raise NotImplementedError("IPython.display was called: it is not installed")


display = HTML = _refuse
