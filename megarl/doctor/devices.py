"""Checks GPUs.

It checks their number, kind and memory in use, whether the driver supports torch's CUDA, and whether the plan
fits into their memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.config.finding import Finding, doubtful, good, wrong
from megarl.config.schema import Device
from megarl.doctor.run_inputs import ExaminedRun
from megarl.machine.errors import counted, sized
from megarl.machine.processors import torch_cuda, visible_devices
from megarl.plan.placement.memory import plan_memory

CHECK = "gpus"
_QUERY = "index,uuid,name,driver_version,memory.total,memory.used"  # memory is in MiB
_LIMIT_S = 10
_IN_USE_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; memory is in bytes, 0 if it is not known."""

    index: int
    uuid: str
    name: str
    memory: int
    used: int


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        driver_cuda: The newest CUDA version that the driver supports.
        torch_cuda: The CUDA version of torch; None for a build without CUDA.
        error: The error of nvidia-smi, if it failed.
    """

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
        listed = subprocess.run([program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], **_ASK)
        overview = subprocess.run([program], **_ASK)
    except subprocess.TimeoutExpired:
        return replace(found, error=f"nvidia-smi did not answer within {_LIMIT_S} s")

    if listed.returncode:
        return replace(found, error=(listed.stdout + listed.stderr).strip().splitlines()[-1])
    return visible(
        parse(listed.stdout, overview.stdout, found.torch_cuda), os.environ.get("CUDA_VISIBLE_DEVICES")
    )


_ASK = {"capture_output": True, "text": True, "timeout": _LIMIT_S, "check": False}


def parse(listed: str, overview: str, torch_cuda: str | None) -> Gpus:
    """Parse the output of nvidia-smi.

    Args:
        listed: A line of _QUERY for each GPU.
        overview: The output without arguments, which is the only one with the CUDA version.
    """
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
    named = re.search(r"CUDA Version\s*:\s*([\d.]+)", overview)
    return Gpus(
        gpus=tuple(
            Gpu(index=int(row[0]), uuid=row[1], name=row[2], memory=_mib(row[4]), used=_mib(row[5]))
            for row in rows
        ),
        driver=rows[0][3] if rows else None,
        driver_cuda=named.group(1) if named else None,
        torch_cuda=torch_cuda,
    )


def _mib(text: str) -> int:
    """Convert MiB to bytes; 0 if the driver reports none, as for memory that is shared with the host."""
    return int(text) * 2**20 if text.isdigit() else 0


def visible(found: Gpus, setting: str | None) -> Gpus:
    """Apply CUDA_VISIBLE_DEVICES, which nvidia-smi ignores, as CUDA does.

    The list ends at the first name that is no GPU, or that is the beginning of several UUIDs. The memory of a
    MIG instance is not known: nvidia-smi lists the memory of the whole GPU.
    """
    names = visible_devices(setting)
    if names is None:
        return found

    gpus: list[Gpu] = []
    for name in names:
        if name.startswith("MIG-"):
            gpus.append(_mig_instance(name, found.gpus))
            continue
        named = [gpu for gpu in found.gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
        if len(named) != 1:
            break
        if named[0] in gpus:
            return replace(found, gpus=())
        gpus += named

    return replace(found, gpus=tuple(gpus))


def _mig_instance(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """Return a MIG instance. Older drivers name it after its GPU: MIG-GPU-UUID/INSTANCE/COMPUTE_INSTANCE."""
    whole = name.removeprefix("MIG-").partition("/")[0]
    parent = next((gpu for gpu in gpus if gpu.uuid == whole), None)
    # Without this name, the GPU is known if there is only one.
    if parent is None and len(gpus) == 1:
        parent = gpus[0]
    kind = "a GPU" if parent is None else parent.name
    return Gpu(
        index=-1 if parent is None else parent.index,
        uuid=name,
        name=f"MIG instance of {kind}",
        memory=0,
        used=0,
    )


def judge(found: Gpus, *, needed: int, wanted: bool, peak: int = 0) -> Iterator[Finding]:
    """Check the GPUs.

    Args:
        needed: Number of GPUs that the run needs on this machine.
        wanted: Whether the run uses GPUs.
        peak: Planned peak of the fullest device, in bytes.
    """
    if not wanted:
        yield good(CHECK, "not needed: the run uses CPUs", gpus=len(found.gpus))
        return

    # Without a working driver no other check of the GPUs is possible.
    if found.error is not None:
        yield wrong(
            CHECK,
            f"the driver does not respond: {found.error}",
            "load or reinstall the NVIDIA driver; in a container, use --gpus all",
        )
        return

    faults = [*_driver(found), *_count(found.gpus, needed), *_state(found.gpus, peak)]
    yield from faults

    if not faults:
        yield good(
            CHECK,
            f"{len(found.gpus)} x {found.gpus[0].name}, driver {found.driver} (CUDA {found.driver_cuda}), "
            f"torch for {found.torch_cuda}",
            gpus=len(found.gpus),
            driver=found.driver,
            driver_cuda=found.driver_cuda,
            torch_cuda=found.torch_cuda,
        )


def _driver(found: Gpus) -> Iterator[Finding]:
    if found.torch_cuda is None:
        yield wrong(
            CHECK,
            "torch is built without CUDA",
            "install torch's build for CUDA (the package index has it), or set device=cpu",
        )
    elif found.driver_cuda is not None and _numbers(found.driver_cuda)[0] < _numbers(found.torch_cuda)[0]:
        # Within a major version, CUDA is compatible.
        yield wrong(
            CHECK,
            f"torch is built for CUDA {found.torch_cuda}, but driver {found.driver} supports CUDA "
            f"{found.driver_cuda} at most",
            f"update the driver, or install torch for CUDA {_numbers(found.driver_cuda)[0]}",
            driver_cuda=found.driver_cuda,
            torch_cuda=found.torch_cuda,
        )


def _count(gpus: Sequence[Gpu], needed: int) -> Iterator[Finding]:
    if len(gpus) < max(needed, 1):
        yield wrong(
            CHECK,
            f"this machine has {counted(len(gpus), 'GPU')}, but the placement needs {needed} per node",
            "set placement.devices_per_node to the GPUs of a node, with smaller parallel sizes or more "
            "nodes; or use device=cpu",
            gpus=len(gpus),
            needed=needed,
        )
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield doubtful(
            CHECK,
            f"GPUs of different kinds: {names}",
            "select GPUs of one kind with CUDA_VISIBLE_DEVICES, because the slowest determines the speed",
        )


def _state(gpus: Sequence[Gpu], peak: int) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.memory and gpu.used > _IN_USE_SHARE * gpu.memory:
            yield doubtful(
                CHECK,
                f"GPU {gpu.index} has {sized(gpu.used)} of {sized(gpu.memory)} in use",
                "end the processes that use it (listed by nvidia-smi), or exclude it with "
                "CUDA_VISIBLE_DEVICES",
            )

    # The fullest device of the plan may be on any GPU, so the smallest GPU determines the limit.
    known = [gpu for gpu in gpus if gpu.memory]
    smallest = min(known, key=lambda gpu: gpu.memory, default=None)
    if smallest is not None and smallest.memory < peak:
        yield wrong(
            CHECK,
            f"the plan needs {sized(peak)} on one GPU, which has {sized(smallest.memory)}",
            "see `megarl check --plan` for the memory of each device; `megarl check` prints changes with "
            f"which the plan fits, if you set placement.device_memory_gb={smallest.memory / 2**30:.4g}",
            peak=peak,
            memory=smallest.memory,
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def check(subject: ExaminedRun, found: Gpus) -> Iterator[Finding]:
    config = subject.config
    plan = subject.plan
    peak = 0
    # The peak is only known if all architectures are.
    if config is not None and plan is not None and subject.use_gpu and subject.all_models_known:
        peak = max((device.peak for device in plan_memory(config, plan, subject.architectures)), default=0)

    if (
        subject.ray_address is not None
        and not found.gpus
        and (config is None or config.device is not Device.cpu)
    ):
        yield good(CHECK, "none on this machine: the run uses those of the cluster's nodes", gpus=0)
        return

    # A cluster's nodes have their own GPUs, and this machine may only be the driver.
    yield from judge(
        found,
        needed=plan.devices_per_node if plan is not None and subject.ray_address is None else 0,
        wanted=subject.use_gpu,
        peak=peak,
    )
