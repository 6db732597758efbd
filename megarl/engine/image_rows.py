"""The images of a micro-batch's rows: which feature each token takes, and positions in three axes.

All of it is computed on the host. A row's images are its columns `pixel_values` and `image_grids`, in the
order of their tokens in its prompt. Rows with the same images, such as the samples of a prompt, share values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import IMAGE_GRIDS, PIXEL_VALUES, image_places
from megarl.data.image_positions import token_positions
from megarl.machine.wording import counted
from megarl.models.vision import Vision


class RowImages(NamedTuple):
    """The images of concatenated rows.

    Attributes:
        pixels: (P, patch elements), the patches of the distinct images.
        grids: (I, 3) int64, the number of patches of each distinct image in time, height and width.
        features: (T,) the feature of each token of the rows, -1 for tokens without one.
        positions: (3, T), the positions of each token in its row.
    """

    pixels: Tensor
    grids: Tensor
    features: Tensor
    positions: Tensor


def row_images(
    columns: Mapping[str, RaggedTensor], rows: Sequence[int], ids: Tensor, vision: Vision
) -> RowImages:
    """Return the images of some rows.

    Args:
        columns: The columns of the rows. Without images, positions count tokens. Ranks without the tower need
            no pixels.
        rows: The numbers of the rows in the batch, for errors.
        ids: (T,) the tokens of all rows, prompt and response, concatenated.

    Raises:
        ValueError: The image tokens of a prompt do not fit its images.
    """
    prompts = columns["prompts"].lengths.tolist()
    lengths = (columns["prompts"].lengths + columns["responses"].lengths).tolist()
    places = image_places(columns) or [None] * len(rows)
    pixels = list(columns[PIXEL_VALUES].each()) if PIXEL_VALUES in columns else []
    grids = list(columns[IMAGE_GRIDS].each()) if IMAGE_GRIDS in columns else []

    # The first feature of each distinct set of images.
    first_features: dict[object, int] = {}
    found_pixels: list[Tensor] = []
    found_grids: list[Tensor] = []
    features = torch.full((len(ids),), -1)
    positions = []
    num_features = 0
    start = 0

    for row, (prompt, length, place) in enumerate(zip(prompts, lengths, places, strict=True)):
        of_row = grids[row].long().view(-1, 3) if place is not None else torch.empty(0, 3, dtype=torch.int64)
        at = (ids[start : start + prompt] == vision.image_token_id).nonzero()[:, 0]
        counts = (of_row.prod(1) // vision.patches_per_token).tolist()
        _check(f"row {rows[row]} of the batch", at, counts, vision)
        if pixels:
            _check_pixels(f"row {rows[row]} of the batch", pixels[row], of_row, vision)

        if place is not None:
            # Rows with the same images share their features.
            if place not in first_features:
                first_features[place] = num_features
                num_features += sum(counts)
                found_pixels += [pixels[row].view(-1, vision.patch_elements)] if pixels else []
                found_grids.append(of_row)
            features[start + at] = first_features[place] + torch.arange(len(at))

        starts = [int(at[sum(counts[:number])]) for number in range(len(counts))]
        positions.append(token_positions(length, starts, of_row, vision.spatial_merge_size))
        start += length

    return RowImages(
        torch.cat(found_pixels) if found_pixels else torch.empty(0, vision.patch_elements),
        torch.cat(found_grids) if found_grids else torch.empty(0, 3, dtype=torch.int64),
        features,
        torch.cat(positions, 1),
    )


def _check(name: str, at: Tensor, counts: list[int], vision: Vision) -> None:
    """Check that a prompt has one run of image tokens per image."""
    if len(at) != sum(counts):
        raise ValueError(
            f"{name}: the prompt has {counted(len(at), 'image token')} (id {vision.image_token_id}), but "
            f"{counted(sum(counts), 'feature')} of {counted(len(counts), 'image')}"
        )

    for run in at.split(counts) if counts else ():
        # Positions ascend, so a gap makes the distance from first to last larger.
        if int(run[-1]) - int(run[0]) != len(run) - 1:
            raise ValueError(f"{name}: the {len(run)} tokens of an image are not contiguous in the prompt")


def _check_pixels(name: str, pixels: Tensor, grids: Tensor, vision: Vision) -> None:
    """Check that a row has pixels for all of its patches."""
    num_patches = len(pixels) / vision.patch_elements
    if num_patches != int(grids.prod(1).sum()):
        raise ValueError(
            f"{name}: {PIXEL_VALUES!r} has {num_patches:g} patches of {vision.patch_elements} values, but "
            f"{IMAGE_GRIDS!r} has {int(grids.prod(1).sum())} patches"
        )
