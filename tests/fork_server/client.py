"""Stub of `python`: the process that runs the program is forked from the fork server, and this one ends as it
does. It starts thousands of times, so it imports only what loads quickly.

The forked process gets this one's arguments, environment, folder, open files, and signals. Ray's nodes start
workers in this script as well, instead of Ray's setup_worker.py, and daemons. If there is no server, or for
unknown options or kinds, Python itself starts. Standard library only.
"""

from __future__ import annotations

import _signal  # `signal` and `socket` without their enums, which take longer to load than Python itself
import _socket
import marshal
import os
import sys

ADDRESS = "WARM_PROCESSES"  # environment variable: the folder of the servers' sockets
# Kinds of processes, which are names of sockets; the last is for Ray's own.
TRAINING = "training"
REHEARSAL = "rehearsal"
SGLANG = "sglang"
DAEMON = "daemon"
DRIVER = "driver"  # begins the name of a socket: for commands, in whose processes Ray is imported
MAX_MESSAGE_BYTES = 2**18
_FORWARDED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
_WITHOUT_MEANING = ("-B", "-W")  # ignored options, for compiling and warnings
_UNBUFFERED = "-u"
# Imports nothing, and is needed by processes that end after the server.
_TRACKER = "multiprocessing.resource_tracker"
_RAY_WORKER = "default_worker.py"
# Variables that Ray's daemons read when it is imported, in a cluster that megarl starts on this machine.
RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# options that setup_worker.py consumes
_RAY_CONTEXT = "--serialized-runtime-env-context="
_RAY_LANGUAGE = "--language="


def main(arguments: list[str]) -> None:
    kind = (
        arguments.pop(0)[2:] if arguments[0] in (f"--{REHEARSAL}", f"--{SGLANG}", f"--{DAEMON}") else TRAINING
    )
    of_ray = arguments[0].endswith(_RAY_WORKER)
    before = (
        [os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")]
        if of_ray
        else ["-u"]
        if kind == DAEMON
        else []
    )
    fresh = [sys.executable, *before, *arguments]
    program = (
        [argument for argument in arguments if not argument.startswith((_RAY_CONTEXT, _RAY_LANGUAGE))]
        if of_ray
        else arguments
    )
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    while (option := program[0]).startswith((*_WITHOUT_MEANING, _UNBUFFERED)):
        unbuffered |= option == _UNBUFFERED
        del program[: 2 if option == "-W" else 1]
    if not _can_be_forked(program, kind) or (of_ray and not _takes_context(arguments)):
        os.execv(fresh[0], fresh)
    end_as(
        run(
            program,
            kind,
            unbuffered,
            node_address("node" if of_ray else DRIVER) if of_ray or _is_driver(program) else "",
        )
    )


def _can_be_forked(program: list[str], kind: str) -> bool:
    if not os.path.exists(f"{os.environ.get(ADDRESS)}/{kind}") or (
        kind == DAEMON and not RAY_ENVIRONMENT.items() <= os.environ.items()
    ):
        return False
    if program[0] == "-c":
        return _TRACKER not in program[1]
    return program[0] == "-m" or not program[0].startswith("-")


def read_by_ray(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that Ray reads when it is imported. Workers of one job on one node have the
    same."""
    return {name: environment[name] for name in sorted(environment) if name.startswith("RAY_")}


def _is_driver(program: list[str]) -> bool:
    """Return whether this is megarl's command, without an address of Ray that no other command has."""
    return program[:2] == ["-m", "megarl"] and "RAY_ADDRESS" not in os.environ


def node_address(name: str) -> str:
    """Return the address of the server for processes with the same settings, which may exist."""
    import zlib

    settings = "".join(f"{name}={value}\0" for name, value in read_by_ray(dict(os.environ)).items())
    return f"{os.environ[ADDRESS]}/{name}-{zlib.crc32(settings.encode()):x}"


def _takes_context(arguments: list[str]) -> bool:
    """Set environment and folder, as setup_worker.py does before it starts a worker. Returns False if more is
    needed."""
    contexts = [
        argument.removeprefix(_RAY_CONTEXT) for argument in arguments if argument.startswith(_RAY_CONTEXT)
    ]
    if contexts in ([], ["{}"]):
        return True

    # imported here, because this and the next double the startup time and are rarely needed
    import json
    import shlex

    context = json.loads(contexts[0])

    match context.get("command_prefix", []):
        case []:
            pass
        case ["cd", folder, "&&"]:
            os.chdir(*shlex.split(folder))
        case _:
            return False

    if context.get("override_worker_entrypoint") or any(
        "$" in value for value in context.get("env_vars", {}).values()
    ):
        return False

    os.environ.update(context.get("env_vars", {}))
    return True


def run(program: list[str], kind: str, unbuffered: bool, node: str) -> int:
    """Run a program, and return its exit code, or minus the number of the signal that ended it. `unbuffered`:
    whether its output is. `node`: of a Ray worker, the possible address of its node's server."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
    files = _inherited()
    connection.connect(node if os.path.exists(node) else f"{os.environ[ADDRESS]}/{kind}")
    ignored = [number for number in _FORWARDED if _signal.getsignal(number) == _signal.SIG_IGN]
    request = {
        "program": program,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "ignored": ignored,
        "client": os.getpid(),
        "parent": os.getppid(),
        "unbuffered": unbuffered,
        "node": node,
    }
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    connection.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
    for number in set(_FORWARDED) - set(ignored):
        _signal.signal(number, lambda number, frame: connection.send(str(number).encode()) and None)

    return int(connection.recv(64) or -_signal.SIGKILL)


def _inherited() -> list[int]:
    """Return the open files that a program started here would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # the file of the listing itself

    return found


def end_as(code: int) -> None:
    if code < 0:
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
