"""Code shared by mixture-of-experts families: fields of `config.json`, rows of routers and experts."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.mapping import EXPERT, HF_LAYER, MEGATRON_LAYER, Cut, MappingRow, StagePlacement, is_sparse


def expert_rows(block: str, *, gate: str, up: str, down: str) -> tuple[MappingRow, ...]:
    """Return the table rows of the router and the experts of a sparse layer.

    Args:
        block: The family's name for the feed-forward of a layer.
        gate: The family's name for the gate projection of an expert.
        up: The family's name for the up projection.
        down: The family's name for the down projection.
    """
    hf = f"{HF_LAYER}{block}.experts.{{expert}}."
    return (
        MappingRow(
            megatron=MEGATRON_LAYER + "mlp.router.weight",
            place=StagePlacement.layer,
            cut=Cut.replicated,
            tensors=((f"{HF_LAYER}{block}.gate.weight", "E H"),),
            applies=is_sparse,
        ),
        MappingRow(
            megatron=MEGATRON_LAYER + EXPERT + "linear_fc1.weight",
            place=StagePlacement.expert,
            cut=Cut.gated,
            tensors=((f"{hf}{gate}.weight", "M H"), (f"{hf}{up}.weight", "M H")),
            applies=is_sparse,
        ),
        MappingRow(
            megatron=MEGATRON_LAYER + EXPERT + "linear_fc2.weight",
            place=StagePlacement.expert,
            cut=Cut.row,
            tensors=((f"{hf}{down}.weight", "H M"),),
            applies=is_sparse,
        ),
    )


def read_num_experts(reader: ConfigReader) -> tuple[int, int]:
    """Read how many experts a layer has, and how many are selected per token.

    Published folders use `num_experts`. transformers v5 writes `num_local_experts`, as Mixtral always has.
    """
    older = reader.take("num_experts")
    newer = reader.take("num_local_experts")

    if None not in (older, newer) and older != newer:
        differing = f"'num_experts' {older!r} and 'num_local_experts' {newer!r}"
        reader.problems.append(f"fields {differing} differ; keep one")

    name = "num_experts" if newer is None else "num_local_experts"
    num_experts = reader.number(name, int)
    chosen = reader.number("num_experts_per_tok", int)

    # A number that could not be read is 1 here, and its problem has already been reported.
    if chosen > num_experts > 1:
        reader.problems.append(f"'num_experts_per_tok' {chosen} is greater than '{name}' {num_experts}")

    return num_experts, chosen


def check_router_gradient(reader: ConfigReader, num_experts_per_tok: int, norm_topk_prob: bool) -> None:
    """Refuse a router that selects one expert with normalized weights, because that weight is always one."""
    if num_experts_per_tok == 1 and norm_topk_prob:
        consequence = "the router would have no gradient"
        reader.problems.append(
            f"'num_experts_per_tok' is 1 and 'norm_topk_prob' normalizes the weights: {consequence}"
        )


def sglang_differs(architecture: Architecture) -> Iterator[str]:
    """Yield what SGLang's mixture-of-experts classes would compute differently."""
    if architecture.num_dense_layers:
        yield "dense layers between its sparse ones"
    if architecture.tie_word_embeddings:
        yield "a tied embedding"
