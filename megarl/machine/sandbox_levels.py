"""The levels of the sandbox, and the command line that starts a program at each."""

from __future__ import annotations

import marshal
import os
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import megarl
from megarl.machine import readable_files

_MAX_THREADS = 128
WRITABLE = ("/dev/null",)
_PACKAGE = Path(megarl.__file__).absolute().parent
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
# Folders from which bubblewrap's processes start Python. The program itself may read only readable_files.
PYTHONS = tuple(
    sorted(
        {
            sys.prefix,
            sys.base_prefix,
            *map(os.path.realpath, (sys.base_prefix, os.__file__ + "/..", sys.executable + "/..")),
        }
    )
)
_SHOWN = (*_SYSTEM, *PYTHONS, str(_PACKAGE / "__init__.py"), str(_PACKAGE / "machine"))


class Level(str, Enum):
    """The levels of isolation, strongest first.

    The last one has no isolation and is used only if it is set explicitly.
    """

    bubblewrap = "bubblewrap"  # namespaces and a separate file system, with `bwrap`
    namespaces = "namespaces"  # of processes, network and mounts, with `unshare`; files by Landlock
    landlock = "landlock"  # files by Landlock, all else by seccomp; needs no installation or permission
    process = "process"  # limits of memory and time only


class SandboxError(RuntimeError):
    """No sandbox works on this machine, or the requested level does not.

    The message contains the reason and the fix.
    """


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """The limits of a program.

    Attributes:
        memory_mb: Address space.
        cpu_s: CPU time in seconds.
        wall_s: Wall-clock time in seconds.
        output_kb: Output on both streams together.
        disk_mb: Files in /tmp, if it has one.
    """

    memory_mb: int = 512
    cpu_s: int = 10
    wall_s: float = 15.0
    output_kb: int = 64
    disk_mb: int = 16


def order_for(program: str, level: Level, limits: SandboxLimits, channel: int) -> bytes:
    """Return the order to run a program, for `sandbox_program.run`.

    It has the text of the program and these entries:
    - limits: The arguments of ProcessLimits, in order.
    - readable, writable: See confine.
    - is_confined: False to set limits only.
    - has_own_init: Whether process 1 belongs to the sandbox, as in a process namespace.
    - temporary_mb: The size of the /tmp to create; 0 for none.
    - channel: The descriptor of a socket for messages to the caller.
    """
    has_own_files = level is Level.bubblewrap
    order = dict(
        program=program,
        limits=(limits.memory_mb, limits.cpu_s, limits.disk_mb, _MAX_THREADS),
        readable=readable_files.for_programs(),
        writable=(*WRITABLE, "/tmp") if has_own_files else WRITABLE,
        is_confined=level is not Level.process,
        has_own_init=level in (Level.bubblewrap, Level.namespaces),
        temporary_mb=limits.disk_mb if has_own_files else 0,
        channel=channel,
    )
    return marshal.dumps(order)


def command_for(level: Level, order: int) -> list[str]:
    start = (
        f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r}); from megarl.machine.sandbox_program "
        f"import run; run({order})"
    )
    python = [readable_files.PYTHON, "-I", "-S", "-B", "-c", start]
    if level not in (Level.bubblewrap, Level.namespaces):
        return python

    # Set the death signal of the outermost process; the innermost sets its own.
    around = [_tool("setpriv", level), "--pdeathsig", "KILL"]
    if level is Level.namespaces:
        around += [
            _tool("unshare", level),
            "--fork",
            "--kill-child",
            "--pid",
            "--net",
            "--ipc",
            "--uts",
            "--mount",
            "--mount-proc",
        ]
        around += [] if os.geteuid() == 0 else ["--map-root-user"]
    else:
        around += [_tool("bwrap", level), "--unshare-all", "--die-with-parent", "--new-session"]
        # The sandboxed process drops this capability once it has mounted /tmp.
        around += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        around += ["--proc", "/proc", "--dir", "/tmp"]
        # `--dev` cannot be used: for users other than root it adds a user namespace in which that capability
        # does not apply to the mounts.
        for path in readable_files.DEVICES:
            around += ["--dev-bind", path, path]
        for path in _SHOWN:
            around += ["--ro-bind-try", path, path]

    return [*around, *python]


def _tool(name: str, level: Level) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"the sandbox {level.value} needs {name!r}, which is not installed")
    return path
