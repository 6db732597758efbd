"""Checks Ray.

It checks whether Ray starts or responds, whether all nodes are alive and have the same versions, their
clocks, and the resources for the run's pools.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.finding import Finding, Status, doubtful, first_case, good, wrong
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.speculation import draft_of
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.daemons import OBJECT_STORE_MB
from megarl.controller.node_resources import ClusterReport, NodeReport, fits, here, inspect_cluster
from megarl.controller.resource_pool import RayResourcePool, ResourcePoolManager, explain, node_demands
from megarl.doctor.machine import judge_open_files, judge_shared_memory
from megarl.doctor.run_inputs import ExaminedRun
from megarl.doctor.storage import MARK
from megarl.machine.errors import counted
from megarl.machine.files import existing_folder

RAY = "ray"
NODES = "nodes"
RESOURCES = "resources"
CLOCKS = "clocks"
_ANSWER_S = 60.0  # limit of a worker's first start on a node
_SKEW_S = 1.0
_SHOWN_NODES = 8


def check(subject: ExaminedRun) -> Iterator[Finding]:
    """Join the cluster of RAY_ADDRESS, or start Ray on this machine like the run, and disconnect."""
    where = f"the cluster at {subject.ray_address}" if subject.ray_address else "a local Ray on this machine"
    num_cpus = 1 if subject.plan is None else subject.plan.num_cpus
    begin = time.monotonic()

    with contextlib.ExitStack() as stack:
        # Registered before the start, which may fail halfway.
        stack.callback(shutdown)
        try:
            start_ray(num_cpus=num_cpus, num_gpus=subject.num_gpus if subject.use_gpu else 0)
        except (ValueError, RuntimeError, OSError) as error:
            yield _unreachable(where, error, subject.ray_address)
            return
        seconds = time.monotonic() - begin
        with _files_of(subject) as paths:
            report = inspect_cluster(_ANSWER_S, paths)

    yield good(
        RAY,
        f"Ray {here()['ray']}: {where} responds after {seconds:.1f} s",
        seconds=round(seconds, 2),
        address=subject.ray_address,
    )
    yield from judge_nodes(report, here())
    # This machine has its own checks.
    if len(report.nodes) > 1:
        yield from judge_other_nodes(report.nodes)

    if subject.plan is not None:
        num_gpus = max(subject.num_gpus, *(int(node.resources.get("GPU", 0)) for node in report.nodes))
        use_gpu = replace(subject, num_gpus=num_gpus).use_gpu  # with `auto`, the cluster's GPUs count
        yield judge_resources(
            report, list(ResourcePoolManager.of_plan(subject.plan, use_gpu).resource_pools.values())
        )


@contextlib.contextmanager
def _files_of(subject: ExaminedRun) -> Generator[list[str]]:
    """Yield the paths that a run's workers open on every node.

    A temporary file among them shows whether all nodes share the checkpoint folder.
    """
    if subject.config is None:
        yield []
        return

    paths = [str(Path(role.path).absolute()) for role in model_roles(subject.config)]
    if isinstance(subject.config, PPOConfig):
        paths += [str(Path(function.file).absolute()) for function in subject.config.reward.functions]
        paths += [str(Path(judge.prompt).absolute()) for judge in subject.config.reward.judges]
        draft = draft_of(subject.config.rollout)
        paths += [] if draft is None else [str(Path(draft).absolute())]

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # reported by the check of the checkpoints
            paths.append(
                stack.enter_context(
                    tempfile.NamedTemporaryFile(
                        prefix=MARK, dir=existing_folder(subject.config.checkpoint_path)
                    )
                ).name
            )
        yield list(dict.fromkeys(path for path in paths if Path(path).exists()))


def judge_other_nodes(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Check limits and the run's files on the other nodes."""
    for node in nodes:
        here_too = f"node {node.address}: "
        if node.limits is not None:
            of_memory, of_files = node.limits
            memory = judge_shared_memory("/dev/shm", *of_memory, OBJECT_STORE_MB * 2**20)
            files = judge_open_files(*of_files)
            yield from (
                replace(each, message=here_too + each.message)
                for each in (memory, files)
                if each.status is not Status.ok
            )
        for path in node.unseen:
            # The marked file was created for this check: a node that lacks it has another file system.
            if Path(path).name.startswith(MARK):
                yield wrong(
                    NODES,
                    f"{here_too}does not see files that this machine writes to {Path(path).parent}, so "
                    f"checkpoints would be incomplete",
                    "set checkpoint.dir to a folder on a file system that all nodes share",
                    node=node.address,
                )
            else:
                yield wrong(
                    NODES,
                    f"{here_too}{path} does not exist",
                    "put it on a file system that all nodes share, or copy it to the same path there",
                    path=path,
                )


def _unreachable(where: str, error: Exception, address: str | None) -> Finding:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if address is not None:
        hint = (
            "start the cluster (ray start --head on one node, ray start --address=HEAD:6379 on the others), "
            "or unset RAY_ADDRESS to "
        )
        return wrong(
            RAY, f"{where} cannot be joined: {reason}", hint + "run on this machine", address=address
        )

    return wrong(
        RAY,
        f"{where} does not start: {reason}",
        "see the newest folder in /tmp/ray/session_*/logs; check that /tmp and /dev/shm have free space, and "
        "that processes can listen on 127.0.0.1",
    )


def judge_nodes(report: ClusterReport, driver: Mapping[str, str]) -> Iterator[Finding]:
    faults = [finding for node in report.nodes for finding in _node_faults(node, driver)]
    for address in report.dead:
        faults.append(
            doubtful(
                NODES,
                f"node {address} of the cluster is dead",
                "restart Ray on it if the run needs it; its logs are in /tmp/ray/session_latest/logs on that "
                "node",
                node=address,
            )
        )

    yield from faults
    if not faults:
        yield good(NODES, _described(report.nodes), nodes=[_facts(node) for node in report.nodes])
    if len(report.nodes) > 1:
        yield judge_clocks([node for node in report.nodes if node.software is not None])


def _node_faults(node: NodeReport, driver: Mapping[str, str]) -> Iterator[Finding]:
    if node.software is None:
        yield wrong(
            NODES,
            f"node {node.address} cannot start a worker: {node.error}",
            f"install the same megarl there ({driver['megarl']} on Python {driver['python']}); the worker's "
            "messages are in the Ray logs of that node",
            **_facts(node),
        )
        return
    # Processes exchange pickled objects, so versions must match exactly.
    for name, mine in driver.items():
        there = node.software[name]
        if there != mine:
            yield wrong(
                NODES,
                f"node {node.address} has {name} {there}, but this one has {mine}",
                f"install {name} {mine} there, because processes exchange pickled objects",
                **_facts(node),
            )


def _described(nodes: Sequence[NodeReport]) -> str:
    shown = [
        f"{node.address} ({_amount(node, 'GPU')} GPU, {_amount(node, 'CPU')} CPU)"
        for node in nodes[:_SHOWN_NODES]
    ]
    rest = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    return f"{len(nodes)} alive, with the same versions: {', '.join(shown)}{rest}"


def _amount(node: NodeReport, kind: str) -> str:
    return f"{node.resources.get(kind, 0):g}"


def _facts(node: NodeReport) -> dict[str, object]:
    amounts = {kind: node.resources.get(kind, 0) for kind in ("GPU", "CPU", "object_store_memory")}
    return {
        "node": node.address,
        "resources": amounts,
        "software": node.software,
        "clock_offset_s": round(node.clock_offset_s, 6),
    }


def judge_clocks(nodes: Sequence[NodeReport]) -> Finding:
    """Check the clocks of the nodes that responded.

    Differences within the measurement uncertainty are ignored.
    """
    if not nodes:
        return doubtful(CLOCKS, "no node reported its time", "see the check of the nodes")
    first, last = (pick(nodes, key=lambda node: node.clock_offset_s) for pick in (min, max))
    apart = last.clock_offset_s - first.clock_offset_s
    # A difference within the uncertainty of the measurement proves nothing.
    known = first.clock_uncertainty_s + last.clock_uncertainty_s

    if apart - known > _SKEW_S:
        return doubtful(
            CLOCKS,
            f"the clocks of {first.address} and {last.address} are {apart:.2f} s apart",
            "enable NTP on both (timedatectl set-ntp true, or chrony): logs and timelines are ordered by "
            "their clocks",
            apart_s=round(apart, 3),
        )

    return good(
        CLOCKS,
        f"the clocks of {counted(len(nodes), 'node')} agree within {max(apart, known) * 1000:,.0f} ms",
        apart_s=round(apart, 6),
    )


def judge_resources(report: ClusterReport, pools: Sequence[RayResourcePool]) -> Finding:
    demands = node_demands(pools)
    needed = {kind: sum(demand.get(kind, 0) for demand in demands) for kind in ("GPU", "CPU")}
    hint = (
        "start nodes with more resources (ray start --num-gpus, and --num-cpus with one per process), add "
        "nodes, or use smaller parallel "
    )
    hint += "sizes or a placement whose roles share devices; `megarl check --plan` shows what is required"

    # Demands above the whole cluster can never be met; demands above its free part can wait.
    return first_case(
        RESOURCES,
        {"needed": demands, "nodes": [_facts(node) for node in report.nodes]},
        (
            not fits(demands, report.whole),
            wrong,
            explain(pools, report.whole, "more than the cluster has").rpartition("\n")[0],
            hint,
        ),
        (
            not fits(demands, report.free),
            doubtful,
            explain(pools, report.free, "in use by others now").rpartition("\n")[0],
            "end the other run, or wait",
        ),
        (
            True,
            good,
            f"{needed['GPU']:g} GPU and {needed['CPU']:g} CPU (one per process) are requested and free",
        ),
    )
