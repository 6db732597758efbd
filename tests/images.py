"""Tiny images, and the image processor of the tiny models of tests.families."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

PATCH_SIZE = 2  # of the examples of families
MERGE_SIZE = 2
IMAGE_TOKEN = 190
FIRST_IMAGE_TOKEN = 192
LAST_IMAGE_TOKEN = 193


def image_file(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the bytes of an image file with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def save_processor(folder: Path, *, largest: int = 16 * 16) -> None:
    """Write preprocessor_config.json. Images are scaled to at least 4 x 4 and at most `largest` pixels."""
    fields = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 16, "longest_edge": largest},
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))


def image_tokens(num_tokens: int) -> list[int]:
    """Return the tokens of an image in a prompt."""
    return [FIRST_IMAGE_TOKEN, *[IMAGE_TOKEN] * num_tokens, LAST_IMAGE_TOKEN]
