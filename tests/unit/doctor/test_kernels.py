"""`megarl doctor` reports kernels that the run selects and that are not installed."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from unittest import mock

import pytest

from megarl.config.finding import Status
from megarl.config.schema import (
    CPCommType,
    Device,
    DType,
    EngineConfig,
    FlashAttention,
    ModelConfig,
    PPOConfig,
)
from megarl.doctor import software
from megarl.doctor.run_inputs import ExaminedRun
from tests.families import example_architecture


def subject(engine: EngineConfig, device: Device) -> ExaminedRun:
    return ExaminedRun(
        config=PPOConfig(model=ModelConfig(path="model", dtype=DType.bfloat16), engine=engine, device=device)
    )


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (EngineConfig(flash_attention=FlashAttention.fa3), "flash-attn-3"),
        (EngineConfig(flash_attention=FlashAttention.fa4), "flash-attn-4"),
        (EngineConfig(cp_comm_type=CPCommType.p2p), "engine.cp_comm_type=p2p"),
    ],
)
def test_kernels_that_are_not_installed(engine: EngineConfig, named: str) -> None:
    with (
        mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError),
        mock.patch.object(software, "has_transformer_engine", return_value=False),
    ):
        (found,) = software.layers(subject(engine, Device.cuda))
        (other,) = software.layers(subject(EngineConfig(), Device.cuda))
    assert found.status is Status.error
    assert named in found.message
    assert found.hint
    assert other.status is Status.ok


@pytest.mark.parametrize(
    ("family", "device", "installed", "is_said"),
    [
        ("qwen3_next", Device.cuda, False, True),
        ("qwen3_5_moe", Device.cuda, False, True),
        ("qwen3_next", Device.cuda, True, False),
        ("qwen3_next", Device.cpu, False, False),
        ("qwen3", Device.cuda, False, False),
        ("nemotron_h", Device.cuda, False, True),
        ("nemotron_h", Device.cuda, True, False),
    ],
)
def test_recurrences_without_their_kernels(
    family: str, device: Device, installed: bool, is_said: bool
) -> None:
    run = replace(subject(EngineConfig(), device), architectures={"actor": example_architecture(family)})
    kernels = ("fla", "mamba_ssm", "causal_conv1d")
    packages = {name: ModuleSpec(name, None) for name in kernels} if installed else {}
    with (
        mock.patch.object(software, "find_spec", packages.get),
        mock.patch.object(software, "has_transformer_engine", return_value=False),
    ):
        found = list(software.layers(run))
    missing = "mamba-ssm and causal-conv1d are" if family == "nemotron_h" else "flash-linear-attention is"
    said = [each for each in found if f"{missing} not installed" in each.message]
    assert len(said) == is_said
    assert all(each.status is Status.warning for each in said)
    assert found[-1].status is Status.ok
