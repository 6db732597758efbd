"""Which inference engine a rollout replica runs, built in the replica's own process."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megarl.config.schema import RolloutEngineKind
from megarl.rollout.interface import RolloutEngine, RolloutEngineSpec


def build_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    return ENGINES[spec.rollout.engine](spec)


def _hf_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Here, because it imports transformers, which in SGLang's process SGLang's environment must come before.
    from megarl.rollout.hf.engine import HFEngine

    return HFEngine(spec)


def _sglang_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Here, because a run with another engine does without SGLang, and it takes seconds to import.
    from megarl.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(spec)


def _refuse_unknown_sglang_args(names: Collection[str]) -> None:
    from megarl.rollout.sglang.server_args import refuse_unknown_server_args

    refuse_unknown_server_args(names)


ENGINES: dict[RolloutEngineKind, Callable[[RolloutEngineSpec], RolloutEngine]] = {
    RolloutEngineKind.hf: _hf_engine,
    RolloutEngineKind.sglang: _sglang_engine,
}
# Of those that have a section: raises ConfigError for names in its `server_args` that the engine's library
# does not know.
SERVER_ARGS_CHECKS: dict[RolloutEngineKind, Callable[[Collection[str]], None]] = {
    RolloutEngineKind.sglang: _refuse_unknown_sglang_args,
}
