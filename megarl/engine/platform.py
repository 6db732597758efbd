"""The only place that knows the device: CUDA with NCCL, or a CPU with gloo and an adapted Megatron-Core."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from megarl.config.layers import has_transformer_engine, missing_flash_attention
from megarl.config.schema import Device, DType, FlashAttention
from megarl.engine import rotary
from megarl.machine.gloo import share_device
from megarl.machine.replaced import replaced
from megarl.machine.tensor_pickles import pickle_as_torch
from megarl.machine.usage import keep_freed_memory, trim_heap
from megarl.models.counts import peak_tflops

# Megatron imports these if they are installed, for functions that megarl does not use. wandb costs each
# process 1.7 s of processor time and 34 MB, and creates folders in TMPDIR that remain when the process is
# killed, as worker processes are; tensorboard costs 0.2 s and 11 MB.
UNUSED = ("wandb", "torch.utils.tensorboard")
# The probe's edge of the matrices, and its number of products: about 1 ms on a CPU core, and 3 ms on an H100
# at its peak rate.
PROBE_ON_CPU = (192, 4)
PROBE_ON_CUDA = (2048, 128)


@dataclass(frozen=True, kw_only=True)
class Platform:
    name: str
    device: torch.device
    distributed_backend: str

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def peak_tflops(self, dtype: DType) -> float | None:
        """Return the peak TFLOP/s of matrix products in a dtype, None if not known."""
        known = self.is_cuda and dtype is DType.bfloat16
        return peak_tflops(torch.cuda.get_device_name(self.device)) if known else None

    def return_freed_memory(self) -> None:
        """Return freed memory to the device or the system, so that other processes can use it."""
        if self.is_cuda:
            torch.cuda.empty_cache()
        else:
            trim_heap()

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory, so that the device copies from and to it directly. Does nothing on a CPU.

        The memory must be unpinned with `unpin` before it is freed.

        Raises:
            RuntimeError: The system does not allow to pin this much memory.
        """
        if self.is_cuda and memory.numel():
            pin_memory(memory.data_ptr(), memory.nbytes)

    def unpin(self, memory: torch.Tensor) -> None:
        if self.is_cuda and memory.numel():
            unpin_memory(memory.data_ptr())


_active: Platform | None = None


def activate(device: Device) -> Platform:
    """Choose the device for this process and prepare Megatron-Core for it.

    Must run before Megatron is imported. On CUDA, the process uses the GPU `LOCAL_RANK`.

    Raises:
        ValueError: CUDA is requested but not available, or a second call requests another device (Megatron is
            adapted once per process).
    """
    global _active
    cuda = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())

    if cuda and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch sees no GPU: use device=cpu or auto, or install a CUDA build of torch"
        )

    # Megatron is adapted once per process, so a later call must request the same device.
    if _active is not None:
        if _active.is_cuda != cuda:
            raise ValueError(
                f"this process already runs on {_active.name}; it cannot change to {device.value}"
            )
        return _active

    if cuda:
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        # Without its compiled part, its import fails with an error that Megatron does not expect.
        if not has_transformer_engine():
            _hide("transformer_engine")
        complete_deep_ep()
        with without_modules(*UNUSED):
            rotary.install()
        _active = Platform(name="cuda", device=torch.device("cuda", index), distributed_backend="nccl")
    else:
        from megarl.engine import cpu_adaptations

        _hide("transformer_engine")
        _hide("flash_mla")
        with without_modules(*UNUSED):
            cpu_adaptations.install()
        keep_freed_memory()
        _active = Platform(name="cpu", device=torch.device("cpu"), distributed_backend="gloo")

    pickle_as_torch()
    share_device()
    return _active


def _hide(package: str) -> None:
    """Make every import of a package in this process fail as if it were not installed.

    Megatron imports Transformer Engine, which requires CUDA and costs seconds of startup, and flash_mla, for
    generation, if they are installed. SGLang requires flash_mla. Without a CUDA driver its import raises an
    OSError, which Megatron does not expect.
    """
    sys.modules.setdefault(package, None)  # pyrefly: ignore[no-matching-overload]


def complete_deep_ep() -> None:
    """Name the events of DeepEP where Megatron imports them from, if the package is installed.

    SGLang's build of version 2 has them in a module below, without which Megatron takes DeepEP for absent.
    """
    if find_spec("deep_ep") is None:
        return
    with suppress(ImportError):  # so Megatron does
        events: Any = import_module("deep_ep.utils.event")
        utils: Any = import_module("deep_ep.utils")
        utils.EventOverlap = events.EventOverlap


def without_modules(*modules: str) -> AbstractContextManager[None]:
    """Hide modules from imports of Megatron, unless this process has imported them already."""
    # Importing them then raises ImportError, which Megatron treats as their absence.
    return replaced(sys.modules, {module: None for module in modules if module not in sys.modules})


def activate_fake_cuda(on_wait: Callable[[], None], transformer_engine: ModuleType | None) -> Platform:
    """Prepare CUDA for a process whose tensors are fake (see fake_cuda.py).

    Must run before Megatron is imported, instead of `activate`.

    Args:
        on_wait: Called where the host would wait for the device without reading a tensor.
        transformer_engine: A stub of Transformer Engine's compiled module; None if it is not installed.
    """
    global _active
    assert _active is None, "this process already runs on a device"
    from megarl.engine import fake_cuda

    _hide("flash_mla")
    with without_modules(*UNUSED):
        fake_cuda.install(on_wait, transformer_engine)
        rotary.install()
    pickle_as_torch()
    _active = Platform(name="cuda", device=fake_cuda.CUDA, distributed_backend="fake")

    return _active


def current() -> Platform:
    assert _active is not None, "megarl.engine.platform.activate has not been called in this process"
    return _active


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting for the copy. On a CPU, return the tensor itself.

    On CUDA the copy starts from pinned memory, in the order of the device's other work.
    """
    if device.type != "cuda":
        return tensor

    # CUDA refuses to pin an expanded tensor, whose elements share memory.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def activate_flash_attention(asked: FlashAttention) -> None:
    """Activate the kernels of torch's operators of flash attention, for this process, on CUDA.

    torch contains FlashAttention 2. Once another implementation is activated, the whole process uses it. The
    operators, and so all callers (`varlen_attn`, `shared_prompts`), stay the same. A second call may request
    other kernels.

    Raises:
        ValueError: Their package is not installed.
    """
    if asked is FlashAttention.fa2:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return

    # torch would only report the module that it cannot import.
    if (missing := missing_flash_attention(asked)) is not None:
        package, hint = missing
        raise ValueError(
            f"engine.flash_attention={asked.value}, but the package {package} is not installed: {hint}"
        )

    if current_flash_attention_impl() != (name := asked.value.upper()):
        activate_flash_attention_impl(name)


class SpeedProbe:
    """A small computation that is the same on every rank, so that its duration shows how fast the device is.

    The time of a rank's own work would depend on its rows and its part of the model, and include waiting for
    other ranks. The matrices are in the memory of the device.
    """

    def __init__(self) -> None:
        self._is_cuda = current().is_cuda
        edge, self._repeats = PROBE_ON_CUDA if self._is_cuda else PROBE_ON_CPU
        dtype = torch.bfloat16 if self._is_cuda else torch.float32
        # The product of two such matrices is the same matrix, so values neither grow nor vanish when it is
        # repeated.
        self._factor = torch.full((edge, edge), 1 / edge, dtype=dtype, device=current().device)
        self._product = self._factor.clone()

    def settle(self) -> None:
        """Wait until the device has no other work of this process."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def run(self) -> None:
        """Compute the products. The device is done when this returns."""
        for _ in range(self._repeats):
            torch.mm(self._factor, self._factor, out=self._product)
        self.settle()
