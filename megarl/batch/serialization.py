"""Safe serialization of a batch: safetensors for tensors, JSON for the rest, and a checksum.

Pickle is never used.

Layout: MAGIC, CRC32 of the body (4 bytes, little endian), body. The body is one safetensors document whose
tensor `document` contains the JSON as UTF-8 bytes (safetensors limits its own header to 100 MB, which is too
small for raw texts). Rows of tokens are stored as three tensors, `values/KEY`, `starts/KEY` and
`lengths/KEY`, with the padding in the JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from megarl.batch.ragged import Column, RaggedTensor

MAGIC = b"megarl-batch-3\n\0"
_DOCUMENT = "document"
_TENSOR_PREFIX = "tensor/"
_RAGGED_PARTS = ("values", "starts", "lengths")
_TAG = "__megarl__"  # key of JSON objects that encode values without a JSON type


class SerializationError(ValueError):
    """A value cannot be stored safely, or bytes are not a complete batch.

    The message names the value or the file.
    """


def encode(
    columns: Mapping[str, Column],
    non_tensors: Mapping[str, list[Any]],
    meta_info: dict[str, Any],
    num_rows: int,
) -> bytes:
    """Serialize a batch.

    Raises:
        SerializationError: A value is not JSON, numpy, a tuple, or nested from these.
    """
    # Pack rows of tokens, so that only the values that they use are stored.
    ragged = {key: column.packed() for key, column in columns.items() if isinstance(column, RaggedTensor)}
    tensors = {
        _TENSOR_PREFIX + key: column for key, column in columns.items() if isinstance(column, torch.Tensor)
    }
    tensors |= {
        f"{part}/{key}": getattr(column, part) for key, column in ragged.items() for part in _RAGGED_PARTS
    }
    document = {
        "ragged": {
            key: {"padding": column.padding, "on_left": column.on_left} for key, column in ragged.items()
        },
        "non_tensors": {
            key: [_to_json(row, f"non_tensor_batch[{key!r}]") for row in rows]
            for key, rows in non_tensors.items()
        },
        "meta_info": _to_json(meta_info, "meta_info"),
        "num_rows": num_rows,
    }

    # safetensors stores only tensors, so the rest is JSON in a tensor of bytes.
    text = bytearray(json.dumps(document).encode())
    body = save({_DOCUMENT: torch.frombuffer(text, dtype=torch.uint8), **_unshared(tensors)})

    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode(
    data: bytes, source: str = "bytes"
) -> tuple[dict[str, Column], dict[str, list[Any]], dict[str, Any], int]:
    """Deserialize the arguments of `encode`.

    Args:
        source: The name of the data in errors.

    Raises:
        SerializationError: The data is not a batch, truncated, or modified.
    """
    body_start = len(MAGIC) + 4
    if len(data) < body_start or not data.startswith(MAGIC):
        raise SerializationError(f"{source} is not a stored DataProto: it does not start with {MAGIC!r}")
    body = data[body_start:]

    # Verify the whole body before parsing any of it.
    if zlib.crc32(body) != int.from_bytes(data[len(MAGIC) : body_start], "little"):
        raise SerializationError(
            f"{source} is corrupt: its checksum does not match ({len(data)} bytes); write it again"
        )

    try:
        tensors = load(body)
        document = json.loads(bytes(tensors.pop(_DOCUMENT).numpy()))
        ragged = {
            key: _ragged([tensors.pop(f"{part}/{key}") for part in _RAGGED_PARTS], how)
            for key, how in document["ragged"].items()
        }
        columns = {name.removeprefix(_TENSOR_PREFIX): tensor for name, tensor in tensors.items()} | ragged
        non_tensors = {
            key: [_from_json(row) for row in rows] for key, rows in document["non_tensors"].items()
        }
        return columns, non_tensors, _from_json(document["meta_info"]), _row_count(document["num_rows"])
    except (
        SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # data with a valid checksum that another program wrote
        raise SerializationError(f"{source} does not contain a DataProto: {error}") from error


def _ragged(parts: Sequence[torch.Tensor], how: Mapping[str, Any]) -> RaggedTensor:
    values, starts, lengths = parts
    if (
        starts.dtype != torch.int64
        or lengths.dtype != torch.int64
        or starts.shape != lengths.shape
        or values.ndim != 1
        or starts.ndim != 1
    ):
        raise ValueError("starts, lengths or values of rows of tokens have a wrong dtype or shape")

    # Slicing would silently shorten a row that reaches beyond the values.
    if len(starts) and not (
        int(starts.min()) >= 0 <= int(lengths.min()) and int((starts + lengths).max()) <= len(values)
    ):
        raise ValueError(f"rows of tokens lie outside of their {len(values)} values")

    # isinstance would accept a boolean as an integer.
    if type(how["padding"]) is not int or type(how["on_left"]) is not bool:
        raise ValueError(f"rows of tokens have the padding {how['padding']!r}")
    return RaggedTensor(values, starts, lengths, padding=how["padding"], on_left=how["on_left"])


def _row_count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"num_rows is {value!r}")
    return value


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, which safetensors refuses. The first one is not copied."""
    seen: set[int] = set()
    result = {}

    for key, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[key] = tensor

    return result


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):  # before the plain types, because np.float64 is also a float
        return {_TAG: "scalar", "dtype": value.dtype.str, "value": _to_json(value.item(), where)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value

    if isinstance(value, np.ndarray):
        return {
            _TAG: "array",
            "dtype": "object" if value.dtype == object else value.dtype.str,
            "shape": list(value.shape),
            "value": [_to_json(item, where) for item in value.ravel().tolist()],
        }

    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [_to_json(item, where) for item in value]}
    if isinstance(value, list):
        return [_to_json(item, where) for item in value]

    if isinstance(value, dict):
        # A key equal to the tag would be decoded as a tagged value.
        for key in value:
            if not isinstance(key, str) or key == _TAG:
                raise SerializationError(
                    f"{where} has the key {key!r}: only strings other than {_TAG!r} can be stored"
                )
        return {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}

    raise SerializationError(
        f"{where} contains a {type(value).__name__}, which cannot be stored safely: use JSON values, numpy "
        f"values or tensors"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _from_json(item) for key, item in value.items()}
    content = _from_json(value["value"])
    if kind == "tuple":
        return tuple(content)
    if kind == "scalar":
        return np.dtype(value["dtype"]).type(content)

    if kind == "array":
        array = np.empty(len(content), dtype=np.dtype(value["dtype"]))
        # Assign one by one, because numpy would turn rows that are lists into a second dimension.
        for index, item in enumerate(content):
            array[index] = item
        return array.reshape(value["shape"])

    raise ValueError(f"unknown kind of value {kind!r}")
