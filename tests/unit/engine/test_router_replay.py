"""Experts selected before a pass, by the trainer's own scoring or by an engine.

Hugging Face represents the engine; its routers send one token in a hundred elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS, route_dtype
from megarl.config.schema import (
    OptimConfig,
    ParallelConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
    RoutingReplay,
)
from megarl.models.architecture import Experts
from megarl.models.families import read_architecture
from tests.families import RENAMED_FAMILIES, SPARSE_FAMILIES, example_architecture
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.models import (
    gradients_of,
    load_lm,
    make_batch,
    make_image_batch,
    reference_logits,
    save_model,
    scores_of,
    with_one_prompt,
)
from tests.unit.engine.rank_side import (
    EXPERT_LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    join_rows,
    merge,
    replica_rows,
    start,
    take,
    weighted_sum,
)

NUM_ROWS = 11
# The first token of this row's response goes elsewhere, in every layer.
ROW = 0
LAYOUTS = {
    **EXPERT_LAYOUTS,
    "PP2xVPP2": ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2),
    "CP2xPP2": ParallelConfig(context_parallel_size=2, pipeline_parallel_size=2),
}
FULL = Recomputation(Recompute.full)
OF_EXPERTS = Recomputation(Recompute.selective, (RecomputeModule.mlp,))


class Routed(NamedTuple):
    """Hugging Face's results for the rows. `routes`: for each row (tokens - 1, L, K), flattened."""

    log_probs: Tensor
    gradients: Tensors
    routes: list[Tensor]


class Replayed(NamedTuple):
    """An engine's results, by its own routes and by Hugging Face's."""

    own: Tensors
    again: Tensors  # with the routes of `own`
    given: Tensors
    own_gradients: Tensors
    again_gradients: Tensors
    given_gradients: Tensors
    routes: dict[int, Tensor]  # those of `own`, by row of the batch


def weighted_batch(*, has_images: bool) -> dict[str, Any]:
    batch = (
        make_image_batch(NUM_ROWS) if has_images else with_one_prompt(make_batch(NUM_ROWS), (3, 4, 2), (1, 5))
    )
    weights = torch.randn(batch["response_mask"].shape, generator=torch.Generator().manual_seed(2))
    return {**batch, "weight/log_probs": weights * batch["response_mask"]}


@contextmanager
def watched_routers(
    model: PreTrainedModel, experts_of_model: Experts, disturbed_place: int | None
) -> Iterator[list[list[Tensor]]]:
    """Return the experts of each layer, (tokens, K), for each row; row ROW is disturbed at a place."""
    rows: list[list[Tensor]] = []
    ends = ("mlp.gate", "mlp.router", "mixer.gate")
    routers = [module for name, module in model.named_modules() if name.endswith(ends)]

    def watch(router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, scores, experts = outputs
        if router is routers[0]:
            rows.append([])

        if disturbed_place is not None and len(rows) == ROW + 1:
            experts = experts.clone()
            scores = scores.clone()
            # Select the next best experts. A selection bias belongs to routers with sigmoid scores.
            bias = inputs[1] if len(inputs) > 1 else getattr(router, "e_score_correction_bias", None)
            logit = logits[disturbed_place]
            own = logit.softmax(-1) if bias is None else logit.sigmoid()
            chosen = own if bias is None else own + bias
            experts[disturbed_place] = chosen.topk(2 * experts.shape[1]).indices[experts.shape[1] :]
            own = own[experts[disturbed_place]]
            own = own / own.sum() if experts_of_model.norm_topk_prob else own
            scores[disturbed_place] = own * experts_of_model.scaling_factor

        rows[-1].append(experts)
        return logits, scores, experts

    handles = [router.register_forward_hook(watch) for router in routers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def run_reference(folder: Path, batch: dict[str, Any], disturbed: bool) -> Routed:
    model = load_lm(folder)
    experts = read_architecture(str(folder)).experts
    assert experts is not None
    prompt = batch["attention_mask"][ROW, : -batch["response_mask"].shape[1]]
    place = int(prompt.sum()) if disturbed else None
    with watched_routers(model, experts, place) as rows:
        log_probs = scores_of(reference_logits(model, batch), batch)["log_probs"]
    (log_probs * batch["weight/log_probs"]).sum().backward()
    routes = [torch.stack(layers, dim=1)[:-1].flatten().to(route_dtype(8)) for layers in rows]
    return Routed(log_probs.detach(), gradients_of(model), routes)


class Setting(NamedTuple):
    folder: str
    batch: dict[str, Any]
    plain: Routed
    disturbed: Routed


@pytest.fixture(scope="module")
def setting_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Setting]:
    """Return a function that computes the reference of a family once, in whatever order the tests come."""

    @cache
    def computed(family: str) -> Setting:
        save_model(family, folder := tmp_path_factory.mktemp(family))
        batch = weighted_batch(has_images=example_architecture(family).vision is not None)
        plain, disturbed = (run_reference(folder, batch, disturbed) for disturbed in (False, True))
        return Setting(str(folder), batch, plain, disturbed)

    return computed


@pytest.fixture(scope="module", params=SPARSE_FAMILIES)
def setting(request: pytest.FixtureRequest, setting_of: Callable[[str], Setting]) -> Setting:
    return setting_of(request.param)


def routes_of_all(rows: list[int], outputs: dict[str, Any] | None) -> dict[int, Tensor]:
    """Return the routes by row on every rank, as a driver would collect and distribute them.

    The last stage has them.
    """
    gathered = gather(
        None if outputs is None else dict(zip(rows, outputs[ROUTED_EXPERTS].each(), strict=True))
    )
    return {row: routes for part in gathered if part is not None for row, routes in part.items()}


def run_engine(
    parallel: ParallelConfig,
    folder: str,
    batch: dict[str, Any],
    routes: list[Tensor],
    recomputation: Recomputation,
) -> Replayed:
    """Run in a rank: run. Outputs are those of the whole batch; gradients are those of the rank's stage."""
    groups = start(parallel)
    rows = replica_rows(groups, NUM_ROWS)
    part = take(batch, rows)
    micro_batches = deal(len(rows), 2)
    plain, replaying = (
        build(
            groups,
            folder,
            optim=OptimConfig(),
            share_prompts=True,
            recomputation=recomputation,
            routing_replay=replay,
        )
        for replay in (RoutingReplay.off, RoutingReplay.trainer)
    )

    def outputs(engine: Any, columns: dict[str, Any]) -> Tensors:
        scores = engine.forward(columns, micro_batches)
        tensors = (
            None if scores is None else {key: value for key, value in scores.items() if key != ROUTED_EXPERTS}
        )
        return join_rows(rows, tensors, NUM_ROWS)

    def gradients(engine: Any, columns: dict[str, Any]) -> Tensors:
        engine.forward_backward(columns, micro_batches, weighted_sum(("log_probs",)))
        return hf_gradients(engine)

    own = outputs(plain, part)
    chosen = routes_of_all(rows, replaying.forward(part, micro_batches))
    column = RaggedTensor.of_rows([chosen[row] for row in rows], route_dtype(8))
    given = RaggedTensor.of_rows([routes[row] for row in rows], route_dtype(8))
    again = {**part, ROUTED_EXPERTS: column}
    by_given = {**part, ROUTED_EXPERTS: given}
    cut = RaggedTensor.packed_rows(given.flat(), given.lengths - 1)

    for engine, columns, said in (
        (replaying, part, r"no routed_experts, which actor\.old_log_probs\(batch, step\) returns"),
        (
            replaying,
            {**part, ROUTED_EXPERTS: cut},
            r"row \d+ of the batch: routed_experts has \d+ numbers of torch\.uint8, but its \d+ tokens",
        ),
        (plain, again, r"has routed_experts, but engine\.routing_replay is off"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.forward_backward(columns, micro_batches, weighted_sum(("log_probs",)))

    return Replayed(
        own=own,
        again=outputs(replaying, again),
        given=outputs(replaying, by_given),
        own_gradients=gradients(plain, part),
        again_gradients=gradients(replaying, again),
        given_gradients=gradients(replaying, by_given),
        routes=chosen,
    )


CASES = [
    ("qwen3_moe", "CP2xEP2", FULL),
    ("qwen2_moe", "PP2xVPP2", FULL),
    ("qwen2_moe", "TP2+SPxEP2", OF_EXPERTS),
    ("qwen3_moe", "CP2xPP2", OF_EXPERTS),
]
CASES += [
    (family, "TP2+SPxEP2", OF_EXPERTS)
    for family in SPARSE_FAMILIES
    if family not in ("qwen2_moe", "qwen3_moe", *RENAMED_FAMILIES)
]


@pytest.mark.parametrize(
    ("setting", "layout", "recomputation"),
    CASES,
    indirect=["setting"],
    ids=lambda value: value.how.value if isinstance(value, Recomputation) else value,
)
def test_routes_are_replayed(
    setting: Setting, layout: str, recomputation: Recomputation, rank_pool: RankPool
) -> None:
    """Results with the engine's own routes are bitwise identical.

    With those of another engine, whose routers send a token elsewhere, outputs and gradients are that
    engine's.
    """
    ranks: list[Replayed] = rank_pool.run(
        run_engine,
        world_size=LAYOUTS[layout].world_size,
        parallel=LAYOUTS[layout],
        folder=setting.folder,
        batch=setting.batch,
        routes=setting.disturbed.routes,
        recomputation=recomputation,
    )
    experts = read_architecture(setting.folder).experts
    assert experts is not None
    of_token = (-1, experts.num_experts_per_tok)
    for rank in ranks:
        for row, routes in enumerate(setting.plain.routes):
            assert torch.equal(
                rank.routes[row].view(of_token).sort().values, routes.view(of_token).sort().values
            ), row
        assert torch.equal(rank.again["log_probs"], rank.own["log_probs"])
        assert max_difference(rank.given["log_probs"], setting.disturbed.log_probs) <= 1e-5
        assert (
            float(
                (rank.own["log_probs"] - setting.disturbed.log_probs)[setting.batch["response_mask"]]
                .abs()
                .mean()
            )
            > 1e-3
        )
        for name, gradient in rank.own_gradients.items():
            assert torch.equal(rank.again_gradients[name], gradient), name

    assert_same(
        merge([rank.given_gradients for rank in ranks]),
        setting.disturbed.gradients,
        1e-4,
        floor=1e-5 * norm(setting.disturbed),
    )


def norm(of: Routed) -> float:
    return float(torch.stack([gradient.norm() for gradient in of.gradients.values()]).norm())


def test_a_token_in_a_hundred_matters(setting: Setting) -> None:
    """Rule out what would hide a mistake. Later tokens of its row go elsewhere too, as in an engine."""
    differ = [
        not torch.equal(*rows) for rows in zip(setting.plain.routes, setting.disturbed.routes, strict=True)
    ]
    assert differ == [row == ROW for row in range(NUM_ROWS)]
    assert 90 < int(setting.batch["attention_mask"].sum()) < 200  # prompts with images are longer
    changed = {
        name: float((value - setting.disturbed.gradients[name]).norm()) / norm(setting.plain)
        for name, value in setting.plain.gradients.items()
    }
    assert max(changed.values()) > 1e-3


class Bypassed(NamedTuple):
    """How many calls of a fused router there were, and what each pass of an engine said."""

    num_calls: int
    said: list[str]


def run_bypassed(folder: str, batch: dict[str, Any], is_fused: bool) -> Bypassed:
    """Run in a rank: run passes in which routers do not ask for routes.

    Args:
        folder: The model.
        batch: Its rows.
        is_fused: Whether all routers are fused, by Megatron's option and a kernel that computes the same
            unfused. Otherwise a single router asks nobody.
    """
    from megatron.core.transformer.moe import moe_utils

    kernel = mock.Mock(side_effect=moe_utils.topk_routing_with_score_function)
    groups = start(ParallelConfig())
    engine = build(groups, folder, optim=OptimConfig(), routing_replay=RoutingReplay.trainer)
    batch = take(batch, replica_rows(groups, NUM_ROWS))
    micro_batches = deal(NUM_ROWS, 2)
    scores = engine.forward(batch, micro_batches)
    assert scores is not None
    given = {**batch, ROUTED_EXPERTS: scores[ROUTED_EXPERTS]}
    routers = [layer.mlp.router for model in engine.models for layer in model.decoder.layers]
    if is_fused:
        for router in routers:
            router.config.moe_router_fusion = True
    else:
        routers[-1].router_replay = None
    said = []

    with (
        mock.patch.object(moe_utils, "HAVE_TE", new=True),
        mock.patch.object(moe_utils, "fused_topk_with_score_function", new=kernel),
    ):
        for run in (
            lambda: engine.forward(batch, micro_batches),
            lambda: engine.forward(given, micro_batches),
            lambda: engine.forward_backward(given, micro_batches, weighted_sum(("log_probs",))),
        ):
            with pytest.raises(RuntimeError) as error:
                run()
            said.append(str(error.value))

    return Bypassed(kernel.call_count, said)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "one router"])
def test_a_router_that_does_not_ask_for_routes_is_an_error(
    setting_of: Callable[[str], Setting], is_fused: bool, rank_pool: RankPool
) -> None:
    """Routes would be ignored, or empty, without a sign: in scoring, in scoring with routes, and in training."""
    setting = setting_of("qwen3_moe")
    (rank,) = rank_pool.run(
        run_bypassed, world_size=1, folder=setting.folder, batch=setting.batch, is_fused=is_fused
    )
    assert bool(rank.num_calls) == is_fused
    assert len(rank.said) == 3
    for said in rank.said:
        expected = (
            "4 of 4 layers with experts (first: number 0"
            if is_fused
            else "1 of 4 layers with experts (first: number 3"
        )
        assert expected in said
        assert "moe_router_fusion" in said
