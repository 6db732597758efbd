"""The results of measurements, as they travel between processes. Pure."""

from __future__ import annotations

from typing import NamedTuple

from megarl.calibration.request import ProductShape


class ProductTime(NamedTuple):
    """Seconds of one matrix product."""

    shape: ProductShape
    dtype: str
    seconds: float

    @property
    def tflops(self) -> float:
        return self.shape.flops / self.seconds / 1e12


class CollectiveTime(NamedTuple):
    """Seconds of one collective. `nbytes` is the larger of a rank's input and output."""

    kind: str
    num_ranks: int
    nbytes: int
    seconds: float


class LayerTime(NamedTuple):
    """Host seconds of a forward pass with few tokens in the training engine, by the model's layers."""

    num_layers: int
    seconds: float


class DecodeTime(NamedTuple):
    """Seconds of one decode step of the rollout engine.

    Attributes:
        batch: The number of sequences.
        tokens: The mean number of tokens in the cache of each sequence.
    """

    batch: int
    seconds: float
    tokens: float


class RankMeasurements(NamedTuple):
    """The measurements of one rank, made while all other ranks of the machine made the same.

    Attributes:
        squares: Square products in each dtype.
        products: The products of a layer in the run's dtype.
        attention_tflops: Rate of attention, forward and backward, by the operations that the mask leaves.
        memory_gb_s: Bytes read and written per second by a copy on the device, in 10**9.
        host_gb_s: Bytes per second of a copy to the host, in 10**9.
        storage_gb_s: Bytes per second of a file that is written and flushed, in 10**9. None except on rank 0.
        collectives: Collectives of all ranks; empty for one rank.
        layers: Forward passes of two models that differ in their number of layers. Empty if the layers do
            not fit into the device's memory.
    """

    device: str
    memory_bytes: int
    squares: tuple[ProductTime, ...]
    products: tuple[ProductTime, ...]
    attention_tflops: float
    memory_gb_s: float
    host_gb_s: float
    storage_gb_s: float | None
    collectives: tuple[CollectiveTime, ...]
    layers: tuple[LayerTime, ...]


class DecodeSweep(NamedTuple):
    """The decode steps of an engine with one rank.

    Attributes:
        times: By batch size, the smallest first.
        num_layers: The layers of the model that was decoded.
        weight_bytes: The bytes of weights that a step of a dense model reads.
        problem: Why there is no sweep; None if there is one.
    """

    times: tuple[DecodeTime, ...] = ()
    num_layers: int = 1
    weight_bytes: int = 0
    cache_bytes: int = 0
    problem: str | None = None
