"""Create a tiny Qwen3-VL model with random weights, its tokenizer and image processor, and images of shapes.

    python -m examples.shapes.prepare --output-dir outputs/shapes --seed 0

An image has one to four circles, squares and triangles in some of its nine fields, in random colors. The model
is asked how many there are, and has never seen an image before.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

NUM_TRAIN = 4096
NUM_VALIDATION = 128
MOST_SHAPES = 4
FIELDS = 3  # in a row and in a column
FIELD = 8  # pixels; one image token
SHAPES = ("circle", "square", "triangle")

PAD, UNKNOWN, END, USER, ASSISTANT, FIRST, IMAGE, LAST = SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<end>",
    "<user>",
    "<assistant>",
    "<vision_start>",
    "<image_pad>",
    "<vision_end>",
)
CHARACTERS = "?123456789"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<vision_start><image_pad><vision_end>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prepare(output_dir: str | Path, seed: int) -> None:
    """Write `model/` and `data/*.parquet` to `output_dir`. The same seed gives the same files."""
    folder = Path(output_dir)
    save_model(folder / "model", seed)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("validation", NUM_VALIDATION)):
        rows = pyarrow.Table.from_pylist(list(_rows(chance, count)))
        pyarrow.parquet.write_table(rows, folder / "data" / f"{name}.parquet")


def _rows(chance: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        num_shapes = chance.randint(1, MOST_SHAPES)
        yield {
            "prompt": [{"role": "user", "content": "<image>?"}],
            "images": [{"bytes": draw(chance, num_shapes), "path": None}],
            "data_source": "shapes",
            "reward_model": {"style": "rule", "ground_truth": str(num_shapes)},
        }


def draw(chance: random.Random, num_shapes: int) -> bytes:
    """Return a PNG file with that many shapes in different fields."""
    image = Image.new("RGB", (FIELDS * FIELD, FIELDS * FIELD), "black")
    canvas = ImageDraw.Draw(image)

    for field in chance.sample(range(FIELDS * FIELDS), num_shapes):
        left = field % FIELDS * FIELD + 1
        top = field // FIELDS * FIELD + 1
        right = left + FIELD - 3
        bottom = top + FIELD - 3
        color = tuple(chance.randint(160, 255) for _ in range(3))
        match chance.choice(SHAPES):
            case "circle":
                canvas.ellipse((left, top, right, bottom), fill=color)
            case "square":
                canvas.rectangle((left, top, right, bottom), fill=color)
            case "triangle":
                corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
                canvas.polygon(corners, fill=color)

    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, FIRST, IMAGE, LAST],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_model(path: Path, seed: int) -> None:
    """Write a model whose tower turns each field of an image into one token."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,  # a model this narrow learns faster from larger weights than the usual 0.02
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": FIELD // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.06,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[PAD],
        vision_start_token_id=ids[FIRST],
        vision_end_token_id=ids[LAST],
        tie_word_embeddings=False,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)

    model.generation_config.eos_token_id = ids[END]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    _write_processor(path, vision)


def _write_processor(path: Path, vision: dict[str, Any]) -> None:
    """Write the fields of transformers' image processor. Images keep their size."""
    num_pixels = (FIELDS * FIELD) ** 2
    fields = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": num_pixels, "longest_edge": num_pixels},
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the model and the data of the shapes example.")
    parser.add_argument("--output-dir", default="outputs/shapes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.output_dir, arguments.seed)


if __name__ == "__main__":
    main()
