"""Inference engines by kind. A rollout replica builds its engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megarl.config.schema import RolloutEngineKind
from megarl.rollout.interface import RolloutEngine, RolloutEngineSpec


def build_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    return ENGINES[spec.rollout.engine](spec)


def _hf_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Imported here because it imports transformers, which must follow SGLang's environment setup in SGLang's
    # process.
    from megarl.rollout.hf.engine import HFEngine

    return HFEngine(spec)


def _sglang_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Imported here because SGLang takes seconds to import and other engines do not need it.
    from megarl.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(spec)


def _refuse_unknown_sglang_args(names: Collection[str]) -> None:
    from megarl.rollout.sglang.server_args import refuse_unknown_server_args

    refuse_unknown_server_args(names)


ENGINES: dict[RolloutEngineKind, Callable[[RolloutEngineSpec], RolloutEngine]] = {
    RolloutEngineKind.hf: _hf_engine,
    RolloutEngineKind.sglang: _sglang_engine,
}
# Checks for engines with a `server_args` section: raise ConfigError for names that the engine's library does
# not know.
SERVER_ARGS_CHECKS: dict[RolloutEngineKind, Callable[[Collection[str]], None]] = {
    RolloutEngineKind.sglang: _refuse_unknown_sglang_args,
}
