"""Fork servers, one for each kind of process. A server does the slow imports when the first client asks,
starts no thread, and serves until its standard input closes at the end of the tests.

Ray reads its environment when it is imported, including the node and job of a worker. The workers of a job
on a node therefore have a server of their own, in whose processes Ray is already imported: a worker starts in
a quarter of the time that importing Ray would take.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import logging
import marshal
import os
import selectors
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from megarl.config.schema import Device
from megarl.machine.garbage import collect_rarely
from tests.fork_server import WITHOUT_SGLANG, aside, write_launchers
from tests.fork_server.client import (
    DAEMON,
    DRIVER,
    MAX_MESSAGE_BYTES,
    RAY_ENVIRONMENT,
    REHEARSAL,
    SGLANG,
    TRAINING,
    read_by_ray,
)
from tests.fork_server.process import Request, become, run

_MAX_FILES = 253  # the kernel's limit for one message
_HUGE_PAGE_BYTES = 2**21
_MADV_COLLAPSE = 25  # since Linux 6.1
_NODE = "node"  # kind: workers of one node and one job of Ray
_PARTIAL = ".partial"  # ends the address of a server that does not listen yet


def _import_for_training() -> None:
    # pyarrow, which Ray's workers import, would start a thread
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    from megarl.engine import platform

    platform.activate(Device.cpu)  # before Megatron is imported

    for name in (
        # most of Ray's imports
        *("jsonschema", "pydantic.v1", "requests", "starlette.datastructures"),
        "megarl.algorithms.losses",
        "megarl.config.load",
        "megarl.engine.checkpoint",
        "megarl.plan.placement.plan",
        "megarl.rollout.hf.engine",
        "megarl.roles.megatron_worker",
        "megarl.rewards.reward_worker",
        "megarl.roles.reward_model_worker",
        "megarl.rollout.worker.rollout_worker",
        "megatron.core.models.mimo",  # by the first optimizer
        "pyarrow.parquet",
        "rich.progress",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
    ):
        importlib.import_module(name)

    if WITHOUT_SGLANG not in os.environ:
        aside.import_sglang()


def _import_for_a_rehearsal() -> None:
    from megarl.rehearse.dry_run import processes

    processes.make_ready()  # before torch is imported
    processes.make_ready = lambda: None  # each process would call it


def _import_for_sglang() -> None:
    import setproctitle

    from megarl.rollout.sglang import environment

    # finds the memory of the title, which fails once the environment has changed
    setproctitle.getproctitle()

    environment.prepare("cpu")
    from megarl.rollout.sglang.processes import hide_training_packages

    hide_training_packages()  # as each scheduler does before these imports

    for name in (
        "megarl.rollout.sglang.cpu_adaptations",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
    ):
        importlib.import_module(name)


def _import_for_a_daemon() -> None:
    # Ray reads these now; the last is given to agents by a raylet, so that they end when it does.
    os.environ.update({**RAY_ENVIRONMENT, "RAY_enable_pipe_based_agent_to_parent_health_check": "1"})
    from ray import _raylet
    from ray.dashboard import utils

    _raylet.getproctitle()  # same as for setproctitle above
    logging.disable(logging.INFO)
    utils.get_all_modules(utils.DashboardAgentModule)
    logging.disable(logging.NOTSET)

    for name in (
        "ray.dashboard.agent",
        "ray.dashboard.dashboard",
        "ray._private.runtime_env.agent.runtime_env_agent",
    ):
        importlib.import_module(name)


def _import_for_a_node(request: Request) -> None:
    os.environ.update(read_by_ray(request.environment))
    from ray import _raylet

    _raylet.getproctitle()

    for name in (
        *(("megarl.cli.main", "megarl.cli.run.train") if _is_of_drivers(request) else ()),
        "megarl.controller.host",
        "pyarrow.json",
        "ray._common.pydantic_compat",
        "ray._common.usage.usage_lib",
        "ray._private.arrow_serialization",
        "ray._private.async_compat",
        "ray._private.serialization",
        "ray._private.workers.default_worker",
        "ray.util.serialization_addons",
        "uvloop",
    ):
        importlib.import_module(name)


def _is_of_drivers(request: Request) -> bool:
    """Return whether the node of a request stands for the settings that several commands have."""
    return Path(request.node).name.startswith(DRIVER)


KINDS: Mapping[str, Callable[[], None]] = {
    TRAINING: _import_for_training,
    REHEARSAL: _import_for_a_rehearsal,
    SGLANG: _import_for_sglang,
    DAEMON: _import_for_a_daemon,
}


def main(folder: Path) -> None:
    gc.disable()  # imported objects stay
    listeners = {kind: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for kind in KINDS}

    for kind, listener in listeners.items():
        listener.bind(str(folder / kind))
        listener.listen(128)

    print("ready", flush=True)
    os.dup2(2, 1)  # nothing reads it from here on
    rehearsal = listeners.pop(REHEARSAL)

    if os.fork() == 0:
        for listener in listeners.values():
            listener.close()
        _fork_when_asked({REHEARSAL: rehearsal})
        return

    rehearsal.close()
    importlib.import_module("torch")  # imported before all others
    _fork_when_asked(listeners)


def serve_elsewhere(folder: Path) -> None:
    """Start a server of this process's kind in its namespaces. This process was forked for training.

    Args:
        folder: A new folder, which clients in these namespaces have as the server's address.
    """
    folder.mkdir()
    write_launchers(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / TRAINING))
    listener.listen(128)
    if os.fork() == 0:
        run(Server(listener, TRAINING).serve().program)
    listener.close()


def _fork_when_asked(listeners: Mapping[str, socket.socket]) -> None:
    """Start the server of a kind at its first request."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for kind, listener in listeners.items():
        selector.register(listener, selectors.EVENT_READ, kind)

    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            assert isinstance(key.fileobj, socket.socket)
            if os.fork() == 0:
                _forget(selector, key.fileobj)
                KINDS[key.data]()
                run(Server(key.fileobj, key.data).serve().program)
            selector.unregister(key.fileobj).fileobj.close()


def _forget(selector: selectors.BaseSelector, but: socket.socket | None = None) -> None:
    """Close the parent's files in a new process, which does not need them."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket) and key.fileobj is not but:
            key.fileobj.close()
    selector.close()


def _leave_finalizers() -> None:
    """Forget the finalizers of imported modules: the exit of each forked process would copy their memory.

    There are thousands, one for each operator of torch that Python defines.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.detach()


def _use_huge_pages() -> None:
    """Join the pages of this process's memory, so that a fork copies hundreds of entries instead of 150,000.

    An older kernel refuses, and forks take longer.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *file = line.split()
        if "w" not in access or (file and file[0].startswith("/")):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-start // _HUGE_PAGE_BYTES)
        for page in range(first, end // _HUGE_PAGE_BYTES):
            address = ctypes.c_void_p(page * _HUGE_PAGE_BYTES)
            madvise(address, ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE)


class Server:
    """Fork processes, report to each client how its process ended, and forward signals and the end of the
    client to its process."""

    def __init__(self, listener: socket.socket, kind: str) -> None:
        self._listener = listener
        self._kind = kind
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._woken, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

        # by the forked process; None: it has ended
        self._clients: dict[int, socket.socket | None] = {}
        self._nodes = set[str]()  # addresses of the servers for Ray's workers
        self._raylet: int | None = None  # the descriptor of the process after which a node's server ends
        self._has_raylet_ended = False

        # Ray reads the environment of a worker when it is imported; a forked process would lack a thread.
        assert kind in (DAEMON, _NODE) or "ray" not in sys.modules
        assert len(os.listdir("/proc/self/task")) == 1
        gc.collect()
        gc.freeze()  # existing objects are not scanned again, so that their memory stays shared
        _leave_finalizers()
        if kind != _NODE:  # shares almost all of its memory with the server that it was forked from
            _use_huge_pages()
        collect_rarely()
        gc.enable()

    def serve(self) -> Request:
        """Serve. Returns in each forked process, with the request that it must run."""
        while True:
            # one at a time: the end of a process closes the connection of its client
            key, _ = self._selector.select()[0]
            if key.fileobj is self._listener:
                self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
            elif key.fileobj == self._woken:
                os.read(self._woken, 1024)
                self._tell_of_the_ended()
                self._end_without_use()
            elif key.fileobj is sys.stdin:
                self._end()
            elif key.fileobj == self._raylet:
                self._selector.unregister(key.fileobj)
                self._has_raylet_ended = True
                self._end_without_use()
            elif (
                isinstance(key.fileobj, socket.socket)
                and (request := self._hear(key.fileobj, key.data)) is not None
            ):
                return request

    def _end(self) -> NoReturn:
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def end_after(self, raylet: int) -> None:
        """End once a raylet and its workers have ended. A session has hundreds of nodes, each with a server."""
        try:
            self._raylet = os.pidfd_open(raylet)
        except ProcessLookupError:
            self._has_raylet_ended = True
        else:
            self._selector.register(self._raylet, selectors.EVENT_READ)

    def _end_without_use(self) -> None:
        if self._has_raylet_ended and not self._clients:
            os.unlink(self._listener.getsockname().removesuffix(_PARTIAL))
            os._exit(0)

    def _hear(self, client: socket.socket, pid: int | None) -> Request | None:
        """Receive a program to run, from a client that has no process yet. Returns the request in the new
        process, and None in this one."""
        message, ancillary, _, _ = client.recvmsg(
            MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_MAX_FILES * array.array("i").itemsize)
        )
        if not message:  # it was killed
            self._leave(client)

        if pid is not None:
            os.kill(pid, int(message) if message else signal.SIGKILL)
            self._clients[pid] = client if message else None
        elif message:
            files = array.array("i")
            for _, _, data in ancillary:
                files.frombytes(data)
            request = Request(**marshal.loads(message))
            if request.node and self._kind != _NODE and request.node not in self._nodes:
                self._nodes.add(request.node)
                return self._start_node(request, list(files), client)
            self._selector.unregister(client)
            if self.start(request, list(files), client):
                return request

        return None

    def start(self, request: Request, files: list[int], client: socket.socket) -> bool:
        """Fork a process for a client. Returns whether this is the new process."""
        pid = os.fork()
        if pid == 0:
            self._leave_all()
            client.close()  # before its number becomes that of one of the program's files
            become(request, files, self._kind)
            return True
        for file in files:
            os.close(file)
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, pid)

        return False

    def _start_node(self, request: Request, files: list[int], client: socket.socket) -> Request | None:
        """Start the server for a node's workers, which serves this client first. Returns like serve in each
        process of that server, and None in this one."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(request.node + _PARTIAL)
        listener.listen(128)
        # From now on it can be found: the next workers wait until Ray has been imported.
        os.rename(request.node + _PARTIAL, request.node)
        self._selector.unregister(client)

        if os.fork() == 0:
            self._leave_all()
            _import_for_a_node(request)
            server = Server(listener, _NODE)
            if server.start(request, files, client):
                return request
            if not _is_of_drivers(request):
                server.end_after(request.parent)
            return server.serve()

        for file in files:
            os.close(file)
        listener.close()
        client.close()

        return None

    def _leave_all(self) -> None:
        """Close everything in a new process, which is not a server, or another one."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _forget(self._selector)
        for file in (self._woken, self._wake, self._raylet):
            if file is not None:
                os.close(file)

    def _tell_of_the_ended(self) -> None:
        while self._clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = self._clients.pop(ended[0], None)  # the server of a node has none
            if client is not None:
                with contextlib.suppress(OSError):  # it has ended as well
                    client.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
                self._leave(client)

    def _leave(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
