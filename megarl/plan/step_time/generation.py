"""The time in which engines generate the samples of a step: a decode step's roofline, and its schedule. Pure.

A decode step reads the weights, reads the keys and values of all running sequences, and launches each layer.
Sequences are batched continuously: one that ends frees its slot for the next. The batch shrinks at the end,
while the longest samples finish.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from megarl.config.schema import EngineDType, PPOConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters, num_expert_parameters, num_parameters
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.placement.memory import draft_weights, engine_share, engine_weights, row_cache
from megarl.plan.placement.model_state import weight_bytes
from megarl.plan.step_time.counts import RankGroup, dtype_of
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, collective_s, peak_flops
from megarl.plan.step_time.lengths import Lengths

# Share of a device's memory that an engine takes if the configuration does not say.
_DEFAULT_SHARE = 0.85
# Decode steps between two looks at the batch, as a share of the longest response.
_LOOKS = 256


class DecodeModel(NamedTuple):
    """The costs of a decode step of one engine, per device.

    An engine with several pipeline stages decodes as many micro-batches at a time, one in each stage. A step
    is then a round in which each micro-batch passes all stages. Costs that do not grow with the batch are
    those of a whole round: every stage reads its weights and launches its layers once per micro-batch.

    Attributes:
        dense_s: Seconds to read the weights that every step reads.
        experts_s: Seconds to read all experts, of which a step reads those that its batch selects.
        selected: The share of experts that one token selects; 0 without experts.
        token_s: Seconds of the matrix products of one token.
        context_s: Seconds to read one token of context.
        layers_s: Seconds to launch all layers, and the latency of their collectives.
        message_s: Seconds of the collectives of one token, without latency.
    """

    dense_s: float
    experts_s: float
    selected: float
    token_s: float
    context_s: float
    layers_s: float
    message_s: float
    num_stages: int = 1

    def parts(self, batch: int, context: float) -> tuple[float, float, float, float]:
        """Return the seconds of weights and products, of the context, of launches and of collectives.

        Args:
            batch: The number of running sequences.
            context: The tokens of all of them together.
        """
        # The probability that at least one token of a micro-batch selects an expert.
        rows = -(-batch // self.num_stages)
        hit = 1.0 - (1.0 - self.selected) ** rows if self.selected else 0.0

        # Reading weights and computing overlap, so the longer of the two counts.
        return (
            max(self.dense_s + hit * self.experts_s, rows * self.token_s),
            context * rows / batch * self.context_s,
            self.layers_s,
            rows * self.message_s,
        )


def decode_model(config: PPOConfig, policy: Architecture, device: DeviceProfile) -> DecodeModel:
    """Return the costs of a decode step of the configured engines."""
    base = policy.base
    size = config.rollout.tensor_parallel_size
    num_stages = config.rollout.pipeline_parallel_size
    groups = config.rollout.attention_groups
    bandwidth = device.memory_bytes_s
    element = weight_bytes(config.model.dtype)

    # A token reads one row of the input embedding, unless the output layer is the same matrix.
    # All stages wait for the one with the most layers or weights.
    weights = engine_weights(config, policy) * num_stages
    of_experts = weights * num_expert_parameters(base) / num_parameters(base)
    embedding = 0 if base.tie_word_embeddings else base.vocab_size * base.hidden_size * element / size
    sizes = dimension_sizes(base)
    selected = sizes["e"] / max(sizes["E"], 1)

    # Two all-reduces in each layer sum the parts of attention and of the feed-forward.
    span = RankGroup(size)
    num_layers = base.num_hidden_layers
    message = 2 * num_layers * base.hidden_size * element
    latency_s = collective_s(device, "all_reduce", span, 0.0, 2 * num_layers)
    message_s = collective_s(device, "all_reduce", span, message, 2 * num_layers) - latency_s

    # Between stages, hidden states and the residual are sent.
    sends = num_stages - 1
    states = 2 * sends * base.hidden_size * element
    neighbors = RankGroup(num_stages, size)
    send_latency_s = collective_s(device, "send", neighbors, 0.0, sends)
    message_s += collective_s(device, "send", neighbors, states, sends) - send_latency_s
    latency_s += send_latency_s

    products = 2 * num_active_parameters(base) / size
    return DecodeModel(
        dense_s=(weights - of_experts - embedding) / bandwidth,
        experts_s=of_experts / bandwidth,
        selected=selected,
        token_s=products / (peak_flops(device, engine_dtype(config)) * device.efficiency.gemm),
        context_s=row_cache(config, policy) * num_stages / config.max_row_tokens / bandwidth / groups,
        layers_s=num_layers * device.efficiency.decode_layer_us * 1e-6 + latency_s,
        message_s=message_s,
        num_stages=num_stages,
    )


def engine_dtype(config: PPOConfig) -> str:
    """Return the key of the peak rate of an engine's products."""
    return "fp8" if config.rollout.dtype is EngineDType.fp8 else dtype_of(config)


def num_slots(config: PPOConfig, policy: Architecture, device: DeviceProfile, lengths: Lengths) -> int:
    """Return the number of sequences that an engine runs at once: its limit, or what its cache holds."""
    share = engine_share(config)
    if share is None:
        limit_gb = config.placement.device_memory_gb or device.memory_gb
        share = int(_DEFAULT_SHARE * limit_gb * 2**30)
    of_token = row_cache(config, policy) / config.max_row_tokens
    room = (share - engine_weights(config, policy) - draft_weights(config)) / of_token
    of_groups = config.rollout.attention_groups * int(room / lengths.row)
    return max(1, min(config.rollout.max_concurrency, of_groups))


def generation_time(
    config: PPOConfig, policy: Architecture, device: DeviceProfile, lengths: Lengths, steps_ahead: int = 0
) -> PhaseTime:
    """Return the time in which all engines generate the samples of one step.

    Args:
        steps_ahead: The steps by which generation may run ahead of training. Samples of later steps then
            fill the slots that the longest samples of a step leave, so that the time of
            `steps_ahead + 1` steps is shared by them.
    """
    model = decode_model(config, policy, device)
    rounds = steps_ahead + 1
    replicas = config.rollout.num_replicas
    samples = rounds * -(-config.samples_per_step // replicas)
    slots = num_slots(config, policy, device, lengths)

    # A step waits for the engine that has the longest sample. Generation that runs ahead does not.
    shares = replicas if rounds == 1 else 1
    parts = decode_s(model, lengths.spread(samples, shares), lengths.prompt, slots)
    prompts = rounds * config.prompts_per_step / replicas
    # Several prompts are in the stages at the same time.
    prefill_s = max(1.0, prompts / model.num_stages) * lengths.prompt * model.token_s

    names = ("weights", "context", "launches", "collectives")
    seconds = {name: part / rounds for name, part in zip(names, parts, strict=True)}
    return PhaseTime.of(**seconds, prefill=prefill_s / rounds)


@lru_cache(maxsize=4096)
def decode_s(
    model: DecodeModel, responses: Sequence[int], prompt: int, slots: int
) -> tuple[float, float, float, float]:
    """Return the seconds of each part of the decode steps until all samples are written."""
    waiting = _shuffled(responses)
    look = max(1, max(responses) // _LOOKS)
    running: list[tuple[int, int]] = []  # the decode steps at which samples end and began
    starts = 0  # sum of the steps at which running samples began
    now = 0
    total = [0.0, 0.0, 0.0, 0.0]

    while waiting or running:
        # Free slots are filled at once.
        while waiting and len(running) < slots:
            heapq.heappush(running, (now + waiting.pop(), now))
            starts += now

        # Samples that end within the next few steps end together.
        batch = len(running)
        steps = max(look, running[0][0] - now)
        context = batch * (prompt + now + steps / 2) - starts
        for index, part in enumerate(model.parts(batch, context)):
            total[index] += steps * part
        now += steps
        while running and running[0][0] <= now:
            starts -= heapq.heappop(running)[1]

    return total[0], total[1], total[2], total[3]


def _shuffled(responses: Sequence[int]) -> list[int]:
    """Return the lengths in an order without trend, the same for equal lengths."""
    count = len(responses)
    # A step that has no common divisor with the count visits every index once.
    stride = next(each for each in range(int(count * 0.618) + 1, 2 * count + 2) if gcd(each, count) == 1)
    return [responses[index * stride % count] for index in range(count)]
