"""Ray's daemons on one node: their selection, ports, key, shared memory, and startup failures."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Generator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ray._private import node, ray_constants, services
from ray._private.parameter import RayParams
from ray._private.utils import write_ray_address
from ray._raylet import AuthenticationTokenLoader, Config

from megarl.machine.errors import RunError
from megarl.machine.ports import hold_lasting_ports
from megarl.machine.reaper import descendants, end_held, hold
from megarl.machine.replaced import replaced

LOOPBACK = "127."  # Ray would replace such addresses by that of a network card
OBJECT_STORE_MB = 512
SHARED_MEMORY = "/dev/shm"
AUTH_MODE = "RAY_AUTH_MODE"
AUTH_TOKEN = "RAY_AUTH_TOKEN"
_AUTH_FILE = "RAY_AUTH_TOKEN_PATH"
# Ray's variable for the maximum size of a node's object store.
_STORE_BYTES = "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"
# The raylet requires a command for the dashboard's agent, and they end with each other. This one only waits.
_NO_AGENT = 'sh -c "exec tail --pid=$RAY_RAYLET_PID -f /dev/null"'
_NUM_ATTEMPTS = 2
_TIMED_OUT = "node timed out during startup"
# CRITICAL and ERROR in the logs of Ray's C++ processes, except for the agent that exports metrics, which
# nodes of a run do not have.
_SEVERE = re.compile(r"^\[[^\]]* [CE] \d+ \d+\](?!.*exporter agent)")
_NUM_LINES = 4
_NUM_CHARACTERS = 400


class NodeStartError(RunError):
    """Ray did not start on a node. The message contains the last severe lines of its daemons' logs."""


class SmallNode(node.Node):
    """A node of a single-run cluster without four of Ray's daemons. It does not wait for another one.

    A raylet ends the node if its agents, which are Python programs, have not written their port numbers to
    files within 15 s. On a busy machine, or with an environment on a slow shared disk, their imports alone
    take longer. Here the ports are chosen in advance, so that the raylet starts at once and the agent for
    runtime environments when it is ready. A node with a job server waits for its agents, because it reaches
    them at the ports that they report.

    The dashboard and its agents need more processor time to start than all other daemons together. They are
    started for a job server only, because a run does not use them.
    """

    def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
        self._options: list[str] = []  # additional options of the raylet
        self._serves_jobs = bool(ray_params.include_dashboard)
        if ray_params.include_dashboard:
            # Any free port. Ray's default is a fixed port that the system also assigns to connections. If it
            # is in use, the agent stays alive without a server, and the node never takes a job.
            ray_params.dashboard_agent_listen_port = 0
        else:
            self._choose_agent_ports(ray_params)

        try:
            super().__init__(ray_params, *args, **kwargs)
        except Exception as error:  # Ray raises a plain Exception here
            raise NodeStartError(
                "\n".join([f"Ray did not start: {error}", *last_words(getattr(self, "_logs_dir", None))])
            ) from error

    def _choose_agent_ports(self, ray_params: Any) -> None:
        # Hold all ports at the same time, so that they differ.
        held = hold_lasting_ports(ray_params.node_ip_address or "", 4)
        ports = [each.getsockname()[1] for each in held]
        names = (
            "metrics_agent_port",
            "metrics_export_port",
            "runtime_env_agent_port",
            "dashboard_agent_listen_port",
        )
        ray_params.update_if_absent(**dict(zip(names, ports, strict=True)))
        self._options += [
            f"--dashboard_agent_listen_port={ports[-1]}",
            f"--dashboard_agent_command={_NO_AGENT}",
        ]

        # The agents' servers cannot listen on a port while another socket is bound to it.
        for each in held:
            each.close()

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        with _with_raylet_options(*self._options):
            super().start_raylet(*args, **kwargs)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start the dashboard for a job server only. Ray also starts it to send usage statistics."""
        if self._serves_jobs:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)
        else:
            self._webui_url = ""

    def start_monitor(self) -> None:
        """Start no autoscaler: the nodes of a run are fixed."""

    def start_log_monitor(self) -> None:
        """Start no log monitor: the driver reads the workers' log files itself if needed."""


def _with_raylet_options(*options: str) -> AbstractContextManager[None]:
    """Add options to the raylet's command line, for which Ray's Python API has no parameter."""
    start: Callable[..., Any] = services.start_ray_process

    def start_with_options(command: list[str], *args: Any, **kwargs: Any) -> Any:
        # All daemons are started through this function; only the raylet takes these options.
        return start(
            [*command, *options] if command[0] == services.RAYLET_EXECUTABLE else command, *args, **kwargs
        )

    return replaced(vars(services), {"start_ray_process": start_with_options})


def small_nodes() -> AbstractContextManager[None]:
    """Make `ray.init` start a `SmallNode`."""
    return replaced(vars(node), {"Node": SmallNode})


def without_job_server() -> AbstractContextManager[None]:
    """Start the minimal agent, which does not accept jobs.

    If the packages of ray[default] are installed, the agent of each node accepts jobs from anyone who can
    reach its port, even without a dashboard, and needs seconds to start. Ray detects these packages with this
    import.
    """
    return replaced(sys.modules, {"ray.dashboard.optional_deps": None})  # importing it raises ImportError


@contextmanager
def loopback_only() -> Generator[None]:
    """Make Ray use 127.0.0.1 as the node's address, so that its daemons listen only there.

    With any other address they listen on all interfaces. The switch was made for laptops with other operating
    systems. It is read when ray is imported, and by the daemons from the environment.
    """
    variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    with replaced(os.environ, variables), replaced(vars(ray_constants), {"ENABLE_RAY_CLUSTER": False}):
        yield


# ---- start


def start_node(
    address: str,
    head: str | None,
    *,
    num_cpus: int,
    object_store_memory: int,
    dashboard_port: int | None = None,
    temp_dir: str | None = None,
) -> SmallNode:
    """Start a node at an address of this machine, as a new cluster or as a member of the one of `head`.

    Its ports are free ones. With `dashboard_port`, the node runs Ray's dashboard, which includes the job
    server.

    Raises:
        NodeStartError: The node did not start.
    """
    # Port 0 means any free port, because several nodes may run on one machine.
    parameters = RayParams(
        node_ip_address=address,
        gcs_address=head,
        num_cpus=num_cpus,
        object_store_memory=object_store_memory,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_dashboard=dashboard_port is not None,
        dashboard_host=address,
        dashboard_port=dashboard_port,  # pyrefly: ignore[bad-argument-type]  # bool in Ray
        temp_dir=temp_dir,
        include_log_monitor=False,  # pyrefly: ignore[bad-argument-type]  # str in Ray
    )
    with (
        loopback_only() if address.startswith(LOOPBACK) else nullcontext(),
        without_job_server() if dashboard_port is None else nullcontext(),
    ):
        started = SmallNode(parameters, head=head is None, shutdown_at_exit=False, spawn_reaper=True)

    if head is None:
        # The job server uses this file to find its own cluster among several on a machine.
        write_ray_address(started.gcs_address, started.get_temp_dir_path())

    return started


def start_patiently[T](start: Callable[[], T], say: Callable[[str], None]) -> T:
    """Call `start`, which starts a `SmallNode`, and retry once after a timeout.

    The second attempt finds the files of Ray's programs in the page cache.

    Args:
        start: Starts the node.
        say: Receives the cause of the first failure.

    Raises:
        NodeStartError: The node did not start.
    """
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        before = set(descendants(os.getpid()))
        try:
            return start()
        except NodeStartError as error:
            # End the daemons of the failed attempt.
            end_held(hold([pid for pid in descendants(os.getpid()) if pid not in before]))
            # Only a timeout is worth a retry: by now the programs' files are in the page cache.
            if attempt == _NUM_ATTEMPTS or _TIMED_OUT not in str(error):
                raise
            say(f"{error}\nstarting Ray again (attempt {attempt + 1} of {_NUM_ATTEMPTS})")
    raise AssertionError("the last attempt returns or raises")


def last_words(logs: str | None) -> list[str]:
    """Return the last CRITICAL and ERROR lines of a node's raylet and GCS, with their file names."""
    words = []
    for file in sorted(Path(logs).glob("*.out")) if logs else ():
        if not file.name.startswith(("raylet", "gcs_server")):
            continue
        severe = [line for line in file.read_text(errors="replace").splitlines() if _SEVERE.match(line)]
        # Daemons repeat some lines many times.
        words += [f"  {file}: {line[:_NUM_CHARACTERS]}" for line in dict.fromkeys(severe[-_NUM_LINES:])]

    return words


# ---- the object store


def object_store_bytes(object_store_mb: float = OBJECT_STORE_MB) -> int:
    """Return the size of a node's object store: the user's variable if set, otherwise the argument."""
    given = os.environ.get(_STORE_BYTES)
    return int(given) if given else int(object_store_mb * 2**20)


def too_little_shared_memory(needed: int, folder: str = SHARED_MEMORY) -> str | None:
    """Return a warning if shared memory is too small for the object store, so that Ray keeps it on disk."""
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    if free >= needed:
        return None
    sizes = f"{free / 2**20:,.0f} MiB free, less than the {needed / 2**20:,.0f} MiB of Ray's object store"

    return (
        f"{folder} has {sizes}, so Ray keeps the object store in files of its temporary folder; give the "
        f"node or container a larger {folder}, or set {_STORE_BYTES}"
    )


# ---- the key


def add_key(environment: MutableMapping[str, str]) -> list[str]:
    """Add a key for the cluster. Without one, anyone who can reach its ports can run code.

    Returns:
        The variables that were set.
    """
    added = [] if AUTH_MODE in environment else [AUTH_MODE]
    environment.setdefault(AUTH_MODE, "token")

    # Keep a key that the user has set, as a value or in a file.
    if environment[AUTH_MODE] == "token" and _AUTH_FILE not in environment and AUTH_TOKEN not in environment:
        environment[AUTH_TOKEN] = secrets.token_hex(32)
        added.append(AUTH_TOKEN)

    return added


def read_key() -> None:
    """Make Ray in this process read the key again. Ray read the environment when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
