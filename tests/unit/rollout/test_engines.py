"""Test that every kind of engine that a configuration can name can be built and has what it declares."""

from __future__ import annotations

from importlib import metadata

import pytest

from megarl.config.schema import RolloutConfig, RolloutEngineKind
from megarl.rollout.engines import ENGINES, SERVER_ARGS_CHECKS


def test_every_kind_has_an_engine() -> None:
    assert set(ENGINES) == set(RolloutEngineKind)
    assert set(SERVER_ARGS_CHECKS) == {kind for kind in RolloutEngineKind if kind.needs.section is not None}


@pytest.mark.parametrize("kind", RolloutEngineKind)
def test_what_an_engine_declares_is_there(kind: RolloutEngineKind) -> None:
    assert all(metadata.version(package) for package in kind.needs.packages)
    settings = RolloutConfig(engine=kind).settings_of(kind)
    assert (settings is None) == (kind.needs.section is None)
    assert settings is None or settings.server_args == {}
    assert (kind.needs.memory_key is None) == (kind.needs.memory_arg is None)

    if kind.needs.memory_arg is not None:
        assert settings is not None
        settings.server_args[kind.needs.memory_arg] = 0.7
        assert RolloutConfig(engine=kind, **{kind.needs.section: settings}).memory_share_of(kind) == 0.7  # type: ignore[arg-type]
