"""Exports among real ranks without a driver: each rank writes its part of a folder."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import VALUE_HEAD_TENSOR, Head
from megarl.weights.export_plan import ExportPlan, plan_export
from megarl.weights.manifest import manifest_of
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.shards import Shards
from megarl.weights.transfer import SendReport
from megarl.weights.transports.folder import FolderTransfer
from tests.unit.weights.models import HIDDEN, architecture_of, random_state, shards_of
from tests.unit.weights.transfers import Cut

CPU = torch.device("cpu")


class Export(NamedTuple):
    """The export of a random float32 model that ranks hold in the layout `cut`."""

    cut: Cut
    family: str
    tied: bool
    message_bytes: int
    max_file_bytes: int = 5 * 10**9
    head: Head = "lm"
    dtype: torch.dtype = torch.float32

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.family, tied=self.tied)

    def plan(self) -> ExportPlan:
        return plan_export(
            self.architecture,
            self.cut.layouts(self.architecture),
            ["node"] * self.cut.num_ranks,
            self.dtype,
            self.head,
            message_bytes=self.message_bytes,
            max_file_bytes=self.max_file_bytes,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the folder must contain."""
        state = dict(random_state(self.family, tied=self.tied))
        state[VALUE_HEAD_TENSOR] = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
        return {
            name: state[name].to(self.dtype) for name in manifest_of(self.architecture, self.dtype, self.head)
        }

    def shards(self, rank: int) -> Shards:
        layout = self.cut.layouts(self.architecture)[rank]
        parameters = shards_of(random_state(self.family, tied=self.tied), self.architecture, layout)
        if self.head == "value" and layout.holds_output:
            parameters["output_layer.weight"] = self.state()[VALUE_HEAD_TENSOR]

        return Shards(
            parameters={name: value.contiguous() for name, value in parameters.items()},
            architecture=self.architecture,
            layout=layout,
            head=self.head,
        )


class CountingWire(P2PGroup):
    """Counts the bytes that this rank sends to others."""

    sent_bytes = 0

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> PendingMessages:
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        return super().start(sends, receives, tag)


class Written(NamedTuple):
    report: SendReport
    sent_bytes: int


def write(export: Export, folder: Path, p2p: P2PGroup | None = None) -> SendReport:
    """Write this rank's part; the whole folder without a p2p group."""
    rank = 0 if p2p is None else dist.get_rank()
    sending = FolderTransfer(p2p, rank, export.plan().of_rank(rank), export.shards(rank), folder)

    try:
        while not sending.run():
            pass
        return sending.report()
    finally:
        sending.close()


def write_all(exports: Sequence[tuple[Export, Path]]) -> list[Written]:
    """Write the folder. Called by every rank of a pool."""
    p2p = CountingWire.of_default_group(CPU)
    written = []

    for export, folder in exports:
        p2p.sent_bytes = 0
        written.append(Written(write(export, folder, p2p), p2p.sent_bytes))

    return written


def differing(folder: Path, state: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ, are missing, or are unexpected in the folder's files."""
    found = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    return [
        name
        for name in found.keys() | state.keys()
        if name not in found or name not in state or not torch.equal(found[name], state[name])
    ]


@contextmanager
def small_files_only(max_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process can write, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))

    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
