"""A stored model of any format: which pieces of which Hugging Face tensors are stored where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.config.rules.reward import has_chat_template
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head, HFTensor, hf_tensors
from megarl.weights.hf_folder import CONFIG_FILE
from megarl.weights.message_words import word_counts
from megarl.weights.safetensors_file import Elements, nonfinite_problem
from megarl.weights.tensors import TensorSlice, chunks_fault, range_slices

TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HEADS = {"lm": "language model", "value": "value head (critic or reward model)"}


# Elements of a tensor: their place in the view `HFTensor.view`, and what opens them. They are memory-mapped,
# so only accessed elements are read. Those of packed tensors are converted when they are accessed.
StoredPiece = tuple[TensorSlice, Callable[[], Elements]]


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A Hugging Face tensor in pieces that contain each of its elements once."""

    hf: HFTensor
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.hf.shape) * self.dtype.itemsize

    def fill(self, target: torch.Tensor, place: TensorSlice) -> None:
        """Copy the elements `place` into `target` (place.shape), converting them to its dtype.

        Raises CheckpointError if the dtype cannot represent them.
        """
        for held, open_elements in self.pieces:
            if (common := held.intersect(place)) is not None:
                source = open_elements()[common.relative_to(held.starts).index]
                target[common.relative_to(place.starts).index].copy_(source)
        # A cast to float16 silently turns large elements into infinity.
        if target.dtype == torch.float16 and self.dtype != torch.float16 and bool(target.isinf().any()):
            raise CheckpointError(
                f"{self.hf.name} has elements that float16 cannot represent; choose bfloat16 or float32"
            )

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of a matrix, contiguous. Raises CheckpointError like `fill`."""
        num_columns = self.hf.shape[1]
        matrix = torch.empty(stop - start, num_columns, dtype=dtype)
        flat = matrix.view(-1)
        filled = 0
        for place in range_slices(self.hf.view, start * num_columns, stop * num_columns):
            self.fill(flat[filled : filled + place.volume].view(place.shape), place)
            filled += place.volume
        return matrix

    def block(
        self, place: TensorSlice, dtype: torch.dtype, room: Callable[..., torch.Tensor] = torch.empty
    ) -> torch.Tensor:
        """Return the elements `place`, contiguous.

        They are memory-mapped if they are stored that way, else copied into `room(shape, dtype=...)`.

        Raises:
            CheckpointError: See `fill`.
        """
        for held, open_elements in self.pieces:
            if self.dtype == dtype and held.intersect(place) == place:
                stored = open_elements()[place.relative_to(held.starts).index]
                if stored.dtype == dtype and stored.is_contiguous():
                    return stored
                # `fill` would convert packed elements a second time.
                return room(place.shape, dtype=dtype).copy_(stored)

        block = room(place.shape, dtype=dtype)
        self.fill(block, place)
        return block


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A stored model.

    Attributes:
        kind: A description of the format.
        layout: A description of how it is sharded.
        companions: The folder with config.json and the tokenizer.
        step: The step of the run that saved it.
        open_kept: Opens the tensors that are kept (weights/kept_tensors.py), which are not in `tensors`,
            or raises WeightTransferError if their format is not supported. None: Megatron's formats do not
            contain them.
    """

    folder: Path
    kind: str
    layout: str
    companions: Path
    architecture: Architecture
    head: Head
    tensors: Mapping[str, SourceTensor]
    step: int | None = None
    open_kept: Callable[[], Mapping[str, SourceTensor]] | None = None

    @property
    def num_parameters(self) -> int:
        return sum(prod(tensor.hf.shape) for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + prod(tensor.hf.shape)
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def single_dtype(self) -> torch.dtype:
        """The dtype of all tensors that have the model's. Raises CheckpointError if they have several."""
        wide = word_counts(self.architecture, 1, self.head)
        for name, tensor in self.tensors.items():
            if tensor.dtype != self.dtype and name not in wide:
                raise CheckpointError(
                    f"{self.folder}: {name} is {tensor.dtype} and most other tensors are {self.dtype}; "
                    f"choose "
                    f"one for all with --dtype"
                )
        return self.dtype


def refuse_nonfinite(values: torch.Tensor, name: str) -> None:
    """Refuse to write a tensor that has NaN or infinity.

    Raises:
        CheckpointError: It has. The message names the tensor.
    """
    if (problem := nonfinite_problem(values)) is not None:
        raise CheckpointError(f"{name} {problem}")


def checked_tensors(
    folder: Path,
    architecture: Architecture,
    head: Head,
    dtypes: Mapping[str, torch.dtype],
    pieces: Mapping[str, list[StoredPiece]],
    stored: Collection[str] | None = None,
) -> dict[str, SourceTensor]:
    """Build the tensors of a model, or those of its tensors that are `stored`.

    Raises CheckpointError unless the pieces contain each element exactly once.
    """
    tensors = {}
    for hf in hf_tensors(architecture, head):
        if stored is not None and hf.name not in stored:
            continue
        found = pieces.get(hf.name, [])
        if (fault := chunks_fault(hf.view, [place for place, _ in found])) is not None:
            raise CheckpointError(f"{folder}: {hf.name} is not stored exactly once: {fault}")
        tensors[hf.name] = SourceTensor(hf=hf, dtype=dtypes[hf.name], pieces=tuple(found))

    return tensors


# ---- description


def describe(source: ModelSource) -> dict[str, Any]:
    """Return the description of a model as plain values.

    `model_class` is that of config.json; empty if it names none. `num_parameters` counts stored tensors, so a
    tied output layer is not counted twice. `architecture` has the fields that determine the model's shapes
    and computation.

    Raises:
        CheckpointError: Its configuration or its tokenizer's is damaged.
    """
    (name, *_) = _read_json(source.companions / CONFIG_FILE).get("architectures") or [""]
    return dict(
        folder=str(source.folder),
        format=source.kind,
        layout=source.layout,
        step=source.step,
        family=source.architecture.model_type,
        model_class=name,
        head=_HEADS[source.head],
        dtype=str(source.dtype).removeprefix("torch."),
        num_parameters=source.num_parameters,
        nbytes=source.nbytes,
        tokenizer=_tokenizer(source.companions),
        architecture=architecture_fields(source.architecture),
        tensors=tuple(
            {
                "name": name,
                "shape": tensor.hf.shape,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
            }
            for name, tensor in source.tensors.items()
        ),
    )


def architecture_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of an architecture as plain values. Programs read the parts of pairs by name."""
    fields = asdict(architecture)
    experts = fields["experts"]
    if experts is not None and experts["groups"] is not None:
        experts["groups"] = dict(zip(("num_groups", "num_selected"), experts["groups"], strict=True))
    if fields["local_rope"] is not None:
        fields["local_rope"] = dict(zip(("theta", "scaling"), fields["local_rope"], strict=True))
    return fields


def _tokenizer(companions: Path) -> str:
    """Describe the tokenizer from its files, without loading it."""
    files = [name for name in _TOKENIZER_FILES if (companions / name).is_file()]
    if not files:
        return "none"
    config = _read_json(companions / TOKENIZER_CONFIG) if (companions / TOKENIZER_CONFIG).is_file() else {}
    kind = config.get("tokenizer_class") or "a tokenizer"

    return (
        f"{kind} ({', '.join(files)}), {'with' if has_chat_template(companions) else 'without'} a chat "
        f"template"
    )


def _read_json(path: Path) -> dict:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
