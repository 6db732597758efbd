"""Code shared by mixture-of-experts families: fields of `config.json`, rows of routers and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.machine.errors import counted
from megarl.models.architecture import Architecture, Experts, RouterScore
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.mapping import (
    EXPERT,
    FEED_FORWARD,
    HF_LAYER,
    MEGATRON_LAYER,
    Cut,
    MappingRow,
    PartKind,
    StagePlacement,
    TensorPart,
    is_dense,
    is_sparse,
)


def _blocks(sizes: Mapping[str, int], ranks: int, expert_ranks: float) -> Iterator[tuple[str, str, float]]:
    yield "gate_proj and up_proj of an expert", "rows", sizes["M"] / expert_ranks
    yield "gate_proj and up_proj of shared experts", "rows", sizes["S"] / ranks


EXPERTS = PartKind(
    name="experts",
    prefix=FEED_FORWARD,
    applies=is_sparse,
    routes_tokens=True,
    fp8_blocks=_blocks,
    serves_adapters=False,
    stored_norm="pre_mlp_layernorm.weight",  # a separate module
)


def expert_rows(block: str, *, gate: str, up: str, down: str) -> tuple[MappingRow, ...]:
    """Return the table rows of the router and the experts of a sparse layer.

    Args:
        block: The family's name for the feed-forward of a layer.
        gate: The family's name for the gate projection of an expert.
        up: The family's name for the up projection.
        down: The family's name for the down projection.
    """
    hf = f"{HF_LAYER}{block}.experts.{{expert}}."
    # transformers v5 keeps the experts of a layer in two tensors in memory. Programs that save this state
    # without conversion write fused files.
    fused = f"{HF_LAYER}mlp.experts."

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
            alternative=(TensorPart(name=f"{fused}gate_up_proj", dims="E (2 M) H", order="2 M H"),),
        ),
        MappingRow(
            megatron=MEGATRON_LAYER + EXPERT + "linear_fc2.weight",
            place=StagePlacement.expert,
            cut=Cut.row,
            tensors=((f"{hf}{down}.weight", "H M"),),
            applies=is_sparse,
            alternative=(TensorPart(name=f"{fused}down_proj", dims="E H M"),),
        ),
    )


# The axes of experts in two tensors per layer whose matrices are transposed, and their order in Megatron.
_TRANSPOSED = {"gate_up_proj": ("E H (2 M)", "2 M H"), "down_proj": ("E M H", "H M")}


def transposed_fused(rows: tuple[MappingRow, ...]) -> tuple[MappingRow, ...]:
    """Return the rows of a family whose folders have the experts of a layer in two transposed tensors.

    transformers v5 writes tensors of the same names that are not transposed, which are the alternative.
    """

    def published(entry: tuple[str, str] | TensorPart) -> TensorPart:
        assert isinstance(entry, TensorPart)
        dims, order = _TRANSPOSED[entry.name.rpartition(".")[2]]
        return replace(entry, dims=dims, order=order)

    return tuple(
        replace(row, tensors=tuple(map(published, row.alternative))) if row.alternative else row
        for row in rows
    )


def fused_first(rows: tuple[MappingRow, ...]) -> tuple[MappingRow, ...]:
    """Return the rows of a family whose folders have the experts of a layer in two tensors."""
    return tuple(
        replace(row, tensors=row.alternative, alternative=row.tensors) if row.alternative else row
        for row in rows
    )


def shared_expert_rows(name: str) -> tuple[MappingRow, ...]:
    """Return the table rows of the shared expert, which sees every token.

    Args:
        name: The family's name for the shared expert of a layer.
    """
    hf = HF_LAYER + name
    return (
        MappingRow(
            megatron=MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",
            place=StagePlacement.layer,
            cut=Cut.gated,
            tensors=((hf + ".gate_proj.weight", "S H"), (hf + ".up_proj.weight", "S H")),
            applies=_has_shared_expert,
        ),
        MappingRow(
            megatron=MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",
            place=StagePlacement.layer,
            cut=Cut.row,
            tensors=((hf + ".down_proj.weight", "H S"),),
            applies=_has_shared_expert,
        ),
    )


# The bias is not a parameter of transformers but a buffer. It has float32 in every model, because its
# differences between experts are small: rounded to bfloat16, it would send tokens to other experts.
SELECTION_BIAS_ROW = MappingRow(
    megatron=MEGATRON_LAYER + "mlp.router.expert_bias",
    place=StagePlacement.layer,
    cut=Cut.replicated,
    tensors=((HF_LAYER + "mlp.gate.e_score_correction_bias", "E"),),
    applies=lambda architecture, layer: (
        is_sparse(architecture, layer) and architecture.sizes_of(Experts).has_selection_bias
    ),
    dtype="float32",
    trains=False,
)


def _has_shared_expert(architecture: Architecture, layer: int | None) -> bool:
    return is_sparse(architecture, layer) and architecture.sizes_of(Experts).shared_intermediate_size > 0


def read_sigmoid_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    """Read the experts of DeepSeek-V3's design: sigmoid scores, a selection bias and shared experts."""
    experts = _read_experts_after_dense(reader, num_hidden_layers)
    chosen = experts.num_experts_per_tok

    check_router_gradient(reader, chosen, experts.norm_topk_prob)
    if not experts.norm_topk_prob and chosen > 1:
        reader.refuse("norm_topk_prob", "only true is supported with sigmoid scores")

    return replace(
        experts,
        score=RouterScore.sigmoid,
        has_selection_bias=True,
        groups=read_groups(reader, experts.num_experts, chosen),
    )


def read_unnormalized_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    """Read the experts of DeepSeek-V2's design: weights of a softmax over all experts, and shared experts."""
    experts = _read_experts_after_dense(reader, num_hidden_layers)
    if experts.norm_topk_prob:
        reader.refuse("norm_topk_prob", "only false is supported")
    return experts


def _read_experts_after_dense(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    """Read experts with the fields of DeepSeek's designs, as those of a softmax router without groups."""
    num_experts = reader.number("n_routed_experts", int)
    chosen = reader.number("num_experts_per_tok", int)
    intermediate_size = reader.number("moe_intermediate_size", int)
    check_num_chosen(reader, chosen, "n_routed_experts", num_experts)

    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=intermediate_size,
        shared_intermediate_size=reader.count("n_shared_experts", OF_CLASS) * intermediate_size,
        norm_topk_prob=reader.flag("norm_topk_prob"),
        layers=layers_after_dense(reader, num_hidden_layers),
        scaling_factor=reader.number("routed_scaling_factor", float, OF_CLASS),
    )


def has_feed_forward_types(fields: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` has types of feed-forwards, or the default of one dense layer."""
    return "mlp_layer_types" in fields or fields.get("model_type") in ("glm4_moe_lite", "hy_v3")


def with_one_dense_layer(reader: ConfigReader) -> ConfigReader:
    """Return a reader with the fields of DeepSeek's designs that transformers' class of a family lacks.

    The class has `mlp_layer_types` instead, by default one dense layer before those with experts.
    """
    kinds = reader.fields.get("mlp_layer_types")
    num_dense = kinds.count("dense") if isinstance(kinds, list) else 1
    missing = {"first_k_dense_replace": num_dense, "num_nextn_predict_layers": 0}
    return replace(reader, fields=missing | reader.fields)


def check_feed_forwards(
    reader: ConfigReader, architecture: Architecture, *, has_one_dense: bool = False
) -> None:
    """Refuse types of feed-forwards that contradict the number of dense layers, which SGLang reads.

    Args:
        has_one_dense: Whether one layer is dense in transformers if the types are missing.
    """
    layers = range(architecture.num_hidden_layers)
    kinds = reader.take("mlp_layer_types")
    meant = ["sparse" if layer else "dense" for layer in layers] if has_one_dense and kinds is None else kinds
    expected = ["sparse" if is_sparse(architecture, layer) else "dense" for layer in layers]

    if meant is not None and meant != expected:
        reader.conflict(
            f"field 'mlp_layer_types' is {kinds!r}; must be dense in the first "
            "'first_k_dense_replace' layers, and sparse after them",
            "num_hidden_layers",
            "first_k_dense_replace",
        )


def num_dense_layers(architecture: Architecture) -> Mapping[str, int]:
    """Return the field of the number of dense layers."""
    layers = range(architecture.num_hidden_layers)
    return {"first_k_dense_replace": sum(is_dense(architecture, layer) for layer in layers)}


def layers_after_dense(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Return the layers with experts: all but the first `first_k_dense_replace`."""
    num_dense = reader.count("first_k_dense_replace", OF_CLASS)
    if num_dense >= num_hidden_layers:
        reader.conflict(
            f"'first_k_dense_replace' is {num_dense}: none of {counted(num_hidden_layers, 'layer')} has "
            "experts",
            "first_k_dense_replace",
            "num_hidden_layers",
        )
    return tuple(range(num_dense, num_hidden_layers))


def read_groups(reader: ConfigReader, num_experts: int, chosen: int) -> tuple[int, int] | None:
    """Read the groups of a group-limited selection: how many there are, and how many a token selects.

    transformers scores a group by its two best experts. Megatron scores it by as many experts as a token
    selects of each group, so the two must agree.
    """
    num_groups = reader.number("n_group", int, OF_CLASS)
    num_selected = reader.number("topk_group", int, OF_CLASS)
    names = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
    said = f"'n_group' {num_groups} and 'topk_group' {num_selected}"

    if num_experts % num_groups or num_selected > num_groups:
        reader.conflict(f"{said} do not fit {counted(num_experts, 'expert')}", *names)
        return None
    if num_selected == num_groups:
        return None
    if num_experts // num_groups < 2 or chosen > num_selected * (num_experts // num_groups):
        reader.conflict(
            f"{said} leave too few of {counted(num_experts, 'expert')} to select {chosen}", *names
        )
    if chosen // num_selected != 2:
        needed = "twice 'topk_group' (or one more)"
        reader.conflict(f"{said} with 'num_experts_per_tok' {chosen}: only {needed} is supported", *names)

    return num_groups, num_selected


def read_softmax_experts(
    reader: ConfigReader,
    num_hidden_layers: int,
    *,
    size_field: str = "moe_intermediate_size",
    shared_size_field: str | None = None,
) -> Experts:
    """Read the experts of a model without dense layers, whose routers normalize the selected weights.

    Args:
        size_field: The field with the feed-forward size of an expert.
        shared_size_field: The field with that of a shared expert with a gate; None: there is none.
    """
    num_experts, num_experts_per_tok = read_num_experts(reader)
    check_router_gradient(reader, num_experts_per_tok, norm_topk_prob=True)
    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=reader.number(size_field, int),
        shared_intermediate_size=reader.number(shared_size_field, int) if shared_size_field else 0,
        norm_topk_prob=True,
        layers=tuple(range(num_hidden_layers)),
        has_shared_gate=shared_size_field is not None,
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

    check_num_chosen(reader, chosen, name, num_experts)
    return num_experts, chosen


def check_num_chosen(reader: ConfigReader, chosen: int, name: str, num_experts: int) -> None:
    """Refuse a router that selects more experts than there are. `name` is the field of their number."""
    if chosen > num_experts:
        problem = f"'num_experts_per_tok' {chosen} is greater than {name!r} {num_experts}"
        reader.conflict(problem, "num_experts_per_tok", name)


def check_router_gradient(reader: ConfigReader, num_experts_per_tok: int, norm_topk_prob: bool) -> None:
    """Refuse a router that selects one expert with normalized weights, because that weight is always one."""
    if num_experts_per_tok == 1 and norm_topk_prob:
        consequence = "the router would have no gradient"
        reader.conflict(
            f"'num_experts_per_tok' is 1 and 'norm_topk_prob' normalizes the weights: {consequence}",
            "num_experts_per_tok",
            "experts_per_token",
        )


def _are_sparse(architecture: Architecture) -> set[bool]:
    return {is_sparse(architecture, layer) for layer in range(architecture.num_hidden_layers)}


# What SGLang's mixture-of-experts classes, if a model has experts, would compute differently.
SGLANG_DIFFERENCES: Mapping[str, Callable[[Architecture], bool]] = {
    "dense layers between its sparse ones": lambda architecture: _are_sparse(architecture) == {False, True},
    "a tied embedding": lambda architecture: (
        True in _are_sparse(architecture) and architecture.tie_word_embeddings
    ),
}
