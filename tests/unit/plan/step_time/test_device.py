"""Device files: the shipped ones are whole, bad ones are refused with all their problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.machine.errors import ConfigError
from megarl.models.counts import peak_tflops
from megarl.plan.step_time.device import (
    DEVICES_DIR,
    LinkProfile,
    dump_device,
    load_device,
    shipped_devices,
    sourced_keys,
)

DEVICES = ["a100_80gb", "b200", "b300", "cpu", "gb200", "h100_80gb", "h200"]


def written(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def problems_of(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_device(written(folder, text))
    return caught.value.problems


def test_the_shipped_devices() -> None:
    assert shipped_devices() == DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_a_shipped_file_sets_every_value_and_names_its_source(name: str) -> None:
    profile = load_device(name)
    written_keys = (DEVICES_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    expected = [
        key
        for key in sourced_keys(profile)
        # Only an NVLink domain that spans nodes is written.
        if key != "linked_devices" or profile.linked_devices is not None
    ]
    assert sorted(profile.sources) == sorted(expected)
    assert all(f"{key.rpartition('.')[2]}: " in written_keys for key in expected)
    assert all(profile.sources.values())


@pytest.mark.parametrize(
    ("name", "marketing"), [("a100_80gb", "A100"), ("h100_80gb", "H100"), ("h200", "H200"), ("b200", "B200")]
)
def test_peaks_are_those_of_the_utilization_metric(name: str, marketing: str) -> None:
    assert load_device(name).peak_tflops.bfloat16 == peak_tflops(f"NVIDIA {marketing}")


def test_values_of_the_data_sheet() -> None:
    profile = load_device("h100_80gb")
    assert profile.peak_tflops.fp8 == pytest.approx(2 * profile.peak_tflops.bfloat16, rel=1e-3)
    assert (profile.memory_gb_s, profile.within_node.gb_s, profile.between_nodes.gb_s) == (3350, 450, 50)
    assert load_device("a100_80gb").peak_tflops.fp8 is None
    assert (load_device("gb200").devices_per_node, load_device("gb200").linked_devices) == (4, 72)


def test_a_shipped_file_has_a_path_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        load_device("configs/devices/h200.yaml")
        == load_device("h200")
        == load_device(DEVICES_DIR / "h200.yaml")
    )


def test_a_file_of_ones_own_may_change_a_shipped_one(tmp_path: Path) -> None:
    text = (
        "base: configs/devices/h100_80gb.yaml\nbetween_nodes: {gb_s: 25}\nsources: {between_nodes.gb_s: ours}"
    )
    profile = load_device(written(tmp_path, text))
    shipped = load_device("h100_80gb")
    assert profile.between_nodes == LinkProfile(gb_s=25.0, latency_us=14)
    assert profile.within_node == shipped.within_node
    assert profile.sources == shipped.sources | {"between_nodes.gb_s": "ours"}


def test_a_written_file_is_read_back_to_an_equal_profile(tmp_path: Path) -> None:
    profile = replace(load_device("gb200"), name="Mine", sources={"host_gb_s": "measured: 2 copies"})
    dump_device(profile, tmp_path / "mine.yaml")
    assert load_device(tmp_path / "mine.yaml") == profile


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no device called 'h100'; did you mean h200\? known: a100_80gb, b200, b300"
    ):
        load_device("h100")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load_device("none/mine.yaml")


def test_all_problems_are_reported(tmp_path: Path) -> None:
    text = """
name: Mine
memory_gbs: 2
host_gb_s: fast
efficiency: {gemm: 1.5, memry: 0.5}
within_node: 450
sources: {peak_tflops.bf16: a guess}
"""
    problems = "\n".join(problems_of(tmp_path, text))
    assert "memory_gbs: unknown key; did you mean memory_gb" in problems
    assert "host_gb_s: is 'fast', but must be a number" in problems
    assert "efficiency.gemm: is 1.5, but must be in (0, 1]" in problems
    assert "efficiency.memry: unknown key; did you mean efficiency.memory?" in problems
    assert "within_node: is 450, but must be a section with the keys gb_s, latency_us" in problems
    assert "sources: 'peak_tflops.bf16' is no key of a device" in problems


def test_a_name_is_required(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "memory_gb: 80") == ("name: is required; set it in the file or as name=...",)
