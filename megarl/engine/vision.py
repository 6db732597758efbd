"""The vision tower of a model that reads images: transformers' module on the first pipeline stage.

Every tensor-parallel rank of the stage holds the whole tower and computes all images of a micro-batch, once
even if several rows have them. Its outputs replace the embeddings of image tokens. With sequence parallelism,
and if ranks share rows, each rank inserts those of its own tokens.

Deepstack features are added by layers, possibly inside a recomputed one, from where no gradient could flow
to the tower more than once. They are leaves there, whose gradients continue to the tower where the hidden
states enter the decoder: by then, all layers have run backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megarl.engine.packed_rows import Deepstack, PackedRows
from megarl.engine.platform import to_device
from megarl.models.vision import Vision


class ImageInputs(NamedTuple):
    """The images of a micro-batch, and where a rank inserts their features.

    Attributes:
        pixels: (P, patch elements), the patches of all images, on the host until the tower reads them.
        grids: (I, 3) int64 on the host, the number of patches of each image in time, height and width.
        places: (N,) the positions of image tokens among the tokens whose hidden states this rank has.
        features: (N,) the feature of each of these tokens.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor
    features: Tensor


def build_tower(vision: Vision) -> Any:
    """Build transformers' tower. Its weights are not set."""
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**vision.transformers_config())
    with no_init_weights():
        return AutoModel.from_config(config, attn_implementation="sdpa")


def keep_frequencies(tower: torch.nn.Module) -> None:
    """Compute the rotary frequencies in float32 again after the tower was converted."""
    rotary: Any = tower.rotary_pos_emb
    frequencies, _ = rotary.compute_axial_rope_parameters(rotary.config, rotary.inv_freq.device)
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)


def _geometry(tower: Any, vision: Vision, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of a tower that follow from `grids`. Sequence lengths stay on the host."""
    from transformers import vision_utils

    merge = vision.spatial_merge_size
    lengths = vision_utils.get_vision_cu_seqlens(grids)
    moved = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    kept = {"cu_seqlens": lengths, "max_seqlen": lengths.diff().max()}

    if vision.window_size:
        index, boundaries = vision_utils.get_vision_window_index(
            grids,
            spatial_merge_size=merge,
            window_size=vision.window_size,
            patch_size=vision.patch_size,
        )
        moved["window_index"] = index
        kept["cu_window_seqlens"] = boundaries

    if vision.num_position_embeddings:
        moved["interp_indices"], moved["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=merge,
            )
        )
    return {**kept, **{name: to_device(value, device) for name, value in moved.items()}}


def insert_images(
    hidden: Tensor,
    tower: torch.nn.Module,
    vision: Vision,
    images: ImageInputs | None,
    packed: PackedRows,
    gathering_group: torch.distributed.ProcessGroup | None,
) -> Tensor:
    """Replace the embeddings of image tokens by the tower's outputs.

    Args:
        hidden: (T, 1, H), the embeddings of this rank's tokens.
        vision: The tower's sizes.
        images: The images, None if no row of the micro-batch has any.
        packed: The sequences of the micro-batch. Receives the features that layers add.
        gathering_group: The tensor-parallel ranks if each inserts the features of its own tokens. Their
            gradients are summed, so that every rank has the tower's whole gradient.

    Returns:
        (T, 1, H).
    """
    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    if images is None:
        # Megatron expects a gradient of each parameter from each micro-batch.
        return _Untouched.apply(hidden, *trained) if trained and torch.is_grad_enabled() else hidden

    with torch.set_grad_enabled(bool(trained) and torch.is_grad_enabled()):
        # What follows from the sizes of images is computed on the host, so nothing is read from the device.
        outputs = tower(
            to_device(images.pixels, hidden.device).to(hidden.dtype),
            grid_thw=images.grids,
            return_dict=True,
            **_geometry(tower, vision, images.grids, hidden.device),
        )
        # (F, H) each: the embeddings of image tokens, and the features of each block of `deepstack_blocks`.
        every = torch.stack([outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())])
        if gathering_group is not None:
            every = copy_to_tensor_model_parallel_region(every, group=gathering_group)
        own = every.index_select(1, images.features)

    hidden = hidden.index_copy(0, images.places, own[0].to(hidden.dtype)[:, None])
    if len(own) == 1:
        return hidden

    # Layers add the leaf, and its gradient continues from here.
    leaf = own[1:].to(hidden.dtype).detach().requires_grad_(own.requires_grad)
    packed.deepstack = leaf, images.places
    return _Entrance.apply(hidden, own[1:], packed.deepstack) if own.requires_grad else hidden


class _Untouched(torch.autograd.Function):
    """Hidden states that do not depend on some parameters, whose gradients are zero."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return hidden.view_as(hidden)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return (gradient, *map(torch.zeros_like, ctx.saved_tensors))


class _Entrance(torch.autograd.Function):
    """Hidden states as they are; the backward pass continues the gradient of a leaf to its features.

    The leaf is hidden from autograd in a tuple. As an input, it would receive its gradient too late.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, features: Tensor, leaf: Deepstack) -> Tensor:
        ctx.leaf, _ = leaf
        ctx.dtype = features.dtype
        return hidden.view_as(hidden)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        found = ctx.leaf.grad
        ctx.leaf.grad = None
        return gradient, torch.zeros_like(ctx.leaf) if found is None else found.to(ctx.dtype), None
