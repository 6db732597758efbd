"""Qwen2.5-VL and Qwen3-VL: the layers of Qwen 2.5 and 3 with a vision tower and positions in three axes.

Qwen3-VL is dense or has the experts of Qwen 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.machine.errors import counted
from megarl.models.architecture import Architecture, Experts
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.experts import SGLANG_DIFFERENCES, check_router_gradient, transposed_fused
from megarl.models.family import Family
from megarl.models.mapping import TOWER, Cut, MappingRow, StagePlacement
from megarl.models.qwen import EXPERTS_OF_EXAMPLE, SPARSE_ROWS, read_experts, read_sections
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk, with_prefix
from megarl.models.vision import Vision


def _position_axes(sections: tuple[int, ...], num_frequencies: int, is_interleaved: bool) -> tuple[int, ...]:
    """Return the position axis of each rotary frequency, given how many frequencies each axis has."""
    if not is_interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))

    # Time, row, column, time, row, column, ...; time also has what the others leave.
    axes = [0] * num_frequencies
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], num_frequencies), 3):
            axes[place] = axis
    return tuple(axes)


def _read_qwen3_vl(
    reader: ConfigReader, read_experts: Callable[[ConfigReader, int], Experts] | None = None
) -> Architecture:
    return _read(
        reader,
        partial(read_trunk, qk_norm=True, read_experts=read_experts),
        _read_deepstack_tower,
        default_sections=(24, 20, 20),
        is_interleaved=True,
    )


def _read_qwen3_vl_moe(reader: ConfigReader) -> Architecture:
    architecture = _read_qwen3_vl(reader, _read_experts)

    # Folders have the matrices of experts transposed or not, and only the shapes tell which.
    size = architecture.sizes_of(Experts).intermediate_size
    if not reader.problems and architecture.hidden_size in (size, 2 * size):
        reader.problems.append(
            f"text_config: field 'moe_intermediate_size' is {size}, but must be neither the 'hidden_size' "
            f"{architecture.hidden_size} nor half of it: the shapes of experts would not show whether their "
            "matrices are transposed"
        )
    return architecture


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    experts = read_experts(reader, num_hidden_layers)
    reader.require(
        "norm_topk_prob", True, "transformers does not read it and normalizes the weights; use true"
    )
    if not experts.norm_topk_prob:
        check_router_gradient(reader, experts.num_experts_per_tok, norm_topk_prob=True)
    return replace(experts, norm_topk_prob=True)


def _read(
    reader: ConfigReader,
    read_text: Callable[[ConfigReader], Architecture],
    read_tower: Callable[[ConfigReader], dict[str, Any]],
    default_sections: tuple[int, ...],
    *,
    is_interleaved: bool,
) -> Architecture:
    """Read a configuration with nested objects for the language model and the tower.

    The first folders of Qwen2.5-VL have the fields of the language model at the top level.
    """
    model_type = reader.take("model_type")
    # They concern videos, which megarl does not train on, or name tokens that only the chat template writes.
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        reader.count(name, 0)
    is_tied = reader.flag("tie_word_embeddings")

    is_flat = "text_config" not in reader.fields
    text_fields = {
        **(reader.fields if is_flat else reader.object("text_config")),
        "tie_word_embeddings": is_tied,
    }
    sections = read_sections(text_fields, default_sections, reader, is_interleaved=is_interleaved)
    text = reader.nested("text_config", text_fields)
    if is_flat:
        text.seen |= reader.seen
    architecture = read_text(text)

    tower = reader.nested("vision_config")
    vision = Vision(
        tower_type=f"{model_type}_vision",
        image_token_id=reader.number("image_token_id", int),
        position_axes=_position_axes(sections, architecture.rotary_dim // 2, is_interleaved),
        **_read_tower(tower),
        **read_tower(tower),
    )

    if is_flat:
        # The fields of both readers are side by side, so neither may report those of the other.
        text.seen |= {"image_token_id", "vision_config"}
        text.check_neutral()
        text.check_left_over()
        reader.problems += text.problems
        reader.seen |= set(reader.fields)
    else:
        reader.check_nested("text_config", text)

    reader.check_nested("vision_config", tower)

    _check(reader, architecture, vision, sections)
    return replace(architecture, model_type=model_type, vision=vision)


def _read_tower(tower: ConfigReader) -> dict[str, Any]:
    """Read what the towers of both families have."""
    for name in ("tokens_per_second", "model_type", "rope_parameters"):
        tower.take(name)
    in_channels = tower.number("in_channels", int, OF_CLASS)
    patch_size = tower.number("patch_size", int, OF_CLASS)

    # Older names, which transformers does not read.
    for name, used in (("in_chans", in_channels), ("spatial_patch_size", patch_size)):
        tower.require(name, used, f"transformers does not read it and uses {used}")

    hidden_size = tower.number("hidden_size", int)
    num_heads = tower.number("num_heads", int)
    if hidden_size % (4 * num_heads):
        tower.conflict(
            f"'hidden_size' {hidden_size} is not a multiple of four times 'num_heads' {num_heads}, which the "
            "rotary embedding of rows and columns needs",
            "hidden_size",
            "num_heads",
        )

    return {
        "depth": tower.number("depth", int),
        "hidden_size": hidden_size,
        "intermediate_size": tower.number("intermediate_size", int),
        "num_heads": num_heads,
        "out_hidden_size": tower.number("out_hidden_size", int),
        "in_channels": in_channels,
        "patch_size": patch_size,
        "temporal_patch_size": tower.number("temporal_patch_size", int, OF_CLASS),
        "spatial_merge_size": tower.number("spatial_merge_size", int, OF_CLASS),
    }


def _read_windowed_tower(tower: ConfigReader) -> dict[str, Any]:
    return {
        "window_size": tower.number("window_size", int, OF_CLASS),
        "full_attention_blocks": _blocks(tower, "fullatt_block_indexes"),
    }


def _read_deepstack_tower(tower: ConfigReader) -> dict[str, Any]:
    tower.require("hidden_act", "gelu_pytorch_tanh", 'only "gelu_pytorch_tanh" is supported')
    return {
        "num_position_embeddings": tower.number("num_position_embeddings", int, OF_CLASS),
        "deepstack_blocks": _blocks(tower, "deepstack_visual_indexes"),
    }


def _blocks(tower: ConfigReader, name: str) -> tuple[int, ...]:
    """Read a list of distinct numbers of blocks, in ascending order."""
    blocks = tower.value(name)
    depth = tower.fields.get("depth")
    last = depth if isinstance(depth, int) else 0
    if (
        not isinstance(blocks, list)
        or not all(isinstance(block, int) and 0 <= block < last for block in blocks)
        or sorted(set(blocks)) != blocks
    ):
        tower.conflict(
            f"field {name!r} is {blocks!r}; it must list distinct blocks from 0 to {last - 1} in ascending "
            "order",
            "depth",
        )
        return ()
    return tuple(blocks)


def _check(
    reader: ConfigReader, architecture: Architecture, vision: Vision, sections: tuple[int, ...]
) -> None:
    """Refuse objects that do not fit together."""
    if reader.problems:
        return

    num_positions = vision.num_position_embeddings
    problems = (
        (
            vision.out_hidden_size != architecture.hidden_size,
            f"vision_config: field 'out_hidden_size' is {vision.out_hidden_size}, but must be the "
            f"'hidden_size' {architecture.hidden_size} of the language model",
        ),
        (
            sum(sections) != architecture.rotary_dim // 2,
            f"field 'mrope_section' is {list(sections)}, whose sum must be half of the head's size "
            f"{architecture.rotary_dim}",
        ),
        # The features of the last layer would be added to tokens that it has dropped.
        (
            len(vision.deepstack_blocks) >= architecture.num_hidden_layers,
            f"vision_config: field 'deepstack_visual_indexes' lists {len(vision.deepstack_blocks)} blocks "
            f"for {counted(architecture.num_hidden_layers, 'layer')}; megarl supports fewer blocks than "
            "layers",
        ),
        (
            int(num_positions**0.5) ** 2 != num_positions,
            f"vision_config: field 'num_position_embeddings' is {num_positions}, but must be a square number",
        ),
        (
            vision.image_token_id >= architecture.vocab_size,
            f"field 'image_token_id' is {vision.image_token_id}, outside the vocabulary of "
            f"{architecture.vocab_size}",
        ),
    )
    reader.problems += [problem for is_wrong, problem in problems if is_wrong]


def _tower_rows(stored: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[MappingRow, ...]:
    """Return the rows of parameters that every tensor-parallel rank of the first stage holds.

    Args:
        stored: The prefix of the tensors in a folder.
        shapes: The shapes of the parameters by name.
    """
    return tuple(
        MappingRow(
            megatron=TOWER + name,
            place=StagePlacement.embedding,
            cut=Cut.replicated,
            tensors=((stored + name, " ".join(map(str, shape))),),
        )
        for name, shape in shapes.items()
    )


def _layer(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _patch_embedding(vision: Vision) -> tuple[int, ...]:
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    return (vision.hidden_size, *patch)


def _in_blocks(vision: Vision, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all blocks, given those of one."""
    return {
        f"blocks.{block}.{name}": shape for block in range(vision.depth) for name, shape in shapes.items()
    }


def _qwen2_5_tower(vision: Vision) -> tuple[MappingRow, ...]:
    width = vision.hidden_size
    merged = width * vision.patches_per_token
    block = {
        "norm1.weight": (width,),
        "norm2.weight": (width,),
        **_layer("attn.qkv", width, 3 * width),
        **_layer("attn.proj", width, width),
        **_layer("mlp.gate_proj", width, vision.intermediate_size),
        **_layer("mlp.up_proj", width, vision.intermediate_size),
        **_layer("mlp.down_proj", vision.intermediate_size, width),
    }
    shapes = {
        "patch_embed.proj.weight": _patch_embedding(vision),
        **_in_blocks(vision, block),
        "merger.ln_q.weight": (width,),
        **_layer("merger.mlp.0", merged, merged),
        **_layer("merger.mlp.2", merged, vision.out_hidden_size),
    }
    return _tower_rows("visual.", shapes)


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a norm with a bias."""
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _merger(name: str, vision: Vision, norm_size: int) -> dict[str, tuple[int, ...]]:
    merged = vision.hidden_size * vision.patches_per_token
    return {
        **_norm(f"{name}.norm", norm_size),
        **_layer(f"{name}.linear_fc1", merged, merged),
        **_layer(f"{name}.linear_fc2", merged, vision.out_hidden_size),
    }


def _qwen3_tower(vision: Vision) -> tuple[MappingRow, ...]:
    width = vision.hidden_size
    block = {
        **_norm("norm1", width),
        **_norm("norm2", width),
        **_layer("attn.qkv", width, 3 * width),
        **_layer("attn.proj", width, width),
        **_layer("mlp.linear_fc1", width, vision.intermediate_size),
        **_layer("mlp.linear_fc2", vision.intermediate_size, width),
    }
    shapes = {
        "patch_embed.proj.weight": _patch_embedding(vision),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (vision.num_position_embeddings, width),
        **_in_blocks(vision, block),
        **_merger("merger", vision, width),
    }
    # The mergers of deepstack normalize after patches were merged.
    for number in range(len(vision.deepstack_blocks)):
        shapes |= _merger(f"deepstack_merger_list.{number}", vision, width * vision.patches_per_token)
    return _tower_rows("model.visual.", shapes)


_TOWER_OF_EXAMPLE = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_TOKENS_OF_EXAMPLE = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}


def _example(model_type: str, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    trunk = {
        name: value for name, value in EXAMPLE.items() if name not in ("tie_word_embeddings", "rope_theta")
    }
    return {
        "tie_word_embeddings": False,
        **_TOKENS_OF_EXAMPLE,
        "text_config": trunk | {"model_type": f"{model_type}_text"} | text,
        "vision_config": _TOWER_OF_EXAMPLE | {"model_type": f"{model_type}_vision"} | tower,
    }


_TEXT_OF_EXAMPLE = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
_DEEPSTACK_OF_EXAMPLE = {
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "hidden_act": "gelu_pytorch_tanh",
}

# SGLang's class adds features of images to the outputs of as many layers.
_DEEPSTACK_OF_SGLANG = 3

_LM_CLASS = "ForConditionalGeneration"
_LIMITS = (
    "no videos; packed rows only; no agents and reward models",
    "SGLang on GPUs only, where images have not run",
)
QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    class_prefix="Qwen2_5_VL",
    lm_class=_LM_CLASS,
    read=partial(
        _read,
        read_text=partial(read_trunk, qkv_bias=True),
        read_tower=_read_windowed_tower,
        default_sections=(16, 24, 24),
        is_interleaved=False,
    ),
    rows=TRUNK_ROWS,
    tower_rows=_qwen2_5_tower,
    module_prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    example_fields=_example(
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        {"window_size": 8, "fullatt_block_indexes": [1], "hidden_act": "silu"},
    ),
    models="Qwen2.5-VL",
    limits=_LIMITS,
)
QWEN3_VL = Family(
    model_type="qwen3_vl",
    class_prefix="Qwen3VL",
    lm_class=_LM_CLASS,
    read=_read_qwen3_vl,
    rows=with_prefix(TRUNK_ROWS, "model.", "model.language_model."),
    tower_rows=_qwen3_tower,
    example_fields=_example("qwen3_vl", _TEXT_OF_EXAMPLE, _DEEPSTACK_OF_EXAMPLE),
    models="Qwen3-VL, dense",
    limits=(*_LIMITS, "the first pipeline stage must have the layers that features of images are added to"),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    class_prefix="Qwen3VLMoe",
    read=_read_qwen3_vl_moe,
    rows=with_prefix((*TRUNK_ROWS, *transposed_fused(SPARSE_ROWS)), "model.", "model.language_model."),
    # It has as many deepstack blocks as SGLang's class, all on the first of two pipeline stages.
    example_fields=_example(
        "qwen3_vl_moe",
        _TEXT_OF_EXAMPLE
        | EXPERTS_OF_EXAMPLE
        | {
            "num_hidden_layers": 8,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "moe_intermediate_size": 24,
        },
        _DEEPSTACK_OF_EXAMPLE | {"deepstack_visual_indexes": [0, 1, 2]},
    ),
    sglang_differences={
        **SGLANG_DIFFERENCES,
        f"features of images added to a number of layers other than {_DEEPSTACK_OF_SGLANG}": (
            lambda architecture: architecture.num_image_layers != _DEEPSTACK_OF_SGLANG
        ),
    },
    models="Qwen3-VL-30B-A3B and 235B-A22B",
    limits=(*QWEN3_VL.limits, "no engine on a CPU"),
)
