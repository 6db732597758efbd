"""SGLang's modules, imported once in a server and put aside: its children train, and some of them start an
engine later.

transformers decides at import time which of its classes exist, and SGLang provides stubs for the packages that
some of them need, so SGLang has a transformers of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from types import ModuleType

_OWN = ("sglang", "transformers")
_MODULES: dict[str, ModuleType] = {}
_loop_policy: asyncio.AbstractEventLoopPolicy | None = None


def import_sglang() -> None:
    """Import what an engine in a worker imports. The modules and settings of this process are the same
    afterwards, except for packages that SGLang and training share."""
    global _loop_policy
    environment = dict(os.environ)
    path = list(sys.path)
    loop_policy = asyncio.get_event_loop_policy()
    handlers = list(logging.root.handlers)
    training = _removed()

    from megarl.rollout.sglang.environment import STUBS, prepare

    prepare("cpu")
    for name in ("sglang.srt.entrypoints.engine", "sglang.srt.managers.io_struct"):
        importlib.import_module(name)

    _MODULES.update(_removed(str(STUBS)))
    # Each process imports those that prepare it for SGLang.
    for name in [name for name in sys.modules if name.startswith("megarl.rollout.sglang")]:
        del sys.modules[name]

    _loop_policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(loop_policy)
    logging.root.handlers[:] = handlers
    signal.signal(
        signal.SIGSEGV, signal.SIG_DFL
    )  # a compiled package catches it, and Ray's own handler comes later
    sys.modules.update(training)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)


def take() -> None:
    """Replace transformers with SGLang's modules, and set the loops that SGLang does, if they have been
    imported."""
    _removed()
    sys.modules.update(_MODULES)
    if _loop_policy is not None:
        asyncio.set_event_loop_policy(_loop_policy)


def _removed(folder: str | None = None) -> dict[str, ModuleType]:
    """Remove the modules of SGLang, of transformers, and of a folder from the imported ones, and return
    them."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    names = [
        name
        for name, file in files.items()
        if name.partition(".")[0] in _OWN or (folder is not None and file.startswith(folder))
    ]
    return {name: sys.modules.pop(name) for name in names}
