"""Adapters against PEFT in float32, in every kind of layout: outputs, gradients, norms, and the model without them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.schema import OptimConfig, ParallelConfig, Recomputation, Recompute
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import (
    Settings,
    load_and_train,
    refused_load,
    same,
    stored_tensors,
    train_and_save,
)
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.lora_cases import (
    Adapted,
    Reference,
    Tensors,
    by_hand,
    by_peft,
    critic_by_hand,
    save_adapted,
    save_merged,
    weighted_batch,
)
from tests.unit.engine.rank_side import (
    ALL_LAYOUTS,
    EXPERT_LAYOUTS,
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
FULL = Recomputation(how=Recompute.full)
DENSE = ("TP1", "TP2", "TP2+SP", "PP2", "CP2", "DP2")
VOCABULARY = ("TP2+SP", "PP2", "DP2")
RECOMPUTED = ("TP2+SP", "PP2xVPP2")
EXPERTS = ("DP2xEP2", "TP2+SPxEP2", "TP2+SPxETP2")
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SAVED = ("embed_tokens", "lm_head")
SAVED_TENSORS = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
SOME = ("q_proj", "self_attn.o_proj", "up_proj")  # one projection of a fused layer, and not its neighbors


class Run(NamedTuple):
    outputs: Tensors
    base_outputs: Tensors
    gradients: Tensors
    grad_norm: float
    weights: Tensors


def run_engine(
    parallel: ParallelConfig,
    case: Adapted,
    batch: Tensors,
    keys: tuple[str, ...] = ("log_probs", "entropy"),
    **spec: Any,
) -> Run:
    """Run in a rank: a training step, and the scores before it with and without adapters."""
    groups = start(parallel)
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)
    part = take(batch, rows)
    micro_batches = deal(len(rows), 2)
    engine = build(
        groups,
        case.base,
        lora=case.lora,
        lora_path=case.adapter,
        optim=OptimConfig(),
        share_prompts=True,
        runs_base=True,
        **spec,
    )
    engine.forward_backward(part, micro_batches, weighted_sum(keys))
    gradients = hf_gradients(engine)
    outputs = join_rows(rows, engine.forward(part, micro_batches), num_rows)
    base_outputs = join_rows(rows, engine.forward(part, micro_batches, base=True), num_rows)
    return Run(outputs, base_outputs, gradients, engine.step().grad_norm, hf_weights(engine))


class Case(NamedTuple):
    adapted: Adapted
    folder: Path
    batch: Tensors
    reference: Reference


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Return a function that computes the reference of a family once."""

    @cache
    def made(family: str, targets: tuple[str, ...] = (), saved: tuple[str, ...] = ()) -> Case:
        folder = tmp_path_factory.mktemp(family)
        adapted = save_adapted(family, folder, targets, saved)
        batch = weighted_batch()
        has_experts = family.endswith("_moe") or (family == "deepseek_v3" and not targets)
        reference = by_hand(adapted, folder / "merged", batch) if has_experts else by_peft(adapted, batch)
        return Case(adapted, folder, batch, reference)

    return made


def compare(case: Case, reference: Reference, runs: list[Run]) -> None:
    gradients = merge([run.gradients for run in runs])
    frozen = {name: value for name, value in gradients.items() if name not in reference.gradients}
    assert not any(value.any() for value in frozen.values())
    assert_same(
        {name: gradients[name] for name in reference.gradients}, reference.gradients, GRADIENT_TOLERANCE
    )
    for run in runs:
        for key, value in reference.outputs.items():
            assert max_difference(run.outputs[key], value) <= OUTPUT_TOLERANCE, key
            assert max_difference(run.base_outputs[key], reference.base_outputs[key]) <= OUTPUT_TOLERANCE
        assert run.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)


@pytest.mark.parametrize("layout", DENSE)
def test_dense_model_with_adapters_equals_peft(
    layout: str, case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    case = case_of("qwen2")
    parallel = ALL_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine, world_size=parallel.world_size, parallel=parallel, case=case.adapted, batch=case.batch
    )
    compare(case, case.reference, runs)


@pytest.mark.parametrize("layout", VOCABULARY)
@pytest.mark.parametrize("saved", [SAVED, SAVED[:1], SAVED[1:]])
def test_saved_modules_equal_peft(
    layout: str, saved: tuple[str, ...], case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    """They train in full, also under data parallelism; the base model has the original ones."""
    case = case_of("qwen2", (), saved)
    parallel = ALL_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine, world_size=parallel.world_size, parallel=parallel, case=case.adapted, batch=case.batch
    )
    assert set(case.reference.gradients) >= {SAVED_TENSORS[name] for name in saved}
    compare(case, case.reference, runs)


@pytest.mark.parametrize("layout", RECOMPUTED)
def test_recomputed_layers_keep_the_gradients_of_their_adapters(
    layout: str, case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    case = case_of("qwen3-tied", SOME)
    parallel = ALL_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        case=case.adapted,
        batch=case.batch,
        recomputation=FULL,
    )
    compare(case, case.reference, runs)


@pytest.mark.parametrize("layout", ["TP2+SPxEP2", "TP2+SPxETP2", "DP2xEP2"])
@pytest.mark.parametrize("family", ["deepseek_v3", "moonlight"])
def test_latent_attention_equals_peft(
    family: str, layout: str, case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    """Moonlight projects queries directly. PEFT has no adapters on transformers' fused experts."""
    case = case_of(family, LATENT)
    parallel = EXPERT_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine, world_size=parallel.world_size, parallel=parallel, case=case.adapted, batch=case.batch
    )
    assert any("kv_a_proj_with_mqa.lora_B" in name for name in case.reference.gradients)
    compare(case, case.reference, runs)


@pytest.mark.parametrize("layout", ["TP2+SPxEP2"])
def test_latent_attention_and_experts_equal_merged_ones(
    layout: str, case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    case = case_of("deepseek_v3")
    parallel = EXPERT_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine, world_size=parallel.world_size, parallel=parallel, case=case.adapted, batch=case.batch
    )
    compare(case, case.reference, runs)


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_with_adapters_equal_merged_ones(
    layout: str, case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    case = case_of("qwen2_moe")
    parallel = EXPERT_LAYOUTS[layout]
    runs = rank_pool.run(
        run_engine, world_size=parallel.world_size, parallel=parallel, case=case.adapted, batch=case.batch
    )
    compare(case, case.reference, runs)


def test_critic_trains_its_head(case_of: Callable[..., Case], rank_pool: RankPool) -> None:
    case = case_of("qwen2")
    base, reference = critic_by_hand(case.adapted, case.folder, case.batch)
    parallel = ALL_LAYOUTS["TP2+SP"]
    runs = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        case=case.adapted._replace(base=base),
        batch=case.batch,
        keys=("values",),
        head="value",
    )
    compare(case, reference, runs)


def test_initial_adapters_do_not_depend_on_the_layout(
    case_of: Callable[..., Case], rank_pool: RankPool
) -> None:
    case = case_of("qwen2")
    new = case.adapted._replace(adapter="")
    made = {}
    for layout in ("TP1", "TP2+SP", "PP2"):
        parallel = ALL_LAYOUTS[layout]
        runs = rank_pool.run(initial, world_size=parallel.world_size, parallel=parallel, case=new)
        made[layout] = merge(runs)
    for weights in made.values():
        assert weights.keys() == made["TP1"].keys()
        assert all(torch.equal(value, made["TP1"][name]) for name, value in weights.items())
    a = made["TP1"]["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert 0.9 / a.shape[1] ** 0.5 < float(a.abs().max()) <= 1 / a.shape[1] ** 0.5  # Kaiming with a = sqrt(5)
    assert not made["TP1"]["model.layers.0.self_attn.q_proj.lora_B.weight"].any()


@pytest.mark.parametrize("saved", [(), SAVED])
def test_resume_from_adapters_is_bitwise_identical(
    saved: tuple[str, ...], case_of: Callable[..., Case], rank_pool: RankPool, tmp_path: Path
) -> None:
    """In the layout that wrote them. Another layout holds the same state."""
    case = case_of("qwen2", (), saved)
    layout = ALL_LAYOUTS["TP2+SP"]
    settings = Settings(layout, case.adapted.base, lora=case.adapted.lora)
    folder = tmp_path / "actor"
    written = rank_pool.run(
        train_and_save,
        world_size=2,
        settings=settings._replace(lora_path=case.adapted.adapter),
        folder=folder,
        num_steps=2,
        num_after=1,
    )
    stored = stored_tensors(folder)
    whole = {name.removeprefix("optimizer.state.") for name in stored if ".lora." not in name}
    assert whole == {
        f"{prefix}{name}.weight"
        for prefix in ("", "exp_avg.", "exp_avg_sq.", "param.")
        for name in (("embedding.word_embeddings", "output_layer") if saved else ())
    }
    assert not any(value.isnan().any() for value in stored.values())

    again = rank_pool.run(
        load_and_train, world_size=2, settings=settings, folder=folder, num_steps=2, num_after=1
    )
    assert same([rank.at_save for rank in again], [rank.at_save for rank in written])
    assert [rank.after.losses for rank in again] == [rank.after.losses for rank in written]
    assert same([rank.after.state for rank in again], [rank.after.state for rank in written])

    rank_pool.run(
        load_and_train,
        world_size=2,
        settings=settings._replace(parallel=ALL_LAYOUTS["PP2"]),
        folder=folder,
        num_steps=2,
        num_after=0,
        again=tmp_path / "again",
    )
    copied = stored_tensors(tmp_path / "again")
    assert copied.keys() == stored.keys()
    assert all(torch.equal(copied[name], stored[name]) for name in stored)


def test_adapters_of_another_base_are_refused(
    case_of: Callable[..., Case], rank_pool: RankPool, tmp_path: Path
) -> None:
    case = case_of("qwen2")
    parallel = ALL_LAYOUTS["TP1"]
    settings = Settings(parallel, case.adapted.base, lora=case.adapted.lora)
    rank_pool.run(
        train_and_save, world_size=1, settings=settings, folder=tmp_path / "actor", num_steps=0, num_after=0
    )
    other = settings._replace(folder=str(save_merged(case.adapted, tmp_path / "merged")))
    (line,) = rank_pool.run(refused_load, world_size=1, settings=other, folder=tmp_path / "actor")
    assert "its adapters were trained on other frozen weights than those of model.path" in line


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_a_base_with_another_vocabulary_is_refused_if_it_is_the_reference(
    layout: str, case_of: Callable[..., Case], rank_pool: RankPool, tmp_path: Path
) -> None:
    """The embedding and the output layer are in the checkpoint, but their original weights are not."""
    case = case_of("qwen2", (), SAVED)
    of_actor = Settings(ALL_LAYOUTS[layout], case.adapted.base, lora=case.adapted.lora, runs_base=True)
    rank_pool.run(
        train_and_save, world_size=2, settings=of_actor, folder=tmp_path / "actor", num_steps=1, num_after=0
    )
    other = Path(shutil.copytree(case.adapted.base, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][5, 3] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    changed = of_actor._replace(folder=str(other), parallel=ALL_LAYOUTS["TP1"])
    (line,) = rank_pool.run(refused_load, world_size=1, settings=changed, folder=tmp_path / "actor")
    assert "the reference of its run had another embedding or output layer than model.path" in line
    for same_reference in (of_actor, changed._replace(runs_base=False)):
        rank_pool.run(
            load_and_train,
            world_size=same_reference.parallel.world_size,
            settings=same_reference,
            folder=tmp_path / "actor",
            num_steps=1,
            num_after=0,
        )


def initial(parallel: ParallelConfig, case: Adapted) -> Tensors:
    """Run in a rank: return the adapters of a new model."""
    engine = build(start(parallel), case.base, lora=case.lora, optim=OptimConfig())
    return {name: value for name, value in hf_weights(engine).items() if ".lora_" in name}
