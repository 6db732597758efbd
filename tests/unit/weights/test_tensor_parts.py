"""Rows whose tensors are parts of Hugging Face tensors, in drawn tables and in a table of typical rows.

The expected parameters are made by slow code that does not read the notation of the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.models.families import FAMILIES
from megarl.models.mapping import (
    HF_LAYER,
    MEGATRON_LAYER,
    Cut,
    MappingRow,
    StagePlacement,
    TensorPart,
    part_geometry,
)
from megarl.models.tensor_table import hf_tensors
from megarl.models.trunk import TRUNK_ROWS
from megarl.weights.checksum import add_checksums, checksum, shard_checksums
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.plan import RankLocation, plan_transfer
from megarl.weights.shard_layout import ShardLayout, check_coverage, layouts_of, rank_pieces, shard_shapes
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import TensorSlice
from tests.families import example_architecture, example_fields
from tests.unit.checkpoints.convert.test_source import everything

NUM_EXPERTS = 4
GROUPS = 4
PARALLEL = [
    ParallelConfig(),
    ParallelConfig(tensor_parallel_size=2),
    ParallelConfig(data_parallel_size=2, expert_parallel_size=2),
    ParallelConfig(
        tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=2
    ),
    ParallelConfig(tensor_parallel_size=4, expert_tensor_parallel_size=4),
]
_numbers = count()


@contextmanager
def registered(rows: tuple[MappingRow, ...], num_layers: int = 1) -> Iterator[Architecture]:
    """Yield an architecture of a family that has these rows, registered meanwhile."""
    model_type = f"drawn-{next(_numbers)}"  # tables are cached by architecture
    base = FAMILIES["qwen3_moe"]
    FAMILIES[model_type] = replace(base, model_type=model_type, rows=rows)
    architecture = example_architecture("qwen3_moe", num_experts=NUM_EXPERTS, num_hidden_layers=num_layers)
    try:
        yield replace(architecture, model_type=model_type)
    finally:
        del FAMILIES[model_type]


class Entry(NamedTuple):
    """A drawn part, as numbers.

    Attributes:
        part: The part in the notation of the table.
        shape: The shape of the stored tensor.
        view: Its view.
        taken: The axis that the expert's number indexes, None if there is none.
        section: (axis, start, length) of the section that is taken.
        order: The order of the axes of the view, without `taken`.
        block: The shape that the result is reshaped to.
    """

    part: TensorPart
    shape: tuple[int, ...]
    view: tuple[int, ...]
    taken: int | None
    section: tuple[int, int, int] | None
    order: tuple[int, ...]
    block: tuple[int, ...]

    def slow(self, stored: torch.Tensor, expert: int | None) -> torch.Tensor:
        values = stored.reshape(self.view)
        if self.section is not None:
            values = values.narrow(*self.section)
        axes = list(range(len(self.view)))
        if self.taken is not None:
            assert expert is not None
            values = values.select(self.taken, expert)
            axes.remove(self.taken)
        return values.permute([axes.index(axis) for axis in self.order]).reshape(self.block)


class Drawn(NamedTuple):
    row: MappingRow
    entries: list[Entry]

    def slow_shard(
        self, state: Mapping[str, torch.Tensor], expert: int | None, size: int, rank: int
    ) -> torch.Tensor:
        blocks = [
            entry.slow(state[entry.part.name.format(layer=0, expert=expert)], expert)
            for entry in self.entries
        ]
        match self.row.cut:
            case Cut.replicated:
                return torch.cat(blocks)
            case Cut.column:
                return torch.cat(blocks).chunk(size)[rank]
            case Cut.row:
                return torch.cat(blocks).chunk(size, 1)[rank]
            case Cut.gated:
                return torch.cat(blocks).chunk(size, 1)[rank].flatten(0, 1)
            case Cut.qkv:
                return torch.cat(blocks, 1).chunk(size)[rank].flatten(0, 1)
            case Cut.stacked:
                return torch.cat([block.chunk(size)[rank] for block in blocks])
        raise AssertionError(self.row.cut)


def factors(draw: st.DrawFn, size: int, unit: int) -> list[int]:
    """Split an axis into one or two. The outer one stays a multiple of `unit`."""
    inner = draw(st.sampled_from([each for each in range(1, size + 1) if size % (each * unit) == 0]))
    return [size] if inner in (1, size) else [size // inner, inner]


def entry(
    draw: st.DrawFn,
    name: str,
    block: list[int],
    cut_axis: int | None,
    *,
    is_expert: bool,
    sections: list[int],
) -> list[Entry]:
    """Draw the parts of one tensor: one, or one for each section along the first axis of the block."""
    parts = [
        [(axis, size) for size in factors(draw, length, 4 if axis == cut_axis else 1)]
        for axis, length in enumerate(block)
        if not (sections and axis == 0)
    ]
    if sections:
        parts.insert(0, [(0, sum(sections))])
    fine = [each for axis in parts for each in axis]
    stored_order = draw(st.permutations(range(len(fine) + is_expert)))
    splits = draw(st.lists(st.booleans(), min_size=len(stored_order), max_size=len(stored_order)))

    # Axes have letters of their own, which are the example's, or numbers if these are unambiguous.
    view = tuple(NUM_EXPERTS if axis == len(fine) else fine[axis][1] for axis in stored_order)
    tokens = ["E" if axis == len(fine) else str(fine[axis][1]) for axis in stored_order]
    if sections:
        tokens[stored_order.index(0)] = "P"
    groups: list[list[int]] = []
    for number, is_split in enumerate(splits):
        if number and is_split:
            groups[-1].append(number)
        else:
            groups.append([number])
    dims = " ".join("(" + " ".join(tokens[axis] for axis in group) + ")" for group in groups)

    position = {axis: number for number, axis in enumerate(stored_order)}
    order = tuple(position[axis] for axis in range(len(fine)))
    named = iter(order)
    text = " ".join("(" + " ".join(tokens[next(named)] for _ in axis) + ")" for axis in parts)
    shape = tuple(int(torch.tensor([view[axis] for axis in group]).prod()) for group in groups)
    taken = position[len(fine)] if is_expert else None

    return [
        Entry(
            TensorPart(name=name, dims=dims, sections=tuple(map(str, sections)), section=number, order=text),
            shape,
            view,
            taken,
            (position[0], sum(sections[:number]), sections[number]) if sections else None,
            order,
            tuple(block) if not sections else (sections[number], *block[1:]),
        )
        for number in range(len(sections) or 1)
    ]


SIZES = {  # shapes of the blocks of each cut, whose axes cannot be confused, and the axis that is cut
    Cut.replicated: ([[6, 5], [15]], None),
    Cut.column: ([[24, 7], [8]], 0),
    Cut.row: ([[7, 24], [15, 8]], 1),
    Cut.gated: ([[2, 12, 5], [2, 8]], 1),
    Cut.qkv: ([[GROUPS, 6, 7], [GROUPS, 15]], 0),
    Cut.stacked: ([[0, 7]], 0),
}

JOINED = (Cut.replicated, Cut.row, Cut.qkv)  # cuts that join several tensors along another axis


@st.composite
def rows(draw: st.DrawFn) -> list[Drawn]:
    found = []
    for number in range(draw(st.integers(1, 3))):
        cut = draw(st.sampled_from(list(SIZES)))
        is_expert = draw(st.booleans())
        blocks, cut_axis = SIZES[cut]
        block = draw(st.sampled_from(blocks))
        entries: list[Entry] = []

        for part in range(draw(st.integers(1, 2)) if cut in JOINED else 1):
            sections = [4, 12, 8] if cut is Cut.stacked else []
            name = f"model.layers.{{layer}}.{number}.{part}"
            is_fused = is_expert and draw(st.booleans())
            if is_expert and not is_fused:
                name += ".{expert}"
            entries += entry(draw, name, list(block), cut_axis, is_expert=is_fused, sections=sections)

        # Row-parallel tensors are joined along dimension 0, which stays.
        megatron = f"{MEGATRON_LAYER}{number}." + ("{expert}." if is_expert else "") + "weight"
        place = StagePlacement.expert if is_expert else StagePlacement.layer
        tensors = tuple(each.part for each in entries)
        if len({len(each.block) for each in entries}) == 1:
            found.append(Drawn(MappingRow(megatron=megatron, place=place, cut=cut, tensors=tensors), entries))
    return found


def random_state(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator)
        for tensor in hf_tensors(architecture, "lm")
    }


def loaded(folder: Path, architecture: Architecture, layout: ShardLayout) -> dict[str, torch.Tensor]:
    parameters = {
        name: torch.full(shape, torch.nan) for name, shape in shard_shapes(architecture, layout).items()
    }
    load_into_shards(folder, architecture, layout, parameters)
    return parameters


def received(
    architecture: Architecture, shards: list[Shards], needed: dict[str, tuple[TensorSlice, ...]]
) -> dict[str, list[torch.Tensor]]:
    """Send slices from all ranks to one target in small messages."""
    place = RankLocation("node", "device")
    sources = [(place, held_slices(architecture, each.layout)) for each in shards]
    shapes = {name: meta.shape for name, meta in manifest_of(architecture, torch.float32).items()}
    plan = plan_transfer(shapes, sources, [(place, needed)], message_numel=37)
    found = {name: [torch.full(part.shape, torch.nan) for part in parts] for name, parts in needed.items()}

    for (source, _), schedule in plan.schedules.items():
        for part in (part for number in range(plan.num_rounds) for part in schedule.message(number)):
            flat = torch.cat([region.reshape(-1) for region in shards[source].regions(part)])
            for whole, target in zip(needed[part.name], found[part.name], strict=True):
                if part.tensor_slice.intersect(whole) == part.tensor_slice:
                    target[part.tensor_slice.relative_to(whole.starts).index] = flat.view(
                        part.tensor_slice.shape
                    )
    return found


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(drawn=rows(), cut=st.floats(0.2, 0.8))
def test_drawn_parts_arrive_in_shards_and_in_engines(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Drawn], cut: float
) -> None:
    with registered(tuple(each.row for each in drawn)) as architecture:
        state = random_state(architecture)
        folder = tmp_path_factory.mktemp("drawn")
        save_file(state, folder / "model.safetensors")
        assert num_parameters(architecture) == sum(value.numel() for value in state.values())

        for parallel in PARALLEL:
            layouts = layouts_of(architecture, parallel)
            once = layouts_of(architecture, parallel)[: parallel.stage_size]
            shards = [
                Shards(
                    parameters=loaded(folder, architecture, layout), architecture=architecture, layout=layout
                )
                for layout in layouts
            ]
            for each in drawn:
                for shard in shards:
                    check_shard(each, state, shard)

            # Without copies, the ranks hold every element once.
            if parallel.data_parallel_size == parallel.expert_data_parallel_size == 1:
                check_coverage(architecture, [rank_pieces(architecture, layout) for layout in once])
                sums = add_checksums(shard_checksums(shard, torch.float32) for shard in shards)
                assert sums == {name: checksum(value) for name, value in state.items()}

            # Slices of an engine may begin and end anywhere.
            needed = {
                name: (
                    TensorSlice.whole(value.shape).along(0, 0, max(1, int(cut * value.shape[0]))),
                    *(
                        [TensorSlice.whole(value.shape).along(0, int(cut * value.shape[0]), value.shape[0])]
                        if int(cut * value.shape[0])
                        else []
                    ),
                )
                for name, value in state.items()
            }
            last = {
                name: (TensorSlice.whole(value.shape).along(-1 % value.dim(), 0, -(-value.shape[-1] // 3)),)
                for name, value in state.items()
            }
            for slices in (needed, last):
                for name, tensors in received(architecture, shards, slices).items():
                    for tensor_slice, tensor in zip(slices[name], tensors, strict=True):
                        assert torch.equal(state[name][tensor_slice.index], tensor), (parallel, name)


def check_shard(drawn: Drawn, state: Mapping[str, torch.Tensor], shard: Shards) -> None:
    layout = shard.layout
    if drawn.row.place is StagePlacement.layer:
        expected = drawn.slow_shard(state, None, layout.tensor_parallel_size, layout.tensor_parallel_rank)
        assert torch.equal(shard.parameters[drawn.row.megatron.format(layer=0)], expected)
        return
    for expert in layout.experts:
        expected = drawn.slow_shard(
            state, expert, layout.expert_tensor_parallel_size, layout.expert_tensor_parallel_rank
        )
        assert torch.equal(shard.parameters[drawn.row.megatron.format(layer=0, expert=expert)], expected)


HF_EXPERTS = HF_LAYER + "mlp.experts."
MEGATRON_EXPERT = MEGATRON_LAYER + "mlp.experts.local_experts.{expert}."
TYPICAL_ROWS = (
    *(row for row in TRUNK_ROWS if "self_attention.linear_qkv.weight" not in row.megatron),
    # Queries and gates of a head are stored one after another.
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_qkv.weight",
        place=StagePlacement.layer,
        cut=Cut.qkv,
        tensors=(
            TensorPart(name=HF_LAYER + "self_attn.q_proj.weight", dims="(G R 2 D) H", order="G (2 R D) H"),
            (HF_LAYER + "self_attn.k_proj.weight", "K H"),
            (HF_LAYER + "self_attn.v_proj.weight", "K H"),
        ),
    ),
    # One convolution over channels of queries, keys and values.
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.conv1d.weight",
        place=StagePlacement.layer,
        cut=Cut.stacked,
        tensors=tuple(
            TensorPart(
                name=HF_LAYER + "conv1d.weight", dims="P 1 3", sections=("K", "K", "Q"), section=number
            )
            for number in range(3)
        ),
    ),
    # Projections that are packed for each key head.
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.in_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.stacked,
        tensors=tuple(
            TensorPart(
                name=HF_LAYER + "in_proj_qkvz.weight",
                dims="(G P) H",
                sections=("D", "D", "R D", "R D"),
                section=number,
                order="(G P) H",
            )
            for number in range(4)
        ),
    ),
    # Experts in one tensor, transposed; gate and up alternate.
    MappingRow(
        megatron=MEGATRON_EXPERT + "linear_fc1.weight",
        place=StagePlacement.expert,
        cut=Cut.gated,
        tensors=(TensorPart(name=HF_EXPERTS + "gate_up_proj", dims="E H (M 2)", order="2 M H"),),
    ),
    MappingRow(
        megatron=MEGATRON_EXPERT + "linear_fc1.bias",
        place=StagePlacement.expert,
        cut=Cut.gated,
        tensors=(TensorPart(name=HF_EXPERTS + "gate_up_proj_bias", dims="E (M 2)", order="2 M"),),
    ),
    MappingRow(
        megatron=MEGATRON_EXPERT + "linear_fc2.weight",
        place=StagePlacement.expert,
        cut=Cut.row,
        tensors=(TensorPart(name=HF_EXPERTS + "down_proj", dims="E M H", order="H M"),),
    ),
    MappingRow(
        megatron=MEGATRON_EXPERT + "linear_fc2.bias",
        place=StagePlacement.expert,
        cut=Cut.replicated,
        tensors=(TensorPart(name=HF_EXPERTS + "down_proj_bias", dims="E H"),),
    ),
)


def test_typical_rows_are_converted_there_and_back(tmp_path: Path) -> None:
    with registered(TYPICAL_ROWS, num_layers=2) as architecture:
        state = random_state(architecture)
        fields = example_fields("qwen3_moe", num_experts=NUM_EXPERTS, num_hidden_layers=2)
        fields |= {"model_type": architecture.model_type, "decoder_sparse_step": 1}
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "config.json").write_text(json.dumps(fields))
        save_file(state, tmp_path / "hf" / "model.safetensors")
        source = open_model(tmp_path / "hf")

        for tensor, pipeline, item_bytes in ((1, 1, 10**6), (2, 2, 3000), (4, 1, 10**6)):
            layout = Layout(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                virtual_pipeline_parallel_size=None,
                data_parallel_size=1,
            )
            there = tmp_path / f"there-{tensor}"
            back = tmp_path / f"back-{tensor}"
            write_distributed(source, there, layout, max_item_bytes=item_bytes)
            write_hugging_face(open_model(there), back, max_shard_bytes=50_000)
            written = everything(open_model(back))
            assert written.keys() == state.keys()
            assert all(torch.equal(written[name], value) for name, value in state.items()), layout


def test_typical_rows_by_hand(tmp_path: Path) -> None:
    """The first key head of two, and the second expert of four, of rank 1 of 2."""
    with registered(TYPICAL_ROWS) as architecture:
        state = random_state(architecture)
        save_file(state, tmp_path / "model.safetensors")
        parallel = ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=2)
        parameters = loaded(tmp_path, architecture, layouts_of(architecture, parallel)[1])

    # 8 query heads of 32 rows in 4 groups: rank 1 begins with heads 4 and 5, whose gates follow them.
    queries = state["model.layers.0.self_attn.q_proj.weight"].view(8, 2, 32, 64)
    qkv = parameters["decoder.layers.0.self_attention.linear_qkv.weight"].view(2, 6, 32, 64)
    assert torch.equal(qkv[0, :4], torch.stack([queries[4, 0], queries[5, 0], queries[4, 1], queries[5, 1]]))

    # 128 channels of queries, 128 of keys and 256 of values: rank 1 has the second half of each.
    channels = state["model.layers.0.conv1d.weight"]
    assert torch.equal(
        parameters["decoder.layers.0.self_attention.conv1d.weight"],
        torch.cat([channels[64:128], channels[192:256], channels[384:512]]),
    )

    # A key head has 32 rows of q and k, and 64 of v and z. Rank 1 has heads 2 and 3.
    packed = state["model.layers.0.in_proj_qkvz.weight"].view(4, 192, 64)[2:]
    of_each = [packed[:, start:stop] for start, stop in ((0, 32), (32, 64), (64, 128), (128, 192))]
    assert torch.equal(
        parameters["decoder.layers.0.self_attention.in_proj.weight"],
        torch.cat([each.reshape(-1, 64) for each in of_each]),
    )

    # 32 pairs of gate and up: rank 1 has the last 16 of each.
    fused = state["model.layers.0.mlp.experts.gate_up_proj"][1, :, 32:]
    assert torch.equal(
        parameters["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"],
        torch.cat([fused[:, 0::2].T, fused[:, 1::2].T]),
    )
    down = state["model.layers.0.mlp.experts.down_proj"][1, 16:]
    assert torch.equal(parameters["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"], down.T)


def test_wrong_parts_are_named() -> None:
    sizes = {"E": 4, "H": 6, "M": 8}
    with pytest.raises(ValueError, match=r"fused: 'E H M' lacks axis '2' of order '2 H M'"):
        part_geometry(TensorPart(name="fused", dims="E H M", order="2 H M"), sizes, 0)
    with pytest.raises(ValueError, match=r"fused: order 'M' lacks axis 'H' of 'E H M'"):
        part_geometry(TensorPart(name="fused", dims="E H M", order="M"), sizes, 0)

    views = ("(M 2) H", "(2 M) H")
    row = MappingRow(
        megatron=MEGATRON_LAYER + "fc1",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=tuple(TensorPart(name="packed", dims=dims) for dims in views),
    )
    with (
        registered((row,)) as architecture,
        pytest.raises(
            ValueError, match=r"packed: its parts have different views: \(32, 2, 64\), \(2, 32, 64\)"
        ),
    ):
        hf_tensors(architecture, "lm")


def test_a_part_that_a_layout_cannot_cut_is_named() -> None:
    """Twelve rows are two halves of six. The second of three ranks would hold the ends of both."""
    row = MappingRow(
        megatron=MEGATRON_LAYER + "fc1",
        place=StagePlacement.layer,
        cut=Cut.column,
        tensors=(TensorPart(name="packed", dims="6 2", order="(2 6)"),),
    )
    with registered((row,)) as architecture:
        second = layouts_of(architecture, ParallelConfig(tensor_parallel_size=3))[1]
        with pytest.raises(ValueError, match=r"decoder\.layers\.0\.fc1: \[4:8\] of \(12,\) is not one slice"):
            rank_pieces(architecture, second)
