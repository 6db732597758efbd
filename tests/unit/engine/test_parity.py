"""The engine against Hugging Face in float32: every family in every layout, forward and backward, policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch.metrics import values_of
from megarl.config.schema import ExpertsConfig, OptimConfig, ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from tests.families import RENAMED_FAMILIES
from tests.ranks import RankPool
from tests.unit.engine.comparison import assert_same, max_difference, relative_differences
from tests.unit.engine.models import (
    EXPERT_FAMILIES,
    FAMILIES,
    IDLE_EXPERT,
    VARIANTS,
    gradients_of,
    load_critic,
    load_lm,
    make_batch,
    make_image_batch,
    make_long_batch,
    record_routers,
    reference_logits,
    reference_values,
    router_losses,
    save_critic,
    save_model,
    scores_of,
    with_one_prompt,
)
from tests.unit.engine.parity_table import DOCUMENT, Comparison, Differences, documented, record
from tests.unit.engine.rank_side import (
    ALL_LAYOUTS,
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXED_LAYOUTS,
    UNEVEN_LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    hf_weights,
    join_rows,
    merge,
    replica_rows,
    start,
    take,
    weighted_sum,
)

OUTPUT_TOLERANCE = 1e-5  # absolute
GRADIENT_TOLERANCE = 1e-4  # relative to the tensor's norm
NORM_TOLERANCE = 1e-5  # relative
GRADIENT_FLOOR = 1e-5  # relative to the whole gradient's norm: below it, a tensor is noise
TEMPERATURE = 0.7
# Large enough to dominate the routers' gradients.
AUX_COEFFICIENT = 100.0
Z_COEFFICIENT = 10.0


class Case(NamedTuple):
    """One engine to compare: its folder and its outputs."""

    folder: str
    spec: dict[str, Any]
    keys: tuple[str, ...]


CASES = {
    "policy": Case("lm", {"share_prompts": True}, ("log_probs", "entropy")),
    "policy with experts": Case(
        "lm",
        {
            "share_prompts": True,
            "routers": ExpertsConfig(aux_loss_coefficient=AUX_COEFFICIENT, z_loss_coefficient=Z_COEFFICIENT),
        },
        ("log_probs", "entropy"),
    ),
    "policy at a temperature": Case("lm", {"temperature": TEMPERATURE}, ("log_probs", "entropy")),
    "critic": Case("critic", {"head": "value", "share_prompts": True}, ("values",)),
    "critic with frozen routers": Case(
        "critic",
        {"head": "value", "share_prompts": True, "routers": ExpertsConfig(freeze_router=True)},
        ("values",),
    ),
    "critic without a stored head": Case("lm", {"head": "value"}, ("values",)),
}


# The other differences do not concern layers.
OF_EXPERTS = ("policy with experts", "critic with frozen routers")
OF_DENSE = [name for name in CASES if name not in OF_EXPERTS]
# What a family's layers concern: a temperature, and a head that is not stored, come after them, so one family
# with a tied embedding and one without show these in every layout.
OF_LAYERS = ("policy", "critic")
WITH_EVERY_CASE = ("qwen3-tied", "llama2")
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "mlp.router.bias", "mixer.gate.weight")
WITH_LOGITS = ("policy", "policy with experts")

# Every layout with a bias of q, k and v or none, a norm of q and k or none, and an embedding tied or not. The
# other families have nothing that a layout treats differently.
IN_EVERY_LAYOUT = ("llama-tied", "qwen2-tied", "qwen3-tied", "qwen2", "llama2")
IN_TWO_LAYOUTS = ("TP2+SP", "PP2")
# The tower is on one stage, and ranks that share rows insert the features of their own tokens.
WITH_IMAGES = {"qwen3_vl-tied": ("TP1", "TP2+SP", "PP2", "DP2", "CP2")}
IN_ONE_LAYOUT = {f"{family}-tied": ("TP2+SP",) for family in RENAMED_FAMILIES}
OF_FAMILY = WITH_IMAGES | IN_ONE_LAYOUT
FAMILY_CASES: list[Comparison] = [
    (family, layout)
    for family in FAMILIES
    for layout in (LAYOUTS if family in IN_EVERY_LAYOUT else OF_FAMILY.get(family, IN_TWO_LAYOUTS))
]
# Windows, two rotary embeddings and recurrent states also concern ranks that share rows.
FAMILY_CASES += [("olmo3-tied", "CP2"), ("gemma3_text-tied", "CP2"), ("qwen3_5-tied", "CP2")]
FAMILY_CASES += [("exaone4-tied", "CP2")]
REPLICA_CASES: list[Comparison] = [
    ("qwen3-tied", layout) for layout in (*MIXED_LAYOUTS, *CONTEXT_LAYOUTS, *UNEVEN_LAYOUTS)
]
VARIANT_CASES: list[Comparison] = [
    (variant, layout) for variant in VARIANTS for layout in ("TP1", "TP2+SP", "CP2")
]
# Latent attention has gradients of its own in every kind of layout. Another family has all layouts.
NUM_EXPERT_LAYOUTS = {"qwen3_moe": len(EXPERT_LAYOUTS), "deepseek_v3": 5, "glm4_moe": 5, "qwen3_next": 5}
NUM_EXPERT_LAYOUTS |= {"qwen3_5_moe": 5, "qwen3_vl_moe": 5, "deepseek_v32": 5, "glm_moe_dsa": 1}
NUM_EXPERT_LAYOUTS |= dict.fromkeys(RENAMED_FAMILIES, 1)
NUM_EXPERT_LAYOUTS |= {"minimax_m2": 5, "nemotron_h": len(EXPERT_LAYOUTS)}
EXPERT_CASES: list[Comparison] = [
    (family, layout)
    for family in EXPERT_FAMILIES
    for layout in list(EXPERT_LAYOUTS)[: NUM_EXPERT_LAYOUTS.get(family, 2)]
]
# Its attention is another one, so stages and ranks that share rows have to show that it is theirs too.
EXPERT_CASES += [("gpt_oss", "PP2"), ("gpt_oss", "CP2xEP2")]
EXPERT_CASES += [("deepseek_v32", "CP2xTP2+SP"), ("deepseek_v32", "PP2xDP2xEP2")]
EXPERT_CASES += [("glm-shared", layout) for layout in ("PP2", "CP2xEP2")]
EVERY_CASE = [*FAMILY_CASES, *REPLICA_CASES, *VARIANT_CASES, *EXPERT_CASES]


class Compared(NamedTuple):
    """Outputs (B, R, ...), and the gradients of their weighted sum by Hugging Face names, with their norm.

    For an engine, also the weights after a step.
    """

    outputs: Tensors
    gradients: Tensors
    grad_norm: float
    weights: Tensors = {}
    routers: dict[str, float] = {}


def weighted_batch(architecture: Architecture) -> dict[str, Any]:
    """Add a weight per token and output, so that no two gradients are equal by symmetry.

    In every layout, rows with one prompt share a micro-batch.
    """
    if architecture.vision is not None:
        batch = make_image_batch()
    else:
        texts = make_batch() if architecture.indexer is None else make_long_batch()
        batch = with_one_prompt(texts, (0, 4, 2), (1, 5))
    generator = torch.Generator().manual_seed(2)

    for key in ("log_probs", "entropy", "values"):
        batch[f"weight/{key}"] = (
            torch.randn(batch["response_mask"].shape, generator=generator) * batch["response_mask"]
        )

    return batch


def with_logits(engine: Any) -> Any:
    """Make `engine` return logits too, since it never creates those of a whole micro-batch itself.

    Each rank that shares rows contributes those of its tokens.
    """
    score = engine.score

    def scores(micro_batch: Any, hidden: Tensor, *arguments: Any) -> Tensors:
        model = engine.models[-1]
        part = model.output_hidden(hidden)[micro_batch.predictors] @ model.output_weight().T
        parts = [torch.empty_like(part) for _ in range(engine.groups.parallel.tensor_parallel_size)]
        dist.all_gather(parts, part, group=engine.groups.tensor)
        logits = torch.cat(parts, -1)[:, : engine.spec.architecture.vocab_size]
        whole = logits.new_zeros(len(micro_batch.cells), logits.shape[1])
        whole[micro_batch.inputs.scored] = logits
        dist.all_reduce(whole, group=engine.groups.context)

        return {**score(micro_batch, hidden, *arguments), "logits": whole}

    engine.score = scores
    return engine


def run_engine(
    parallel: ParallelConfig, folders: dict[str, str], batch: Tensors, names: Collection[str]
) -> dict[str, Compared]:
    """Run in a rank: run the named cases.

    Outputs are those of the whole batch; gradients are those of the rank's stage.
    """
    groups = start(parallel)
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)
    part = take(batch, rows)
    micro_batches = deal(len(rows), 2)
    results = {}

    for name, case in ((name, CASES[name]) for name in names):
        engine = build(groups, folders[case.folder], optim=OptimConfig(), **case.spec)
        engine.forward_backward(part, micro_batches, weighted_sum(case.keys))
        gradients = hf_gradients(engine)
        routers = values_of(engine.router_metrics) if name in OF_EXPERTS else {}
        if name in WITH_LOGITS:
            engine = with_logits(engine)
        outputs = join_rows(rows, engine.forward(part, micro_batches), num_rows)
        results[name] = Compared(outputs, gradients, engine.step().grad_norm, hf_weights(engine), routers)

    return results


def run_reference(folders: dict[str, str], batch: Tensors, names: Collection[str]) -> dict[str, Compared]:
    """Run the same cases one row at a time with Hugging Face."""
    results = {}
    for name, case in ((name, CASES[name]) for name in names):
        if case.spec.get("head") == "value":
            model: torch.nn.Module = load_critic(Path(folders[case.folder]))
            outputs = {"values": reference_values(model, batch)}
        else:
            model = load_lm(Path(folders[case.folder]))
            recorded = record_routers(model)
            logits = reference_logits(model, batch)
            outputs = scores_of(logits / case.spec.get("temperature", 1.0), batch)
        loss = sum((outputs[key] * batch[f"weight/{key}"]).sum() for key in case.keys)
        routers = {}
        if "routers" in case.spec and case.spec["routers"].aux_loss_coefficient:
            losses = router_losses(recorded, read_architecture(folders[case.folder]))
            loss = loss + len(recorded) * (AUX_COEFFICIENT * losses.aux_loss + Z_COEFFICIENT * losses.z_loss)
            routers = {
                "aux_loss": losses.aux_loss.item(),
                "z_loss": losses.z_loss.item(),
                "expert_share/max": losses.largest_share,
            }
        loss.backward()
        for parameter in (value for key, value in model.named_parameters() if key.endswith(ROUTERS)):
            if "frozen" in name:
                parameter.grad.zero_()
        gradients = gradients_of(model)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        if name in WITH_LOGITS:
            outputs["logits"] = logits
        results[name] = Compared(
            {key: value.detach() for key, value in outputs.items()}, gradients, float(norm), routers=routers
        )

    return results


class Reference(NamedTuple):
    family: str
    folders: dict[str, str]
    batch: Tensors
    results: dict[str, Compared]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return a function that computes the reference of a family once, in whatever order the tests come."""

    @cache
    def computed(family: str) -> Reference:
        folder = tmp_path_factory.mktemp(family)
        save_model(family, folder / "lm")
        save_critic(folder / "lm", folder / "critic")
        folders = {key: str(folder / key) for key in ("lm", "critic")}
        batch = weighted_batch(read_architecture(folders["lm"]))
        names = OF_DENSE if family in WITH_EVERY_CASE else OF_LAYERS
        if family in EXPERT_FAMILIES:
            names = OF_EXPERTS

        return Reference(family, folders, batch, run_reference(folders, batch, names))

    return computed


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, reference_of: Callable[[str], Reference]) -> Reference:
    return reference_of(request.param)


def compared(cases: Sequence[Comparison]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("reference", "layout"), cases, indirect=["reference"])


@compared(FAMILY_CASES)
def test_engine_gives_what_hugging_face_gives(reference: Reference, layout: str, rank_pool: RankPool) -> None:
    compare(reference, layout, rank_pool)


@compared(REPLICA_CASES)
def test_replicas_of_a_cut_model_and_ranks_that_share_rows(
    reference: Reference, layout: str, rank_pool: RankPool
) -> None:
    compare(reference, layout, rank_pool)


@compared(VARIANT_CASES)
def test_variants_that_no_family_has_by_default(
    reference: Reference, layout: str, rank_pool: RankPool
) -> None:
    compare(reference, layout, rank_pool)


@compared(EXPERT_CASES)
def test_experts(reference: Reference, layout: str, rank_pool: RankPool) -> None:
    compare(reference, layout, rank_pool)


def test_the_table_has_the_differences_of_every_comparison() -> None:
    rows = documented()
    assert list(rows) == EVERY_CASE, (
        f"{DOCUMENT} has other comparisons: MEGARL_WRITE_PAGES=1 python -m pytest {__file__} writes them"
    )
    worst = Differences(*map(max, zip(*rows.values(), strict=True)))
    assert worst.outputs <= OUTPUT_TOLERANCE
    assert worst.gradients <= GRADIENT_TOLERANCE
    assert worst.grad_norm <= NORM_TOLERANCE


# The rows of the other have so many tokens that each expert has some.
@pytest.mark.parametrize(
    "reference", [name for name in EXPERT_FAMILIES if name != "deepseek_v32"], indirect=True
)
def test_one_expert_has_no_tokens(reference: Reference) -> None:
    """This is the case in some layers; most experts have tokens."""
    gradients = reference.results["policy with experts"].gradients
    gradients = {
        own: part
        for name, value in gradients.items()
        if ".experts." in name
        for own, part in separate_experts(name, value)
    }
    idle = {name: float(value.norm()) == 0 for name, value in gradients.items()}
    assert any(is_idle for name, is_idle in idle.items() if f".experts.{IDLE_EXPERT}." in name)
    assert sum(idle.values()) < len(idle) / 3


def separate_experts(name: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """Return the gradient of each expert, of a tensor that may hold all experts."""
    before, _, after = name.partition(".experts.")
    if after.partition(".")[0].isdigit():
        return [(name, gradient)]
    return [(f"{before}.experts.{expert}.{after}", part) for expert, part in enumerate(gradient)]


def compare(reference: Reference, layout: str, rank_pool: RankPool) -> None:
    """Compare logits, log-probs, entropy and values; every parameter's gradient; and the norm.

    The norm requires that shards are distinguished from copies.
    """
    parallel = {**ALL_LAYOUTS, **EXPERT_LAYOUTS, **UNEVEN_LAYOUTS}[layout]
    measured = []
    ranks = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        folders=reference.folders,
        batch=reference.batch,
        names=list(reference.results),
    )
    for name, want in reference.results.items():
        gradients = merge([rank[name].gradients for rank in ranks])
        floor = GRADIENT_FLOOR * want.grad_norm
        assert_same(gradients, want.gradients, GRADIENT_TOLERANCE, floor=floor)
        measured.append(
            Differences(
                max(
                    max_difference(rank[name].outputs[key].view_as(value), value)
                    for rank in ranks
                    for key, value in want.outputs.items()
                ),
                max(relative_differences(gradients, want.gradients, floor).values()),
                max(abs(rank[name].grad_norm / want.grad_norm - 1) for rank in ranks),
            )
        )
        weights = merge([rank[name].weights for rank in ranks])
        assert weights.keys() == gradients.keys()  # and copies are bitwise identical
        if "frozen" in name:
            stored = load_file(Path(reference.folders[CASES[name].folder]) / "model.safetensors")
            routers = [
                key
                for key in weights
                if key.endswith((*ROUTERS, ".block_sparse_moe.gate.weight", ".router.gate.weight"))
            ]
            assert routers
            assert all(torch.equal(weights[key], stored[key]) for key in routers)
            norms = (".language_model.norm.weight", "model.norm.weight", ".norm_f.weight")
            (norm,) = (key for key in weights if key.endswith(norms))
            assert not torch.equal(weights[norm], stored[norm])
        for rank in ranks:
            assert rank[name].outputs.keys() == want.outputs.keys()
            for key, value in want.outputs.items():
                assert max_difference(rank[name].outputs[key].view_as(value), value) <= OUTPUT_TOLERANCE, (
                    name,
                    key,
                )
            assert rank[name].grad_norm == pytest.approx(want.grad_norm, rel=NORM_TOLERANCE), name
            assert {key: rank[name].routers[key] for key in want.routers} == pytest.approx(
                want.routers, rel=1e-5
            ), name

    record(
        (reference.family, layout),
        Differences(*map(max, zip(*measured, strict=True))),
        every_comparison=EVERY_CASE,
    )


def test_reference_is_not_trivial(reference: Reference) -> None:
    """Rule out what would hide a mistake: nearly uniform log-probs, values near zero, a parameter without a gradient."""
    mask = reference.batch["response_mask"]
    assert float(reference.results["policy"].outputs["log_probs"][mask].std()) > 0.3
    assert float(reference.results["critic"].outputs["values"][mask].std()) > 0.5

    for name in ("policy", "critic"):
        result = reference.results[name]
        assert all(
            float(gradient.norm()) > 10 * GRADIENT_FLOOR * result.grad_norm
            for gradient in result.gradients.values()
        ), name

    if "critic without a stored head" in reference.results:
        assert not reference.results["critic without a stored head"].outputs["values"].any()
