"""Import Transformer Engine's Python modules on top of a stub of its compiled module, without a GPU."""

from __future__ import annotations

import importlib
import os
import sys
import types
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megarl.config.layers import find_transformer_engine

_PACKAGE = "transformer_engine"
_FRAMEWORK = f"{_PACKAGE}.pytorch"
_EXPORT = f"{_FRAMEWORK}.onnx_extensions"  # its imports, onnx and onnxscript, serve nothing else
# The package then loads no shared library, and compiles no function with torch.compile.
_SETTINGS = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}


class _Export(types.ModuleType):
    """Stub of the module that exports models to ONNX, which a run never does."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def install(compiled: types.ModuleType) -> None:
    """Import Transformer Engine with a stub as its compiled module, in a process that has not imported it.

    The processes that this one starts must not inherit the settings.
    """
    assert _PACKAGE not in sys.modules, "Transformer Engine has already been imported"
    folder = find_transformer_engine()
    assert folder is not None, "a dry run without Transformer Engine uses local layers"
    # Last, so that nothing else is imported from there.
    sys.path.append(str(folder.parent))
    sys.modules[compiled.__name__] = compiled
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)

    try:
        # The package imports its part for torch, which would look for the compiled module, if it can.
        sys.modules[_FRAMEWORK] = None  # pyrefly: ignore[unsupported-operation]
        common: Any = importlib.import_module(f"{_PACKAGE}.common")
        del sys.modules[_FRAMEWORK]
        common.load_framework_extension = lambda framework: None
        sys.modules[_EXPORT] = _Export(_EXPORT)
        importlib.import_module(_FRAMEWORK)
        _accept_fake_tensors()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _accept_fake_tensors() -> None:
    """Let the choice of an attention kernel, which depends on the exact class of tensors, take fake ones."""
    attention: Any = importlib.import_module(f"{_FRAMEWORK}.attention.dot_product_attention.utils")
    choose = attention.get_attention_backend

    def choose_for_fake(parameters: Any) -> Any:
        if issubclass(parameters.qkv_type, FakeTensor):
            parameters = replace(parameters, qkv_type=torch.Tensor)
        return choose(parameters)

    attention.get_attention_backend = choose_for_fake
