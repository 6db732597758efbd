"""Starts orders in the namespaces of a sandbox, see megarl/machine/namespaces.py."""

from __future__ import annotations

import json
import os
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megarl
from megarl.machine.reaper import OWNER

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START = (
    f"import sys; sys.path.insert(0, {str(Path(megarl.__file__).absolute().parents[1])!r}); from "
    "megarl.machine.namespaces import run; run(*map(int, sys.argv[1:]))"
)


async def start_order(
    pidfd: int, order: str, *, stderr: int = PIPE, pass_fds: Sequence[int] = (), **arguments: Any
) -> Process:
    """Start an order, with pipes for its standard input and output.

    Args:
        pidfd: A descriptor of the process whose namespaces are joined. A process number could be used again.
        order: The name of a function in megarl.machine.namespaces.ORDERS.
        stderr: As for a subprocess.
        pass_fds: Descriptors that it inherits.
        arguments: The further arguments of the function.
    """
    # Other users of the machine can read command lines, and the arguments contain keys.
    with open(os.memfd_create("order"), "w+b") as file:
        file.write(json.dumps([order, arguments]).encode())
        file.seek(0)
        return await create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", "-c", _START, str(pidfd), str(file.fileno())),
            pass_fds=[pidfd, file.fileno(), *pass_fds],
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=own_environment(),
        )


def own_environment() -> dict[str, str]:
    """Return the variables of processes that hold or join a sandbox: the mark by which the run ends them."""
    return {"PATH": SEARCH_PATH, **{name: os.environ[name] for name in (OWNER,) if name in os.environ}}
