"""Refresh what an engine derives from its weights, and find what a weight sync would leave stale.

A weight sync writes parameters directly (destinations.py), while the model's own loader may also compute
other tensors from them: a second copy of a norm's weight, products of projections. `refresh_derived` computes
them again after each sync. `derived_tensors` observes which tensors a call writes without reading a value, so
that what the loader derives can be compared with what is refreshed, on each model and device of a run:

    with derived_tensors(model) as derived:
        plan = record_plan(model, manifest)     # runs the model's loader
    with derived_tensors(model) as refreshed:
        refresh_derived(model)
    stale = derived - refreshed
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rollout.destinations import storage_of


def refresh_derived(model: Any) -> None:
    """Compute the tensors that SGLang derives from weights, after the weights were written.

    SGLang does so after loading. It does not do so for a weight sync, because it takes the messages of our
    loader for loaded weights.
    """
    with torch.no_grad():
        for module in model.modules():
            # SGLang computes the scales of the KV cache once, and loses them when it releases memory.
            for name in ("k_scale", "v_scale"):
                if isinstance(scale := getattr(module, name, None), torch.nn.Parameter):
                    scale.fill_(getattr(module, f"{name}_float"))
            # Norms that add 1 to their weight keep the sum, which fused kernels read.
            if hasattr(module, "refresh_gemma_weight"):
                module.refresh_gemma_weight()
        # Models with latent attention keep products of their weights.
        if hasattr(model, "post_load_weights"):
            model.post_load_weights()


@contextmanager
def derived_tensors(model: Any) -> Generator[set[str]]:
    """Observe which tensors of a model, other than parameters, are written or replaced within the context.

    Yields the set of their names, with the class of their module, which is filled when the context ends.
    """
    before = {name: storage_of(tensor) for name, tensor in _plain_tensors(model)}
    written: set[str] = set()
    with _Writes() as writes:
        yield written
    written.update(
        name
        for name, tensor in _plain_tensors(model)
        if storage_of(tensor) in writes.storages or before.get(name) != storage_of(tensor)
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
    elif isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, torch.Tensor):
                yield f"[{key!r}]", each
