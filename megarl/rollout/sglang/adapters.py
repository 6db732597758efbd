"""A policy with adapters in SGLang: the base model, and adapters in the buffers of SGLang's own LoRA support.

SGLang computes with buffers of several adapters, one in each slot, next to the weights of its layers. Here
one adapter is loaded at startup, empty, and every request names it. A weight sync writes its matrices into
SGLang's buffers, each rank's slices as SGLang shards them, so requests in flight continue with the new ones,
and checksums are those of what SGLang computes with. An engine's world has as many ranks as shard its layers.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.adapters import SERVED_PROJECTIONS, is_adapter
from megarl.models.architecture import LoRA

ADAPTER = "policy"  # SGLang's name of the adapter
_NUM_SLOTS = 2  # the first one belongs to requests without an adapter, such as those of SGLang's health check
_SLOT = 1
# Hugging Face projection -> SGLang's layer, and the position of the projection in it
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "o_proj": ("o_proj", 0),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
}
_NAME = re.compile(r"(.+)\.(\w+)\.lora_([AB])\.weight")


def server_arguments(lora: LoRA, on_cpu: bool) -> dict[str, Any]:
    """Return SGLang's arguments for an adapter of this rank."""
    targets = lora.targets or SERVED_PROJECTIONS
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "max_loras_per_batch": _NUM_SLOTS,
        "lora_target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        **({"lora_backend": "torch_native"} if on_cpu else {}),
    }


def empty_adapter(lora: LoRA, num_ranks: int) -> dict[str, Any]:
    """Return the payload that loads the adapter without tensors, which are zero then."""
    targets = lora.targets or SERVED_PROJECTIONS
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
    }

    return {
        "lora_name": ADAPTER,
        "config_dict": config,
        "serialized_named_tensors": [pickle.dumps({})] * num_ranks,
        "pinned": True,
    }


def first_request() -> dict[str, Any]:
    """Return a request that makes SGLang move the adapter into its slot, which it does at the first use."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [0], "sampling_params": sampling, "lora_path": ADAPTER}


class AdaptedModel:
    """A model of SGLang whose parameters include the buffers of the adapter.

    Code that finds where a model stores its tensors by `load_weights` finds those of the adapter as well.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = dict(_layers_with_adapters(model))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[torch.Tensor]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        for name, layer in self._layers.items():
            yield f"{name}.lora_a", layer.lora_a
            yield f"{name}.lora_b", layer.lora_b

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors of the base model and of the adapter, by their Hugging Face names."""
        adapter = {}
        base = []
        for name, tensor in tensors:
            if is_adapter(name):
                adapter[name] = tensor
            else:
                base.append((name, tensor))

        if base:
            self._model.load_weights(iter(base))
        for name, tensor in adapter.items():
            source, target = _copy_of(name, tensor, self._layers)
            target.copy_(source)


def with_adapters(model: Any) -> Any:
    """Return the model with its adapter; itself if SGLang was started without."""
    return AdaptedModel(model) if any(True for _ in _layers_with_adapters(model)) else model


def _layers_with_adapters(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_a"))


def _copy_of(name: str, tensor: torch.Tensor, layers: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank's part of a matrix, and the part of the buffer that it belongs in."""
    matched = _NAME.fullmatch(name)
    assert matched is not None, name
    path, projection, matrix = matched.groups()
    module, position = _FUSED[projection]
    layer = layers[f"{path}.{module}"]

    if matrix == "A":
        rank, inputs = tensor.shape
        size = getattr(layer.base_layer, "input_size_per_partition", inputs)
        own = _own_part(inputs, size, dist.get_rank())
        target = layer.lora_a[_SLOT, position * rank : (position + 1) * rank]
        return tensor[:, own], target[:, : own.stop - own.start]

    # Several ranks may have the same head of keys and values.
    start, stop = layer.lora_offsets[position : position + 2]
    copies = getattr(layer.base_layer, "num_kv_head_replicas", 1) if position else 1
    own = _own_part(tensor.shape[0], stop - start, dist.get_rank() // copies)
    return tensor[own], layer.lora_b[_SLOT, start : start + own.stop - own.start]


def _own_part(total: int, size: int, number: int) -> slice:
    """Return a rank's part of an axis: all of it unless it is sharded. SGLang pads the end of some axes."""
    if size == total:
        return slice(0, total)
    return slice(min(number * size, total), min((number + 1) * size, total))
