"""Each adaptation of Megatron-Core is still needed and behaves like the original."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.config.versions import REQUIRED
from tests.ranks import RankPool


def megatron_source(module: str, attribute: str) -> str:
    """Return the published source of `attribute`, read from its file, without installed adaptations."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], "core", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text()

    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return ast.get_source_segment(text, node) or ""

    raise AssertionError(f"{file} no longer defines {attribute}: the adaptation of it replaces nothing")


# Runs in a separate interpreter without adaptations. Prints the name of each check that succeeds.
UNADAPTED = """
import os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from megatron.core import jit
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import random
from megarl.engine.rotary import rotary_packed

def fails(name, function, *errors):
    try:
        function()
    except errors:
        print(name)

parameter = torch.nn.Parameter(torch.ones(3))
parameter.grad = torch.ones(3)
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
fails("clip", lambda: clip_grad_by_total_norm_fp32([parameter], 1.0, 2.0), AssertionError)
fails("norm", lambda: get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=dist.group.WORLD), AssertionError, RuntimeError)
fails("get rng", lambda: random._get_cuda_rng_state(), AssertionError, RuntimeError)
fails("seed", lambda: random.model_parallel_cuda_manual_seed(0), AssertionError, RuntimeError)
fails("current device", torch.cuda.current_device, AssertionError, RuntimeError)
if jit.jit_fuser is torch.compile:
    print("compiler")

# The packed rotary embedding that replaces Megatron's loop returns the same numbers.
boundaries = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
heads, frequencies = torch.randn(12, 2, 8), torch.randn(7, 1, 1, 4).repeat(1, 1, 1, 2)
for name, rotated in {"rotary": frequencies, "half rotary": frequencies[..., ::2]}.items():
    given = dict(mscale=1.5 if name == "half rotary" else 1.0, cp_group=dist.group.WORLD)
    want = rope_utils._apply_rotary_pos_emb_thd(heads, boundaries, rotated, **given)
    if torch.allclose(rotary_packed(heads, boundaries, rotated, **given), want, rtol=0, atol=1e-6):
        print(name)

# The adapted functions also respect the device of a context, and so do models that are loaded in one.
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from megarl.engine import cpu_adaptations

folder = tempfile.mkdtemp()
sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=8)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
cpu_adaptations.install()
with torch.device("meta"):
    made = [torch.tensor([1]), torch.full((2,), 3), *(getattr(torch, name)(2) for name in ("zeros", "ones", "empty", "arange"))]
if {tensor.device.type for tensor in made} == {"meta"} and torch.zeros(2, device="cuda").device.type == "cpu":
    print("device context")
inv_freq = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
if torch.equal(inv_freq, torch.tensor([1.0, 0.01])):
    print("inv_freq")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU the originals work")
def test_without_adaptations_megatron_fails_here() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", UNADAPTED],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [
        "clip",
        "norm",
        "get rng",
        "seed",
        "current device",
        "compiler",
        "rotary",
        "half rotary",
        "device context",
        "inv_freq",
    ]


LINEAR = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")


def linear_parameters() -> dict[str, list[str]]:
    """Return the parameters of the adapted functions, in order.

    Each is also called with all of them by position.
    """
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megatron.core.tensor_parallel import layers

    input = torch.ones(2, 1, 3)
    weight = torch.arange(6.0).reshape(2, 3)
    bias = torch.ones(2)
    unused = {LINEAR[0]: (None, 0, None, 1), LINEAR[1]: (None, None, None, 1)}

    for name in LINEAR:
        output = getattr(layers, name)(input, weight, bias, False, False, False, *unused[name])
        assert output.tolist() == [[[4.0, 13.0]]] * 2

    return {name: list(inspect.signature(getattr(layers, name)).parameters) for name in LINEAR}


def test_linear_layers_have_the_originals_signature(rank_pool: RankPool) -> None:
    (parameters,) = rank_pool.run(linear_parameters, world_size=1)
    for name in LINEAR:
        definition = ast.parse(megatron_source("tensor_parallel.layers", name)).body[0]
        assert isinstance(definition, ast.FunctionDef)
        assert parameters[name] == [argument.arg for argument in definition.args.args]


def clip(max_norm: float, total_norm: float) -> list[float]:
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megatron.core.optimizer import optimizer

    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 4.0])
    optimizer.clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm)
    assert parameters[1].grad is None

    return parameters[0].grad.tolist()


def test_clipping_does_the_originals_arithmetic(rank_pool: RankPool) -> None:
    """Gradients are multiplied by max_norm / (total_norm + 1e-6) if that is below one."""
    assert rank_pool.run(clip, world_size=1, max_norm=1.0, total_norm=5.0)[0] == pytest.approx(
        [0.6, 0.8], rel=1e-5
    )
    assert rank_pool.run(clip, world_size=1, max_norm=6.0, total_norm=5.0)[0] == [3.0, 4.0]


def test_megatron_imports_triton_which_it_does_not_declare() -> None:
    """megarl declares it: only CUDA builds of torch do, and without it no rank could start."""
    assert "triton" in REQUIRED
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    kernels = Path(spec.submodule_search_locations[0], "core/transformer/moe/ops/paged_stash.py")
    imports = [node for node in ast.parse(kernels.read_text()).body if isinstance(node, ast.Import)]
    assert "triton" in [alias.name for node in imports for alias in node.names]


def has_wandb() -> bool:
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    import megatron.core  # noqa: F401

    return "wandb" in sys.modules


def finds_transformer_engine() -> tuple[bool, bool]:
    """Run in a rank: whether Transformer Engine was imported, and whether it could be."""
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    import megatron.core  # noqa: F401

    return sys.modules.get("transformer_engine") is not None, bool(
        importlib.util.find_spec("transformer_engine")
    )


def test_a_process_on_a_cpu_has_no_transformer_engine(rank_pool: RankPool) -> None:
    """Its import fails without a compiled part, with errors that Megatron does not expect."""
    assert rank_pool.run(finds_transformer_engine, world_size=1) == [(False, False)]


def finds_flash_mla() -> bool:
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    return sys.modules.get("flash_mla", "not hidden") is not None


def test_megatron_does_not_import_flash_mla(rank_pool: RankPool) -> None:
    """Without a CUDA driver it raises an OSError, but Megatron expects that it is there or absent."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    attention = Path(spec.submodule_search_locations[0], "core/transformer/attention.py").read_text()
    [attempt] = [
        node
        for node in ast.parse(attention).body
        if isinstance(node, ast.Try) and "from flash_mla import" in ast.unparse(node.body[0])
    ]
    assert [ast.unparse(handler.type) for handler in attempt.handlers if handler.type] == ["ImportError"]
    assert rank_pool.run(finds_flash_mla, world_size=1) == [False]


def test_megatron_does_not_bring_wandb(rank_pool: RankPool) -> None:
    """wandb creates folders in TMPDIR that remain when a worker process is killed."""
    assert importlib.util.find_spec("wandb") is not None
    assert rank_pool.run(has_wandb, world_size=1) == [False]
