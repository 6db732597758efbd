"""Replacements in torch, Megatron and Transformer Engine to run CUDA code on fake tensors without a GPU.

As in `cpu_adaptations`, no file is edited: replacements are installed once per process, and a test quotes
the part of Megatron's source that makes each replacement of its functions necessary. Factories and devices
are not changed, so code that creates a tensor on the wrong device does so here as well. The package
`rehearse/dry_run` provides the tensors and records operations on them.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from megarl.config.layers import find_transformer_engine
from megarl.engine.cpu_adaptations import (
    InertStream,
    no_compiler,
    replace_streams,
    use_cpu_generator,
)
from megarl.machine.errors import counted
from megarl.machine.replaced import replaced

CUDA = torch.device("cuda", 0)

_PACKAGE = "transformer_engine"
_FRAMEWORK = f"{_PACKAGE}.pytorch"
_EXPORT = f"{_FRAMEWORK}.onnx_extensions"  # its imports, onnx and onnxscript, serve nothing else
# The package then loads no shared library, and compiles no function with torch.compile.
_SETTINGS = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}

_NORM = "aten::_fused_rms_norm"
_KERNELS = torch.library.Library("aten", "IMPL", "CUDA")  # registrations live as long as this object


def _adapt_cuda(on_wait: Callable[[], None]) -> None:
    """Replace functions of torch.cuda.

    Args:
        on_wait: Called where the host would wait for the device without reading a tensor.
    """

    class Stream(InertStream):
        device = CUDA

        def record_event(self, event: InertStream | None = None) -> InertStream:
            return event or Stream()

        def synchronize(self) -> None:
            on_wait()

    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callback, **keywords: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *arguments: None

    # The dry run records every place where the host would wait for the device.
    cuda.synchronize = lambda *arguments: on_wait()
    # The properties of an H100.
    replace_streams(Stream, (9, 0), num_processors=132, name="fake")
    # Registering host memory succeeds.
    cuda.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: 0, cudaHostUnregister=lambda pointer: 0
    )


def _apply(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Replace `torch.nn.Module._apply` for fake tensors.

    torch changes a parameter's data in place, which keeps its attributes. A host tensor cannot become a fake
    one in place, so the parameter is replaced and its attributes copied.
    """
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if changed is not parameter:
            # Marks such as Megatron's on sharded parameters are attributes of the replaced parameter.
            moved = torch.nn.Parameter(changed, requires_grad=parameter.requires_grad)
            for mark, value in vars(parameter).items():
                if mark not in vars(moved):
                    setattr(moved, mark, value)
            module._parameters[name] = moved

    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)

    return module


def _read(data: Any) -> Any:
    """Replace tensors in nested lists by numbers."""
    if isinstance(data, list | tuple):
        return [_read(each) for each in data]
    return data.item() if isinstance(data, torch.Tensor) and not data.dim() else data


def _adapt_tensors() -> None:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer

    spelled = torch.Tensor.type

    def spell(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Return the CUDA type of a fake tensor, for which torch returns the type of its memory."""
        if arguments or keywords or not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
            return spelled(tensor, *arguments, **keywords)
        return spelled(torch.empty(0, dtype=tensor.dtype)).replace("torch.", "torch.cuda.", 1)

    made = torch.tensor

    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Read tensors inside a list here: torch would read them where no dispatch mode sees it."""
        found = made(_read(data) if isinstance(data, list | tuple) else data, **options)
        return found.pin_memory() if pin_memory else found

    def read(tensor: torch.Tensor) -> Any:
        """Read a tensor in one copy. torch's own function for fake tensors reads each element."""
        host = tensor.cpu()
        if isinstance(host, FakeTensor):  # unknown values: reading one raises the error
            host.reshape(-1)[0].item()
        return host.tolist()

    def pin(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Refuse what CUDA refuses. Fake tensors have no memory to pin."""
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single "
                "memory location"
            )
        return tensor

    # Otherwise a CUDA build creates a tensor on the device before the first fake one.
    fake_tensor.init_gpu_context = lambda device: None
    FakeTensor.tolist = read
    torch.tensor = tensor
    torch.Tensor.type = spell
    torch.Tensor.cuda = lambda tensor, device=None, non_blocking=False, **options: tensor.to(
        CUDA, non_blocking=non_blocking
    )

    torch.Tensor.pin_memory = pin

    # Fake tensors have no memory that another stream could use.
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.nn.Module.cuda = lambda module, device=None: module.to(CUDA)
    torch.nn.Module._apply = _apply

    # On a GPU, Adam processes all parameters at once, which needs more memory than one by one.
    optimizer._foreach_supported_types.append(FakeTensor)


def _adapt_attention() -> None:
    """Choose the attention kernel instead of torch, which would query the device and cuDNN."""
    plain = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """Choose kernels as on an H100.

        Flash attention is used for 16-bit dtypes without a mask, also with fewer key heads than query heads.
        Everything else uses explicit matrix products, which need more memory than the kernels that a device
        has for some of these cases.
        """
        if query.device.type != "cuda":
            return plain(query, key, value, *arguments, **options)

        assert not arguments, arguments
        mask = options.get("attn_mask")
        is_causal = options.get("is_causal", False)
        scale = options.get("scale")

        if query.dtype in (torch.bfloat16, torch.float16) and mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, False, scale=scale
            )[0]

        product = torch.ops.aten._scaled_dot_product_attention_math
        enable_gqa = options.get("enable_gqa", False)
        return product(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]

    F.scaled_dot_product_attention = attention


def _gather_from_oneself(gathered: list[Any], mine: Any, group: Any = None) -> None:
    """Gather objects, assuming that those of the other ranks equal this one's.

    torch makes two calls: the lengths of the pickles, then their bytes. Only the first is made, so that the
    dry run records it; a single rank cannot know the length of the second.
    """
    length = torch.zeros(1, dtype=torch.int64, device=CUDA)
    dist.all_gather([torch.empty_like(length) for _ in gathered], length, group=group)
    gathered[:] = [mine] * len(gathered)


def _adapt_groups() -> None:
    """Create fake groups. NCCL and gloo would need ranks that do not exist."""
    made: Any = dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        return made(*arguments, **{**options, "backend": "fake", "pg_options": None})

    dist.new_group = new_group
    dist.all_gather_object = _gather_from_oneself


class _Sorted(torch.autograd.Function):
    """A copy, whose gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.clone()

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()


def sorting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of Megatron's function `sort_chunks_by_idxs`.

    It sorts the tokens of experts in one operation instead of two for each expert and rank. A dry run counts
    what an operation allocates. Megatron-Core's function splits the tokens into a chunk for each expert of
    each rank and joins them in another order: 512 operations on fake tensors per layer with 128 ranks of two
    experts, most of the time of a dry run. Forward and backward allocate the joined tokens only, as here.
    Both read the same numbers from the device, and refuse the same mistakes.
    """

    def sort_chunks_by_idxs(
        input: torch.Tensor,
        split_sizes: torch.Tensor,
        sorted_idxs: torch.Tensor,
        probs: torch.Tensor | None = None,
        fused: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Replace Megatron's function of this name. Transformer Engine's fused one is a single operation."""
        if fused:
            return original(input, split_sizes, sorted_idxs, probs=probs, fused=fused)
        output = _sort(input, split_sizes, sorted_idxs)
        return output, None if probs is None else _sort(probs, split_sizes, sorted_idxs)

    return sort_chunks_by_idxs


def _sort(tokens: torch.Tensor, split_sizes: torch.Tensor, sorted_idxs: torch.Tensor) -> torch.Tensor:
    sizes = split_sizes.tolist()
    order = sorted_idxs.tolist()
    if sum(sizes) != tokens.shape[0] or sorted(order) != list(range(len(sizes))):
        raise ValueError(
            f"{counted(tokens.shape[0], 'token')} sorted as {counted(len(sizes), 'chunk')} of "
            f"{counted(sum(sizes), 'token')}, in an order of {counted(len(order), 'chunk')}"
        )
    return _Sorted.apply(tokens)


def install(on_wait: Callable[[], None], transformer_engine: types.ModuleType | None) -> None:
    """Install every adaptation. Imports Megatron-Core.

    The device itself is torch's: in a CPU build, a guard for it must be loaded before torch.

    Args:
        on_wait: Called where the host would wait for the device without reading a tensor.
        transformer_engine: A stub of Transformer Engine's compiled module; None if it is not installed.
    """
    _adapt_cuda(on_wait)
    _adapt_groups()
    for module in ("megatron.core", "torch", "transformer_engine"):
        warnings.filterwarnings("ignore", module=module.replace(".", r"\."))

    # The pointer is 0 and passed to the fake runtime.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    with no_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if transformer_engine is not None:
            import_transformer_engine(transformer_engine)
        for module in ("megatron.core", "megatron.core.optimizer", "megatron.core.models.gpt"):
            importlib.import_module(module)

    _adapt_tensors()
    _adapt_attention()
    # A norm for CUDA in CPU builds, which have none. Without a kernel, torch decomposes the norm before
    # autograd and keeps float32 copies that the kernel does not make. The registered function only has to
    # exist: fake tensors never call it.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_NORM, "CUDA"):
        _KERNELS.impl(_NORM, lambda *arguments: NotImplemented)
    use_cpu_generator()
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.sort_chunks_by_idxs = sorting(token_dispatcher.sort_chunks_by_idxs)


class _Export(types.ModuleType):
    """Stub of the module that exports models to ONNX, which a run never does."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def import_transformer_engine(compiled: types.ModuleType) -> None:
    """Import Transformer Engine with a stub as its compiled module, in a process that has not imported it.

    The processes that this one starts must not inherit the settings.
    """
    assert _PACKAGE not in sys.modules, "Transformer Engine has already been imported"
    folder = find_transformer_engine()
    assert folder is not None, "a dry run without Transformer Engine uses local layers"
    # Last, so that nothing else is imported from there.
    sys.path.append(str(folder.parent))
    sys.modules[compiled.__name__] = compiled
    with replaced(os.environ, _SETTINGS):
        # The package imports its part for torch, which would look for the compiled module, if it can.
        sys.modules[_FRAMEWORK] = None  # pyrefly: ignore[unsupported-operation]
        common: Any = importlib.import_module(f"{_PACKAGE}.common")
        del sys.modules[_FRAMEWORK]
        common.load_framework_extension = lambda framework: None
        sys.modules[_EXPORT] = _Export(_EXPORT)
        importlib.import_module(_FRAMEWORK)
        _accept_fake_tensors()


def _accept_fake_tensors() -> None:
    """Let the choice of an attention kernel, which depends on the exact class of tensors, take fake ones."""
    attention: Any = importlib.import_module(f"{_FRAMEWORK}.attention.dot_product_attention.utils")
    choose = attention.get_attention_backend

    def choose_for_fake(parameters: Any) -> Any:
        if issubclass(parameters.qkv_type, FakeTensor):
            parameters = replace(parameters, qkv_type=torch.Tensor)
        return choose(parameters)

    attention.get_attention_backend = choose_for_fake
