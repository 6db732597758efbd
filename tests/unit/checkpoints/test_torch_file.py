"""Files of torch.save, read without running them: the location of every tensor's elements, and that no code
in them is called."""

from __future__ import annotations

import enum
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megarl.checkpoints.torch_dist import StoredItem, read_chunk
from megarl.checkpoints.torch_file import (
    FilePart,
    FileTensor,
    Inert,
    check_stored,
    mapped,
    read_outline,
    read_outline_with_objects,
    stored_tensor,
)
from megarl.machine.errors import CheckpointError


class Leaves:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_elements_are_mapped_where_they_lie(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(6, 4, generator=generator)
    content = {
        "weight": torch.randn(3, 5, generator=generator).bfloat16(),
        "rows": shared[2:5],  # torch.save writes all of `shared`
        "parameter": torch.nn.Parameter(torch.randn(1, 7, generator=generator).double()),
        "empty": torch.empty(0, 4),
        "whole": shared,
        "scalar": torch.tensor(3.5),
        "last": torch.arange(1000),
    }
    torch.save([*content.values(), content], tmp_path / "data.pt")
    outline = read_outline(tmp_path / "data.pt", "data")[-1]
    found = {name: stored_tensor(value) for name, value in outline.items()}

    for name, stored in found.items():
        assert stored is not None, name
        assert stored.dtype == content[name].dtype
        assert torch.equal(
            mapped(tmp_path / "data.pt", stored.position, stored.shape, stored.dtype), content[name]
        ), name

    check_stored(
        tmp_path / "data.pt", "data", {name: stored for name, stored in found.items() if stored is not None}
    )


def test_what_is_no_contiguous_tensor_has_no_place(tmp_path: Path) -> None:
    torch.save([torch.ones(3, 4).T, 3.0], tmp_path / "data.pt")
    assert [stored_tensor(value) for value in read_outline(tmp_path / "data.pt", "data")] == [None, None]
    assert stored_tensor(torch.ones(3)) is None  # not stored in a file


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_sparse_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 4).to_sparse()}, tmp_path / "data.pt")
    with pytest.raises(CheckpointError, match="data: contains a sparse tensor"):
        read_outline(tmp_path / "data.pt", "data")


def test_objects_are_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("megatron.legacy.model.enums")
    module.AttnType = enum.Enum("AttnType", "cross", module=module.__name__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save({"args": Namespace(num_layers=2, attention=module.AttnType.cross)}, tmp_path / "data.pt")  # type: ignore[attr-defined]
    monkeypatch.undo()
    arguments = read_outline_with_objects(tmp_path / "data.pt")["args"]

    # The real class if Megatron is imported, which registers it as safe.
    assert isinstance(arguments, Inert | Namespace)
    assert vars(arguments)["num_layers"] == 2
    assert type(vars(arguments)["attention"]) is Inert


def read_part(path: Path) -> object:
    with FilePart(path, 0, path.stat().st_size) as part:
        return read_outline(part, str(path))


@pytest.mark.parametrize(
    "read", [lambda path: read_outline(path, str(path)), read_part, read_outline_with_objects]
)
def test_code_is_not_run(tmp_path: Path, read: Callable[[Path], object]) -> None:
    torch.save({"weight": torch.ones(2), "args": Leaves(tmp_path / "trace")}, tmp_path / "data.pt")
    with pytest.raises(
        CheckpointError, match=r"data\.pt: its pickle names posix\.mkdir, which is not on the list"
    ) as raised:
        read(tmp_path / "data.pt")

    assert "\n" not in str(raised.value)
    assert not (tmp_path / "trace").exists()


def test_a_pickle_that_is_damaged_is_not_advertised(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "data.pt")
    content = (tmp_path / "data.pt").read_bytes()
    (tmp_path / "data.pt").write_bytes(
        content.replace(b"X\x06\x00\x00\x00weight", b"\x95\x06\x00\x00\x00weight")
    )
    with pytest.raises(CheckpointError, match=r"data\.pt: damaged") as raised:
        read_outline(tmp_path / "data.pt", "data.pt")
    assert "weights_only" not in str(raised.value)


def test_a_shape_that_is_larger_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    torch.save(torch.zeros(7), path)
    path.write_bytes(path.read_bytes().replace(b"K\x07", b"K\xff"))
    chunk = StoredItem(
        key="bias",
        file=path.name,
        position=0,
        nbytes=path.stat().st_size,
        offsets=(0,),
        shape=(255,),
        whole_shape=(255,),
        dtype=torch.float32,
    )

    with pytest.raises(
        CheckpointError,
        match=r"distcp: bias at \(0,\): the item has \d+ bytes, fewer than \(255,\) of torch\.float32",
    ):
        read_chunk(tmp_path, chunk)

    stored = FileTensor(position=0, shape=(255,), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"data: damaged: the bytes of bias are not in the file"):
        check_stored(path, "data", {"bias": stored})


def test_a_part_of_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(20)))
    with FilePart(tmp_path / "data", 5, 10) as part:
        assert part.read() == bytes(range(5, 15))
        assert part.seek(-3, os.SEEK_END) == 7
        assert part.read(10) == bytes(range(12, 15))
        assert part.read(1) == b""
        with pytest.raises(OSError, match="before the beginning"):
            part.seek(-1)
