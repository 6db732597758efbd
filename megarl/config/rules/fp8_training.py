"""Rules for training with products in FP8 (`{role}.megatron.transformer.fp8`)."""

from __future__ import annotations

from megarl.config.finding import Finding, Findings
from megarl.config.roles import ModelRole
from megarl.config.schema import Device, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import linears_of

# Transformer Engine multiplies in FP8 only if both dimensions of a weight are multiples of it
# (`assert_dim_for_fp8_exec`).
MULTIPLE = 16
# The owners of matrices with these names, which the names of the modules do not tell.
_OWNERS = {"mlp.experts.": "an expert's ", "mlp.shared_experts.": "the shared experts' "}
_DELAYED = "delayed"  # Megatron's default


def recipe(config: RunConfig, role: ModelRole) -> Findings:
    """Refuse the recipe whose scales come from earlier batches."""
    options = role.megatron.transformer
    is_delayed = options.get("fp8") and options.get("fp8_recipe", _DELAYED) == _DELAYED
    if not is_delayed or config.device is Device.cpu:  # where FP8 is refused anyway
        return

    key = f"{role.megatron_key}.transformer.fp8_recipe"
    given = "is delayed" if "fp8_recipe" in options else "is not set, so it is delayed"

    yield Finding(
        (key,),
        f"{given}: its scales come from earlier micro-batches, so log-probs would depend on what ran "
        "before, and a recovered or resumed run would differ; use blockwise (Hopper), mxfp8 (Blackwell) or "
        "tensorwise",
    )


def fit_model(role: ModelRole, architecture: Architecture) -> Findings:
    """Check that a rank's part of every projection has sizes that Transformer Engine multiplies in FP8."""
    if not role.megatron.transformer.get("fp8"):
        return
    widths = _widths(role, architecture)
    sizes = ", ".join(f"{size:g} {where}" for size, where in widths.items() if size % MULTIPLE)
    if not sizes:
        return

    yield Finding(
        (f"{role.megatron_key}.transformer.fp8", role.parallel_key),
        f"is {role.megatron.transformer['fp8']}, but a rank of {role.path} would have {sizes}, and FP8 needs "
        f"multiples of {MULTIPLE}; use fewer tensor-parallel ranks, or remove fp8",
    )


def _widths(role: ModelRole, architecture: Architecture) -> dict[float, str]:
    """Return the sizes of the rows and columns of a rank's linear layers, each with one that has it."""
    parallel = role.parallel
    widths: dict[float, str] = {architecture.hidden_size: "numbers of a hidden state"}
    for matrix in linears_of(architecture):
        owner = next((owner for prefix, owner in _OWNERS.items() if matrix.name.startswith(prefix)), "")
        modules = owner + ", ".join(matrix.modules)
        rows, columns = matrix.shards(parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size)
        widths.setdefault(matrix.inputs / columns, f"columns of {modules}")
        widths.setdefault(matrix.outputs / rows, f"rows of {modules}")
    return widths
