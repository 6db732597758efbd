"""How Ray carries weight buckets: tensors as numpy arrays in shared memory, which every rollout worker of a node reads in place.

By default Ray pickles a torch tensor by value, with a copy on both sides. A received bucket is read-only by contract: its
tensors share the memory of all its readers, and loading a weight copies out of it.
"""

from __future__ import annotations

import ray.util

from megarl.protocol.tensors import TensorArray, array_to_tensor, tensor_to_array
from megarl.protocol.weights import TensorChunk


def register_serializers() -> None:
    """In every process that sends buckets; the receivers need nothing."""
    ray.util.register_serializer(TensorChunk, serializer=_pack, deserializer=_unpack)


def _pack(chunk: TensorChunk) -> tuple[str, int, TensorArray]:
    return chunk.name, chunk.offset, tensor_to_array(chunk.data)


def _unpack(packed: tuple[str, int, TensorArray]) -> TensorChunk:
    name, offset, array = packed
    return TensorChunk(name, offset, array_to_tensor(array))
