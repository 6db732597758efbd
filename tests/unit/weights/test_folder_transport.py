"""Trainer ranks in every layout write a bitwise identical Hugging Face folder, and send each other no excess data."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.machine.usage import trim_heap
from megarl.weights.export_plan import plan_export
from megarl.weights.hf_folder import save_hf_folder
from megarl.weights.p2p import P2PGroup
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.shards import Shards
from megarl.weights.tensors import Part
from megarl.weights.transfer import SendReport
from megarl.weights.transports import folder as folder_transport
from megarl.weights.transports.folder import NUM_BUFFERS, FolderTransfer, folder_message_bytes
from tests.unit.weights.exports import CPU, Export, Written, differing, small_files_only, write, write_all
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save
from tests.unit.weights.test_transports import TRAINERS
from tests.unit.weights.transfers import Cut

LAYOUTS = {**TRAINERS, "TP2xPP2": Cut(tensor=2, pipeline=2), "TP2xDP2xEP2": Cut(tensor=2, data=2, expert=2)}


def exports_of(cut: Cut) -> list[Export]:
    return [
        Export(cut, "qwen2", True, 10_000),  # a file of each stage; most tensors are smaller than a message
        # Most tensors are larger than a message.
        Export(cut, "llama" if cut.expert == 1 else "qwen2_moe", False, 700, max_file_bytes=40_000),
        Export(cut, "qwen3", False, 3000, max_file_bytes=15_000, head="value"),
        # A file fits in one message.
        Export(cut, "qwen3", False, 10**6, max_file_bytes=40_000, dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_model(rank_pool, tmp_path: Path, name: str) -> None:
    cut = LAYOUTS[name]
    cases = [(export, tmp_path / str(number)) for number, export in enumerate(exports_of(cut))]
    for _, folder in cases:
        folder.mkdir()
    per_rank: list[list[Written]] = rank_pool.run(write_all, world_size=cut.num_ranks, exports=cases)

    for number, (export, folder) in enumerate(cases):
        plan = export.plan()
        assert differing(folder, export.state()) == []
        assert sorted(path.name for path in folder.iterdir()) == sorted(file.name for file in plan.files)
        for rank, written in enumerate(results[number] for results in per_rank):
            travels = sum(
                schedule.numel
                for (source, target), schedule in plan.transfer.schedules.items()
                if source == rank != target
            )
            assert written.sent_bytes == travels * export.dtype.itemsize
            assert written.report.nbytes == plan.transfer.of_source(rank).numel * export.dtype.itemsize
            assert written.report.planned_extra_bytes <= NUM_BUFFERS * export.message_bytes


@pytest.mark.parametrize(("name", "num_files"), [("TP2xEP2", 3), ("TP2xPP2", 4)])
def test_transformers_loads_the_folder(rank_pool, tmp_path: Path, name: str, num_files: int) -> None:
    export = Export(LAYOUTS[name], "qwen2", True, 2000, max_file_bytes=40_000)
    source = save(random_model("qwen2", tied=True), tmp_path / "source")
    target = tmp_path / "target"

    def write_weights(folder: Path) -> None:
        rank_pool.run(write_all, world_size=export.cut.num_ranks, exports=[(export, folder)])

    save_hf_folder(write_weights, export.plan().files, target, source)
    assert len(list(target.glob("*.safetensors"))) == num_files
    tokens = torch.arange(24).view(2, 12)
    loaded, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, source))
    assert torch.equal(loaded(tokens).logits, reference(tokens).logits)


# ---- failures


def fail_on(failing: int, export: Export, folder: Path, again: Path) -> str:
    """Limit files to 20,000 bytes on one rank, then write both again over the same p2p group."""
    p2p = P2PGroup.of_default_group(CPU)
    failure = ""

    if dist.get_rank() == failing:
        with small_files_only(20_000), pytest.raises(OSError, match="too large") as caught:
            write(export, folder, p2p)
        failure = Path(caught.value.filename).name
    else:
        write(export, folder, p2p)

    write(export, again, p2p)
    return failure


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_names_the_file_and_receives_the_rest(
    rank_pool, tmp_path: Path, failing: int
) -> None:
    """The first and last of eight files, written round-robin by ranks 0 and 1, are too large."""
    export = Export(Cut(tensor=2), "llama", False, 700, max_file_bytes=15_000)
    folders = [tmp_path / "failed", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    failures = rank_pool.run(
        fail_on, world_size=2, failing=failing, export=export, folder=folders[0], again=folders[1]
    )
    names = [file.name for file in export.plan().files]
    assert len(names) == 8
    assert failures == [names[0] if failing == 0 else "", names[-1] if failing == 1 else ""]
    assert differing(folders[1], export.state()) == []


class BrokenShards(Shards):
    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        if part.name == "model.norm.weight":
            raise KeyError(part.name)
        return super().regions(part)


def test_a_pass_that_is_broken_off_closes_its_file(tmp_path: Path) -> None:
    export = Export(Cut(), "qwen2", True, 700)
    whole = export.shards(0)
    broken = BrokenShards(parameters=whole.parameters, architecture=whole.architecture, layout=whole.layout)
    sending = FolderTransfer(None, 0, export.plan().of_rank(0), broken, tmp_path)
    threads = threading.active_count()
    with pytest.raises(KeyError):
        sending.run()
    assert threading.active_count() == threads + 1
    assert opened_below(tmp_path) == ["model.safetensors"]
    sending.close()
    assert threading.active_count() == threads
    assert opened_below(tmp_path) == []


def opened_below(folder: Path) -> list[str]:
    """Return the files that this process has open."""
    targets = [Path(os.readlink(link)) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target.name for target in targets if target.is_relative_to(folder)]


def test_a_slow_send_returns_to_the_caller_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_transport, "PATIENCE_S", 0.0)
    export = Export(Cut(), "qwen2", True, 700)
    sending = FolderTransfer(None, 0, export.plan().of_rank(0), export.shards(0), tmp_path)
    num_pauses = 0
    while not sending.run():
        num_pauses += 1
    assert num_pauses > 0
    assert differing(tmp_path, export.state()) == []


# ---- memory


def measure_memory(message_bytes: int, folder: Path) -> list[SendReport]:
    """Return the kernel's memory count while a 130 MB model is written.

    A third of it is sharded along columns, and therefore packed.
    """
    architecture = replace(architecture_of("qwen3", num_layers=1), intermediate_size=10_000, hidden_size=1024)
    layouts = model_layouts(architecture, tensor_parallel_size=2, padded_vocab_size=PADDED_VOCAB)
    rank = dist.get_rank()
    parameters = {
        name: torch.ones(shape) for name, shape in shard_shapes(architecture, layouts[rank]).items()
    }
    shards = Shards(parameters=parameters, architecture=architecture, layout=layouts[rank])
    plan = plan_export(
        architecture,
        layouts,
        ["node"] * 2,
        torch.float32,
        message_bytes=message_bytes,
        max_file_bytes=80 * 10**6,
    )
    p2p = P2PGroup.of_default_group(CPU)
    reports = []

    for number in range(2):
        (own := folder / f"{rank}-{number}").mkdir()
        trim_heap()  # memory that an earlier pass freed must not serve this one
        sending = FolderTransfer(p2p, rank, plan.of_rank(rank), shards, own, durable=False)
        while not sending.run():
            pass
        reports.append(sending.report())
        del sending

    return reports


def test_memory_as_measured_is_at_most_what_is_planned(rank_pool, tmp_path: Path) -> None:
    bucket_bytes = 16 * 2**20
    message_bytes = folder_message_bytes(bucket_bytes, is_cuda=True)
    slack = 4 * 2**20  # for gloo and the interpreter

    for reports in rank_pool.run(measure_memory, world_size=2, message_bytes=message_bytes, folder=tmp_path):
        for report in reports:
            assert report.planned_extra_bytes <= NUM_BUFFERS * message_bytes <= 2 * bucket_bytes
            assert bucket_bytes // 2 < report.measured_extra_bytes <= NUM_BUFFERS * message_bytes + slack
