"""Layers that carry a state from token to token, for padded and packed rows, in every layout.

A mixer of this kind projects tokens, convolves them within their row, updates and reads the states of its
heads, and projects the result. Gated delta nets and Mamba-2 mixers are two of them. A row begins with an
empty state, so a response that shares a prompt has the prompt's tokens before its own again: only the
projections are computed once.

Shapes: S tokens of a rank, R tokens of all rows, F outputs of the input projection.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.engine.delta_mixing import DeltaRows, delta_rows, equal_rows
from megarl.engine.packed_rows import PackedRows
from megarl.models.architecture import DeltaNet, Mamba


class NamedWeight(torch.nn.Module):
    """A module that has a weight only, so that the weight has the name of Megatron's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


class RecurrentMixer[Sizes: (DeltaNet, Mamba)](torch.nn.Module):
    """A layer that replaces Megatron's attention. Its parameters have the names of Megatron's module.

    A subclass adds the parameters of its heads, and computes `mix`. Args of the constructor are those that
    Megatron passes to attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sizes: Sizes,
        input_layer: Any,
        output_layer: Any,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.tensor_group = pg_collection.tp
        self.context_group = pg_collection.cp
        self.eps = config.layernorm_epsilon

        self.sizes: Sizes = sizes.over(self.tensor_group.size())
        own = self.sizes
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tensor_group,
        }
        self.in_proj = build_module(
            input_layer,
            config.hidden_size,
            sum(sizes.parts),
            init_method=config.init_method,
            gather_output=False,
            **common,
        )
        self.out_proj = build_module(
            output_layer,
            sizes.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **common,
        )

        # All values are loaded from a folder.
        self.conv1d = NamedWeight(self.empty(sum(own.channels), 1, sizes.conv_kernel_dim))
        self.dt_bias = torch.nn.Parameter(self.empty(own.parts[-1]))
        self.A_log = torch.nn.Parameter(self.empty(own.parts[-1]))

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor for a parameter."""
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        return torch.empty(shape, dtype=self.config.params_dtype, device=device)

    def share_out(self, *parameters: torch.nn.Parameter) -> None:
        """Mark the parameters of which a tensor-parallel rank has those of its heads."""
        for parameter in parameters:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each row: (S or S / tp, b, H) -> the same shape. Also returns no bias."""
        projected, _ = self.in_proj(hidden_states)
        length, batch = projected.shape[:2]

        # A padded batch has rows of one length. Padding comes after the tokens of a row.
        if packed_seq_params is None:
            rows = equal_rows(batch, length, projected.device)
            mixed = self.mix(projected.transpose(0, 1).flatten(0, 1), rows)
            mixed = mixed.unflatten(0, (batch, length)).transpose(0, 1)
        else:
            mixed = self._mix_packed(projected[:, 0], packed_seq_params)[:, None]

        output, _ = self.out_proj(mixed.contiguous())
        return output, None

    def _mix_packed(self, projected: Tensor, packed: PackedRows) -> Tensor:
        """Map a rank's tokens (S, F) to (S, values of the rank).

        With context parallelism, ranks exchange tokens for heads, as in Megatron's module.
        """
        ranks = self.context_group.size()
        if ranks > 1:
            parts = projected.split(self.sizes.parts, -1)
            heads = torch.cat(
                [part.unflatten(-1, (ranks, -1)) for part in parts], -1
            )  # (S, ranks, F / ranks)
            projected = all_to_all(self.context_group, heads.transpose(0, 1).contiguous()).flatten(0, 1)

        rows = delta_rows(packed)
        tokens = projected if rows.tokens is None else projected.index_select(0, rows.tokens)
        mixed = self.mix(tokens, rows)
        if rows.own is not None:
            mixed = mixed.index_select(0, rows.own)

        if ranks > 1:
            mixed = all_to_all(self.context_group, mixed.unflatten(0, (ranks, -1)))
            mixed = mixed.transpose(0, 1).flatten(1)
        return mixed

    def mix(self, tokens: Tensor, rows: DeltaRows) -> Tensor:
        """Map the tokens of all rows (R, F) to (R, values), for the heads of this rank."""
        raise NotImplementedError

    def of_context_rank(self, parameter: Tensor, sections: list[int] | None = None) -> Tensor:
        """Return the part of a parameter that belongs to the heads of this context-parallel rank.

        Args:
            sections: The sizes of the sections that a parameter of several kinds of numbers consists of.
        """
        ranks = self.context_group.size()
        rank = self.context_group.rank()
        if sections is None:
            return parameter.unflatten(0, (ranks, -1))[rank]
        return torch.cat([part.unflatten(0, (ranks, -1))[rank] for part in parameter.split(sections)])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters for Megatron's checkpoints. Parts of a projection are separate slices."""
        own = {
            name: parameter
            for name, parameter in self.state_dict(prefix="", keep_vars=True).items()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {name: 0 for name, parameter in own.items() if hasattr(parameter, "tensor_model_parallel")},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

        # The projections describe their own split over the tensor-parallel ranks.
        for name in ("in_proj", "out_proj"):
            described |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tensor_group,
            )

        # A rank has a part of each section, so its rows are not contiguous in the whole tensor.
        every = {"in_proj.weight": self.sizes.parts, "conv1d.weight": self.sizes.channels}
        every |= {"conv1d.bias": self.sizes.channels} if "conv1d.bias" in own else {}
        for name, sections in every.items():
            key = prefix + name
            described[key] = _in_sections(described[key], sections, self.tensor_group.size())
        return described


def _in_sections(entry: ShardedTensor, sections: list[int], ranks: int) -> ShardedTensorFactory:
    """Describe a shard of rows that consists of a part of each section of the whole tensor."""
    axis = entry.prepend_axis_num
    rank = entry.global_offset[axis] // sum(sections)

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        built = []
        whole = 0

        for part in tensor.split(sections):
            # The parts of earlier sections on all ranks come before this section.
            offset = list(entry.global_offset)
            offset[axis] = whole * ranks + rank * len(part)
            built.append(
                ShardedTensor(
                    key=key,
                    data=part,
                    dtype=part.dtype,
                    local_shape=tuple(part.shape),
                    global_shape=entry.global_shape,
                    global_offset=tuple(offset),
                    axis_fragmentations=None,
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
            )
            whole += len(part)

        return built

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    # pyrefly: ignore[bad-argument-type]  # declared for dictionaries only
    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def set_mixer(
    layer: ModuleSpec, mixer: type[RecurrentMixer[Any]], sizes: DeltaNet | Mamba | None, provider: Any
) -> None:
    """Give a layer a mixer instead of attention, with the norm before it where Megatron has it.

    Args:
        provider: Megatron's provider of Transformer Engine's classes, None for local layers.
    """
    inputs: Any = ColumnParallelLinear
    outputs: Any = RowParallelLinear
    if provider is not None:
        inputs = provider.column_parallel_layer_norm_linear()
        outputs = provider.row_parallel_linear()

    modules: Any = layer.submodules
    modules.self_attention = ModuleSpec(
        module=mixer, params={"sizes": sizes, "input_layer": inputs, "output_layer": outputs}
    )

    # Checkpoints name the norm as Transformer Engine does, which has it in the next projection.
    stored = dict(modules.sharded_state_dict_keys_map)
    if stored.pop("input_layernorm.", None) is not None:
        stored["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    modules.sharded_state_dict_keys_map = stored
