"""Code shared by families with sparse attention: fields of `config.json`, rows of indexers, kinds."""

from __future__ import annotations

from megarl.models.architecture import Architecture, Indexer
from megarl.models.config_reader import ConfigReader
from megarl.models.latent import latent_kind
from megarl.models.mapping import HF_LAYER, INDEXER, MEGATRON_LAYER, Cut, MappingRow, StagePlacement

# The queries that are attended at a time, and the most scores of all heads of an indexer that are in memory.
BLOCK_QUERIES = 512
MOST_SCORES = 2**25


def indexer_of(architecture: Architecture) -> Indexer:
    """Return the sizes of a model that has sparse attention."""
    assert architecture.indexer is not None
    return architecture.indexer


def has_indexer(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer selects keys, instead of taking the selection of an earlier one."""
    return architecture.indexer is not None and layer in architecture.indexer.layers


# Engines also cache the keys of indexers.
SPARSE_ATTENTION = latent_kind(
    "sparse attention", has_indexer, most_keys="t", of_every_pair=("i",), cached_apart="j"
)
# A layer that takes the selection of the last one before it that has an indexer.
REUSED_SELECTION = latent_kind(
    "sparse attention without indexer",
    lambda architecture, layer: architecture.indexer is not None,
    most_keys="t",
)


def _row(megatron: str, tensor: str, dims: str) -> MappingRow:
    """Return the row of a tensor of an indexer, which every rank has: its heads are summed."""
    return MappingRow(
        megatron=f"{MEGATRON_LAYER}{INDEXER}{megatron}",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((f"{HF_LAYER}self_attn.indexer.{tensor}", dims),),
        applies=has_indexer,
        trains=False,
    )


# The names are those of Megatron's indexer.
INDEXER_ROWS = (
    _row("linear_wq_b.weight", "wq_b.weight", "i A"),
    _row("linear_wk.weight", "wk.weight", "j H"),
    _row("k_norm.weight", "k_norm.weight", "j"),
    _row("k_norm.bias", "k_norm.bias", "j"),
    _row("linear_weights_proj.weight", "weights_proj.weight", "k H"),
)


def read_indexer(reader: ConfigReader, *, pairs_neighbors: bool, may_share: bool) -> Indexer:
    """Read the sizes of indexers.

    Args:
        pairs_neighbors: Whether the rotation of the family's indexers pairs neighbors.
        may_share: Whether transformers' class has layers that take the selection of an earlier layer.
    """
    num_layers = reader.number("num_hidden_layers", int)
    indexer = Indexer(
        topk=reader.number("index_topk", int),
        num_heads=reader.number("index_n_heads", int),
        head_dim=reader.number("index_head_dim", int),
        pairs_neighbors=pairs_neighbors,
        layers=_layers_with_indexer(reader, num_layers, may_share=may_share),
    )

    rotated = reader.number("qk_rope_head_dim", int)
    if indexer.head_dim < rotated:
        reader.conflict(
            f"'index_head_dim' is {indexer.head_dim}, but must be at least 'qk_rope_head_dim', which is "
            f"{rotated}: that many numbers of a query of an indexer are rotated",
            "index_head_dim",
            "qk_rope_head_dim",
        )
    reader.require("indexer_rope_interleave", pairs_neighbors, f"only {pairs_neighbors} is supported")
    reader.flag("index_share_for_mtp_iteration")  # of layers that predict further tokens
    return indexer


def _layers_with_indexer(reader: ConfigReader, num_layers: int, *, may_share: bool) -> tuple[int, ...]:
    """Return the numbers of the layers that select keys themselves.

    As in transformers, a list of types counts before a pattern, and a pattern before a frequency.
    """
    kinds = reader.take("indexer_types")
    pattern = reader.take("index_topk_pattern")
    frequency = max(reader.take("index_topk_freq") or 1, 1)
    offset = reader.take("index_skip_topk_offset")
    offset = 2 if offset is None else offset

    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]
    if kinds is None:
        is_full = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
        kinds = ["full" if each else "shared" for each in is_full]

    named = "'indexer_types', or 'index_topk_pattern',"
    if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"}:
        reader.conflict(
            f"{named} must have 'full' or 'shared' for each layer ({num_layers} in all), but is {kinds}",
            "num_hidden_layers",
        )
    elif kinds[0] != "full":
        reader.conflict(f"{named} is {kinds}, but the first layer has no selection to share")
    elif "shared" in kinds and not may_share:
        reader.conflict(
            f"{named} is {kinds}, but transformers' class of this family has an indexer in every layer"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
