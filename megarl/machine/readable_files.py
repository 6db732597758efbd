"""The files that a confined process may read.

They are those that Python's standard library needs, without installed packages.
"""

from __future__ import annotations

import functools
import os
import site
import subprocess
import sys
import sysconfig

PYTHON = os.path.realpath(sys.executable)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/usr/share/zoneinfo")
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


@functools.cache
def for_programs() -> tuple[str, ...]:
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

    return (*DEVICES, *_SYSTEM, *modules, *filter(None, libraries))


def for_functions() -> tuple[str, ...]:
    """Return the files that a user's function may read.

    They include the installed packages and the system's shared libraries.
    """
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    return (*for_programs(), *sorted(packages), *_LIBRARY_FOLDERS)


def _is_of_standard_library(name: str) -> bool:
    module = name.partition(".")[0]
    return module in sys.stdlib_module_names or name in _BESIDE_MODULES or name.startswith("_sysconfigdata")
