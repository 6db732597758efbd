"""The images of a batch of requests, as arguments of transformers' models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.data.image_positions import token_positions
from megarl.data.images import ImageProcessor
from megarl.machine.wording import counted
from megarl.rollout.interface import GenerationRequest


class PromptImages(NamedTuple):
    """The images of a prompt for a model that reads images. A prompt may have none.

    Attributes:
        files: What identifies the images.
        pixels: (P, patch elements).
        grids: (I, 3).
        positions: (3, L), the positions of the prompt's tokens.
    """

    files: tuple[bytes, ...]
    pixels: Tensor
    grids: Tensor
    positions: Tensor


def prompt_images(
    requests: Sequence[GenerationRequest], processor: ImageProcessor, device: torch.device
) -> list[PromptImages]:
    """Return the images of each request. Those of samples of one prompt are decoded once.

    Raises:
        ValueError: A prompt does not have the tokens of its images.
    """
    made: dict[tuple[tuple[bytes, ...], tuple[int, ...]], PromptImages] = {}
    found = []

    for request in requests:
        key = request.images, tuple(request.prompt)
        if key not in made:
            made[key] = _images_of(request, processor, device)
        found.append(made[key])
    return found


def _images_of(request: GenerationRequest, processor: ImageProcessor, device: torch.device) -> PromptImages:
    vision = processor.vision
    patches = [processor.patches(data) for data in request.images]
    grids = torch.tensor([each.grid for each in patches], dtype=torch.int64).view(-1, 3)
    counts = (grids.prod(1) // vision.patches_per_token).tolist()
    places = [place for place, token in enumerate(request.prompt) if token == vision.image_token_id]

    if len(places) != sum(counts):
        raise ValueError(
            f"request {request.request_id} has {counted(len(places), 'image token')}, but "
            f"{counted(sum(counts), 'feature')} of {counted(len(counts), 'image')}"
        )

    starts = [places[sum(counts[:number])] for number in range(len(counts))]
    pixels = torch.cat([each.pixels for each in patches] or [torch.empty(0, vision.patch_elements)])
    return PromptImages(
        request.images,
        pixels.to(device),
        grids.to(device),
        token_positions(len(request.prompt), starts, grids, vision.spatial_merge_size).to(device),
    )
