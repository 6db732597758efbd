"""Stub of Triton, which has no build for machines without a GPU and is imported throughout SGLang.

Every submodule and every name can be imported, including decorators, and kernels can be defined; calls that
would do work raise.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

__version__ = "3.0.0"


class Kernel:
    """Result of `triton.jit`: a kernel that is defined but never launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def _refuse(self, *arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"Triton kernel {self.__name__} was called: this process runs SGLang on the CPU"
        )

    __call__ = __getitem__ = _refuse


class _Anything:
    def __init__(self, *arguments: object, **keywords: object) -> None:
        pass


class _Module(types.ModuleType):
    """A submodule or a function in one, used as decorators and annotations when SGLang is imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Finder, is_package=True)

    def __getattr__(self, name: str) -> Any:
        return _resolve(self.__name__, name)

    def __call__(self, *arguments: Any, **keywords: object) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not keywords:
            return arguments[0]
        return lambda function: function

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _resolve(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    full_name = f"{owner}.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    found: Any
    if name[:1].isupper():
        is_error = name.endswith("Error") or name == "OutOfResources"
        found = type(name, (Exception if is_error else _Anything,), {"__module__": owner})
    else:
        found = sys.modules[full_name] = _Module(full_name)
    setattr(sys.modules[owner], name, found)
    return found


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _Module(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    return _resolve("triton", name)


def jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
    return Kernel(function) if function is not None else Kernel


def _decorator(*arguments: object, **options: object) -> Callable[[Any], Any]:
    return lambda kernel: kernel


autotune = heuristics = _decorator


def cdiv(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


class Config:
    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 2, **options: object
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


import triton.language as language  # noqa: E402  found by the finder above


class _Constexpr:
    def __init__(self, value: object = None) -> None:
        self.value = value


language.constexpr = _Constexpr  # type: ignore[attr-defined]
# Torch uses it in isinstance.
language.dtype = type("dtype", (), {"__module__": "triton.language"})  # type: ignore[attr-defined]
