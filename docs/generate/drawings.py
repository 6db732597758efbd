"""Draw steps, placements, shards and weight syncs for docs/concepts.md and docs/rollout.md, from a run's plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from docs.generate.svg import FILLS, Drawing
from megarl.config.schema import (
    ActorConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReshardingConfig,
    RolloutConfig,
)
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.models.tensor_table import Weight, weights_of
from megarl.plan.placement.dataflow import Phase, phases_of, waits_for
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.weights.plan import NUM_IPC_BUFFERS
from megarl.weights.shard_layout import Piece, layouts_of, pieces
from megarl.weights.sync.forecast import WeightForecast, forecast_weights

# Four devices train the policy, one trains the critic, and two generate.
_CONFIG = PPOConfig(
    actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)),
    rollout=RolloutConfig(num_replicas=2),
)
_DRIVER = "driver"
_GAP = 24  # between pools


def step() -> str:
    """Draw the phases of a step from left to right. Phases in one column run at the same time."""
    plan = plan_placement(_CONFIG)
    phases = phases_of(plan.roles)
    columns = _columns(plan, phases)
    lanes = ["rollout", "actor", "critic", "reward", _DRIVER]
    lane_of = {phase.name: lanes.index(_lane(plan, phase, lanes)) for phase in phases}
    width = 172
    height = 74
    left = 92
    top = 34
    drawing = Drawing(
        left + width * (max(columns.values()) + 1),
        top + height * len(lanes) + 12,
        "The phases of one step of PPO",
    )
    for number, lane in enumerate(lanes):
        drawing.words(4, top + height * number + 36, {"actor": "actor and ref"}.get(lane, lane), bold=True)
    corners = {
        phase.name: (left + width * columns[phase.name], top + height * lane_of[phase.name])
        for phase in phases
    }

    for name, before in _drawn_waits(phases):
        (x, y), (to_x, to_y) = corners[before], corners[name]
        drawing.arrow(x + width - 22, y + 29, to_x, to_y + 29)

    for phase in phases:
        fill = FILLS[phase.roles[0] if phase.roles else _DRIVER]
        drawing.box(*corners[phase.name], width - 24, 58, fill, phase.name, *_written(phase))

    return str(drawing)


def _lane(plan: PlacementPlan, phase: Phase, lanes: Sequence[str]) -> str:
    """Return the lane of the phase: the first role of the process that works, or the driver."""
    if not phase.roles:
        return _DRIVER
    return next(role for role in plan.group_of(phase.roles[0]).roles if role in lanes)


def _columns(plan: PlacementPlan, phases: Sequence[Phase]) -> dict[str, int]:
    """Place each phase after the phases that it waits for or shares devices with."""
    before = waits_for(phases)
    columns: dict[str, int] = {}

    for phase in phases:
        earlier = [
            other.name
            for other in phases[: phases.index(phase)]
            if other.name in before[phase.name]
            or any(_same_place(plan, one, role) for one in phase.roles for role in other.roles)
        ]
        columns[phase.name] = max((columns[name] + 1 for name in earlier), default=0)

    return columns


def _same_place(plan: PlacementPlan, role: str, other: str) -> bool:
    return plan.group_of(role) is plan.group_of(other) or plan.share_devices(role, other)


def _drawn_waits(phases: Sequence[Phase]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a phase and a phase that it waits for, without transitive dependencies."""
    before = waits_for(phases)
    for phase in phases:
        for name in sorted(before[phase.name]):
            if not any(name in before[other] for other in before[phase.name]):
                yield phase.name, name


def _written(phase: Phase) -> list[str]:
    """Return the batch columns that the phase writes, in lines that fit into a box."""
    keys = sorted(phase.writes)
    return [", ".join(keys)] if len(", ".join(keys)) <= 24 else [f"{key}," for key in keys[:-1]] + [keys[-1]]


def placements() -> str:
    """Draw which role uses which device in each placement strategy."""
    strategies = [each for each in PlacementStrategy if each is not PlacementStrategy.custom]
    plans = [
        plan_placement(replace(_CONFIG, placement=PlacementConfig(strategy=strategy)))
        for strategy in strategies
    ]
    size = 78
    row = 150
    width = max(size * plan.num_devices + _GAP * len(plan.pools) for plan in plans)
    drawing = Drawing(width, row * len(plans), "Four placements of the same roles")

    for number, plan in enumerate(plans):
        top = 20 + row * number
        drawing.words(4, top, f"{plan.strategy.value}: {plan.num_devices} devices", bold=True)
        _draw_pools(drawing, plan, top + 26, size)

    return str(drawing)


def _draw_pools(drawing: Drawing, plan: PlacementPlan, top: float, size: float) -> None:
    left = 8.0
    for pool, num_devices in plan.pools.items():
        groups = [group for group in plan.groups if group.pool == pool and group.uses_devices]
        if not groups:
            continue
        drawing.frame(left, top, size * num_devices, 92, f"pool {pool}")
        first = min(device for group in groups for _, device in group.devices)
        height = 84 / len(groups)
        for turn, group in enumerate(groups):
            for _, device in sorted(group.devices):
                x = left + (device - first) * size + 4
                drawing.box(
                    x,
                    top + 4 + turn * height,
                    size - 8,
                    height - 3,
                    FILLS[group.roles[0]],
                    *_short(group, height),
                )
        left += size * num_devices + _GAP


def _short(group: GroupPlan, height: float) -> list[str]:
    names = {"reference": "ref", "reward_model": "judge"}
    roles = [names.get(role, role) for role in group.roles]
    return roles if height > 16 * len(roles) else ["+".join(roles)]


# Two query groups of two query heads; head_dim is small enough to draw every row.
_MODEL = Architecture(
    model_type="qwen2",
    num_hidden_layers=1,
    hidden_size=8,
    intermediate_size=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=128,
    max_position_embeddings=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
)
_TENSOR_FILLS = (FILLS["actor"], FILLS["rollout"], FILLS["reference"])


def resharding() -> str:
    """Draw where the rows of Hugging Face tensors are in the shards of two tensor-parallel ranks."""
    drawing = Drawing(
        720, 470, "From the shards of two tensor-parallel ranks to the tensors that engines load"
    )
    weights = {weight.megatron_name.split(".layers.0.")[-1]: weight for weight in weights_of(_MODEL, "lm")}
    left = 20

    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        _draw_weight(drawing, weights[name], name, left)
        left += 360

    return str(drawing)


def _draw_weight(drawing: Drawing, weight: Weight, name: str, left: float) -> None:
    """Draw Megatron's shards on the left and the engine's tensors on the right, with one color per tensor."""
    scale = 11.0
    width = 108.0
    drawing.words(left, 18, name, bold=True)
    fills = {tensor.name: fill for tensor, fill in zip(weight.tensors, _TENSOR_FILLS, strict=False)}
    tops = {}
    y = 62.0

    for tensor in weight.tensors:
        tops[tensor.name] = y
        drawing.words(left + 200, y - 6, tensor.name.split(".")[-2])
        y += tensor.shape[0] * scale + 26

    y = 62.0
    for rank, layout in enumerate(layouts_of(_MODEL, ParallelConfig(tensor_parallel_size=2))):
        drawing.words(left, y - 6, f"Megatron, TP rank {rank}")
        rows = 0
        for piece in pieces(weight, layout):
            pairs = zip(_row_spans(piece, "shard"), _row_spans(piece, "hf"), strict=True)
            for (start, stop), (hf_start, hf_stop) in pairs:
                label = f"{piece.hf_name.split('.')[-2].removesuffix('_proj')} {hf_start}-{hf_stop - 1}"
                at = y + start * scale
                hf_at = tops[piece.hf_name] + hf_start * scale
                drawing.box(left, at, width, (stop - start) * scale - 2, fills[piece.hf_name], label)
                drawing.box(
                    left + 200,
                    hf_at,
                    width,
                    (hf_stop - hf_start) * scale - 2,
                    fills[piece.hf_name],
                    f"from rank {rank}",
                )
                drawing.arrow(
                    left + width + 2,
                    at + (stop - start) * scale / 2,
                    left + 197,
                    hf_at + (hf_stop - hf_start) * scale / 2,
                )
                rows = max(rows, stop)
        y += rows * scale + 36


def _row_spans(piece: Piece, side: str) -> list[tuple[int, int]]:
    """Return the [start, stop) row ranges of a slice, whose view splits the rows into two dimensions."""
    view, rectangle = (piece.hf_view, piece.hf) if side == "hf" else (piece.shard_view, piece.shard)
    return [
        (outer * view[1] + rectangle.starts[1], outer * view[1] + rectangle.stops[1])
        for outer in range(rectangle.starts[0], rectangle.stops[0])
    ]


def push() -> str:
    """Draw which trainer rank sends to which engine rank, with shared and with separate devices."""
    drawing = Drawing(
        1010,
        370,
        "A weight sync from two pipeline stages to two engines, with the transports device and group",
    )
    for strategy, left in ((PlacementStrategy.hybrid, 10.0), (PlacementStrategy.split_collocate, 590.0)):
        config = replace(
            _CONFIG,
            actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)),
            rollout=RolloutConfig(num_replicas=2, tensor_parallel_size=2),
            placement=PlacementConfig(strategy=strategy),
            resharding=ReshardingConfig(bucket_mb=0.008),
        )
        model = replace(_MODEL, num_hidden_layers=4, vocab_size=512)
        placement = plan_placement(config)
        forecast = forecast_weights(config, placement, model)
        assert forecast is not None
        share_devices = placement.share_devices("actor", "rollout")
        transport = (
            "device: through buffers of shared memory"
            if share_devices
            else "group: point to point over the network"
        )
        drawing.words(left, 18, f"{transport}, {forecast.plan.num_rounds} rounds", bold=True)
        _draw_push(drawing, config, forecast, model, left, share_devices)

    return str(drawing)


def _draw_push(
    drawing: Drawing,
    config: PPOConfig,
    forecast: WeightForecast,
    model: Architecture,
    left: float,
    share_devices: bool,
) -> None:
    """Draw trainer ranks on the left and engine ranks on the right, with an arrow per transfer schedule.

    If they share devices, a frame shows each device. Transfers of less than a tenth of what an engine rank
    receives are left out: norms, which several trainer ranks hold.
    """
    top = 54.0
    row = 80.0
    height = 46.0
    buffers = left + 290
    engines = left + (390 if share_devices else 270)

    for rank, layout in enumerate(layouts_of(model, config.actor.parallel)):
        y = top + row * rank
        part = f"part {layout.tensor_parallel_rank + 1} of {layout.tensor_parallel_size}"
        drawing.box(
            left + 8,
            y,
            140,
            height,
            FILLS["actor"],
            f"trainer rank {rank}",
            f"layers {layout.layers[0]}-{layout.layers[-1]}, {part}",
        )
        if share_devices:
            drawing.frame(left, y - 8, 540, height + 16, f"device {rank}")
            drawing.box(buffers, y, 64, height, FILLS[_DRIVER], f"{NUM_IPC_BUFFERS} buffers")
            drawing.arrow(buffers + 66, y + height / 2, engines - 2, y + height / 2)

    size = config.rollout.tensor_parallel_size
    for target, nbytes in enumerate(forecast.received):
        share = nbytes / (num_parameters(model) * forecast.element_bytes)
        lines = (f"engine {target // size}, rank {target % size}", f"keeps {share:.0%} of all")
        drawing.box(engines, top + row * target, 140, height, FILLS["rollout"], *lines)

    for (source, target), schedule in sorted(forecast.plan.schedules.items()):
        if schedule.numel > forecast.plan.of_target(target).numel / 10:
            drawing.arrow(
                left + 150,
                top + row * source + height / 2,
                (buffers if share_devices else engines) - 2,
                top + row * target + height / 2,
            )
