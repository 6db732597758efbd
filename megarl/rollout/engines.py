"""Inference engines by kind. A rollout replica builds its engine in its own process.

This module does not import torch, because `megarl check --fast` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megarl.config.schema import RolloutEngineKind
from megarl.rollout.nodes import ONLY_NODE, EngineNode
from megarl.rollout.sglang.user_arguments import refuse_unknown_server_args

if TYPE_CHECKING:
    from megarl.rollout.interface import EnginePart, RolloutEngineSpec


def build_engine(spec: RolloutEngineSpec, node: EngineNode = ONLY_NODE) -> EnginePart:
    """Build an engine, or its part on one of several nodes. Only the first node's serves requests."""
    return ENGINES[spec.rollout.engine](spec, node)


def _hf_engine(spec: RolloutEngineSpec, node: EngineNode) -> EnginePart:
    # Imported here because it imports transformers, which must follow SGLang's environment setup in SGLang's
    # process.
    from megarl.rollout.hf.engine import HFEngine

    return HFEngine(spec)


def _sglang_engine(spec: RolloutEngineSpec, node: EngineNode) -> EnginePart:
    # Imported here because SGLang takes seconds to import and other engines do not need it.
    from megarl.rollout.sglang.engine import SGLangEngine
    from megarl.rollout.sglang.in_process import SGLangEnginePart

    return SGLangEngine(spec, node) if node.rank == 0 else SGLangEnginePart(spec, node)


ENGINES: dict[RolloutEngineKind, Callable[[RolloutEngineSpec, EngineNode], EnginePart]] = {
    RolloutEngineKind.hf: _hf_engine,
    RolloutEngineKind.sglang: _sglang_engine,
}
# Checks for engines with a `server_args` section: raise ConfigError for names that the engine's library does
# not know.
SERVER_ARGS_CHECKS: dict[RolloutEngineKind, Callable[[Mapping[str, object]], None]] = {
    RolloutEngineKind.sglang: refuse_unknown_server_args,
}
