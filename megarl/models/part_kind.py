"""The type of a layer kind: what one part of a layer does besides multiplying by its matrices.

A kind is a constant next to the rows of its tensors. `megarl/models/layers.py` has the table of all kinds,
and lists the parts of each layer of a model with their matrices. Sizes are products of the letters of the
tensor table, for one token and all heads: "3 Z X".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.models.architecture import Architecture
from megarl.models.mapping import always

# How the names of the parameters of the two parts of a layer begin in the tensor table.
MIXER = "self_attention."
FEED_FORWARD = "mlp."


@dataclass(frozen=True, kw_only=True, eq=False)
class PartKind:
    """A kind of layer part, such as attention, gated delta nets or experts.

    Attributes:
        name: The name in error messages, in the plural.
        prefix: How the names of its parameters in the tensor table begin, without the number of the layer.
        applies: Returns whether the layer of that number has such a part. Of the kinds with the same prefix,
            the first one in the table that applies counts.
        of_pair: The multiply-adds for each pair of a query and a key.
        recurrence: The multiply-adds of a recurrence. Its backward pass has twice as many.
        summed: The parameters of norms whose gradients tensor-parallel ranks sum, because each has those of
            its own heads.
        gathered: The numbers that sequence-parallel ranks gather besides the inputs of matrices.
        splits_heads: Whether context-parallel ranks exchange their tokens for heads.
        cached: The numbers that an engine keeps of a token, on all ranks together.
        cached_at_least: The numbers of a token that every rank of an engine keeps, however many there are.
        state: The float32 numbers that an engine keeps of a row.
        routes_tokens: Whether tokens are sent to the ranks that have their experts.
        has_fp8_engine: Whether SGLang has its matrices in block-scaled FP8.
        serves_adapters: Whether SGLang applies adapters of its matrices.
    """

    name: str
    prefix: str
    applies: Callable[[Architecture, int | None], bool] = always
    of_pair: tuple[str, ...] = ()
    recurrence: str = "0"
    summed: str = ""
    gathered: str = ""
    splits_heads: bool = False
    cached: str = "0"
    cached_at_least: str = "0"
    state: str = "0"
    routes_tokens: bool = False
    has_fp8_engine: bool = True
    serves_adapters: bool = True
