"""The rollout engines there are, and what each needs; `megarl/workers/engines.py` builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.kinds.kind import Kind
from megarl.config.versions import SGLANG


@dataclass(frozen=True, kw_only=True)
class RolloutEngineNeeds:
    """What an engine needs of a machine and of a run.

    section: of `rollout`, with the engine's settings, None where there are none. What stands in its `server_args` is given to the engine's
    library as it is. memory_arg: which of these is the share of a GPU that the engine takes for weights and cache, whatever it needs.
    """

    packages: Mapping[str, str]  # with their versions, beside those that every run needs
    cuts_models: bool  # over several devices: `rollout.tensor_parallel_size` may be above 1
    answers_meanwhile: bool  # every few seconds while a batch is on its way; else it answers when that is done, however long it takes
    section: str | None
    memory_arg: str | None

    @property
    def memory_key(self) -> str | None:
        """The dotted key of that share in a configuration."""
        return None if self.memory_arg is None else f"rollout.{self.section}.server_args.{self.memory_arg}"


class RolloutEngineKind(Kind):
    needs: RolloutEngineNeeds

    # transformers in the worker's process: for tests and tiny models
    hf = "hf", RolloutEngineNeeds(packages={}, cuts_models=False, answers_meanwhile=False, section=None, memory_arg=None)
    # for everything else
    sglang = (
        "sglang",
        RolloutEngineNeeds(packages=SGLANG, cuts_models=True, answers_meanwhile=True, section="sglang", memory_arg="mem_fraction_static"),
    )
