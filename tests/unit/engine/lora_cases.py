"""Tiny models with adapters, and the same computed by PEFT, or by hand from the gradients of merged weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.models.adapters import adapter_names
from megarl.models.architecture import Architecture, LoRA
from megarl.models.families import read_architecture
from megarl.models.tensor_table import VALUE_HEAD_TENSOR
from megarl.weights.peft_folder import adapter_tensors, write_adapter
from tests.unit.engine.models import (
    gradients_of,
    load_critic,
    load_lm,
    make_batch,
    reference_logits,
    reference_values,
    save_critic,
    save_model,
    scores_of,
    with_one_prompt,
)

RANK = 4
ALPHA = 6.0
Tensors = dict[str, Tensor]


class Adapted(NamedTuple):
    """Folders of a model and of an adapter on it.

    Attributes:
        base: The model.
        adapter: The adapter, in PEFT's format.
        lora: Its rank, scale and targets.
    """

    base: str
    adapter: str
    lora: LoRA

    def architecture(self) -> Architecture:
        return replace(read_architecture(self.base), lora=self.lora)


def save_adapted(
    family: str, folder: Path, targets: tuple[str, ...] = (), modules_to_save: tuple[str, ...] = ()
) -> Adapted:
    """Write a model, and an adapter on it whose matrices and saved modules are all random."""
    save_model(family, folder / "base")
    lora = LoRA(rank=RANK, alpha=ALPHA, targets=targets, modules_to_save=modules_to_save)
    made = Adapted(str(folder / "base"), str(folder / "adapter"), lora)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in adapter_tensors(made.architecture(), "lm").items()
    }
    (folder / "adapter").mkdir()
    write_adapter(folder / "adapter", tensors, made.architecture(), made.base)
    return made


def weighted_batch() -> Tensors:
    """Add a weight per token and output, so that no two gradients are equal by symmetry."""
    batch = with_one_prompt(make_batch(), (0, 4, 2), (1, 5))
    generator = torch.Generator().manual_seed(2)
    for key in ("log_probs", "entropy", "values"):
        weights = torch.randn(batch["response_mask"].shape, generator=generator)
        batch[f"weight/{key}"] = weights * batch["response_mask"]
    return batch


class Reference(NamedTuple):
    """Outputs (B, R), those of the base model, and the gradients of the adapters by their names."""

    outputs: Tensors
    base_outputs: Tensors
    gradients: Tensors

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def by_peft(case: Adapted, batch: Tensors) -> Reference:
    """Run PEFT's own model."""
    import peft

    base = load_lm(Path(case.base))
    with torch.no_grad():
        base_outputs = scores_of(reference_logits(base, batch), batch)
    model = peft.PeftModel.from_pretrained(base, case.adapter, is_trainable=True)
    outputs = scores_of(reference_logits(model, batch), batch)
    _loss(outputs, batch).backward()
    return Reference(_detached(outputs), base_outputs, adapter_gradients(model))


def inject_adapters(model: torch.nn.Module, case: Adapted) -> None:
    """Replace the projections of a model, in place, by PEFT's layers with the adapters of a case.

    Nothing else of the model trains then.
    """
    import peft

    config = peft.LoraConfig.from_pretrained(case.adapter)
    config.inference_mode = False
    peft.inject_adapter_in_model(config, model)
    loaded = peft.set_peft_model_state_dict(model, adapters_of(case))
    assert not loaded.unexpected_keys


def adapter_gradients(model: Any) -> Tensors:
    """Return the gradients of what trains in PEFT's model, by the names in the tensor table."""
    return {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace(".modules_to_save", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def by_hand(case: Adapted, folder: Path, batch: Tensors) -> Reference:
    """Run Hugging Face's model with merged weights.

    The gradient G of a merged weight W + s B A gives those of A, s B^T G, and of B, s G A^T.
    """
    base = load_lm(Path(case.base))
    with torch.no_grad():
        base_outputs = scores_of(reference_logits(base, batch), batch)
    model = load_lm(save_merged(case, folder))
    outputs = scores_of(reference_logits(model, batch), batch)
    _loss(outputs, batch).backward()
    return Reference(_detached(outputs), base_outputs, _of_adapters(case, gradients_of(model)))


def critic_by_hand(case: Adapted, folder: Path, batch: Tensors) -> tuple[str, Reference]:
    """Run a critic with merged weights, whose head trains too. Also returns the folder of its base."""
    base = folder / "critic"
    save_critic(Path(case.base), base)
    critic = load_critic(base)
    with torch.no_grad():
        base_outputs = {"values": reference_values(critic, batch)}
    own = case._replace(base=str(base))
    merged = load_critic(save_merged(own, folder / "merged_critic"))
    outputs = {"values": reference_values(merged, batch)}
    _loss(outputs, batch).backward()
    gradients = gradients_of(merged)
    reference = Reference(
        _detached(outputs),
        base_outputs,
        _of_adapters(case, gradients) | {VALUE_HEAD_TENSOR: gradients[VALUE_HEAD_TENSOR]},
    )
    return str(base), reference


def save_merged(case: Adapted, folder: Path) -> Path:
    """Write the model with W + s B A instead of each W."""
    shutil.copytree(case.base, folder)
    save_file(merged_weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def merged_weights(case: Adapted) -> Tensors:
    """Return the weights of the model with W + s B A instead of each W."""
    weights = load_file(Path(case.base) / "model.safetensors")
    adapters = adapters_of(case)
    for name in weights:
        a, b = adapter_names(name)
        if a in adapters:
            weights[name] = weights[name] + case.lora.scale * (adapters[b] @ adapters[a])
    return weights | {name: value for name, value in adapters.items() if name in weights}


def adapters_of(case: Adapted) -> Tensors:
    stored = load_file(Path(case.adapter) / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): value for name, value in stored.items()}


def _of_adapters(case: Adapted, gradients: Tensors) -> Tensors:
    adapters = adapters_of(case)
    scale = case.lora.scale
    found: Tensors = {}
    for name, gradient in gradients.items():
        a, b = adapter_names(name)
        if a in adapters:
            found[a] = scale * adapters[b].T @ gradient
            found[b] = scale * gradient @ adapters[a].T
    return found


def _loss(outputs: Tensors, batch: Tensors) -> Any:
    return sum((value * batch[f"weight/{key}"]).sum() for key, value in outputs.items())


def _detached(outputs: Tensors) -> Tensors:
    return {key: value.detach() for key, value in outputs.items()}
