"""Test the parts of a predicted step time against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from megarl.plan.step_time.counts import CollectiveCount, Counts, RankGroup
from megarl.plan.step_time.device import (
    DeviceProfile,
    Efficiency,
    LinkProfile,
    PeakRates,
    PhaseTime,
    collective_s,
    peak_flops,
    ranks_on_node,
)
from megarl.plan.step_time.generation import DecodeModel, decode_s
from megarl.plan.step_time.lengths import Lengths, assumed_lengths, measured_lengths
from megarl.plan.step_time.measured_run import fit_device
from megarl.plan.step_time.role_time import PassWork, pipeline_s, times_of

# Round numbers: 8 devices per node, links of 100 and 10 GB/s, hops of 1 and 5 microseconds, all of it reached.
DEVICE = DeviceProfile(
    name="round numbers",
    peak_tflops=PeakRates(float32=50, bfloat16=100),
    memory_gb_s=1000,
    devices_per_node=8,
    within_node=LinkProfile(gb_s=100, latency_us=1),
    between_nodes=LinkProfile(gb_s=10, latency_us=5),
    efficiency=Efficiency(gemm=1, attention=1, memory=1, links=1, training_layer_us=0, decode_layer_us=0),
)
GB = 1e9


def test_a_ring_within_a_node() -> None:
    # 4 ranks: each byte of the result passes a rank's link 3/4 times, twice for an all-reduce; two hops.
    assert collective_s(DEVICE, "all_gather", RankGroup(4), GB) == pytest.approx(0.75 / 100 + 2e-6)
    assert collective_s(DEVICE, "reduce_scatter", RankGroup(4), GB) == pytest.approx(0.75 / 100 + 2e-6)
    assert collective_s(DEVICE, "all_reduce", RankGroup(4), GB) == pytest.approx(1.5 / 100 + 2e-6)
    assert collective_s(DEVICE, "all_reduce", RankGroup(1), GB) == 0


def test_latency_counts_for_each_call_and_bytes_once() -> None:
    once = collective_s(DEVICE, "all_gather", RankGroup(8), GB, calls=1)
    assert collective_s(DEVICE, "all_gather", RankGroup(8), GB, calls=11) - once == pytest.approx(10 * 3e-6)


def test_a_ring_across_nodes_uses_the_adapters_of_its_ranks() -> None:
    # 16 neighbors: 8 on each node, so 80 GB/s between nodes. Every eighth of 128 ranks: one on each node.
    assert collective_s(DEVICE, "all_gather", RankGroup(16), GB) == pytest.approx(15 / 16 / 80 + 4 * 5e-6)
    assert collective_s(DEVICE, "all_gather", RankGroup(16, 8), GB) == pytest.approx(15 / 16 / 10 + 4 * 5e-6)
    assert ranks_on_node(DEVICE, RankGroup(16, 4)) == 2
    # Devices of several nodes that one switch connects count as one node.
    linked = replace(DEVICE, linked_devices=64)
    assert collective_s(linked, "all_gather", RankGroup(16), GB) == pytest.approx(15 / 16 / 100 + 4 * 1e-6)


def test_an_all_to_all_sends_most_bytes_through_the_slower_link() -> None:
    # Of 16 ranks, 8 are on other nodes: half of the bytes pass the adapter at 10 GB/s.
    assert collective_s(DEVICE, "all_to_all", RankGroup(16), GB) == pytest.approx(0.5 / 10 + 4 * 5e-6)
    assert collective_s(DEVICE, "all_to_all", RankGroup(8), GB) == pytest.approx(7 / 8 / 100 + 3 * 1e-6)


def test_a_message_takes_the_link_between_its_two_ranks() -> None:
    assert collective_s(DEVICE, "send", RankGroup(2, 1), GB) == pytest.approx(1 / 100 + 1e-6)
    assert collective_s(DEVICE, "recv", RankGroup(2, 8), GB) == pytest.approx(1 / 10 + 5e-6)


def test_float8_products_need_a_device_that_has_them() -> None:
    assert peak_flops(DEVICE, "fp8") == peak_flops(DEVICE, "bfloat16") == 100e12
    assert peak_flops(replace(DEVICE, peak_tflops=PeakRates(bfloat16=100, fp8=200)), "fp8") == 200e12


def test_the_slowest_update_of_a_stage_decides() -> None:
    """At 1000 GB/s, the updates move bytes for 1, 3 and 2 seconds; the last sums 80 GB over 5 ranks more."""
    reduction = CollectiveCount("all_reduce", "tensor", 5, 1, "bfloat16", 1, 80 * GB)
    idle = (Counts(), 0.0, 0, 0.0)
    work = PassWork(
        stages=(idle, idle, idle),
        order=(0, 1, 1, 2),
        num_chunks=1,
        num_micro_batches=4,
        num_passes=2,
        updates=(((), 1000 * GB), ((), 3000 * GB), ((reduction,), 2000 * GB)),
        dtype="bfloat16",
        product_dtype="bfloat16",
    )
    (time,) = times_of({"update": work}, DEVICE).values()
    # 80 GB pass a link of 100 GB/s 2 x 4/5 times.
    assert time.parts["optimizer"] == pytest.approx(2 * 2)
    assert time.parts["reduction"] == pytest.approx(2 * 1.28, rel=1e-4)
    (time,) = times_of({"update": work._replace(updates=work.updates[:2])}, DEVICE).values()
    assert time.seconds == pytest.approx(2 * 3)
    (time,) = times_of({"score": work._replace(updates=())}, DEVICE).values()
    assert time.seconds == 0


def test_a_pipeline_of_equal_stages_has_the_published_bubble() -> None:
    # Narayanan et al. 2021: the bubble is (p - 1) / (v m) of the ideal time.
    for stages, micro_batches, chunks in ((4, 8, 1), (4, 8, 2), (8, 32, 4)):
        ideal = micro_batches * 3.0
        bubble = (stages - 1) / (chunks * micro_batches)
        assert pipeline_s([3.0] * stages, micro_batches, chunks) == pytest.approx(ideal * (1 + bubble))


def one_forward_one_backward(stages: list[float], num_micro_batches: int) -> float:
    """Simulate 1F1B event by event. The backward pass of a stage takes twice as long as its forward pass."""
    count = len(stages)
    ends: dict[tuple[str, int, int], float] = {}
    orders = []
    for stage in range(count):
        warm = min(count - 1 - stage, num_micro_batches)
        order = [("f", number) for number in range(warm)]
        for number in range(num_micro_batches - warm):
            order += [("f", warm + number), ("b", number)]
        orders.append(order + [("b", num_micro_batches - warm + number) for number in range(warm)])

    free = [0.0] * count
    done = [0] * count
    while any(done[stage] < len(orders[stage]) for stage in range(count)):
        for stage in range(count):
            if done[stage] == len(orders[stage]):
                continue
            kind, number = orders[stage][done[stage]]
            needs = []
            if kind == "f" and stage > 0:
                needs.append(("f", stage - 1, number))
            if kind == "b":
                needs.append(("b", stage + 1, number) if stage < count - 1 else ("f", stage, number))
            if all(need in ends for need in needs):
                start = max([free[stage], *(ends[need] for need in needs)])
                ends[kind, stage, number] = start + stages[stage] * (1 / 3 if kind == "f" else 2 / 3)
                free[stage] = ends[kind, stage, number]
                done[stage] += 1
    return max(ends.values())


@pytest.mark.parametrize(
    "stages", [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 4.5], [4.0, 3.0, 3.0, 3.0], [2.0, 5.0]]
)
@pytest.mark.parametrize("num_micro_batches", [1, 4, 16])
def test_the_pipeline_agrees_with_a_simulated_schedule(stages: list[float], num_micro_batches: int) -> None:
    simulated = one_forward_one_backward(stages, num_micro_batches)
    # Exact for equal stages. A slow first stage fills a part of its bubble with forward passes.
    assert simulated - 1e-9 <= pipeline_s(stages, num_micro_batches) <= 1.15 * simulated


def test_assumed_lengths_have_the_mean_and_the_limit() -> None:
    for mean, longest in ((100, 4096), (1060, 4096), (3206, 4096), (4000, 4096)):
        lengths = assumed_lengths(100, mean, longest)
        assert fmean(lengths.responses) == pytest.approx(mean, rel=0.01)
        assert max(lengths.responses) <= longest
        assert lengths.row == pytest.approx(100 + mean, rel=0.01)
    with pytest.raises(ValueError, match=r"a mean response of 5000 tokens: must be in \[1, 4,096\]"):
        assumed_lengths(100, 5000, 4096)


def test_lengths_are_spread_over_their_quantiles() -> None:
    lengths = measured_lengths(10.4, [40, 10, 30, 20])
    assert lengths == Lengths(10, (10, 20, 30, 40))
    assert lengths.spread(4) == (10, 20, 30, 40)
    assert lengths.spread(2) == (15, 35)
    assert lengths.spread(1) == (25,)
    assert fmean(lengths.spread(64)) == pytest.approx(25, abs=0.5)


# A decode step takes 1 s to read weights and 0.01 s for each token of context.
DECODE = DecodeModel(
    dense_s=1.0, experts_s=0.0, selected=0.0, token_s=0.0, context_s=0.01, layers_s=0.0, message_s=0.0
)


def test_a_batch_that_fits_takes_as_many_steps_as_its_longest_sample() -> None:
    # Two samples of 4 and 8 tokens after a prompt of 10: 8 steps, and the context in the middle of each part.
    weights_s, context_s, launches_s, collectives_s = decode_s(DECODE, (4, 8), 10, 2)
    assert weights_s == pytest.approx(8)
    assert context_s == pytest.approx(0.01 * (4 * 2 * 12 + 4 * 16))
    assert launches_s == collectives_s == 0


def test_slots_are_filled_again() -> None:
    assert decode_s(DECODE, (5,) * 6, 0, 2)[0] == pytest.approx(15)
    assert decode_s(DECODE, (5,) * 6, 0, 6)[0] == pytest.approx(5)


def test_a_batch_reads_the_experts_that_it_selects() -> None:
    # With 2 of 8 experts, one token reads a quarter of them, and two tokens 1 - (3/4)**2.
    model = DECODE._replace(experts_s=8.0, selected=0.25)
    assert sum(model.parts(1, 0)) == pytest.approx(1 + 2)
    assert sum(model.parts(2, 0)) == pytest.approx(1 + 8 * (1 - 0.75**2))
    # Many tokens are bound by products instead of reads.
    assert sum(DECODE._replace(token_s=0.1).parts(50, 0)) == pytest.approx(5)


def test_parts_sum_to_the_time_of_a_phase() -> None:
    time = PhaseTime.of(products=2.0, bubble=-1.0, memory=0.5)
    assert time == PhaseTime(2.5, {"products": 2.0, "memory": 0.5})
    both = time.plus(PhaseTime.of(memory=1.0, collectives=1.0))
    assert both == PhaseTime(4.5, {"products": 2.0, "memory": 1.5, "collectives": 1.0})
    assert both.times(2) == PhaseTime(9.0, {"products": 4.0, "memory": 3.0, "collectives": 2.0})


def test_a_fit_finds_the_constants_that_gave_the_measurements() -> None:
    def times(share: float, sample_ms: float) -> list[float]:
        return [work / share + samples * sample_ms for work, samples in ((10, 1), (50, 2), (20, 9), (5, 6))]

    def observation(index: int, measured_s: float) -> tuple[Callable[[DeviceProfile], float], float]:
        return lambda device: times(device.efficiency.gemm, device.sample_ms)[index], measured_s

    truth = times(0.4, 3.0)
    fitted = fit_device(
        replace(DEVICE, efficiency=replace(DEVICE.efficiency, gemm=0.5), sample_ms=2.5),
        [observation(*each) for each in enumerate(truth)] * 20,
        ("efficiency.gemm", "sample_ms"),
    )
    assert fitted.efficiency.gemm == pytest.approx(0.4, rel=0.05)
    assert fitted.sample_ms == pytest.approx(3.0, rel=0.05)
    # What no measurement depends on does not change, and a share never exceeds one.
    assert fitted.efficiency.links == DEVICE.efficiency.links
    fast = fit_device(DEVICE, [observation(0, 1.0)] * 20, ("efficiency.gemm",))
    assert fast.efficiency.gemm == 1
