"""The name under which tensors are pickled."""

from __future__ import annotations

from typing import Any

import torch


def pickle_as_torch() -> None:
    """Let tensors that this process pickles be unpickled by processes without Megatron.

    Megatron replaces `torch.storage._load_from_bytes`, which pickled tensors refer to, with a function of its
    own. Under that function's name, every process that receives a tensor through Ray would import Megatron,
    and SGLang, which accepts a fixed list of names, would refuse it.
    """
    load: Any = torch.storage._load_from_bytes
    load.__module__ = "torch.storage"
    load.__name__ = load.__qualname__ = "_load_from_bytes"
