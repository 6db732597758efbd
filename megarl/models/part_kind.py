"""The type of a layer kind: what a part of a layer does besides multiplying by its matrices, and its limits.

A kind is a constant next to the rows of its tensors. `megarl/models/layers.py` has the table of all kinds,
and lists the parts of each layer of a model with their matrices. Sizes are products of the letters of the
tensor table, for one token and all heads: "3 Z X".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.mapping import always

# How the names of the parameters of the two parts of a layer begin in the tensor table.
MIXER = "self_attention."
FEED_FORWARD = "mlp."
# Towers are no part of a layer: the first pipeline stage runs them before the layers.
TOWER = "visual."
# The norms before the two parts.
NORM_BEFORE = {MIXER: "input_layernorm.weight", FEED_FORWARD: "pre_mlp_layernorm.weight"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PartKind:
    """A kind of layer part, such as attention, gated delta nets or experts.

    Attributes:
        name: The name in error messages.
        prefix: How the names of its parameters in the tensor table begin, without the number of the layer.
        applies: Returns whether the layer of that number has such a part. Of the kinds with the same prefix,
            the first one in the table that applies counts.
        of_pair: The multiply-adds for each pair of a query and a key.
        replaces_core: Whether megarl's own core of attention replaces that of Megatron's layers. It has
            16-bit kernels only, and a copy of the keys for each piece of a sequence.
        recurrence: The multiply-adds of a recurrence. Its backward pass has twice as many.
        summed: The parameters of norms whose gradients tensor-parallel ranks sum, because each has those of
            its own heads.
        gathered: The numbers that sequence-parallel ranks gather besides the inputs of matrices.
        splits_heads: Whether context-parallel ranks exchange their tokens for heads.
        cached: The numbers that an engine keeps of a token, on all ranks together.
        cached_at_least: The numbers of a token that every rank of an engine keeps, however many there are.
        state: The float32 numbers that an engine keeps of a row.
        routes_tokens: Whether tokens are sent to the ranks that have their experts.
        reads_images: Whether it turns images into tokens.
        shared_out: The fields of `config.json`, with their letters, that tensor-parallel ranks share, such
            as a number of heads. With `splits_heads`, context-parallel ranks share them too.
        replicable: Further such fields, of which the ranks of an engine have copies if there are fewer than
            ranks.
        has_fp8_engine: Whether SGLang has its matrices in block-scaled FP8.
        fp8_blocks: Yields the tensor, the dimension and the size of what must consist of whole blocks on a
            rank of an engine in FP8. Takes the sizes of letters, the ranks, and those that share an expert.
        cpu_engine_lacks: What SGLang cannot compute on a CPU, in words; empty if it computes everything.
        serves_adapters: Whether SGLang applies adapters of its matrices.
        megatron_arguments: Returns the arguments of Megatron's command line that describe its sizes.
        marks_layers: Whether Megatron is told which layers have it even if all layers have.
        stored_norm: The name in Megatron's checkpoints of the norm before it, which Transformer Engine has in
            the linear layer that follows.
    """

    name: str
    prefix: str
    applies: Callable[[Architecture, int | None], bool] = always
    of_pair: tuple[str, ...] = ()
    replaces_core: bool = False
    recurrence: str = "0"
    summed: str = ""
    gathered: str = ""
    splits_heads: bool = False
    cached: str = "0"
    cached_at_least: str = "0"
    state: str = "0"
    routes_tokens: bool = False
    reads_images: bool = False
    shared_out: tuple[tuple[str, str], ...] = ()
    replicable: tuple[tuple[str, str], ...] = ()
    has_fp8_engine: bool = True
    fp8_blocks: Callable[[Mapping[str, int], int, float], Iterator[tuple[str, str, float]]] | None = None
    cpu_engine_lacks: str = ""
    serves_adapters: bool = True
    megatron_arguments: Callable[[Architecture], dict[str, Any]] | None = None
    marks_layers: bool = False
    stored_norm: str = ""
