"""Rank that builds SGLang's own models and records the transfer plan of each in three ways. Runs in a
separate process.

    python plans_of_models.py RANK NUM_RANKS NUM_STAGES NUM_GROUPS RENDEZVOUS FOLDER...

Each folder contains a model's config.json and `manifest.json`, which maps names to shapes. Tensors that have
scales are in FP8. Prints one JSON object per folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl.rollout.sglang import cpu_adaptations, environment

environment.prepare("cpu")

import torch  # noqa: E402

from megarl.models.families import FAMILIES  # noqa: E402
from megarl.models.fp8 import scale_name  # noqa: E402
from megarl.rollout.derived_tensors import derived_tensors, refresh_derived  # noqa: E402
from megarl.rollout.destinations import DestinationPlan, record_plan, storage_of  # noqa: E402
from megarl.rollout.sglang.cpu_fp8 import dequantize_in_products  # noqa: E402
from megarl.weights.tensors import TensorMeta  # noqa: E402


class CountedModel:
    """Pass `load_weights` on to a model and count the calls.

    Args:
        one_by_one: Refuse more than one tensor per call.
    """

    def __init__(self, model: Any, one_by_one: bool = False) -> None:
        self._model = model
        self._one_by_one = one_by_one
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_calls += 1
        tensors = list(weights)
        if self._one_by_one and len(tensors) > 1:
            raise ValueError("one at a time")
        self._model.load_weights(iter(tensors))


# The classes that refuse torch's attention.
WITH_TRITON = ("exaone4", "gpt_oss")


def is_gpt_oss(folder: Path) -> bool:
    """Return whether the class cannot load a part of the experts."""
    return bool(json.loads((folder / "config.json").read_text())["model_type"] == "gpt_oss")


def build_model(
    folder: Path,
    rank: int,
    num_ranks: int,
    num_stages: int,
    num_groups: int,
    rendezvous: str,
    is_first: bool,
) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import _init_parallel_groups
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    fields = json.loads((folder / "config.json").read_text())
    added = FAMILIES[fields["model_type"]].added_for_sglang(fields, on_cpu=True)
    arguments = ServerArgs(
        model_path=str(folder),
        json_model_override_args=json.dumps(added),
        device="cpu",
        load_format="dummy",
        dtype="float32",
        tp_size=num_ranks // num_stages,
        pp_size=num_stages,
        attn_dp_size=num_groups,
        ep_size=1 if is_gpt_oss(folder) else num_groups if num_groups > 1 else num_ranks // num_stages,
        attention_backend="triton" if fields["model_type"] in WITH_TRITON else "torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
    )
    group = rank * num_groups // num_ranks if num_groups > 1 else None
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=group))
    if is_first:
        _init_parallel_groups(backend="gloo", dist_init_method=rendezvous, server_args=arguments, gpu_id=rank)
    model_config = ModelConfig.from_server_args(arguments)
    config = model_config.hf_config
    # On a CPU, SGLang's model runner adds the numbers of heads, which it pads if ranks cannot divide them.
    for heads in ("linear_num_key_heads", "linear_num_value_heads"):
        text = config.get_text_config()
        if hasattr(text, heads):
            setattr(text, f"{heads}_cpu", getattr(text, heads))
    # Arguments for sparse attention are resolved on GPUs only, but a model with indexers can be built on a CPU.
    if FAMILIES[fields["model_type"]].sglang_cpu_class is not None:
        config.architectures = fields["architectures"]
    if "quantization_config" in fields:
        return loaded_with_scales(model_config)
    kind, _ = ModelRegistry.resolve_model_cls(config.architectures)

    return kind(config=config)


def loaded_with_scales(model_config: Any) -> Any:
    """Return a quantized model as an engine builds it: SGLang's loader also sets the scales of the cache."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DummyModelLoader

    loader = DummyModelLoader(LoadConfig(load_format="dummy"))
    return loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))


def described(plan: DestinationPlan) -> dict[str, Any]:
    """Return the plan of each tensor, without object addresses, which differ between two plans of one
    model."""
    return {
        name: [
            [str(tensor_slice), view.data_ptr(), list(view.shape), list(view.stride())]
            for tensor_slice, view in tensor.parts
        ]
        for name, tensor in plan.tensors.items()
    }


def random_weights(manifest: dict[str, TensorMeta], seed: int) -> dict[str, torch.Tensor]:
    """Return the same weights on each rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(meta.shape, generator=generator).to(meta.dtype) for name, meta in manifest.items()
    }


def plain_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return buffers and tensors in attributes, except those that are parameters."""
    parameters = {storage_of(parameter) for parameter in model.parameters()}
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if isinstance(value, torch.Tensor) and value.numel() and storage_of(value) not in parameters
    }


def push(plan: DestinationPlan, weights: dict[str, torch.Tensor]) -> None:
    """Write weights into the parameters, as a weight sync does."""
    for name, tensor in plan.tensors.items():
        for tensor_slice, elements in tensor.parts:
            elements.detach().copy_(weights[name][tensor_slice.index])


def differing(model: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of plain tensors with other values."""
    found = plain_tensors(model)
    return sorted(name for name, value in expected.items() if not torch.equal(found[name], value))


def pushed_and_loaded(model: Any, manifest: dict[str, TensorMeta]) -> dict[str, Any]:
    """Compare plain tensors after a push with those after SGLang's own load of the same weights.

    Returns:
        The names that the loader derives by what it writes and by value, and those that differ after a push.
    """
    with derived_tensors(model) as derived:
        plan = record_plan(model, manifest)
    with derived_tensors(model) as refreshed:
        refresh_derived(model)
    with torch.no_grad():
        model.load_weights(iter(random_weights(manifest, 2).items()))
        expected = {name: value.clone() for name, value in plain_tensors(model).items()}
        model.load_weights(iter(random_weights(manifest, 3).items()))
        push(plan, random_weights(manifest, 2))
        by_value = differing(model, expected)
        cache_scales = empty_cache_scales(model)
        refresh_derived(model)
    return {
        "derived": sorted(name.partition(" of ")[0] for name in derived),
        "derived_by_value": by_value,
        "stale": sorted(derived - refreshed),
        "stale_by_value": differing(model, expected),
        "cache_scales": [float(scale) for scale in cache_scales],
    }


def empty_cache_scales(model: Any) -> list[torch.nn.Parameter]:
    """Overwrite and return the scales of the cache, as when an engine has released its memory."""
    scales = [scale for name, scale in model.named_parameters() if name.endswith((".k_scale", ".v_scale"))]
    for scale in scales:
        scale.fill_(float("nan"))
    return scales


def main(
    rank: int, num_ranks: int, num_stages: int, num_groups: int, rendezvous: str, folders: list[Path]
) -> None:
    cpu_adaptations.install_in_arguments()
    cpu_adaptations.rotate_without_scaling()
    cpu_adaptations.name_the_cpu_as_device()
    dequantize_in_products()
    for number, folder in enumerate(folders):
        model = build_model(folder, rank, num_ranks, num_stages, num_groups, rendezvous, is_first=number == 0)
        shapes = json.loads((folder / "manifest.json").read_text())
        manifest = {
            name: TensorMeta(
                tuple(shape), torch.float8_e4m3fn if scale_name(name) in shapes else torch.float32
            )
            for name, shape in shapes.items()
        }
        at_once = CountedModel(model)
        one_by_one = CountedModel(model, one_by_one=True)
        plan = record_plan(at_once, manifest)
        expected = record_plan(one_by_one, manifest)
        backwards = record_plan(model, dict(reversed(manifest.items())))
        result = {
            "model": type(model).__name__,
            "num_calls": at_once.num_calls,
            "num_calls_one_by_one": one_by_one.num_calls,
            "num_parts": sum(len(tensor.parts) for tensor in plan.tensors.values()),
            "slices": {
                name: sorted([*part.starts, *part.stops] for part in parts)
                for name, parts in plan.slices.items()
            },
            "held": sorted(name for name, tensor in plan.tensors.items() if tensor.parts),
            "differing": [
                name for name, parts in described(plan).items() if described(expected)[name] != parts
            ],
            "is_the_same_backwards": described(plan) == described(backwards),
            "not_followed": plan.not_followed,
            "unreached": plan.unreached,
            **pushed_and_loaded(model, manifest),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5], [Path(folder) for folder in sys.argv[6:]])
