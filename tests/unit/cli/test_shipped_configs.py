"""The runs of configs/ that need GPUs.

Each is valid for the published model that it names, on the cluster that it describes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.dotted import flat
from megarl.config.schema import PPOConfig, Transport
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.models.counts import num_active_parameters, num_parameters
from megarl.models.families import read_architecture
from megarl.plan.placement.memory import DeviceMemory, plan_memory, pushed_bytes
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import choose_transport
from megarl.plan.step_time.device import assumed_profile
from megarl.weights.sync.forecast import forecast_weights

pytestmark = pytest.mark.usefixtures("forked_children")

ROOT = Path(__file__).parents[3]


class Cluster(NamedTuple):
    """nodes: of eight devices each. pools: devices of each. memory_gb: the budget of a device."""

    nodes: int
    strategy: str
    pools: dict[str, int]
    memory_gb: int = 72


RUNS = {
    "qwen2.5_7b_grpo": Cluster(1, "hybrid", {"actor": 8, "reward": 0}),
    "qwen2.5_7b_async_grpo": Cluster(2, "split_collocate", {"actor": 8, "reward": 0, "rollout": 8}),
    "qwen2.5_7b_ppo": Cluster(1, "hybrid", {"actor": 4, "critic": 4}),
    "qwen2.5_7b_ppo_split": Cluster(2, "split_collocate", {"actor": 8, "critic": 4, "rollout": 4}),
    "qwen3_32b_grpo": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "qwen3_30b_a3b_grpo": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "qwen3.6_35b_a3b_grpo": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "qwen3_235b_a22b_grpo": Cluster(16, "hybrid", {"actor": 128, "reward": 0}),
    "qwen3_next_80b_grpo": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "glm4.5_air_grpo": Cluster(8, "hybrid", {"actor": 64, "reward": 0}),
    "glm4.5_grpo": Cluster(16, "hybrid", {"actor": 128, "reward": 0}, memory_gb=127),
    "gpt_oss_120b_grpo": Cluster(8, "hybrid", {"actor": 64, "reward": 0}),
    "deepseek_v3_671b_grpo": Cluster(16, "hybrid", {"actor": 128, "reward": 0}, memory_gb=240),
    "deepseek_v3_671b_fp8_grpo": Cluster(32, "hybrid", {"actor": 256, "reward": 0}),
    "kimi_k2_1t_grpo": Cluster(
        24, "split_collocate", {"actor": 128, "reward": 0, "rollout": 64}, memory_gb=256
    ),
    "llama3_70b_ppo": Cluster(16, "split_collocate", {"actor": 64, "critic": 32, "rollout": 32}),
    "qwen2.5_32b_dapo_16k": Cluster(8, "hybrid", {"actor": 64, "reward": 0}),
    "llama3.1_8b_grpo_128k": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "qwen3_8b_grpo_128k": Cluster(4, "hybrid", {"actor": 32, "reward": 0}),
    "llama3.3_70b_grpo": Cluster(8, "hybrid", {"actor": 64, "reward": 0}),
    "qwen3_vl_8b_grpo": Cluster(1, "hybrid", {"actor": 8, "reward": 0}),
}


# A push of their 17,000 to 70,000 tensors takes seconds to plan: commands that plan one are tried with the
# others.
LARGEST = {
    "qwen3_235b_a22b_grpo",
    "qwen3_next_80b_grpo",
    "glm4.5_grpo",
    "deepseek_v3_671b_grpo",
    "deepseek_v3_671b_fp8_grpo",
    "kimi_k2_1t_grpo",
}
MANY_TENSORS = {
    "qwen3_30b_a3b_grpo",
    "qwen3.6_35b_a3b_grpo",
    "glm4.5_air_grpo",
    "gpt_oss_120b_grpo",
    *LARGEST,
}
FEW_TENSORS = [run for run in RUNS if run not in MANY_TENSORS]
# These run in tests on two CPU cores.
QUICKSTART = ["quickstart", "quickstart_sft", "quickstart_dpo", "quickstart_reward_model"]

# Parameters, as the model cards say: 7.61B, 8.03B, 32.5B, 32.8B, 30.5B, 235B, 70.6B, and so on. A model's own
# file would say so to the element.
NUM_PARAMETERS = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "Qwen3-8B-128k": 8_190_735_360,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    # without the vision tower and the layers that predict further tokens
    "Qwen3.6-27B": 26_895_998_464,
    "Qwen3.6-35B-A3B": 34_660_610_688,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.5": 352_797_829_024,
    "gpt-oss-120b-BF16": 116_829_156_672,
    "gpt-oss-20b-BF16": 20_914_757_184,
    "DeepSeek-V3.1-BF16": 671_026_419_200,
    "Kimi-K2-Instruct-BF16": 1_026_408_232_448,
    "Moonlight-16B-A3B-Instruct": 15_960_110_208,
    "OLMo-2-1124-7B-Instruct": 7_298_617_344,
    "OLMo-2-0325-32B-Instruct": 32_234_279_936,
    "Olmo-3-7B-Instruct": 7_298_011_136,
    "Olmo-3-32B-Think": 32_233_522_176,
    "gemma-3-1b-it": 999_885_952,
    "SmolLM3-3B": 3_075_098_624,
}

NUM_EXPERT_PARAMETERS = {
    "Qwen3-30B-A3B": 48 * 128 * 3 * 2048 * 768,
    "Qwen3-235B-A22B": 94 * 128 * 3 * 4096 * 1536,
    "Qwen3-Next-80B-A3B-Instruct": 48 * 512 * 3 * 2048 * 512,
    "Qwen3.6-35B-A3B": 40 * 256 * 3 * 2048 * 512,
    "GLM-4.5-Air": 45 * 128 * 3 * 4096 * 1408,
    "GLM-4.5": 89 * 160 * 3 * 5120 * 1536,
    "gpt-oss-120b-BF16": 36 * 128 * (3 * 2880 * 2880 + 3 * 2880),
    "DeepSeek-V3.1-BF16": 58 * 256 * 3 * 7168 * 2048,
    "Kimi-K2-Instruct-BF16": 60 * 384 * 3 * 7168 * 2048,
    "Moonlight-16B-A3B-Instruct": 26 * 64 * 3 * 2048 * 1408,
}
# Down projections of latent attention: of queries, and of keys and values.
NUM_REPLICATED_PARAMETERS = {
    "DeepSeek-V3.1-BF16": 61 * 7168 * (1536 + 512 + 64),
    "Kimi-K2-Instruct-BF16": 61 * 7168 * (1536 + 512 + 64),
}

# The vision tower, which is frozen and whole on each rank of the first stage: what the model has more than
# Qwen3-8B.
NUM_FROZEN_PARAMETERS = {"Qwen3-VL-8B-Instruct": 8_767_123_696 - 8_190_735_360}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")


def path_of(run: str) -> str:
    return f"configs/{run}.yaml"


@cache
def load(run: str) -> PPOConfig:
    """Load a configuration with the published model, of which this machine has only `config.json`."""
    return load_for_plan(PPOConfig, path_of(run)).config


def memory_of(config: PPOConfig) -> list[DeviceMemory]:
    return plan_memory(config, plan_placement(config), read_architectures(config)[0])


def peaks_gib(config: PPOConfig) -> dict[str, float]:
    """Return the peak of each pool's fullest device."""
    peaks: dict[str, float] = {}
    for device in memory_of(config):
        peaks[device.pool] = max(peaks.get(device.pool, 0.0), device.peak / 2**30)
    return peaks


def test_the_published_models_have_the_parameters_of_their_cards() -> None:
    assert {
        model: num_parameters(read_architecture(str(CONFIGS_DIR / "models" / model), trust_remote_code=True))
        for model in NUM_PARAMETERS
    } == NUM_PARAMETERS
    active = {
        model: num_active_parameters(
            read_architecture(str(CONFIGS_DIR / "models" / model), trust_remote_code=True)
        )
        for model in NUM_EXPERT_PARAMETERS
    }
    assert {model: number // 10**8 for model, number in active.items()} == {
        "Qwen3-30B-A3B": 33,
        "Qwen3-235B-A22B": 221,
        "Qwen3-Next-80B-A3B-Instruct": 38,
        "Qwen3.6-35B-A3B": 34,
        "GLM-4.5-Air": 134,
        "GLM-4.5": 336,
        "gpt-oss-120b-BF16": 57,
        "DeepSeek-V3.1-BF16": 375,
        "Kimi-K2-Instruct-BF16": 328,
        "Moonlight-16B-A3B-Instruct": 29,
    }


def test_every_configuration_is_tested_here_or_with_the_quickstart() -> None:
    files = {file.stem for file in CONFIGS_DIR.glob("*.yaml")}
    assert files == {*RUNS, *QUICKSTART}


def test_files_do_not_repeat_what_they_have_in_common() -> None:
    base = dict(flat(yaml.safe_load((CONFIGS_DIR / "base" / "cluster.yaml").read_text())))
    repeated = [
        f"{run}: {key}"
        for run in RUNS
        for key, value in flat(yaml.safe_load((CONFIGS_DIR / f"{run}.yaml").read_text()))
        if base.get(key) == value
    ]
    assert repeated == []


@pytest.mark.parametrize("run", [*FEW_TENSORS, *QUICKSTART])
@pytest.mark.parametrize("command", [["check"], ["check", "--plan"]])
def test_neither_model_nor_data_need_to_be_here(
    command: list[str],
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, path_of(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "not on this machine: model.path: there is no " in out
    assert "not on this machine: data.train_files: there is no file " in out


@pytest.mark.parametrize("run", RUNS)
def test_check_finds_nothing_wrong_and_every_device_within_its_budget(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(run)
    nodes, strategy, pools, memory_gb = RUNS[run]

    if run not in LARGEST:
        assert main(["check", "--fast", path_of(run)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert f"placement: {strategy} on {nodes} x 8 devices" in out

    plan = plan_placement(config)
    assert (plan.strategy.value, plan.pools) == (strategy, pools)
    assert sum(pools.values()) == nodes * 8  # none is idle
    assert config.placement.device_memory_gb == memory_gb


@pytest.mark.parametrize("run", RUNS)
def test_weights_do_not_go_through_files(run: str) -> None:
    """Engines on the trainers' devices receive weights there, others over the network.

    All engines receive the whole model. Mixture-of-experts models have four layers here, to save time.
    """
    config = load(run)
    plan = plan_placement(config)
    policy = read_architectures(config)[0]["actor"]
    if policy.experts is not None:
        layers = tuple(layer for layer in policy.experts.layers if layer < 4)
        policy = replace(policy, num_hidden_layers=4, experts=replace(policy.experts, layers=layers))
    assert choose_transport(config, plan) is (
        Transport.device if RUNS[run].strategy == "hybrid" else Transport.group
    )
    assert (forecast := forecast_weights(config, plan, policy)) is not None
    num_replicas = config.rollout.num_replicas
    size = pushed_bytes(config, policy)
    copies = config.rollout.tensor_parallel_size - 1
    replicated = 2 * NUM_REPLICATED_PARAMETERS.get(Path(config.model.path).name, 0) * 4 // 61

    # norms, routers and some keys are on several ranks
    assert num_replicas * size <= sum(forecast.received)
    assert sum(forecast.received) < num_replicas * (size * 1.004 + replicated * copies)
    assert sum(forecast.sent) == sum(forecast.received)


@pytest.mark.parametrize("run", RUNS)
def test_the_head_of_a_file_says_the_memory_that_it_takes(run: str) -> None:
    peaks = peaks_gib(load(run))
    said = ", ".join(f"{pool} {peak:.1f}" for pool, peak in peaks.items())
    assert (
        f"# Memory, GiB of the fullest device: {said}.\n" in (CONFIGS_DIR.parent / path_of(run)).read_text()
    )


# The engines of these runs take more than half of a device.
@pytest.mark.parametrize("run", [run for run in RUNS if run not in LARGEST])
def test_a_device_that_is_a_little_too_small_is_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that fits is refused if the fullest device has a quarter of a GiB less.

    An engine's share stays as it was, except where the engine has the device for itself: there the share is
    half, and a training role does not fit.
    """
    config = load(run)
    takes_turns = RUNS[run].strategy == "hybrid"
    phases = [
        (usages, device.total(phase))
        for device in memory_of(config)
        for phase, usages in device.phases.items()
    ]
    most = (
        max(total for usages, total in phases if not takes_turns or usages.get("actor", Usage()).parameters)
        / 2**30
    )
    share = 0.5 * most if takes_turns else config.rollout.sglang.server_args["mem_fraction_static"] * 72
    arguments = [
        f"placement.device_memory_gb={most - 0.25}",
        f"rollout.sglang.server_args.mem_fraction_static={share / (most - 0.25)}",
    ]
    assert main(["check", "--fast", path_of(run), *arguments]) == 2
    assert f"GiB ({'actor' if takes_turns else 'rollout'} " in (err := capsys.readouterr().err)
    assert f"placement.device_memory_gb: in {'update_actor' if takes_turns else 'gen'}, device " in err


@pytest.mark.parametrize("run", RUNS)
def test_the_actors_state_is_what_the_parameters_say(run: str) -> None:
    """The actor's state is computed by hand.

    A rank has P / (TP PP) parameters, and replicated ones, with 2 + 4 bytes, and 12 bytes sharded over the
    ranks with the same parameters (ZeRO 1). A frozen tower has its 2 bytes only. Stages differ. Experts are sharded by EP instead of TP, so that
    they have a different number of copies.
    """
    config = load(run)
    parallel = config.actor.parallel
    model = Path(config.model.path).name
    of_experts = NUM_EXPERT_PARAMETERS.get(model, 0)
    replicated = NUM_REPLICATED_PARAMETERS.get(model, 0)
    frozen = NUM_FROZEN_PARAMETERS.get(model, 0)
    count = (NUM_PARAMETERS[model] - of_experts - replicated - frozen) / (
        parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ) + replicated / parallel.pipeline_parallel_size
    by_hand = count * (2 + 4 + 12 / parallel.num_copies) + 2 * frozen / parallel.pipeline_parallel_size
    copies = parallel.tensor_parallel_size * parallel.num_copies / parallel.expert_parallel_size
    by_hand += (
        of_experts / (parallel.expert_parallel_size * parallel.pipeline_parallel_size) * (2 + 4 + 12 / copies)
    )
    usages = [
        device.phases["update_actor"]["actor"] for device in memory_of(config) if device.pool == "actor"
    ]
    states = [usage.parameters + usage.gradients + usage.optimizer for usage in usages]
    assert sum(states) / len(states) == pytest.approx(by_hand, rel=0.01)
    assert max(states) <= 1.07 * by_hand


@pytest.mark.parametrize("run", FEW_TENSORS)
def test_plan_puts_tensor_parallel_groups_and_engines_inside_a_node(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--plan", path_of(run)]) == 0
    assert f"on {RUNS[run].nodes} x 8 devices" in capsys.readouterr().out
    config = load(run)
    plan = plan_placement(config)

    for role, tensor in (
        ("actor", config.actor.parallel.tensor_parallel_size),
        ("critic", config.critic.parallel.tensor_parallel_size),
    ):
        if role not in plan.roles:
            continue
        places = [(process.node, process.devices) for process in plan.group_of(role).processes]
        for group in zip(*(places[offset::tensor] for offset in range(tensor)), strict=True):
            assert len({node for node, _ in group}) == 1

    engines = plan.group_of("rollout").processes
    assert {len(engine.devices) for engine in engines} == {config.rollout.tensor_parallel_size}
    assert len({(engine.node, engine.devices) for engine in engines}) == config.rollout.num_replicas
    assert all(process.node < RUNS[run].nodes for process in plan.processes)


@pytest.mark.parametrize(
    ("layout", "gib"),
    [
        (["data_parallel_size=2"], "79.0"),  # each expert once, the rest twice
        # everything once
        (["data_parallel_size=1", "pipeline_parallel_size=2", "expert_parallel_size=4"], "77.9"),
    ],
)
def test_experts_of_30_billion_parameters_do_not_train_on_one_node(
    layout: list[str], gib: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """18 bytes for each of 30.5 billion parameters are 64 GiB on each of eight devices.

    The square roots of Adam's moments are 13 GiB more.
    """
    changes = [f"actor.parallel.{each}" for each in layout]
    one_node = ["placement.num_nodes=1", "rollout.num_replicas=2", "actor.micro_batch.max_tokens=9216"]
    assert main(["check", "--fast", path_of("qwen3_30b_a3b_grpo"), *one_node, *changes]) == 2
    assert f"needs {gib}" in capsys.readouterr().err


def test_longer_responses_are_refused_where_an_engine_has_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    """131,072 tokens x 2 x 64 layers x 2 heads x 128 x 2 bytes = 8 GiB.

    The engine has a fifth of 72 GiB, less 15.3 GiB of weights.
    """
    run = "qwen2.5_32b_dapo_16k"
    longer = [
        "data.max_response_length=129024",
        "actor.micro_batch.max_tokens=131072",
        "rollout.sglang.server_args.mem_fraction_static=0.2",
    ]
    assert main(["check", "--fast", path_of(run), *longer]) == 2
    assert "one row of 131,072 tokens needs 8.00" in capsys.readouterr().err


def test_the_page_of_runs_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "launch.md").read_text()
    section = page.partition("\n## Configurations for clusters\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if "| `configs/" in line
    ]
    said = {Path(cells[-1].strip("`")).stem: cells for cells in rows}
    heads = {run: (CONFIGS_DIR.parent / path_of(run)).read_text() for run in RUNS}
    expected = {}
    for run, cluster in RUNS.items():
        memory = heads[run].partition("# Memory, GiB of the fullest device: ")[2].partition(".\n")[0]
        name = f"{run.replace('_', '-')}-{cluster.nodes}x8"
        expected[run] = [name, cluster.strategy, f"{memory} of {cluster.memory_gb}"]
    assert {run: [cells[0], cells[4], cells[5]] for run, cells in said.items()} == expected


def test_a_run_is_predicted_for_a_gpu_that_has_its_memory() -> None:
    names = {run: assumed_profile(load_for_plan(PPOConfig, path_of(run)).config).name for run in RUNS}
    larger = {run: name for run, name in names.items() if not name.startswith("H100 80 GB")}
    assert larger == {
        "glm4.5_grpo": "H200 141 GB SXM",
        "deepseek_v3_671b_grpo": "B300 288 GB SXM",
        "kimi_k2_1t_grpo": "B300 288 GB SXM",
    }
    config = load_for_plan(PPOConfig, path_of("glm4.5_grpo"), ["placement.device_profile=b200"]).config
    assert assumed_profile(config).name.startswith("B200")
