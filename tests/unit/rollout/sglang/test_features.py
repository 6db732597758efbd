"""Test that differences between SGLang's versions are detected, not assumed."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from megarl.rollout.sglang.features import Features, field_names


def test_records_are_dataclasses_or_structs() -> None:
    @dataclass
    class Older:
        mode: str
        selector: str = "all"

    class Newer(msgspec.Struct):
        mode: str
        selector: str = "all"

    assert field_names(Older) == field_names(Newer) == ["mode", "selector"]


def test_a_payload_holds_only_what_this_version_takes() -> None:
    features = Features("0.5.17", {"continue_generation": []})
    assert features.payload("continue_generation", torch_empty_cache=False) == {}
    assert features.has("continue_generation")
    assert not features.has("begin_weight_update")
