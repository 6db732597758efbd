"""One rank of a calibration: it measures its device while all other ranks measure theirs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megarl.config.schema import Device, DType
from megarl.engine import platform
from megarl.engine.platform import Platform
from megarl.engine.rendezvous import open_store
from megarl.machine.processors import processor_name, usable_cores
from megarl.plan.step_time.counts import Product
from megarl.rehearse.calibration.measurements import MIB, CalibrationRequest, RankMeasurements

_LIMIT = timedelta(seconds=300)


def measure(
    request: CalibrationRequest,
    rank: int,
    address: tuple[str, int],
    folder: Path,
    report: Callable[[str], None],
) -> RankMeasurements:
    """Measure everything except generation.

    Args:
        address: The host and the port at which the ranks meet.
        folder: The folder in which the speed of storage is measured.
        report: Called with the name of each part before it starts.
    """
    # platform.activate reads this variable to select the GPU.
    os.environ["LOCAL_RANK"] = str(rank)
    active = platform.activate(Device.cuda if request.is_cuda else Device.cpu)
    if not request.is_cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // request.num_ranks))

    dist.init_process_group(
        active.distributed_backend,
        store=open_store(*address, rank, request.num_ranks, _LIMIT),
        rank=rank,
        world_size=request.num_ranks,
        timeout=_LIMIT,
    )

    try:
        return _measure(request, active, rank, folder, report)
    finally:
        dist.destroy_process_group()


def _measure(
    request: CalibrationRequest, active: Platform, rank: int, folder: Path, report: Callable[[str], None]
) -> RankMeasurements:
    from megarl.rehearse.calibration import kernels

    device = active.device
    memory_bytes = (
        torch.cuda.get_device_properties(device).total_memory
        if active.is_cuda
        else psutil.virtual_memory().total // request.num_ranks
    )
    report("matrix products")
    # Square products find the peak.
    shapes = [Product(size, size, size) for size in ((2048, 4096, 8192) if request.is_cuda else (512, 1024))]
    squares = [kernels.product_times(shapes, dtype, device) for dtype in (DType.float32, DType.bfloat16)]
    products = kernels.product_times(request.products, request.dtype, device)

    report("attention")
    architecture = request.architecture
    length = min(architecture.max_position_embeddings, 4096 if request.is_cuda else 512)
    attention = kernels.attention_tflops(architecture, length, request.dtype, device)

    report("memory and storage")
    copied_bytes = (1024 if request.is_cuda else 64) * MIB
    memory_gb_s = kernels.copy_gb_s(copied_bytes, device)
    host_gb_s = kernels.host_gb_s(copied_bytes, device)
    # The ranks of a node share its storage.
    storage_gb_s = kernels.storage_gb_s(copied_bytes, folder) if rank == 0 else None
    dist.barrier()

    report("collectives")
    # Bytes of the larger of input and output of a collective.
    powers = (12, 16, 18, 20, 22, 24, 26, 28) if request.is_cuda else (10, 12, 14, 16, 18, 20, 22)
    sizes = [2**power for power in powers]
    collective_times = tuple(kernels.collective_times(sizes, device)) if request.num_ranks > 1 else ()

    report("layers of the training engine")
    return RankMeasurements(
        device=torch.cuda.get_device_name(device) if request.is_cuda else processor_name(),
        memory_bytes=memory_bytes,
        squares=tuple(time for times in squares for time in times),
        products=products,
        attention_tflops=attention,
        memory_gb_s=memory_gb_s,
        host_gb_s=host_gb_s,
        storage_gb_s=storage_gb_s,
        collectives=collective_times,
        layers=kernels.layer_times(request, memory_bytes),
    )
