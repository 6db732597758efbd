"""Names, places, weights, gradients and checkpoints are bitwise identical for every kind of layer.

Uses stubs of Transformer Engine's modules, with parameters in the same places.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.layers import LayerChoice, choose_layers, has_transformer_engine
from megarl.config.schema import DType, Layers, OptimConfig, ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import (
    Saved,
    Settings,
    load_and_train,
    same,
    stored_tensors,
    train,
    train_and_save,
)
from tests.unit.engine.models import save_critic, save_model
from tests.unit.engine.rank_side import LAYOUTS, MIXED_LAYOUTS, Tensors, build, hf_weights, start


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    families = ("qwen2", "qwen3-tied", "olmo2-tied", "gemma3_text-tied")
    for family in families:
        save_model(family, folder / family)
    save_critic(folder / "qwen2", folder / "critic")
    return {name: str(folder / name) for name in (*families, "critic")}


@pytest.mark.parametrize(
    ("asked", "dtype", "on_cuda", "installed", "expected"),
    [
        (Layers.auto, DType.bfloat16, True, True, Layers.transformer_engine),
        (Layers.auto, DType.bfloat16, True, False, Layers.local),
        (Layers.auto, DType.float32, True, True, Layers.local),
        (Layers.auto, DType.bfloat16, False, True, Layers.local),
        (Layers.local, DType.bfloat16, True, True, Layers.local),
        (Layers.transformer_engine, DType.float32, True, True, Layers.transformer_engine),
    ],
)
def test_the_choice_of_layers(
    asked: Layers, dtype: DType, on_cuda: bool, installed: bool, expected: Layers
) -> None:
    choice = choose_layers(asked, dtype, on_cuda=on_cuda, has_transformer_engine=installed)
    assert choice.layers is expected
    assert choice.why


@pytest.mark.parametrize(
    ("extension", "expected"),
    [
        ("transformer_engine_torch.cpython-312-x86_64-linux-gnu.so", True),  # compiled together, editable
        ("transformer_engine/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so", True),
        ("transformer_engine/wheel_lib/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so", True),
        ("transformer_engine/wheel_lib/libtransformer_engine.so", False),
        (None, False),
    ],
)
def test_transformer_engine_is_found_where_it_looks_for_its_extension(
    extension: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    if extension is not None:
        file = tmp_path / extension
        file.parent.mkdir(exist_ok=True)
        file.touch()

    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert has_transformer_engine() is expected


def ask_for(asked: Layers, on_cuda: bool) -> LayerChoice | str:
    """Run in a rank without Transformer Engine."""
    start(ParallelConfig())
    from megarl.engine.layer_specs import layers_for

    try:
        return layers_for(asked, DType.bfloat16, on_cuda=on_cuda)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("on_cuda", "says"),
    [(False, "this process is on a CPU"), (True, "transformer_engine.pytorch cannot be imported")],
)
def test_layers_that_cannot_be_had_are_refused(on_cuda: bool, says: str, rank_pool: RankPool) -> None:
    (got,) = rank_pool.run(ask_for, world_size=1, asked=Layers.transformer_engine, on_cuda=on_cuda)
    assert isinstance(got, str)
    assert says in got
    (choice,) = rank_pool.run(ask_for, world_size=1, asked=Layers.auto, on_cuda=on_cuda)
    assert isinstance(choice, LayerChoice)
    assert choice.layers is Layers.local


def names_of_experts(names: list[str]) -> list[str]:
    """Run in a rank with four preceding layers and eight preceding experts."""
    start(ParallelConfig())
    from megarl.engine.layer_specs import canonical_name

    return [canonical_name(name, first_layer=4, first_expert=8) for name in names]


def test_experts_have_one_name_grouped_or_not(rank_pool: RankPool) -> None:
    """Transformer Engine's grouped product numbers its weights; Megatron's local experts are modules."""
    layer = "decoder.layers.1.mlp."
    names = [
        f"{layer}experts.linear_fc1.weight3",
        f"{layer}experts.local_experts.3.linear_fc1.weight",
        f"{layer}router.weight",
    ]
    (found,) = rank_pool.run(names_of_experts, world_size=1, names=names)
    expert = "decoder.layers.5.mlp.experts.local_experts.11.linear_fc1.weight"
    assert found == [expert, expert, "decoder.layers.5.mlp.router.weight"]


class Routed(NamedTuple):
    converted: list[torch.Tensor]
    expected: list[torch.Tensor]
    kept: list[str]
    num_waits: int


def route_by_deep_ep(indices: list[list[int]]) -> Routed:
    """Run in a rank: convert routes as Megatron's manager of DeepEP does, and end the layer's pass."""
    start(ParallelConfig())
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.engine.layer_specs import adapt_dispatchers

    waits = []

    class Waits(TorchDispatchMode):
        """Counts operations whose result has a size that only the device knows."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            is_masked = name == "index" and any(
                each is not None and each.dtype is torch.bool for each in args[1]
            )
            waits.extend(
                [name] * (is_masked or name in ("nonzero", "repeat_interleave", "_local_scalar_dense"))
            )
            return func(*args, **(kwargs or {}))

    # Built without their constructors, which need DeepEP.
    manager_class = attrgetter("_DeepepManager")(token_dispatcher)
    manager: Any = manager_class.__new__(manager_class)
    manager.num_local_experts = 3
    manager.token_indices = manager.dispatched_routing_map = torch.ones(2, 2)
    dispatcher: Any = token_dispatcher.MoEFlexTokenDispatcher.__new__(token_dispatcher.MoEFlexTokenDispatcher)
    vars(dispatcher)["_comm_manager"] = manager
    dispatcher.shared_experts = None
    dispatcher.hidden_shape = (2, 2)
    layer: Any = MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(layer)
    layer.token_dispatcher = dispatcher

    probs = torch.rand(len(indices), len(indices[0]), generator=torch.Generator().manual_seed(1))
    places = torch.tensor(indices)
    upstream = torch.rand(len(indices), 3, generator=torch.Generator().manual_seed(2))
    found = []
    for adapts in (False, True):
        if adapts:
            adapt_dispatchers(torch.nn.ModuleList([layer]))
            waits.clear()
        own = probs.clone().requires_grad_()
        with Waits():
            routing_map, weights = attrgetter("_indices_to_multihot")(manager)(places, own)
        (weights * upstream).sum().backward()
        found.append([routing_map, weights.detach(), own.grad])
        assert adapts or len(waits) >= 3

    dispatcher.combine_postprocess(torch.zeros(2, 2))
    kept = [name for name, value in vars(manager).items() if isinstance(value, torch.Tensor)]
    return Routed(found[1], found[0], kept, len(waits))


@pytest.mark.parametrize(
    "indices",
    [[[0, 2], [-1, 1], [-1, -1], [2, 0]], [[-1, -1]], [[1]]],
    ids=("of two ranks", "of another rank", "of one expert"),
)
def test_routes_of_deep_ep_are_converted_without_waiting_and_released(
    indices: list[list[int]], rank_pool: RankPool
) -> None:
    (routed,) = rank_pool.run(route_by_deep_ep, world_size=1, indices=indices)
    for converted, expected in zip(routed.converted, routed.expected, strict=True):
        assert converted.dtype == expected.dtype
        assert torch.equal(converted, expected)
    assert routed.kept == []
    assert routed.num_waits == 0


def test_the_events_of_deep_ep_are_where_megatron_imports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's build of DeepEP names one of the two classes only."""
    from megarl.engine.platform import complete_deep_ep

    megatron = find_spec("megatron")
    assert megatron is not None
    assert megatron.submodule_search_locations
    calls = Path(megatron.submodule_search_locations[0], "core/transformer/moe/fused_a2a.py").read_text()
    assert "from deep_ep.utils import EventHandle, EventOverlap" in calls

    for name in [each for each in sys.modules if each.partition(".")[0] == "deep_ep"]:
        monkeypatch.delitem(sys.modules, name)
    complete_deep_ep()  # not installed
    assert "deep_ep" not in sys.modules

    folder = tmp_path / "deep_ep" / "utils"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text("from .event import EventHandle")
    (folder / "event.py").write_text("class EventHandle: pass\nclass EventOverlap: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    complete_deep_ep()
    from deep_ep.utils import EventHandle, EventOverlap  # pyrefly: ignore[missing-import]

    assert (EventHandle.__module__, EventOverlap.__module__) == ("deep_ep.utils.event", "deep_ep.utils.event")
    for name in [each for each in sys.modules if each.partition(".")[0] == "deep_ep"]:
        monkeypatch.delitem(sys.modules, name)


class Trained(NamedTuple):
    real_names: set[str]
    parameters: Tensors
    cut: dict[str, int]
    statistics: list[tuple[float, float]]
    losses: list[float]
    weights: Tensors


def train_with(stubs: bool, settings: Settings) -> Trained:
    """Run in a rank: return what was loaded, and the result of two steps."""
    start(settings.parallel)
    from tests.unit.engine import transformer_engine_stubs

    transformer_engine_stubs.install(stubs)

    # With data parallelism, a rank's slice of the gradients depends on the order of parameters, and so do the
    # last bits of the norm.
    clip_grad = 0.0 if settings.parallel.data_parallel_size > 1 else 1.0
    optim = OptimConfig(lr=1e-2, clip_grad=clip_grad)
    engine = build(
        start(settings.parallel), settings.folder, head=settings.head, dtype=settings.dtype, optim=optim
    )
    transformer_engine_stubs.install(False)
    named = dict(pair for model in engine.models for pair in model.canonical_parameters())
    cut = {
        name: parameter.partition_dim
        for name, parameter in named.items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    loaded = {name: value.clone() for name, value in engine.parameters().items()}
    steps = train(engine, 2)
    real_names = {
        re.sub(r"\d+", "N", name) for model in engine.models for name, _ in model.named_parameters()
    }

    return Trained(real_names, loaded, cut, steps.statistics, steps.losses, hf_weights(engine))


CASES = [
    ("TP1", "qwen2", "lm"),
    ("TP2+SP", "qwen3-tied", "lm"),
    ("PP2xVPP2", "critic", "value"),
    ("TP2+SPxDP2", "qwen2", "lm"),
    ("TP2+SP", "olmo2-tied", "lm"),
    ("TP2+SP", "gemma3_text-tied", "lm"),
]


@pytest.mark.parametrize(("layout", "model", "head"), CASES)
def test_parameters_have_one_name_and_training_is_the_same(
    layout: str, model: str, head: str, rank_pool: RankPool, folders: dict[str, str]
) -> None:
    settings = Settings({**LAYOUTS, **MIXED_LAYOUTS}[layout], folders[model], head)
    local, fused = (
        rank_pool.run(train_with, world_size=settings.parallel.world_size, stubs=stubs, settings=settings)
        for stubs in (False, True)
    )
    has_norm = model != "olmo2-tied"  # before a block
    assert ("decoder.layers.N.self_attention.linear_qkv.layer_norm_weight" in fused[0].real_names) == has_norm
    assert "decoder.layers.N.input_layernorm.weight" not in fused[0].real_names

    for one, other in zip(local, fused, strict=True):
        assert one.cut == other.cut
        assert one.cut
        assert one.losses == other.losses
        if settings.parallel.data_parallel_size > 1:
            assert one.statistics == [pytest.approx(each, rel=1e-6) for each in other.statistics]
        else:  # the norm is summed by name, independent of the order of parameters
            assert one.statistics == other.statistics
            assert any(norm > 1 for norm, _ in one.statistics), (
                "nothing is clipped, so the norm has no effect"
            )

    for part in ("parameters", "weights"):
        assert same([getattr(rank, part) for rank in local], [getattr(rank, part) for rank in fused]), part


def with_layers(
    stubs: bool, run: Callable[..., Saved], settings: Settings, folder: Path, **options: Any
) -> Saved:
    """Run in a rank: call `run` on an engine with these layers."""
    start(settings.parallel)
    from tests.unit.engine import transformer_engine_stubs

    transformer_engine_stubs.install(stubs)

    try:
        return run(settings, folder, num_steps=2, num_after=2, **options)
    finally:
        transformer_engine_stubs.install(False)


@pytest.mark.parametrize(
    ("layout", "model", "head", "dtype"),
    [
        ("TP2xPP2", "qwen3-tied", "lm", torch.bfloat16),
        ("TP2+SP", "critic", "value", torch.float32),
        ("TP2+SP", "olmo2-tied", "lm", torch.float32),
        ("PP2", "gemma3_text-tied", "lm", torch.bfloat16),
    ],
)
def test_a_checkpoint_of_one_kind_of_layers_is_one_of_the_other(
    layout: str,
    model: str,
    head: str,
    dtype: torch.dtype,
    rank_pool: RankPool,
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    """The stored data is the same, so conversion can read both.

    Other layers hold the same state after a load, and continue.
    """
    settings = Settings(LAYOUTS[layout], folders[model], head, dtype)
    ranks = settings.parallel.world_size
    places = {stubs: tmp_path / str(stubs) for stubs in (False, True)}
    saved = {
        stubs: rank_pool.run(
            with_layers, world_size=ranks, stubs=stubs, run=train_and_save, settings=settings, folder=folder
        )
        for stubs, folder in places.items()
    }
    stored = stored_tensors(places[False])
    assert same([stored], [stored_tensors(places[True])])

    for stubs, folder in places.items():
        again = tmp_path / f"{stubs} again"
        loaded = rank_pool.run(
            with_layers,
            world_size=ranks,
            stubs=not stubs,
            run=load_and_train,
            settings=settings,
            folder=folder,
            again=again,
        )
        assert same([stored_tensors(again)], [stored])
        for one, other in zip(loaded, saved[stubs], strict=True):
            assert one.after.losses == pytest.approx(other.after.losses, rel=1e-6)
