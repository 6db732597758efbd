"""Memory that a vision tower needs at work. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.batch_arithmetic import Row
from megarl.config.roles import ModelRole
from megarl.config.schema import Recompute
from megarl.models.vision import Vision

_FLOAT32 = 4


def image_patches(rows: Sequence[Row], vision: Vision) -> int:
    """Return the most patches that the prompts of a micro-batch may have.

    Any token of a prompt may be an image's. Samples share their prompt's images.
    """
    longest_of_prompt = {row.prompt_number: row.prompt for row in rows}
    return sum(longest_of_prompt.values()) * vision.patches_per_token


def tower_bytes(role: ModelRole, vision: Vision, rows: Sequence[Row], element: int, *, trains: bool) -> int:
    """Return the bytes of a tower's activations in one micro-batch, on the first pipeline stage.

    They are upper bounds: queries and keys are rotated in float32, and blocks keep what autograd saves.

    Args:
        element: The bytes of an activation.
        trains: Whether the pass has gradients.
    """
    patches = image_patches(rows, vision)
    width = vision.hidden_size

    # Per patch: norms, queries, keys and values, attention and its output; rotated queries and keys in
    # float32; and the feed-forward.
    block = element * (12 * width + 5 * vision.intermediate_size) + _FLOAT32 * 6 * width
    inputs = vision.patch_elements * (_FLOAT32 + element)
    outputs = element * (1 + len(vision.deepstack_blocks)) * (2 * width + 2 * vision.out_hidden_size)

    keeps = trains and not role.freeze_vision
    if not keeps:
        blocks = 2 * block
    elif role.recomputation.how is Recompute.full:
        blocks = vision.depth * element * width + 2 * block
    else:
        blocks = vision.depth * block
    return patches * (inputs + outputs + blocks)
