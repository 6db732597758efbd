"""GPUs: are they there, free and alike, does the driver carry torch's CUDA, and does the plan fit into their
memory?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.config.schema import Device
from megarl.doctor.check_result import CheckResult, doubtful, good, size, wrong
from megarl.doctor.examined_run import ExaminedRun
from megarl.machine.processors import torch_cuda
from megarl.placement.memory import plan_memory

CHECK = "gpus"
_QUERY = "index,name,driver_version,memory.total,memory.used"  # memory in MiB
_LIMIT_S = 10
_IN_USE_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Bytes."""

    index: int
    name: str
    memory: int
    used: int


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """`error`: what nvidia-smi said instead of an answer. `driver_cuda`: the newest CUDA that the driver
    carries; `torch_cuda`: the one that torch is built for, None where it is built without."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    torch_cuda: str | None = None
    error: str | None = None


def probe() -> Gpus:
    found = Gpus(torch_cuda=torch_cuda())
    program = shutil.which("nvidia-smi")
    if program is None:
        return found

    try:
        query = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, **_ASK)  # type: ignore[call-overload]
        overview = subprocess.run([program], **_ASK)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return replace(found, error=f"nvidia-smi did not answer within {_LIMIT_S} s")

    if listed.returncode:
        return replace(found, error=(listed.stdout + listed.stderr).strip().splitlines()[-1])
    return visible(
        parse(listed.stdout, overview.stdout, found.torch_cuda), os.environ.get("CUDA_VISIBLE_DEVICES")
    )


_ASK = {"capture_output": True, "text": True, "timeout": _LIMIT_S, "check": False}


def parse(listed: str, overview: str, torch_cuda: str | None) -> Gpus:
    """`listed`: a line of _QUERY for each GPU. `overview`: what nvidia-smi prints by itself, which alone
    names the CUDA version."""
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    named = re.search(r"CUDA Version\s*:\s*([\d.]+)", overview)
    return Gpus(
        gpus=tuple(
            Gpu(index=int(row[0]), name=row[1], memory=_mib(row[3]), used=_mib(row[4])) for row in rows
        ),
        driver=rows[0][2] if rows else None,
        driver_cuda=named.group(1) if named else None,
        torch_cuda=torch_cuda,
    )


def _mib(text: str) -> int:
    """Bytes; 0 where the driver does not say, as for memory that is the host's."""
    return int(text) * 2**20 if text.isdigit() else 0


def visible(found: Gpus, setting: str | None) -> Gpus:
    """Those that CUDA_VISIBLE_DEVICES leaves, which nvidia-smi does not heed. Of others than numbers only how
    many is known."""
    if setting is None:
        return found
    names = [name.strip() for name in setting.split(",") if name.strip()]
    # Names may also be UUIDs or MIG instances, which the listed indices do not show.
    if all(name.isdigit() for name in names):
        return replace(found, gpus=tuple(gpu for gpu in found.gpus if str(gpu.index) in names))

    return replace(found, gpus=found.gpus[: len(names)])


def judge(found: Gpus, *, needed: int, wanted: bool, peak: int = 0) -> Iterator[CheckResult]:
    """`needed`: on this machine. `wanted`: the run is to be on GPUs. `peak`: bytes that the plan puts on the
    fullest."""
    if not wanted:
        yield good(CHECK, "none needed: the run is on CPUs", gpus=len(found.gpus))
        return

    # A driver that does not answer makes every other check of the GPUs meaningless.
    if found.error is not None:
        yield wrong(
            CHECK,
            f"the driver does not answer: {found.error}",
            "load or reinstall NVIDIA's driver; in a container, use --gpus all",
        )
        return

    faults = [*_driver(found), *_count(found.gpus, needed), *_state(found.gpus, peak)]
    yield from faults

    if not faults:
        message = (
            f"{len(found.gpus)} x {found.gpus[0].name}, driver {found.driver} (CUDA {found.driver_cuda}), "
            f"torch for {found.torch_cuda}"
        )
        yield good(
            CHECK,
            message,
            gpus=len(found.gpus),
            driver=found.driver,
            driver_cuda=found.driver_cuda,
            torch_cuda=found.torch_cuda,
        )


def _driver(found: Gpus) -> Iterator[CheckResult]:
    if found.torch_cuda is None:
        yield wrong(
            CHECK,
            "torch is built without CUDA",
            "install torch for CUDA (requirements/cuda.txt), or set device=cpu",
        )
    elif found.driver_cuda is not None and _numbers(found.driver_cuda)[0] < _numbers(found.torch_cuda)[0]:
        message = (
            f"torch is built for CUDA {found.torch_cuda}, but driver {found.driver} carries CUDA "
            f"{found.driver_cuda} at most"
        )
        hint = f"update the driver, or install torch for CUDA {_numbers(found.driver_cuda)[0]}"
        yield wrong(CHECK, message, hint, driver_cuda=found.driver_cuda, torch_cuda=found.torch_cuda)


def _count(gpus: Sequence[Gpu], needed: int) -> Iterator[CheckResult]:
    if len(gpus) < max(needed, 1):
        message = f"there are {len(gpus)} GPUs here, and the placement has {needed} on a node"
        hint = (
            "set placement.devices_per_node to what a node has, with smaller parallel sizes or more "
            "nodes; or device=cpu"
        )
        yield wrong(CHECK, message, hint, gpus=len(gpus), needed=needed)
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield doubtful(
            CHECK,
            f"GPUs of different kinds: {names}",
            "choose those of one kind with CUDA_VISIBLE_DEVICES: the slowest sets the pace",
        )


def _state(gpus: Sequence[Gpu], peak: int) -> Iterator[CheckResult]:
    for gpu in gpus:
        if gpu.memory and gpu.used > _IN_USE_SHARE * gpu.memory:
            message = f"GPU {gpu.index} has {size(gpu.used)} of {size(gpu.memory)} in use"
            yield doubtful(
                CHECK,
                message,
                "end what uses it (nvidia-smi lists the processes), or leave it out with "
                "CUDA_VISIBLE_DEVICES",
            )

    # The plan may put its fullest device on any GPU, so the smallest one counts.
    smallest = min(gpus, key=lambda gpu: gpu.memory, default=None)
    if smallest is not None and 0 < smallest.memory < peak:
        message = f"the plan puts {size(peak)} on one GPU, which has {size(smallest.memory)}"
        hint = (
            "see `megarl plan` for what is in it: larger parallel sizes, smaller micro-batches, "
            "recompute=full, or another placement"
        )
        yield wrong(CHECK, message, hint, peak=peak, memory=smallest.memory)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def check(subject: ExaminedRun, found: Gpus) -> Iterator[CheckResult]:
    config = subject.config
    plan = subject.plan
    peak = 0
    # The peak can only be planned where all architectures are known.
    if config is not None and plan is not None and subject.use_gpu and subject.all_models_known:
        peak = max((device.peak for device in plan_memory(config, plan, subject.architectures)), default=0)

    if (
        subject.ray_address is not None
        and not found.gpus
        and (config is None or config.device is not Device.cpu)
    ):
        yield good(CHECK, "none here: the run would be on those of the cluster's nodes", gpus=0)
        return

    # A cluster's nodes have GPUs of their own, and this machine may only drive.
    needed = plan.devices_per_node if plan is not None and subject.ray_address is None else 0
    yield from judge(found, needed=needed, wanted=subject.use_gpu, peak=peak)
