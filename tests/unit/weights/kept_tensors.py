"""Tiny Hugging Face folders with tensors that are kept without being trained, in several files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.unit.weights.models import EXPERT_FFN, EXPERTS, HIDDEN, VOCAB, cast, random_model, stored_state

NUM_LAYERS = 2
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]

_EXPERTS = {
    f"mlp.experts.{expert}.{name}_proj.weight": shape
    for expert in range(EXPERTS)
    for name, shape in (
        ("gate", (EXPERT_FFN, HIDDEN)),
        ("up", (EXPERT_FFN, HIDDEN)),
        ("down", (HIDDEN, EXPERT_FFN)),
    )
}
# DeepSeek-V3 stores copies of its embedding and its output layer.
_AFTER_LAST = {
    "embed_tokens.weight": (VOCAB, HIDDEN),
    "enorm.weight": (HIDDEN,),
    "hnorm.weight": (HIDDEN,),
    "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "shared_head.norm.weight": (HIDDEN,),
    "shared_head.head.weight": (VOCAB, HIDDEN),
    "mlp.gate.e_score_correction_bias": (EXPERTS,),
    **_EXPERTS,
}
_OF_QWEN = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.norm.weight": (HIDDEN,),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    **{f"mtp.layers.0.{name}": shape for name, shape in _EXPERTS.items()},
}
_TOWER = {
    "model.visual.patch_embed.proj.weight": (16, 3, 2, 2, 2),
    "model.visual.blocks.0.attn.qkv.bias": (48,),
    "model.visual.merger.linear_fc2.weight": (HIDDEN, 64),
}
SHAPES = {
    "deepseek_v3": {f"model.layers.{NUM_LAYERS}.{name}": shape for name, shape in _AFTER_LAST.items()},
    "glm4_moe": {f"model.layers.{NUM_LAYERS}.{name}": shape for name, shape in _AFTER_LAST.items()},
    "glm_moe_dsa": {f"model.layers.{NUM_LAYERS}.{name}": shape for name, shape in _AFTER_LAST.items()},
    "qwen3_next": _OF_QWEN,
    "qwen3_5_moe": _OF_QWEN | _TOWER,
}


def write_original(folder: Path, family: str, *, seed: int = 0) -> Tensors:
    """Write a folder in bfloat16 with these tensors, and return all that it has.

    Selection biases are float32. The tensors are in all three files, with others.
    """
    model = cast(random_model(family, seed=seed, num_layers=NUM_LAYERS), torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.get_text_config().dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    if not family.startswith("qwen"):  # whose layers are not numbered like the others
        set_field(folder, 1)

    generator = torch.Generator().manual_seed(seed + 100)
    tensors = stored_state(model)
    for name, shape in SHAPES[family].items():
        random = torch.randn(shape, generator=generator)
        tensors[name] = random if name.endswith("bias") else random.bfloat16()

    names = sorted(tensors)
    write_files(folder, [{name: tensors[name] for name in names[number::3]} for number in range(3)])
    return tensors


def set_field(folder: Path, num_layers: int) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": num_layers}))


def write_files(folder: Path, files: list[Tensors]) -> None:
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def indexed(folder: Path) -> Tensors:
    """Return the tensors that the index of a folder lists, each from its file."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = {}
    for file in set(weight_map.values()):
        with safe_open(folder / file, framework="pt") as opened:
            names = {name for name, of in weight_map.items() if of == file}
            assert set(opened.keys()) == names
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def same_bits(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype
        and torch.equal(value.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name, value in left.items()
    )
