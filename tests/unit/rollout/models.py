"""Tiny models in Hugging Face folders, and their weights as the parcels a trainer sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngine, RolloutEngineSpec
from megarl.weights.bucket import ChunkMeta, Parcel
from megarl.weights.receipt import Manifest, TensorChunk, TensorMeta
from megarl.weights.shared_memory import Segment

VOCAB = 97


def random_model(
    family: str = "qwen2",
    *,
    tied: bool = False,
    seed: int = 0,
    eos_token_id: int | None = None,
    vocab_size: int = VOCAB,
    hidden_size: int = 32,
) -> PreTrainedModel:
    """Logits spread over a few units, so that temperature and truncation make a difference."""
    shared = dict(
        num_hidden_layers=2,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    kinds = {"qwen2": Qwen2Config(**shared), "qwen3": Qwen3Config(**shared, head_dim=16), "llama": LlamaConfig(**shared)}
    model = AutoModelForCausalLM.from_config(kinds[family], dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + ("norm" in name))
    return model.eval()


def manifest_of(model: PreTrainedModel) -> Manifest:
    return {name: TensorMeta(tuple(parameter.shape), parameter.dtype) for name, parameter in model.named_parameters()}


def chunks_of(model: PreTrainedModel, chunk_elements: int = 1000) -> list[TensorChunk]:
    """Last tensor first: order must not matter."""
    flat = [(name, parameter.detach().reshape(-1)) for name, parameter in model.named_parameters()]
    return [
        TensorChunk(name, start, data[start : start + chunk_elements])
        for name, data in reversed(flat)
        for start in range(0, len(data), chunk_elements)
    ]


@contextmanager
def parcels_of(chunks: Sequence[TensorChunk], chunks_per_parcel: int = 3) -> Iterator[list[Parcel]]:
    """The chunks in memory of this process, which is given back at the end of the block."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(_parcel(chunks[start : start + chunks_per_parcel])) for start in range(0, len(chunks), chunks_per_parcel)
        ]


@contextmanager
def _parcel(chunks: Sequence[TensorChunk]) -> Iterator[Parcel]:
    flat = torch.cat([chunk.data for chunk in chunks])
    segment = Segment.create(flat.nbytes, flat.device)
    try:
        segment.tensor(flat.dtype, flat.numel()).copy_(flat)
        yield Parcel(tuple(ChunkMeta(chunk.name, chunk.offset, chunk.data.numel()) for chunk in chunks), flat.dtype, segment.handle)
    finally:
        segment.close()


def push(model: PreTrainedModel, engine: RolloutEngine, version: int = 1) -> None:
    """In some hundred parcels at most: each is an open file."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    engine.begin_weight_update(manifest_of(model))
    with parcels_of(chunks_of(model, max(1000, elements // 300))) as parcels:
        engine.load_weights(parcels)
    engine.end_weight_update(version)


def engine_for(model: PreTrainedModel, folder: Path, max_concurrency: int = 64, dtype: torch.dtype = torch.float32) -> HFEngine:
    """An engine without weights, from a folder that holds none either."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    policy = ModelConfig(path=str(folder), dtype=DType(str(dtype).removeprefix("torch.")))
    return HFEngine(RolloutEngineSpec(model=policy, rollout=RolloutConfig(max_concurrency=max_concurrency), device=Device.cpu))
