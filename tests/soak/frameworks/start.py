"""Runs a program of this folder in a process that is forked from one which has imported its framework.

    VENV/bin/python start.py serve SOCKET PROGRAM
    python -S -E start.py run SOCKET

Importing a framework takes seconds, and a training step has more than a hundred episodes. The forked process
has the environment and the standard streams of the second command, which ends as it does. Standard library
only.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import marshal
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

_MAX_BYTES = 1 << 17
_NUM_STREAMS = 3


def serve(address: str, program: str) -> None:
    """Serve until this process is terminated. The first program runs alone."""
    module = importlib.import_module(program)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no forked process is waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(512)
        imported, ended = os.pipe()
        _fork(listener, module.main, ended)
        os.close(ended)
        with open(imported) as names:
            _import_again(names.read().split())
        gc.freeze()  # otherwise collections copy the memory that forked processes share

        while True:
            _fork(listener, module.main)


def _import_again(names: list[str]) -> None:
    """Import what the first program has imported while it ran. Modules made by other means are left out."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _fork(listener: socket.socket, main: Callable[[], None], imported: int | None = None) -> None:
    """Run the program for the next client. Its modules are written to the file `imported`."""
    connection, _ = listener.accept()
    if os.fork() == 0:
        listener.close()
        _become(connection, main, imported)
    connection.close()


def _become(connection: socket.socket, main: Callable[[], None], imported: int | None) -> None:
    """Run the program, and end with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, socket.CMSG_LEN(_NUM_STREAMS * 4))
    for number, file in enumerate(array.array("i", ancillary[0][2])):
        os.dup2(file, number)  # sys.stdin, sys.stdout and sys.stderr use these numbers
        os.close(file)
    os.environ.clear()
    os.environ.update(marshal.loads(message))

    def end_with_client() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_client, daemon=True).start()
    status = 0
    try:
        main()
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
        status = 1
    if imported is not None:
        os.write(imported, " ".join(sys.modules).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(bytes([status]))
    os._exit(status)


def run(address: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        connection.connect(address)
        streams = array.array("i", range(_NUM_STREAMS))
        connection.sendmsg(
            [marshal.dumps(dict(os.environ))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        )
        return (connection.recv(1) or b"\1")[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(run(sys.argv[2]))
