"""The levels of the sandbox, the command line that starts a program at each, and the files that it may read.

These are the files that Python's standard library needs, without installed packages.
"""

from __future__ import annotations

import functools
import marshal
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import megarl

_MAX_THREADS = 128
PYTHON = os.path.realpath(sys.executable)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/usr/share/zoneinfo")
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# Entries of the standard library that are not named after a module.
_BESIDE_MODULES = {"lib-dynload", "__pycache__"}
# A program that loads every compiled module of the standard library and prints the files mapped afterwards,
# which are shared libraries. The C library loads libgcc_s when a thread exits.
_PROBE = """
import ctypes, importlib, os, sys
for name in ("libgcc_s.so.1",):
    try: ctypes.CDLL(name)
    except OSError: pass
for folder in sys.path:
    for file in os.listdir(folder) if folder.endswith("lib-dynload") and os.path.isdir(folder) else ():
        name = file.partition(".")[0]
        if name in sys.stdlib_module_names and name != "_tkinter":
            try: importlib.import_module(name)
            except ImportError: pass
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].rstrip("\\n") for line in maps if line.count("/")}
print("\\n".join(file for file in sorted(files) if file.startswith("/") and os.path.isfile(file)))
"""
WRITABLE = ("/dev/null",)
_PACKAGE = Path(megarl.__file__).absolute().parent
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
# Folders from which bubblewrap's processes start Python. The program itself may read less.
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
        readable=readable_by_programs(),
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
    python = [PYTHON, "-I", "-S", "-B", "-c", start]
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
        for path in DEVICES:
            around += ["--dev-bind", path, path]
        for path in _SHOWN:
            around += ["--ro-bind-try", path, path]

    return [*around, *python]


def _tool(name: str, level: Level) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"the sandbox {level.value} needs {name!r}, which is not installed")
    return path


# ---- files


@functools.cache
def readable_by_programs() -> tuple[str, ...]:
    """Return the files of the standard library and the shared libraries that it uses.

    Installed packages are in subfolders of the standard library's folder, and Landlock cannot exclude parts
    of a folder, so the modules of the standard library are listed one by one.
    """
    folder = os.path.dirname(os.path.realpath(os.__file__))
    with os.scandir(folder) as entries:
        modules = sorted(entry.path for entry in entries if _is_of_standard_library(entry.name))
    command = [PYTHON, "-I", "-S", "-B", "-c", _PROBE]
    libraries = subprocess.run(
        command, env={}, cwd="/", capture_output=True, text=True, check=True
    ).stdout.split("\n")

    return (*DEVICES, *_LOADER_FILES, *modules, *filter(None, libraries))


def readable_by_functions() -> tuple[str, ...]:
    """Return the files that a user's function may read.

    They include the installed packages and the system's shared libraries.
    """
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    return (*readable_by_programs(), *sorted(packages), *_LIBRARY_FOLDERS)


def _is_of_standard_library(name: str) -> bool:
    module = name.partition(".")[0]
    return module in sys.stdlib_module_names or name in _BESIDE_MODULES or name.startswith("_sysconfigdata")


# ---- settings of a machine or a container that forbid namespaces, and how to change them. Sources:
# user_namespaces(7), seccomp(2), mount_too_revealing() in fs/namespace.c of Linux, AppArmor's restriction of
# unprivileged user namespaces in Ubuntu 23.10 and newer.


# Settings with the value that forbids user namespaces, and the command that changes it.
_SETTINGS = (
    ("sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    # Debian and older Ubuntu
    ("sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
)
# Ubuntu 23.10 and newer: a user namespace of a program without a profile has no privileges.
_APPARMOR_RESTRICTION = "sys/kernel/apparmor_restrict_unprivileged_userns"


def namespace_obstacles(proc: Path = Path("/proc"), is_root: bool | None = None) -> list[str]:
    """Return what may forbid namespaces here, each with its fix; empty if nothing is known to.

    Args:
        proc: The process file system.
        is_root: Whether this process has the user ID 0. None: look.
    """
    return list(_obstacles(proc, os.geteuid() == 0 if is_root is None else is_root))


def _obstacles(proc: Path, is_root: bool) -> Iterator[str]:
    for setting, forbids, fix in _SETTINGS:
        if _read(proc / setting) == forbids:
            yield f"/proc/{setting} is {forbids} ({fix})"
    if not is_root and _read(proc / _APPARMOR_RESTRICTION) == "1":
        yield (
            f"/proc/{_APPARMOR_RESTRICTION} is 1, as on Ubuntu 24.04 (sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a profile of AppArmor with `userns,` for "
            "bwrap)"
        )

    # These are set by the engine of a container. A program cannot change them from inside.
    if "Seccomp:\t2" in _read(proc / "self/status"):
        yield (
            "a seccomp filter of the container (docker and podman: --security-opt seccomp=unconfined; "
            "Kubernetes: seccompProfile.type: Unconfined)"
        )
    # On machines with SELinux, self/attr/current is a label of SELinux.
    profile = _read(proc / "self/attr/apparmor/current")
    if profile and not profile.startswith("unconfined"):
        yield (
            f"the AppArmor profile {profile} (docker: --security-opt apparmor=unconfined; Kubernetes: "
            "appArmorProfile.type: Unconfined)"
        )
    if covered := _covered(_read(proc / "self/mountinfo")):
        yield (
            f"{covered} is covered by another mount, so no further /proc can be mounted (docker: "
            "--security-opt systempaths=unconfined; podman: --security-opt unmask=ALL; Kubernetes: "
            "procMount: Unmasked)"
        )


def _covered(mounts: str) -> str:
    """Return a path in /proc that something is mounted on, such as by a container engine; empty if none is.

    The kernel then mounts no new /proc in a user namespace, because it would show what is covered.
    """
    places = (line.split()[4] for line in mounts.splitlines())
    # Programs mount binfmt_misc on an empty folder, which covers nothing.
    return next((place for place in places if place.startswith("/proc/") and "binfmt_misc" not in place), "")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the kernel does not have it
        return ""
