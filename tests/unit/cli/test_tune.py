"""`megarl tune`: its tables and files, cluster sizes, and options that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.plan.step_time.device import load_device
from tests.unit.cli.test_shipped_configs import ROOT
from tests.unit.plan.step_time.test_measured_run import TRUTH, write_run

RUN = "configs/qwen2.5_7b_grpo.yaml"
# Most of the space is pinned, so that a search takes a second.
PINS = [
    *("--pin", "actor.micro_batch", "--pin", "reference", "--pin", "actor.parallel.context_parallel_size"),
    *("--pin", "rollout.max_concurrency", "--pin", "rollout.sglang.server_args.mem_fraction_static"),
]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_best_configuration_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("tuned.yaml", "results.json", "step.svg")}
    arguments = [*PINS, "--top", "2", "--lengths", "200,1000", "data.max_prompt_length=768"]
    outputs = [
        *("--output", str(files["tuned.yaml"]), "--json", str(files["results.json"])),
        *("--plot", str(files["step.svg"])),
    ]
    assert main(["tune", RUN, *arguments, *outputs]) == 0
    out = capsys.readouterr().out
    assert "Fastest predicted configurations on 1 x 8 devices" in out
    assert "Considered and left out" in out
    assert "prompts of 200 and responses of 1,000 tokens on average" in out

    # Both results, and the phase in which the second one loses
    first, second = json.loads(files["results.json"].read_text())["results"]
    assert first["step_s"] < second["step_s"]
    assert first["step_s"] == pytest.approx(
        sum(phase["seconds"] for phase in first["phases"].values()), rel=0.2
    )
    row = next(line for line in out.splitlines() if line.strip().startswith("2 "))
    assert " s (" in row

    # The file inherits the shipped one, and keeps the override of the command line.
    written = yaml.safe_load(files["tuned.yaml"].read_text())
    assert written["base"] == RUN
    assert written["data"] == {"max_prompt_length": 768}
    config = load_config(PPOConfig, files["tuned.yaml"])
    assert config.data.max_prompt_length == 768
    assert config.actor.micro_batch == load_config(PPOConfig, RUN).actor.micro_batch
    for key, value in first["overrides"].items():
        section = written
        for name in key.split("."):
            section = section[name]
        assert section == value
    assert main(["check", "--fast", str(files["tuned.yaml"])]) == 0
    assert main(["check", "--plan", str(files["tuned.yaml"])]) == 0
    assert "update_actor" in files["step.svg"].read_text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"actor": {"parallel": {"tensor_parallel_size": 3}}}, "actor.parallel.tensor_parallel_size: "),
        ({"actor": {"parallel": {"data_parallel_size": 64}}}, "use devices_per_node 128 or more"),
        ({"placement": {"device_memory_gb": 30}}, " GiB"),
    ],
    ids=["a rule", "devices", "memory"],
)
def test_what_is_wrong_with_the_configured_run_is_said(
    changes: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"base": RUN, **changes}))
    pins = [pin for pin in PINS if "server_args" not in pin and pin != "--pin"]
    arguments = [argument for pin in pins for argument in ("--pin", pin)]
    assert main(["tune", str(file), *arguments, "--top", "1"]) == 0
    (said,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("as configured, the run is not valid on these devices: ")
    ]
    assert why in said


def test_clusters_are_compared_by_size_and_staleness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = tmp_path / "sizes.svg"
    arguments = ["algorithm=async_grpo", "--pin", "actor.recompute", "--plot", str(drawing), *PINS]
    assert main(["tune", RUN, *arguments, "--devices", "8,16", "--max-staleness", "1"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if line.strip()[:2] in ("8 ", "16")]
    assert [(devices, staleness) for devices, staleness, _ in rows] == [
        ("8", "0"),
        ("8", "1"),
        ("16", "0"),
        ("16", "1"),
    ]
    # Twice the devices take more than half of the time.
    one_node, _, two_nodes, _ = (float(seconds) for _, _, seconds in rows)
    assert 0.5 * one_node < two_nodes < one_node
    assert "max_staleness 1" in drawing.read_text()
    assert "placement.num_nodes=2" in out.splitlines()[-1]

    # One node has more tokens per second and device.
    assert main(["tune", RUN, *PINS, "--devices", "8,16", "--objective", "tokens_per_gpu"]) == 0
    assert "placement.num_nodes" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "500"], "--lengths 500: must be PROMPT,RESPONSE in mean tokens"),
        (["--lengths", "5,9000"], "9000"),
        (["--top", "0"], "--top 0: must be at least 1"),
        (["--max-staleness", "-1"], "--max-staleness -1: must be at least 0"),
        (["--devices", "12"], "whole nodes of 8"),
        (["--devices", "8,x"], "--devices 8,x: must be numbers of devices"),
        (["--plot", "step.txt"], "--plot step.txt: the file name must end in .svg or .png"),
        (["--device", "h900"], "h900"),
        (["--pin", "actor.optim.lr"], "--pin actor.optim.lr: the search does not choose this key"),
        (["rollout.temperature=0"], "is 0 (greedy)"),
        (["no.such=1"], "no"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", RUN, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_device_is_fitted_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "qwen2.5_7b_grpo", TRUTH)
    fitted = tmp_path / "fitted.yaml"
    options = ["--from-run", str(tmp_path), "--device-output", str(fitted), "--top", "1"]
    assert main(["tune", RUN, *PINS, *options]) == 0
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["update_actor"])
    measured, before, after = (float(each.replace(",", "")) for each in row[1:4])
    assert before < 0.8 * measured
    assert after == pytest.approx(measured, rel=0.05)
    assert load_device(fitted).efficiency.gemm == pytest.approx(TRUTH.efficiency.gemm, rel=0.1)


@pytest.mark.parametrize(
    ("device", "given", "nodes", "budget", "changed"),
    [
        ("h200", [], "1 x 8", "126.4", {"device_memory_gb": 126.4, "device_profile": "h200"}),
        # The command line takes precedence, in whatever way it is written.
        ("h200", ["placement.device_memory_gb=60"], "1 x 8", "60", {"device_profile": "h200"}),
        ("h200", ["placement={device_memory_gb: 60}"], "1 x 8", "60", {"device_profile": "h200"}),
        # A node of this device has four, whatever the file has.
        (
            "gb200",
            ["placement.num_nodes=2"],
            "2 x 4",
            "166.5",
            {"devices_per_node": 4, "device_memory_gb": 166.5, "device_profile": "gb200"},
        ),
        # A plan with a part of each node stays.
        (
            "b200",
            ["placement.devices_per_node=4"],
            "1 x 4",
            "161.2",
            {"device_memory_gb": 161.2, "device_profile": "b200"},
        ),
        # The budget belongs to the device that the run names.
        ("h100_80gb", ["placement.device_profile=h100_80gb"], "1 x 8", "72", {}),
    ],
)
def test_a_named_device_brings_its_memory_and_its_nodes(
    device: str,
    given: list[str],
    nodes: str,
    budget: str,
    changed: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results.json"
    options = ["--top", "1", "--device", device, "--json", str(results)]
    assert main(["tune", RUN, *PINS, *given, *options]) == 0
    out = capsys.readouterr().out
    assert f"configurations on {nodes} devices" in out
    assert f"assuming {load_device(device).name} with {budget} GiB for the plan" in " ".join(out.split())

    overrides = json.loads(results.read_text())["results"][0]["overrides"]
    keys = ("devices_per_node", "device_memory_gb", "device_profile")
    assert {key: overrides[f"placement.{key}"] for key in keys if f"placement.{key}" in overrides} == changed


def test_supervised_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "configs/quickstart_sft.yaml"]) == 2
    assert "supervised fine-tuning is not searched" in capsys.readouterr().err
