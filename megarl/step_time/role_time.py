"""The time of a model role's phases on a device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.models.architecture import Architecture
from megarl.step_time.counts import CollectiveCount, Product, dtype_bytes
from megarl.step_time.device import DeviceProfile
from megarl.step_time.lengths import Lengths
from megarl.step_time.links import RankSpan, collective_s
from megarl.step_time.phase_time import PhaseTime, peak_flops
from megarl.step_time.role_work import PassWork, RoleWork, StageWork, UpdateWork, role_work


class _Rates(NamedTuple):
    """The rates at which one role computes: operations and bytes per second, and the bytes of an element."""

    device: DeviceProfile
    products: float
    attention: float
    memory: float
    element: int


def role_times(
    config: RunConfig, role: ModelRole, architecture: Architecture, device: DeviceProfile, lengths: Lengths
) -> dict[str, PhaseTime]:
    """Return the predicted time of each phase of a role, by its name.

    A phase that the algorithm does not need, because the update computes the same, takes no time.
    """
    return times_of(role_work(config, role, architecture, lengths), device)


def times_of(work: RoleWork, device: DeviceProfile) -> dict[str, PhaseTime]:
    """Return the time that a device takes for each phase of a role."""
    rates = _Rates(
        device=device,
        products=peak_flops(device, work.product_dtype) * device.efficiency.gemm,
        attention=peak_flops(device, work.dtype) * device.efficiency.attention,
        memory=device.memory_gb_s * device.efficiency.memory * 1e9,
        element=dtype_bytes(work.dtype),
    )
    return {name: _pass_time(each, rates) for name, each in work.phases.items()}


def _pass_time(work: PassWork, rates: _Rates) -> PhaseTime:
    if not work.num_passes:
        return PhaseTime.of()
    of_stage = [_stage_time(stage, rates) for stage in work.stages]
    seconds = pipeline_s(
        [each.seconds for each in _all_stages(of_stage, work.num_stages)],
        work.num_micro_batches,
        work.num_chunks,
    )

    # The parts are those of the slowest stage; the rest of the time it waits for other stages.
    slowest = max(of_stage, key=lambda time: time.seconds).times(work.num_micro_batches)
    time = slowest.plus(PhaseTime.of(bubble=seconds - slowest.seconds))
    if work.update is not None:
        time = time.plus(_update_time(work.update, rates))
    return time.times(work.num_passes)


def _all_stages(distinct: list[PhaseTime], num_stages: int) -> Iterator[PhaseTime]:
    """Yield the time of each stage. Those between the first and the last are equal."""
    for stage in range(num_stages):
        yield distinct[0 if stage == 0 else -1 if stage == num_stages - 1 else 1]


def _stage_time(work: StageWork, rates: _Rates) -> PhaseTime:
    """Return the time of one micro-batch in one stage."""
    counts = work.counts
    time = PhaseTime.of(
        products=sum(_product_s(product, rates) for product in counts.products),
        attention=counts.masked_attention_flops / rates.attention,
        collectives=sum(_collective_s(each, rates) for each in counts.collectives),
        memory=work.nbytes / rates.memory,
    )
    # A host launches ahead of its device, so only the excess counts.
    launches_s = work.num_launches * rates.device.efficiency.training_layer_us * 1e-6
    hidden_s = 0.0 if rates.device.is_host else time.seconds
    return time.plus(PhaseTime.of(launches=launches_s - hidden_s))


def _product_s(product: Product, rates: _Rates) -> float:
    """Return the time of products: their operations, and the reads and writes that they do not hide.

    Products with few rows or few columns read much for each operation, which makes them less efficient.
    """
    rows, inner, columns, times = product
    moved = times * rates.element * (rows * inner + inner * columns + rows * columns)
    return product.flops / rates.products + moved / rates.memory


def _collective_s(count: CollectiveCount, rates: _Rates) -> float:
    span = RankSpan(count.num_ranks, count.stride)
    return collective_s(rates.device, count.kind, span, count.nbytes, count.calls)


def _update_time(work: UpdateWork, rates: _Rates) -> PhaseTime:
    return PhaseTime.of(
        optimizer=work.nbytes / rates.memory,
        reduction=sum(_collective_s(each, rates) for each in work.collectives),
    )


def pipeline_s(stages_s: Sequence[float], num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the seconds of a pass of all micro-batches through all stages.

    The slowest stage is never idle between its first and its last micro-batch. Before, the first micro-batch
    passes through the stages above it, and afterwards the last gradients return through them. With virtual
    stages, these passes only have the layers of one chunk (Narayanan et al. 2021, section 2.2).

    Args:
        stages_s: The seconds of each stage for one micro-batch: its forward pass, and its backward pass if it
            trains.
        num_chunks: The number of virtual stages of each stage.
    """
    slowest_s = max(stages_s)
    others_s = sum(stages_s) - slowest_s
    return num_micro_batches * slowest_s + others_s / num_chunks
