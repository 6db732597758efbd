"""Refresh what an engine derives from its weights, and find what a weight sync would leave stale.

A weight sync writes parameters directly (destinations.py), while the model's own loader may also compute
other tensors from them: a second copy of a norm's weight, products of projections. `refresh_derived` computes
them again after each sync. `DerivedTensors` observes which tensors a call writes without reading a value, so
that what the loader derives can be compared with what is refreshed, on each model and device of a run:

    with DerivedTensors(model) as derived:
        plan = record_plan(model, manifest)     # runs the model's loader
    with DerivedTensors(model) as refreshed:
        refresh_derived(model)
    stale = derived.written - refreshed.written
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rollout.destinations import storage_of


def refresh_derived(model: Any) -> None:
    """Compute the tensors that SGLang derives from weights, after the weights were written.

    SGLang does so after loading. It does not do so for a weight sync, because it takes the messages of our
    loader for loaded weights.
    """
    fill_cache_scales(model)
    with torch.no_grad():
        for module in model.modules():
            # Norms that add 1 to their weight keep the sum, which fused kernels read.
            if hasattr(module, "refresh_gemma_weight"):
                module.refresh_gemma_weight()
        # Models with latent attention keep products of their weights.
        if hasattr(model, "post_load_weights"):
            model.post_load_weights()


def fill_cache_scales(model: Any) -> None:
    """Restore the scales of the KV cache, which SGLang computes once, and loses when it releases memory."""
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            if isinstance(scale := getattr(module, name, None), torch.nn.Parameter):
                scale.detach().fill_(getattr(module, f"{name}_float"))


class DerivedTensors:
    """Observes which tensors of a model, other than parameters, are written or replaced within the context.

    Attributes:
        written: Their names, with the class of their module, when the context has ended.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before: dict[str, int] = {}
        self._writes = _Writes()
        self.written: frozenset[str] = frozenset()

    def __enter__(self) -> Self:
        self._before = {name: storage_of(tensor) for name, tensor in _plain_tensors(self._model)}
        self._writes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writes.__exit__(kind, error, trace)
        self.written = frozenset(
            name
            for name, tensor in _plain_tensors(self._model)
            if storage_of(tensor) in self._writes.storages or self._before.get(name) != storage_of(tensor)
        )


class _Writes(TorchDispatchMode):
    """Records the storages of all tensors that operations change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self._written_arguments: dict[Any, list[tuple[int, str]]] = {}  # of each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        for place, name in self._written_by(func):
            argument = args[place] if place < len(args) else named.get(name)
            for each in argument if isinstance(argument, (list, tuple)) else [argument]:
                if isinstance(each, torch.Tensor):
                    self.storages.add(storage_of(each))
        return func(*args, **named)

    def _written_by(self, func: Any) -> list[tuple[int, str]]:
        if func not in self._written_arguments:
            self._written_arguments[func] = [
                (place, argument.name)
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        return self._written_arguments[func]


def _plain_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers and tensors in attributes of modules, except those that share memory with a parameter."""
    parameters = {storage_of(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        found = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, value in found.items():
            if name in ("_parameters", "_modules", "_buffers"):
                continue
            for suffix, tensor in _tensors_in(value):
                if tensor.numel() and storage_of(tensor) not in parameters:
                    yield f"{path}.{name}{suffix} of {type(module).__name__}", tensor


def _tensors_in(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            if isinstance(each, torch.Tensor):
                yield f"[{number}]", each
    elif isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, torch.Tensor):
                yield f"[{key!r}]", each
