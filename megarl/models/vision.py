"""The images that a model reads: the vision tower, and the positions of image tokens. Does not import torch.

A tower (a vision transformer) turns the patches of an image into vectors that replace the embeddings of the
image's tokens. The prompt has one placeholder token per vector, `image_token_id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A vision tower and how its outputs enter the language model. Names are Hugging Face's.

    Attributes:
        tower_type: transformers' `model_type` of the tower, from which it is built.
        depth: The number of blocks.
        hidden_size: The width of the blocks.
        intermediate_size: The feed-forward size of the blocks.
        num_heads: The number of attention heads.
        out_hidden_size: The width of the outputs, which is that of the language model.
        in_channels: The color channels of an image.
        patch_size: The width and height of a patch in pixels.
        temporal_patch_size: The number of frames of a patch. A still image is repeated that many times.
        spatial_merge_size: An output is made from a square of patches of this width.
        window_size: The width in pixels of the windows in which blocks attend; 0: blocks attend to the image.
        full_attention_blocks: The blocks that attend to the whole image in spite of windows.
        num_position_embeddings: The size of the table of learned positions; 0 if there is none.
        deepstack_blocks: The blocks whose outputs are added to the hidden states after the first layers of
            the language model, one block per layer (Meng et al. 2024, arXiv 2406.04334).
        image_token_id: The placeholder of an output in a prompt.
        position_axes: For each rotary frequency of the language model, which position it rotates by: 0 time,
            1 row, 2 column. The three are equal for text.
    """

    tower_type: str
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    image_token_id: int
    position_axes: tuple[int, ...]
    window_size: int = 0
    full_attention_blocks: tuple[int, ...] = ()
    num_position_embeddings: int = 0
    deepstack_blocks: tuple[int, ...] = ()

    @property
    def patch_elements(self) -> int:
        """The numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """The number of patches that one image token stands for."""
        return self.spatial_merge_size**2

    def transformers_config(self) -> dict[str, Any]:
        """Return the fields of transformers' configuration of the tower."""
        fields: dict[str, Any] = {
            "model_type": self.tower_type,
            "depth": self.depth,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads": self.num_heads,
            "out_hidden_size": self.out_hidden_size,
            "in_channels": self.in_channels,
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "spatial_merge_size": self.spatial_merge_size,
        }

        if self.window_size:
            fields["window_size"] = self.window_size
            fields["fullatt_block_indexes"] = list(self.full_attention_blocks)
        if self.num_position_embeddings:
            fields["num_position_embeddings"] = self.num_position_embeddings
            fields["deepstack_visual_indexes"] = list(self.deepstack_blocks)

        return fields
