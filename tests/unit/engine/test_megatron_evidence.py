"""Quotes of Megatron-Core's source that make replacements and additions of megarl necessary."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.unit.engine.test_cpu_adaptations import megatron_source


class MegatronEvidence(NamedTuple):
    module: str  # below megatron.core
    attribute: str
    source: str  # must occur in the attribute's source
    reason: str


_ROPE = "models.common.embeddings.rope_utils"
_RNG = "tensor_parallel.random"
_EXPERTS = "transformer.moe."
_MAPPINGS = "tensor_parallel.mappings"

# The quotes by the file of megarl/engine that has the replacement.
EVIDENCE = {
    "cpu_adaptations.py": (
        MegatronEvidence(
            "optimizer.clip_grads",
            "clip_grad_by_total_norm_fp32",
            "'torch.cuda.FloatTensor'",
            "asserts a CUDA tensor",
        ),
        MegatronEvidence(
            "optimizer.distrib_optimizer",
            "DistributedOptimizer",
            "'torch.cuda.FloatTensor'",
            "sorts parameters by type()",
        ),
        MegatronEvidence(
            _RNG, "_get_cuda_rng_state", "torch.cuda.random.get_rng_state", "reads the GPU's random state"
        ),
        MegatronEvidence(_RNG, "_set_cuda_rng_state", "_lazy_call", "sets the GPU's random state"),
        MegatronEvidence(
            _ROPE, "_apply_rotary_pos_emb_thd", "for x in sequence_splits", "loops over sequences in Python"
        ),
        MegatronEvidence(
            "models.common.embeddings.rotary_pos_embedding",
            "RotaryEmbedding",
            "@lru_cache(maxsize=32)",
            "keeps a table of angles for each length",
        ),
        MegatronEvidence(
            "pipeline_parallel.schedules",
            "forward_backward_no_pipelining",
            'device="cuda"',
            "makes tensors on the GPU",
        ),
        MegatronEvidence(
            "pipeline_parallel.p2p_communication",
            "P2PCommunicator",
            "torch.cuda.current_device()",
            "receives on the GPU",
        ),
        MegatronEvidence(
            "tensor_parallel.layers",
            "LinearWithGradAccumulationAndAsyncCommunication",
            "torch.matmul(",
            "multiplies with MKL",
        ),
        MegatronEvidence(
            "fusions.fused_bias_swiglu", "bias_swiglu_impl", "SwiGLUFunction.apply", "fuses by compiling"
        ),
        MegatronEvidence(
            "distributed.param_and_grad_buffer",
            "_ParamAndGradBucketGroup",
            "dist_reduce_scatter_func(",
            "reduces in a group of one",
        ),
        MegatronEvidence(
            _EXPERTS + "moe_utils",
            "maybe_move_tensor_to_cpu",
            "tensor.is_cuda",
            "numbers of tokens stay tensors",
        ),
        MegatronEvidence(
            _EXPERTS + "token_dispatcher",
            "MoEAlltoAllTokenDispatcher",
            "self.d2h_event.synchronize()",
            "waits for a stream",
        ),
        MegatronEvidence(
            _MAPPINGS,
            "_gather_along_first_dim",
            "torch.distributed.all_gather(",
            "gathers parts of unequal sizes",
        ),
        MegatronEvidence(
            _MAPPINGS,
            "_reduce_scatter_along_first_dim",
            "torch.distributed.reduce_scatter(",
            "scatters unequal parts",
        ),
        MegatronEvidence(
            "jit", "enable_jit_fuser", "torch.compile", "jit_fuser compiles small functions when first called"
        ),
    ),
    "fake_cuda.py": (
        MegatronEvidence(
            _RNG, "_get_cuda_rng_state", "torch.cuda.random.get_rng_state", "reads the GPU's random state"
        ),
        MegatronEvidence(_RNG, "_set_cuda_rng_state", "_lazy_call", "sets the GPU's random state"),
        MegatronEvidence(
            "optimizer",
            "_get_param_groups",
            "torch.distributed.all_gather_object",
            "asks all ranks, which do not exist",
        ),
        MegatronEvidence(
            "optimizer.distrib_optimizer",
            "DistributedOptimizer",
            "'torch.cuda.FloatTensor'",
            "sorts parameters by type()",
        ),
        MegatronEvidence(
            "pipeline_parallel.p2p_communication",
            "P2PCommunicator",
            "torch.cuda.current_device()",
            "receives on the GPU",
        ),
        MegatronEvidence(
            "utils",
            "local_multi_tensor_l2_norm",
            "torch.tensor(l2)",
            "reads the norm of each gradient, in a list",
        ),
        MegatronEvidence(
            "transformer.moe.moe_utils",
            "maybe_move_tensor_to_cpu",
            "tensor.record_stream(",
            "passes streams to torch",
        ),
        MegatronEvidence(
            "jit", "enable_jit_fuser", "torch.compile", "jit_fuser compiles small functions when first called"
        ),
    ),
    "latent_attention.py": (
        MegatronEvidence(
            "models.gpt.gpt_layer_specs",
            "get_gpt_layer_local_submodules",
            "linear_kv_down_proj=backend.column_parallel_linear()",
            "cuts down projections over ranks, which loses parts of their gradients",
        ),
        MegatronEvidence(
            "transformer.mla_qk_norm_config",
            "QKNormConfigResolver",
            "linear_q_proj_cls = self._mla_fused_linear_or_default(",
            "without latent queries, normalizes the hidden states a second time",
        ),
        MegatronEvidence(
            "transformer.multi_latent_attention",
            "MLASelfAttention",
            "if get_pg_size(self.tp_group) > 1 and self.config.sequence_parallel:",
            "without sequence parallelism, does not sum the gradient of the shared key over ranks",
        ),
        MegatronEvidence(
            "distributed.finalize_model_grads",
            "_allreduce_non_tensor_model_parallel_grads",
            '"q_layernorm" in name',
            "with qk_layernorm, sums the gradient of this norm over ranks, which all have the whole",
        ),
        MegatronEvidence(
            "transformer.multi_latent_attention",
            "MultiLatentAttention",
            "self.rotary_pos_emb = RotaryEmbedding(",
            "has a rotary embedding of its own in each layer",
        ),
    ),
    "layer_specs.py": (
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
        MegatronEvidence(
            "transformer.moe.token_dispatcher",
            "_DeepepManager",
            "valid_indices = indices[mask]",
            "waits for the device to convert routes",
        ),
    ),
    "norms.py": (
        MegatronEvidence(
            "transformer.attention",
            "SelfAttention",
            "q_norm_cls = submodules.q_layernorm or L2Norm",
            "uses the norm of the specification with qk_l2_norm",
        ),
    ),
}


@pytest.mark.parametrize(
    ("file", "evidence"),
    [(file, evidence) for file, of_file in EVIDENCE.items() for evidence in of_file],
    ids=lambda each: each if isinstance(each, str) else each.reason,
)
def test_megatron_still_does_what_is_adapted(file: str, evidence: MegatronEvidence) -> None:
    assert evidence.source in megatron_source(evidence.module, evidence.attribute), (
        f"megatron.core.{evidence.module}.{evidence.attribute} no longer holds {evidence.source!r} "
        f"({evidence.reason}): see whether its adaptation in {file} is still needed"
    )


def test_biases_of_row_parallel_layers_are_not_marked_as_sharded() -> None:
    source = megatron_source("tensor_parallel.layers", "RowParallelLinear")
    assert "set_tensor_model_parallel_attributes(self.bias" not in source
