"""SGLang's arguments of the user: those that cannot work are refused early.

This module does not import torch, because `megarl check --fast` uses it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megarl.config.speculation import ARGUMENTS as SPECULATIVE_ARGUMENTS
from megarl.machine.errors import ConfigError

# Arguments that megarl sets, and the key that a user sets instead.
_OWN = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "quantization": "rollout.dtype",
    "device": "device",
    "tp_size": "rollout.tensor_parallel_size",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "ep_size": "rollout.expert_parallel_size",
    "expert_parallel_size": "rollout.expert_parallel_size",
    # Experts must not be moved or converted: each rank receives the weights of its experts by their numbers.
    "moe_runner_backend": None,
    "moe_a2a_backend": None,
    "enable_eplb": None,
    "ep_num_redundant_experts": None,
    "init_expert_location": None,
    "max_running_requests": "rollout.max_concurrency",
    "enable_return_routed_experts": "engine.routing_replay",
    "enable_fp32_lm_head": "engine.fp32_lm_head",
    "pp_size": "rollout.pipeline_parallel_size",
    "pipeline_parallel_size": "rollout.pipeline_parallel_size",
    "nnodes": "placement.devices_per_node",
    "node_rank": None,
    "dist_init_addr": None,
    "base_gpu_id": None,
    "skip_tokenizer_init": None,
    "context_length": None,
    "json_model_override_args": None,
    "load_format": None,
    "custom_weight_loader": None,
    "weight_version": None,
    "speculative_draft_load_format": None,
    "enable_draft_weights_cpu_backup": None,
    "enable_memory_saver": None,
    "allow_auto_truncate": None,
    "skip_server_warmup": None,
    "tokenizer_worker_num": None,
    "host": None,
    "port": None,
    "api_key": None,
    "admin_api_key": None,
}
# Arguments of which some values leave the weights as the trainer sends them. The first one is the default.
CHOICES = {
    # On Hopper, DeepGEMM takes float32 scales as they are sent. The loader refuses GPUs that convert them.
    "fp8_gemm_runner_backend": ("triton", "deep_gemm"),
}
# Families of arguments that megarl does not support, by a pattern of their names, and the reason.
_UNSUPPORTED = {
    r"speculative_accept_threshold_": (
        "it accepts drafted tokens that are not samples of the policy, so their log-probs would be wrong"
    ),
    r"speculative_token_map": (
        "SGLang copies rows of the policy's output layer once, and the copy would not follow the trainer"
    ),
    r"speculative_|decoupled_spec_|spec_trace_|.*_draft_|enable_multi_layer_eagle": (
        "megarl has no test that its samples are those of the policy after a weight sync"
    ),
    r"(?!enable_quant_communications).*quant|modelopt_|kt_": (
        "quantized weights are not laid out as the trainer sends them, so the first weight sync would fail"
    ),
    r".*lora": "megarl derives the arguments for adapters from actor.lora, with sync=adapter",
    r"disaggregation_|enable_pd|pdmux_|encoder_|.*_to_encoder": (
        "prefill and decode run in one engine, which gets all weights"
    ),
    r"pp_async_batch_depth": "megarl has no test of stages that return samples later",
    r"cpu_offload_gb|offload_|ple_offload_|weight_cache_|remote_instance_|startup_weight_load_mode|"
    r"checkpoint_engine_|model_loader_": (
        "weights come only from the trainer, and go into the memory of the device"
    ),
    r"(enable_)?elastic_|ep_join_|max_ep_size|eplb_": (
        "experts must stay on the ranks to which the trainer sends them"
    ),
    r"enable_dp_attention$|(data_parallel|dp)_size$": (
        "it has other names: engines are rollout.num_replicas, and groups with an attention of their own "
        "attn_dp_size"
    ),
    r"(?!attn_dp_size$)attn_[dc]p_|moe_dp_|moe_dense_tp_|d?cp_|dwdp_|enable_[dc]p_|enable_prefill_cp|"
    r".*(context|data)_parallel": ("a rank would hold other parts of the weights than megarl sends it"),
    r"is_embedding|language_only|language_model_only|enable_multimodal|dllm_": (
        "engines generate text with a causal language model"
    ),
    r"use_ray|smg_|grpc_|ssl_|sidecar": (
        "megarl starts the engine's processes and its server, which only this machine reaches"
    ),
}


def refuse_own_server_args(given: Mapping[str, object]) -> None:
    """Raise ConfigError for arguments that megarl sets itself, and for those that it does not support."""
    if problems := _own_problems(given):
        raise ConfigError("rollout.sglang.server_args", problems)


def _own_problems(given: Mapping[str, object]) -> list[str]:
    problems = []
    for name, value in given.items():
        if name in CHOICES and value not in CHOICES[name]:
            problems.append(
                f"rollout.sglang.server_args.{name} is {value!r}, which may rearrange weights, so a sync "
                f"would write them to the wrong places; use {' or '.join(CHOICES[name])}"
            )
        elif name in _OWN:
            instead = f"; set {_OWN[name]}" if _OWN[name] else ", and no other value works here"
            problems.append(f"rollout.sglang.server_args.{name} is set by megarl{instead}")
        elif reason := why_unsupported(name):
            problems.append(f"rollout.sglang.server_args.{name} is not supported: {reason}; remove it")
    return problems


def why_unsupported(name: str) -> str | None:
    """Return why megarl cannot run an engine with this argument.

    The result is None if megarl sets the argument itself or passes it on.
    """
    if name in SPECULATIVE_ARGUMENTS:
        return None
    return next((reason for pattern, reason in _UNSUPPORTED.items() if re.match(pattern, name)), None)


def refuse_unknown_server_args(given: Mapping[str, object]) -> None:
    """Raise ConfigError for names that SGLang's ServerArgs do not have, or that megarl sets itself."""
    if not given:
        return
    known = known_server_args()
    problems = _own_problems(given)

    for name in given:
        if name not in known and name not in _OWN and why_unsupported(name) is None:
            # Without a similar name, suggest those with the same beginning.
            close = (
                get_close_matches(name, sorted(known), n=3)
                or [each for each in sorted(known) if each.startswith(name[:5])][:3]
            )
            hint = (
                f"did you mean {' or '.join(close)}?"
                if close
                else "see its ServerArgs for the available options"
            )
            problems.append(
                f"rollout.sglang.server_args.{name} is not an option of the installed SGLang; {hint}"
            )

    if problems:
        raise ConfigError("rollout.sglang.server_args", problems)


@cache
def known_server_args() -> frozenset[str]:
    """Return the arguments of the installed SGLang.

    They are read from its source, because importing it takes longer than all other checks.
    """
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "rollout.engine", ["SGLang is not installed; install it as described on the installation page"]
        )

    # The fields of ServerArgs are declared by the classes of this folder.
    folder = Path(spec.origin).parent / "srt" / "arg_groups" / "fields"
    return frozenset(name for file in folder.glob("*.py") for name in _declared_fields(file))


def _declared_fields(file: Path) -> Iterator[str]:
    """Yield the fields declared by the classes in a file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield from (
                entry.target.id
                for entry in node.body
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            )
