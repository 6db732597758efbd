"""Test the engine on one GPU against Hugging Face: the same code as on the CPU, over NCCL, with both kinds of
layers.

tests/unit/engine/test_one_device.py runs these tests on the CPU, so that they stay valid.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch.metrics import Metric
from megarl.config.layers import has_transformer_engine
from megarl.config.schema import (
    Device,
    Layers,
    MegatronConfig,
    OptimConfig,
    ParallelConfig,
    Recomputation,
    Recompute,
)
from megarl.engine import platform
from megarl.engine.offload import StatePart
from megarl.models.families import read_architecture
from tests.unit.engine.checkpoint_side import contents
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.fp8_products import BLOCKWISE, multiply_in_fp8, save_model_of_whole_blocks
from tests.unit.engine.models import (
    EVERY_EXPERT,
    EXPERT_FAMILIES,
    FAMILIES,
    gradients_of,
    load_lm,
    make_batch,
    reference_logits,
    save_model,
    scores_of,
    with_one_prompt,
)
from tests.unit.engine.rank_side import Tensors, build, hf_gradients, unpadded, weighted_sum

KEYS = ("log_probs", "entropy")
MICRO_BATCHES = [[0, 3, 2], [1, 4], [5], [6]]
OUTPUT_TOLERANCE = 1e-4  # absolute, in float32
GRADIENT_TOLERANCE = 1e-3  # relative to the tensor's norm, in float32
GRADIENT_FLOOR = 1e-5  # relative to the whole gradient's norm: a tensor below it is noise
# In bfloat16, the engine's error relative to float32 may be this many times Hugging Face's on the same
# device.
ROUNDING = 1.5

# run(function, **arguments): result of function(groups=..., **arguments) in a process on the device
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run in this process."""
    platform.activate(Device.cuda)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    from megarl.engine import groups as engine_groups

    groups = engine_groups.initialize(ParallelConfig(), seed=0)
    yield lambda function, **arguments: function(groups=groups, **arguments)
    dist.destroy_process_group()


class Compared(NamedTuple):
    """Outputs (B, R), and the gradients of a weighted sum of them by Hugging Face's names, float32 on the
    host."""

    outputs: Tensors
    gradients: Tensors

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def weighted_batch() -> Tensors:
    """Return a batch with a weight per token and output, so that no two gradients are equal by symmetry. In
    some micro-batches rows share a prompt."""
    batch = with_one_prompt(make_batch(), (0, 2), (1, 4))
    generator = torch.Generator().manual_seed(2)

    for key in KEYS:
        batch[f"weight/{key}"] = (
            torch.randn(batch["response_mask"].shape, generator=generator) * batch["response_mask"]
        )

    return batch


def on_host(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}


def run_hugging_face(
    folder: Path, dtype: torch.dtype, device: torch.device, *, in_fp8: bool = False
) -> Compared:
    batch = {name: tensor.to(device) for name, tensor in weighted_batch().items()}
    model = load_lm(folder, dtype).to(device)
    if in_fp8:
        multiply_in_fp8(model)
    with kernels_of_torch(model) if device.type == "cpu" else nullcontext():
        outputs = scores_of(reference_logits(model, batch).float(), batch)
        sum((outputs[key] * batch[f"weight/{key}"]).sum() for key in KEYS).backward()

    # The batch has no images, so a vision tower has no gradients.
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return Compared(on_host(outputs), on_host(gradients_of(model)))


@contextmanager
def kernels_of_torch(model: torch.nn.Module) -> Iterator[None]:
    """Make transformers use its own implementation on the host: it calls the kernels of FLA if that is
    installed, whatever the device."""
    module = sys.modules[type(model).__module__]
    with ExitStack() as stack:
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
                stack.enter_context(mock.patch.object(module, name, inspect.unwrap(function)))
        yield


def run_engine(
    folder: Path,
    dtype: torch.dtype,
    layers: Layers,
    packing: bool,
    recompute: Recompute,
    groups: Any,
    megatron: MegatronConfig | None = None,
) -> Compared:
    engine = build(
        groups,
        str(folder),
        dtype=dtype,
        packing=packing,
        share_prompts=True,
        layers=layers,
        optim=OptimConfig(),
        recomputation=Recomputation(how=recompute),
        megatron=megatron or MegatronConfig(),
    )
    batch = unpadded(weighted_batch())
    outputs = engine.forward(batch, MICRO_BATCHES)
    engine.forward_backward(batch, MICRO_BATCHES, weighted_sum(KEYS))
    assert outputs is not None, "one rank has the last stage"

    return Compared(
        on_host({key: column.padded() for key, column in outputs.items()}), on_host(hf_gradients(engine))
    )


def need(
    layers: Layers,
    device: torch.device,
    folder: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packing: bool = True,
) -> None:
    if layers is Layers.transformer_engine and device.type != "cuda":
        pytest.skip("Transformer Engine's layers are for CUDA")
    if layers is Layers.transformer_engine and not has_transformer_engine():
        pytest.skip("Transformer Engine is not installed")
    if folder is None:
        return
    architecture = read_architecture(str(folder))
    if architecture.vision is not None and not packing:
        pytest.skip("a model with a vision tower reads packed rows")
    if layers is Layers.transformer_engine and architecture.linear_bias:
        pytest.skip("megarl supports experts with biases with local layers only")
    has_kernels = not (architecture.has_sinks or architecture.windows)
    if device.type == "cuda" and dtype is torch.float32 and not has_kernels:
        pytest.skip("attention with sinks or windows has no float32 kernels on CUDA")


def make_family(name: str, folder: Path) -> tuple[Path, Compared]:
    """Return the folder of a model, and Hugging Face's results on the host in float32."""
    save_model(name, folder)
    return folder, run_hugging_face(folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=[*FAMILIES, *EXPERT_FAMILIES, *EVERY_EXPERT])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Compared]:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("layers", "packing", "recompute"),
    [
        (Layers.local, True, Recompute.none),
        (Layers.local, True, Recompute.full),
        (Layers.local, False, Recompute.selective),
        (Layers.transformer_engine, False, Recompute.none),  # has no attention of packed rows for float32
    ],
)
def test_log_probs_and_gradients_are_those_of_hugging_face(
    family: tuple[Path, Compared],
    layers: Layers,
    packing: bool,
    recompute: Recompute,
    device: torch.device,
    run: Run,
) -> None:
    folder, want = family
    need(layers, device, folder, torch.float32, packing=packing)
    got: Compared = run(
        run_engine, folder=folder, dtype=torch.float32, layers=layers, packing=packing, recompute=recompute
    )
    for key in KEYS:
        assert max_difference(got.outputs[key], want.outputs[key]) <= OUTPUT_TOLERANCE, key
    assert_same(got.gradients, want.gradients, GRADIENT_TOLERANCE, floor=GRADIENT_FLOOR * want.grad_norm)


@pytest.mark.parametrize(
    ("layers", "packing", "recompute"),
    [
        (Layers.local, True, Recompute.none),
        (Layers.local, True, Recompute.selective),
        (Layers.local, False, Recompute.none),
        (Layers.transformer_engine, True, Recompute.none),
        (Layers.transformer_engine, True, Recompute.selective),
        (Layers.transformer_engine, True, Recompute.full),
    ],
)
def test_in_bfloat16_they_are_as_near_to_float32_as_hugging_faces(
    family: tuple[Path, Compared],
    layers: Layers,
    packing: bool,
    recompute: Recompute,
    device: torch.device,
    run: Run,
    record_property: Callable[[str, object], None],
) -> None:
    folder, want = family
    need(layers, device, folder, packing=packing)
    experts = read_architecture(str(folder)).experts
    if experts is not None and experts.num_experts_per_tok < experts.num_experts:
        pytest.skip("rounding selects other experts, which moves outputs further than products are rounded")
    got: Compared = run(
        run_engine, folder=folder, dtype=torch.bfloat16, layers=layers, packing=packing, recompute=recompute
    )
    peer = run_hugging_face(folder, torch.bfloat16, device)
    ours, theirs = (distances(side, want) for side in (got, peer))
    said = ", ".join(f"{name} {ours[name]:.2e} and {theirs[name]:.2e}" for name in ours)
    record_property(f"{layers.value}: distance from float32, and Hugging Face's", said)
    for name, distance in ours.items():
        assert 0 < distance <= ROUNDING * theirs[name], said


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_in_fp8_they_are_as_near_to_float32_as_emulated_ones(
    recompute: Recompute,
    device: torch.device,
    run: Run,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """tests/unit/engine/test_fp8_training.py compares the emulation with the engine on a CPU."""
    need(Layers.transformer_engine, device)
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("products with a scale for each block need Hopper")
    save_model_of_whole_blocks(tmp_path)
    host = torch.device("cpu")
    want = run_hugging_face(tmp_path, torch.float32, host)
    peer = run_hugging_face(tmp_path, torch.float32, host, in_fp8=True)
    got: Compared = run(
        run_engine,
        folder=tmp_path,
        dtype=torch.bfloat16,
        layers=Layers.transformer_engine,
        packing=True,
        recompute=recompute,
        megatron=BLOCKWISE,
    )
    ours, theirs = (distances(side, want) for side in (got, peer))
    said = ", ".join(f"{name} {ours[name]:.2e} and {theirs[name]:.2e}" for name in ours)
    record_property("FP8: distance from float32, and the emulation's", said)
    for name, distance in ours.items():
        # Less would mean that products are not in FP8.
        assert 0.5 * theirs[name] < distance <= ROUNDING * theirs[name], said


def distances(got: Compared, want: Compared) -> dict[str, float]:
    """Return, for each output, the mean absolute difference over response tokens; for all gradients, the norm
    of the difference relative to their norm."""
    mask = weighted_batch()["response_mask"]
    means = {key: float((got.outputs[key] - want.outputs[key])[mask].abs().mean()) for key in KEYS}
    norms = torch.stack(
        [(got.gradients[name] - gradient).norm() for name, gradient in want.gradients.items()]
    )

    return {**means, "gradients": float(norms.norm()) / want.grad_norm}


def mean_log_prob(
    outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Metric]]:
    value = -(outputs["log_probs"] * rows["response_mask"]).sum() / 40
    return value, {"loss": Metric.sum(value)}


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: Tensors
    given_back: list[float]  # share of the reported offload by which GPU memory decreased


def train(folder: Path, layers: Layers, away: tuple[StatePart, ...], num_steps: int, groups: Any) -> Trained:
    """Train. `away` lists the parts of the state that are offloaded after each step and restored."""
    engine = build(groups, str(folder), dtype=torch.bfloat16, layers=layers, optim=OptimConfig(lr=1e-3))
    on_cuda = platform.current().is_cuda
    batch = unpadded(make_batch())
    trained = Trained([], [], {}, [])

    for _ in range(num_steps):
        trained.losses.append(
            engine.forward_backward(batch, [[0, 1, 2], [3, 4, 5, 6]], mean_log_prob)["loss"].value
        )
        trained.norms.append(engine.step().grad_norm)
        if away:
            before = torch.cuda.memory_allocated() if on_cuda else 0
            nbytes = engine.offload(*away)
            if on_cuda:
                trained.given_back.append((before - torch.cuda.memory_allocated()) / nbytes)
            engine.restore(*away)

    trained.weights.update(on_host(engine.parameters()))
    return trained


@pytest.mark.parametrize("layers", [Layers.local, Layers.transformer_engine])
def test_bfloat16_training_lowers_the_loss(
    layers: Layers, device: torch.device, run: Run, tmp_path: Path
) -> None:
    need(layers, device)
    save_model("qwen2-tied", tmp_path)
    losses = run(train, folder=tmp_path, layers=layers, away=(), num_steps=10).losses
    assert losses[-1] < losses[0] - 0.5


def test_what_is_offloaded_leaves_the_gpu_and_comes_back_the_same(run: Run, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    stayed, moved = (
        run(train, folder=tmp_path, layers=Layers.local, away=away, num_steps=3)
        for away in ((), tuple(StatePart))
    )

    # sums that a GPU orders differently each time, rounded to bfloat16
    assert moved.norms == pytest.approx(stayed.norms, rel=1e-2)
    assert all(part >= 0.9 for part in moved.given_back)
    for name, weight in stayed.weights.items():
        torch.testing.assert_close(moved.weights[name], weight, atol=1e-2, rtol=1e-2)


def snapshots(folder: Path, dtype: torch.dtype, groups: Any) -> list[list[bytes]]:
    """Train, and return the tensors of snapshots of one state: copied directly, through buffers, and after it
    was offloaded."""
    from megarl.engine.snapshot import PendingSnapshot, Staging

    engine = build(groups, str(folder), dtype=dtype, layers=Layers.local, optim=OptimConfig(lr=1e-3))
    engine.forward_backward(unpadded(make_batch()), [[0, 1, 2], [3, 4, 5, 6]], mean_log_prob)
    engine.step()
    # Some tensors fill the buffers several times.
    staging = Staging(nbytes=2**16, least=2**12)
    found = []
    for number, way in enumerate((None, staging, staging)):
        if number == 2:
            engine.offload(*StatePart)
        (path := folder / f"snapshot-{number}").touch()
        PendingSnapshot(str(path), 1, engine, way).wait()
        found.append(contents(str(path))[:-1])  # the last is the random state
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_has_the_same_bytes_on_each_way(
    dtype: torch.dtype, run: Run, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    save_model("qwen2", tmp_path)
    directly, staged, offloaded = run(snapshots, folder=tmp_path, dtype=dtype)
    assert len(directly) > 10
    assert staged == directly
    assert offloaded == directly
    largest = max(len(tensor) for tensor in directly)
    record_property("bytes of the largest tensor, through buffers of 65,536", f"{largest:,}")


def test_torch_has_what_the_layers_for_cuda_call() -> None:
    """Torch 2.11 and 2.13 agree, except for `enable_gqa`, which 2.11 does not need."""
    from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {parameters[name].kind for name in ("scale", "window_size")} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["scale"].default is None
    assert parameters["window_size"].default == (-1, -1)
    for function in (pin_memory, unpin_memory):
        assert list(inspect.signature(function).parameters)[0] == "data_ptr"
    assert list(inspect.signature(torch.nn.functional.rms_norm).parameters) == [
        "input",
        "normalized_shape",
        "weight",
        "eps",
    ]
