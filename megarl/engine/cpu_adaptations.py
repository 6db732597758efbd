"""Replacements for the few places in Megatron-Core that require CUDA, so that it runs on a CPU.

Megatron is used as published; no file of it is edited. Replacements are installed once per process in two
steps: those on `torch` before Megatron is imported, those on Megatron's own functions afterwards. For each of
the latter, tests/unit/engine/test_megatron_evidence.py quotes the part of Megatron's source that makes it
necessary, and fails when a new Megatron no longer contains it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.utils._device

from megarl.engine import rotary
from megarl.engine.cpu_kernels import (
    gated_linear,
    gather_unequal,
    linear,
    numbers_on_host,
    scatter_unequal,
    unless_alone,
)
from megarl.machine.replaced import replaced

CPU = torch.device("cpu")

# Factories that Megatron calls with device="cuda" or torch.cuda.current_device() (schedules, optimizer,
# losses, p2p). Wrapping them costs nothing elsewhere; a TorchFunctionMode would add microseconds to every
# operation.
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


class InertStream:
    """A CUDA stream or event on a machine without CUDA. Every method does nothing."""

    device = CPU

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def record_event(self, event: InertStream | None = None) -> InertStream:
        return event or InertStream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **keywords: None

    def __enter__(self) -> InertStream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def replace_streams(
    stream: type[InertStream], capability: tuple[int, int], num_processors: int, name: str
) -> None:
    """Replace CUDA's streams by inert ones, its random generator by the CPU's, and the device's properties.

    Args:
        capability: The capability of the device, which determines the choice of kernels.
    """
    cuda: Any = torch.cuda
    cuda.current_stream = cuda.default_stream = cuda.Stream = cuda.Event = stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda *arguments: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *arguments: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: None if torch.default_generator.manual_seed(seed) else None

    major, minor = capability
    cuda.get_device_capability = lambda *arguments: capability
    cuda.get_device_properties = lambda *arguments: types.SimpleNamespace(
        multi_processor_count=num_processors, major=major, minor=minor, name=name
    )


def use_cpu_generator() -> None:
    """Let Megatron read and set the CPU's random state instead of the GPU's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")

    # A bare number is the index of a GPU.
    return isinstance(device, int)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if keywords:
            if _names_cuda(keywords.get("device")):
                keywords["device"] = CPU
            if keywords.get("pin_memory"):
                keywords["pin_memory"] = False
        return factory(*arguments, **keywords)

    return make


def _adapt_torch() -> None:
    # torch caches the set of functions that `with torch.device(...)` applies to. The cache must contain the
    # originals, which the wrappers call: built later, it would contain the wrappers, and the context would
    # have no effect.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    def itself(value: Any, *arguments: Any, **keywords: Any) -> Any:
        return value

    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = itself

    # A CPU operation is complete when its call returns, so streams and synchronization do nothing.
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *arguments: None
    replace_streams(InertStream, (0, 0), num_processors=1, name="cpu")


def no_compiler() -> contextlib.AbstractContextManager[None]:
    """Prevent `jit_fuser` from starting a C++ compiler at its first call.

    It is bound to torch.compile while Megatron is imported.
    """

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        # Called with options only, torch.compile returns a decorator.
        return model if model is not None else (lambda function: function)

    return replaced(vars(torch), {"compile": compile_nothing})


@contextlib.contextmanager
def cuda_type_names() -> Generator[None]:
    """Make `Tensor.type()` return CUDA types within the block.

    The optimizers sort parameters by comparison with 'torch.cuda.FloatTensor'.
    """
    spelled = torch.Tensor.type

    def cuda_spelling(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = spelled(tensor, *arguments, **keywords)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = cuda_spelling
    try:
        yield
    finally:
        torch.Tensor.type = spelled


def _clip_by_total_norm(
    parameters: list[torch.Tensor] | torch.Tensor,
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """Clip gradients with Megatron's arithmetic (clip_grads.py), without its assertion on CUDA tensors."""
    assert not use_decoupled_grad
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    # Megatron's own formula, whose small term avoids a division by zero.
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_(gradients, coefficient)


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: torch.distributed.ProcessGroup | None = None,
    gtp_remat_size: int = 1,
) -> torch.Tensor:
    """Compute Megatron's tensor-parallel linear layer with megarl's matrix product.

    On CUDA, Megatron overlaps collectives with products instead. The signature is that of Megatron's
    `linear_with_grad_accumulation_and_async_allreduce`.
    """
    from megatron.core.tensor_parallel import mappings

    assert not gradient_accumulation_fusion
    assert grad_output_buffer is None, "the weight gradients of the last layer are not deferred on the CPU"
    assert gtp_remat_size == 1, gtp_remat_size

    # The backward pass of either collective reduces the input's gradient over the tensor-parallel ranks.
    if sequence_parallel:
        input = mappings.gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)

    # The weight stacks the rows of gate and up (see mark_cut_parameters).
    is_gated = getattr(weight, "partition_stride", 1) == 2 and not getattr(weight, "gates_apart", False)
    if is_gated:
        assert bias is None
        return gated_linear(input, weight)

    return linear(input, weight, bias)


def _linear_with_frozen_weight(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: torch.distributed.ProcessGroup | None,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
    gtp_remat_size: int = 1,
) -> torch.Tensor:
    """Compute the same as `_linear`, with the signature of Megatron's function of this name.

    In that signature, `tp_group` comes earlier.
    """
    assert wgrad_deferral_limit is None
    return _linear(
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer=grad_output_buffer,
        tp_group=tp_group,
        gtp_remat_size=gtp_remat_size,
    )


def _bias_swiglu(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
) -> torch.Tensor:
    """Return the gated activation, which `_linear` has already applied."""
    assert bias is None
    assert not fp8_input_store
    assert not cpu_offload_input
    return input


def _weighted_bias_swiglu(
    input: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, fp8_input_store: bool = False
) -> torch.Tensor:
    """Return the gated activation of an expert, scaled by its tokens' weights (..., 1) float32."""
    return (_bias_swiglu(input, bias, fp8_input_store) * weights).to(input.dtype)


def adapt_products() -> None:
    """Replace linear layers and activations. The gated activation becomes a part of a linear layer."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp

    layers.linear_with_grad_accumulation_and_async_allreduce = _linear
    layers.linear_with_frozen_weight = _linear_with_frozen_weight
    mlp.bias_swiglu_impl = _bias_swiglu
    mlp.weighted_bias_swiglu_impl = _weighted_bias_swiglu


def _adapt_megatron() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base_optimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    use_cpu_generator()

    # The last three modules import the function by name.
    for module in (clip_grads, base_optimizer, distrib_optimizer, optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            # pyrefly: ignore[missing-attribute]
            module.clip_grad_by_total_norm_fp32 = _clip_by_total_norm

    rotary.install()
    # The dispatcher imports the function by name, so it is replaced in both modules.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = numbers_on_host
    mappings._gather_along_first_dim = gather_unequal(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = scatter_unequal(mappings._reduce_scatter_along_first_dim)
    adapt_products()
    # Megatron uses the names that torch has deprecated.
    # pyrefly: ignore[deprecated]
    buffers.dist_reduce_scatter_func = unless_alone(buffers.dist_reduce_scatter_func)
    # pyrefly: ignore[deprecated]
    buffers.dist_all_gather_func = unless_alone(buffers.dist_all_gather_func)


def install() -> None:
    """Install every adaptation. Imports Megatron-Core, which takes 6 to 8 seconds of CPU time."""
    # torch is adapted before the import, during which Megatron binds functions of torch.
    _adapt_torch()

    # Megatron prints long warnings that Transformer Engine and Apex are absent, which is intended here.
    for module in ("megatron.core", "torch.distributed"):
        warnings.filterwarnings("ignore", module=module.replace(".", r"\."))
    with no_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("megatron.core", "megatron.core.optimizer", "megatron.core.models.gpt"):
            importlib.import_module(module)

    _adapt_megatron()
