"""The registry of simulated functions of Transformer Engine, and the checks of their arguments."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from megarl.rehearse.dry_run.ledger import place
from megarl.rehearse.dry_run.record import RehearsalError
from megarl.rehearse.dry_run.stand_ins.te_enums import TEDType

KERNELS: dict[str, Callable[..., Any]] = {}

TORCH_DTYPES = {
    TEDType.kByte: torch.uint8,
    TEDType.kInt32: torch.int32,
    TEDType.kFloat32: torch.float32,
    TEDType.kFloat16: torch.float16,
    TEDType.kBFloat16: torch.bfloat16,
}

_receive_flops: Callable[[int], None] | None = None


def count_flops_with(count: Callable[[int], None]) -> None:
    """Set the function that receives the floating-point operations of each kernel."""
    global _receive_flops
    _receive_flops = count


def count_flops(flops: int) -> None:
    assert _receive_flops is not None
    _receive_flops(flops)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function, and check its arguments as pybind11 and the device would."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    name = function.__name__

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:
            raise RehearsalError(f"Transformer Engine's compiled {name}: {error}, at {place()}") from error

        for parameter, value in bound.arguments.items():
            if not converts(value, hints[parameter]):
                raise RehearsalError(
                    f"Transformer Engine's compiled {name}: argument {parameter} is {kind_of(value)}, but "
                    f"the function accepts {signature.parameters[parameter].annotation}, at {place()}"
                )

        for tensor in tree_iter((arguments, keywords)):
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
                raise RehearsalError(
                    f"Transformer Engine's compiled {name} gets a tensor on {tensor.device}, at {place()}"
                )

        try:
            return function(*arguments, **keywords)
        except _RefusedError as error:
            raise RehearsalError(f"Transformer Engine's compiled {name}: {error}, at {place()}") from error

    KERNELS[name] = checked
    return checked


class _RefusedError(Exception):
    """An argument that the compiled function refuses."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise _RefusedError(message)


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def converts(value: Any, hint: Any) -> bool:
    """Return whether pybind11 converts a value to the type of an argument."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is types.UnionType:
        return any(converts(value, each) for each in typing.get_args(hint))
    if origin is list:
        (element,) = typing.get_args(hint)
        return isinstance(value, list | tuple) and all(converts(each, element) for each in value)

    # The enums of Transformer Engine's Python modules have the values of the compiled ones.
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return isinstance(value, int) and not isinstance(value, bool) and value in hint
    if hint is int:
        return isinstance(value, int)
    if hint is float:
        return isinstance(value, int | float)
    if hint is bool:
        return value is None or isinstance(value, int)  # whatever has a truth value, and None
    return isinstance(value, hint)


def matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    """Return the size of a matrix: all dimensions but the last are one."""
    return prod(shape[:-1]), shape[-1]


def new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")
