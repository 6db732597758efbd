"""Which inference engine a rollout replica runs, built in the replica's own process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.config.schema import Device, DType, RolloutConfig, RolloutEngineKind
from megarl.rollout.interface import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class RolloutEngineSpec:
    """path: the policy's folder. with_min_new_tokens: requests may ask for a minimum. release_memory: it takes turns with others."""

    path: str
    dtype: DType
    device: Device
    rollout: RolloutConfig
    trust_remote_code: bool = False
    with_min_new_tokens: bool = False
    release_memory: bool = False


def build_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    return ENGINES[spec.rollout.engine](spec)


def _hf_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Here, because it imports transformers, which in SGLang's process SGLang's environment must come before.
    from megarl.rollout.hf.engine import HFEngine

    return HFEngine(
        spec.path,
        dtype=getattr(torch, spec.dtype.value),
        device=_torch_device(spec.device),
        max_concurrency=spec.rollout.max_concurrency,
        trust_remote_code=spec.trust_remote_code,
    )


def _sglang_engine(spec: RolloutEngineSpec) -> RolloutEngine:
    # Here, because a run with another engine does without SGLang, and it takes seconds to import.
    from megarl.rollout.sglang.engine import SGLangEngine
    from megarl.rollout.sglang.spec import SGLangSpec

    rollout = spec.rollout
    return SGLangEngine(
        SGLangSpec(
            path=Path(spec.path),
            dtype=getattr(torch, spec.dtype.value),
            device=_torch_device(spec.device),
            tensor_parallel_size=rollout.tensor_parallel_size,
            max_concurrency=rollout.max_concurrency,
            mode=rollout.sglang.mode,
            deterministic=rollout.sglang.deterministic,
            server_args=rollout.sglang.server_args,
            trust_remote_code=spec.trust_remote_code,
            with_tokenizer=spec.with_min_new_tokens,
            release_memory=spec.release_memory,
            health_limit_s=rollout.health_limit_s,
        )
    )


def _refuse_unknown_sglang_args(names: Collection[str]) -> None:
    from megarl.rollout.sglang.server_args import refuse_unknown_server_args

    refuse_unknown_server_args(names)


ENGINES: dict[RolloutEngineKind, Callable[[RolloutEngineSpec], RolloutEngine]] = {
    RolloutEngineKind.hf: _hf_engine,
    RolloutEngineKind.sglang: _sglang_engine,
}
# Of those that have a section: raises ConfigError for names in its `server_args` that the engine's library does not know.
SERVER_ARGS_CHECKS: dict[RolloutEngineKind, Callable[[Collection[str]], None]] = {
    RolloutEngineKind.sglang: _refuse_unknown_sglang_args,
}


def _torch_device(device: Device) -> torch.device:
    cuda = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")
