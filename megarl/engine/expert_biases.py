"""Biases of experts, which Megatron-Core 0.19 treats as if every rank had the same experts.

- The bias of an expert's second layer is marked `sequence_parallel`, so that Megatron adds up the gradients
  of different experts over the tensor-parallel ranks.
- It is not marked as sharded, so that all gradients but those of rank 0 are left out of the gradient norm.
- It is added in place to the output of a layer, of which autograd knows that it is a view.

A test for each fails when a new Megatron no longer does this.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.engine.cpu_adaptations import MegatronEvidence

EVIDENCE = (
    MegatronEvidence(
        "tensor_parallel.layers",
        "RowParallelLinear",
        'setattr(self.bias, "sequence_parallel", self.sequence_parallel)',
        "sums the biases of different experts over ranks",
    ),
    MegatronEvidence(
        "tensor_parallel.layers",
        "RowParallelLinear",
        'setattr(self.bias, "allreduce", not use_expert_pgs)',
        "marks the biases of experts, but not as sharded",
    ),
    MegatronEvidence(
        "transformer.mlp",
        "MLP",
        "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)",
        "adds the bias of an expert in place to a view",
    ),
)


def finish(model: torch.nn.Module) -> None:
    """Mark the biases of a chunk's experts as what they are, and give each layer an output of its own."""
    for name, module in model.named_modules():
        if ".local_experts." not in name or not name.endswith("linear_fc2"):
            continue
        bias: Any = module.bias
        bias.sequence_parallel = False
        bias.tensor_model_parallel = True
        module.register_forward_hook(_with_own_output)


def _with_own_output(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    return outputs[0].clone(), *outputs[1:]
