"""Run Hugging Face at its best, as the peer of the GPU benchmarks.

It uses packed rows, flash attention, and logits of response tokens only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

PROMPT_SHARE = 4  # a quarter of each row is its prompt

Step = Callable[[], Tensor | float]  # processes a batch and returns the loss


def prompt_tokens(length: int) -> int:
    return max(1, length // PROMPT_SHARE)


class Packed(NamedTuple):
    """One micro-batch in the form that Hugging Face takes.

    Attributes:
        ids: (1, T).
        positions: (1, T).
        logit_positions: (N,) indices in T whose logits predict `targets`.
        targets: (N,).
    """

    ids: Tensor
    positions: Tensor
    logit_positions: Tensor
    targets: Tensor
    boundaries: Tensor  # (rows + 1,) int32
    longest: int


def pack(batch: Mapping[str, Tensor], rows: Sequence[int], device: torch.device) -> Packed:
    real = [batch["input_ids"][row][batch["attention_mask"][row].bool()] for row in rows]
    lengths = torch.tensor([len(row) for row in real])
    starts = lengths.cumsum(0) - lengths
    logit_positions = torch.cat(
        [
            torch.arange(prompt_tokens(len(row)) - 1, len(row) - 1) + start
            for row, start in zip(real, starts.tolist(), strict=True)
        ]
    )
    ids = torch.cat(real)

    return Packed(
        ids=ids[None].to(device),
        positions=torch.cat([torch.arange(len(row)) for row in real])[None].to(device),
        logit_positions=logit_positions.to(device),
        targets=ids[logit_positions + 1].to(device),
        boundaries=F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32),
        longest=int(lengths.max()),
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Run torch's `varlen_attn` as an attention function of transformers.

    Shapes: (1, heads, T, D), (1, groups, T, D) x 2 -> (1, T, heads, D).
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    heads: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    causal = (-1, 0)
    rows = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    mixed = varlen_attn(query, key, value, *rows, scale=scaling, window_size=causal, **heads)
    assert isinstance(mixed, Tensor), "only the output is supported, without attention weights"

    return mixed[None], None


AttentionInterface.register("torch_varlen", attend)


def flash_attention(device: torch.device, dtype: torch.dtype) -> str:
    """Return transformers' name of the fastest installed attention for packed rows."""
    if device.type == "cpu" or dtype == torch.float32:
        return "sdpa"
    return "flash_attention_2" if is_flash_attn_2_available() else "torch_varlen"


class HuggingFace:
    """A model with random weights, the same in every run."""

    def __init__(
        self, config: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str
    ) -> None:
        torch.manual_seed(0)
        with device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)

    def log_probs(self, packed: Packed) -> Tensor:
        """Return the log-probs (N,) in float32."""
        logits = self.model(
            packed.ids,
            position_ids=packed.positions,
            use_cache=False,
            logits_to_keep=packed.logit_positions,
            cu_seq_lens_q=packed.boundaries,
            cu_seq_lens_k=packed.boundaries,
            max_length_q=packed.longest,
            max_length_k=packed.longest,
        ).logits[0]
        return -F.cross_entropy(logits.float(), packed.targets, reduction="none")

    def trains(self, micro_batches: Sequence[Packed], recomputes: bool) -> Step:
        num_responses = sum(len(packed.targets) for packed in micro_batches)

        def step() -> float:
            self.model.train()
            if recomputes:
                self.model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
            else:
                self.model.gradient_checkpointing_disable()

            total = torch.zeros((), device=self.model.device)
            try:
                for packed in micro_batches:
                    loss = -self.log_probs(packed).sum() / num_responses
                    loss.backward()
                    total += loss.detach()
            finally:
                self.model.zero_grad(set_to_none=True)

            return float(total)

        return step

    def scores(self, micro_batches: Sequence[Packed]) -> Step:
        def step() -> float:
            self.model.eval()
            with torch.no_grad():
                return -float(torch.cat([self.log_probs(packed) for packed in micro_batches]).mean())

        return step
