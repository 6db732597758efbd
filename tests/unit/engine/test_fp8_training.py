"""Train with products in FP8, emulated in stubs of Transformer Engine, and compare with transformers.

Both emulations round to float8 whatever the last bits say, so an element at a bound between two values may
be rounded to either of them. Differences are therefore compared with the effect of FP8 itself.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megarl.config.layers import find_transformer_engine
from megarl.config.schema import OptimConfig, ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.fp8_products import (
    BLOCKWISE,
    multiply_in_fp8,
    save_model_of_whole_blocks,
    stubs_in_fp8,
)
from tests.unit.engine.models import gradients_of, load_lm, make_batch, reference_logits, scores_of
from tests.unit.engine.rank_side import (
    LAYOUTS,
    Tensors,
    build,
    hf_gradients,
    start,
    unpadded,
    weighted_sum,
)

KEYS = ("log_probs",)
MICRO_BATCHES = [[0, 3, 2], [1, 4, 5, 6]]
SHARE_OF_EFFECT = 0.1


class Trained(NamedTuple):
    outputs: torch.Tensor
    gradients: Tensors
    tokens: list[int]
    kept: tuple[int, ...] = ()  # weights in FP8, after the passes and after the weights have been offloaded


def batch_with_weights() -> Tensors:
    batch = make_batch()
    generator = torch.Generator().manual_seed(2)
    random = torch.randn(batch["response_mask"].shape, generator=generator)
    return batch | {"weight/log_probs": random * batch["response_mask"]}


def with_transformers(folder: Path, *, in_fp8: bool) -> Trained:
    model = load_lm(folder)
    if in_fp8:
        multiply_in_fp8(model)
    batch = batch_with_weights()
    outputs = scores_of(reference_logits(model, batch).float(), batch)["log_probs"]
    (outputs * batch["weight/log_probs"]).sum().backward()
    return Trained(outputs.detach(), gradients_of(model), [])


def train(folder: Path, parallel: ParallelConfig) -> Trained:
    """Run in a rank."""
    groups = start(parallel)
    from megarl.engine import engine as engine_module
    from megarl.engine.offload import StatePart
    from tests.unit.engine import transformer_engine_stubs

    seen: list[int] = []
    transformer_engine_stubs.install(True)
    try:
        # The option requires CUDA, but the stubs do not.
        with mock.patch.object(engine_module, "require_supported"), stubs_in_fp8(seen):
            engine = build(groups, str(folder), optim=OptimConfig(), megatron=BLOCKWISE, share_prompts=True)
            batch = unpadded(batch_with_weights())
            outputs = engine.forward(batch, MICRO_BATCHES)
            engine.forward_backward(batch, MICRO_BATCHES, weighted_sum(KEYS))
    finally:
        transformer_engine_stubs.install(False)

    padded = torch.empty(0) if outputs is None else outputs["log_probs"].padded().detach()
    gradients = hf_gradients(engine)
    kept = num_kept(engine)
    engine.offload(StatePart.optimizer)
    assert num_kept(engine) == kept
    engine.offload(StatePart.parameters)
    return Trained(padded, gradients, seen, (kept, num_kept(engine)))


def num_kept(engine: Any) -> int:
    return sum(
        len(getattr(each, "_fp8_workspaces", ())) for model in engine.models for each in model.modules()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "lm"
    save_model_of_whole_blocks(folder)
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> tuple[Trained, Trained]:
    """Return the results in FP8 and in float32."""
    return with_transformers(folder, in_fp8=True), with_transformers(folder, in_fp8=False)


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP"])
def test_outputs_and_gradients_are_those_of_transformers_in_fp8(
    layout: str, rank_pool: RankPool, folder: Path, references: tuple[Trained, Trained]
) -> None:
    parallel = LAYOUTS[layout]
    ranks = rank_pool.run(train, world_size=parallel.world_size, folder=folder, parallel=parallel)
    want, exact = references
    mask = make_batch()["response_mask"].bool()

    outputs = next(rank.outputs for rank in ranks if rank.outputs.numel())
    effect = (want.outputs - exact.outputs)[mask].norm()
    assert effect > 1e-3
    share = float((outputs - want.outputs)[mask].norm() / effect)
    assert share < SHARE_OF_EFFECT

    gradients = {name: value for rank in ranks for name, value in rank.gradients.items()}
    assert gradients.keys() == want.gradients.keys()
    shares = {
        name: float((gradients[name] - gradient).norm() / (gradient - exact.gradients[name]).norm())
        for name, gradient in want.gradients.items()
    }
    assert max(shares.values()) < SHARE_OF_EFFECT, shares

    for rank in ranks:
        before, after = rank.kept
        assert before > 0
        assert after == 0

    # Every product has a multiple of the tokens that the recipe scales together.
    tokens = [count for rank in ranks for count in rank.tokens]
    assert tokens
    assert all(count % 128 == 0 for count in tokens)


def source_of(package: str, file: str) -> str:
    (folder,) = find_spec(package).submodule_search_locations  # pyrefly: ignore[missing-attribute]
    return (Path(folder) / file).read_text()


def test_transformer_engine_keeps_weights_under_the_name_that_is_dropped() -> None:
    modules = (find_transformer_engine() / "pytorch" / "module" / "base.py").read_text()
    assert "self._fp8_workspaces: Dict[str, QuantizedTensor] = {}" in modules


def test_megatron_pads_the_tokens_of_experts_without_an_option() -> None:
    """It uses Transformer Engine's padding, with Transformer Engine's own multiple."""
    experts = source_of("megatron.core", "transformer/moe/experts.py")
    padding = experts[experts.index("if self.config.fp8 or self.config.fp4:") :]
    assert "align_size = 256 if self._with_fused_impl else None" in padding
    assert "self.quantization_padding = Fp8Padding(self.num_local_experts, align_size=align_size)" in padding

    # Run Transformer Engine's function, whose module cannot be imported without CUDA.
    tree = ast.parse((find_transformer_engine() / "pytorch" / "quantization.py").read_text())
    name = "get_align_size_for_quantization"
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    found: dict[str, Any] = {"Recipe": object}
    exec(compile(tree, name, "exec"), found)

    def multiple(recipe: str) -> int:
        kinds = ("custom", "mxfp8", "nvfp4")
        return found[name](SimpleNamespace(**{kind: lambda kind=kind: kind == recipe for kind in kinds}))

    assert {recipe: multiple(recipe) for recipe in ("mxfp8", "blockwise", "tensorwise")} == {
        "mxfp8": 32,
        "blockwise": 16,
        "tensorwise": 16,
    }
