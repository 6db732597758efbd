"""Reads Megatron's classic checkpoint as a `ModelSource`, without running its pickles.

The checkpoint has one file per tensor- and pipeline-parallel rank:

mp_rank_01/model_optim_rng.pt          tensor-parallel rank 1
mp_rank_01_002/model_optim_rng.pt      tensor-parallel rank 1 of pipeline stage 2
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.convert.source import ModelSource, StoredPiece, checked_tensors
from megarl.checkpoints.torch_file import (
    FileTensor,
    Inert,
    check_stored,
    mapped,
    read_outline_with_objects,
    stored_tensor,
)
from megarl.machine.errors import CheckpointError, counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.layers import kinds_of, routes_tokens
from megarl.models.tensor_table import OUTPUT_LAYER, Head, Weight
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import ShardLayout, held_weights, pieces, shard_shapes

# Transformer Engine has the norms of a dense layer in the linear layers that follow.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# The second name is used if the distributed optimizer is in separate files.
_FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_ANY_RANK_FOLDER = "mp_rank_*"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EMBEDDING = "embedding.word_embeddings.weight"
_PREFIXES = ("", "model.", "module.")
_NUM_THREADS = 2


def is_classic(folder: Path) -> bool:
    return any(path.is_dir() for path in folder.glob(_ANY_RANK_FOLDER))


def open_classic(
    folder: Path, companions: Path, trust_remote_code: bool = False, check_contents: bool = True
) -> ModelSource:
    """Open a classic checkpoint. No code in the files is run.

    Args:
        check_contents: Compare the weights with the checksums that torch.save computed, and the copies of
            weights that several ranks store.

    Raises:
        CheckpointError: Names the file and tensor.
        ConfigError: The configuration in `companions` is unusable.
    """
    architecture = read_architecture(str(companions), trust_remote_code)
    if routes_tokens(architecture):
        raise CheckpointError(
            f"{folder}: classic Megatron checkpoints of MoE models are not supported; save it as torch_dist"
        )

    stages = _stages(folder, _rank_files(folder), architecture)
    # If there are virtual stages, several of the entries are in the same file.
    files = list({stage.file.path: stage.file for stage in stages}.values())
    head = _head(stages)
    found: dict[str, list[StoredPiece]] = {}
    dtypes: dict[str, torch.dtype] = {}

    # Collect the pieces of each Hugging Face tensor from all ranks.
    for stage in stages:
        _check_names(stage, architecture, head)
        for weight in held_weights(architecture, stage.layout, head):
            for name, dtype, piece in _stored_pieces(stage, weight):
                if dtypes.setdefault(name, dtype) != dtype:
                    raise CheckpointError(
                        f"{stage.file.path}: {name} is {dtype} here and {dtypes[name]} in another rank's file"
                    )
                found.setdefault(name, []).append(piece)

    tensors = checked_tensors(folder, architecture, head, dtypes, found)
    # These checks read every byte, so they follow those that only need the outlines.
    if check_contents:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="crc") as threads:
            list(threads.map(RankFile.check, files))
        _check_copies(stages, architecture, head)

    num_chunks = len(stages[0].file.chunks)
    sizes = (stages[0].layout.tensor_parallel_size, len(files) // stages[0].layout.tensor_parallel_size)
    return ModelSource(
        folder=folder,
        kind="Megatron classic (mp_rank)",
        layout=f"TP {sizes[0]} x PP {sizes[1]}" + (f" x VPP {num_chunks}" if num_chunks > 1 else ""),
        companions=companions,
        architecture=architecture,
        head=head,
        tensors=tensors,
        step=files[0].iteration,
    )


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """A virtual pipeline stage on one tensor-parallel rank.

    `names` maps names in the tables, with global layer numbers, to names in the file.
    """

    file: RankFile
    chunk: int
    layout: ShardLayout
    names: Mapping[str, str]

    def open(self, weight: Weight) -> torch.Tensor:
        return self.file.open(self.chunk, self.names[weight.megatron_name])


def _rank_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """Return (tensor-parallel rank, pipeline stage) -> file, after checking that none is missing."""
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(_ANY_RANK_FOLDER)):
        match = _RANK_FOLDER.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: not the folder of a rank such as mp_rank_00 or mp_rank_00_001; checkpoints of MoE "
                f"models are not supported"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in paths:
            raise CheckpointError(
                f"{path}: same rank as {paths[rank].parent}: the files are from different checkpoints"
            )
        paths[rank] = next(
            (path / name for name in _FILE_NAMES if (path / name).is_file()), path / _FILE_NAMES[0]
        )

    # The highest ranks found determine the sizes; every combination below them must have a file.
    sizes = [max(rank[axis] for rank in paths) + 1 for axis in (0, 1)]
    wanted = {(tensor, stage): folder for tensor in range(sizes[0]) for stage in range(sizes[1])}
    has_stages = any(path.parent.name.count("_") > 2 for path in paths.values())

    for tensor, stage in wanted:
        name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if has_stages else "")
        path = paths.get((tensor, stage), folder / name / _FILE_NAMES[0])
        if not path.is_file():
            raise CheckpointError(
                f"{path}: the file is missing; the checkpoint has "
                f"{counted(sizes[0], 'tensor-parallel rank')} x {counted(sizes[1], 'stage')}"
            )

    files = {rank: read_rank_file(path) for rank, path in sorted(paths.items())}
    _check_sizes(folder, files, sizes)
    return files


def _check_sizes(folder: Path, files: Mapping[tuple[int, int], RankFile], sizes: Sequence[int]) -> None:
    """Check that the files belong to the same save and are complete, using the sizes that they record."""
    first = next(iter(files.values()))
    written = [
        first.arguments.get(name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    ]

    # Compare the folders that exist with the parallel sizes that the first file records.
    for said, size in zip(written, sizes, strict=True):
        if said is not None and said != size:
            tensor, stage = (
                value if isinstance(value, int) else size for value, size in zip(written, sizes, strict=True)
            )
            raise CheckpointError(
                f"{folder}: has the files of {counted(sizes[0], 'tensor-parallel rank')} x "
                f"{counted(sizes[1], 'stage')}, but {first.path.parent.name} records {tensor} x {stage}: "
                "files are missing, or are from different checkpoints"
            )

    told = {
        rank: number for rank, file in files.items() if isinstance(number := file.arguments.get("rank"), int)
    }
    # All files must be from the same iteration and have the same number of virtual stages.
    for (tensor, stage), file in files.items():
        if (file.iteration, len(file.chunks)) != (first.iteration, len(first.chunks)):
            raise CheckpointError(
                f"{file.path}: has iteration {file.iteration} and "
                f"{counted(len(file.chunks), 'virtual stage')}, but {first.path} has {first.iteration} and "
                f"{len(first.chunks)}: the files are from different checkpoints"
            )
        # A converter writes all files with the rank of its one process. In Megatron's own ranks, tensor
        # parallelism varies fastest.
        if len(set(told.values())) == len(files) and (written_by := told[tensor, stage]) % sizes[0] != tensor:
            raise CheckpointError(
                f"{file.path}: was written by rank {written_by}, which is tensor-parallel rank "
                f"{written_by % sizes[0]}: files were swapped"
            )


def _stages(
    folder: Path, files: Mapping[tuple[int, int], RankFile], architecture: Architecture
) -> list[_Stage]:
    """Return the stages in the order of the forward pass, with the tensor-parallel rank varying fastest.

    Layers are counted, so stages may have different numbers of them.
    """
    _check_arguments(next(iter(files.values())), architecture)
    num_ranks, num_stages = (max(rank[axis] for rank in files) + 1 for axis in (0, 1))
    num_chunks = len(files[0, 0].chunks)

    if (
        prefix := next((prefix for prefix in _PREFIXES if prefix + _EMBEDDING in files[0, 0].chunks[0]), None)
    ) is None:
        raise CheckpointError(f"{files[0, 0].path}: has no {_EMBEDDING}, which the first stage contains")

    embedding = files[0, 0].chunks[0][prefix + _EMBEDDING].shape
    if len(embedding) != 2:
        raise CheckpointError(f"{files[0, 0].path}: {_EMBEDDING} has shape {embedding}")

    stages = []
    first_layer = 0

    # Virtual stages interleave: the layers pass through all pipeline stages once per chunk.
    for chunk, stage in ((chunk, stage) for chunk in range(num_chunks) for stage in range(num_stages)):
        count = 0
        for rank in range(num_ranks):
            file = files[rank, stage]
            count = _num_layers(file, chunk, prefix)
            layout = ShardLayout(
                tensor_parallel_size=num_ranks,
                tensor_parallel_rank=rank,
                layers=tuple(range(first_layer, first_layer + count)),
                holds_embedding=(chunk, stage) == (0, 0),
                holds_output=(chunk, stage) == (num_chunks - 1, num_stages - 1),
                padded_vocab_size=embedding[0] * num_ranks,
            )
            stages.append(
                _Stage(file=file, chunk=chunk, layout=layout, names=_names(file, chunk, prefix, first_layer))
            )
        first_layer += count

    # The layers are numbered within each stage, so a missing stage is only noticed in their sum.
    if first_layer != architecture.num_hidden_layers:
        raise CheckpointError(
            f"{folder}: has {counted(first_layer, 'layer')} in {counted(num_stages * num_chunks, 'stage')}, "
            f"but config.json specifies {architecture.num_hidden_layers}: files are missing, or this is "
            "another model"
        )

    return stages


def _num_layers(file: RankFile, chunk: int, prefix: str) -> int:
    """Return the number of layers of a stage, which are numbered from 0 in its file."""
    numbers = {
        int(match[1]) for name in file.chunks[chunk] if (match := _LAYER.fullmatch(name.removeprefix(prefix)))
    }
    if numbers != set(range(len(numbers))):
        raise CheckpointError(
            f"{file.path}: its layers have the numbers {sorted(numbers)}, not 0 to {len(numbers) - 1}"
        )

    return len(numbers)


def _names(file: RankFile, chunk: int, prefix: str, first_layer: int) -> dict[str, str]:
    """Map names in the tables to names in the file. Norms may be named with or without Transformer Engine."""
    names: dict[str, str] = {}

    for name in file.chunks[chunk]:
        known = name.removeprefix(prefix)
        if match := _LAYER.fullmatch(known):
            known = f"decoder.layers.{first_layer + int(match[1])}.{_NORMS.get(match[2], match[2])}"
        if known in names:
            raise CheckpointError(f"{file.path}: {names[known]} and {name} are the same parameter")
        names[known] = name

    return names


def _head(stages: Sequence[_Stage]) -> Head:
    last = stages[-1]
    # A value head has a single row.
    stored = last.file.chunks[last.chunk].get(last.names.get(OUTPUT_LAYER, ""))
    return "value" if stored is not None and stored.shape[0] == 1 else "lm"


def _check_names(stage: _Stage, architecture: Architecture, head: Head) -> None:
    """Check that a stage has exactly the parameters that belong to it, with the right shapes."""
    try:
        shapes = shard_shapes(architecture, stage.layout, head)
    except ValueError as error:
        raise CheckpointError(f"{stage.file.path}: {error}: config.json is from another model") from error

    # Compare each parameter with the shape that config.json gives it in this stage.
    records = stage.file.chunks[stage.chunk]
    for name, shape in shapes.items():
        if name not in stage.names:
            raise CheckpointError(
                f"{stage.file.path}: {name} is missing; config.json requires {shape} in this file"
            )
        found = records[stage.names[name]].shape
        if found != shape:
            raise CheckpointError(
                f"{stage.file.path}: {name} has shape {found}, config.json requires {shape} in this file"
            )

    if extra := stage.names.keys() - shapes.keys():
        raise CheckpointError(
            f"{stage.file.path}: {min(extra)} is not a tensor of this architecture ({len(extra)} are not)"
        )


def _stored_pieces(stage: _Stage, weight: Weight) -> Iterator[tuple[str, torch.dtype, StoredPiece]]:
    dtype = stage.file.chunks[stage.chunk][stage.names[weight.megatron_name]].dtype
    for part in pieces(weight, stage.layout):
        if part.is_source:
            yield part.hf_name, dtype, (part.hf, partial(_open, stage, weight, part))


def _open(stage: _Stage, weight: Weight, piece: Piece) -> torch.Tensor:
    return piece.in_hf_order(stage.open(weight).view(piece.shard_view)[piece.shard.index])


def _check_copies(stages: Sequence[_Stage], architecture: Architecture, head: Head) -> None:
    """Check that weights stored by several ranks are equal.

    These are norms, a value head, and the tied embedding on the last stage.
    """
    first: dict[tuple[str, tuple[int, ...]], tuple[_Stage, Weight, torch.Tensor]] = {}
    for stage in stages:
        for weight in held_weights(architecture, stage.layout, head):
            parts = pieces(weight, stage.layout)
            if len(parts) != 1:  # several tensors in one, which are sharded, or only padding
                continue
            # The first rank that has a piece determines what all later ones must equal.
            elements = _open(stage, weight, parts[0])
            other, held, expected = first.setdefault(
                (parts[0].hf_name, parts[0].hf.starts), (stage, weight, elements)
            )
            if not torch.equal(expected, elements):
                raise CheckpointError(
                    f"{stage.file.path}: {weight.megatron_name} differs from {held.megatron_name} in "
                    f"{other.file.path}, of which it must "
                    "be a copy: the files are from different checkpoints, or damaged"
                )


def _expected_arguments(architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's arguments and their expected values. Arguments that a file lacks are not compared."""
    of_kinds: dict[str, Any] = {"multi_latent_attention": False}
    for arguments in (kind.megatron_arguments for kind in kinds_of(architecture)):
        of_kinds |= {} if arguments is None else arguments(architecture)

    return {
        "num_layers": architecture.num_hidden_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "num_attention_heads": architecture.num_attention_heads,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm or of_kinds["multi_latent_attention"],
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": architecture.rms_norm_eps,
        "rotary_base": architecture.rope_theta,
        "rotary_percent": architecture.partial_rotary_factor,
        "add_bias_linear": False,
        "num_experts": None,
        **of_kinds,
    }


def _check_arguments(file: RankFile, architecture: Architecture) -> None:
    expected = _expected_arguments(architecture)
    groups = file.arguments.get("num_query_groups")

    # `num_query_groups` applies only if `group_query_attention` is set or was not recorded.
    if file.arguments.get("group_query_attention") is True or (
        groups is not None and "group_query_attention" not in file.arguments
    ):
        expected["num_query_groups"] = architecture.num_key_value_heads

    faults = [
        f"{name} is {file.arguments[name]!r}, but config.json requires {value!r}"
        for name, value in expected.items()
        if name in file.arguments and file.arguments[name] != value
    ]
    if faults:
        raise CheckpointError(
            f"{file.path}: its args are from another model than config.json: {'; '.join(faults)}"
        )


# ---- the file of a rank

# State of Transformer Engine layers: scales for FP8 training, which are not weights.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """The contents of a rank's file.

    Attributes:
        chunks: For each virtual stage, name -> tensor, with the stage's own layer numbers.
        arguments: The arguments of the program that wrote the file; empty if they were not saved.
    """

    path: Path
    chunks: tuple[Mapping[str, FileTensor], ...]
    arguments: Mapping[str, Any]
    iteration: int | None

    def open(self, chunk: int, name: str) -> torch.Tensor:
        """Return the tensor, memory-mapped from the file."""
        stored = self.chunks[chunk][name]
        return mapped(self.path, stored.position, stored.shape, stored.dtype)

    def check(self) -> None:
        """Compare the tensors with the CRC-32 checksums that torch.save computed.

        Raises:
            CheckpointError: Names a tensor whose bytes have changed.
        """
        for tensors in self.chunks:
            check_stored(self.path, str(self.path), tensors)


def read_rank_file(path: Path) -> RankFile:
    """Read a rank's file. Raises CheckpointError for any other file, and for code in its pickle."""
    content = read_outline_with_objects(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: contains no dictionary, so it is not a Megatron checkpoint")
    arguments = content.get("args")
    iteration = content.get("iteration")

    return RankFile(
        path=path,
        chunks=tuple(_parameters(path, state) for state in _model_states(path, content)),
        arguments=vars(arguments) if isinstance(arguments, Inert | Namespace) else {},
        iteration=iteration if isinstance(iteration, int) else None,
    )


def _model_states(path: Path, content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the model's state, or one state for each virtual pipeline stage."""
    numbered = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
    names = ["model"] if "model" in content else numbered

    if not names or (numbered and numbered != [f"model{number}" for number in range(len(numbered))]):
        keys = ", ".join(sorted(map(str, content))) or "nothing"
        raise CheckpointError(
            f"{path}: has no 'model', and no 'model0', 'model1', ... without a gap; it has {keys}"
        )

    states = [content[name] for name in names]
    for name, state in zip(names, states, strict=True):
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {name!r} is not a dictionary of tensors")
        if "language_model" in state:
            raise CheckpointError(
                f"{path}: was written by Megatron's legacy models, before Megatron-Core ('language_model'); "
                f"convert it with Megatron's own tools"
            )

    return states


def _parameters(path: Path, state: dict[Any, Any]) -> dict[str, FileTensor]:
    parameters = {}
    for name, value in state.items():
        if str(name).endswith(_EXTRA_STATE):
            continue
        if (stored := stored_tensor(value)) is None:
            raise CheckpointError(f"{path}: {name} is not a contiguous tensor of a plain dtype")
        parameters[str(name)] = stored

    return parameters
