"""The plan of an export: who writes what, where it comes from, and that every round is bounded."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import pytest
import torch

from megarl.weights.export_plan import ExportPlan, windows_of
from megarl.weights.hf_folder import FilePlan
from megarl.weights.plan import RankLocation, one_after_another, plan_transfer, whole_slices
from megarl.weights.shards import held_slices
from megarl.weights.tensors import Part, TensorMeta, TensorSlice, range_slices, tiling_fault
from tests.unit.weights.exports import Export
from tests.unit.weights.test_folder_transport import LAYOUTS, exports_of
from tests.unit.weights.transfers import Cut


def test_windows_are_stretches_of_a_file() -> None:
    """Work out windows of 4 over 6 + 1 + 5 elements by hand."""
    shapes = {"a": (2, 3), "b": (1,), "c": (5,)}
    file = FilePlan(
        "model.safetensors", 0, {name: TensorMeta(shape, torch.float32) for name, shape in shapes.items()}
    )
    windows = list(windows_of(file, 4, torch.float32))
    assert [window.chunks for window in windows] == [
        (("a", 0, 4),),
        (("a", 4, 2), ("b", 0, 1), ("c", 0, 1)),
        (("c", 1, 4),),
    ]
    assert [window.numel for window in windows] == [4, 4, 4]
    assert [window.is_last for window in windows] == [False, False, True]
    assert windows[0].slices == {"a": (TensorSlice((0, 0), (1, 3)), TensorSlice((1, 0), (2, 1)))}


def test_plans_one_after_another() -> None:
    """Work out two plans by hand.

    Two sources hold all six elements of a, of which the target needs four and then two. The first source has
    two more to send.
    """
    shapes = {"a": (6,)}
    sources = [(RankLocation("node", f"of {rank}"), whole_slices(shapes)) for rank in range(2)]
    needed = [{"a": (TensorSlice((start,), (stop,)),)} for start, stop in ((0, 4), (4, 6))]
    plans = [
        plan_transfer(shapes, sources, [(RankLocation("node", "of the target"), slices)], 3, [2, 0])
        for slices in needed
    ]
    assert [plan.num_rounds for plan in plans] == [2, 1]
    whole = one_after_another(plans)
    assert whole.num_rounds == 3
    messages = {
        pair: [list(schedule.message(number)) for number in range(3)]
        for pair, schedule in whole.schedules.items()
    }

    def part(start: int, stop: int) -> Part:
        return Part("a", TensorSlice((start,), (stop,)))

    assert messages == {(0, 0): [[], [part(0, 1)], []], (1, 0): [[part(1, 2)], [part(2, 4)], [part(4, 6)]]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_writer_gets_its_windows_one_after_another(name: str) -> None:
    for export in exports_of(LAYOUTS[name]):
        plan = export.plan()
        max_numel = export.message_bytes // export.dtype.itemsize
        assert sum(window.numel for windows in plan.file_windows.values() for window in windows) == sum(
            prod(meta.shape) for file in plan.files for meta in file.manifest.values()
        )
        for writer, windows in plan.file_windows.items():
            check_windows(plan, writer)
            assert max(window.numel for window in windows) <= max_numel
        for rank in range(export.cut.num_ranks):
            for transfers in (plan.transfer.of_source(rank), plan.transfer.of_target(rank)):
                for number in range(plan.transfer.num_rounds):
                    assert transfers.length(number) <= max_numel


def check_windows(plan: ExportPlan, writer: int) -> None:
    """Check that each round's elements tile the slices of one window after another."""
    number = 0
    for window in plan.file_windows[writer]:
        arrived: dict[str, list[TensorSlice]] = defaultdict(list)
        while (
            sum(tensor_slice.volume for slices in arrived.values() for tensor_slice in slices) < window.numel
        ):
            for schedule in plan.transfer.of_target(writer).schedules.values():
                for name, tensor_slice in schedule.message(number):
                    arrived[name].append(tensor_slice)
            number += 1
        assert arrived.keys() == window.slices.keys()
        for name, slices in window.slices.items():
            shape = window.file.manifest[name].shape
            ((_, offset, numel),) = (chunk for chunk in window.chunks if chunk[0] == name)
            others = [
                *range_slices(shape, 0, offset),
                *range_slices(shape, offset + numel, prod(shape)),
            ]
            assert tiling_fault(shape, [*arrived[name], *others]) is None, name
            assert sum(tensor_slice.volume for tensor_slice in slices) == sum(
                tensor_slice.volume for tensor_slice in arrived[name]
            )


def test_the_ranks_of_the_first_copy_of_a_stage_write_in_turns() -> None:
    """Ranks are ordered tensor, data, pipeline: the first copies of the two stages are ranks 0, 1 and 4, 5."""
    export = Export(Cut(tensor=2, data=2, pipeline=2), "llama", False, 700, max_file_bytes=15_000)
    plan = export.plan()
    writers = {
        window.file.name: writer for writer, windows in plan.file_windows.items() for window in windows
    }
    of_stages = [[writers[file.name] for file in plan.files if file.stage == stage] for stage in (0, 1)]
    assert of_stages == [[0, 1, 0, 1], [4, 5, 4, 5]]


def test_what_a_writer_holds_does_not_travel() -> None:
    for cut in LAYOUTS.values():
        for export in exports_of(cut):
            plan = export.plan()
            layouts = cut.layouts(export.architecture)
            for (source, target), schedule in plan.transfer.schedules.items():
                own = held_slices(export.architecture, layouts[target], export.head)
                for name, tensor_slice in schedule.parts:
                    is_own = any(tensor_slice.intersect(held) for held in own.get(name, ()))
                    assert is_own == (source == target), (name, tensor_slice)


@pytest.mark.parametrize("max_file_bytes", [15_000, 40_000, 10**9])
def test_copies_share_the_work(max_file_bytes: int) -> None:
    """Ranks 0 and 2 hold the same shards, and so do 1 and 3. A writer keeps its own elements and sends less."""
    plan = Export(Cut(tensor=2, data=2), "llama", False, 700, max_file_bytes).plan()
    for rank, copy in ((0, 2), (1, 3)):
        work = plan.transfer.of_source(rank).numel
        work_of_copy = plan.transfer.of_source(copy).numel
        assert work_of_copy == pytest.approx(work, rel=0.1) or all(
            target == rank for target in plan.transfer.of_source(rank).schedules
        )
        assert work_of_copy <= 1.1 * work


def test_a_message_that_is_too_small_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"3 bytes is too small .*torch\.float32.* resharding\.bucket_mb",
    ):
        Export(Cut(), "llama", False, 3).plan()
    with pytest.raises(ValueError, match=r"too small.* resharding\.bucket_mb"):
        Export(Cut(tensor=2), "llama", False, 4, max_file_bytes=15_000).plan()
