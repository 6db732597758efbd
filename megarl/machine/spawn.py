"""Processes that begin with nothing of the one that starts them, which may have threads and a GPU: its script is not run in them either.

multiprocessing's own begin with the script, so that one without `if __name__ == "__main__":` would start itself again in each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import Any

_SCRIPT = ("__file__", "__spec__")  # of `__main__`: by which of both it is known to multiprocessing
_launching = Lock()


class FreshProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802  (multiprocessing's name for it)
        with _launching, _without_script():
            return SpawnProcess._Popen(process_obj)


class FreshContext(SpawnContext):
    """What runs in its processes must be importable: not of the script."""

    Process = FreshProcess


@contextmanager
def _without_script() -> Iterator[None]:
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in _SCRIPT if name in main}
    main.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        main.update(kept)
