"""The parts of Megatron-Core's source that `latent_attention` replaces, as in `cpu_adaptations`.

A test fails when a new Megatron no longer contains one of them. Does not import Megatron.
"""

from __future__ import annotations

from megarl.engine.cpu_adaptations import MegatronEvidence

EVIDENCE = (
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
)
