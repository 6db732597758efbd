"""The pipeline stages of an engine: the layers and other parameters that SGLang places on each. Pure."""

from __future__ import annotations

from functools import lru_cache

from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters, rank_parameters
from megarl.models.families import FAMILIES
from megarl.models.family import SGLangStages

# A pipeline stage of an engine: the global numbers of its layers; whether it has the embedding; whether it
# has the last norm; and whether it has an output layer, which only the last stage uses.
EngineStage = tuple[range, bool, bool, bool]


def engine_stages(architecture: Architecture, num_stages: int) -> tuple[EngineStage, ...]:
    """Return the stages, in the order of the forward pass.

    If the layers do not divide evenly, the last stages have one more each
    (`sglang.srt.distributed.utils.get_pp_indices`).

    Args:
        architecture: A model whose family has `sglang_stages`, or of any family for one stage.
        num_stages: At most the number of layers.
    """
    each, larger = divmod(architecture.num_hidden_layers, num_stages)
    on_every = FAMILIES[architecture.model_type].sglang_stages is SGLangStages.head_on_every
    stages = []
    first = 0
    for number in range(num_stages):
        stop = first + each + (number >= num_stages - larger)
        is_last = number == num_stages - 1
        stages.append((range(first, stop), number == 0, is_last, is_last or on_every))
        first = stop
    return tuple(stages)


@lru_cache(maxsize=64)
def stage_shares(architecture: Architecture, num_stages: int) -> tuple[float, ...]:
    """Return the parameters of each stage, relative to those of the model.

    A tied embedding counts on the first stage and on the last.
    """
    if num_stages == 1:
        return (1.0,)
    head = architecture.vocab_size * architecture.hidden_size
    shares = []
    for layers, is_first, is_last, has_head in engine_stages(architecture, num_stages):
        held = rank_parameters(
            architecture,
            layers=tuple(layers),
            is_first_stage=is_first,
            is_last_stage=is_last,
            tensor_parallel_size=1,
            expert_parallel_size=1,
            expert_tensor_parallel_size=1,
        ).total
        held += head * (has_head and not is_last)
        shares.append(held / num_parameters(architecture))
    return tuple(shares)
