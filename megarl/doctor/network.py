"""Checks the communication between ranks of a node, and the ports that a run uses."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megarl.config.finding import Finding, doubtful, first_case, good, wrong
from megarl.controller.environment import fill_in
from megarl.doctor.run_inputs import ExaminedRun
from megarl.machine.errors import counted
from megarl.machine.ports import hold_port
from megarl.machine.ray_address import host_and_port

LOOPBACK = "ranks"
PORTS = "ports"
_MOST_CPU_RANKS = 4
_LIMIT_S = 15.0  # limit of a rendezvous and two all-reduces of 1 MiB
_IMPORT_S = 45.0  # limit of importing torch on a busy machine
VARIABLE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_SLOW_BYTES_PER_S = 20e6


def probe_loopback(
    backend: str, ranks: int, environment: Mapping[str, str], address: str = "127.0.0.1"
) -> tuple[float, str | None]:
    """Run an all-reduce between `ranks` processes of this machine, which have ended when this returns.

    Returns:
        Its seconds, and the error of the first rank that failed.
    """
    # The ranks write to files, because a full pipe without a reader would block them.
    with tempfile.TemporaryDirectory() as folder, hold_port(address) as held:
        arguments = [str(ranks), address, str(held.getsockname()[1]), str(_LIMIT_S)]
        processes = [start_rank(backend, rank, arguments, environment, Path(folder)) for rank in range(ranks)]
        try:
            error = wait_for_ranks(processes, Path(folder), _IMPORT_S + _LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return 0.0 if error else float(_read(Path(folder), 0, "out").split()[-1]), error


def start_rank(
    backend: str, rank: int, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megarl.doctor.loopback_rank", backend, str(rank), *arguments]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(
            command,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> str | None:
    """Wait for the ranks, and return why the first one failed; None if all succeeded."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            # The first failure is the cause; the other ranks only time out.
            if status:
                return f"rank {rank}: {_reason(_read(folder, rank, 'err'))}"
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.05)

    return f"no answer within {limit_s:g} s"


def _read(folder: Path, rank: int, kind: str) -> str:
    return (folder / f"{rank}.{kind}").read_text(encoding="utf-8", errors="replace")


def _reason(text: str) -> str:
    """Return the line of a traceback with the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (raised or lines or ["the sums are wrong"])[-1]


def judge_loopback(
    backend: str,
    ranks: int,
    interface: str | None,
    interfaces: Sequence[str],
    seconds: float,
    error: str | None = None,
) -> Finding:
    """Check the result of an all-reduce between processes of this machine.

    Args:
        interface: The network interface from the environment; None: the library's own choice.
    """
    variable = VARIABLE[backend]
    over = f"over {interface} ({variable})" if interface else f"over the interface that {backend} chose"
    what = f"{backend} all-reduce between {counted(ranks, 'rank')} {over}"
    facts = {
        **({} if error is not None else {"seconds": seconds}),
        "backend": backend,
        "ranks": ranks,
        "interface": interface,
        "interfaces": list(interfaces),
    }
    hint = (
        f"set {variable} on every node to the interface of the cluster's network, one of "
        f"{', '.join(interfaces)}"
    )

    return first_case(
        LOOPBACK,
        facts,
        (
            error is not None,
            wrong,
            f"{what} failed: {error}",
            f"{hint}; a firewall must allow connections between processes of the cluster",
        ),
        # A single rank has no communication, so its speed is meaningless.
        (
            ranks > 1 and seconds * _SLOW_BYTES_PER_S > 2**20,
            doubtful,
            f"{what}: 1 MiB took {seconds:.2f} s",
            f"{hint}; or the machine is busy",
        ),
        (True, good, f"{what}: 1 MiB in {1000 * seconds:,.1f} ms"),
    )


def judge_interface(backend: str, name: str | None, interfaces: Sequence[str]) -> Finding | None:
    """Check the interface variable; None if it is unset or names an existing interface.

    NCCL accepts lists, prefixes, and ^ before interfaces to avoid.
    """
    # NCCL reads =NAME as a whole name, and NAME as a prefix.
    wanted = [] if name is None or name.startswith("^") else [part.lstrip("=") for part in name.split(",")]
    if not wanted or any(interface.startswith(part) for part in wanted for interface in interfaces):
        return None
    return wrong(
        LOOPBACK,
        f"{VARIABLE[backend]}={name}, but this machine has no such interface: {backend} would fail or hang",
        f"set {VARIABLE[backend]} to one of {', '.join(interfaces)}, or unset it: megarl then uses the "
        f"interface of the node's address",
        backend=backend,
        interface=name,
        interfaces=list(interfaces),
    )


def loopback(subject: ExaminedRun) -> Iterator[Finding]:
    """Test communication between ranks on this machine.

    The ranks are as many as the run's largest group has on a node, and have the environment of the run's
    workers.
    """
    # Without a plan, two ranks are enough to test communication.
    ranks = 2
    if subject.plan is not None:
        groups = [
            [process.node for process in group.processes]
            for group in subject.plan.groups
            if group.uses_devices
        ]
        ranks = max((nodes.count(node) for nodes in groups for node in set(nodes)), default=1)

    address = own_address(subject.ray_address)
    variables = dict(os.environ)
    fill_in(variables, address, subject.use_gpu)
    most = {"gloo": _MOST_CPU_RANKS, "nccl": subject.num_gpus if subject.use_gpu else 0}
    interfaces = sorted(psutil.net_if_addrs())

    for backend in (backend for backend, limit in most.items() if limit):
        interface = variables.get(VARIABLE[backend])
        if (fault := judge_interface(backend, interface, interfaces)) is not None:
            yield fault
            continue
        tried = min(ranks, most[backend])
        result = probe_loopback(backend, tried, variables, address)
        yield judge_loopback(backend, tried, interface, interfaces, *result)


def own_address(ray_address: str | None) -> str:
    """Return this machine's address in the cluster, which reaches the head. No data is sent."""
    host = "127.0.0.1"
    # The address of `auto`, and of one that is reported elsewhere as no address, is this machine's.
    with contextlib.suppress(ValueError):
        host, _ = host_and_port(ray_address or "")

    try:
        family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect(address)
            return trial.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def user_of(number: int) -> str | None:
    """Return the process that already listens on a port; None if it is free."""
    with socket.socket() as trial:
        # Connections of an earlier listener that are still closing do not count.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", number))
            trial.listen(1)
        except OSError as error:
            return _listener(number) or error.strerror or str(error)
    return None


def _listener(number: int) -> str | None:
    """Return the process that listens on a port. Only root sees processes of other users."""
    for connection in psutil.net_connections("tcp"):
        address: Any = connection.laddr  # () if the socket has none
        if connection.status == psutil.CONN_LISTEN and address.port == number:
            if connection.pid is None:
                return "a process of another user"
            process = psutil.Process(connection.pid)
            return f"{process.name()} (pid {connection.pid}, user {process.username()})"
    return None


def judge_port(number: int, purpose: str, user: str | None) -> Finding:
    facts = {"port": number, "purpose": purpose, "used_by": user}
    if user is None:
        return good(PORTS, f"{number} is free for {purpose}", **facts)
    hint = "end that process, or choose another port"
    # The port may be in use by the cluster that the run should join.
    if purpose.startswith("Ray"):
        hint += "; if it is a Ray cluster that the run should join, set RAY_ADDRESS=HOST:PORT"

    return wrong(PORTS, f"{number} is needed for {purpose}, but {user} uses it", hint, **facts)


def needed_ports(subject: ExaminedRun, environment: Mapping[str, str]) -> dict[int, str]:
    """Return the fixed ports of a run.

    A run on one machine has none, because Ray and torch use free ports.
    """
    needed: dict[int, str] = {}
    # Only the process with rank 0 opens the port.
    if environment.get("MASTER_PORT", "").isdigit() and environment.get("RANK", "0") == "0":
        needed[int(environment["MASTER_PORT"])] = "torchrun's rendezvous (MASTER_PORT)"

    if subject.plan is not None and subject.plan.num_nodes > 1 and subject.ray_address is None:
        needed |= {
            6379: "Ray's head (ray start --head --port)",
            8265: "Ray's dashboard and jobs (--dashboard-port)",
        }

    return needed


def ports(subject: ExaminedRun) -> Iterator[Finding]:
    needed = needed_ports(subject, os.environ)
    for number, purpose in needed.items():
        yield judge_port(number, purpose, user_of(number))
    if not needed:
        yield good(PORTS, "no fixed ports needed: Ray and torch use free ports")
