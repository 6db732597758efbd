"""Bytes, files and pickles of a batch round-trip, and anything else is refused."""

import json
import pickle
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save

from megarl.batch.arrays import array_to_private_tensor, array_to_tensor, same, tensor_to_array
from megarl.batch.data_proto import DataProto
from megarl.batch.serialization import MAGIC, SerializationError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.uint8,
    torch.float8_e4m3fn,
]


def make_batch() -> DataProto:
    shared = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    columns = {str(dtype): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in DTYPES}
    return DataProto.from_dict(
        {
            **columns,
            "advantages": shared,
            "returns": shared,
            "strided": torch.arange(12).reshape(2, 6)[:, ::2],
        },
        {
            "uid": ["ü", "b"],
            "turns": [[1, 2], [3, 4]],
            "extra": [{"n": np.int64(3), "x": np.array([1.5, 2.5])}, None],
        },
        {
            "temperature": 0.5,
            "shape": (1, 2),
            "nan": float("nan"),
            "objects": np.array([[1], [2, 3]], dtype=object),
        },
    )


def assert_equal(left: DataProto, right: DataProto) -> None:
    assert same(left.tensors, right.tensors)
    assert same(left.non_tensor_batch, right.non_tensor_batch)
    assert same(left.meta_info, right.meta_info)


def test_bytes_and_files_come_back_equal(tmp_path) -> None:
    batch = make_batch()
    assert_equal(DataProto.from_bytes(batch.to_bytes()), batch)
    back = DataProto.from_bytes(batch.to_bytes())
    assert isinstance(back.non_tensor_batch["extra"][0]["n"], np.int64)
    assert back.non_tensor_batch["extra"][0]["x"].dtype == np.float64
    batch.save_to_disk(tmp_path / "batch")
    batch.save_to_disk(tmp_path / "batch")
    assert_equal(DataProto.load_from_disk(tmp_path / "batch"), batch)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
    assert DataProto.from_bytes(DataProto(meta_info={"step": 1}).to_bytes()).meta_info == {"step": 1}


@pytest.mark.parametrize(
    ("array", "meta", "message"),
    [
        ([object()], {}, r"non_tensor_batch\['x'\] contains a object"),
        ([1], {"f": {"g": torch.zeros(1)}}, r"meta_info\['f'\]\['g'\] contains a Tensor"),
        ([{1: 2}], {}, r"has the key 1: only strings"),
        ([{"__megarl__": "tuple"}], {}, r"has the key '__megarl__'"),
    ],
)
def test_what_cannot_be_stored_safely_is_named(array: list, meta: dict, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        DataProto.from_dict(non_tensors={"x": array}, meta_info=meta).to_bytes()


def test_a_failed_save_leaves_the_old_file(tmp_path) -> None:
    make_batch().save_to_disk(tmp_path / "batch")
    with pytest.raises(SerializationError):
        DataProto(meta_info={"f": object()}).save_to_disk(tmp_path / "batch")
    assert_equal(DataProto.load_from_disk(tmp_path / "batch"), make_batch())


def test_every_damage_is_noticed_and_the_file_named(tmp_path) -> None:
    path = tmp_path / "batch"
    data = DataProto.from_dict({"a": torch.arange(3)}, {"uid": ["x", "y", "z"]}).to_bytes()
    damaged = [data[:length] for length in range(0, len(data), 7)]
    damaged += [data[:spot] + bytes([data[spot] ^ 1]) + data[spot + 1 :] for spot in range(0, len(data), 3)]

    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(SerializationError, match=str(path)):
            DataProto.load_from_disk(path)


def _signed(body: bytes) -> bytes:
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def _document(**changes: object) -> torch.Tensor:
    whole = {"ragged": {}, "non_tensors": {}, "meta_info": {}, "num_rows": 2, **changes}
    return torch.frombuffer(bytearray(json.dumps(whole).encode()), dtype=torch.uint8)


def _places(starts: list[int], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Return row positions for rows of three values."""
    return {"values/x": torch.zeros(3), "starts/x": torch.tensor(starts), "lengths/x": torch.tensor(lengths)}


def test_bytes_that_are_not_a_batch_are_refused_and_never_unpickled() -> None:
    for body in (
        b"junk",
        pickle.dumps({"a": 1}),
        save({"a": torch.zeros(1)}),
        save({"document": torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)}),
        save({"document": _document(meta_info={"__megarl__": "evil", "value": 1})}),
    ):
        with pytest.raises(SerializationError, match="does not contain a DataProto"):
            DataProto.from_bytes(_signed(body))


def test_pickle_moves_tensors_out_of_band() -> None:
    batch = DataProto.from_dict(
        {"a": torch.ones(1000, 100), "b": torch.ones(1000, 100, dtype=torch.bfloat16)}, {"uid": ["x"] * 1000}
    )
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [200_000, 400_000]
    assert len(stream) < 10_000
    assert buffers[0].raw().obj is not None
    assert_equal(pickle.loads(stream, buffers=buffers), batch)
    assert_equal(pickle.loads(pickle.dumps(make_batch())), make_batch())


def test_shared_read_only_memory_is_copied_on_arrival() -> None:
    batch = DataProto.from_dict({"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.bfloat16)})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]  # immutable, like Ray's buffers
    first, second = (pickle.loads(stream, buffers=shared) for _ in range(2))
    first.batch["a"] += 1
    first.batch["b"] += 1
    assert second.batch["a"].tolist() == second.batch["b"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_share_memory_with_their_arrays(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    packed = tensor_to_array(tensor)
    back = array_to_tensor(packed)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert array_to_private_tensor(packed).data_ptr() == tensor.data_ptr()
    frozen = packed[0].copy()
    frozen.flags.writeable = False
    assert array_to_private_tensor((frozen, dtype)).data_ptr() != frozen.ctypes.data
