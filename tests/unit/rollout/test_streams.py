"""Weights that every engine reads while they are written: pass after pass, from a trainer that stops, and from one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod

import pytest
import torch

from megarl.rollout.interface import RolloutEngine
from megarl.rollout.lifecycle import EngineStateError
from megarl.weights.bucket import ChunkMeta, GroupAddress, Parcel
from megarl.weights.checksum import checksum
from megarl.weights.receipt import TensorChunk, WeightTransferError
from megarl.weights.stream import StreamSource, StreamWriter, WeightStream
from megarl.weights.weight_group import WeightGroup, reserve_port
from tests.unit.rollout.subjects import PROMPTS, Subject, Weights, chunks_of, greedy

LIMIT_S = 60.0
CPU = torch.device("cpu")


class Sender:
    """A trainer's only rank: a bucket of each chunk, to all ranks of an engine."""

    def __init__(self, subject: Subject) -> None:
        self._chunk_elements = sum(prod(meta.shape) for meta in subject.manifest.values()) // 10
        buckets = tuple((ChunkMeta(chunk.name, chunk.offset, len(chunk.data)),) for chunk in self._chunks(subject.weights(0)))
        self._slot_numel = max(bucket[0].numel for bucket in buckets)
        self.source = StreamSource(self._slot_numel * 4, 1, subject.engine.num_ranks)
        self.stream = WeightStream(self.source.address, torch.float32, self._slot_numel, buckets)
        self.num_buckets = len(buckets)
        self._writer = StreamWriter(self.source.address, 0)
        subject.engine.join_weight_streams([self.stream], 0)

    def _chunks(self, weights: Weights) -> list[TensorChunk]:
        return chunks_of(weights, self._chunk_elements)

    def write(self, weights: Weights, first: int, stop: int) -> None:
        for number, chunk in enumerate(self._chunks(weights)[first:stop], start=first):
            while not self._writer.may_write(number):
                pass
            self._writer.slot(number, torch.float32)[: len(chunk.data)] = chunk.data
            self._writer.has_written()
        while stop == self.num_buckets and not self._writer.is_read(self.num_buckets):
            pass

    def close(self) -> None:
        self._writer.close()
        self.source.close()


@contextmanager
def joined(subject: Subject) -> Iterator[Sender]:
    sender = Sender(subject)
    try:
        yield sender
    finally:
        sender.close()


def read(engine: RolloutEngine, version: int) -> None:
    while not engine.load_streams():
        pass
    engine.end_weight_update(version)


def push(subject: Subject, sender: Sender, seed: int, version: int) -> None:
    subject.engine.begin_weight_update(subject.manifest)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(sender.write, subject.weights(seed), 0, sender.num_buckets)
        read(subject.engine, version)
        writing.result(LIMIT_S)


def assert_holds(subject: Subject, seed: int, version: int) -> None:
    assert subject.engine.checksums() == {name: checksum(tensor) for name, tensor in subject.weights(seed).items()}
    assert {sample.weight_versions for sample in subject.engine.generate(PROMPTS, greedy())} == {(version,)}


def test_pass_after_pass_of_one_stream(subject: Subject) -> None:
    """Also after the trainer gave its memory back, and after the engine did."""
    with joined(subject) as sender:
        push(subject, sender, seed=1, version=1)
        assert_holds(subject, seed=1, version=1)
        sender.source.empty()
        push(subject, sender, seed=2, version=2)
        subject.engine.sleep()
        subject.engine.wake()
        push(subject, sender, seed=3, version=3)
        assert_holds(subject, seed=3, version=3)


def test_half_a_stream_is_not_enough(ready: Subject) -> None:
    engine = ready.engine
    with joined(ready) as sender:
        engine.begin_weight_update(ready.manifest)
        assert not engine.load_streams()  # nothing comes
        sender.write(ready.weights(1), 0, 2)
        assert not engine.load_streams()
        with pytest.raises(EngineStateError, match="cannot generate while updating"):
            engine.generate(PROMPTS, greedy())
        engine.begin_weight_update(ready.manifest)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(sender.write, ready.weights(2), 2, sender.num_buckets)
            with pytest.raises(WeightTransferError, match="given up in the middle|missing from element"):
                read(engine, version=2)  # the rest of another update is not taken for all of this one
            engine.leave_weight_groups()
            sender.source.close()
            assert isinstance(writing.exception(LIMIT_S), WeightTransferError | None)
        with pytest.raises(EngineStateError, match="cannot generate while (updating|empty)"):
            engine.generate(PROMPTS, greedy())
    with joined(ready) as sender:
        push(ready, sender, seed=3, version=3)
    assert_holds(ready, seed=3, version=3)


def test_a_stream_that_is_closed_while_it_is_read(ready: Subject) -> None:
    engine = ready.engine
    with joined(ready) as sender:
        engine.begin_weight_update(ready.manifest)
        sender.write(ready.weights(1), 0, 2)
    with pytest.raises(WeightTransferError, match="given up by the other side"):
        engine.load_streams()
    with pytest.raises(EngineStateError, match="cannot generate while updating"):
        engine.generate(PROMPTS, greedy())
    with pytest.raises(WeightTransferError, match="transport=broadcast"):  # its place may be another file's by now
        engine.join_weight_streams([sender.stream], 0)
    engine.leave_weight_groups()
    with pytest.raises(WeightTransferError, match="no stream of weights was joined"):
        engine.load_streams()
    ready.push(seed=2, version=2)
    assert_holds(ready, seed=2, version=2)


def test_tensors_that_were_not_announced(ready: Subject) -> None:
    name = next(iter(ready.manifest))
    with joined(ready) as sender:
        wrong = tuple(tuple(chunk._replace(name=chunk.name.replace(name, "other")) for chunk in bucket) for bucket in sender.stream.buckets)
        ready.engine.join_weight_streams([WeightStream(sender.stream.address, torch.float32, sender.stream.slot_numel, wrong)], 0)
        ready.engine.begin_weight_update(ready.manifest)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(sender.write, ready.weights(1), 0, sender.num_buckets)
            with pytest.raises(WeightTransferError, match="other"):
                ready.engine.load_streams()
            ready.engine.leave_weight_groups()
            sender.source.close()
            assert isinstance(writing.exception(LIMIT_S), WeightTransferError)


def test_a_weight_group_outlives_a_sleep(subject: Subject) -> None:
    """So it need not be made anew after one."""
    engine, listener = subject.engine, reserve_port("127.0.0.1")
    address = GroupAddress("stage-0", "127.0.0.1", listener.getsockname()[1], 1 + engine.num_ranks, "gloo", LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WeightGroup, address, 0, CPU, listener)
        engine.join_weight_group(address, 1)
        group = joining.result(LIMIT_S)
    for version in (1, 2):
        engine.begin_weight_update(subject.manifest)
        for name, tensor in subject.weights(version).items():
            work = group.broadcast(tensor.contiguous())
            engine.load_weights([Parcel((ChunkMeta(name, 0, tensor.numel()),), tensor.dtype, "stage-0")])
            group.wait_for(work)
        engine.end_weight_update(version)
        assert_holds(subject, seed=version, version=version)
        engine.sleep()
        engine.wake()
    engine.leave_weight_groups()
    group.close()
