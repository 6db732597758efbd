"""Test weight transfer from a trainer process to an engine process on one GPU, by CUDA IPC, and the memory
left after the engine is killed; between two GPUs, if present, by NCCL.

tests/unit/weights/test_shared_device.py runs these tests on the CPU, so that they stay valid.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megarl.machine.usage import Stopwatch
from megarl.weights.checksum import checksum
from megarl.weights.p2p import P2PAddress
from megarl.weights.tensors import WeightTransferError
from tests.mortal_ranks import MortalRank, mortal_ranks
from tests.shared_device import LIMIT_S, SharedSpec, answer, ask, save_model, serve_engine, serve_trainer

MB = 2**20
MEETING_LIMIT_S = 30.0


def spec_of(folder: Path, *devices: torch.device) -> SharedSpec:
    save_model(folder, num_layers=2, hidden_size=512)  # 18 MB
    return SharedSpec(folder, (devices[0], devices[-1]))


def slack(device: torch.device) -> int:
    """Return the bytes that something else may use: on a CPU the interpreter counts too."""
    return MB if device.type == "cuda" else 8 * MB


def is_counted(device: torch.device, seed: int) -> bool:
    """Return whether a transfer may use memory only for its messages: on a CPU, a model's memory is allocated
    at the first write."""
    return device.type == "cuda" or seed > 1


def push(trainer: MortalRank, engine: MortalRank, seed: int, replica: int = 0):
    """Return the trainer's report, and the extra bytes of the engine."""
    ask(trainer, "change", seed)
    engine.tell(("receive", seed))
    report = ask(trainer, "send", [replica])
    return report, answer(engine)


def check_weights(trainer: MortalRank, engine: MortalRank, seed: int) -> None:
    assert ask(engine, "differing", seed) == []
    assert ask(engine, "checksums") == ask(trainer, "checksums")


def test_ipc_buffers_carry_weights_to_the_bit_in_the_memory_of_two_buckets(
    device: torch.device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    spec = spec_of(tmp_path, device)
    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), partial(serve_engine, spec)]) as (
        trainer,
        engine,
    ):
        before = ask(trainer, "held")
        ask(engine, "join", ask(trainer, "serve", 0, ask(engine, "start")))
        seen = set()
        for seed in (1, 2):
            report, engine_bytes = push(trainer, engine, seed)
            assert report.lost == {}
            assert report.planned_extra_bytes <= 2 * spec.bucket_bytes
            if is_counted(device, seed):
                assert report.measured_extra_bytes <= 2 * spec.bucket_bytes + slack(device)
                assert engine_bytes <= 2 * spec.bucket_bytes + slack(device)
            # it would show if all were allocated at once
            assert report.nbytes > 2 * spec.bucket_bytes + slack(device)
            check_weights(trainer, engine, seed)
            seen.add(tuple(ask(engine, "checksums").values()))
            record_property(
                "extra MB of trainer and engine",
                f"{report.measured_extra_bytes / MB:.1f} and {engine_bytes / MB:.1f}",
            )
        assert len(seen) == 2
        assert ask(trainer, "held").of_process - before.of_process >= spec.bucket_bytes
        ask(engine, "close")
        ask(trainer, "leave", 0)
        left = ask(trainer, "held").of_process - before.of_process
        record_property("MB left in the trainer", f"{left / MB:.1f}")
        assert left <= MB


def test_an_engine_that_is_killed_in_a_push_is_reported_and_leaves_no_memory_behind(
    device: torch.device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    spec = spec_of(tmp_path, device)
    serve = partial(serve_engine, spec)

    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), serve]) as (trainer, first):
        ask(first, "join", ask(trainer, "serve", 0, ask(first, "start")))
        # memory that the device keeps from its first use, such as kernels, is allocated from here on
        push(trainer, first, 1)
        ask(first, "close")
        ask(trainer, "leave", 0)
        end(first, device)
        before = ask(trainer, "held")

        # These start now, so that their contexts on the device are not in `before`.
        with mortal_ranks(tmp_path, [serve, serve]) as (doomed, spare):
            ask(doomed, "join", ask(trainer, "serve", 1, ask(doomed, "start")))
            ask(doomed, "doom", 20)  # of about 50 parts
            doomed.tell(("receive", 2))
            start_s = time.monotonic()
            report = ask(trainer, "send", [1])
            assert time.monotonic() - start_s < LIMIT_S / 2
            assert list(report.lost) == [1]
            assert "is gone" in report.lost[1]
            ask(trainer, "leave", 1)

            ask(spare, "join", ask(trainer, "serve", 2, ask(spare, "start")))
            report, _ = push(trainer, spare, 3, replica=2)
            assert report.lost == {}
            check_weights(trainer, spare, 3)
            ask(spare, "close")
            ask(trainer, "leave", 2)
            end(spare, device)

        after = ask(trainer, "held")
        left = after.of_process - before.of_process, after.of_device - before.of_device
        record_property("MB left of process and device", f"{left[0] / MB:.1f} and {left[1] / MB:.1f}")
        assert left[0] <= MB
        assert abs(left[1]) <= 8 * MB


def end(rank: MortalRank, device: torch.device) -> None:
    """Wait until the process has ended and its device memory is free."""
    rank.tell(None)
    assert rank.connection.poll(LIMIT_S)
    with pytest.raises(EOFError):
        rank.connection.recv()
    time.sleep(1.0 if device.type == "cuda" else 0.0)  # the GPU driver takes a moment to release its memory


def test_two_ranks_on_one_device_are_refused_within_the_limit(
    device: torch.device, one_device_backend: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, device)
    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), partial(serve_engine, spec)]) as ranks:
        address = P2PAddress(
            "replica-0", "127.0.0.1", ask(ranks[0], "reserve"), 2, one_device_backend, MEETING_LIMIT_S
        )
        start_s = time.monotonic()  # time of two processes that have started
        for number, rank in enumerate(ranks):
            rank.tell(("meet", address, number))
        reasons = []
        for number, rank in enumerate(ranks):
            with pytest.raises(
                WeightTransferError, match=f"replica-0.*rank {number} could not join"
            ) as caught:
                answer(rank)
            reasons.append(str(caught.value))
        # the second may find that the first has gone
        assert re.search("Duplicate GPU|invalid usage", "\n".join(reasons)), reasons
        assert time.monotonic() - start_s < MEETING_LIMIT_S


def test_a_group_carries_weights_to_another_device(
    two_devices: tuple[torch.device, torch.device], backend: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, *two_devices)
    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), partial(serve_engine, spec)]) as (
        trainer,
        engine,
    ):
        needed = ask(engine, "start")
        engine.tell(("join", ask(trainer, "group_link", 0, backend, needed)))
        ask(trainer, "join_group", 0)
        answer(engine)
        for seed in (1, 2):
            report, engine_bytes = push(trainer, engine, seed)
            assert report.lost == {}
            if is_counted(two_devices[0], seed):
                assert report.measured_extra_bytes <= 2 * spec.buffer_bytes + slack(two_devices[0])
                assert engine_bytes <= 2 * spec.buffer_bytes + slack(two_devices[1])
            check_weights(trainer, engine, seed)
        closing = [(engine, "close"), (trainer, "close")]
        for rank, name in closing:  # both at once: a communicator ends when all its ranks close it
            rank.tell((name,))
        for rank, _ in closing:
            answer(rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(), (5, 0), (7,), (300, 1000), (3, 40_000)])
def test_checksums_are_those_of_the_cpu(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_device = tensor.to(device)
    assert checksum(on_device) == checksum(tensor)

    if tensor.dim() == 2 and tensor.numel():
        assert checksum(on_device.t().contiguous().t(), 9, (5 * shape[1], 2)) == checksum(
            tensor, 9, (5 * shape[1], 2)
        )


def test_a_checksum_of_several_blocks_is_that_of_the_cpu(device: torch.device) -> None:
    numel = 2**25 + 12345 if device.type == "cuda" else 2**16 + 12345
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert checksum(tensor.to(device)) == checksum(tensor)


def test_a_stopwatch_measures_the_device_and_not_its_host(device: torch.device) -> None:
    stopwatch = Stopwatch(device)
    work(device, 0.01)  # the first is slower
    asked_s = 0.0

    for _ in range(2):
        start_s = time.perf_counter()
        with stopwatch:
            work(device, 0.1)
        asked_s += time.perf_counter() - start_s

    measured_s = stopwatch.seconds()
    assert 0.1 < measured_s < 1.0
    assert stopwatch.seconds() == measured_s
    if device.type == "cuda":
        assert asked_s < measured_s / 4


def work(device: torch.device, seconds: float) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))  # cycles, of which a GPU has between 1.2e9 and 2.6e9 per second
    else:
        time.sleep(seconds)
