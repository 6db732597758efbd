"""Test the arguments with which SGLang is started."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import (
    Device,
    DType,
    EngineDType,
    ModelConfig,
    RolloutConfig,
    RolloutEngineKind,
    SamplingConfig,
    SGLangConfig,
)
from megarl.config.speculation import ALGORITHMS
from megarl.config.speculation import ARGUMENTS as SPECULATIVE_ARGUMENTS
from megarl.machine.errors import ConfigError
from megarl.models.config_reader import BLOCK_FP8
from megarl.models.families import FAMILIES
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.sglang.server_args import (
    build_server_args,
    context_length,
    judge_server_args,
    vocab_size,
)
from megarl.rollout.sglang.user_arguments import (
    known_server_args,
    refuse_unknown_server_args,
    why_unsupported,
)
from tests import fork_server


def spec(
    folder: Path, device: Device = Device.cpu, release_memory: bool = False, **rollout: Any
) -> RolloutEngineSpec:
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "max_position_embeddings": 64,
                "vocab_size": 97,
                "eos_token_id": 3,
            }
        )
    )
    return RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.bfloat16),
        rollout=RolloutConfig(max_concurrency=4, **rollout),
        device=device,
        release_memory=release_memory,
    )


def test_on_the_cpu(tmp_path: Path) -> None:
    arguments = build_server_args(spec(tmp_path, tensor_parallel_size=2))
    assert arguments["model_path"] == str(tmp_path)
    assert (arguments["device"], arguments["dtype"], arguments["tp_size"]) == ("cpu", "bfloat16", 2)
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["enable_deterministic_inference"]
    assert arguments["skip_tokenizer_init"]
    assert arguments["max_running_requests"] == 4
    assert arguments["context_length"] > 64  # SGLang reserves one token of it
    assert arguments["max_total_tokens"] > 4 * 64
    assert json.loads(arguments["json_model_override_args"]) == {"eos_token_id": [3]}


@pytest.mark.parametrize("names", [None, []])
def test_a_model_that_does_not_name_its_class_is_refused(tmp_path: Path, names: list[str] | None) -> None:
    asked = spec(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
    with pytest.raises(ConfigError, match="'architectures' is .*rollout.engine=hf"):
        build_server_args(asked)


def test_on_cuda(tmp_path: Path) -> None:
    arguments = build_server_args(
        spec(tmp_path, Device.cuda, release_memory=True, validation=SamplingConfig(min_new_tokens=1))
    )
    assert arguments["device"] == "cuda"
    assert arguments["enable_memory_saver"]
    assert not arguments["enable_deterministic_inference"]
    assert not arguments["skip_tokenizer_init"]

    # SGLang's own choice
    assert not {"attention_backend", "max_total_tokens", "mem_fraction_static"} & arguments.keys()


@pytest.mark.parametrize(
    ("server_args", "max_graph_batch"),
    [
        ({}, 4),
        ({"cuda_graph_max_bs_decode": None}, None),
        ({"cuda_graph_max_bs_decode": 2}, 2),
        ({"cuda_graph_bs_decode": [1, 2]}, None),
        ({"cuda_graph_config": {"decode": {"max_bs": 3}}}, None),
        ({"disable_cuda_graph": True}, None),
    ],
)
def test_decode_graphs_are_as_large_as_batches(
    tmp_path: Path, server_args: dict[str, Any], max_graph_batch: int | None
) -> None:
    given = spec(tmp_path, Device.cuda, sglang=SGLangConfig(server_args=server_args))
    assert build_server_args(given).get("cuda_graph_max_bs_decode") == max_graph_batch
    on_cpu = build_server_args(spec(tmp_path, sglang=SGLangConfig(server_args={})))
    assert "cuda_graph_max_bs_decode" not in on_cpu


def test_more_sequences_than_the_largest_graph_run_without_one(tmp_path: Path) -> None:
    given = spec(tmp_path, Device.cuda)
    many = dataclasses.replace(given.rollout, max_concurrency=2000)
    arguments = build_server_args(dataclasses.replace(given, rollout=many))
    assert arguments["cuda_graph_max_bs_decode"] == 512


@pytest.mark.parametrize(
    ("server_args", "name"),
    [
        ({"cuda_graph_backend_prefill": "breakable"}, "cuda_graph_backend_prefill"),
        ({"cuda_graph_backend_decode": "breakable"}, "cuda_graph_backend_decode"),
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, "cuda_graph_config.prefill.backend"),
    ],
)
def test_graphs_that_cannot_be_released_are_refused_on_a_shared_device(
    tmp_path: Path, server_args: dict[str, Any], name: str
) -> None:
    chosen = SGLangConfig(server_args=server_args)
    with pytest.raises(ConfigError, match=rf"server_args\.{name} is 'breakable'.*'full' or 'disabled'"):
        build_server_args(spec(tmp_path, Device.cuda, release_memory=True, sglang=chosen))
    assert "enable_memory_saver" not in build_server_args(spec(tmp_path, Device.cuda, sglang=chosen))


def test_prefill_graphs_are_off_where_memory_is_released(tmp_path: Path) -> None:
    shared = spec(tmp_path, Device.cuda, release_memory=True)
    assert build_server_args(shared)["cuda_graph_backend_prefill"] == "disabled"
    assert "cuda_graph_backend_prefill" not in build_server_args(spec(tmp_path, Device.cuda))

    for chosen, expected in ((None, "disabled"), ("full", "full")):
        server_args = SGLangConfig(server_args={"cuda_graph_backend_prefill": chosen})
        shared = spec(tmp_path, Device.cuda, release_memory=True, sglang=server_args)
        assert build_server_args(shared)["cuda_graph_backend_prefill"] == expected


def test_sglang_cannot_release_breakable_graphs() -> None:
    """Evidence in SGLang's source for the arguments of engines that release their memory."""
    folder = Path(str(find_spec("sglang").origin)).parent / "srt" / "model_executor" / "runner_backend"
    saver = 'get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH")'
    full = (folder / "full_cuda_graph_backend.py").read_text()
    breakable = (folder / "breakable_cuda_graph_backend.py").read_text()
    assert saver in full
    assert "raise NotImplementedError" in breakable[breakable.index(saver) :][:400]


def drafted(path: str = "drafts/eagle") -> SGLangConfig:
    return SGLangConfig(server_args={"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": path})


def test_a_draft_model_is_loaded_from_its_folder_and_kept(tmp_path: Path) -> None:
    """The policy starts with dummy weights; released memory comes back with the policy's next weights, but a
    draft model gets none, so SGLang keeps a copy of it on the host."""
    arguments = build_server_args(spec(tmp_path, Device.cuda, sglang=drafted()))
    assert arguments["speculative_algorithm"] == "EAGLE3"
    assert (arguments["load_format"], arguments["speculative_draft_load_format"]) == ("dummy", "auto")
    assert "enable_draft_weights_cpu_backup" not in arguments
    shared = build_server_args(spec(tmp_path, Device.cuda, release_memory=True, sglang=drafted()))
    assert shared["enable_draft_weights_cpu_backup"] is True
    assert "enable_weights_cpu_backup" not in shared

    ngram = SGLangConfig(server_args={"speculative_algorithm": "NGRAM"})
    arguments = build_server_args(spec(tmp_path, Device.cuda, release_memory=True, sglang=ngram))
    assert arguments["speculative_algorithm"] == "NGRAM"
    assert not {"speculative_draft_load_format", "enable_draft_weights_cpu_backup"} & arguments.keys()
    for name in ("speculative_draft_load_format", "enable_draft_weights_cpu_backup"):
        with pytest.raises(ConfigError, match=f"{name} is set by megarl"):
            refuse_unknown_server_args({name: True})


def test_on_a_cpu_drafts_are_chains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is 'EAGLE3', but on a CPU each drafted token has one successor"):
        build_server_args(spec(tmp_path, sglang=drafted()))
    chain = drafted().server_args | {"speculative_eagle_topk": 1}
    arguments = build_server_args(spec(tmp_path, sglang=SGLangConfig(server_args=chain)))
    assert arguments["speculative_draft_load_format"] == "auto"


def sglang_text(*path: str) -> str:
    return Path(str(find_spec("sglang").origin)).parent.joinpath("srt", *path).read_text()


def test_sglang_treats_draft_models_as_assumed() -> None:
    """Evidence in its source, without a GPU on which it could run them."""
    names = re.search(
        r"class SpeculativeAlgorithm\(Enum\):(.*?)def ", sglang_text("speculative", "spec_info.py"), re.S
    )
    assert names is not None
    assert {f"{name} = auto()" for name in ALGORITHMS} <= {line.strip() for line in names[1].splitlines()}

    # The copy on the host of a draft model's released weights.
    loading = sglang_text("model_executor", "model_runner_components", "load_model_utils.py")
    assert "is_draft_worker and get_exec().features.enable_draft_weights_cpu_backup" in loading
    # A folder goes into every model, while tensors go into the selected one.
    updater = sglang_text("managers", "scheduler_components", "weight_updater.py")
    from_disk = updater[updater.index("def update_weights_from_disk") :][:700]
    assert "in self._select_runners():" in from_disk
    from_tensor = updater[updater.index("def update_weights_from_tensor") :][:1200]
    assert "in self._select_runners(recv_req.selector):" in from_tensor
    # Sizes are chosen only if none is given.
    assert "cfg.speculative_eagle_topk is None" in sglang_text("arg_groups", "speculative_hook.py")


def test_logits_in_float32_are_the_trainers_choice(tmp_path: Path) -> None:
    asked = spec(tmp_path, Device.cuda)
    assert "enable_fp32_lm_head" not in build_server_args(asked)
    assert build_server_args(dataclasses.replace(asked, fp32_lm_head=True))["enable_fp32_lm_head"] is True
    with pytest.raises(ConfigError, match=r"enable_fp32_lm_head is set by megarl; set engine\.fp32_lm_head"):
        refuse_unknown_server_args({"enable_fp32_lm_head": True})


def test_engines_in_fp8_have_the_fields_of_a_folder_in_fp8(tmp_path: Path) -> None:
    asked = spec(tmp_path, Device.cuda, dtype=EngineDType.fp8)
    arguments = build_server_args(asked)
    assert json.loads(arguments["json_model_override_args"]) == {
        "eos_token_id": [3],
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    # Other kernels rearrange the scales once, so that a later sync would write them to the wrong places.
    assert arguments["fp8_gemm_runner_backend"] == "triton"
    assert arguments["dtype"] == "bfloat16"
    assert "fp8_gemm_runner_backend" not in build_server_args(spec(tmp_path, dtype=EngineDType.fp8))
    chosen = SGLangConfig(server_args={"fp8_gemm_runner_backend": "deep_gemm"})
    asked = spec(tmp_path, Device.cuda, dtype=EngineDType.fp8, sglang=chosen)
    assert build_server_args(asked)["fp8_gemm_runner_backend"] == "deep_gemm"
    with pytest.raises(ConfigError, match=r"quantization is set by megarl; set rollout\.dtype"):
        refuse_unknown_server_args({"quantization": "fp8"})


@pytest.mark.parametrize("value", ["auto", "cutlass", "flashinfer_deepgemm", 1, None])
def test_products_in_fp8_that_may_rearrange_weights_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"may rearrange weights, .* use triton or deep_gemm"):
        refuse_unknown_server_args({"fp8_gemm_runner_backend": value})
    refuse_unknown_server_args({"fp8_gemm_runner_backend": "deep_gemm", "attn_dp_size": 8})


def test_sglang_converts_scales_for_deep_gemm_on_blackwell_only_and_marks_them() -> None:
    """On Hopper they stay as they are sent."""
    choice = sglang_text("layers", "deep_gemm_wrapper", "configurer.py")
    condition = choice[choice.index("DEEPGEMM_SCALE_UE8M0 = ENABLE_JIT_DEEPGEMM and (") :][:120]
    assert "get_platform().is_sm100 or get_device_sm() in (120, 121)" in condition
    loading = sglang_text("model_loader", "utils.py")
    assert (
        "and deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0" in loading[loading.index("def should_deepgemm") :][:900]
    )
    converting = sglang_text("layers", "quantization", "fp8_utils.py")
    converting = converting[converting.index("def requant_block_scale_ue8m0_for_deepgemm(") :][:1600]
    assert "weight_scale.format_ue8m0 = True" in converting


def test_the_format_of_the_folder_is_not_that_of_the_engine(tmp_path: Path) -> None:
    asked = spec(tmp_path, Device.cuda)
    file = Path(asked.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": BLOCK_FP8}))
    fields = json.loads(build_server_args(asked)["json_model_override_args"])
    assert fields == {"eos_token_id": [3], "quantization_config": None}


def test_a_policy_with_sparse_attention_is_served_without_it_on_a_cpu(tmp_path: Path) -> None:
    """Its rows then have at most `index_topk` tokens. A judge reads its own weights, and longer rows."""
    asked = spec(tmp_path)
    fields = FAMILIES["glm_moe_dsa"].example()
    (tmp_path / "config.json").write_text(json.dumps(fields))

    def served(arguments: dict[str, Any]) -> tuple[list[str], int]:
        overridden = json.loads(arguments["json_model_override_args"])
        return overridden.get("architectures", fields["architectures"]), arguments["context_length"] // 8 * 8

    assert served(build_server_args(asked)) == (["DeepseekV2ForCausalLM"], 128 + 8)
    assert served(judge_server_args(asked)) == (["GlmMoeDsaForCausalLM"], 256 + 8)
    on_cuda = build_server_args(dataclasses.replace(asked, device=Device.cuda))
    assert served(on_cuda) == (["GlmMoeDsaForCausalLM"], 256 + 8)
    assert json.loads(on_cuda["json_model_override_args"])["indexer_rope_interleave"] is True
    assert [context_length(asked.model.path, on_cpu=on_cpu) for on_cpu in (True, False)] == [128, 256]


def test_the_users_arguments_win_over_defaults(tmp_path: Path) -> None:
    chosen = SGLangConfig(server_args={"attention_backend": "intel_amx", "schedule_policy": "lpm"})
    arguments = build_server_args(spec(tmp_path, sglang=chosen))
    assert arguments["attention_backend"] == "intel_amx"
    assert arguments["schedule_policy"] == "lpm"


@pytest.mark.parametrize("chosen", [None, False, True])
def test_kernels_are_deterministic_on_a_cpu_and_by_choice_on_cuda(
    tmp_path: Path, chosen: bool | None
) -> None:
    settings = SGLangConfig(server_args={"enable_deterministic_inference": chosen})
    on_cpu = build_server_args(spec(tmp_path, sglang=settings))
    on_cuda = build_server_args(spec(tmp_path, Device.cuda, sglang=settings))
    assert on_cpu["enable_deterministic_inference"] is True
    assert bool(on_cuda.get("enable_deterministic_inference")) is bool(chosen)


def test_the_text_part_of_a_models_config_counts(tmp_path: Path) -> None:
    path = spec(tmp_path).model.path
    text = {"max_position_embeddings": 32, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vocab_size": 5}))
    assert (context_length(path, on_cpu=True), vocab_size(path)) == (32, 11)


def test_arguments_that_megarl_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size is set by megarl; set rollout\.tensor_parallel_size"):
        build_server_args(spec(tmp_path, sglang=SGLangConfig(server_args={"tp_size": 2})))
    with pytest.raises(ConfigError, match="api_key is set by megarl, and no other value"):
        refuse_unknown_server_args({"api_key": "x"})


def test_unknown_arguments_are_refused_with_what_was_meant() -> None:
    refuse_unknown_server_args({})
    refuse_unknown_server_args(
        {"schedule_policy": "lpm", "chunked_prefill_size": 64, RolloutEngineKind.sglang.needs.memory_arg: 0.8}
    )
    with pytest.raises(ConfigError, match="did you mean schedule_policy") as error:
        refuse_unknown_server_args({"schedule_polisy": "lpm", "qqqqqqqq": 1, "chunked_prefill_size": 64})
    assert len(error.value.problems) == 2

    with pytest.raises(
        ConfigError, match="mem_frac is not an option of .*; did you mean .*mem_fraction_static"
    ):
        refuse_unknown_server_args({"mem_frac": 0.5})

    with pytest.raises(ConfigError) as error:
        refuse_unknown_server_args({"schedule_polisy": "lpm", "tp_size": 2})
    assert [each.split()[0] for each in error.value.problems] == [
        "rollout.sglang.server_args.tp_size",
        "rollout.sglang.server_args.schedule_polisy",
    ]


def test_the_arguments_that_are_read_from_its_source_are_those_of_sglang(forked_processes: None) -> None:
    program = (
        "import json\nfrom megarl.rollout.sglang import environment\n"
        "environment.prepare('cpu')\nfrom sglang.srt.server_args import ServerArgs\n"
        "print(json.dumps(ServerArgs.__struct_fields__))\n"
    )
    ended = subprocess.run(
        [*fork_server.PYTHON, "--sglang", "-c", program], capture_output=True, text=True, check=True
    )
    assert known_server_args() == set(json.loads(ended.stdout.splitlines()[-1]))


PASSED_ON = {  # names that resemble an unsupported feature, but are supported
    *SPECULATIVE_ARGUMENTS,
    "attn_dp_size",
    "enable_quant_communications",
    "kv_cache_dtype",
    "mm_enable_dp_encoder",
    "prefill_kv_cache_dequant_dtype",
}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("speculative_accept_threshold_single", "not samples of the policy"),
        ("speculative_accept_threshold_acc", "not samples of the policy"),
        ("speculative_token_map", "would not follow the trainer"),
        ("speculative_dflash_block_size", "no test that its samples are those of the policy"),
        ("enable_multi_layer_eagle", "no test that its samples are those of the policy"),
        ("modelopt_quant", "quantized weights"),
        ("enable_lora", "adapters"),
        ("lora_paths", "adapters"),
        ("disaggregation_mode", "one engine"),
        ("cpu_offload_gb", "weights come only from the trainer"),
        ("elastic_ep_backend", "experts must stay"),
        ("use_ray", "megarl starts"),
        ("attn_cp_size", "other parts of the weights"),
        ("enable_dp_lm_head", "other parts of the weights"),
        ("enable_dp_attention", r"groups with an attention of their own attn_dp_size"),
        ("dp_size", r"engines are rollout\.num_replicas"),
        ("data_parallel_size", r"engines are rollout\.num_replicas"),
        ("moe_dense_tp_size", "other parts of the weights"),
        ("dcp_size", "other parts of the weights"),
    ],
)
def test_what_megarl_does_not_support_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"server_args\.{name} is not supported: .*{why}.*; remove it"):
        refuse_unknown_server_args({name: 1})


def test_no_argument_of_an_unsupported_feature_is_passed_on() -> None:
    """Covers arguments that a later SGLang may add: their names indicate their purpose."""
    risky = re.compile(
        r"lora|quant|speculative|draft|disaggregation|offload|remote_instance|elastic|"
        r"context_parallel|[^e]dp_|cp_"
    )
    found = {name for name in known_server_args() if risky.search(name) and not name.startswith("_")}
    assert len(found) > 80
    assert {name for name in found if why_unsupported(name) is None} <= PASSED_ON


def test_ordinary_arguments_are_passed_on() -> None:
    passed = [
        "mem_fraction_static",
        "chunked_prefill_size",
        "schedule_policy",
        "disable_radix_cache",
        "cuda_graph_bs_decode",
        "page_size",
    ]
    assert [why_unsupported(name) for name in passed] == [None] * len(passed)


def test_a_scheduler_does_not_import_megatron() -> None:
    """SGLang's own module that would import it finds Megatron-Core and Transformer Engine missing."""
    program = (
        "from megarl.rollout.sglang import environment\n"
        "environment.prepare('cpu')\n"
        "from megarl.rollout.sglang.processes import hide_training_packages\n"
        "hide_training_packages()\n"
        "import sys\n"
        "from sglang.srt.debug_utils import dumper\n"
        "print(dumper._MegatronPlugin._available, [name for name in sys.modules if "
        "name.startswith(('megatron.', 'transformer_engine.'))], sys.modules['transformer_engine'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1:] == ["False [] None"], ended.stderr
