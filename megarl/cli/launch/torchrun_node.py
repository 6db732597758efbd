"""`megarl launch`: runs one node of a run under `torchrun --nproc-per-node 1`.

Node 0 starts Ray and drives the run; the others join and wait.

The nodes communicate through torchrun's rendezvous store. All of them end with the driver's exit code, even
if the driver, a node's Ray or a whole node dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.schema import RunConfig
from megarl.doctor.checks import load_for_run
from megarl.machine.errors import ConfigError, counted
from megarl.machine.reaper import OWNER, end_processes_of, start_reaper
from megarl.plan.placement.plan import plan_placement

FAILED = 1
USER_ERROR = 2
_LOOK_S = 0.5
_START_LIMIT_S = 600.0  # limit for all nodes to join the cluster
_SILENCE_LIMIT_S = 60.0  # time without a heartbeat after which a node is considered lost
_LAST_WORDS_S = 60.0  # time for the driver to detect and report a lost node itself
_LEAVE_LIMIT_S = 30.0
_STOP_LIMIT_S = 20.0
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_NODE = "node"
_HEAD = "head"
_UP = "up"
_ALIVE = "alive"
_STATUS = "status"
_LEFT = "left"


class LaunchError(RuntimeError):
    """The nodes cannot form or keep a cluster."""


class Meeting:
    """The messages between the nodes: JSON values by name in the rendezvous store."""

    def __init__(self) -> None:
        # Imported here, because torch would delay the errors of the configuration.
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, self.rank, self.num_nodes = next(rendezvous("env://"))
        self._store = PrefixStore(f"megarl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.members = range(1, self.num_nodes)
        # Heartbeats of each member, and when they changed: from the first question for a lost one.
        self._last: dict[int, tuple[int, float]] = {}

    def say(self, name: str, value: Any = None) -> None:
        self._store.set(name, json.dumps(value))

    def heard(self, name: str) -> bool:
        return self._store.check([name])

    def what(self, name: str) -> Any:
        return json.loads(self._store.get(name))

    def forget(self, name: str) -> None:
        self._store.delete_key(name)

    def first_of(self, *names: str, limit_s: float = _START_LIMIT_S) -> str:
        """Wait for the first of these messages, and return its name. Raises LaunchError after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            for name in names:
                if self.heard(name):
                    return name
            time.sleep(_LOOK_S)

        raise LaunchError(f"no message {' or '.join(names)!r} within {limit_s:g} s")

    def beat(self) -> None:
        self._store.add(f"{_ALIVE} {self.rank}", 1)

    def lost(self) -> str | None:
        """Describe the first lost member, on node 0; None if there is none."""
        for rank in self.members:
            beats, since_s = self._last.setdefault(rank, (0, time.monotonic()))
            if self.heard(f"{_LEFT} {rank}"):
                return f"node {rank} has left: {self.what(f'{_LEFT} {rank}')}"
            # Clocks of nodes may differ, so changes of the count are timed with the local clock.
            now = self._store.add(f"{_ALIVE} {rank}", 0)
            if now != beats:
                self._last[rank] = (now, time.monotonic())
            elif time.monotonic() - since_s > _SILENCE_LIMIT_S:
                return f"node {rank} has sent no heartbeat for {_SILENCE_LIMIT_S:g} s"
        return None


def _run_driver(command: Sequence[str], environment: Mapping[str, str], meeting: Meeting) -> int:
    """Run `megarl train` in its own session, and return its exit code as a shell reports it.

    Each signal to this process is forwarded to it once.
    """
    driver = subprocess.Popen(command, env=environment, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: driver.send_signal(number))

    while (status := driver.poll()) is None:
        if (lost := meeting.lost()) is not None:
            _say(f"{lost}; the run has {_LAST_WORDS_S:g} s to report the failure before it is killed")
            try:
                driver.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                driver.kill()  # its reaper ends its child processes
            return FAILED
        time.sleep(_LOOK_S)
    return status if status >= 0 else 128 - status


class RayNode:
    """The process of a node (ray_node.py), as seen by its parent.

    Args:
        address: The node's address in the cluster. With 127.0.0.1 Ray accepts only local connections.
        head: The cluster's address; None starts a head.

    Raises:
        RuntimeError: The node does not start. The reason is on standard error.
    """

    def __init__(
        self, address: str, head: str | None = None, *, num_cpus: int, environment: Mapping[str, str]
    ) -> None:
        # A separate session, so that a signal to the run does not end the cluster before the run has saved.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megarl.cli.launch.ray_node",
                "--address",
                address,
                "--num-cpus",
                str(num_cpus),
                *(["--head", head] if head else []),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.gcs_address = self._process.stdout.readline().strip()

        if not self.gcs_address:
            raise RuntimeError(
                f"Ray did not start on {address} (status {self._process.wait()}); the reason is above"
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _checked(config_path: str, overrides: Sequence[str]) -> RunConfig | None:
    """Return the configuration, or print its errors and return None."""
    try:
        return load_for_run(RunConfig, config_path, overrides, reads_inputs=False)
    except ConfigError as error:
        print(f"megarl train: {error}", file=sys.stderr, flush=True)
        return None


def drive(meeting: Meeting, config: RunConfig | None, arguments: Sequence[str]) -> int:
    """Run node 0, and send the exit code to the other nodes in any case.

    Args:
        config: None if the configuration has errors.
        arguments: The configuration's file and overrides, for `megarl train`.
    """
    status = FAILED
    try:
        status = USER_ERROR if config is None else _drive(meeting, config, arguments)
    finally:
        meeting.say(_STATUS, status)
        # Node 0 waits until the others have read the exit code.
        end_s = time.monotonic() + _LEAVE_LIMIT_S  # torchrun's store ends with this node
        while (
            not all(meeting.heard(f"{_LEFT} {rank}") for rank in meeting.members) and time.monotonic() < end_s
        ):
            time.sleep(_LOOK_S)

    return status


def _drive(meeting: Meeting, config: RunConfig, arguments: Sequence[str]) -> int:
    from megarl.controller.daemons import AUTH_MODE, AUTH_TOKEN, add_key  # imports Ray

    # Ray's CPUs are not cores: a node has as many as all of the run's processes need.
    num_cpus = max(os.cpu_count() or 1, plan_placement(config).num_cpus)
    # Wait until every node has announced its address.
    names = [meeting.first_of(f"{_NODE} {rank}") for rank in meeting.members]

    # Use the address that the other nodes see, because node 0 may resolve its own name to loopback.
    address = meeting.what(names[0])[1] if names else _addresses()[0]
    environment = _of_children()
    add_key(environment)
    node = RayNode(address, num_cpus=num_cpus, environment=environment)

    try:
        key = {name: environment[name] for name in (AUTH_MODE, AUTH_TOKEN) if name in environment}
        meeting.say(_HEAD, [node.gcs_address, num_cpus, key])
        for rank in meeting.members:
            if meeting.first_of(f"{_UP} {rank}", f"{_LEFT} {rank}").startswith(_LEFT):
                raise LaunchError(f"node {rank} has left: {meeting.what(f'{_LEFT} {rank}')}")
        meeting.forget(_HEAD)  # the message contains the key
        _say(f"{counted(meeting.num_nodes, 'node')} joined, Ray is at {node.gcs_address}")
        command = [sys.executable, "-m", "megarl", "train", *arguments]
        return _run_driver(command, {**environment, "RAY_ADDRESS": node.gcs_address}, meeting)
    finally:
        node.stop()


def join(meeting: Meeting) -> int:
    """Run any other node. It ignores signals and waits for node 0, whose run may be saving."""
    # Node 0 acts on the signals; this node must keep its Ray daemons up while the run saves.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    reason = "it failed"

    try:
        meeting.say(f"{_NODE} {meeting.rank}", _addresses())
        if meeting.first_of(_HEAD, _STATUS) == _HEAD:
            head, num_cpus, key = meeting.what(_HEAD)
            own, _ = _addresses()
            node = RayNode(own, head, num_cpus=num_cpus, environment={**_of_children(), **key})
            try:
                reason = _wait_for_status(meeting, node)
            finally:
                node.stop()
        return meeting.what(_STATUS) if meeting.heard(_STATUS) else FAILED
    finally:
        meeting.say(f"{_LEFT} {meeting.rank}", reason)


def _wait_for_status(meeting: Meeting, node: RayNode) -> str:
    meeting.say(f"{_UP} {meeting.rank}")
    while not meeting.heard(_STATUS):
        if node.has_ended:
            return "its Ray has ended"
        meeting.beat()
        time.sleep(_LOOK_S)

    return "the run has ended"


def _addresses() -> tuple[str, str]:
    """Return this node's address on the interface to node 0, and the address of node 0 as it resolves it."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket sends nothing on connect
        return probe.getsockname()[0], str(target[0])


def _of_children() -> dict[str, str]:
    """Return the environment without torchrun's variables.

    With them, torch would use torchrun's store for a worker group.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}


def _say(text: str) -> None:
    print(f"megarl launch: {text}", file=sys.stderr, flush=True)


def run(config_path: str, overrides: Sequence[str]) -> int:
    """Run this process as a node of a run that torchrun has started.

    Returns:
        The exit code of the run, the same on every node.

    Raises:
        ValueError: torchrun did not start this process, or started several of them on this node.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ValueError(
            "run this command with torchrun: torchrun --nnodes N --nproc-per-node 1 -m megarl launch CONFIG "
            "key=value ..."
        )

    if os.environ["LOCAL_WORLD_SIZE"] != "1":
        raise ValueError(
            f"megarl starts its own processes: use --nproc-per-node 1, not {os.environ['LOCAL_WORLD_SIZE']}"
        )

    # Every process that this node starts inherits the mark, and ends with it.
    owner = os.environ[OWNER] = uuid.uuid4().hex
    start_reaper(owner, whole_group=False)

    try:
        is_first = os.environ["RANK"] == "0"
        config = _checked(config_path, overrides) if is_first else None
        meeting = Meeting()
        return drive(meeting, config, [config_path, *overrides]) if is_first else join(meeting)
    except RuntimeError as error:  # also a LaunchError, or one of torch's store
        _say(f"{type(error).__name__}: {error}")
        return FAILED
    finally:
        end_processes_of(owner)
