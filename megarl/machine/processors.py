"""Detects the processors that a process may use.

These are the number of cores of this machine, and whether it has a GPU, without a driver call or importing
torch.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

ZEN_5 = ("AuthenticAMD", "26")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, in microseconds per period


def processor_family(information: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """Return the processor's vendor and family as it reports them; empty if it does not, as on ARM."""
    return _reported("vendor_id", information), _reported("cpu family", information)


def processor_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as it reports it, otherwise that of its architecture."""
    return _reported("model name", information) or platform.machine()


def _reported(field: str, information: Path) -> str:
    lines = information.read_text().splitlines() if information.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of cores that the process may use, considering its affinity and container quota."""
    cores = len(os.sched_getaffinity(0))
    if quota.is_file():
        # The quota is in microseconds of CPU time per period, or `max`.
        time, period = quota.read_text().split()
        if time != "max":
            cores = min(cores, max(1, int(time) // int(period)))

    return cores


def threads_setting() -> str:
    """Describe the thread count of a run on a CPU.

    Besides the configuration, it affects the last bits of the results.
    """
    return os.environ.get("OMP_NUM_THREADS") or f"{usable_cores()} cores"


def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for; None without torch or without CUDA support."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).parent / "version.py")).get("cuda")


def visible_devices(setting: str | None) -> tuple[str, ...] | None:
    """Read a value of CUDA_VISIBLE_DEVICES as CUDA does.

    The list ends at the first element that names no device, so that -1 and NoDevFiles hide all GPUs. The
    first element tells whether all are indices, or prefixes of UUIDs of GPUs or of MIG instances.

    Returns:
        Indices without leading zeros, or prefixes of UUIDs; None if the variable is not set and hides no GPU.
    """
    if setting is None:
        return None
    names: list[str] = []
    kind = next((kind for kind in ("GPU-", "MIG-") if setting.startswith(kind)), None)

    for element in setting.split(","):
        if kind is None:
            # What follows the digits is ignored.
            index = re.match(r"\+?0*(\d+)", element.strip(), re.ASCII)
            name = "" if index is None else index.group(1)
        else:
            name = element if element.startswith(kind) else ""
        if name in names:
            return ()  # a device that is named twice hides all of them
        if not name:
            break
        names.append(name)

    return tuple(names)


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this process can see an NVIDIA device and torch can use it.

    In WSL 2 the device is `dxg`.
    """
    return (
        visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) != ()
        and (any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists())
        and torch_cuda() is not None
    )


def waited_for_core_s(pid: int) -> float:
    """Return the seconds that a process's main thread was ready to run without getting a core.

    This is its delay by a busy machine.

    The result is 0 for a process that has ended, and on kernels that do not count it (CONFIG_SCHED_INFO).
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
