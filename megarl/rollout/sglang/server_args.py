"""SGLang's arguments: those that our engine needs, with those of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.schema import Device, EngineDType, RolloutConfig
from megarl.config.speculation import ALGORITHM, draft_folder, problem_on_cpu
from megarl.machine.errors import ConfigError
from megarl.models.config_reader import BLOCK_FP8, QUANTIZATION
from megarl.models.families import family_of, read_fields
from megarl.rollout.interface import RolloutEngineSpec, end_token_ids
from megarl.rollout.nodes import EngineNode
from megarl.rollout.sglang.adapters import server_arguments
from megarl.rollout.sglang.user_arguments import CHOICES, refuse_own_server_args

WEIGHT_LOADER: str = "megarl.rollout.sglang.loader.run"
START_LIMIT_S = 600.0  # kernels may be compiled

# SGLang's largest decode batch with a CUDA graph, if nothing else is set.
_MAX_GRAPH_BATCH = 512
# Arguments that set the sizes of decode graphs, or turn them off.
_DECODE_GRAPHS = {
    "cuda_graph_max_bs_decode",
    "cuda_graph_bs_decode",
    "cuda_graph_config",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
}
_PHASES = ("prefill", "decode")
_SPARE_TOKENS = 8  # SGLang reserves a few of the context, and of the cache
_CPU_CACHE_TOKENS = 65536  # or enough for max_concurrency sequences, whichever is less


def build_server_args(spec: RolloutEngineSpec) -> dict[str, Any]:
    """Return all arguments of the engine except those of the HTTP server.

    Raises:
        ConfigError: `refuse_own_server_args` refuses an argument, CUDA graphs are asked for that cannot be
            released, or the model's config.json does not name its class.
    """
    return _arguments(spec, is_policy=True)


def _arguments(spec: RolloutEngineSpec, *, is_policy: bool) -> dict[str, Any]:
    model = spec.model
    rollout = spec.rollout
    on_cpu = spec.device is Device.cpu
    is_fp8 = rollout.dtype is EngineDType.fp8
    given = rollout.sglang.server_args
    refuse_own_server_args(given)
    _refuse_nameless_class(model.path)
    has_draft = draft_folder(given) is not None
    longest = context_length(model.path, on_cpu=on_cpu and is_policy)
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype.value,
        "device": spec.device.value,
        "tp_size": rollout.tensor_parallel_size,
        "pp_size": rollout.pipeline_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "max_running_requests": rollout.max_concurrency,
        "context_length": longest + _SPARE_TOKENS,
        "json_model_override_args": json.dumps(_overridden_fields(model.path, is_fp8, on_cpu and is_policy)),
        "skip_tokenizer_init": not needs_tokenizer(rollout, model.path),
        "load_format": "dummy",  # the weights come from a weight sync, so that they are always the trainer's
        "custom_weight_loader": [WEIGHT_LOADER],
        "enable_deterministic_inference": on_cpu,
        "log_level": "error",
        "sleep_on_idle": True,  # otherwise each scheduler keeps a core busy while others train
        **({"enable_return_routed_experts": True} if spec.returns_routes else {}),
        **({"enable_fp32_lm_head": True} if spec.fp32_lm_head else {}),
        **({} if spec.lora is None else server_arguments(spec.lora, on_cpu)),
        # a draft model is no part of a weight sync, so its weights come from its folder
        **({"speculative_draft_load_format": "auto"} if has_draft else {}),
    }

    if on_cpu:
        _refuse_speculation(given)
        arguments |= _cpu_arguments(spec, longest)
        # A CPU has deterministic kernels only.
        given = given | {"enable_deterministic_inference": True}
    else:
        arguments |= _cuda_arguments(spec)
        if spec.release_memory:
            _refuse_breakable_graphs(given)
            if given.get("cuda_graph_backend_prefill") is None:
                given = given | {"cuda_graph_backend_prefill": "disabled"}

    # The user's arguments take precedence; None keeps SGLang's default.
    return {name: value for name, value in (arguments | given).items() if value is not None}


def _cpu_arguments(spec: RolloutEngineSpec, longest: int) -> dict[str, Any]:
    """Return the arguments on a CPU, where the cache is bounded in tokens. Computations are torch's own."""
    return {
        "max_total_tokens": min(spec.rollout.max_concurrency * longest, max(_CPU_CACHE_TOKENS, longest))
        + _SPARE_TOKENS,
        "mem_fraction_static": 0.1,  # of the machine; max_total_tokens is the smaller bound
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        # SGLang decides so itself, except for latent attention (see cpu_adaptations.py).
        "disable_radix_cache": True,
    }


def _cuda_arguments(spec: RolloutEngineSpec) -> dict[str, Any]:
    given = spec.rollout.sglang.server_args
    arguments: dict[str, Any] = {}
    if "num_experts_per_tok" in _model_config(spec.model.path):
        # others rearrange experts' weights, so that a weight sync cannot find them
        arguments["moe_runner_backend"] = "triton"
    if spec.rollout.dtype is EngineDType.fp8:
        # others convert or rearrange scales after loading, so that a weight sync would write other ones
        arguments["fp8_gemm_runner_backend"] = CHOICES["fp8_gemm_runner_backend"][0]
    # Without a limit, SGLang captures graphs for larger batches than it may run.
    if not given.keys() & _DECODE_GRAPHS:
        arguments["cuda_graph_max_bs_decode"] = min(spec.rollout.max_concurrency, _MAX_GRAPH_BATCH)
    # SGLang can release memory and allocate it again only with its memory saver.
    if spec.release_memory:
        arguments["enable_memory_saver"] = True
        # No weight sync follows that would bring back the weights of a draft model.
        if draft_folder(given) is not None:
            arguments["enable_draft_weights_cpu_backup"] = True
    return arguments


def judge_server_args(spec: RolloutEngineSpec) -> dict[str, Any]:
    """Return the arguments of a server of a frozen model, which reads its weights and texts itself.

    Raises:
        ConfigError: See build_server_args.
    """
    arguments = _arguments(spec, is_policy=False) | {"load_format": "auto", "skip_tokenizer_init": False}
    del arguments["custom_weight_loader"]
    return arguments


def node_args(node: EngineNode, ranks_port: int) -> dict[str, Any]:
    """Return the additional arguments of an engine that spans several nodes.

    Args:
        node: The node.
        ranks_port: The port of node 0 where the engine's ranks meet.
    """
    if node.num_nodes == 1:
        return {}
    host = f"[{node.address}]" if ":" in node.address else node.address
    return {"nnodes": node.num_nodes, "node_rank": node.rank, "dist_init_addr": f"{host}:{ranks_port}"}


def _overridden_fields(path: str, is_fp8: bool, on_cpu: bool) -> dict[str, Any]:
    """Return the fields of config.json that SGLang gets with other values, or in addition."""
    config = read_fields(path)
    family = family_of(config.get("model_type"))
    missing = family.added_for_sglang(config, on_cpu=on_cpu) if family else {}

    # The format of the weights that a sync sends, whatever that of the folder.
    if is_fp8:
        missing = {**missing, QUANTIZATION: BLOCK_FP8}
    elif QUANTIZATION in config:
        missing = {**missing, QUANTIZATION: None}

    # With the tokens of generation_config.json, which SGLang adds, exactly the tokens that end a sample in
    # every other engine.
    return {"eos_token_id": sorted(end_token_ids(path)) or None} | missing


def _refuse_breakable_graphs(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for graphs that SGLang does not capture with its memory saver.

    Breakable graphs are its default for prefill.
    """
    backends = {f"cuda_graph_backend_{phase}": given.get(f"cuda_graph_backend_{phase}") for phase in _PHASES}
    if isinstance(config := given.get("cuda_graph_config"), Mapping):
        backends |= {f"cuda_graph_config.{phase}.backend": _backend(config, phase) for phase in _PHASES}

    problems = [
        f"rollout.sglang.server_args.{name} is 'breakable', and an engine that shares its device with other "
        "roles cannot release such CUDA graphs; set it to 'full' or 'disabled', or remove it"
        for name, backend in backends.items()
        if backend == "breakable"
    ]
    if problems:
        raise ConfigError("rollout.sglang.server_args", problems)


def _refuse_speculation(given: Mapping[str, Any]) -> None:
    if problem := problem_on_cpu(given):
        key = f"rollout.sglang.server_args.{ALGORITHM}"
        raise ConfigError("rollout.sglang.server_args", [f"{key} is {given[ALGORITHM]!r}, {problem}"])


def _backend(config: Mapping[str, Any], phase: str) -> object:
    of_phase = config.get(phase)
    return of_phase.get("backend") if isinstance(of_phase, Mapping) else None


def needs_tokenizer(rollout: RolloutConfig, path: str) -> bool:
    """Return whether SGLang suppresses end tokens or reads images, for which it uses its tokenizer."""
    return rollout.validation.min_new_tokens > 0 or image_token_id(path) is not None


def image_token_id(path: str) -> int | None:
    """Return the placeholder of images, None if the model reads none."""
    return read_fields(path).get("image_token_id")


def context_length(path: str, *, on_cpu: bool) -> int:
    """Return the maximum tokens of prompt and sample together.

    Args:
        on_cpu: Whether the engine serves a policy on a CPU, by a class without sparse attention. It computes
            the same model for as many tokens as an indexer selects, and refuses requests for more.
    """
    fields = _model_config(path)
    positions: int = fields["max_position_embeddings"]
    return min(positions, fields.get("index_topk", positions)) if on_cpu else positions


def vocab_size(path: str) -> int:
    return _model_config(path)["vocab_size"]


def _model_config(path: str) -> dict[str, Any]:
    config = read_fields(path)
    return config.get("text_config", config)


def _refuse_nameless_class(path: str) -> None:
    # megarl and transformers read `model_type`; SGLang would fail with a TypeError.
    if not (names := read_fields(path).get("architectures")):
        raise ConfigError(
            str(Path(path) / "config.json"),
            [
                f"field 'architectures' is {names!r}, and SGLang finds a model's class by it; set it, for "
                'example to ["Qwen2ForCausalLM"], or set rollout.engine=hf'
            ],
        )
