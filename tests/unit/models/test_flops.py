"""Floating-point operations of training, against torch's counter on a Hugging Face model, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megarl.models.architecture import LoRA
from megarl.models.counts import peak_tflops, tower_flops, training_flops
from megarl.models.families import read_architecture
from tests.families import example_architecture, example_config
from tests.unit.config.folders import model_folder

# A small model with heads of 12, two of them for keys and values.
LAYERS = 4
WIDTH = 48
VOCABULARY = 101


EXPERTS = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize(("prompt", "changes"), [(1, {}), (5, EXPERTS)], ids=["dense", "experts"])
def test_it_is_what_a_model_of_hugging_face_does(
    prompt: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The model's own attention computes all pairs of a row, and its output layer all positions: correct both."""
    folder = model_folder(tmp_path / "model", **changes)
    response = 8
    length = prompt + response
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", experts_implementation="eager"
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()

    # Pairs removed by the causal mask, in 2 products.
    masked = 2 * 2 * LAYERS * WIDTH * (length * length - length * (length + 1) // 2)
    unread = 2 * WIDTH * VOCABULARY * (length - response)
    expected = counter.get_total_flops() - 3 * (masked + unread)
    assert training_flops(read_architecture(str(folder)), [(prompt, response)]) == expected


def test_frozen_matrices_have_one_product_in_the_backward_pass(tmp_path: Path) -> None:
    """By hand: two products of frozen matrices, three of adapters and of attention."""
    folder = str(model_folder(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2))
    architecture = replace(read_architecture(folder), lora=LoRA(rank=8, alpha=8))
    prompt = 5
    response = 8
    length = prompt + response
    feed_forward = 96
    key_value = WIDTH // 2
    shapes = [(WIDTH, WIDTH)] * 2 + [(key_value, WIDTH)] * 2 + [(feed_forward, WIDTH)] * 2
    shapes.append((WIDTH, feed_forward))
    frozen = length * LAYERS * sum(rows * columns for rows, columns in shapes) + response * WIDTH * VOCABULARY
    adapters = length * LAYERS * 8 * sum(rows + columns for rows, columns in shapes)
    pairs = LAYERS * 2 * WIDTH * length * (length + 1) // 2
    expected = 2 * (2 * frozen + 3 * (adapters + pairs))
    assert training_flops(architecture, [(prompt, response)]) == expected

    # An output layer that trains in full next to the adapters has the second one as well.
    saving = LoRA(rank=8, alpha=8, modules_to_save=("embed_tokens", "lm_head"))
    output = 2 * response * WIDTH * VOCABULARY
    assert training_flops(replace(architecture, lora=saving), [(prompt, response)]) == expected + output


def test_latent_attention_is_what_a_model_of_hugging_face_does() -> None:
    """Heads of 24 numbers in queries and keys, and 12 in values."""
    prompt = 5
    response = 8
    length = prompt + response
    model = AutoModelForCausalLM.from_config(
        example_config("deepseek_v3"), attn_implementation="eager", experts_implementation="eager"
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()

    masked = 2 * 4 * 8 * (24 + 12) * (length * length - length * (length + 1) // 2)
    unread = 2 * 64 * 199 * prompt
    expected = counter.get_total_flops() - 3 * (masked + unread)
    assert training_flops(example_architecture("deepseek_v3"), [(prompt, response)]) == expected


def test_a_gated_delta_net_is_linear_in_the_length_by_hand() -> None:
    """Two of four layers, with 4 key heads of 16 numbers and 8 value heads of 12. The others are attention.

    Per token: the projections of queries, keys, values, gates and two numbers per value head, and of the
    output; a convolution over 4 tokens; and three products of a state of 16 x 12 numbers per value head.
    """
    architecture = example_architecture("qwen3_next")
    assert architecture.delta_layers == (0, 2)
    projections = 64 * (2 * 64 + 2 * 96 + 2 * 8) + 96 * 64
    convolution = 4 * (2 * 64 + 96)
    recurrence = 3 * 8 * 16 * 12
    # 8 query heads and their gates, 4 key-value heads, of 32 numbers each.
    attention = 64 * 32 * (3 * 8 + 2 * 4)
    # A router over 8 experts, two experts, a shared expert and its gate.
    feed_forward = 64 * (8 + 3 * 2 * 32 + 3 * 48 + 1)
    of_token = 2 * (projections + convolution + recurrence) + 2 * attention + 4 * feed_forward

    for prompt, response in ((3, 4), (6, 8)):
        length = prompt + response
        pairs = 2 * 8 * 2 * 32 * length * (length + 1) // 2
        expected = 6 * (length * of_token + pairs + response * 64 * 199)
        assert training_flops(architecture, [(prompt, response)]) == expected


def test_rows_add_up_and_a_value_head_is_one_column(tmp_path: Path) -> None:
    architecture = read_architecture(str(model_folder(tmp_path / "model")))
    rows = [(3, 4), (1, 1), (2, 6)]
    assert training_flops(architecture, rows) == sum(training_flops(architecture, [row]) for row in rows)
    assert training_flops(architecture, []) == 0
    less = training_flops(architecture, rows) - training_flops(architecture, rows, with_value_head=True)
    assert less == 3 * 2 * (4 + 1 + 6) * WIDTH * (VOCABULARY - 1)


def test_a_window_limits_the_pairs_by_hand() -> None:
    """Two of four layers see 4 tokens: 6 pairs in a row of 3, and 1 + 2 + 3 + 4 + 4 + 4 in a row of 6."""
    architecture = example_architecture("gpt_oss")
    assert architecture.windows == (4, 0, 4, 0)
    whole = replace(architecture, windows=())
    rows = [(2, 1), (2, 4)]
    less = training_flops(whole, rows) - training_flops(architecture, rows)
    assert less == 3 * 2 * 2 * (21 - 18) * architecture.num_attention_heads * 2 * architecture.head_dim


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peaks_by_the_name_of_the_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_tower_is_what_transformers_does(family: str) -> None:
    """An image of 4 x 8 patches, of which windows have 4 x 4, and one of 4 x 4."""
    architecture = example_architecture(family)
    assert architecture.vision is not None
    tower = AutoModel.from_config(
        AutoConfig.for_model(**architecture.vision.transformers_config()), attn_implementation="eager"
    )
    grids = [(1, 4, 8), (1, 4, 4)]
    counter = FlopCounterMode(display=False)
    with counter:
        pixels = torch.ones(48, architecture.vision.patch_elements, requires_grad=True)
        outputs = tower(pixels, grid_thw=torch.tensor(grids))
        features = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
        sum(each.sum() for each in features).backward()

    assert tower_flops(architecture, grids, trains=True) == counter.get_total_flops()
    assert 3 * tower_flops(architecture, grids, trains=False) == counter.get_total_flops()
