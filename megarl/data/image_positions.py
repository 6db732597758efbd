"""The positions of text and image tokens in time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_positions(length: int, starts: Sequence[int], grids: Tensor, merge: int) -> Tensor:
    """Return the positions of a row's tokens in time, height and width, (3, length).

    The tokens of an image are at the row and column of their squares, counted from the position after the
    text before it. Text after an image continues from its largest position.

    Args:
        length: The number of tokens.
        starts: The first token of each image.
        grids: (I, 3), the number of patches of each image in time, height and width.
        merge: The width of the square of patches that a token stands for.
    """
    parts = []
    token = 0
    position = 0

    for start, grid in zip(starts, grids.tolist(), strict=True):
        num_text = start - token
        parts.append((torch.arange(num_text) + position).expand(3, -1))
        position += num_text

        sizes = (grid[0], grid[1] // merge, grid[2] // merge)
        axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + position)
        position += max(sizes[1:])
        token = start + sizes[0] * sizes[1] * sizes[2]

    parts.append((torch.arange(length - token) + position).expand(3, -1))
    return torch.cat(parts, 1)
